"""Dumps of other programs: a right one is equal in any dtype and layout, a fault is named with its place."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from port.test_walk import CONFIG, IDS, checkpoint
from torch import Tensor

import gpt2
from gpt2.errors import InputError
from gpt2.measure.tracing import trace
from gpt2.model import GPT2
from gpt2.port.diagnosis.report import Diagnosis

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
MODEL = checkpoint()


def faulty(**changes: object) -> GPT2:
    """Our model with another setting: the fault is in the formula, and the weights are right."""
    return checkpoint(replace(CONFIG, **changes))


def laid_out(traced: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """The same values as other programs hold them: anonymous, in any order, flat, split, stacked, transposed, with others."""
    draw, heads, out = random.Random(seed), CONFIG.n_head, []
    for point, value in traced.items():
        if point.endswith(("attn.q", "attn.k", "attn.v", "attn.heads")) and draw.random() < 0.5:
            value = value.unflatten(-1, (heads, -1)).transpose(1, 2)
        elif point != "logits":
            value = draw.choice(
                [value, value.flatten(), value.flatten(0, 1), value.transpose(0, 1), value.flatten(0, 1).transpose(0, 1)]
            )
        out.append(value.contiguous())
    out += [torch.randn(2, 8, CONFIG.n_embd), torch.ones(8, 8).tril(), torch.arange(8.0), torch.full((8, 8), -1e9).triu(1)]
    draw.shuffle(out)
    return {f"t{number}": value for number, value in enumerate(out)}


def dump(traced: dict[str, Tensor], dtype: torch.dtype, ids: Tensor = IDS) -> dict[str, Tensor]:
    return {name: value.to(dtype) for name, value in traced.items()} | {"ids": ids}


def causes(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(cause.id, cause.where) for cause in diagnosis.causes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_right_dump_is_equal_and_a_fault_is_named(dtype: torch.dtype) -> None:
    """A tolerance that is too narrow calls rounding a fault; one that is too wide calls the other GELU right."""
    right, wrong = (laid_out(trace(model, IDS)) for model in (MODEL, faulty(activation_function="gelu")))
    diagnosis = gpt2.diagnose(dump(right, dtype), MODEL)
    assert (diagnosis.verdict, diagnosis.causes, diagnosis.seen) == ("equal", (), "dump")
    diagnosis = gpt2.diagnose(dump(wrong, dtype), MODEL)
    assert diagnosis.verdict == "mismatch"
    assert causes(diagnosis) == [("gelu-variant", "h.*.mlp.act")]
    assert diagnosis.first_divergence is not None
    assert diagnosis.first_divergence.point == "h.0.mlp.act"


def test_a_dump_without_logits_or_with_nan_in_them_is_refused() -> None:
    """Both are mistakes of the dumping, to be said in a line."""
    with pytest.raises(InputError, match="holds no logits"):
        gpt2.diagnose({"ids": IDS, "x": torch.zeros(2, 8, 21)}, MODEL)
    logits = MODEL(IDS).detach().float().numpy()
    logits[1, 3:] = np.nan
    with pytest.raises(InputError, match="are NaN from position 3 on"):
        gpt2.diagnose({"ids": IDS, "x": logits}, MODEL)
