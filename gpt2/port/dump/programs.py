"""Run somebody's program, in any language, and find the dump that it wrote: ``gpt2 diagnose --run``.

The command is split into words as a POSIX shell would split it, then the placeholders in each word are replaced. No shell runs:
``|``, ``>``, ``&&``, ``*``, ``~`` and ``$NAME`` are ordinary characters, and a path with spaces stays one word.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpt2.checkpoint.checkpoint import Checkpoint, StoredCheckpoint, open_checkpoint
from gpt2.checkpoint.containers import shown
from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.checkpoint.names import VERIFIES, ModelName
from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.measure.dumps import Dump, read
from gpt2.measure.metrics import Progress, relative_error, silent
from gpt2.model import GPT2
from gpt2.port.diagnosis.report import SURE, Cause, Diagnosis
from gpt2.port.diagnosis.runner import watch
from gpt2.port.diagnosis.worker import write_official
from gpt2.port.dump.examination import exact_weights, examine
from gpt2.port.step.settings import Settings

DIFFERS = 1e-2  # relative difference of two runs, above what threads that add in another order give in any precision
TOKENS = 16  # of the one row that the program runs
SHOWN_LINES, READ_BYTES = 20, 65_536  # of what the program printed last
PLACEHOLDERS = {
    "ids": "the token ids, a .npy file of shape (T,), int64",
    "text": "the same ids as text: one line, parted by spaces",
    "out": "where to write: add .npz or .safetensors, or make a directory of .npy files of it",
    "model": "a folder with config.json and model.safetensors, in the official layout",
}
SUFFIXES = ("", ".npz", ".safetensors", ".bin")
FIRST_BYTES = {b"PK\x03\x04": ".npz", b"\x93NUM": ".npy"}  # of a file without a suffix; others are taken for safetensors


class ProgramError(InputError):
    """The program did not leave a dump; ``printed`` are the last lines of its output."""

    def __init__(self, message: str, printed: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.printed = printed


@dataclass(frozen=True)
class ProgramDump:
    """What a program left at ``path``, computed from ``ids`` (1, T), int64."""

    path: Path
    ids: Tensor


def diagnose_program(
    command: str,
    model: str,
    *,
    timeout: float,
    settings: Sequence[str] = (),
    revision: str | None = None,
    offline: bool = False,
    progress: Progress = silent,
) -> Diagnosis:
    """Run CMD, and diagnose the dump that it wrote, as a file; the ids that it was given count if the dump holds none.

    ``settings``: ``KEY=VALUE``, what the dump's training steps should do; with them it must hold some.

    Raises:
        InputError: CMD or the dump is of no use, as :func:`split` and :func:`gpt2.measure.dumps.read` say; or no such model.
        ProgramError: the program left no dump, as :func:`run_program` says.
    """
    split(command)  # before anything is downloaded
    given = Settings.parse(settings) if settings else None
    checkpoint = open_checkpoint(ModelName.parse(model, VERIFIES, revision=revision), offline=offline)
    state = exact_weights(checkpoint.load())
    dumps = []
    for _ in range(1 if given else 2):  # training may be random
        with run_program(command, checkpoint, timeout=timeout) as left:
            try:
                dumps.append(read(left.path, checkpoint.config, left.ids, several=True))
            except InputError as error:  # the file is gone before the message is read
                raise InputError(f"--run: {str(error).replace(str(left.path.with_suffix('')), '{out}')}") from None
    dump = dumps[0]
    if (random := _random(dump, dumps[-1])) is not None:
        return Diagnosis("mismatch", None, (random,), (), command, model, seen="dump")
    diagnosis = examine(replace(dump, source=command), checkpoint.config, state, given, progress)
    others = not torch.equal(dump.ids, left.ids)
    note = ("the ids in the dump are not those that the program was given: the dump's count",) if others else ()
    return replace(diagnosis, checkpoint=model, notes=(*diagnosis.notes, *note))


def _random(first: Dump, second: Dump) -> Cause | None:
    """Return the cause of two runs with the same ids that give other numbers; None if they give the same."""
    both = ((name, a, second.arrays.get(name)) for name, a in first.arrays.items())
    errors = {name: relative_error(b, a) for name, a, b in both if b is not None and a.shape == b.shape}
    others = [shown(name) for name, error in errors.items() if error > DIFFERS]
    if not others:
        return None
    words = "two runs with the same ids give other numbers: dropout is active, or random numbers are drawn"
    error = max(error for error in errors.values() if math.isfinite(error))
    evidence = f"{others[0]} is the first array that differs, of {len(others)} in {len(errors)}; they differ by up to {error:.1e}"
    fix = "model.eval(), or no dropout and no random numbers; then run the diagnosis again: until then nothing else can be told"
    return Cause("not-deterministic", "logits", words, evidence, SURE, fix)


def split(command: str) -> list[str]:
    """Return the words of CMD. Raises InputError: no words, an open quote, or a placeholder missing that it cannot do without."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--run {command!r}: {str(error).lower()}; quote each word as in a shell") from None
    if not words:
        raise InputError("--run: an empty command; give one such as 'python port.py {ids} {out}'")
    if not any("{out}" in word for word in words):
        raise InputError(f"--run {command!r}: has no {{out}}, {PLACEHOLDERS['out']}")
    if not any("{ids}" in word or "{text}" in word for word in words):
        raise InputError(f"--run {command!r}: has neither {{ids}}, {PLACEHOLDERS['ids']}, nor {{text}}, {PLACEHOLDERS['text']}")
    return words


