"""The ninth set of programs, mistakes of ports listed before they were written: right but for their faults, at each value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.programs import ninth

import gpt2

PARTS = {"ln_1": "ln_1", "qkv": "attn.c_attn", "attended": "attn.c_proj", "ln_2": "ln_2", "up": "mlp.c_fc", "fed": "mlp.c_proj"}
BEFORE = {"attn.c_proj": "mixed", "ln_2": "middle", "mlp.c_proj": "act"}


@pytest.mark.slow
@pytest.mark.parametrize("program", ninth.FAULTS)
def test_each_program_of_the_ninth_set_is_right_but_for_its_faults(program: str, tmp_path: Path) -> None:
    """A mistake in a program, or a switch that does nothing, would be counted as the engine's."""
    if reason := ninth.missing(program):
        pytest.skip(f"this program was not run: {reason}")
    bed = ninth.NinthBed(tmp_path / "bed", ninth.SHAPES[0])
    ids, right = bed.run(program)
    truth = values(bed, np.atleast_2d(ids))
    for name, value in right.items():
        expected = truth[name]
        own = value[None] if program == "onebuffer" else value
        if program == "stepwise" and name.endswith(" weights"):
            own = own.swapaxes(1, 2)  # (B, T, H, T)
        elif program == "stepwise" and expected.ndim == 4:
            expected = expected.swapaxes(1, 2).reshape(own.shape)  # (B, T, D)
        if name.endswith((" scores", " weights")):
            own, expected = np.tril(own), np.tril(expected)
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-12 * np.abs(expected).max(), err_msg=name)
    size = np.linalg.norm(right["logits"])
    for fault in ninth.FAULTS[program]:
        wrong = bed.run(program, [fault], "float32")[1]["logits"]
        assert np.isfinite(wrong).all(), fault
        assert np.linalg.norm(wrong - right["logits"]) > 1e-3 * size, fault


@torch.no_grad()
def values(bed: ninth.NinthBed, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Our own model's values in float64, batch first, by the names of the programs."""
    model, kept = gpt2.load(str(bed.model)).double().eval(), {}

    def keep(module: torch.nn.Module, name: str, before: str | None = None) -> None:
        def hook(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            kept[name] = output.numpy()
            if before:
                kept[before] = inputs[0].numpy()

        module.register_forward_hook(hook)

    for n, block in enumerate(model.h):
        keep(block, f"{n} result", None if n else "x embedded")
        for part, module in PARTS.items():
            keep(block.get_submodule(module), f"{n} {part}", f"{n} {BEFORE[module]}" if module in BEFORE else None)
    keep(model.ln_f, "x final")
    kept["logits"] = model(torch.from_numpy(ids)).numpy()
    for n in range(len(model.h)):
        parts = np.split(kept[f"{n} qkv"], 3, axis=-1)
        q, k, v = (part.reshape(*ids.shape, bed.shape.heads, -1).swapaxes(1, 2) for part in parts)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        raised = np.exp(scores) * np.tri(ids.shape[1])
        kept |= {f"{n} q": q, f"{n} k": k, f"{n} v": v, f"{n} scores": scores}
        kept[f"{n} weights"] = raised / raised.sum(-1, keepdims=True)
    return kept
