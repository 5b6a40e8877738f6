"""Thousands of damaged files and answers: each is read, or refused in one line, in little time and memory."""

import json
from pathlib import Path

import pytest
from support import forks

# For a quick and a slow run: the number of files, the share that must still load, and the number of different errors.
CASES = {
    "torch": (250, 10_000, 0.1, 30),
    "gguf": (250, 10_000, 0.06, 20),
    "safetensors": (1500, 100_000, 0.08, 8),
    "tensorflow": (250, 10_000, 0.02, 25),
    "llmc": (300, 10_000, 0.1, 10),
    "old": (300, 10_000, 0.1, 20),
    "folder": (1000, 10_000, 0.1, 40),
}


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_damaged_files_load_or_are_refused(slow: bool, tmp_path: Path) -> None:
    """A damaged byte must not cause an IndexError, a minute of parsing, gigabytes of memory, or wrong weights.

    Each kind runs in a process of its own, which may crash or hang.
    """
    counts = {kind: many if slow else quick for kind, (quick, many, *_) in CASES.items()}
    for kind in counts:
        (tmp_path / kind).mkdir()
    cases = [[kind, str(count), str(int(slow)), tmp_path / kind] for kind, count in counts.items()]
    for kind, case in zip(CASES, cases, strict=True):
        report = json.loads(forks.run("-m", "support.fuzz", *case, timeout=900).stdout.splitlines()[-1])
        print(kind, report)
        *_, share, kinds = CASES[kind]
        assert report["loaded"] + sum(report["refused"].values()) == counts[kind]
        assert report["slowest_s"] < 2, "of processor time, for one file"
        assert report["grown_mb"] < 50
        assert share * counts[kind] < report["loaded"] < counts[kind] / 2
        assert len(report["refused"]) > kinds


@pytest.mark.parametrize(("count", "altered", "refusals"), [(30, 20, 4), pytest.param(1000, 600, 8, marks=pytest.mark.slow)])
def test_damaged_answers_of_a_hub_are_refused_in_one_line_or_made_up_for(
    count: int, altered: int, refusals: int, tmp_path: Path
) -> None:
    """The command exits with 0 or 2 and one line, changes only the cache, and never hangs; see `support/hub_fuzz.py`."""
    done = forks.run("-m", "support.hub_fuzz", str(count), "0", tmp_path, timeout=120 + count)
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    assert report["cases"] == sum(report["refusals"].values()) == count
    assert report["slowest_s"] < 45
    assert report["altered"] > altered
    assert len(report["refusals"]) > refusals
    assert report["refusals"]["0"] > 10
