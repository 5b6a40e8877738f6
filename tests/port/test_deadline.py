"""The limit of time of the searches in a port."""

from __future__ import annotations

import time

import pytest

from gpt2.port.deadline import SLOWEST, Deadline, TimeUp


def test_a_search_has_twice_its_time_by_the_clock_where_other_programs_run() -> None:
    """Limits went by the clock: on a busy machine, searches ended as undetermined that name the cause on a quiet one."""
    waited, worked = Deadline(0.1), Deadline(0.02)
    time.sleep(0.12)  # as if other programs had the processor
    waited.check()
    assert 0 < waited.left < 0.1 - 0.12 / SLOWEST + 1e-6
    time.sleep(0.1)
    assert waited.passed
    with pytest.raises(TimeUp):
        waited.check()
    worked, start = Deadline(0.02), time.thread_time()
    while time.thread_time() < start + 0.021:
        pass
    assert worked.passed


def test_no_limit_is_ever_reached() -> None:
    assert not Deadline().passed
    assert Deadline(0).passed
