"""Functions shared by the commands: common arguments, progress on stderr, and output of results."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gpt2.checkpoint.names import DEFAULT
from gpt2.config import ACTIVATIONS
from gpt2.errors import InputError, printable, size, user_path
from gpt2.options import Command, argument, offline_option, option, revision_option

if TYPE_CHECKING:
    from gpt2.checkpoint.describe import File
    from gpt2.pages.reports import Printed

S = TypeVar("S", bound=Any)
JSON_VERSION = 4  # rises when a key is removed or changes its meaning (AGENTS.md)


def set_option(own: str = "") -> Any:
    """Return ``--set``: the activation of a model, and the command's ``own`` settings, which it then reads itself."""
    help = f"{own}activation_function=NAME of a checkpoint that does not say it, such as nanoGPT's"
    return option(help, "KEY=VALUE", (), own=own)


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Command):
    """What every command takes that reads one model."""

    model: str = argument("which model", "MODEL", DEFAULT)
    revision: str | None = revision_option()
    set: tuple[str, ...] = set_option()
    offline: bool = offline_option()


def with_activation(settings: S) -> S:
    """Move ``--set activation_function=NAME`` into the names of the models. Raises InputError: no activation, or no setting."""
    key, by_name = "activation_function=", {each.name: each for each in fields(settings)}
    given = settings.set if "set" in by_name else ()
    chosen = [each.removeprefix(key) for each in given if each.startswith(key)]
    others = tuple(each for each in given if not each.startswith(key))
    if others and by_name["set"].metadata.get("own") == "":
        raise InputError(f"--set {others[0]}: the one setting here is {key}NAME; leave it out")
    for name in chosen:
        if name not in ACTIVATIONS:
            raise InputError(f"--set {key}{name}: is no activation known here; give one of {', '.join(ACTIVATIONS)}")
    if not chosen:
        return settings
    models = {name: model for name in ("model", "other", "init", "a", "b") if (model := getattr(settings, name, None))}
    for side in ("a", "b"):  # of compare, which takes other things than models
        if side in models and not os.path.exists(user_path(models[side].removeprefix("hf/"))):
            del models[side]
    return replace(settings, set=others, **{field: ":".join([model, *chosen]) for field, model in models.items()})


def require_writable(flag: str, target: str | os.PathLike[str] | None) -> None:
    """Raise InputError if a result cannot be written; called before the computation."""
    if target is None or (target == "-" and flag == "--json"):
        return
    if target == "-":
        raise InputError(f"{flag} -: only --json goes to stdout; give a file")
    path = user_path(target)
    place = path if path.exists() and not path.is_file() else path.parent  # a file is replaced, a device or pipe written into
    if path.is_dir() or not path.parent.is_dir() or not os.access(place, os.W_OK):
        raise InputError(f"{flag} {target}: cannot be written; give a file in an existing folder that you may write to")


def say(text: str, end: str = "\n") -> None:
    """Print to stdout; on a terminal, show control characters as symbols, since a model may generate them."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


def write_result(target: str | None, body: dict[str, Any] | Callable[[], str], show: Callable[[], None]) -> None:
    """Write the object of ``--json``, or its JSON, with the version of its keys; show the result unless that goes to stdout."""
    if target is not None:
        content = json.loads(body()) if callable(body) else body
        text = json.dumps({"json_version": JSON_VERSION, **content}, indent=2)
        if target == "-":
            say(text)
            return
        from gpt2.data.files import write_output

        write_output(target, text + "\n", "--json ")
    show()


def finish(args: Any, report: Any, show: Callable[[], None] | None = None) -> int:
    """Write a report's page and JSON where ``args`` say, or show it; return the exit code that its ``ok`` stands for."""
    if html := getattr(args, "html", None):
        report.save_html(html)
        wrote(html)
    write_result(args.json, report.to_json, show or partial(_print, report))
    return 0 if getattr(report, "ok", True) else 1


def _print(report: "Printed") -> None:
    from gpt2.pages.terminal import Terminal

    report.print(Terminal(highlight=False))


def wrote(path: str, remark: str = "") -> None:
    """Report on stderr what was written."""
    print(f"wrote {printable(path, one_line=True)}{remark}", file=sys.stderr)


def note(text: str) -> None:
    """Print a remark on stderr."""
    print(f"note: {printable(text)}", file=sys.stderr)


def listed(files: "Iterable[File]", notes: Iterable[str], digits: int = 64) -> list[str]:
    """Return the lines of files, with ``digits`` of their hash, and of notes."""
    dots = "..." if digits < 64 else ""
    lines = [f"  {file.name:24} {size(file.size):>9}  sha256 {file.sha256[:digits]}{dots}" for file in files]
    return lines + [f"  note: {note}" for note in notes]


class _Outlasting(io.FileIO):
    """A standard stream whose reader may leave, as head does: the rest goes to nobody."""

    left = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.left = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if not isinstance(error, BrokenPipeError):
                raise InputError(f"the output cannot be written ({error.strerror}); make room, or send it elsewhere") from None
            return len(data)


@contextmanager
def outlasting_readers() -> Iterator[None]:
    """Let stdout and stderr outlast their readers, so that a command goes on to its end and its exit code."""
    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before, strict=True):
        buffer = getattr(stream, "buffer", None)
        if type(stream) is io.TextIOWrapper and isinstance(getattr(buffer, "raw", buffer), io.FileIO):  # not a notebook's
            stream.flush()
            file = io.BufferedWriter(_Outlasting(stream.fileno(), "w", closefd=False))
            lines, through = stream.line_buffering, stream.write_through
            setattr(sys, name, io.TextIOWrapper(file, stream.encoding, line_buffering=lines, write_through=through))
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def nobody_reads() -> bool:
    """Return whether the reader of stdout has left."""
    return getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "left", False)


class Status:
    """Progress on stderr: one line that is overwritten on a terminal, nothing elsewhere."""

    def __init__(self, first: str | None = None) -> None:
        self.live = sys.stderr.isatty()
        if first is not None:
            self(first)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.clear()

    def __call__(self, what: str) -> None:
        if self.live:  # a line that wraps could not be overwritten
            room = max(1, shutil.get_terminal_size().columns - 3)
            print(f"\r\x1b[2K{printable(what, one_line=True)[:room]} …", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
