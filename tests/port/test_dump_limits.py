"""Dumps at the limits of what can be said: few arrays, mixed precision, and faults that no known cause explains."""

from __future__ import annotations

import time

import pytest
import torch
from port.test_dump import MODEL, causes, dump, faulty
from port.test_walk import IDS, checkpoint

import gpt2
from gpt2.measure.tracing import trace
from gpt2.port.diagnosis.report import SURE

FEW = ("ln_1", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.act", "mlp.c_proj")


def test_a_norm_is_named_where_neither_projections_nor_heads_are_recorded() -> None:
    """A wrong norm without recorded q, k or v ended the walk, and a search of minutes began."""
    wrong = {point: value for point, value in trace(faulty(layer_norm_epsilon=1e-3), IDS).items() if point.endswith(FEW)}
    wrong |= {"embed": trace(MODEL, IDS)["embed"], "logits": faulty(layer_norm_epsilon=1e-3)(IDS).detach()}
    diagnosis = gpt2.diagnose(dump(wrong, torch.float32), MODEL)
    assert causes(diagnosis) == [("layernorm-eps", "h.*.ln_1, h.*.ln_2, ln_f")]
    assert diagnosis.causes[0].confidence == SURE


@pytest.mark.slow
def test_a_program_that_widens_its_numbers_on_the_way_computed_in_float32() -> None:
    """NumPy makes float64 of float32 by a scalar. The tolerance of float64 then called rounding another block's weights."""
    wrong = trace(faulty(activation_function="gelu").float(), IDS)
    mixed = {point: value.double() * (1 + 1e-9) if point.startswith(("h.1", "h.2")) else value for point, value in wrong.items()}
    mixed = {point: value for point, value in mixed.items() if not point.endswith(("heads", "attn.q", "attn.k", "attn.v"))}
    start = time.monotonic()
    diagnosis = gpt2.diagnose({**mixed, "ids": IDS}, MODEL)
    assert causes(diagnosis) == [("gelu-variant", "h.*.mlp.act")]
    assert time.monotonic() - start < 15  # not half of the limit, in float64, before


def test_a_fault_that_nothing_names_is_undetermined_in_time_and_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search said that the first block's scores are wrong: it compared scores with masked ones without."""
    monkeypatch.setattr("gpt2.port.dump.examination.SECONDS", {True: 1.0})
    model = checkpoint()
    weight = model.h[1].mlp.c_fc.weight
    with torch.no_grad():
        weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    start = time.monotonic()
    for traced in (trace(model, IDS), {"logits": model(IDS).detach()}):
        diagnosis = gpt2.diagnose(dump(traced, torch.float32), MODEL)
        assert diagnosis.verdict == "undetermined", causes(diagnosis)
        assert diagnosis.first_divergence is not None
        if len(traced) > 1:
            assert diagnosis.first_divergence.point == "h.1.mlp.c_fc"
            assert any("right up to h.1.ln_2, wrong from h.1.mlp.c_fc on" in note for note in diagnosis.notes)
    assert time.monotonic() - start < 8


@pytest.mark.slow
def test_a_program_that_computes_in_float16_is_wrong_where_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tolerance of float32, its rounding was said to be wrong from the first block on."""
    monkeypatch.setattr("gpt2.port.dump.examination.SECONDS", {True: 1.0})
    model = checkpoint()
    with torch.no_grad():
        model.h[1].mlp.c_fc.weight += torch.randn(21, 52, generator=torch.Generator().manual_seed(1))
    diagnosis = gpt2.diagnose(dump(trace(model.half(), IDS), torch.float16), MODEL)
    assert diagnosis.verdict == "undetermined", causes(diagnosis)
    assert diagnosis.first_divergence is not None
    assert diagnosis.first_divergence.point == "h.1.mlp.c_fc"
