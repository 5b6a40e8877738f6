"""The training loop learns, refuses options that contradict each other, and saves no broken model."""

import json
import math
import os
import resource
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.commands import refusal
from support.training import metrics, one_step, outcome, stop_at

from gpt2.checkpoint.checkpoint import open_path
from gpt2.config import GPT2Config
from gpt2.data import from_directory
from gpt2.measure.metrics import language_scores
from gpt2.measure.windows import Windows
from gpt2.model import GPT2
from gpt2.optim import adamw, learning_rate
from gpt2.train import loop, state
from gpt2.train.corpus import corpus
from gpt2.train.loop import Estimated, Evaluated, Logged, Started, train
from gpt2.train.loss import WithLoss
from gpt2.train.recipe import Data, Optim
from gpt2.train.step import Feed


def memorising(quiet, tmp_path, lr: float) -> list[Evaluated]:
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "text.txt"
    path.write_text("To be, or not to be: that is the question.\n" * 60)
    optim = Optim(lr=lr, min_lr=0.0, warmup=5, weight_decay=0.0)
    longer = replace(quiet, steps=40, batch_size=8, eval_every=40, sample_tokens=20, optim=optim)
    events = []
    data, model = replace(quiet.data, path=str(path)), replace(quiet.model, n_embd=32)
    train(replace(longer, data=data, model=model), tmp_path / "run", report=events.append)
    return [event for event in events if isinstance(event, Evaluated)]


def test_a_repeated_text_is_learnt(quiet, tmp_path):
    """A loop that does not learn must be noticed. Control: with a rate of zero, the loss stays, and equal is not better."""
    before, after = memorising(quiet, tmp_path / "still", lr=0.0)
    assert after.val.loss == before.val.loss > 2.5
    assert not after.best
    before, after = memorising(quiet, tmp_path, lr=2e-2)
    assert abs(before.val.loss - math.log(20)) < 0.3  # 20 characters, all equally likely at first
    assert after.val.loss < 1.0
    assert after.best
    assert after.sample.startswith("To be, o")


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 13, 400).astype(np.int32)


