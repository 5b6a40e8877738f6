"""The steps of a trace are AdamW's with the settings that stand beside them: by its formula, written out here."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import mistake, refusal
from support.oracle import assert_same

import gpt2
from gpt2.traces.arrays import require_room
from gpt2.traces.batch import TokenRows

IDS = np.random.default_rng(0).integers(0, 300, (2, 6))


def by_hand(
    name: str, count: int, *, lr: float, betas: tuple[float, float], decay: float, clip: float
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the last parameters of decoupled AdamW (Loshchilov and Hutter, algorithm 2), eps 1e-8."""
    module = gpt2.load(name).double()
    weights = dict(module.named_parameters())
    first, second = ({key: torch.zeros_like(p) for key, p in weights.items()} for _ in range(2))
    losses = []
    for t in range(1, count + 2):
        logs = module(torch.from_numpy(IDS)).log_softmax(-1)
        loss = -logs[:, :-1].gather(-1, torch.from_numpy(IDS[:, 1:, None])).mean()
        losses.append(loss.item())
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        factor = min(1.0, clip / norm) if clip else 1.0
        for key, p in weights.items() if t <= count else ():
            g = gradients[key] * factor
            first[key] = betas[0] * first[key] + (1 - betas[0]) * g
            second[key] = betas[1] * second[key] + (1 - betas[1]) * g * g
            direction = first[key] / (1 - betas[0] ** t) / ((second[key] / (1 - betas[1] ** t)).sqrt() + 1e-8)
            with torch.no_grad():
                p -= lr * (direction + (decay if p.ndim == 2 else 0.0) * p)
    return losses, {key: p.detach() for key, p in weights.items()}


def assert_steps(traced: gpt2.Trace, losses: list[float], weights: dict[str, torch.Tensor], count: int) -> None:
    """A key's bias has no gradient but rounding, which AdamW turns into a whole step: there only the size is held."""
    assert traced.arrays["losses"].tolist() == pytest.approx(losses, rel=1e-7)
    width = len(weights["ln_f.bias"])
    for name, wanted in weights.items():
        found = traced.arrays[f"step{count}.{name}"].clone()
        if name.endswith("c_attn.bias"):
            found[width : 2 * width] = wanted[width : 2 * width]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_by_default_they_are_a_recipe_s(model: str) -> None:
    """A rate, a decay or a clipping other than what is said: every right training step would be called wrong."""
    traced = gpt2.trace(model, ids=IDS, steps=2, dtype="float64")
    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "decay": 0.1, "clip": 1.0}
    assert_steps(traced, *by_hand(model, 2, **settings), 2)
    recipe = {"optim.lr": 1e-3, "optim.beta1": 0.9, "optim.beta2": 0.99, "optim.weight_decay": 0.1, "optim.clip": 1.0}
    assert recipe.items() <= traced.about["settings"].items()
    assert_same(traced.arrays["losses"][0], traced.arrays["loss"])
    with pytest.raises(AssertionError):  # the control
        assert_steps(traced, *by_hand(model, 2, **settings | {"decay": 0.0}), 2)


def test_settings_change_them(model: str) -> None:
    """A setting that is taken and not used."""
    given = {"optim.lr": 3e-4, "optim.beta1": "0.8", "optim.beta2": 0.95, "optim.weight_decay": 0, "optim.clip": 0}
    traced = gpt2.trace(model, ids=IDS, steps=2, settings=given, dtype="float64", gradients=True)
    assert_steps(traced, *by_hand(model, 2, lr=3e-4, betas=(0.8, 0.95), decay=0.0, clip=0.0), 2)
    unclipped = gpt2.trace(model, ids=IDS, gradients=True, dtype="float64")
    assert torch.equal(traced.arrays["grad.wte.weight"], unclipped.arrays["grad.wte.weight"])
    names = [f"step1.{name}" for name in gpt2.load(model).state_dict()]
    assert [name for name in traced.arrays if name.startswith("step1.")] == names


def test_mistakes_in_steps(model: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A setting that nobody reads is a step other than was asked for."""
    said = {
        "t.npz --steps 1 --set lr": "--set lr: write key=value",
        "t.npz --steps 1 --set lr=1": "unknown setting 'lr'",
        "t.npz --steps 1 --set optim.lr=-1": "optim.lr is -1.0",
        "t.npz --set optim.lr=1": "none are asked for",
        "t.npz --steps -1": "steps is -1",
        "t.bin --steps 1": "holds no training steps",
    }
    for words, says in said.items():
        out, *rest = words.split()
        assert says in mistake(capsys, "trace", model, "--out", str(tmp_path / out), *rest)
    assert not list(tmp_path.iterdir())


def test_what_memory_cannot_hold_is_refused_before_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends a process that takes too much, without a word."""
    batch = TokenRows(*[torch.zeros(4, 64, dtype=torch.int64)] * 2, "")
    config = gpt2.GPT2Config()
    monkeypatch.setattr("gpt2.errors.machine_memory", lambda: 4e9)
    require_room(config, batch, 0, 4, trains=False)
    assert "4 x 64 tokens need about" in refusal(require_room, config, batch, 1, 4, trains=True)
