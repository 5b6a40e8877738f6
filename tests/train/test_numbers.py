"""Numbers that do not fit, in every file and argument that people or programs write: one line, and never an OverflowError."""

import json
import shutil
from pathlib import Path

import pytest
from support.commands import mistake, refusal

from gpt2.config import number
from gpt2.train.card import record_of
from gpt2.train.plot import plot
from gpt2.train.recipe import read
from gpt2.train.runs import read as read_runs
from gpt2.train.state import Progress

HUGE = 10**400
BAD = (HUGE, True, None, "1", float("nan"), float("inf"), [], -(2**70))


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad)[:9])
def test_the_one_reader_of_numbers(bad: object) -> None:
    """Python compares and divides some of these, and overflows later. Control: what fits is read."""
    assert number(bad, int) is None
    assert number(bad, float, -1e9, 1e9) is None
    assert (number(3, float), number(3, int), number(2.5, float), number(2.5, int)) == (3.0, 3, 2.5, None)
    assert number(5, int, 0, 4) is None


def test_metrics_and_state(whole: Path, tmp_path: Path) -> None:
    """A loss that is no number, or a line that is none or torn, ended the plot of runs, the card and the next start."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    forged = [
        json.dumps({"step": step, "loss": loss, "val_loss": loss}) for loss in BAD[:-1] for step in (1, HUGE, "x", True, None)
    ]
    (run / "metrics.jsonl").write_text("\n".join([*lines, *forged, "[" * 9000, "7", '{"step": 99, "lo']))
    (found,) = read_runs([run])
    assert found.points("val_loss") == read_runs([whole])[0].points("val_loss")
    assert plot([run], tmp_path / "loss.svg").exists()
    assert record_of(run).training.figures == record_of(whole).training.figures
    file = next(run.glob("step-*")) / "progress.json"
    good = json.loads(file.read_text())
    for key in good:
        file.write_text(json.dumps(good | {key: HUGE}))
        with pytest.raises(ValueError, match=f"{key} of progress.json"):
            Progress.read(file.parent)


def test_settings_and_arguments(capsys: pytest.CaptureFixture) -> None:
    """An integer of 400 digits was an OverflowError, of a recipe that was only listed, or of torch."""
    for bad in (str(HUGE), "nan", "true", "1e400"):
        assert "seed" in refusal(read, "shakespeare-mini", [f"seed={bad}"])
    assert "optim.lr" in mistake(capsys, "diagnose", "x.npz", "--set", f"optim.lr={HUGE}")
    assert len(said := mistake(capsys, "generate", "--top-k", "9" * 5000)) < 400
    assert "invalid" in said
