"""How a set's programs are checked: right but for their faults, at each value they show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch

import gpt2

from .bed import Arrays, Bed

MODULES = {  # a block's modules: the names of what they return, and of what they are given
    "ln_1": ("ln_1", None),
    "attn.c_attn": ("qkv", None),
    "attn.c_proj": ("attended", "mixed"),
    "ln_2": ("ln_2", "middle"),
    "mlp.c_fc": ("up", None),
    "mlp.c_proj": ("fed", "act"),
}


def check(bed: Bed, program: str, faults: Iterable[str], names: Mapping[str, str], absent: Iterable[str]) -> None:
    """Raise unless ``program`` is right at each value it shows, and each of ``faults`` changes its logits by a thousandth.

    ``names`` has our own names of the program's values; ``absent`` are those of ours that it does not show.
    """
    ids, right = bed.run(program)
    truth, compared = values(bed, ids), set()
    for name, own in right.items():
        where, _, part = name.partition(" ")
        name = f"{where} {names.get(part, part)}".strip()
        expected = truth[name]
        if own.ndim < expected.ndim:  # heads side by side, (B, T, D)
            expected = expected.swapaxes(1, 2).reshape(own.shape)
        if name.endswith((" scores", " weights")):
            own, expected = np.tril(own), np.tril(expected)
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-12 * np.abs(expected).max(), err_msg=name)
        compared.add(name)
    assert compared == {name for name in truth if name.partition(" ")[2] not in absent}
    size = np.linalg.norm(right["logits"])
    for fault in faults:
        wrong = bed.run(program, [fault], "float32")[1]["logits"]
        assert np.isfinite(wrong).all(), fault
        assert np.linalg.norm(wrong - right["logits"]) > 1e-3 * size, fault


@torch.no_grad()
def values(bed: Bed, ids: np.ndarray) -> Arrays:
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
