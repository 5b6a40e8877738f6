"""Windows on their way to the device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gpt2.data.batches import batch
from gpt2.train import feed
from gpt2.train.feed import Feed
from gpt2.train.loop import train
from gpt2.train.parallel import Ranks


@pytest.fixture
def drawn(monkeypatch) -> list[tuple[int, int]]:
    """What is drawn, by seed and step."""
    drawn = []
    monkeypatch.setattr(feed, "batch", lambda *args, **rest: drawn.append((rest["seed"], rest["step"])) or batch(*args, **rest))
    return drawn


def test_on_an_accelerator_the_next_step_is_on_its_way(recipe, drawn):
    """Sent too late, it is waited for; the wrong one, and the run is another run. (The device "meta" stands in for a GPU.)"""
    feeding = Feed(np.arange(200), Ranks(device=torch.device("meta")))
    feeding(recipe, 0)
    feeding.ahead(recipe, 1)
    assert drawn == [(recipe.seed, 0), (recipe.seed, 1)]
    feeding(recipe, 1)
    assert len(drawn) == 2
    feeding.ahead(recipe, 2)
    feeding(replace(recipe, seed=5), 2)  # a rewind came between
    assert drawn[2:] == [(recipe.seed, 2), (5, 2)]
    feeding.ahead(recipe, recipe.steps)
    assert len(drawn) == 4


def test_what_was_sent_ahead_is_what_the_step_draws(recipe):
    plain, ahead = Feed(np.arange(200)), Feed(np.arange(200))
    ahead.sent = (recipe.seed, 3), ahead.send(recipe, 3)
    for mine, theirs in zip(plain(recipe, 3), ahead(recipe, 3), strict=True):
        assert torch.equal(mine, theirs)


def test_a_run_in_sliding_windows(recipe, tmp_path, monkeypatch):
    """The recipe's stride must reach the windows, and be part of what makes a run this run."""
    strides = []
    monkeypatch.setattr(feed, "batch", lambda *args, **rest: strides.append(rest["stride"]) or batch(*args, **rest))
    train(replace(recipe, steps=2, data=replace(recipe.data, stride=16)), tmp_path / "run")
    assert set(strides) == {16}
