"""Damaged answers of a Hub by the thousand: exit 0 or 2, one line, nothing beside the cache touched, no hang."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


def fuzz(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """What `hub_fuzz.py` found, in a process that may hang without taking the tests along."""
    command = [sys.executable, "-X", "faulthandler", "-m", "support.hub_fuzz", str(count), str(seed), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    child = subprocess.run(command, capture_output=True, text=True, timeout=120 + count, env=environment, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    results = json.loads(child.stdout.splitlines()[-1])
    print(results)
    assert results["cases"] == sum(results["refusals"].values()) == count
    assert results["slowest_s"] < 45
    return results


def test_damaged_answers_are_refused_in_one_line_or_made_up_for(tmp_path: Path) -> None:
    results = fuzz(60, 0, tmp_path)
    assert results["altered"] > 40
    assert len(results["refusals"]) > 4
    assert results["refusals"]["0"] > 10


@pytest.mark.slow
def test_a_thousand_damaged_answers(tmp_path: Path) -> None:
    """The same, longer, from another seed; `python -m support.hub_fuzz 10000 2 FOLDER` in `tests/` runs as many as one likes."""
    results = fuzz(1000, 1, tmp_path)
    assert len(results["refusals"]) > 8
