"""How a set's programs are checked: right but for their faults, at each value they show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

import gpt2

from .bed import Bed

MODULES = {  # a block's modules: the names of what they return, and of what they are given
    "ln_1": ("ln_1", None),
    "attn.c_attn": ("qkv", None),
    "attn.c_proj": ("attended", "mixed"),
    "ln_2": ("ln_2", "middle"),
    "mlp.c_fc": ("up", None),
    "mlp.c_proj": ("fed", "act"),
}


@dataclass(frozen=True)
class Dump:
    """How a program shows its values: its own names of ours, what our model does not show, and the order of axes."""

    names: Mapping[str, str] = field(default_factory=dict)  # a program's name of a part: ours
    without: tuple[str, ...] = ()  # parts that our model does not show
    absent: tuple[str, ...] = ()  # parts of ours that the program does not show
    heads_in_width: bool = True  # q, k and v are (B, T, D), not (B, H, T, d)
    least: float = 1e-3  # what each fault changes of the logits, over their norm
    tokens_first: bool = False  # all but the logits begin with (T, B) or (H, B), not (B, T) or (B, H)


def check(bed: Bed, program: str, faults: Iterable[str], dump: Dump) -> None:
    """Raise unless ``program`` is right at each value it shows, and each of ``faults`` changes its logits by ``dump.least``."""
    ids, right = bed.run(program)
    truth, compared = values(bed, np.atleast_2d(ids)), set()
    for name, value in right.items():
        where, _, part = name.partition(" ")
        if part in dump.without:
            continue
        ours = dump.names.get(part, part)
        name = f"{where} {ours}".strip()
        own, expected = value if ids.ndim == 2 else value[None], truth[name]
        if dump.tokens_first and part:
            own = own.swapaxes(0, 1)
        if dump.heads_in_width and ours in ("q", "k", "v"):
            expected = expected.swapaxes(1, 2).reshape(own.shape)  # (B, T, D)
        if ours in ("scores", "weights"):
            own, expected = np.tril(own), np.tril(expected)
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-12 * np.abs(expected).max(), err_msg=name)
        compared.add(name)
    assert compared == {name for name in truth if name.partition(" ")[2] not in dump.absent}
    size = np.linalg.norm(right["logits"])
    for fault in faults:
        wrong = bed.run(program, [fault], "float32")[1]["logits"]
        assert np.isfinite(wrong).all(), fault
        assert wrong.shape != right["logits"].shape or np.linalg.norm(wrong - right["logits"]) > dump.least * size, fault


@torch.no_grad()
def values(bed: Bed, ids: np.ndarray) -> dict[str, np.ndarray]:
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
