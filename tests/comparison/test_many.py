"""Several models against the first: the same figures as of two alone, one pair in memory, runs by their steps."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from support.pages import assert_whole_by_itself
from support.random_models import changed, noisy

import gpt2
from gpt2.checkpoint.saving import sha256
from gpt2.cli.main import main
from gpt2.comparison import pairs
from gpt2.comparison.ranking import Comparisons, Ranked
from gpt2.comparison.run import compare
from gpt2.comparison.settings import Settings
from gpt2.comparison.sides import side
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.opening import open_passage, open_side
from gpt2.measure.estimates import Estimate

text = pytest.fixture(scope="module")(lambda documents: documents)


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training run: two steps, and what was best between them."""
    run = tmp_path_factory.mktemp("many") / "run"
    for step, size in ((100, 0.02), (20, 0.004)):
        changed(base, run / f"step-{step}", noisy(size))
    shutil.copytree(run / "step-20", run / "best")
    (run / "best" / "progress.json").write_text('{"step": 40}')
    (run / "recipe.json").write_text("{}")
    return run


@pytest.fixture(scope="module")
def names(base: Path, run: Path) -> list[str]:
    return [str(base), f"{base}:bf16", str(run / "step-100"), str(base)]


@pytest.fixture(scope="module")
def found(names: list[str], text: str) -> Comparisons:
    return gpt2.compare(*names, on=text, tokens=200)


def test_each_figure_is_that_of_two_models_alone(found: Comparisons, names: list[str], text: str) -> None:
    """A row of the first model's logits read for another token's would make every candidate look alike."""
    alone = compare(names[0], names[2], on=text, tokens=200)
    third = found.candidates[2]
    assert (third.model, third.language, third.distributions) == (alone.b, alone.distributions.b, alone.distributions)
    assert third.moved == pytest.approx(alone.weights.total.distance, rel=1e-7)
    assert found.candidates[3].distributions.kl_ab.max == found.candidates[3].moved == 0 < third.distributions.kl_ab.mean.value
    first, half, *_ = found.candidates  # a picture in which two dtypes have one size shows nothing
    files = sum(path.stat().st_size for path in Path(names[0]).iterdir())
    assert first.size == 4 * first.model.parameters < files  # its tokenizer is no weight
    assert half.size == 2 * half.model.parameters
    order = [number for number, _ in found.ranking]
    assert order == sorted(range(4), key=lambda number: found.candidates[number].language.bits_per_byte.value)
    (_, (second, behind)) = found.ranking[:2]  # paired between neighbours
    ratio = compare(names[order[0]], names[second], on=text, tokens=200).distributions.ratio
    assert (behind.value, behind.low, behind.high) == pytest.approx((ratio.value, ratio.low, ratio.high), rel=1e-6)
    with (one := open_side(names[0])):
        own, _ = pairs.alone(one.logits, open_passage([one], Settings(on=text, tokens=200)), one.text_tokenizer, 0)
    assert vars(own.perplexity) == pytest.approx(vars(third.distributions.a.perplexity), rel=1e-5)


