"""What a run reports beside its losses: overfitting, the remaining time, and all metrics in TensorBoard."""

import json
import sys
import time
from dataclasses import replace

import pytest
from support.commands import refusal
from support.training import metrics

from gpt2.train.loop import Evaluated, train
from gpt2.train.metrics import Pace
from gpt2.train.recipe import Recipe
from gpt2.train.runs import overfitting


def rows(train_losses, val_losses):
    """Ten steps between evaluations, a training loss in the middle of each ten."""
    found = [{"step": 0, "val_loss": val_losses[0]}]
    for i, (loss, val) in enumerate(zip(train_losses, val_losses[1:], strict=True)):
        found += [{"step": 10 * i + 5, "loss": loss}, {"step": 10 * i + 10, "val_loss": val}]
    return found


def test_losses_that_part_are_reported_with_both_figures():
    said = overfitting(rows([2.0, 1.5, 1.0], [3.0, 2.0, 2.1, 2.3]), best_step=10)
    assert said == (
        "overfitting: since step 10 the training loss fell from 2.0000 to 1.0000 and the held-out loss rose from 2.0000 to 2.3000"
    )


@pytest.mark.parametrize(
    ("train_losses", "val_losses", "best_step"),
    [
        ([2.0, 1.5, 1.0], [3.0, 2.0, 1.9, 1.8], 30),  # both losses fall
        ([2.0, 1.5, 1.0], [3.0, 2.0, 2.0, 2.01], 10),  # within noise
        ([2.0, 2.5, 3.0], [3.0, 2.0, 2.5, 3.0], 10),  # both losses rise: the run fails, but does not overfit
        ([2.0], [3.0, 3.5], 0),  # the best model is the initial one: there is no earlier training to compare with
        ([], [3.0], 0),
    ],
)
def test_no_warning_where_nothing_parts(train_losses, val_losses, best_step):
    """No warning while both losses move together: users ignore a warning that always appears."""
    assert overfitting(rows(train_losses, val_losses), best_step) == ""


def test_a_text_known_by_heart_is_warned_of_and_stopped(recipe, tmp_path):
    """Overfitting gives a warning, and fine-tuning stops once the held-out loss no longer falls."""
    few = tmp_path / "few.txt"
    few.write_text("the king doth sleep, and so speak no more,\n" * 3 + "while villains art, thou villain, night and art,\n")
    train(replace(recipe, steps=1), tmp_path / "first")
    data = replace(recipe.data, path=str(few), held_out=0.25)
    heart = replace(recipe, steps=400, eval_every=10, dropout=0.0, patience=-1, data=data)
    events = []
    result = train(heart, tmp_path / "run", init=str(tmp_path / "first" / "best"), report=events.append)
    assert result.stopped == "early"
    assert result.step < 400
    assert any("overfitting" in event.warning for event in events if isinstance(event, Evaluated))
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["patience"] == 5


def test_time_left_counts_steps_and_evaluations(monkeypatch):
    """Evaluations take a third of a short run: the estimate must include them."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pace = Pace(0, Recipe(steps=100, eval_every=30, batch_size=2, context=5))
    with pace.paused(0):
        now[0] += 7
    now[0] += 10 * 0.5
    assert pace.seconds_left(10) == pytest.approx(90 * 0.5 + 4 * 7)  # after steps 30, 60, 90 and 100
    assert pace(10) == (pytest.approx(10 * 10 / 5), pytest.approx(90 * 0.5 + 4 * 7), 0.0)


def test_tensorboard_holds_what_the_file_does(recipe, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(replace(recipe, tensorboard=True), tmp_path / "run")
    board = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    lines = metrics(tmp_path / "run")
    for name in ("loss", "val_loss", "lr", "grad_norm"):
        logged = [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in lines if name in row]
        assert [(event.step, event.value) for event in board.Scalars(name)] == logged


def test_weights_and_biases_holds_what_the_file_does(recipe, tmp_path, monkeypatch):
    """Offline, in the run's folder alone; a resumed run keeps its id."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    for name in ("CONFIG_DIR", "CACHE_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    train(replace(recipe, wandb=True), tmp_path / "run")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    lines, logged, deadline = metrics(tmp_path / "run"), {}, time.monotonic() + 60
    while len(logged.get("val_loss", ())) < 5 and time.monotonic() < deadline:  # wandb's process writes on after finish()
        logged = {}
        for record in map(Record.FromString, leveldb_records(file.read_bytes())):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            for name, value in items.items():
                logged.setdefault(name, []).append((items["at_step"], value))
        time.sleep(0.1)
    for name in ("loss", "val_loss", "lr", "grad_norm"):
        assert logged[name] == [(row["step"], row[name]) for row in lines if name in row], name
    assert "sample" not in logged
    name = (tmp_path / "run" / "wandb-id.txt").read_text()
    train(replace(recipe, wandb=True), tmp_path / "run")
    assert (tmp_path / "run" / "wandb-id.txt").read_text() == name


def leveldb_records(data: bytes):
    """The records of a LevelDB log with W&B's header of seven bytes: blocks of 32 kB, chunks with checksum, length and kind."""
    whole, at = b"", 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


@pytest.mark.parametrize(("package", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_board_is_one_line(recipe, tmp_path, monkeypatch, package, module):
    """The traceback of an import says nothing of the extra to install."""
    monkeypatch.setitem(sys.modules, module, None)
    said = refusal(train, replace(recipe, **{package: True}), tmp_path / "run")
    assert said == f"{package} is not installed: pip install 'gpt2-toolkit[{package}]', or --set {package}=false"
