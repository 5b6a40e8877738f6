"""The eighth set of programs, a sample of what people get wrong: right but for their faults, at each value that they dump."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.programs import eighth
from support.programs.bed import Bed

import gpt2

PROGRAMS = [pytest.param(name, marks=[] if name == "notebook" else pytest.mark.slow) for name in eighth.FAULTS]
SAME = {"both": "qkv", "merged": "mixed", "keys": "k", "values": "v"}  # two names for one value


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_of_the_eighth_set_is_right_but_for_its_faults(program: str, tmp_path: Path) -> None:
    """A mistake in a program, or a switch that does nothing, would be counted as the engine's."""
    if reason := eighth.missing(program):
        pytest.skip(f"this program was not run: {reason}")
    bed = eighth.EighthBed(tmp_path / "bed", eighth.SHAPES[0])
    ids, right = bed.run(program)
    truth = values(bed, np.atleast_2d(ids))
    for name, value in right.items():
        block, _, part = name.rpartition(" ")
        expected = truth[f"{block} {SAME.get(part, part)}"]
        own = value[None] if program == "blocked" else value.swapaxes(0, 1) if program == "notebook" and block else value
        if part in ("scores", "weights"):
            own, expected = np.tril(own), np.tril(expected)
        np.testing.assert_allclose(own, expected, rtol=0, atol=1e-12 * np.abs(expected).max(), err_msg=name)
    size = right["logits"].std()
    for fault in {eighth.named(fault) for fault in eighth.FAULTS[program]}:
        least = 5e-8 if "convention" in fault else 5e-4  # that one is lost in rounding, and here there is little
        assert np.abs(bed.run(program, [fault])[1]["logits"] - right["logits"]).max() > least * size, fault


@torch.no_grad()
def values(bed: Bed, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Our own model's values in float64, batch first, by the names of the programs."""
    model, kept = gpt2.load(str(bed.model)).double().eval(), {}

    def keep(module: torch.nn.Module, name: str, before: str = "") -> None:
        def hook(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            kept[name] = output.numpy()
            if before:
                kept[before] = inputs[0].numpy()

        module.register_forward_hook(hook)

    for n, block in enumerate(model.h):
        keep(block.ln_1, f"{n} ln_1", f"{n} input")
        keep(block.attn.c_attn, f"{n} qkv")
        keep(block.attn.c_proj, f"{n} attended", f"{n} mixed")
        keep(block.ln_2, f"{n} ln_2", f"{n} middle")
        keep(block.mlp.c_fc, f"{n} up")
        keep(block.mlp.c_proj, f"{n} fed", f"{n} act")
    keep(model.ln_f, "x final")
    kept[" logits"] = model(torch.from_numpy(ids)).numpy()
    kept["x embedded"] = kept["0 input"]
    for n in range(len(model.h)):
        kept[f"{n} result"] = kept[f"{n} middle"] + kept[f"{n} fed"]
        parts = np.split(kept[f"{n} qkv"], 3, axis=-1)
        q, k, v = (part.reshape(*ids.shape, bed.shape.heads, -1).swapaxes(1, 2) for part in parts)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        raised = np.exp(scores) * np.tri(ids.shape[1])
        weights = raised / raised.sum(-1, keepdims=True)
        kept |= {f"{n} q": q, f"{n} k": k, f"{n} v": v, f"{n} scores": scores, f"{n} weights": weights}
    return kept
