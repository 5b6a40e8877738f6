"""Numbers that do not fit, in every file and argument that people or programs write: one line, and never an OverflowError."""

import json
import shutil
from pathlib import Path

import pytest
from support.commands import mistake, refusal

from gpt2.checkpoint.peft_files import _number as adapter_number
from gpt2.config import number
from gpt2.train.card import record_of
from gpt2.train.plot import plot
from gpt2.train.recipe import read
from gpt2.train.runs import read as read_runs
from gpt2.train.state import Progress

HUGE = 10**400
BAD = (HUGE, -HUGE, True, None, "1", "x", float("nan"), float("inf"), [], {}, -(2**70))


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: str(bad)[:9])
def test_the_one_reader_of_numbers(bad: object) -> None:
    """Python compares and divides some of these, and overflows later. Control: what fits is read."""
    assert number(bad, int) is None
    assert number(bad, float, -1e9, 1e9) is None
    assert (number(3, float), number(3, int), number(2.5, float), number(2.5, int)) == (3.0, 3, 2.5, None)
    assert number(5, int, 0, 4) is None


KEYS = ("optim.lr", "lora.r", "data.stride", "model.n_layer", "expect", "seed")


@pytest.mark.parametrize("key", KEYS)
def test_recipes(key: str) -> None:
    """An integer of 400 digits was an OverflowError, in a recipe that was only listed."""
    for bad in (str(HUGE), "nan", "true", "1e400", "-1e400"):
        assert key.rpartition(".")[2] in refusal(read, "shakespeare-mini", [f"{key}={bad}"])


def test_adapters() -> None:
    """lora_alpha of 400 digits was divided by r."""
    for bad in BAD[:-3]:
        assert "no positive number" in refusal(adapter_number, {"lora_alpha": bad}, "lora_alpha", 8, "p", "c_attn", Path("x"))


def test_metrics_and_state(whole: Path, tmp_path: Path) -> None:
    """A loss that is no number ended the plot of runs, the card and the next start with a traceback."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    forged = [
        json.dumps({"step": step, "loss": loss, "val_loss": loss}) for loss in BAD[:-1] for step in (1, HUGE, "x", True, None)
    ]
    (run / "metrics.jsonl").write_text("\n".join([*lines, *forged, "[" * 9000, "7", ""]))
    (found,) = read_runs([run])
    assert found.points("val_loss") == read_runs([whole])[0].points("val_loss")
    assert plot([run], tmp_path / "loss.svg").exists()
    assert record_of(run).training.figures == record_of(whole).training.figures
    file = next(run.glob("step-*")) / "progress.json"
    good = json.loads(file.read_text())
    for key in good:
        for bad in BAD:
            if key == "best_loss" and bad in (None, float("inf"), BAD[-1]):
                continue
            file.write_text(json.dumps(good | {key: bad}))
            with pytest.raises(ValueError, match=f"{key} of progress.json"):
                Progress.read(file.parent)
    file.write_text(json.dumps(good))
    assert Progress.read(file.parent).step == good["step"]


@pytest.mark.parametrize(
    "words",
    [("generate", "--top-k"), ("compare", "a", "b", "--tokens"), ("explore", "--port"), ("bench", "--batch")],
    ids=" ".join,
)
def test_arguments(words: tuple[str, ...], capsys: pytest.CaptureFixture) -> None:
    """They reached torch, which raises what nobody expects."""
    for bad in (str(HUGE), "nan", "9" * 5000):
        assert "invalid" in (said := mistake(capsys, *words, bad))
        assert len(said) < 400


def test_diagnose_settings(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """The settings of a step that is diagnosed."""
    for key in ("optim.lr", "grad_accum"):
        assert key in mistake(capsys, "diagnose", str(tmp_path / "x.npz"), "--set", f"{key}={HUGE}")
