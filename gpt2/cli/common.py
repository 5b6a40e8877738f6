"""Functions shared by the commands: common arguments, progress on stderr, and output of results."""

import argparse
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from gpt2.config import ACTIVATIONS
from gpt2.errors import InputError, printable, user_path

JSON_VERSION = 3  # rises when a key is removed or changes its meaning (AGENTS.md)


def seed(text: str) -> int:
    """Parse ``--seed``: a number that every random generator here accepts."""
    number = int(text)
    if not 0 <= number < 2**63:
        raise argparse.ArgumentTypeError("a seed is a whole number from 0 to 2**63 - 1")
    return number


def add_model(parser: argparse.ArgumentParser, *, required: bool = False, settings: str = "") -> None:
    if required:
        parser.add_argument("model", metavar="MODEL", help="which model")
    else:
        default = "which model (default: %(default)s)"
        parser.add_argument("model", nargs="?", default="shakespeare-mini", metavar="MODEL", help=default)
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a Hub repository")
    add_set(parser, settings)
    add_offline(parser)


def add_set(parser: argparse.ArgumentParser, settings: str = "") -> None:
    """Add ``--set``, for the activation of a model, and for the command's own ``settings`` if it names some."""
    help = f"{settings}activation_function=NAME of a checkpoint that does not say it, such as nanoGPT's"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help)
    parser.set_defaults(settings=bool(settings))


def name_activation(args: argparse.Namespace) -> None:
    """Move ``--set activation_function=NAME`` into the names of the models. Raises InputError: no activation, or no setting."""
    key = "activation_function="
    chosen, others = ([each for each in getattr(args, "set", ()) if each.startswith(key) == own] for own in (True, False))
    if others and not getattr(args, "settings", True):
        raise InputError(f"--set {others[0]}: the one setting here is {key}NAME; leave it out")
    for name in (each.removeprefix(key) for each in chosen):
        if name not in ACTIVATIONS:
            raise InputError(f"--set {key}{name}: is no activation known here; give one of {', '.join(ACTIVATIONS)}")
        for model in ("model", "other", "init"):
            if getattr(args, model, None) is not None:
                setattr(args, model, f"{getattr(args, model)}:{name}")
        for side in ("a", "b"):  # of compare, which takes other things than models
            given: str = getattr(args, side, None) or ""
            if given and os.path.exists(user_path(given.removeprefix("hf/"))):
                setattr(args, side, f"{given}:{name}")
        args.set = others


def add_offline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--offline", action="store_true", help="make no request; use what the cache holds")


def add_device(parser: argparse.ArgumentParser, what: str = "where the model runs", default: str | None = "cpu") -> None:
    shown = "" if default is None else " (default: %(default)s)"
    help = f"{what}: cpu, cuda, cuda:1, mps, or auto for the first of cuda, mps and cpu that is here{shown}"
    parser.add_argument("--device", default=default, metavar="D", help=help)


def require_writable(flag: str, target: str | None) -> None:
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


def save_page(target: str | None, save: Callable[[str], object]) -> None:
    """Write the page of ``--html``, and report it on stderr."""
    if target:
        save(target)
        print(f"wrote {printable(target, one_line=True)}", file=sys.stderr)


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


def size(n_bytes: float) -> str:
    """Format a number of bytes: ``"7.7 MB"``."""
    for unit in ("B", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.2f} GB"
