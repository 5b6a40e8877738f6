"""What a run does about a loss or a gradient that is not finite, or a loss that explodes: never does it reach the weights."""

import json
import math
import os
import signal
from dataclasses import replace

import pytest
import torch

from gpt2.checkpoint.loading import load_path
from gpt2.errors import InputError
from gpt2.train import divergence, feed, loop, state
from gpt2.train.loop import Diverged, train


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def finite(folder):
    return all(p.isfinite().all() for p in load_path(folder).parameters())


@pytest.fixture
def poison(monkeypatch):
    """Make the loss of the given steps (counted from 0) what is asked; of the windows that ``seed`` draws, or of any."""

    def at(*steps, by=math.nan, seed=None):
        real = loop.Scored.forward
        real_batch, drawn = feed.batch, []

        def batch(*args, step, **kwargs):
            drawn.append((step, kwargs["seed"]))
            return real_batch(*args, step=step, **kwargs)

        def forward(*args):
            step, of = drawn[-1] if drawn else (-1, 0)
            hit = step in steps and seed in (None, of)
            return real(*args) * by if hit else real(*args)

        monkeypatch.setattr(feed, "batch", batch)
        monkeypatch.setattr(loop.Scored, "forward", forward)
        return drawn

    return at


def test_what_a_fault_is():
    assert divergence.fault(1.0, 2.0) == ""
    assert divergence.fault(math.inf, 1.0) == "loss inf, gradient norm 1.0"
    assert divergence.fault(1.0, math.nan) == "loss 1.0, gradient norm nan"
    limit = divergence.limit(1.5, 65)
    assert limit == 1.5 + math.log(65)
    assert divergence.fault(limit - 0.01, 1.0, limit) == ""
    assert "exploded" in divergence.fault(limit + 0.01, 1.0, limit)
    assert divergence.limit(None, 65) == math.inf  # nothing was measured yet


@pytest.mark.parametrize(("by", "says"), [(math.nan, "loss nan"), (math.inf, "loss inf"), (50.0, "exploded")])
def test_stop_logs_and_keeps_what_was(recipe, tmp_path, poison, by, says):
    poison(9, by=by)
    with pytest.raises(InputError, match=f"step 10: .*{says}.*the run diverged, lower optim.lr"):
        train(recipe, tmp_path / "run")
    assert finite(tmp_path / "run" / "best")
    assert finite(tmp_path / "run" / "step-8")
    assert not (tmp_path / "run" / "step-10").exists()
    last = metrics(tmp_path / "run")[-1]
    assert (last["step"], last["action"]) == (10, "stop")
    assert says in last["diverged"]


def test_skip_leaves_the_step_out_and_nothing_else(recipe, tmp_path, poison):
    """A skipped step that still moved the weights, by momentum or by decay, would be a step on nothing."""
    poison(5, 6)
    events = []
    assert train(replace(recipe, on_divergence="skip"), tmp_path / "run", report=events.append).stopped == "finished"
    assert [(e.step, e.action) for e in events if isinstance(e, Diverged)] == [(6, "skip"), (7, "skip")]
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "diverged" in row] == [6, 7]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 8, 9, 10, 11, 12]
    assert finite(tmp_path / "run" / "best")


def test_skipped_steps_leave_the_weights_alone(quiet, tmp_path, poison):
    poison(*range(12))
    skipping = replace(quiet, on_divergence="skip", steps=4, patience=0)
    train(skipping, tmp_path / "run")
    first, last = (load_path(tmp_path / "run" / name).state_dict() for name in ("best", "step-4"))
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_skipping_has_an_end(recipe, tmp_path, poison):
    """A model that is broken diverges at every step, and would skip through the night."""
    poison(*range(99))
    with pytest.raises(InputError, match=r"step 10: .*10 steps in a row"):
        train(replace(recipe, on_divergence="skip"), tmp_path / "run")


def test_skips_are_counted_across_a_restart(recipe, tmp_path, poison):
    poison(*range(99))
    skipping = replace(recipe, on_divergence="skip", save_every=1)
    for _ in range(3):
        with pytest.raises(InputError, match=r"step 10: .*10 steps in a row"):
            train(skipping, tmp_path / "run")


def test_rewind_goes_on_from_the_checkpoint_with_other_windows(recipe, tmp_path, poison):
    """With the same windows it would meet the same fault."""
    drawn = poison(9, seed=recipe.seed)
    events = []
    result = train(replace(recipe, on_divergence="rewind"), tmp_path / "run", report=events.append)
    assert result.stopped == "finished"
    assert [(e.step, e.action) for e in events if isinstance(e, Diverged)] == [(10, "rewind")]
    again = [(step, recipe.seed + 1) for step in range(8, 12)]
    assert drawn == [(step, recipe.seed) for step in range(10)] + again
    assert json.loads((tmp_path / "run" / "step-12" / "progress.json").read_text())["rewinds"] == 1
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 13))  # no step told twice
    assert [(row["step"], row["rewound_from"]) for row in rows if "rewound_from" in row] == [(8, 10)]


def test_a_rewound_run_that_is_interrupted_ends_as_one_that_is_not(recipe, tmp_path, poison, stored, told):
    """The rewind is part of the run's state: forgotten, the run would go on with the windows that failed."""
    poison(9, seed=recipe.seed)
    rewinding = replace(recipe, on_divergence="rewind")
    train(rewinding, tmp_path / "whole")

    class Killed(Exception):
        pass

    def killed(event):
        if isinstance(event, loop.Logged) and event.step == 11:
            raise Killed

    with pytest.raises(Killed):
        train(rewinding, tmp_path / "run", report=killed)
    train(rewinding, tmp_path / "run")
    assert stored(tmp_path / "run") == stored(tmp_path / "whole")
    assert told(tmp_path / "run") == told(tmp_path / "whole")


def test_a_signal_in_the_very_step_that_is_rewound_is_not_lost(recipe, tmp_path, poison):
    """The way back begins with its own handlers, and a run told to stop would go on to its end."""
    poison(9, seed=recipe.seed)

    def stop(event):
        if isinstance(event, Diverged):
            os.kill(os.getpid(), signal.SIGTERM)

    result = train(replace(recipe, on_divergence="rewind"), tmp_path / "run", report=stop)
    assert (result.stopped, result.step) == ("interrupted", 8)


def test_rewinding_has_an_end(recipe, tmp_path, poison):
    poison(9)
    with pytest.raises(InputError, match=r"step 10: .*3 rewinds did not help"):
        train(replace(recipe, on_divergence="rewind"), tmp_path / "run")
    assert state.newest_intact(tmp_path / "run")[0] == tmp_path / "run" / "step-8"


def test_with_nothing_to_rewind_to_it_stops(recipe, tmp_path, poison):
    poison(2)
    with pytest.raises(InputError, match="no checkpoint to rewind to"):
        train(replace(recipe, on_divergence="rewind"), tmp_path / "run")


def test_fresh_is_not_fresh_again_after_a_rewind(recipe, tmp_path, poison):
    """It would clear the checkpoint it was to go back to, and begin for ever."""
    poison(9, seed=recipe.seed)
    train(replace(recipe, on_divergence="rewind", steps=8), tmp_path / "run")
    rewinding = replace(recipe, on_divergence="rewind")
    assert train(rewinding, tmp_path / "run", fresh=True).stopped == "finished"
    assert json.loads((tmp_path / "run" / "step-12" / "progress.json").read_text())["rewinds"] == 1