def test_files_are_hashed_where_a_hash_is_shown(
    names: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of five gpt2-xl read 30 GB for hashes that it does not show. JSON and the page have those of what is there."""
    hashed, own = list[Path](), shutil.copytree(names[0], tmp_path / "own")
    monkeypatch.setattr(side, "sha256", lambda path: (hashed.append(path), sha256(path))[1])
    report = gpt2.compare(str(own), *names[1:3], on=text, tokens=40)
    assert report.table()
    assert hashed == []
    (own / "merges.txt").unlink()
    digest = sha256(own / "model.safetensors")
    assert digest in report.html()
    files = json.loads(report.to_json())["candidates"][0]["model"]["files"]
    assert files["model.safetensors"] == digest
    assert "merges.txt" not in files


def test_the_first_model_runs_once_or_again_where_its_logits_are_too_many(
    found: Comparisons, names: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes of logits went to a temporary file, whatever the text's length; a text that does not fit must give the same."""
    runs, forward = [], CheckpointSide.forward
    monkeypatch.setattr(CheckpointSide, "forward", lambda self, ids: (runs.append(self.name), forward(self, ids))[1])
    gpt2.compare(*names, on=text, tokens=200)
    once = runs.count(names[0])
    monkeypatch.setattr(pairs, "HELD", 0)
    again = gpt2.compare(*names, on=text, tokens=200)
    assert runs.count(names[0]) - once == once // 2 * 4  # A three times, and D, which is A, once
    assert [each.distributions for each in again.candidates] == [each.distributions for each in found.candidates]


def test_what_is_printed(found: Comparisons) -> None:
    """A table that is wider than 80 columns breaks in a terminal; a page must load nothing. Five rows gave no answer."""
    table, body = found.table(80), json.loads(found.to_json())
    assert max(map(len, table.splitlines())) <= 80
    assert f" {found.candidates[1].distributions.ratio.span('#.4g')} " in table  # on one line
    against = body["candidates"][1]["against"]
    assert against.keys() == {"ratio", "bits", "kl", "kl_max", "same_top", "only_first", "only_it"}
    assert against["kl"]["value"] == found.candidates[1].distributions.kl_ab.mean.value
    assert "D equal (x 1.000, exactly)" in found.best
    one, *others = found.candidates
    made = tuple(replace(each, floor=replace(each.floor, ratio=Estimate(1.0, 0.97, 1.03))) for each in others)
    for place, said in ((1, "B equal"), (2, "C worse")):  # B is A, rounded: what its floor holds means nothing
        ranking = Ranked(0, None), Ranked(place, Estimate(1.02, 1.01, 1.03))
        apart = replace(found, candidates=(one, *made), ranking=ranking)
        assert f"A; {said} (x 1.020, 1.010 .. 1.030)" in apart.best
    assert "3 models against" in found.html()
    assert_whole_by_itself(found.html())


def test_a_runs_folder_is_its_checkpoints_and_each_is_judged(
    base: Path, run: Path, text: str, capsys: pytest.CaptureFixture
) -> None:
    """step-100 sorts before step-20 as text; what is best is in between. A gate that looks at one lets the others through."""
    command = ["compare", str(base), str(run), "--on", text, "--tokens", "100", "--json", "-"]
    assert main([*command, "--fail-if", "weights>0.1"]) == 1
    out, err = capsys.readouterr()
    rows = json.loads(out)["candidates"]
    assert [row["step"] for row in rows] == [None, 20, 40, 100]
    assert [Path(row["model"]["name"]).name for row in rows] == ["model", "step-20", "best", "step-100"]
    assert [line.partition(": ")[2].split(":")[0] for line in err.splitlines()] == ["passed", "passed", "failed"]
    assert main([*command, "--fail-if", "activation>1"]) == 2
    assert "compare two models for it" in capsys.readouterr().err
    assert main([*command, "--blame"]) == 2


def test_what_cannot_be_compared(names: list[str], text: str, tmp_path: Path) -> None:
    """KL over other tokens is no KL, bits per byte still compare."""
    shutil.copytree(names[0], tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 1e-3}))
    found = gpt2.compare(names[0], str(tmp_path / "other"), "shakespeare-mini", on=text, tokens=100)
    first, epsilon, other = found.candidates
    assert (epsilon.moved, other.distributions) == (0, None)
    assert other.language.score.bytes == pytest.approx(first.language.score.bytes, abs=8)
    assert "left out of C" in found.table(80)
    larger, smaller, _ = gpt2.compare("shakespeare-mini", names[0], names[0], on=text, tokens=60).candidates
    assert smaller.distributions is None  # its 300 tokens were held against the 2,048 of the first
    assert smaller.language.score.bytes == pytest.approx(larger.language.score.bytes, abs=8)
