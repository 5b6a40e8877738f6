"""Shared fixtures: each process uses one thread; what a test leaves behind, another one finds, so the test that left it fails."""

import gc
import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

gc.disable()  # until all is collected: a third of the time went to looking through torch again and again
os.environ["TERM"] = "xterm"  # progress is shown there, if not on a dumb one
os.environ["HF_HUB_OFFLINE"] = "1"  # the Hub's client reads it when it is imported, by whichever test is the first
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


SET = ("PYTEST_CURRENT_TEST", "OMP_WAIT_POLICY", "TORCHINDUCTOR_CACHE_DIR")  # by pytest, a command of ours and torch
LONG = re.compile("test_(documents|notebooks|types|packaging|fuzz|parallel|devices|embedded|cost|shards).py")
FORKING = {"forks", "job", "killed", "report_of", "watch_a_fork"}  # names that a file imports if its tests start forks
LOGGERS = [logging.getLogger(name) for name in ("root", "gpt2")]


def pytest_configure(config: pytest.Config) -> None:
    """Keep small files in memory where there is room: a disk took a third of the time. The slow tests write gigabytes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it, and its children do
    memory, quick = Path("/dev/shm"), config.option.markexpr in ("not slow", "kernels and not slow")
    if quick and memory.is_dir() and shutil.disk_usage(memory).free > 4e9:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files of the longest tests: one that began last ran beside an idle core. Of the quick ones, begin with
    those that fork: the first worker gets them all, and the other one starts no second process that imports torch for forks."""
    slow = config.option.markexpr == "slow"
    items.sort(key=lambda item: not (LONG.fullmatch(item.path.name) if slow else FORKING & vars(item.module).keys()))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 500)  # 1000 as in commands would hide one that leaves it so
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker a half of the tests, in order: dealt out in turn, each would make every module's fixtures and imports."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def of_the_process() -> dict[str, object]:
    """What every test of the process reads."""
    found: dict[str, object] = {f"${key}": value for key, value in os.environ.items() if key not in SET}
    found |= {"folder": os.getcwd(), "path": list(sys.path), "gc": (gc.isenabled(), gc.get_threshold())}
    found |= {number.name: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    found["logging"] = [(logger.level, logger.propagate, len(logger.handlers)) for logger in LOGGERS]
    if torch := sys.modules.get("torch"):
        asked = torch.get_num_threads, torch.get_default_dtype, torch.is_grad_enabled, torch.is_inference_mode_enabled
        found["torch"] = [each() for each in asked]
    return found


def of_the_package() -> dict[str, dict[str, object]]:
    """The functions, classes and numbers in the modules of the package that are imported."""
    return {name: dict(vars(module)) for name, module in list(sys.modules.items()) if name.partition(".")[0] == "gpt2"}


def differ(before: dict[str, object], after: dict[str, object]) -> set[str]:
    """The names of what changed, went or came; a module that was imported in between is no change."""
    here = {key for key in before | after if key in before or key[0] == "$"}
    return {key for key in here if before.get(key) is not after.get(key) and before.get(key) != after.get(key)}


def changed(before: dict[str, dict[str, object]], after: dict[str, dict[str, object]]) -> set[str]:
    """The names in the package of what is no longer what it was."""
    return {f"{name}.{key}" for name, own in before.items() for key in differ(own, after.get(name, {})) if key[:2] != "__"}


@pytest.fixture(scope="session", autouse=True)
def no_power_cuts() -> Iterator[None]:
    """Replace fsync, half of a short run, by fstat, which refuses a closed file too. test_resume.py sees what is synced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(autouse=True)
def the_process_is_left_as_it_was() -> Iterator[None]:
    """A test that read damaged files left torch with one thread: a run of training, resumed in another process, differed."""
    if torch := sys.modules.get("torch"):  # what is drawn without a generator does not depend on the tests before
        torch.default_generator.manual_seed(0)  # torch.manual_seed keeps a traceback for each kind of GPU
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
    before = of_the_process()
    yield
    assert differ(before, of_the_process()) == set()


@pytest.fixture(autouse=True, scope="module")
def the_package_is_left_as_it_was() -> Iterator[None]:
    """What a test puts in a function's place, and leaves there, every later test calls."""
    gc.collect()
    gc.freeze()  # what is imported by now lives to the end: to look through it again and again took 6 % of the time
    before = of_the_package()
    yield
    assert changed(before, of_the_package()) == set()
    assert gc.isenabled()  # also after what a module's fixture did, or the first test of another module


@pytest.fixture
def in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate Jupyter, where rich displays a table instead of writing it to the given file: a table came back empty."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
