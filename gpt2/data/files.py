"""Read and write files: of any kind, within limits and whole; those of tokenizers, with what is wrong in one line."""

import contextlib
import errno
import functools
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from gpt2.config import quoted
from gpt2.errors import InputError, printable, user_path

END_OF_TEXT = "<|endoftext|>"  # of the vocabularies that are made here, and the mark between documents

LEGACY = ("added_tokens.json", "special_tokens_map.json")  # read beside the others: those of an earlier tokenizer are removed

# Maximum bytes of one file. GPT-2's have up to 1.4 MB, the largest published vocabularies (256,000 tokens) 20 to 35 MB.
LIMIT = 40_000_000
MOST = 1 << 30  # bytes of any other file that is read whole

log = logging.getLogger("gpt2")


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time: a command opens the same name for the model, its tokenizer and a report."""
    log.warning("%s", printable(message, one_line=True)[:1000])


def opened(path: str | os.PathLike[str], **form: Any) -> Any:
    """Open a file as :func:`open` does, to read. Raises OSError: also for a pipe, a socket or a device, which may never end."""
    waits_not = lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))  # noqa: E731 - Windows has none
    file = open(path, **{"mode": "rb", **form}, opener=waits_not)  # noqa: SIM115
    about = os.fstat(number := file.fileno())
    with contextlib.suppress(OSError):  # of /proc/kmsg and /proc/self/mem, which say that they are empty files
        if stat.S_ISREG(about.st_mode) and (about.st_size or os.read(number, 1) is not None):
            os.lseek(number, 0, os.SEEK_SET)
            return file
    file.close()
    raise OSError(errno.EINVAL, "a pipe or a device; copy what it holds into a file", str(path))


def read_all(path: str | os.PathLike[str], most: int = MOST) -> bytes:
    """Return what a file holds. Raises OSError as :func:`opened` does, and for more than ``most`` bytes, unread."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
        data: bytes = file.read()
    return data


@contextlib.contextmanager
def reading(path: str | Path, advice: str, kind: type[InputError] = InputError, *, done: str = "read") -> Iterator[None]:
    """Turn an OSError of what is read, or ``done`` otherwise, into an error of one line: the path, the reason and ``advice``."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: cannot be {done} ({error.strerror or error}); {advice}") from None


writing = functools.partial(reading, advice="make room, or choose another place", done="written")


def read(path: Path) -> bytes:
    """Read a small file of a checkpoint. Raises InputError: no file, too large, a link to nothing, or a git-lfs pointer."""
    try:
        data = read_all(path, LIMIT)
    except OSError as error:
        why = link_to_nothing(path) or f"{error.strerror}; check the path"
        raise InputError(f"cannot read {path}: {why}") from None
    if path.suffix == ".model" and not data:
        raise InputError(f"{path} is empty; it is damaged, fetch it again")
    if data.startswith(b"version https://git-lfs"):
        raise InputError(f"{path} is a git-lfs pointer, not the file it points to; run `git lfs pull`")
    return data


def link_to_nothing(path: Path) -> str:
    """Say where a link leads whose target is gone, and what to do; "" for anything else."""
    if not path.is_symlink() or path.exists():
        return ""
    return f"a link to {os.readlink(path)}, which is not there; copy the folder with what its links point to (cp -L)"


def read_text(path: Path) -> str:
    """Return a small file's text. Raises InputError: no UTF-8, or a byte-order mark, which neither JSON nor a vocabulary has."""
    if (text := decoded(read(path), path)).startswith("\ufeff"):
        raise InputError(f"{path}: begins with a byte-order mark; save it as UTF-8 without one")
    return text


def decoded(data: bytes, path: str | os.PathLike[str]) -> str:
    """Return what a text file holds. Raises InputError, which names ``path``: it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None


def not_utf8(path: str | os.PathLike[str], error: UnicodeDecodeError) -> InputError:
    bad = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
    return InputError(f"{path}: not UTF-8 ({bad}); convert it, e.g. iconv -t UTF-8, or fetch it again if it is damaged")


def read_json(path: Path) -> object:
    """Read a JSON file. Raises InputError with line and column if it is not JSON."""
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}"
        raise InputError(f"{path} is not JSON ({at}); it is damaged or cut off, fetch it again") from None
    except (RecursionError, ValueError) as error:
        reason = "its JSON is nested too deep" if isinstance(error, RecursionError) else "it has a number of thousands of digits"
        raise InputError(f"{path} is damaged: {reason}; fetch it again") from None


def stated_ends(folder: Path) -> tuple[int, ...] | None:
    """Return the ``eos_token_id`` (one, a list, or null) of generation_config.json, else config.json; None if neither has it."""
    for name in ("generation_config.json", "config.json"):
        content = read_json(folder / name) if os.path.lexists(folder / name) else None
        if isinstance(content, dict) and "eos_token_id" in content:
            value = content["eos_token_id"]
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(type(i) is not int or i < 0 for i in ids):
                raise InputError(f"{folder / name}: eos_token_id is {quoted(value)}; give one id, a list of them, or null")
            return tuple(dict.fromkeys(ids))
    return None


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` (a link, not its target) once it is whole: no reader sees a part of it."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.incomplete")
    try:
        with new.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def write_output(path: str | Path, content: str | bytes, flag: str = "") -> None:
    """Write a result where the user asked for it, as :func:`written_aside` does; a device or pipe is written into.

    Raises InputError, which names ``flag``: it cannot be written; what was there before is as it was.
    """
    path = user_path(path)
    data = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")  # a file name may not be UTF-8
    with writing(f"{flag}{path}"):
        root, *rest = Path(os.path.realpath(path.parent)).parts[1:] or ("",)
        if (path.exists() and not path.is_file()) or (root in ("dev", "proc") and rest[:1] != ["shm"]):  # /dev/shm is a folder
            path.write_bytes(data)
            return
        with written_aside(path) as file:
            file.write(data)


def write(directory: Path, texts: Mapping[str, str | bytes]) -> list[Path]:
    """Write each file as :func:`written_aside` does; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with written_aside(directory / name) as file:
            file.write(text.encode() if isinstance(text, str) else text)
    return [directory / name for name in texts]
