"""What a run reports beside its losses: overfitting, the remaining time, and all metrics in TensorBoard."""

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

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
    pace.tokens = 10 * 10
    assert pace(10) == (pytest.approx(10 * 10 / 5), pytest.approx(90 * 0.5 + 4 * 7), 0.0)


def test_weights_and_biases_gets_what_the_file_does(recipe, tmp_path, monkeypatch):
    """By a stand-in of its package, which the tests do not install: each metric once, and a resumed run keeps its id."""
    logged, opened, error = [], [], type("Error", (Exception,), {})
    run = SimpleNamespace(define_metric=lambda *args, **settings: None, log=logged.append, finish=lambda: None)
    package = SimpleNamespace(init=lambda **given: opened.append(given) or run, Settings=dict, Error=error)
    monkeypatch.setitem(sys.modules, "wandb", package)
    train(replace(recipe, wandb=True), tmp_path / "run")
    lines = metrics(tmp_path / "run")
    for name in ("loss", "val_loss", "lr", "grad_norm"):
        written = [(row["step"], row[name]) for row in lines if name in row]
        assert [(row["at_step"], row[name]) for row in logged if name in row] == written, name
    assert not any("sample" in row for row in logged)
    train(replace(recipe, wandb=True), tmp_path / "run")
    assert len({given["id"] for given in opened}) == 1 < len(opened)
    assert opened[0]["config"]["steps"] == recipe.steps
    assert opened[0]["settings"]["disable_code"]
    monkeypatch.setattr(package, "init", lambda **given: (_ for _ in ()).throw(error("no\nlogin")))
    assert "W&B: no login; run `wandb login`" in refusal(train, replace(recipe, wandb=True), tmp_path / "other")


@pytest.mark.parametrize(("package", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_board_is_one_line(recipe, tmp_path, monkeypatch, package, module):
    """The traceback of an import says nothing of the extra to install."""
    monkeypatch.setitem(sys.modules, module, None)
    said = refusal(train, replace(recipe, **{package: True}), tmp_path / "run")
    assert said == f"{package} is not installed: pip install 'gpt2-toolkit[{package}]', or --set {package}=false"
