"""Jobs of several processes on this machine: a function on every rank, a run of training, and the command line's own."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch

from gpt2.data import token_files
from gpt2.errors import InputError
from gpt2.train import loop, parallel, shards
from gpt2.train.loop import train
from gpt2.train.recipe import Recipe
from support import forks
from support.training import logged_steps

ROOT = Path(__file__).resolve().parents[2]


def member(rank, size, port, work):
    """Run one rank of a job in a process of its own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.fsync = os.fstat  # as in the process of the tests; a rank that waits for a disk is silent
    torch.set_num_threads(1)
    try:
        return work(rank)
    except InputError as error:
        return f"error: {error}"
    except parallel.PeerLost:
        return "lost"


def job(size: int, work: Callable[[int], object]) -> list:
    """The results of ``work(rank)`` on every rank, or its one-line error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [forks.call(member, rank, size, port, work, modules=forks.RANKS) for rank in range(size)]
    try:
        return [forks.returned(process) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


class Run:
    """``train`` as a picklable call; after step ``stop``, rank ``by`` gets a SIGTERM."""

    def __init__(self, recipe: Recipe, folder: Path, *, init=None, stop: int = 0, by: int = 0, change: str = ""):
        self.recipe, self.folder, self.init, self.stop, self.by, self.change = recipe, folder, init, stop, by, change

    def __call__(self, rank: int) -> str:
        if self.change == "another text on machine 1" and rank == 1:
            os.environ["LOCAL_RANK"] = "0"
            data = replace(self.recipe.data, tokens=self.recipe.data.tokens + ".other")
            corpus, other = loop.corpus, replace(self.recipe, data=data)
            loop.corpus = lambda recipe, *rest, **more: corpus(other, *rest, **more)
        elif self.change == "rank 0 begins late":
            parallel.SILENCE_TIMEOUT, begin = timedelta(seconds=6), loop.start
            loop.start = lambda *args: time.sleep(7) or begin(*args)
        elif self.change == "no folder on rank 0" and rank == 0:
            self.folder = self.folder / "file" / "run"
        elif self.change == "full disk on rank 0" and rank == 0:
            shards.save_config = lambda *args: os.write(os.open("/dev/full", os.O_WRONLY), b"x")
        elif self.change == "nan on rank 1" and rank == 1:
            forward, calls = loop.WithLoss.forward, iter(range(10**6))
            loop.WithLoss.forward = lambda *args: forward(*args) * (float("nan") if next(calls) == 6 else 1)
        if rank and not self.recipe.data.tokens:
            loop.corpus = None  # rank 0 alone reads a text
        if os.environ.get("LOCAL_RANK") == "1":
            token_files.fingerprint = None  # the first process of a machine alone reads token files through
        real_step, steps = loop.optimizer_step, iter(range(1, 10**6))

        def step(*args):
            result = real_step(*args)
            if next(steps) == self.stop and rank == self.by:
                os.kill(os.getpid(), signal.SIGTERM)
            return result

        loop.optimizer_step = step
        return train(self.recipe, self.folder, init=self.init).stopped


def one(run: Run) -> str:
    real = loop.optimizer_step
    try:
        return run(0)
    finally:
        loop.optimizer_step = real


def toml(recipe: Recipe, file: Path) -> Path:
    """Write the recipe to ``file``, and return that."""
    file.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in recipe.flat().items()))
    return file


def command(recipe: Recipe, folder: Path, size: int = 2) -> forks.Fork:
    """Run `gpt2 train --nproc SIZE` as a user does; each of its processes begins as Python does."""
    path = f"{ROOT}{os.pathsep}{folder.parent}"  # where a test may have written a sitecustomize
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    words = ["train", toml(recipe, folder.with_suffix(".toml")), "--out", folder, "--nproc", str(size)]
    return forks.Fork("-m", "gpt2", *words, environ=environment)


def reached(folder: Path, step: int, process: forks.Fork) -> None:
    end_of_time = time.monotonic() + 120
    while logged_steps(folder) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end_of_time
        time.sleep(0.02)
