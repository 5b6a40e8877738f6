"""Training in several processes: the same result as one process, errors on all ranks, and recovery from the loss of one."""

import json
import os
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import forks
from support.ranks import Run, command, job, one, reached
from support.training import metrics, outcome

from gpt2.errors import InputError
from gpt2.train import models, state
from gpt2.train.corpus import corpus
from gpt2.train.evaluation import scores, slowest
from gpt2.train.loop import train
from gpt2.train.parallel import ALONE, Ranks
from gpt2.train.recipe import Lora, Recipe


def furthest(a: Path, b: Path) -> float:
    """The largest difference of any training or held-out loss of two runs, relative to the first run."""
    pairs = list(zip(metrics(a), metrics(b), strict=True))
    assert [row.keys() for row, _ in pairs] == [row.keys() for _, row in pairs]
    return max(abs(x[key] - y[key]) / x[key] for x, y in pairs for key in ("loss", "val_loss") if key in x)


@pytest.fixture(scope="module")
def shared(recipe) -> Recipe:
    """A batch that two and three processes can divide; no dropout, because its masks depend on the rank."""
    return replace(recipe, batch_size=6, dropout=0.0, device="cpu", model=replace(recipe.model, n_layer=2))


@pytest.fixture(scope="module")
def alone(shared, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(shared, folder)
    return folder


@pytest.mark.parametrize(("size", "how", "parts"), [(2, "ddp", 1), pytest.param(3, "fsdp", 3, marks=pytest.mark.slow)])
def test_many_compute_what_one_does(shared, alone, tmp_path, size, how, parts):
    """Gradients that are summed instead of averaged, or taken from other rows, train another model without an error."""
    run = Run(replace(shared, parallel=how, grad_accum=parts), tmp_path / "run")
    assert job(size, run) == ["finished"] * size
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(len(row["rank_tokens_per_second"]) == size for row in rows if "val_loss" in row)
    assert slowest((0.0, 900.0, 450.4)) == "slowest rank 2: 450 tok/s computing, fastest 900"  # rank 0 had no window
    assert furthest(alone, tmp_path / "run") < 1e-6
    mine, theirs = (load_file(folder / "best" / "model.safetensors") for folder in (tmp_path / "run", alone))
    assert {name: tensor.shape for name, tensor in mine.items()} == {name: tensor.shape for name, tensor in theirs.items()}
    # AdamW divides by the root of the squared gradient, which is only rounding where the gradient is.
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) < 1e-4


