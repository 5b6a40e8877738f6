"""From a path to its tensors: which container is it, and which open file holds which tensor."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import CheckpointError
from .containers import Container, listed, read_json, shown
from .safetensors_file import SafetensorsFile

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def open_weights(path: Path) -> dict[str, Container]:
    """Which open file holds each tensor of a checkpoint, given a directory or a ``.safetensors`` file.

    Raises:
        CheckpointError: no weights there, a shard missing, or shards that disagree with their index.
    """
    if path.is_file():
        return _by_tensor([SafetensorsFile(path)])
    single, index = path / WEIGHTS, path / INDEX
    if single.is_file():
        return _by_tensor([SafetensorsFile(single)])
    if not index.is_file():
        raise CheckpointError(f"{path}: no {WEIGHTS} there; {what_is_there(path)}")
    weight_map = read_json(index).get("weight_map")
    shards = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not shards or not all(isinstance(s, str) and re.fullmatch(r"[\w.-]+\.safetensors", s, re.ASCII) for s in shards):
        raise CheckpointError(f"{index}: has no weight_map from tensors to .safetensors files beside it; fetch it again")
    held = _by_tensor([SafetensorsFile(path / shard) for shard in sorted(set(shards))])
    wrong = [name for name, shard in weight_map.items() if name not in held or held[name].path.name != shard]
    wrong += [name for name in held if name not in weight_map]
    if wrong:
        raise CheckpointError(f"{index}: disagrees with its shards about {listed(wrong)}; fetch the checkpoint again")
    return held


def what_is_there(path: Path) -> str:
    """What a directory holds instead of a checkpoint, and what to do about it."""
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        return f"the folder cannot be read ({error.strerror}), give another"
    steps = sorted((name for name in names if re.fullmatch(r"step-\d{1,9}", name, re.ASCII)), key=lambda name: int(name[5:]))
    for name in ("best", *reversed(steps)):
        if (path / name / WEIGHTS).is_file():
            return f"it is the folder of a training run, give {path / name}"
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".index", ".h5", ".msgpack"))]
    if pickles:
        return f"{listed(pickles)} cannot be opened, convert to safetensors (transformers' save_pretrained does)"
    return f"the folder holds {listed(names, 6)}; give the one with the weights" if names else "the folder is empty"


def _by_tensor(files: list[Container]) -> dict[str, Container]:
    held: dict[str, Container] = {}
    for file in files:
        for name in file.entries:
            if name in held:
                raise CheckpointError(f"{file.path}: {shown(name)} is also in {held[name].path.name}; fetch the checkpoint again")
            held[name] = file
    return held
