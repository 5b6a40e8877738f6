"""The one kind of error that is the user's to mend.

Everything a person can get wrong (a name, a path, a file, a flag) raises :class:`InputError` with a single line that says
what is wrong, where, and what to do. The command line prints that line and exits 2; a traceback always means a bug of ours.
"""


class InputError(ValueError):
    """Bad input. ``str(error)`` is one line: what, where, what to do; a name or path with a line break in it is escaped."""

    def __init__(self, message: str) -> None:
        super().__init__("\\n".join(message.splitlines()))


class CheckpointError(InputError):
    """A checkpoint that cannot be read, does not fit its config, or is not what the Hub declared."""
