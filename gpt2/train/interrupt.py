"""Ctrl-C and SIGTERM: finish the step, save, leave."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptions(met: list[int]) -> Iterator[Callable[[], bool]]:
    """The first signal raises a flag that the loop reads between steps; a second one acts at once, as it would have.

    ``met`` is the flag, empty to begin with: the caller's own, so that a run that goes back to a checkpoint still knows of it.
    """
    before: dict[int, object] = {}

    def note(number: int, frame: object) -> None:
        met.append(number)
        restore()

    def restore() -> None:
        for handled, handler in before.items():
            signal.signal(handled, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note) or signal.SIG_DFL  # None: set from outside Python
    except ValueError:  # not the main thread, which alone may handle signals
        before.clear()
    try:
        yield lambda: bool(met)
    finally:
        restore()
