"""Run somebody's program, in any language, and diagnose the dump that it wrote: ``gpt2 diagnose --run``."""

import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from gpt2.checkpoint.checkpoint import open_checkpoint
from gpt2.checkpoint.names import FLOATS, ModelName
from gpt2.checkpoint.saving import save_official
from gpt2.errors import InputError, printable
from gpt2.measure.dumps import SUFFIXES, Dump, read
from gpt2.measure.metrics import Progress, relative_error, silent
from gpt2.port.dump.examination import exact_weights, examine
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.report import Diagnosis

RANDOM = 1e-2  # relative error between two runs that no order of sums explains
TOKENS = 16  # of the one row that the program runs
GIVEN = {"ids": "ids.npy", "text": "ids.txt", "out": "out", "model": "model"}  # what a placeholder stands for, in our folder
WAYS = "{out}.npz, {out}.safetensors, or a directory {out} of .npy files"


def diagnose_program(
    command: str, model: str, *, timeout: float, revision: str | None = None, offline: bool = False, progress: Progress = silent
) -> Diagnosis:
    """Run CMD in the current folder, and diagnose the dump that it wrote; the ids that it was given count if the dump has none.

    Where it is not equal, the program runs once more, which shows whether it draws random numbers.

    CMD is split into words as a POSIX shell would; no shell runs. Raises InputError: CMD cannot be split or started, fails, does
    not end in ``timeout`` seconds, or writes no dump.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"--run {command!r}: {str(error).lower()}; quote each word as in a shell") from None
    if "{out}" not in command or not ("{ids}" in command or "{text}" in command):
        raise InputError(f"--run {command!r}: name {{out}}, and {{ids}} or {{text}}, as in 'python port.py {{ids}} {{out}}'")
    checkpoint = open_checkpoint(ModelName.parse(model, FLOATS, revision=revision), offline=offline)
    right, config = checkpoint.load(), checkpoint.config
    with tempfile.TemporaryDirectory(prefix="gpt2-diagnose-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        ids = torch.randint(config.vocab_size, (1, min(TOKENS, config.n_positions)), generator=torch.Generator().manual_seed(1))
        np.save(folder / GIVEN["ids"], ids[0].numpy())
        (folder / GIVEN["text"]).write_text(" ".join(map(str, ids[0].tolist())) + "\n")
        if "{model}" in command:
            save_official(right.float(), None, folder / GIVEN["model"])
        for placeholder, file in GIVEN.items():
            words = [word.replace(f"{{{placeholder}}}", str(folder / file)) for word in words]

        def written() -> Dump:
            for old in folder.glob("out*"):  # of the run before
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            _run(words, timeout)
            paths = (folder / f"out{suffix}" for suffix in ("", *SUFFIXES))
            left = next((path for path in paths if path.exists() and (path.suffix or path.is_dir())), None)
            if left is None:
                raise InputError(f"--run: {words[0]}: ended with 0, and wrote nothing at {{out}}; write {WAYS}")
            try:
                return replace(read(left, config, ids), source=command)
            except InputError as error:  # the file is gone before the message is read
                raise InputError(f"--run: {str(error).replace(str(folder / 'out'), '{out}')}") from None

        dump = written()
        found = replace(examine(dump, config, exact_weights(right), progress), checkpoint=model)
        if found.ok:
            return found
        progress("running it again")
        with suppress(InputError):  # what it did once is diagnosed
            again = written().arrays
            pairs = [(again[name], array) for name, array in dump.arrays.items() if name in again]
            apart = max((relative_error(new, old) for new, old in pairs if new.shape == old.shape), default=0.0)
            if apart > RANDOM:  # other causes were read off random numbers
                seen = "two runs with the same ids write other numbers, as with dropout when nobody called eval()"
                cause = replace(Cause.at("not-deterministic", "logits", seen), evidence=f"they differ by {apart:.2g}")
                return replace(found, verdict="mismatch", causes=(cause,))
    return found


def _run(words: list[str], timeout: float) -> None:
    """Run a program. Raises InputError, with its last line, if it fails."""
    no, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        ended = subprocess.run(words, timeout=timeout, check=False, stdin=no, stdout=pipe, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired:
        raise InputError(f"--run: {words[0]}: did not end in {timeout:g} s; give it longer with --timeout") from None
    except OSError as error:
        raise InputError(f"--run: {words[0]}: cannot be started ({error.strerror}); give its path, or its interpreter") from None
    if ended.returncode:
        lines = ended.stdout.decode(errors="replace").strip().splitlines()
        last = f": {printable(lines[-1])[:200]}" if lines else ""
        raise InputError(f"--run: {words[0]}: ended with exit code {ended.returncode}{last}; correct it, or CMD")