@pytest.fixture
def model() -> GPT2:
    torch.manual_seed(1)
    return GPT2(GPT2Config(13, 16, 16, 2, 2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()


def test_accumulated_parts_are_the_whole_batch(quiet, model, ids):
    """The usual bug: the sum of means, which makes the gradient of four parts four times too large."""
    free = replace(quiet, optim=replace(quiet.optim, clip=0.0))
    whole, split = (one_step(WithLoss(model), Feed(ids), replace(free, grad_accum=n)) for n in (1, 4))
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=1e-9, atol=1e-12, msg=name)


def test_clipping_scales_the_gradient_to_the_norm_and_reports_the_norm_before(quiet, model, ids):
    """Clipping each parameter alone changes the direction; logging the clipped norm hides every spike."""

    def stepped(clip: float) -> dict[str, torch.Tensor]:
        return one_step(WithLoss(model), Feed(ids), replace(quiet, optim=replace(quiet.optim, clip=clip)))

    free = stepped(0.0)
    norm = math.sqrt(sum(free[name].square().sum().item() for name, _ in model.named_parameters()))
    assert free["norm"].item() == pytest.approx(norm, rel=1e-6)
    clipped = stepped(norm / 4)
    assert clipped["norm"].item() == pytest.approx(norm, rel=1e-6)
    roomy = stepped(norm * 4)
    for name, _ in model.named_parameters():
        torch.testing.assert_close(clipped[name], free[name] / 4, rtol=1e-4, atol=1e-12)
        torch.testing.assert_close(roomy[name], free[name], rtol=0, atol=0)


def test_every_step_runs_at_its_scheduled_rate(recipe, tmp_path, monkeypatch):
    """The schedule must reach the optimizer: training without it looks normal."""
    used = []

    def watched(model, optim):
        optimizer = adamw(model, optim)
        optimizer.register_step_pre_hook(lambda o, *_: used.append([group["lr"] for group in o.param_groups]))
        return optimizer

    monkeypatch.setattr(loop, "adamw", watched)
    train(recipe, tmp_path / "run")
    scheduled = [learning_rate(step, recipe.steps, recipe.optim) for step in range(recipe.steps)]
    assert used == [[lr, lr] for lr in scheduled]
    assert [row["lr"] for row in metrics(tmp_path / "run") if "lr" in row] == scheduled


def test_events_and_metrics_report_the_same_run(recipe, tmp_path):
    """Tools read metrics.jsonl: every logged step once, in order, with val_loss at evaluations."""
    events = []
    result = train(replace(recipe, log_every=5), tmp_path / "run", report=events.append)
    assert isinstance(events[0], Started)
    assert events[0].step == 0
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "loss" in row] == [5, 10, 12]  # the last step is logged for any log_every
    assert [row["step"] for row in rows if "val_loss" in row] == [0, 3, 6, 9, 12]
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    assert [e.step for e in events if isinstance(e, Logged)] == [5, 10, 12]
    assert [e.step for e in events if isinstance(e, Estimated)] == [10]
    evaluated = [e for e in events if isinstance(e, Evaluated)]
    assert [row["val_loss"] for row in rows if "val_loss" in row] == [e.val.loss for e in evaluated]
    assert result.best_loss == min(e.val.loss for e in evaluated)
    assert (result.step, result.stopped) == (12, "finished")
    assert all(len(e.sample) == 8 + 4 for e in evaluated)
    # The best model has the score in the metrics: it is neither the last one nor one from before the step.
    model, tokenizer = open_path(tmp_path / "run" / "best").load(), from_directory(tmp_path / "run" / "best")
    ids, lengths = torch.tensor(corpus(recipe).val_ids).long(), torch.ones(tokenizer.n_vocab, dtype=torch.long)
    score = language_scores(model, ids, lengths, Windows(recipe.context), batch_size=recipe.batch_size)[0]
    assert score.loss == result.best_loss < evaluated[0].val.loss


def test_patience_counts_evaluations_without_a_better_one(recipe, tmp_path, monkeypatch):
    """The run must not stop one evaluation early or late, and a better score must reset the count."""
    losses = iter([5.0, 4.0, 4.0, 4.5, 3.0, 3.1, 3.2, 3.3])
    real = loop.scores
    monkeypatch.setattr(loop, "scores", lambda *a: (found := real(*a))._replace(val=replace(found.val, loss=next(losses))))
    result = train(replace(recipe, eval_every=1, patience=3, save_every=5), tmp_path / "run")
    assert (result.stopped, result.step, result.best_step, result.best_loss) == ("early", 7, 4, 3.0)
    assert (tmp_path / "run" / "step-7").is_dir()  # else the next start would repeat the last steps


def test_texts_too_short_are_refused_in_numbers(recipe, tmp_path):
    path, run = tmp_path / "short.txt", tmp_path / "run"
    data = replace(recipe.data, path=str(path))
    path.write_text("abcdefghij")
    says = refusal(train, replace(recipe, data=data), run)
    assert "the training text has 9 tokens, too few for a context of 16" in says
    assert "--set context=8" in says
    assert "no such file" in refusal(train, recipe, run, init=str(tmp_path / "none.safetensors"))
    assert not run.exists()  # a failed start leaves no files that make the next start refuse
    path.write_text("abcdefghij" * 2)
    shorter = replace(recipe, data=replace(data, held_out=0.05), context=8)
    assert "the validation text has 1 tokens" in refusal(train, shorter, run)


def test_validation_text_shorter_than_a_window_is_scored_in_a_shorter_one(recipe, tmp_path):
    """In a text of two pages the validation tenth is shorter than the context; it must be scored in a shorter window."""
    path = tmp_path / "short.txt"
    path.write_text("abcdefghij" * 10)
    events = []
    short = replace(recipe, data=replace(recipe.data, path=str(path)), steps=1)
    train(short, tmp_path / "run", report=events.append)
    assert events[0].val_tokens == 10 < short.context
    assert [e.val.tokens for e in events if isinstance(e, Evaluated)] == [9, 9]


