"""A run that is stopped, killed or damaged ends with the same bits as an undisturbed run."""

import json
import math
import os
import random
import shlex
import shutil
import signal
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import refusal
from support.training import flip, killed, metrics, outcome, stop_at

from gpt2.errors import InputError
from gpt2.train import loop, state
from gpt2.train.corpus import corpus
from gpt2.train.loop import Evaluated, Logged, Started, train
from gpt2.train.metrics import Metrics
from gpt2.train.recipe import Lora, Recipe


@pytest.fixture(scope="module")
def undisturbed(whole):
    """The files of the undisturbed run."""
    return outcome(whole)


@pytest.fixture(scope="module")
def stopped(recipe, tmp_path_factory):
    """A run that was stopped after step 10, with checkpoints of steps 10 and 8; read only."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train(recipe, folder, report=stop_at(10))
    assert [path.name for path in state.checkpoints(folder)] == ["step-10", "step-8"]
    return folder


@pytest.fixture
def run(stopped, tmp_path):
    """A copy of the stopped run; a test may damage it."""
    return shutil.copytree(stopped, tmp_path / "run")


@pytest.mark.parametrize(("step", "number"), [(4, signal.SIGTERM), (6, signal.SIGINT), (11, signal.SIGTERM)])
def test_an_orderly_stop_finishes_the_step_and_saves_it(recipe, tmp_path, undisturbed, step, number):
    """Steps that are saved, evaluated, both or neither: each case once logged a step twice."""
    run = tmp_path / "run"
    result = train(recipe, run, report=stop_at(step, number))
    assert (result.stopped, result.step) == ("interrupted", step)
    assert state.newest_intact(run)[0] == run / f"step-{step}"
    events = []
    assert train(recipe, run, report=events.append).stopped == "finished"
    assert events[0].step == step
    assert [e.step for e in events if isinstance(e, Logged)] == list(range(step + 1, 13))
    assert outcome(run) == undisturbed


@pytest.mark.parametrize("step", [0, 6])
def test_a_stop_in_the_middle_of_an_evaluation(recipe, tmp_path, undisturbed, monkeypatch, step):
    """The interrupted evaluation must be counted, saved and logged once; at step 0 no checkpoint exists yet."""
    real, run, at = loop.scores, tmp_path / "run", iter(range(0, 99, 3))

    def interrupted(*args, **kwargs):
        if next(at) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "scores", interrupted)
    result = train(recipe, run)
    assert (result.stopped, result.step) == ("interrupted", step)
    monkeypatch.undo()
    events = []
    train(recipe, run, report=events.append)
    assert events[0].step == step
    assert [e.step for e in events if isinstance(e, Evaluated)] == list(range(step + 3, 13, 3))
    assert outcome(run) == undisturbed


@pytest.mark.parametrize("patience", [0, 2])
def test_a_run_that_ended_stays_as_it_is(recipe, tmp_path, patience):
    """Starting a finished run again must not train, evaluate, or change a file."""
    recipe = replace(recipe, patience=patience, optim=replace(recipe.optim, lr=0.0 if patience else 1e-2, min_lr=0.0))
    run = tmp_path / "run"
    first = train(recipe, run)
    assert (first.stopped, first.step) == (("early", 6) if patience else ("finished", 12))
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    events = []
    assert train(recipe, run, report=events.append) == first
    assert [type(event) for event in events] == [Started]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_epochs_are_turned_into_steps_and_resumed(recipe, tmp_path):
    """People count in epochs; the steps that they are must be said, stay the same when the run goes on, and grow with them."""
    run, events = tmp_path / "run", []
    train(replace(recipe, epochs=0.1), run, report=stop_at(3))
    tokens = len(corpus(recipe).train_ids)
    steps = math.ceil(0.1 * ((tokens - 1) // 16) / 4)
    assert steps > 3
    assert train(replace(recipe, epochs=0.1), run, report=events.append).step == steps
    assert f"epochs=0.1 are {steps} steps: {(tokens - 1) // 16} windows of 16 tokens, 4 in a step" in events[0].notes
    assert train(replace(recipe, epochs=0.2), run).step in (2 * steps, 2 * steps - 1)
    assert "epochs 0.2 there, 0.1 here" in refusal(train, replace(recipe, epochs=0.1), run)


@pytest.mark.parametrize(("at", "min_lr"), [(5, 1e-2), (None, 1e-2), (6, 1e-3)], ids=["stopped", "finished", "falling rate"])
def test_more_steps_go_on_with_the_same_run(recipe, tmp_path, at, min_lr):
    """They were refused as another recipe. With a rate that does not depend on the end, the bits are those of the longer run."""
    run, events, recipe = tmp_path / "run", [], replace(recipe, optim=replace(recipe.optim, min_lr=min_lr))
    longer = replace(recipe, steps=24)
    train(recipe, run, report=stop_at(at) if at else lambda event: None)
    assert train(longer, run, report=events.append).step == 24
    assert events[0].step == (at or 12)
    (said,) = [note for note in events[0].notes if "now ends at step 24, not 12" in note]
    train(longer, tmp_path / "whole")
    same = min_lr == recipe.optim.lr
    assert (outcome(run) == outcome(tmp_path / "whole")) == same == ("bit for bit" in said)
    assert ("falls to 1.0e-03 at the later end: 9.6e-03 from here on, where it was 7.8e-03" in said) != same
    assert "steps 24 there, 12 here" in refusal(train, recipe, run)
    assert json.loads((run / "recipe.json").read_text())["steps"] == 24


@pytest.mark.parametrize("rank", [0, 2], ids=["weights", "adapters"])
def test_another_recipe_may_begin_from_the_weights(recipe, init, tmp_path, rank):
    """The refusal must name what works: its advice is followed here. A model of another shape cannot begin from them."""
    recipe = replace(recipe, lora=Lora(r=rank), name="run")
    init = str(init) if rank else None
    train(recipe, tmp_path / "run", init=init)
    other = replace(recipe, optim=replace(recipe.optim, lr=5e-3))
    (tmp_path / "run-2").mkdir()
    words = shlex.split(refusal(train, other, tmp_path / "run", init=init).rpartition("add to the command: ")[2])
    assert words == ["--init", str(tmp_path / "run" / "step-12"), "--out", str(tmp_path / "run-3")]
    events = []
    train(other, words[3], init=words[1], report=events.append)
    last = [row["val_loss"] for row in metrics(tmp_path / "run") if "val_loss" in row][-1]
    assert next(event for event in events if isinstance(event, Evaluated)).val.loss == pytest.approx(last, abs=1e-6)
    says = refusal(train, replace(other, model=replace(other.model, n_layer=2)), tmp_path / "run", init=init)
    assert says.endswith("start anew with --fresh")


@pytest.mark.parametrize("rank", [0, 2], ids=["weights", "adapters"])
def test_a_fine_tune_goes_on_without_the_model_it_began_with(recipe, init, tmp_path, rank):
    """The folder holds all that a resume needs: moving or changing --init must not change or stop the run."""
    recipe = replace(recipe, lora=Lora(r=rank, dropout=0.1))
    train(recipe, tmp_path / "undisturbed", init=str(init))
    train(recipe, tmp_path / "run", init=str(init), report=stop_at(7))
    shutil.rmtree(init)
    assert train(recipe, tmp_path / "run", init=str(init)).stopped == "finished"
    assert outcome(tmp_path / "run") == outcome(tmp_path / "undisturbed")


DAMAGE = {
    "a flipped bit in the weights": (lambda p: flip(p / "model.safetensors"), "model.safetensors does not have the sha256"),
    "a flipped bit in the moments": (lambda p: flip(p / "optimizer.safetensors"), "optimizer.safetensors does not have"),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "a manifest of nothing": (lambda p: (p / "manifest.json").write_text("{}"), "manifest.json does not list config.json"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(recipe, run, undisturbed, what):
    """safetensors has no checksum: without the manifest, training would resume from flipped bits."""
    damage, reason = DAMAGE[what]
    damage(run / "step-10")
    events = []
    train(recipe, run, report=events.append)
    assert events[0].step == 8
    assert [note for note in events[0].notes if "step-10" in note and reason in note and "skipped" in note]
    assert outcome(run) == undisturbed


def test_with_every_checkpoint_damaged_the_run_begins_again(recipe, run, undisturbed):
    """Step 0 is evaluated and logged again; metrics must hold it once."""
    for path in state.checkpoints(run):
        flip(path / "model.safetensors")
    events = []
    train(recipe, run, report=events.append)
    assert events[0].step == 0
    assert len([note for note in events[0].notes if "skipped" in note]) == 2
    assert outcome(run) == undisturbed


def test_damaged_newer_checkpoints_do_not_push_out_whole_ones(recipe, tmp_path):
    """Keeping the two highest numbers kept two damaged checkpoints, and deleted the one just written."""
    run = tmp_path / "run"
    train(recipe, run, report=stop_at(4))
    for name in ("step-98", "step-99"):
        shutil.copytree(run / "step-4", run / name)
        flip(run / name / "model.safetensors")
    train(recipe, run, report=stop_at(5))
    assert state.newest_intact(run)[0] == run / "step-5"
    assert [path.name for path in state.checkpoints(run)] == ["step-99", "step-98", "step-5", "step-4"]


def test_a_damaged_best_model_is_made_again_from_a_checkpoint_before_it(recipe, run, undisturbed):
    """The best model's hashes were never read: a flipped bit in it was kept, and published."""
    train(recipe, run)
    assert state.newest_intact(run) == (run / "step-12", [])
    flip(run / "best" / "model.safetensors")
    events = []
    assert train(recipe, run, report=events.append).stopped == "finished"
    best = json.loads((run / "best" / "progress.json").read_text())["step"]
    assert events[0].step == 10 < best
    assert any("step-12: not before best/, in which model.safetensors does not have" in note for note in events[0].notes)
    assert outcome(run) == undisturbed


