"""Kill training at random moments and damage its checkpoints; what it ends with must not differ by a bit.

    python tools/check_kills.py --runs 100       one process: two SIGKILLs a run, one of them inside a save
    python tools/check_kills.py --jobs 50        --nproc 2: a SIGKILL to a random worker of each job, which must end by itself
    python tools/check_kills.py --damage 1000    a bit flipped, or the end cut off, in any file of the newest checkpoint

Every run is compared with one that nobody disturbed: each file of its last checkpoint and of best/, and what metrics.jsonl says
of losses. After every kill the newest checkpoint is looked for as a resumed run does, and loaded. A save is under way while its
`.step-N.partial` or `.best.partial` is there; a kill counts as inside one if that is what it left behind. A control shows that
the comparison can fail: the undisturbed run with another seed. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import gpt2
from gpt2.checkpoint.card import CARD, CURVES, RECORD
from gpt2.train import state
from gpt2.train.loop import train
from gpt2.train.recipe import Data, Model, Optim, Recipe

ROOT = Path(__file__).resolve().parent.parent
OF_CARD = (CARD, RECORD, CURVES)  # derived from the rest, with the folder's name
TIMED = ("tokens_per_second", "seconds_left", "mfu")  # what metrics.jsonl says beside losses differs from run to run


@dataclass(frozen=True)
class Kills:
    """One process. ``loadable`` of ``kills`` left a checkpoint that a run goes on from (or none was yet due)."""

    kills: int
    inside_a_save: int
    loadable: int
    runs: int
    identical: int


@dataclass(frozen=True)
class Jobs:
    """Several processes, one of which is killed."""

    jobs: int
    ended_by_themselves: int
    identical: int


@dataclass(frozen=True)
class Damage:
    """Of so many damaged checkpoints, refused, with the one before taken instead."""

    flips: int
    cuts: int
    refused: int
    previous_used: int


def recipe(text: Path, **changes: object) -> Recipe:
    """With dropout, evaluations and saves that fall apart, and a model large enough that writing it takes a moment."""
    return replace(
        Recipe(
            name="kills",
            steps=24,
            batch_size=4,
            context=32,
            dropout=0.1,
            log_every=1,
            eval_every=4,
            save_every=3,
            sample_tokens=4,
            eval_tokens=400,
            device="cpu",
            data=Data(path=str(text), tokenizer="chars"),
            model=Model(n_layer=2, n_embd=128, n_head=4, n_positions=32),
            optim=Optim(lr=1e-2, min_lr=1e-3, warmup=3),
        ),
        **changes,
    )


def outcome(folder: Path) -> dict[str, object]:
    """All that a run leaves and that is not a time: its last checkpoint and best/ byte for byte, and its logged losses."""
    last = state.checkpoints(folder)[0]
    files = [
        path for where in (last, folder / "best") for path in where.rglob("*") if path.is_file() and path.name not in OF_CARD
    ]
    kept = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {**kept, "metrics": [{key: value for key, value in row.items() if key not in TIMED} for row in rows]}


def loadable(folder: Path) -> bool:
    """What a resumed run would do first; a run killed before its first save has nothing, and needs nothing."""
    newest, _ = state.newest_intact(folder)
    if newest is None:
        return not state.checkpoints(folder)
    return gpt2.load(str(newest)).config.n_layer == 2


def saving(folder: Path) -> bool:
    return any(state.ASIDE.fullmatch(path.name) for path in folder.glob(".*"))


def one_process(runs: int, work: Path, text: Path, rng: random.Random, say: Callable[[str], None]) -> Kills:
    wanted = recipe(text)
    train(wanted, work / "undisturbed")
    expected = outcome(work / "undisturbed")
    train(replace(wanted, seed=1), work / "other")
    if outcome(work / "other") == expected:
        raise SystemExit("control: a run of another seed ends the same; this comparison sees nothing")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gpt2.train.loop", "torch._dynamo"])
    kills = inside = whole = identical = 0
    for index in range(runs):
        folder = work / f"run-{index}"
        for in_a_save in (index % 2 == 0, index % 2 == 1):
            process = context.Process(target=train, args=(wanted, folder))
            process.start()
            moment(process, folder, in_a_save, rng)
            process.kill()
            process.join()
            if process.exitcode != -signal.SIGKILL:
                raise SystemExit(f"run {index} ended ({process.exitcode}) before it was killed")
            kills, inside, whole = kills + 1, inside + saving(folder), whole + loadable(folder)
        process = context.Process(target=train, args=(wanted, folder))
        process.start()
        process.join()
        identical += process.exitcode == 0 and outcome(folder) == expected
        shutil.rmtree(folder)
        say(f"{index + 1} of {runs} runs: {kills} kills, {inside} inside a save, {whole} loadable, {identical} bit-identical")
    return Kills(kills, inside, whole, runs, identical)


def moment(process: multiprocessing.Process, folder: Path, in_a_save: bool, rng: random.Random) -> None:
    """Wait for a random one: some steps further on and, if asked, until a save has begun and a part of it is written."""
    aim = logged(folder) + rng.randint(1, 9)
    while process.is_alive() and logged(folder) < aim:
        time.sleep(0.001)
    if not in_a_save:
        time.sleep(rng.uniform(0, 0.05))
        return
    while process.is_alive() and not saving(folder):
        pass
    time.sleep(rng.uniform(0, 0.01))


def logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text(errors="replace").count('"loss"') if path.is_file() else 0


def many_processes(jobs: int, ranks: int, work: Path, text: Path, rng: random.Random, say: Callable[[str], None]) -> Jobs:
    file = work / "kills.toml"
    file.write_text(toml(recipe(text, batch_size=4 * ranks)))
    start(file, work / "undisturbed", ranks).wait()
    expected = outcome(work / "undisturbed")
    ended = identical = 0
    for index in range(jobs):
        folder = work / f"job-{index}"
        job = start(file, folder, ranks)
        aim = rng.randint(1, 20)
        while job.poll() is None and logged(folder) < aim:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        workers = children(job.pid)
        if len(workers) != ranks:
            raise SystemExit(f"job {index} has {len(workers)} workers, not {ranks}")
        os.kill(rng.choice(workers), signal.SIGKILL)
        ended += job.wait() == 0
        identical += outcome(folder) == expected
        shutil.rmtree(folder)
        say(f"{index + 1} of {jobs} jobs: {ended} ended by themselves, {identical} bit-identical")
    return Jobs(jobs, ended, identical)


def start(file: Path, folder: Path, ranks: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gpt2", "train", str(file), "--out", str(folder), "--nproc", str(ranks)]
    log = open(folder.with_suffix(".log"), "wb")  # noqa: SIM115 - the process's own
    return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)


def children(pid: int) -> list[int]:
    """The workers among a launcher's child processes."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    every = [int(child) for path in lists for child in path.read_text().split()]
    return [child for child in every if b"train" in Path(f"/proc/{child}/cmdline").read_bytes()]


