"""Faults of a dump that were called undetermined, or by another name, at a level at which the values show which they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from port.test_dump import MODEL, causes, dump
from port.test_walk import IDS

import gpt2
from gpt2.port.dump.examination import computed_in
from gpt2.port.fits.lacking import looks_dropped
from gpt2.port.graph import Formula, Model, Program

LAYERS = MODEL.config.n_layer
SIMULATION = Model(MODEL.state_dict(), MODEL.config, IDS)


def everywhere(stage: str, make: Callable[[int], Formula]) -> Program:
    return Program({n: {stage: make(n)} for n in range(LAYERS)})


def first_columns(layer: int) -> Formula:
    bias = SIMULATION.site(layer)["mlp.c_fc.bias"].clone()
    bias[:10] = 0.0
    return lambda c, s: c.right("mlp.c_fc", s) - bias


def test_a_bias_of_some_columns_is_missing() -> None:
    """It was called another tensor's bias, because it is not the checkpoint's."""
    values = SIMULATION.trace(everywhere("mlp.c_fc", first_columns))
    (cause,) = gpt2.diagnose(
        dump({p: v for p, v in values.items() if p in SIMULATION.trace(Program())}, torch.float32), MODEL
    ).causes
    assert (cause.id, "columns 10 to" in cause.detail) == ("missing-bias", True)


@pytest.mark.slow
def test_the_logits_of_a_token_may_be_moved_beside_another_fault() -> None:
    """Logits with their mean taken off were compared as they are, so that no fault before them came near."""
    relu = everywhere("mlp.act", lambda n: lambda c, s: s["mlp.c_fc"].relu())
    logits = SIMULATION.trace(relu)["logits"]
    centred = {"logits": logits - logits.mean(-1, keepdim=True)}
    assert {one for one, _ in causes(gpt2.diagnose(dump(centred, torch.float32), MODEL))} == {"gelu-variant", "logits-softmaxed"}


def test_a_few_arrays_of_more_digits_are_no_sign_of_float64() -> None:
    """Noise in float64 beside a dump in float16 made the search begin three times, each with a third of the time."""
    dtypes = (torch.float16, torch.float32, torch.float64)
    half, single, double = (torch.linspace(0.1, 1, 5, dtype=torch.float64).to(dtype) for dtype in dtypes)
    assert computed_in(half, [half, half, double]) == ([torch.float32], torch.float16)
    assert computed_in(single, [double]) == ([torch.float32, torch.float64], None)
    assert computed_in(double, [single, single]) == ([torch.float32, torch.float64], None)
    assert computed_in(double, [double, torch.ones(2, dtype=torch.float32)]) == ([torch.float64, torch.float32], None)


def test_dropout_is_known_by_its_zeros() -> None:
    """A drop of whole tokens, features or regions, and zeros below which nothing is, are other faults; so are hidden scores."""
    drawn = torch.Generator().manual_seed(0)
    value = torch.randn(24, 48, generator=drawn, dtype=torch.float64)
    random = torch.rand(24, 48, generator=drawn) < 0.1
    assert looks_dropped(value * ~random, 12)
    region = torch.zeros(24, 48, dtype=torch.bool)
    region[:12, :24] = True
    for other in (torch.zeros(24, 48, dtype=torch.bool), random[:, :1].expand_as(random), random[:1].expand_as(random), region):
        assert not looks_dropped(value * ~other, 12)
    assert not looks_dropped(value.relu(), 12)
    scores = torch.randn(12, 8, 12, generator=drawn, dtype=torch.float64) * torch.ones(12, 12).tril()[:, None]
    assert not looks_dropped(scores.view(24, 48), 12)
