"""Ctrl-C and SIGTERM: finish the step, save, leave."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PASSED_ON = 1.0  # seconds


@contextmanager
def interruptions(*, passed_on: bool = False) -> Iterator[Callable[[], bool]]:
    """The first signal raises a flag that the loop reads between steps; a second one acts at once, as it would have.

    With ``passed_on``, of a process whose launcher passes on the signal that the terminal sends to both, what follows within
    :data:`PASSED_ON` seconds is still the first.
    """
    met: list[float] = []
    before: dict[int, object] = {}

    def note(number: int, frame: object) -> None:
        now = time.monotonic()
        if met and now - met[0] > PASSED_ON:
            restore()
            signal.raise_signal(number)
        met.append(now)
        if not passed_on:
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