def toml(recipe: Recipe) -> str:
    tables = asdict(recipe)
    plain = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for name in ("data", "model", "optim"):
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in tables[name].items())]
    return "\n".join(lines) + "\n"


def damage(count: int, work: Path, text: Path, rng: random.Random, say: Callable[[str], None]) -> Damage:
    folder = work / "damaged"
    train(recipe(text, steps=6), folder)
    newest, previous = state.checkpoints(folder)
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    refused = used = cuts = 0
    for index in range(count):
        path = rng.choice(files)
        whole = path.read_bytes()
        if index % 4 == 3:
            cuts += 1
            path.write_bytes(whole[: rng.randrange(len(whole))])
        else:
            broken = bytearray(whole)
            broken[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            path.write_bytes(broken)
        taken, skipped = state.newest_intact(folder)
        refused += taken != newest and len(skipped) == 1
        used += taken == previous
        path.write_bytes(whole)
    if state.newest_intact(folder)[0] != newest:
        raise SystemExit("control: the checkpoint was put back as it was, and is not taken")
    say(f"{count} damaged: {refused} refused")
    return Damage(count - cuts, cuts, refused, used)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--damage", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, result = random.Random(args.seed), {}
    torch.set_num_threads(1)  # as every process here: sums in another order would be another run
    os.environ["OMP_NUM_THREADS"] = "1"

    def say(line: str) -> None:
        print(f"\r{line}", end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        text = work / "text.txt"
        words = ["thou", "art", "a", "villain", "and", "the", "king", "doth", "sleep"]
        text.write_text(" ".join(random.Random(0).choices(words, k=4000)))
        if args.runs:
            result["one process"] = asdict(one_process(args.runs, work, text, rng, say))
            print(file=sys.stderr)
        if args.jobs:
            result["jobs"] = asdict(many_processes(args.jobs, args.ranks, work, text, rng, say))
            print(file=sys.stderr)
        if args.damage:
            result["damage"] = asdict(damage(args.damage, work, text, rng, say))
            print(file=sys.stderr)
    good = all(
        kind["loadable"] == kind["kills"] and kind["identical"] == kind["runs"]
        if "kills" in kind
        else kind["ended_by_themselves"] == kind["identical"] == kind["jobs"]
        if "jobs" in kind
        else kind["refused"] == kind["previous_used"] == kind["flips"] + kind["cuts"]
        for kind in result.values()
    )
    print(json.dumps({**result, "torch": torch.__version__, "ok": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
