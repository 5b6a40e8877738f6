"""tools/sets.py: a dump is really diagnosed, and today's engine answers a sample as well as before."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.commands import load_script

sets = load_script("sets")
DUMP = sets.Answer("fourteenth", "flattened", ("feed-forward added to its norm",), "full")
COMMITTED = sets.read(Path(sets.__file__).with_name("sets.jsonl"))
QUICK = [one for one in COMMITTED.values() if one.first and one.complete and one.seconds < 5]
SAMPLE = [one.key for faulty, most in ((True, 8), (False, 2)) for one in [o for o in QUICK if bool(o.faults) == faulty][:most]]
IDS = ("residual-from-normed",)


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What ``prepare`` sets, until the test ends; the folder outlasts it, because later tests use the same programs."""
    folder, threads = tmp_path_factory.mktemp("bench"), torch.get_num_threads()
    monkeypatch.setattr(tempfile, "tempdir", None)
    sets.prepare(str(folder))
    yield folder
    torch.set_num_threads(threads)


def test_an_answer_says_what_the_diagnosis_says(bench: Path) -> None:
    """Otherwise the answers could come from anything; a file of answers gives back what was written."""
    found, text = sets.answered(DUMP)
    assert (found.verdict, found.ids, found.first, found.complete, found.placed) == ("mismatch", IDS, True, True, True)
    assert IDS[0] in text
    sets.add(bench / "answers.jsonl", found)
    assert sets.read(bench / "answers.jsonl") == {DUMP.key: found}


@pytest.mark.parametrize("key", [pytest.param(key, marks=[pytest.mark.slow] * (number > 0)) for number, key in enumerate(SAMPLE)])
def test_a_sample_of_dumps_is_answered_as_well_as_before(key: str, bench: Path) -> None:
    """Recall is what the yardstick measures; this is the part of it that each change runs."""
    before = COMMITTED[key]
    asked = sets.Answer(before.set, before.program, before.faults, before.level, "" if before.faults else before.dtype)
    found, text = sets.answered(asked)
    assert found is not None, text
    assert found.worth >= before.worth, text


def test_a_committed_answer_is_of_a_dump_that_can_be_run_again() -> None:
    """A fault of another name would be asked for again and again, and its older answer compared with nothing."""
    for answer in COMMITTED.values():
        assert set(answer.faults) <= set(sets.SETS[answer.set].FAULTS[answer.program]), answer.key
        assert answer.verdict