def test_a_damaged_best_model_that_no_checkpoint_can_make_again_is_said(recipe, run):
    """Training on would end with the damaged model as the best one."""
    files = state.checkpoints(run)
    for path in ("model.safetensors", "progress.json"):
        flip(run / "best" / path)
    assert "no checkpoint is before it; restore it from a copy, or start anew with --fresh" in refusal(train, recipe, run)
    assert state.checkpoints(run) == files
    assert train(recipe, run, fresh=True).stopped == "finished"


def test_leftovers_of_a_kill_are_cleared(recipe, run, undisturbed):
    """A directory killed between its two renames is restored; the newest checkpoint was not, and older steps were repeated."""
    best = (run / "best" / "model.safetensors").read_bytes()
    for name in ("best", "step-10"):
        os.rename(run / name, run / f".{name}.old")
    shutil.copytree(run / "step-8", run / ".step-11.partial")
    shutil.copytree(run / "step-8", run / ".step-8.old")
    (run / ".seen-a1_b2c3d").touch()  # a mark of ranks that write together
    seen = []

    def look(event):
        if isinstance(event, Started):
            seen.append((event.step, (run / "best" / "model.safetensors").read_bytes()))

    train(recipe, run, report=look)
    assert seen == [(10, best)]
    assert not [path for path in run.iterdir() if path.name.startswith(".")]
    assert outcome(run) == undisturbed