@contextmanager
def run_program(command: str, checkpoint: Checkpoint, *, timeout: float) -> Iterator[ProgramDump]:
    """Run CMD on ids of the checkpoint's model, and yield what it wrote, until the block ends and the files are removed.

    It runs in the current folder, with nothing to read on its standard input. After ``timeout`` seconds, on an interrupt and
    when it has ended, it and all its children are killed (on macOS: its process group).

    Raises:
        InputError: CMD cannot be split, as :func:`split` says.
        ProgramError: it cannot be started, fails, does not end in time, or writes no dump.
    """
    words = split(command)
    with tempfile.TemporaryDirectory(prefix="gpt2-diagnose-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        ids, out = given_ids(checkpoint.config), folder / "out"
        np.save(folder / "ids.npy", ids[0].numpy())
        (folder / "ids.txt").write_text(" ".join(map(str, ids[0].tolist())) + "\n")
        places = {"{ids}": folder / "ids.npy", "{text}": folder / "ids.txt", "{out}": out}
        if any("{model}" in word for word in words):
            places["{model}"] = _model_folder(checkpoint, folder)
        for placeholder, path in places.items():
            words = [word.replace(placeholder, str(path)) for word in words]
        _run(words, folder, timeout)
        yield ProgramDump(_written(out, words[0], folder), ids)


def given_ids(config: GPT2Config) -> Tensor:
    """Return the ids that every program is given: one row (1, T), the same in each run."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (1, min(TOKENS, config.n_positions)), generator=generator)


def _model_folder(checkpoint: Checkpoint, folder: Path) -> Path:
    """Return the checkpoint's own folder if it has the two files in float32 and as stored, else one written in ``folder``."""
    if type(checkpoint) is StoredCheckpoint and checkpoint.dtype == checkpoint.stored == torch.float32:
        files = [checkpoint.path / name for name in ("config.json", "model.safetensors")]
        if all(file.is_file() for file in files) and "wte.weight" in SafetensorsFile(files[1]).entries:
            return checkpoint.path.resolve()
    model: GPT2 = checkpoint.load()
    return write_official(model.float(), folder / "model")


def _run(words: list[str], folder: Path, timeout: float) -> None:
    program = words[0]
    try:
        code = watch(words, folder, timeout)
    except FileNotFoundError:
        where = "no such file" if os.sep in program else "no such program on PATH"
        raise ProgramError(f"--run: {program}: {where}; give its path, such as ./{Path(program).name}") from None
    except PermissionError:
        raise ProgramError(f"--run: {program}: may not be run; chmod +x {program}, or name its interpreter first") from None
    except OSError as error:
        raise ProgramError(f"--run: {program}: cannot be started ({error.strerror}); name its interpreter first") from None
    if code == 0:
        return
    printed = _last_lines(folder)
    seen = "its last lines are above" if printed else "it printed nothing"
    if code is None:
        raise ProgramError(f"--run: {program}: did not end in {timeout:g} s; {seen}; give it longer with --timeout", printed)
    names = {one.value: one.name for one in signal.Signals}
    how = f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"
    raise ProgramError(f"--run: {program}: {how}; {seen}; mend it, or see that it exits with 0", printed)


def _last_lines(folder: Path) -> tuple[str, ...]:
    with open(folder / "printed", "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
        return tuple(file.read().decode(errors="replace").splitlines()[-SHOWN_LINES:])


def _written(out: Path, program: str, folder: Path) -> Path:
    """Return what the program left at {out}, with or without a suffix. Raises ProgramError: nothing, or two things."""
    left = [path for suffix in SUFFIXES if (path := out.with_name(out.name + suffix)).exists()]
    if not left:
        printed = _last_lines(folder)
        ways = "{out}.npz, {out}.safetensors, or a directory {out} of .npy files"
        raise ProgramError(f"--run: {program}: ended with 0, and wrote nothing at {{out}}; write {ways}", printed)
    if len(left) > 1:
        names = " and ".join("{out}" + path.suffix for path in left)
        raise ProgramError(f"--run: {program}: wrote {names}; write one dump")
    if left[0].is_dir() or left[0].suffix:
        return left[0]
    with open(left[0], "rb") as file:
        suffix = FIRST_BYTES.get(file.read(4), ".safetensors")
    return left[0].rename(left[0].with_suffix(suffix))
