"""Errors that the user can fix, functions that make text and numbers of bytes fit to print, the guards of memory and of
what is written, and the one reading of ``~`` in a path.

A wrong name, path, file or flag raises :class:`InputError` with one line: what is wrong, where, and what to do. The command
line prints it and exits 2. A traceback always means a bug in this package.
"""

import difflib
import math
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
# Control characters except newline and tab; surrogates; what turns the direction of the text after it
_LONG = re.compile(r"(\S{200})\S{200,}(\S{100})")
_NO_MEMORY = re.compile("(?i)OutOfMemory|(out of|not enough|allocate) memory|bad_alloc|bad allocation|failed to allocate")


def printable(text: str, *, one_line: bool = False) -> str:
    """Return ``text`` with each control character replaced by a symbol, so that a terminal shows it and does not obey it.

    U+0000 to U+001F and U+007F become Unicode's control pictures (ESC is ␛); U+0080 to U+009F, surrogates (undecodable bytes of a
    file name) and what overrides a text's direction an escape (``\\u009b``). Newline and tab are replaced only with ``one_line``.
    """
    shown = _CONTROL.sub(_symbol, text)
    return shown.replace("\n", "␊").replace("\t", "␉") if one_line else shown


def _symbol(control: re.Match[str]) -> str:
    code = ord(control[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"\\u{code:04x}"


def words_of(error: BaseException) -> str:
    """Return what an error says; "" where its own words fail, as those of somebody's class may."""
    try:
        return str(error).strip()
    except BaseException:
        return ""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory of this machine or a device does not suffice; it has many types and words."""
    return isinstance(error, MemoryError) or _NO_MEMORY.search(f"{type(error).__name__}: {words_of(error)}") is not None


class misfit(suppress):
    """Suppress what torch raises where parts do not fit together, but not that the memory does not suffice."""

    def __init__(self) -> None:
        super().__init__(IndexError, RuntimeError)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return error is not None and not out_of_memory(error) and super().__exit__(kind, error, trace)


def panicked(error: BaseException) -> bool:
    """Return whether a library in Rust failed at what it did not expect; this is no Exception, and has no public type."""
    return type(error).__name__ == "PanicException"


def alike(word: str, known: Iterable[str]) -> str:
    """Return the word of ``known`` that is most like ``word``; "" if none is."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1)), "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" with the known word that is meant; "" if none is alike."""
    return f" (did you mean {close}?)" if (close := alike(word, known)) else ""


class InputError(ValueError):
    """Input that the user can fix. ``str(error)`` is one line; line breaks and control characters in it are escaped.

    Of a word of thousands of letters, as a wrong name may be, the message has the beginning and the end.
    """

    def __init__(self, message: str) -> None:
        super().__init__("\\n".join(printable(_LONG.sub(r"\1...\2", message)).splitlines()) or "no reason is given")


class CheckpointError(InputError):
    """A checkpoint that cannot be read, does not match its config, or differs from its hash on the Hub."""


def machine_memory() -> float:
    """Return the bytes of memory that this process may use: the machine's, or its container's if that is less."""
    counted = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ())  # Windows has no such call
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if counted else math.inf
    file = Path("/sys/fs/cgroup/memory.max")
    limit = file.read_text().strip() if file.is_file() else "max"
    return min(machine, int(limit)) if limit.isdigit() else machine


def require_memory(needed: float, what: str, advice: str, most: float = math.inf) -> None:
    """Raise InputError, before it is allocated, if ``what`` needs more bytes than ``most`` or than this machine can hold."""
    limit = min(most, 0.9 * machine_memory())
    if needed > limit:
        has = f"and at most {limit / 1e9:,.1f} fit here" if limit == most else f"this machine has {limit / 0.9 / 1e9:,.1f}"
        raise InputError(f"{what} need about {needed / 1e9:,.1f} GB, {has}; {advice}")


def size(n_bytes: float) -> str:
    """Format a number of bytes: ``"7.7 MB"``."""
    for unit in ("B", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.2f} GB"


def user_path(text: str | os.PathLike[str]) -> Path:
    """Return the path that a user means: ``~`` and ``~name`` at its beginning are home folders, and nowhere else.

    Raises InputError: nobody here has that name, or it is empty. The only place that expands ``~``.
    """
    if not isinstance(text, str | os.PathLike):
        raise InputError(f"a path is a text, and this is {type(text).__name__}; give a text")
    if not (given := os.fspath(text)):
        raise InputError("a path has an empty name; give one")
    expanded = os.path.expanduser(given)
    if expanded.startswith("~") and not os.path.lexists(given):
        name = given.partition(os.sep)[0]
        raise InputError(f"{given}: {name} is no user of this machine; write ./{given} for a path of that name")
    return Path(expanded)


def require_writable(flag: str, target: str | os.PathLike[str]) -> None:
    """Raise InputError if a result cannot be written; called before the computation."""
    path = user_path(target)
    place = path if path.exists() and not path.is_file() else path.parent  # a file is replaced, a device or pipe written into
    if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
        raise InputError(f"{flag} {target}: cannot be written; give a file in an existing folder that you may write to")