def test_settings_that_do_not_fit_are_refused(recipe, tmp_path):
    assert "context 17 exceeds the 16 positions" in refusal(train, replace(recipe, context=17), tmp_path / "run")
    wrong = replace(recipe, data=Data(source="shakespeare"))
    assert "data.source is 'shakespeare'; give plays, all-plays, play:NAME" in refusal(train, wrong, tmp_path / "run")


def test_fine_tune_uses_the_models_own_vocabulary(recipe, text, init, tmp_path):
    """A fine-tune must keep the model's vocabulary: new ids for old rows are wrong. Unknown characters must be named."""
    other = tmp_path / "other.txt"
    other.write_text(text.read_text()[::-1])
    tuned = replace(recipe, steps=2, data=replace(recipe.data, path=str(other)), dropout=0.25)
    events = []
    train(tuned, tmp_path / "run", init=str(init), report=events.append)
    assert from_directory(tmp_path / "run" / "best").fingerprint == from_directory(init).fingerprint
    assert events[0].config.n_embd == 16
    other.write_text(text.read_text() + "Z" * 9)
    assert "'Z' (U+005A)" in refusal(train, tuned, tmp_path / "other", init=str(init))


def test_a_tokenizer_larger_than_the_model_is_refused(recipe, init, tmp_path):
    """Otherwise the first rare token raises an index error hours later."""
    pipeline = json.loads((init / "tokenizer.json").read_text())
    chars = dict(pipeline["model"]["vocab"])
    pipeline["model"]["vocab"]["Z"] = len(chars)
    (init / "tokenizer.json").write_text(json.dumps(pipeline))
    says = refusal(train, recipe, tmp_path / "run", init=str(init))
    assert f"the tokenizer has {len(chars) + 1} entries, the model {len(chars)}" in says


def test_a_file_that_changes_under_a_fine_tune_does_not_reach_it(recipe, init, tmp_path):
    """A mapped page that was never written shows the file's current bytes, another program's. Nor may training write to it."""
    before = {path.name: path.read_bytes() for path in init.iterdir()}
    train(recipe, tmp_path / "undisturbed", init=str(init))
    assert {path.name: path.read_bytes() for path in init.iterdir()} == before

    def overwrite(event):
        if isinstance(event, Started):
            with open(init / "model.safetensors", "r+b") as file:
                file.write(bytes((init / "model.safetensors").stat().st_size))

    train(recipe, tmp_path / "run", init=str(init), report=overwrite)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "undisturbed")


def test_dropout_is_the_recipes_and_not_the_models(recipe, init, tmp_path, monkeypatch):
    """The recipe's dropout replaces that of GPT-2's config (0.1 everywhere), also after a resume."""
    tuned = replace(recipe, dropout=0.25, attn_dropout=0.5)
    models = []
    monkeypatch.setattr(loop, "adamw", lambda model, optim: models.append(model) or adamw(model, optim))
    train(tuned, tmp_path / "run", init=str(init), report=stop_at(5))
    train(tuned, tmp_path / "run", init=str(init))
    for model in models:
        assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.25}
        assert [block.attn.attn_pdrop for block in model.h] == [0.5]


@pytest.fixture
def run(whole, tmp_path):
    """A finished run of the recipe; a test may change it."""
    return shutil.copytree(whole, tmp_path / "run")


def test_another_recipes_folder_is_refused_and_fresh_clears_it(recipe, run):
    """Training over another run mixes two metrics files and loses the old weights."""
    (run / "notes.txt").write_text("mine")
    other = replace(recipe, steps=3, optim=replace(recipe.optim, lr=2e-2))
    before = (run / "step-12" / "model.safetensors").read_bytes()
    says = refusal(train, other, run)
    assert "holds a run of another recipe (steps 12 there, 3 here; optim.lr 0.01 there, 0.02 here)" in says
    assert "--fresh" in says
    assert "init None there" in refusal(train, recipe, run, init=str(run / "best"))
    assert "is in" in refusal(train, other, run, init=str(run / "best"), fresh=True)
    assert (run / "step-12" / "model.safetensors").read_bytes() == before
    train(other, run, fresh=True)
    there = {"best", "held_out.jsonl", "notes.txt", "step-3", "metrics.jsonl", "recipe.json"}
    assert {path.name for path in run.iterdir()} == there
    assert [row["step"] for row in metrics(run) if "loss" in row] == [1, 2, 3]


