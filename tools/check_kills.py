"""Kill training, or fill its disk, at random moments; what it ends with must not differ by a bit.

    python tools/check_kills.py [--runs 100] [--full]

Two SIGKILLs a run, one of them inside a save; or, with --full, two disks without room (a tmpfs, which root may mount). After
each, the newest checkpoint is loaded as a resumed run does. Every run is compared with one that nobody disturbed, byte for byte
but for times; a control has another seed. Exits 1 if a run differs.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

import gpt2
from gpt2.checkpoint.card import CURVES
from gpt2.checkpoint.saving import CARD
from gpt2.train import state
from gpt2.train.loop import train
from gpt2.train.recipe import Data, NewModel, Optim, Recipe

OF_CARD = (CARD, CURVES)  # derived from the rest, with the folder's name
TIMED = ("tokens_per_second", "seconds_left", "mfu")  # what metrics.jsonl says beside losses differs from run to run
LEFT = 1_000_000  # bytes at most that a full disk has left; a checkpoint takes five times that
SIZES = {"steps": 24, "batch_size": 4, "context": 32, "log_every": 1, "eval_every": 4, "save_every": 3, "eval_tokens": 400}


def recipe(text: Path, **changes: object) -> Recipe:
    """With dropout, evaluations and saves that fall apart, and a model large enough that writing it takes a moment."""
    model, optim = NewModel(n_layer=2, n_embd=128, n_head=4, n_positions=32), Optim(lr=1e-2, min_lr=1e-3, warmup=3)
    data = Data(path=str(text), tokenizer="chars")
    usual = {"name": "kills", **SIZES, "dropout": 0.1, "sample_tokens": 4, "device": "cpu"}
    return Recipe(**{**usual, "data": data, "model": model, "optim": optim, **changes})


def outcome(folder: Path) -> dict[str, object]:
    """All that a run leaves and that is not a time: its last checkpoint and best/ byte for byte, and its logged losses."""
    last = state.checkpoints(folder)[0]
    every = [path for where in (last, folder / "best") for path in where.rglob("*") if path.is_file()]
    kept = {str(path.relative_to(folder)): path.read_bytes() for path in every if path.name not in OF_CARD}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {**kept, "metrics": [{key: value for key, value in row.items() if key not in TIMED} for row in rows]}


@contextlib.contextmanager
def disk_at(folder: Path, small: bool) -> Iterator[Path]:
    """Make a folder, on a disk of its own if ``small``."""
    folder.mkdir()
    if small:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        if small:
            subprocess.run(["umount", "--lazy", folder], check=True)


def loadable(folder: Path) -> bool:
    """Do what a resumed run does first; a run killed before its first save has nothing, and needs nothing."""
    newest, _ = state.newest_intact(folder)
    return not state.checkpoints(folder) if newest is None else gpt2.load(str(newest)).config.n_layer == 2


def saving(folder: Path) -> bool:
    return any(state.ASIDE.fullmatch(path.name) for path in folder.glob(".*"))


def logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text(errors="replace").count('"loss"') if path.is_file() else 0


def wait_for_a_moment(process: multiprocessing.Process, folder: Path, in_a_save: bool, rng: random.Random) -> None:
    """Wait some steps and, if asked, until a save has begun and a part of it is written."""
    aim = logged(folder) + rng.randint(1, 9)
    while process.is_alive() and logged(folder) < aim:
        time.sleep(0.001)
    while in_a_save and process.is_alive() and not saving(folder):
        pass
    time.sleep(rng.uniform(0, 0.01 if in_a_save else 0.05))


def filled(disk: Path, process: multiprocessing.Process, rng: random.Random) -> bool:
    """Leave less room than a save takes until the process ends; return whether it failed."""
    room = os.statvfs(disk)
    with contextlib.suppress(OSError):  # the run fills it at the same time
        (disk / "ballast").write_bytes(bytes(room.f_bavail * room.f_frsize - rng.randrange(LEFT)))
    process.join(120)
    (disk / "ballast").unlink()
    return process.exitcode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as every process here: sums in another order would be another run
    os.environ["OMP_NUM_THREADS"] = "1"
    rng, found = random.Random(args.seed), dict.fromkeys(("runs", "faults", "inside a save", "loadable", "identical"), 0)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpt2.train.loop", "torch._dynamo"])
    with tempfile.TemporaryDirectory() as name, disk_at(Path(name, "disk"), args.full) as disk:
        work, words = Path(name), ["thou", "art", "a", "villain", "and", "the", "king", "doth", "sleep"]
        (work / "text.txt").write_text(" ".join(random.Random(0).choices(words, k=4000)))
        wanted = recipe(work / "text.txt")
        train(wanted, work / "undisturbed")
        train(replace(wanted, seed=1), work / "other")
        if (expected := outcome(work / "undisturbed")) == outcome(work / "other"):
            raise SystemExit("control: a run of another seed ends the same; this comparison sees nothing")
        for index in range(args.runs):
            folder = disk / f"run-{index}"
            for in_a_save in (index % 2 == 0, index % 2 == 1, None):  # the third runs to its end
                process = context.Process(target=train, args=(wanted, folder))
                process.start()
                if in_a_save is not None:
                    wait_for_a_moment(process, folder, in_a_save, rng)
                    if not (args.full and filled(disk, process, rng)):
                        process.kill()
                process.join()
                if in_a_save is not None:
                    if process.exitcode == 0 and args.full:  # it fitted: each save makes room for the next one
                        break
                    if process.exitcode == 0:
                        raise SystemExit(f"run {index} ended before it was killed")
                    found["faults"] += 1
                    found["inside a save"] += saving(folder)
                    found["loadable"] += loadable(folder)
            found["runs"] += 1
            found["identical"] += process.exitcode == 0 and outcome(folder) == expected
            shutil.rmtree(folder)
            print(f"\r{found}", end="", file=sys.stderr, flush=True)
    ok = found["loadable"] == found["faults"] and found["identical"] == found["runs"]
    print(json.dumps({**found, "torch": torch.__version__, "ok": ok}))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
