"""Write a trace's arrays: safetensors, npz, a directory of .npy files with an index, or llm.c's debug state."""

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gpt2.checkpoint.llmc_writer import require_expressible, state_pieces
from gpt2.checkpoint.saving import safetensors_file, write_file
from gpt2.config import GPT2Config, quoted
from gpt2.data.files import writing, written_aside
from gpt2.errors import InputError, user_path
from gpt2.pages.reports import as_json
from gpt2.traces.arrays import GRADIENT
from gpt2.traces.batch import NO_TARGET

INDEX = "index.json"
ABOUT = "about.json"  # of an .npz: the bytes of the JSON, as uint8
STATE_FORM = ".bin"  # llm.c's debug state
Arrays = Mapping[str, Tensor]
Writer = Callable[[Path, Arrays, dict[str, Any]], None]


def require_form(path: str | Path) -> str:
    """Return the form that a path's suffix names, "" for a directory. Raises InputError: none, or it cannot be written."""
    path = user_path(path)
    form = path.suffix.lower() if not path.is_dir() else ""
    if form not in FORMS or (form == "" and path.exists() and not path.is_dir()):
        known = ", ".join(filter(None, FORMS))
        raise InputError(f"{path}: unknown form {quoted(form)}; give a file that ends in {known}, or a folder without a suffix")
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{path}: cannot be written; give a place in an existing folder that you may write to")
    if form == "" and path.exists():
        _require_own(path)
    return form


def write(path: str | Path, arrays: Arrays, about: dict[str, Any]) -> Path:
    """Write ``arrays`` in the form that the path's suffix names, with ``about`` (JSON). Raises InputError: it cannot."""
    form, path = require_form(path), user_path(path)
    with writing(path):
        FORMS[form](path, arrays, about)
    return path


def _safetensors(path: Path, arrays: Arrays, about: dict[str, Any]) -> None:
    write_file(path, safetensors_file(arrays, {"about": as_json(about, None)}))


def _npz(path: Path, arrays: Arrays, about: dict[str, Any]) -> None:
    rows: dict[str, Any] = {name: tensor.numpy() for name, tensor in arrays.items()}
    rows[ABOUT] = np.frombuffer(as_json(about).encode(), dtype=np.uint8)
    with written_aside(path) as file:
        np.savez(file, **rows)


def _directory(path: Path, arrays: Arrays, about: dict[str, Any]) -> None:
    """Write a new directory aside and rename it; one that was written before is removed once the new one is there."""
    mark = secrets.token_hex(8)
    aside, old = (path.with_name(f".{path.name}.{mark}.{what}") for what in ("incomplete", "old"))
    aside.mkdir()
    try:
        for name, tensor in arrays.items():
            with written_aside(aside / f"{name}.npy") as file:
                np.save(file, tensor.numpy())
        rows = [{**row, "file": f"{row['name']}.npy"} for row in about["arrays"]]
        write_file(aside / INDEX, (as_json({**about, "arrays": rows}) + "\n").encode())
        if path.exists():
            os.replace(path, old)
        os.replace(aside, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _state(path: Path, arrays: Arrays, about: dict[str, Any]) -> None:
    """Write llm.c's debug state, which has no room for anything else."""
    config: GPT2Config = about["config"]
    if "loss" not in arrays:
        raise InputError(f"{path}: llm.c's debug state holds gradients; compute them too (gradients=True)")
    if "losses" in arrays:
        raise InputError(f"{path}: llm.c's debug state holds no training steps; leave them out, or choose another form")
    if about["stored"] == "float16":
        raise InputError(f"{path}: llm.c's debug state is in float32, and these arrays are in float16; keep them in float32")
    if bool((arrays["targets"] == NO_TARGET).any()):
        raise InputError(f"{path}: llm.c's debug state needs the next id of each token; give targets, or leave the last id out")
    require_expressible(config, about["model"])
    gradients = {name.removeprefix(GRADIENT): tensor for name, tensor in arrays.items() if name.startswith(GRADIENT)}
    write_file(path, state_pieces(config, arrays["ids"], arrays["targets"], arrays["logits"], arrays["loss"], gradients))


def _require_own(folder: Path) -> None:
    """Raise InputError if a directory holds anything but what was written here before: it would be removed."""
    held = {entry.name for entry in folder.iterdir()}
    listed: set[str] = set()
    if INDEX in held:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            listed = {INDEX, *(row["file"] for row in json.loads((folder / INDEX).read_bytes())["arrays"])}
    if others := sorted(held - listed):
        raise InputError(f"{folder}: holds {quoted(others[0])}, which is not of a trace; choose another folder, or remove it")


FORMS: dict[str, Writer] = {".safetensors": _safetensors, ".npz": _npz, STATE_FORM: _state, "": _directory}