def test_a_changed_description_or_an_older_recipe_file_is_the_same_run(recipe, run):
    """An older run's recipe lacks the text's hash and newer keys, and may gain an expected loss; it must still resume."""
    raw = json.loads((run / "recipe.json").read_text())
    del raw["text_sha256"], raw["attn_dropout"], raw["optim"]["beta1"]
    (run / "recipe.json").write_text(json.dumps(raw))
    assert train(replace(recipe, name="x", description="y", expect=1.0), run).stopped == "finished"


def test_a_changed_text_is_another_run(recipe, text, tmp_path):
    """The recipe names a path, not its content: resuming with another text must be refused."""
    mine = tmp_path / "mine.txt"
    recipe = replace(recipe, steps=2, data=replace(recipe.data, path=str(mine)))
    mine.write_text(text.read_text())
    train(recipe, tmp_path / "run")
    mine.write_text(text.read_text().replace("villain", "nillaiv"))  # same length, same characters
    assert "the text is not the one this run began with" in refusal(train, recipe, tmp_path / "run")


@pytest.mark.parametrize(("name", "fresh"), [("best", True), ("metrics.jsonl", False), ("step-5", True)])
def test_a_strangers_files_are_not_clobbered(recipe, tmp_path, name, fresh):
    """`--out .` in a project with its own `best/` deleted that folder."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "keep").write_text("mine")
    assert f"holds {name} but no recipe.json" in refusal(train, recipe, tmp_path, fresh=fresh)
    for foreign in (b'{"flour": 500}', b"\xff{"):
        (tmp_path / "recipe.json").write_bytes(foreign)
        assert "not the recipe of a run;" in refusal(train, recipe, tmp_path, fresh=fresh)
    assert (tmp_path / name / "keep").read_text() == "mine"


def test_two_processes_do_not_share_a_folder(recipe, run):
    """The same command in two terminals: each process would rename the checkpoints of the first one away."""
    with state.locked(run):
        assert "another process is training there" in refusal(train, recipe, run)
    assert train(recipe, run).stopped == "finished"


@pytest.mark.parametrize(("file", "at"), [("step-12/optimizer.safetensors", 8), ("metrics.jsonl", 5)])
def test_full_disk_is_one_line_and_leaves_the_last_checkpoint(recipe, tmp_path, file, at):
    """A full disk must leave no half-written checkpoint, nor delete the old one too early; closing the log was a traceback."""
    wide = replace(recipe, model=replace(recipe.model, n_embd=32))
    train(wide, tmp_path / "undisturbed")
    run, soft_hard = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(event):
        if isinstance(event, Logged) and event.step == at:
            full = run / file if file == "metrics.jsonl" else tmp_path / "undisturbed" / file
            limit = full.stat().st_size + (9 if file == "metrics.jsonl" else -1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, soft_hard[1]))

    try:
        says = refusal(train, wide, run, report=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    assert "cannot write there (File too large); make room" in says
    assert sorted(path.name for path in run.iterdir()) == ["best", "held_out.jsonl", "metrics.jsonl", "recipe.json", "step-4"]
    train(wide, run)
    assert outcome(run) == outcome(tmp_path / "undisturbed")


def test_a_second_interrupt_acts_at_once(recipe, tmp_path):
    """The second Ctrl-C must stop the run at once, without an evaluation."""

    def twice(event):
        if isinstance(event, Logged) and event.step == 6:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            train(recipe, tmp_path / "run", report=twice)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [path.name for path in state.checkpoints(tmp_path / "run")] == ["step-4"]
    assert train(recipe, tmp_path / "run").stopped == "finished"
