"""Handle Ctrl-C and SIGTERM: the run finishes its step, saves and ends."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interruptions(signals: list[int]) -> Iterator[Callable[[], bool]]:
    """Record the first signal for the loop to read between steps, in the caller's list; a second signal acts at once."""
    before: dict[int, Any] = {}

    def note(number: int, frame: object) -> None:
        signals.append(number)
        restore()

    def restore() -> None:
        for handled, handler in before.items():
            signal.signal(handled, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note) or signal.SIG_DFL  # None: set from outside Python
    except ValueError:  # only the main thread may handle signals
        before.clear()
    try:
        yield lambda: bool(signals)
    finally:
        restore()
