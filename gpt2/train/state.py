"""Checkpoints of a run: written aside, synced, listed in a manifest with sha256, renamed. Safetensors and JSON only.

A run's folder holds ``recipe.json``, ``metrics.jsonl``, ``step-N/`` (the newest two, each with all it takes to go on) and
``best/`` (the model of the lowest validation loss). Each of the last two is a directory that ``gpt2.load`` and transformers open.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as serialize

from ..checkpoint.load import load
from ..checkpoint.save import save as save_model
from ..checkpoint.save import sha256, write_file, write_json
from ..data import Tokenizer
from ..errors import InputError
from ..model import GPT2

KEEP = 2
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands after ``step`` steps."""

    step: int
    best_loss: float | None = None
    best_step: int = 0
    evals_since_best: int = 0


def save(folder: Path, model: GPT2, tokenizer: Tokenizer, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
    """Write ``folder/step-N``, then drop all but the newest :data:`KEEP`."""
    target = folder / f"step-{progress.step}"
    tensors = {
        f"{index}.{name}": value.detach().cpu().contiguous()
        for index, entry in optimizer.state_dict()["state"].items()
        for name, value in entry.items()
    }
    files = {"optimizer.safetensors": serialize(tensors), "progress.json": json.dumps(asdict(progress)).encode()}
    _write_whole(target, model, tokenizer, files)
    for old in checkpoints(folder)[KEEP:]:
        shutil.rmtree(old)
    return target


def save_best(folder: Path, model: GPT2, tokenizer: Tokenizer, progress: Progress) -> None:
    """Write ``folder/best``: the model alone, and the step it comes from."""
    _write_whole(folder / "best", model, tokenizer, {"progress.json": json.dumps(asdict(progress)).encode()})


def checkpoints(folder: Path) -> list[Path]:
    """``step-N`` directories, the newest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def newest_intact(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint whose every file has the hash its manifest states, and a line for each newer one passed over."""
    skipped = []
    for path in checkpoints(folder):
        fault = _fault(path)
        if fault is None:
            return path, skipped
        skipped.append(f"{path}: {fault}; passed over")
    return None, skipped


def restore(path: Path, optimizer: torch.optim.Optimizer, model: GPT2) -> Progress:
    """Fill ``model`` and ``optimizer`` from a checkpoint that :func:`newest_intact` found; return where the run stood."""
    stored = load(str(path))
    if stored.config.without_dropout() != model.config.without_dropout():
        raise InputError(f"{path}: another model's checkpoint; choose another --out, or start anew with --fresh")
    model.load_state_dict(stored.state_dict())
    state: dict[int, dict[str, torch.Tensor]] = {}
    try:
        for key, tensor in load_file(path / "optimizer.safetensors").items():
            index, name = key.split(".", 1)
            state.setdefault(int(index), {})[name] = tensor
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{path}/optimizer.safetensors: cannot be read ({error}); start anew with --fresh") from None
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return Progress(**json.loads((path / "progress.json").read_text()))


def _write_whole(target: Path, model: GPT2, tokenizer: Tokenizer, files: dict[str, bytes]) -> None:
    """A directory that appears complete or not at all."""
    aside = target.with_name(f".{target.name}.partial")
    old = target.with_name(f".{target.name}.old")
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    save_model(model, tokenizer, aside)
    for name, content in files.items():
        write_file(aside / name, content)
    write_json(aside / MANIFEST, {path.name: sha256(path) for path in sorted(aside.iterdir())})
    if target.exists():
        os.rename(target, old)
    os.rename(aside, target)
    shutil.rmtree(old, ignore_errors=True)
    _sync_directory(target.parent)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _fault(path: Path) -> str | None:
    """What is wrong with a checkpoint directory, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, declared in manifest.items():
            if sha256(path / name) != declared:
                return f"{name} does not have the sha256 that {MANIFEST} states"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return f"unreadable ({error})"
    return None
