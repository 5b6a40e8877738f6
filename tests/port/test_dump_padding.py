"""A dump of a padded batch with its mask: the rows are judged without their padding, which no row may change."""

from __future__ import annotations

import math

import pytest
import torch
from port.test_dump import MODEL, causes, faulty
from port.test_walk import CONFIG, IDS
from torch import Tensor

import gpt2
from gpt2.model import GPT2

GAP = 2


def masked(side: str, rows: slice = slice(0, 1)) -> Tensor:
    mask = torch.ones_like(IDS)
    mask[rows, slice(0, GAP) if side == "left" else slice(-GAP, None)] = 0
    return mask


def padded(mask: Tensor, *, counted: bool = False, hidden: bool = True, model: GPT2 = MODEL) -> dict[str, Tensor]:
    """What a program computes of a padded batch, written again with a mask; MODEL itself takes none."""
    positions = torch.arange(IDS.shape[1]).expand_as(IDS) if counted else (mask.cumsum(1) - 1).clamp(min=0)
    x, arrays = model.wte(IDS) + model.wpe(positions), dict[str, Tensor]()
    keep = torch.ones(IDS.shape[1], IDS.shape[1], dtype=torch.bool).tril() & (mask.bool()[:, None, None] | (not hidden))
    for n, block in enumerate(model.h):
        q, k, v = (y.unflatten(-1, (CONFIG.n_head, -1)).transpose(1, 2) for y in block.attn.c_attn(block.ln_1(x)).chunk(3, -1))
        weights = (q @ k.mT / math.sqrt(CONFIG.head_dim)).masked_fill(~keep, -1e9).softmax(-1)
        x = x + block.attn.c_proj((weights @ v).transpose(1, 2).flatten(2))
        x = arrays[f"stream {n}"] = x + block.mlp(block.ln_2(x))
        arrays[f"weights {n}"] = weights
    return {**{name: array.detach() for name, array in arrays.items()}, "logits": model.head(model.ln_f(x)).detach()}


def said(arrays: dict[str, Tensor], mask: Tensor, name: str = "attention_mask") -> gpt2.Diagnosis:
    return gpt2.diagnose({"ids": IDS, name: mask, **arrays}, MODEL)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 2)], ids=["one row", "both"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_right_program_is_equal_however_it_pads(side: str, rows: slice) -> None:
    """Logits at padded positions are nobody's, and a right program was undetermined after 45 seconds."""
    mask = masked(side, rows)
    right = said(padded(mask), mask)
    assert right.ok
    assert any("without the padding that your mask hides" in note for note in right.notes)
    counted = said(padded(mask, counted=True), mask)
    assert counted.ok
    assert any("positions count the padding" in note for note in counted.notes) == (side == "left")
    assert said(padded(mask), 1 - mask, "key_padding_mask").ok


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 2)], ids=["one row", "both"])
def test_padding_that_is_read_is_named(rows: slice, counted: bool) -> None:
    mask = masked("left", rows)
    found = said(padded(mask, hidden=False, counted=counted), mask)
    assert causes(found) == [("padding-wrong", "h.*.attn")]
    assert "read as text" in found.causes[0].detail


def test_a_fault_beside_the_padding_is_found_in_the_whole_rows() -> None:
    mask = masked("left")
    assert causes(said(padded(mask, model=faulty(activation_function="relu")), mask)) == [("gelu-variant", "h.*.mlp.act")]