def test_ranks_score_the_windows_of_one(shared):
    """A last window alone on a rank had no tokens before it, so that two processes had another held-out loss than one."""
    text, trained = corpus(shared), models.new(shared, corpus(shared).tokenizer)
    told = {"sum": lambda _, *values: (*values[:2], 1) if values[1] else (0, 1, 1), "gathered": lambda _, own: []}
    for count in (12, 26, 33, 40):  # windows of 16 tokens
        short = replace(text, val_ids=text.val_ids[:count])
        ranks = ALONE, *(type("Told", (Ranks,), told)(n, 3) for n in range(3))
        whole, *parts = (scores(trained, short, shared, each).val for each in ranks)
        assert sum(each.loss * each.tokens for each in parts) / whole.tokens == pytest.approx(whole.loss, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then", "how"), [(2, 1, "fsdp"), (1, 3, "ddp")])
def test_saved_on_some_and_gone_on_with_on_others(shared, alone, tmp_path, first, then, how):
    """A checkpoint must resume on another number of processes: it must not hold one rank's slice or moments alone."""
    run = Run(replace(shared, parallel=how), tmp_path / "run", stop=5, by=first - 1)
    assert (job(first, run) if first > 1 else [one(run)]) == ["interrupted"] * first
    assert [path.name for path in state.checkpoints(tmp_path / "run")] == ["step-5", "step-4"]
    run = Run(replace(shared, parallel=how), tmp_path / "run")
    assert (job(then, run) if then > 1 else [one(run)]) == ["finished"] * then
    assert furthest(alone, tmp_path / "run") < 1e-6


@pytest.fixture(scope="module")
def tokens(shared, text, tmp_path_factory) -> Recipe:
    """The recipe on token files; beside them, in a folder of that name and ".other", are some that differ in one id."""
    read = corpus(shared)
    folder = tmp_path_factory.mktemp("tokens") / "files"
    for name, change in (("files", 0), ("files.other", 1)):
        read.tokenizer.save(folder.with_name(name), n_positions=16)
        ids = read.train_ids.astype("<u2")
        ids[100] = (ids[100] + change) % read.tokenizer.n_vocab
        ids.tofile(folder.with_name(name) / "train.bin")
        read.val_ids.astype("<u2").tofile(folder.with_name(name) / "val.bin")
    return replace(shared, data=replace(shared.data, path="", tokens=str(folder)))


@pytest.mark.slow
def test_ranks_map_the_token_files_that_the_first_has_checked(tokens, alone, tmp_path):
    """Eight ranks that each read and hash the same gigabytes wait for each other's disk."""
    assert job(2, Run(tokens, tmp_path / "run")) == ["finished"] * 2
    assert furthest(alone, tmp_path / "run") < 1e-6


@pytest.mark.slow
def test_ranks_wait_for_hours_while_the_first_tokenizes(shared, tmp_path):
    """Other ranks gave up after ten minutes, when rank 0 had not yet tokenized a text of gigabytes."""
    assert job(2, Run(replace(shared, steps=2), tmp_path / "run", change="rank 0 begins late")) == ["finished"] * 2


@pytest.mark.parametrize(
    ("change", "batch_size", "says"),
    [
        ("no folder on rank 0", 6, "/file/run: cannot write there"),
        pytest.param("another text on machine 1", 6, "rank 1 reads another text than rank 0", marks=pytest.mark.slow),
        pytest.param("", 5, "5 in 1 parts does not divide among 2 processes; set batch_size", marks=pytest.mark.slow),
    ],
)
def test_what_one_rank_cannot_do_stops_all(shared, tokens, tmp_path, change, batch_size, says):
    """An error on one rank must stop all ranks: otherwise they wait ten minutes and report a lost connection."""
    (tmp_path / "file").write_text("")
    first, second = job(2, Run(replace(tokens, batch_size=batch_size), tmp_path, change=change))
    assert first == second
    assert first.startswith("error: ")
    assert says in first


def test_a_loss_that_one_rank_cannot_count_is_everyones(shared, tmp_path):
    """If one rank alone skips a step, its weights differ from then on; so a loss that is not finite counts on all ranks."""
    run = Run(replace(shared, on_divergence="skip"), tmp_path / "run", change="nan on rank 1")
    assert job(2, run) == ["finished"] * 2
    assert [row["step"] for row in metrics(tmp_path / "run") if "diverged" in row] == [6]  # the first call is the warm-up pass


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_adapters_shared_and_gone_on_with(shared, alone, tmp_path, how):
    """Frozen weights have no gradient to average and no moments to slice."""
    tuned = replace(shared, lora=Lora(r=2), parallel=how, steps=6)
    train(replace(tuned, parallel="ddp"), tmp_path / "one", init=str(alone / "best"))
    run = Run(tuned, tmp_path / "run", init=str(alone / "best"), stop=4)
    assert job(2, run) == ["interrupted"] * 2
    assert job(2, Run(tuned, tmp_path / "run", init=str(alone / "best"))) == ["finished"] * 2
    assert furthest(tmp_path / "one", tmp_path / "run") < 1e-6


# In every process of the job: no checkpoint is put in its place as long as a file of its name lies beside this one.
HELD = """
import os, time
real = os.rename
def rename(old, new):
    end_of_time = time.monotonic() + 300  # a test that failed removes no file
    while os.path.exists(os.path.join(os.path.dirname(__file__), os.path.basename(new))) and time.monotonic() < end_of_time:
        time.sleep(0.01)
    real(old, new)
os.rename = rename
"""


@pytest.mark.slow
def test_workers_are_killed_and_ctrl_c_is_pressed_and_the_job_ends_as_if_neither_had_been(recipe, tmp_path):
    """To the bit: DDP's first gradient buckets differ. On Ctrl-C a worker and the launcher waited for each other."""
    shared = replace(recipe, batch_size=4, steps=80, eval_every=20, save_every=8)
    whole, run = tmp_path / "whole", tmp_path / "run"
    at = {tmp_path / "step-16": 0, tmp_path / "step-32": 1, tmp_path / "step-64": None}
    for hold in at:
        hold.touch()
    (tmp_path / "sitecustomize.py").write_text(HELD)
    process, lost = command(shared, run), set()
    for hold, victim in at.items():
        reached(run, int(hold.name[5:]), process)
        pids = sorted(workers(process) - lost)
        assert len(pids) == 2
        if victim is None:
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(pids[victim], signal.SIGKILL)
        hold.unlink()
        lost.update(pids)
    done = forks.finished(process, 130, timeout=300)
    said = done.stdout + done.stderr
    assert "restarted after a process was lost (restart 2)" in said
    assert "Traceback" not in said
    steps = [row["step"] for row in metrics(run) if "loss" in row]
    assert state.newest_intact(run) == (run / f"step-{steps[-1]}", [])
    assert f"interrupted and saved at step {steps[-1]}" in said
    assert job(2, Run(shared, run)) == job(2, Run(shared, whole)) == ["finished"] * 2
    assert outcome(run) == outcome(whole)
    forks.finished(command(shared, run, size=1))  # nothing is left to do, and the launcher ends with 0


def workers(process: forks.Fork) -> set[int]:
    """The ids of a job's processes; the first is rank 0's."""
    children = [pid for found in Path(f"/proc/{process.pid}/task").glob("*/children") for pid in found.read_text().split()]
    found = set()
    for pid in children:
        with suppress(OSError):  # it may end in between
            found |= {int(pid)} if b"train" in Path(f"/proc/{pid}/cmdline").read_bytes() else set()
    return found


def test_a_device_that_is_not_there_is_refused(shared, tmp_path):
    name = "mps" if torch.cuda.is_available() else "cuda"
    with pytest.raises(InputError, match=f"device is '{name}', and this machine has .*; set device=auto"):
        train(replace(shared, device=name), tmp_path / "run")
