"""The tenth set of programs, by an author who did not know the engine: right but for their faults, at each value they show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.programs import tenth

import gpt2

WITHOUT = ("mean", "rstd", "causal", "position", "positions", "token")  # what our model does not show
MODULES = {  # a block's modules: the names of what they return, and of what they are given
    "ln_1": ("ln_1", None),
    "attn.c_attn": ("qkv", None),
    "attn.c_proj": ("attended", "mixed"),
    "ln_2": ("ln_2", "middle"),
    "mlp.c_fc": ("up", None),
    "mlp.c_proj": ("fed", "act"),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", tenth.FAULTS)
def test_each_program_of_the_tenth_set_is_right_but_for_its_faults(program: str, tmp_path: Path) -> None:
    """A mistake in a program, or a switch that does nothing, would be counted as the engine's."""
    if reason := tenth.missing(program):
        pytest.skip(f"this program was not run: {reason}")
    bed = tenth.TenthBed(tmp_path / "bed", tenth.SHAPES[0])
    ids, right = bed.run(program)
    truth, compared = values(bed, np.atleast_2d(ids)), set()
    for name, value in right.items():
        part = name.partition(" ")[2]
        if part in WITHOUT:
            continue
        own, expected = value if ids.ndim == 2 else value[None], truth[name]
        if program == "kvcache" and part in ("scores", "weights"):
            own = own.swapaxes(1, 2)  # (B, T, H, T)
        if program != "modules" and part in ("q", "k", "v"):
            expected = expected.swapaxes(1, 2).reshape(own.shape)  # (B, T, D)
        if part in ("scores", "weights"):
            own, expected = np.tril(own), np.tril(expected)
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-12 * np.abs(expected).max(), err_msg=name)
        compared.add(name)
    assert compared == set(truth)
    size = np.linalg.norm(right["logits"])
    for fault in tenth.FAULTS[program]:
        wrong = bed.run(program, [fault], "float32")[1]["logits"]
        assert np.isfinite(wrong).all(), fault
        assert wrong.shape != right["logits"].shape or np.linalg.norm(wrong - right["logits"]) > 1e-3 * size, fault


@torch.no_grad()
def values(bed: tenth.TenthBed, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Our own model's values in float64, batch first, by the names of the programs."""
    model, kept = gpt2.load(str(bed.model)).double().eval(), {}

    def keep(module: torch.nn.Module, after: str | None, before: str | None) -> None:
        def hook(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            kept.update({name: value.numpy() for name, value in ((before, inputs[0]), (after, output)) if name})

        module.register_forward_hook(hook)

    keep(model.h[0], None, "x embedded")
    keep(model.ln_f, "x final", None)
    for n, block in enumerate(model.h):
        keep(block, f"{n} result", None)
        for name, (after, before) in MODULES.items():
            keep(block.get_submodule(name), f"{n} {after}", before and f"{n} {before}")
    kept["logits"] = model(torch.from_numpy(ids)).numpy()
    for n in range(len(model.h)):
        thirds = np.split(kept[f"{n} qkv"], 3, axis=-1)
        q, k, v = (third.reshape(*ids.shape, bed.shape.heads, -1).swapaxes(1, 2) for third in thirds)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        raised = np.exp(scores) * np.tri(ids.shape[1])
        kept |= {f"{n} q": q, f"{n} k": k, f"{n} v": v, f"{n} scores": scores}
        kept[f"{n} weights"] = raised / raised.sum(-1, keepdims=True)
    return kept
