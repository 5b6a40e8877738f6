"""A loss or gradient that is not finite, or a loss that explodes, never reaches the weights."""

import gc
import json
import math
import os
import re
import signal
from dataclasses import replace

import pytest
import torch
from support.commands import refusal
from support.training import metrics, outcome

from gpt2.checkpoint.checkpoint import open_path
from gpt2.model import GPT2
from gpt2.train import loop, state, step as feed
from gpt2.train.loop import Diverged, Started, train
from gpt2.train.step import fault_of, loss_limit


@pytest.fixture
def skipping(recipe):
    return replace(recipe, on_divergence="skip")


@pytest.fixture
def rewinding(recipe):
    return replace(recipe, on_divergence="rewind")


def finite(folder):
    return all(p.isfinite().all() for p in open_path(folder).load().parameters())


@pytest.fixture
def poison(monkeypatch):
    """Multiply the loss of the given steps (counted from 0), for the windows drawn by ``seed`` or for all windows."""

    def at(*steps, by=math.nan, seed=None):
        real = loop.WithLoss.forward
        real_batch, drawn = feed.batch, []

        def batch(*args, step, **kwargs):
            drawn.append((step, kwargs["seed"]))
            return real_batch(*args, step=step, **kwargs)

        def forward(*args):
            step, of = drawn[-1] if drawn else (-1, 0)
            hit = step in steps and seed in (None, of)
            return real(*args) * by if hit else real(*args)

        monkeypatch.setattr(feed, "batch", batch)
        monkeypatch.setattr(loop.WithLoss, "forward", forward)
        return drawn

    return at


def test_what_a_fault_is():
    assert fault_of(1.0, 2.0) == ""
    assert fault_of(math.inf, 1.0) == "loss inf, gradient norm 1.0"
    assert fault_of(1.0, math.nan) == "loss 1.0, gradient norm nan"
    limit = loss_limit(1.5, 65)
    assert limit == 1.5 + math.log(65)
    assert fault_of(limit - 0.01, 1.0, limit) == ""
    assert "exploded" in fault_of(limit + 0.01, 1.0, limit)
    assert loss_limit(None, 65) == math.inf  # nothing was measured yet


@pytest.mark.parametrize(("by", "says"), [(math.nan, "loss nan"), (50.0, "exploded")])
def test_stop_logs_and_keeps_what_was(recipe, tmp_path, poison, by, says):
    poison(9, by=by)
    assert re.match(f"step 10: .*{says}.*the run diverged, lower optim.lr", refusal(train, recipe, tmp_path / "run"))
    assert finite(tmp_path / "run" / "best")
    assert finite(tmp_path / "run" / "step-8")
    assert not (tmp_path / "run" / "step-10").exists()
    last = metrics(tmp_path / "run")[-1]
    assert (last["step"], last["action"]) == (10, "stop")
    assert says in last["diverged"]


def test_skip_leaves_the_step_out_and_nothing_else(skipping, tmp_path, poison):
    """A skipped step must not change the weights, neither by momentum nor by weight decay."""
    poison(5, 6)
    events = []
    assert train(skipping, tmp_path / "run", report=events.append).stopped == "finished"
    assert [(e.step, e.action) for e in events if isinstance(e, Diverged)] == [(6, "skip"), (7, "skip")]
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "diverged" in row] == [6, 7]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 8, 9, 10, 11, 12]
    assert finite(tmp_path / "run" / "best")
    poison(*range(4))
    train(replace(skipping, steps=4, dropout=0.0), tmp_path / "all")
    first, last = (open_path(tmp_path / "all" / name).load().state_dict() for name in ("best", "step-4"))
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_skipping_has_an_end_also_across_a_restart(skipping, tmp_path, poison):
    """A broken model diverges at every step: without a limit, the run would skip steps for ever, also after a restart."""
    poison(*range(99))
    for _ in range(3):
        assert re.match(r"step 10: .*10 steps in a row", refusal(train, replace(skipping, save_every=1), tmp_path / "run"))


def test_rewind_goes_on_from_the_checkpoint_with_other_windows(rewinding, tmp_path, poison):
    """After a rewind the run draws other windows: the same windows would fail again. It kept the old model in memory."""
    drawn = poison(9, seed=rewinding.seed)
    events, models = [], []

    def watch(event):
        events.append(event)
        if isinstance(event, Started):
            gc.collect()
            models.append(sum(type(each) is GPT2 for each in gc.get_objects()))

    result = train(rewinding, tmp_path / "run", report=watch)
    assert result.stopped == "finished"
    assert models == models[:1] * 2
    assert [(e.step, e.action) for e in events if isinstance(e, Diverged)] == [(10, "rewind")]
    again = [(step, rewinding.seed + 1) for step in range(8, 12)]
    assert drawn == [(step, rewinding.seed) for step in range(10)] + again
    assert json.loads((tmp_path / "run" / "step-12" / "progress.json").read_text())["rewinds"] == 1
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))  # no step logged twice
    assert [(row["step"], row["rewound_from"]) for row in rows if "rewound_from" in row] == [(8, 10)]


def test_a_rewound_run_that_is_killed_ends_as_one_that_is_not(rewinding, tmp_path, poison):
    """The rewind is part of the run's state: a resume without it would draw the windows that failed."""
    poison(9, seed=rewinding.seed)
    train(rewinding, tmp_path / "whole")

    def kill(event):
        if isinstance(event, loop.Logged) and event.step == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(rewinding, tmp_path / "run", report=kill)
    train(rewinding, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_a_signal_in_the_very_step_that_is_rewound_is_not_lost(rewinding, tmp_path, poison):
    """After a rewind the loop installs its signal handlers again; a stop signal received before was lost."""
    poison(9, seed=rewinding.seed)

    def stop(event):
        if isinstance(event, Diverged):
            os.kill(os.getpid(), signal.SIGTERM)

    result = train(rewinding, tmp_path / "run", report=stop)
    assert (result.stopped, result.step) == ("interrupted", 8)


@pytest.mark.parametrize(("step", "says"), [(9, "3 rewinds did not help"), (2, "no checkpoint to rewind to")])
def test_rewinding_has_an_end(rewinding, tmp_path, poison, step, says):
    poison(step)
    assert re.match(f"step {step + 1}: .*{says}", refusal(train, rewinding, tmp_path / "run"))
    assert state.newest_intact(tmp_path / "run")[0] == (tmp_path / "run" / "step-8" if step == 9 else None)


def test_fresh_does_not_clear_the_run_again_after_a_rewind(rewinding, tmp_path, poison):
    """`--fresh` must clear the run once: clearing again would delete the checkpoint to rewind to, and loop for ever."""
    poison(9, seed=rewinding.seed)
    train(replace(rewinding, steps=8), tmp_path / "run")
    assert train(rewinding, tmp_path / "run", fresh=True).stopped == "finished"
    assert json.loads((tmp_path / "run" / "step-12" / "progress.json").read_text())["rewinds"] == 1
