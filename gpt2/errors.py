"""Errors that the user can fix, and text of strangers in a form that is safe to print.

Everything a person can get wrong (a name, a path, a file, a flag) raises :class:`InputError` with a single line that says
what is wrong, where, and what to do. The command line prints that line and exits 2; a traceback always means a bug of ours.
"""

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all but new line and tab; halves of characters too


def printable(text: str, *, one_line: bool = False) -> str:
    """``text`` with each control character as a symbol, so that a terminal shows it and does not obey it.

    U+0000 to U+001F and U+007F become Unicode's control pictures (ESC is ␛). U+0080 to U+009F, which have none, and the
    surrogates that stand for undecodable bytes of a file's name are spelt out (``\\u009b``). New line and tab stay as they are,
    unless ``one_line``: in a file's name or in one cell of a table they are control characters like the others.
    """
    shown = _CONTROL.sub(_symbol, text)
    return shown.replace("\n", "␊").replace("\t", "␉") if one_line else shown


def _symbol(control: re.Match[str]) -> str:
    code = ord(control[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"\\u{code:04x}"


class InputError(ValueError):
    """Bad input. ``str(error)`` is one line: what, where, what to do; line breaks and control characters in names are escaped."""

    def __init__(self, message: str) -> None:
        super().__init__("\\n".join(printable(message).splitlines()))


class CheckpointError(InputError):
    """A checkpoint that cannot be read, does not fit its config, or is not what the Hub declared."""
