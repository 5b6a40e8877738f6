"""The limit of time of the searches in a port."""

from __future__ import annotations

import math
import time

import pytest

from gpt2.port.terms import deadline
from gpt2.port.terms.deadline import PAUSE, SLOWEST, Deadline, TimeUp


def test_a_search_ends_soon_by_the_clock_where_other_programs_run() -> None:
    """A search of 45 s of CPU must not take an hour by the clock; but a limit of 50 s left it 12 s of CPU, and said nothing."""
    waited = Deadline(0.1)
    part = waited.part(4)  # which keeps its time while other programs have the processor
    time.sleep(0.06)
    waited.check()
    part.check()
    assert 0 < waited.left < 0.1 - 0.06 / SLOWEST + 1e-6
    time.sleep(0.1 * SLOWEST - 0.06 + 0.005)
    assert "by the clock after 0 s on the processor" in waited.words
    for over in (waited, part):
        with pytest.raises(TimeUp):
            over.check()


def test_the_limit_is_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs, of which there may be many here, do not shorten it: the limit by the clock is the test above."""
    monkeypatch.setattr(deadline, "SLOWEST", math.inf)
    worked, start = Deadline(4 * PAUSE), time.thread_time()
    part = worked.part(2, most=PAUSE)
    while time.thread_time() < start + 1.1 * PAUSE:
        pass
    assert part.passed
    assert not worked.passed
    while time.thread_time() < start + 4.1 * PAUSE:
        pass
    assert worked.passed
    assert worked.words == f"{4 * PAUSE:g} s"


def test_a_slow_machine_has_more_time_and_no_machine_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one limit for all, a slow machine found no cause where a fast one named it."""
    for usual, expected in ((1e9, 1.0), (1e-9, deadline.SLOW)):
        monkeypatch.setattr(deadline, "USUAL", usual)
        deadline.slowness.cache_clear()
        assert deadline.slowness() == expected
    deadline.slowness.cache_clear()


def test_no_limit_is_ever_reached() -> None:
    assert not Deadline().passed
    assert Deadline(0).passed
