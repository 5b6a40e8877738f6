"""Loss curves: the picture shows every logged number, also of a run that failed."""

import json

from support.commands import refusal

from gpt2.cli.main import main
from gpt2.train.plot import plot
from gpt2.train.runs import read


def run(folder, losses, torn=""):
    folder.mkdir()
    rows = [{"step": 10 * i + 10, "loss": loss, "lr": 1e-3} for i, loss in enumerate(losses)]
    rows += [{"step": 10 * i, "val_loss": loss + 0.1, "val_bits_per_byte": loss * 1.4} for i, loss in enumerate(losses)]
    rows.append({"step": 25, "diverged": "loss nan", "action": "skip"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    (folder / "recipe.json").write_text(json.dumps({"expect": 1.5}))
    return folder


def test_a_run_is_read_as_it_was_logged(tmp_path):
    """A NaN, a damaged or an incomplete line must not stop the plot: those runs need it most."""
    folder = run(tmp_path / "a", [3.0, 2.0, float("nan"), 1.8], torn="[" * 100_000 + '\n{"step": 99, "lo')
    (found,) = read([folder])
    assert found.name == "a"
    assert found.points("loss") == ((10, 3.0), (20, 2.0), (40, 1.8))
    assert [step for step, _ in found.points("val_loss")] == [0, 10, 30]
    assert found.setting("expect") == 1.5


def test_pictures_of_one_run_and_of_several(tmp_path):
    a, b = run(tmp_path / "a", [3.0, 2.0, 1.7]), run(tmp_path / "b", [2.5, 1.9, 1.75])
    png = plot([a], tmp_path / "one.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    svg = plot([a, b], tmp_path / "two.svg").read_text()
    for best in ("a, held out: best 1.8000 at step 20", "b, held out: best 1.8500 at step 20"):
        assert best in svg
    assert "bits per byte" in svg
    assert "nats per token" in svg
    assert "expected 1.5" in plot([a], tmp_path / "one.svg").read_text()
    assert plot([a, b], tmp_path / "again.svg").read_text() == svg


def test_what_cannot_be_drawn_is_one_line(tmp_path, capsys):
    a = run(tmp_path / "a", [3.0, 2.0])
    empty = tmp_path / "empty"
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
    assert main(["train", "plot", str(a), "--out", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").is_file()
    assert main(["train", "plot", str(tmp_path / "none")]) == 2
    assert main(["train", "bigram", str(a)]) == 2
    assert "give one recipe only" in capsys.readouterr().err
