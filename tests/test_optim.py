"""The learning-rate schedule in closed form. The steps of AdamW: tests/traces/test_steps.py."""

import math

import pytest

from gpt2.optim import Optim, learning_rate


def test_schedule_has_its_closed_form_values():
    """Possible bugs: a warm-up that starts at rate 0, a cosine over the wrong number of steps."""
    optim = Optim(lr=1.0, min_lr=0.1, warmup=4)
    assert [learning_rate(step, 104, optim) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(4, 104, optim) == 1.0
    assert learning_rate(54, 104, optim) == pytest.approx(0.55, abs=1e-12)  # half-way: the mean of lr and min_lr
    assert learning_rate(29, 104, optim) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, abs=1e-12)
    assert learning_rate(104, 104, optim) == learning_rate(999, 104, optim) == pytest.approx(0.1, abs=1e-12)
    rates = [learning_rate(step, 104, optim) for step in range(4, 105)]
    assert rates == sorted(rates, reverse=True)
    # without warm-up, and with one that is longer than the run
    others = [(0, 10, 0), (4, 5, 10), (10, 10, 10)]
    assert [learning_rate(at, of, Optim(lr=1.0, min_lr=0.0, warmup=warmup)) for at, of, warmup in others] == [1.0, 0.5, 1.0]
