"""Thousands of damaged files: each is read, or refused in one line, in little time and memory."""

import json

import pytest
from support import forks, fuzz

# For a quick and a slow run: the number of inputs, the share that must still load, and the number of different refusals. A reader
# of files without one of its checks falls within 3,100 inputs of the slow run's seed; more: `python -m support.surfaces --count`.
CASES = {
    "dialects": (250, 3100, 0.08, 25),
    "texts": (180, 1140, 0.05, 0),
}


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "slow"])
@pytest.mark.parametrize("name", CASES)
def test_damaged_inputs_are_read_or_refused_in_one_line(name: str, slow: bool) -> None:
    """A damaged byte must not cause an IndexError, a minute of parsing, gigabytes of memory, or wrong weights.

    Each kind runs in a process of its own, which may crash or hang.
    """
    quick, many, share, kinds = CASES[name]
    count = many if slow else quick
    done = forks.run("-m", "support.surfaces", name, "--count", str(count), "--seed", str(7 * slow), timeout=900 + count)
    *reports, last = done.stdout.splitlines()
    assert last.split(" tried")[0] == f"{count:,}"
    found = [json.loads(line) for line in reports if line.startswith("{")]
    assert [report["fallen"] for report in found] == [[]] * len(found)
    assert share * count < sum(report["loaded"] for report in found) < 0.9 * count
    assert len(set().union(*(report["refused"] for report in found))) > kinds


def test_a_fall_is_seen() -> None:
    """Control: a reader that raises something else, says more than a line, or not what to do."""

    def read(wrong: BaseException | None) -> None:
        if wrong is not None:
            raise wrong

    wrongs = [None, ZeroDivisionError("x"), fuzz.InputError("no advice"), fuzz.InputError("a: b" * 999), fuzz.InputError("a: b")]
    for wrong, falls in zip(wrongs, (0, 1, 1, 1, 0), strict=True):
        kept: list[BaseException | None] = [None]
        surface = fuzz.Surface(lambda pick, kept=kept, wrong=wrong: kept.__setitem__(0, wrong), lambda kept=kept: read(kept[0]))
        assert len(fuzz.fuzz("control", surface, 1, 0)["fallen"]) == falls
