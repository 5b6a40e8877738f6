"""The checkpoints of a training run's folder, in the order of their steps."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from gpt2.config import number
from gpt2.data.files import read_all
from gpt2.errors import InputError

STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Saved:
    """One checkpoint of a run; ``step`` is None for a model that is no checkpoint of one."""

    name: str
    step: int | None = None


def with_checkpoints(name: str) -> tuple[Saved, ...]:
    """Return a run's checkpoints in place of its folder, or the name alone. Raises InputError: a run without a checkpoint."""
    head, colon, dtype = name.rpartition(":")
    if not colon or os.path.isdir(os.path.expanduser(name)):
        head, dtype = name, ""
    suffix = f":{dtype}" if dtype else ""
    folder = Path(head).expanduser()
    if not folder.is_dir() or (folder / "config.json").exists() or not (folder / "recipe.json").exists():
        return (Saved(name),)
    saved = []
    for entry in folder.iterdir():
        step = STEP.fullmatch(entry.name)
        if (step or entry.name == "best") and entry.is_dir():
            saved.append(Saved(f"{head.rstrip('/')}/{entry.name}{suffix}", int(step[1]) if step else _step(entry)))
    if not saved:
        raise InputError(f"{head}: a run's folder without a checkpoint; train it for longer, or give a model")
    return tuple(sorted(saved, key=lambda each: (each.step is None, each.step, each.name)))


def _step(folder: Path) -> int | None:
    """Return the step of the best checkpoint, as the run recorded it."""
    try:
        step = json.loads(read_all(folder / "progress.json"))["step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return number(step, int, 0)
