"""The standard streams: text that no terminal obeys, progress in one line, and readers that leave."""

import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gpt2.errors import InputError, printable


def say(text: str, end: str = "\n") -> None:
    """Print to stdout; on a terminal, show control characters as symbols, since a model may generate them."""
    print(printable(text) if sys.stdout.isatty() else text, end=end, flush=True)


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
    sys.stdout, sys.stderr = (stream or io.StringIO() for stream in before)  # None if it was closed, as by >&-
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


class Status(AbstractContextManager["Status"]):
    """Progress on stderr: one line that is overwritten on a terminal, nothing elsewhere."""

    def __init__(self, first: str | None = None) -> None:
        self.live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"  # which cannot overwrite a line
        if first is not None:
            self(first)

    def __exit__(self, *error: object) -> None:
        self.clear()

    def __call__(self, what: str) -> None:
        if self.live:  # a line that wraps could not be overwritten
            room = max(1, shutil.get_terminal_size().columns - 3)
            print(f"\r\x1b[2K{printable(what, one_line=True)[:room]} …", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