def cleared_and_killed(recipe: Recipe, run: Path, last: str) -> None:
    """Start anew, and be killed behind the removal of the folder ``last``."""
    remove = shutil.rmtree

    def remove_and_kill(path, **settings):
        remove(path, **settings)
        if path == run / last:
            os.kill(os.getpid(), signal.SIGKILL)

    shutil.rmtree = remove_and_kill
    train(recipe, run, fresh=True)


def test_a_fresh_start_that_is_killed_while_it_clears_is_the_run_that_goes_on(recipe, run, undisturbed):
    """Started again without --fresh, it resumed what was left of the old run."""
    killed(cleared_and_killed, recipe, run, "step-10")
    assert (run / "metrics.jsonl").exists(), "killed when the folder was clear"
    with pytest.raises(InputError, match="holds a run of another recipe"):
        train(replace(recipe, steps=3), run)
    events = []
    assert train(recipe, run, report=events.append).stopped == "finished"
    assert events[0].step == 0
    assert outcome(run) == undisturbed


@pytest.mark.parametrize("torn", ['{"step": 5, "lo', "\x00\x00", "[]"])
def test_a_line_torn_by_the_kill_is_cut_off(run, torn):
    """An incomplete line in the middle of the file would break every reader."""
    before = (run / "metrics.jsonl").read_text()
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "loss": 9.9}\n' + torn)
    with closing(Metrics(run, state.Progress(10), Recipe())) as metrics:
        metrics.write(step=11, loss=1.0)
    assert (run / "metrics.jsonl").read_text() == before + '{"step": 11, "loss": 1.0}\n'


def test_what_a_checkpoint_counts_on_is_on_the_disk_before_it_appears(recipe, tmp_path, monkeypatch):
    """Data must be synced before the rename: after a power cut, the directory would have empty files."""
    did: list[tuple[str, str]] = []
    real = os.rename

    def path_of(handle: int) -> str:
        return os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path)

    monkeypatch.setattr(os, "fsync", lambda handle: did.append(("sync", path_of(handle))))
    monkeypatch.setattr(os, "rename", lambda a, b: (did.append(("rename", os.path.relpath(b, tmp_path))), real(a, b)))
    train(replace(recipe, steps=1), tmp_path / "run")
    appears = did.index(("rename", "run/step-1"))
    synced = [path for what, path in did[:appears] if what == "sync"]
    for name in ("optimizer.safetensors", "model.safetensors", "progress.json", "manifest.json"):
        assert [path for path in synced if path.startswith("run/.step-1.partial") and name in path], name
    assert synced[-1] == "run/.step-1.partial"
    assert "run/metrics.jsonl" in synced
    assert ("sync", "run") in did[appears:]


def trained_and_killed(recipe: Recipe, run: Path, at: int) -> None:
    """Train, and be killed when a file of the run is opened, renamed or removed for the ``at``-th time."""
    left = iter(range(at - 1))

    def count(event: str, given: tuple[object, ...]) -> None:
        counts = event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(run) in str(given)
        if counts and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    train(recipe, run)


@pytest.mark.slow
def test_killed_at_random_moments(recipe, tmp_path):
    """SIGKILL behind a step, or amid a checkpoint or an evaluation, at moments that the run counts: it must resume exactly."""
    long = replace(recipe, steps=45, eval_every=2, save_every=3)
    run, rng, reached = tmp_path / "run", random.Random(1), []
    train(long, tmp_path / "whole")
    for _ in range(4):
        killed(trained_and_killed, long, run, rng.randint(250, 400))
        reached.append(max((int(path.name[5:]) for path in state.checkpoints(run)), default=0))
    assert reached == sorted(reached)
    assert len({0, *reached} - {45}) == 5  # it was killed in the middle, and resumed from there
    assert train(long, run).stopped == "finished"
    assert outcome(run) == outcome(tmp_path / "whole")
