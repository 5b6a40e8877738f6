"""Shared fixtures and settings: tests run in one process per core, so each process uses one thread."""

import gc
import os
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


LARGE = ("test_embedded",)  # gigabytes: one after another, beside the small ones


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in LARGE:
            item.add_marker(pytest.mark.xdist_group("large"))


def pytest_collection_finish() -> None:
    """Leave modules and tests, which live to the end, out of each collection of garbage: that took 6 % of the time."""
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker of `-n 2` a half of the tests, in order, and an idle one a part of the other's rest.

    By default, xdist deals them out in turn: each worker then makes every module's fixtures and imports.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.fixture
def in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate Jupyter, where rich displays a table instead of writing it to the given file: a table came back empty."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
