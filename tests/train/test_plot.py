"""``gpt2 train plot``: what the picture shows of a run, also of one that failed."""

import json
from pathlib import Path

import pytest
from support.commands import mistake, refusal

from gpt2.cli.main import main
from gpt2.train.plot import plot


def write(folder: Path, val: list[float]) -> Path:
    """A run's folder with an evaluation every ten steps and a step that was skipped; training losses fall."""
    folder.mkdir(exist_ok=True)
    rows: list[dict] = []
    for i, loss in enumerate(val):
        rows += [{"step": 10 * i, "loss": 3 - 0.1 * i, "lr": 1e-3 / (i + 1), "grad_norm": 1.0 + i}] if i else []
        rows.append({"step": 10 * i, "val_loss": loss, "val_bits_per_byte": loss * 1.4, "sample": f"I am <b>step</b> {10 * i}"})
    rows.append({"step": 5, "diverged": "loss nan", "action": "skip"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.json").write_text(json.dumps({"steps": 100, "patience": 0, "expect": 1.5}))
    return folder


def test_pictures_of_one_run_and_of_several(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [3.0, 2.0, 1.8]), write(tmp_path / "b", [2.5, 1.9, 1.85])
    svg = plot([a, b], tmp_path / "two.svg").read_text()
    for part in ("a, held out: best 1.8000 at step 20", "b, held out: best 1.8500 at step 20", "bits per byte", "nats per token"):
        assert part in svg
    assert "expected 1.5" in (one := plot([a], tmp_path / "one.svg").read_text())
    assert plot([a], tmp_path / "again.svg").read_text() == one


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    a, empty = write(tmp_path / "a", [3.0, 2.0]), tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    for folders, out, says in (
        ([], "x.png", "no runs: give the folders"),
        ([a], "x.gif", "ends in .png or .svg"),
        ([tmp_path / "none"], "x.png", "cannot be read"),
        ([empty], "x.png", "no losses there yet"),
        ([a], "nowhere/x.png", "cannot be written"),
    ):
        assert says in refusal(plot, folders, tmp_path / out)
    assert "cannot be read" in mistake(capsys, "train", "plot", str(tmp_path / "none"))
    assert "the numbers are in RUN/metrics.jsonl" in mistake(capsys, "train", "plot", str(a), "--json", "-")
    assert "give one recipe only" in mistake(capsys, "train", "bigram", str(a))
    monkeypatch.chdir(tmp_path)
    for name, out in (("x.svg", ("--out", "x.svg")), ("loss.png", ())):  # an earlier one is replaced, and none that the user drew
        assert main(words := ["train", "plot", str(a), *out]) == main(words) == len(capsys.readouterr().out) == 0
        Path(name).write_bytes((drawn := Path(name).read_bytes()).replace(b"Loss curves", b"My curves"))
        assert "your own file" in mistake(capsys, *words)
    assert drawn.startswith(b"\x89PNG")
