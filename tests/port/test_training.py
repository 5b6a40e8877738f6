"""`gpt2.diagnose_step`: steps of every stage, settings that are read off, and steps that cannot be diagnosed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.steps import our_model

import gpt2
from gpt2.errors import InputError
from gpt2.port.step.fitting import Search
from gpt2.port.step.rules import Correction, Rule, Track, directions, fit
from gpt2.port.step.settings import Settings


def make_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.02)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.slow
def test_settings_that_are_not_given_are_read_off() -> None:
    """Without expectations a rate or a decay on norms is no fault, but a sentence."""
    found = gpt2.diagnose_step(our_model(), make_step, our_model())
    notes = " ".join(found.notes)
    assert found.verdict == "equal"
    for words in ("rate of 0.0003", "betas of 0.9 and 0.95", "weight decay of 0.02, on", "norms", "no clipping"):
        assert words in notes


def other_module(model):
    return make_step(our_model())


def nan(model):
    return lambda x, y: model(x).sum() * float("nan")


def wrong_shape(model):
    return lambda x, y: model(x.view(7, -1)).sum()


def nothing(model):
    return None


@pytest.mark.parametrize(
    ("maker", "words"),
    [
        (other_module, "no parameter"),
        pytest.param(nan, "loss of nan", marks=pytest.mark.slow),
        pytest.param(wrong_shape, "batch_size", marks=pytest.mark.slow),
        pytest.param(nothing, "return a function step", marks=pytest.mark.slow),
    ],
)
def test_a_bad_step_is_one_line(maker, words: str) -> None:
    """A traceback of ours hides what the user has to change."""
    with pytest.raises(InputError, match=words):
        gpt2.diagnose_step(our_model(), maker, our_model())


def test_settings_are_refused_by_name() -> None:
    """A misspelt key would leave a setting unknown, and its fault unsaid."""
    with pytest.raises(InputError, match=r"did you mean optim\.lr"):
        Settings.parse(["optim.lrr=1"])
    with pytest.raises(InputError, match="give a number"):
        Settings.parse(["optim.lr=fast"])
    assert Settings.parse(["optim.lr=3e-4", "data.prompt="]) == Settings(lr=3e-4)


@pytest.mark.parametrize(
    "rule",
    [
        Rule(beta1=0.88, beta2=0.93, eps=3e-7),
        pytest.param(Rule(amsgrad=True), marks=pytest.mark.slow),
        Rule(coupled=0.03),
        Rule(correction=Correction.LATE, beta2=0.95),
    ],
)
def test_the_search_finds_a_rule_again(rule: Rule) -> None:
    """A search that stops at the nearest usual constants would report them as the author's."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(6, 50, generator=generator, dtype=torch.float64).numpy()
    gradient = 1e-2 * torch.randn(6, 50, generator=generator, dtype=torch.float64).numpy()
    track = Track("w", before, gradient, 0 * before, (before == before).any(1))
    track = Track("w", before, gradient, -1e-3 * directions(rule, track) - 1e-4 * before, track.seen)
    found = Search([track], Settings()).best().rule
    assert found == rule
    assert fit(track, found).rates == pytest.approx(1e-3)
