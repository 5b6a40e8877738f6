"""Assert in a test that two models do the same: ``assert_same(a, b, kl=1e-3)``, as a function and as a pytest fixture."""

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import pytest

from gpt2.errors import InputError

if TYPE_CHECKING:
    from gpt2.comparison.results import Comparison


def assert_same(
    a: str, b: str, *, on: str | None = None, tokens: int | None = None, cases: str | None = None, **limits: float
) -> "Comparison":
    """Compare two models by name, and raise AssertionError where a limit is passed; return the comparison.

    Args:
        a, b, on, tokens, cases: as for :func:`gpt2.compare`.
        limits: the largest ``kl``, ``kl_max`` or ``js`` (nats), ``perplexity_ratio``, ``weights``, ``activation`` or ``logit``
            (relative errors) or ``beyond_rounding`` (tensors) that passes, or the smallest ``same_top`` (a fraction); of
            the cases the largest ``lost_cases``, or the smallest ``exact_match``, ``contains`` or ``answer_ratio``. At least one.

    A metric with a 95 % interval passes only if the whole interval does, as with ``gpt2 compare --fail-if``.

    Raises:
        AssertionError: a limit is passed: each with its figure and interval.
        InputError: no limit, an unknown one, or one that cannot be measured here; or as for :func:`gpt2.compare`.
    """
    __tracebackhide__ = True  # pytest shows the test's line and the figures, not this function
    from gpt2.comparison.gates import METRICS, Gate
    from gpt2.comparison.pairs import Saved, compare_sides
    from gpt2.comparison.settings import Settings

    if not limits:
        raise InputError(f"assert_same needs a limit, such as kl=1e-3; there are {', '.join(METRICS)}")
    least = {name for name, metric in METRICS.items() if metric.least}
    try:
        gates = [Gate.parse(f"{metric}{'<' if metric in least else '>'}{limit!r}") for metric, limit in limits.items()]
        found = cast("Comparison", compare_sides([Saved(a), Saved(b)], Settings(on=on, tokens=tokens, cases=cases)))
        judged = [gate.judge(found) for gate in gates]
    except InputError as error:
        raise error.with_traceback(None) from None  # nor where in ours a wrong path or metric was seen
    if met := [str(each) for each in judged if each.met]:
        raise AssertionError(f"{a} and {b} differ: " + "; ".join(met))
    return found


@pytest.fixture(name="assert_same")
def assert_same_fixture() -> "Callable[..., Comparison]":
    """Return :func:`assert_same`; a ``conftest.py`` with ``pytest_plugins = ["gpt2.testing"]`` offers it to all tests."""
    return assert_same
