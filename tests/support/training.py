"""Runs of the training loop: stop one, start one in a process of its own, damage one, and read its files."""

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from gpt2.checkpoint.card import CURVES
from gpt2.checkpoint.saving import CARD
from gpt2.train import parallel, state
from gpt2.train.loop import Logged
from gpt2.train.recipe import Recipe
from gpt2.train.step import Feed, optimizer_step
from support import forks

OF_CARD = (CARD, CURVES)
TIMINGS = ("tokens_per_second", "seconds_left", "mfu", "rank_tokens_per_second")


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics file without times and speeds."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMINGS} for line in lines]


def stored(folder: Path) -> dict[str, bytes]:
    """Every file of a run's newest checkpoint and of its best model, without the card, which bears the folder's name."""
    files = [*state.checkpoints(folder)[0].rglob("*"), *(folder / "best").rglob("*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file() and path.name not in OF_CARD}


def outcome(folder: Path) -> tuple[dict[str, bytes], list[dict]]:
    """All results of a run. Two runs with equal outcomes computed the same, bit for bit."""
    return stored(folder), metrics(folder)


def stop_at(step: int, number: int = signal.SIGTERM) -> Callable[[object], None]:
    """A report function that sends this process a signal at ``step``, once."""
    sent = []

    def report(event: object) -> None:
        if isinstance(event, Logged) and event.step == step and not sent:
            sent.append(os.kill(os.getpid(), number))

    return report


def flip(path: Path) -> None:
    """Flip one bit near the end of a file."""
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def one_step(scored: nn.Module, feed: Feed, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The loss, the norm, and each gradient of one step as the optimizer receives it, by the parameter's name."""
    caught: dict[str, torch.Tensor] = {}

    class Catch(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            own = {name.removeprefix("module.").removeprefix("model."): p for name, p in scored.named_parameters()}
            caught.update({name: parallel.full(p.grad).clone() for name, p in own.items()})

    found = optimizer_step(scored, Catch(scored.parameters(), lr=0.0), feed, recipe, 3, 0.0)
    return {name: torch.tensor(value) for name, value in zip(("loss", "norm"), found, strict=True)} | caught


def furthest(found: Mapping[str, object], expected: Mapping[str, object]) -> float:
    """The largest difference, relative to the largest entry of its tensor."""
    assert found.keys() == expected.keys()
    pairs = [(torch.as_tensor(found[name]).double(), torch.as_tensor(expected[name]).double()) for name in expected]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def killed(target: Callable[..., object], *args: object) -> None:
    """Run ``target`` in a process of its own, in which it ends itself by SIGKILL."""
    process = forks.call(target, *args)
    try:
        assert process.wait(120) == -signal.SIGKILL
    finally:
        process.kill()


def logged_steps(folder: Path) -> int:
    """The number of steps that a running run has logged; -1 before the first evaluation."""
    path = folder / "metrics.jsonl"
    return path.read_text(errors="replace").count('"loss"') if path.is_file() else -1
