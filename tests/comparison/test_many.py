"""Several models against the first: the same figures as of two alone, one pair in memory, runs by their steps."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.pages import assert_whole_by_itself

import gpt2
from gpt2.cli.main import main
from gpt2.comparison import pairs
from gpt2.comparison.gates import Gate, judge
from gpt2.comparison.many_results import Comparisons, paper_figures
from gpt2.comparison.noise import Floor
from gpt2.comparison.run import compare
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.measure.estimates import Estimate


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training run: two steps, and what was best between them."""
    run = tmp_path_factory.mktemp("many") / "run"
    for step, size in ((100, 0.02), (20, 0.004)):
        model = gpt2.load(str(base))
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=size)
        gpt2.save(model, gpt2.load_tokenizer(str(base)), run / f"step-{step}")
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
    for name, each in zip(names[1:], found.candidates[1:], strict=True):
        alone = compare(names[0], name, on=text, tokens=200)
        both, against = alone.distributions, each.against
        assert each.model == alone.b
        assert each.language.perplexity.value == pytest.approx(both.b.perplexity.value, rel=1e-7)
        assert each.language.bits_per_byte.high == pytest.approx(both.b.bits_per_byte.high, rel=1e-7)
        assert against == both
        assert each.weights == pytest.approx(alone.weights.total.distance, rel=1e-7)
    assert found.candidates[3].against.kl_ab.max == found.candidates[3].weights == 0
    assert found.candidates[2].against.kl_ab.mean.value > 1e-3
    first, half, *_ = found.candidates  # a picture in which two dtypes have one size shows nothing
    files = sum(path.stat().st_size for path in Path(names[0]).iterdir())
    assert first.size == 4 * first.model.parameters < files  # its tokenizer is no weight
    assert half.size == 2 * half.model.parameters


def test_the_first_model_runs_once_or_again_where_its_logits_are_too_many(
    found: Comparisons, names: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes of logits went to a temporary file, whatever the text's length; a text that does not fit must give the same."""
    runs = []
    logits = CheckpointSide.logits
    monkeypatch.setattr(CheckpointSide, "logits", lambda self, ids: (runs.append(self.name), logits(self, ids))[1])
    options = {"on": text, "tokens": 200}
    assert gpt2.compare(*names, **options).ranking == found.ranking
    once = runs.count(names[0])
    monkeypatch.setattr(pairs, "HELD", 0)
    again = gpt2.compare(*names, **options)
    assert runs.count(names[0]) - once == once // 2 * 4  # A three times, and D, which is A, once
    assert again.ranking == found.ranking
    assert [each.against for each in again.candidates] == [each.against for each in found.candidates]


def test_table_json_and_page(found: Comparisons) -> None:
    """A table that is wider than 80 columns breaks in a terminal; a page must load nothing. It called a passed gate not met."""
    assert max(map(len, found.table(80).splitlines())) <= 80
    interval = found.candidates[1].against.ratio
    assert f" {interval.low:.3f} .. {interval.high:.3f} " in found.table(80)  # on one line
    body = json.loads(found.to_json())
    assert body["letters"] == ["A", "B", "C", "D"]
    assert body["candidates"][1]["against"]["kl"]["value"] == found.candidates[1].against.kl_ab.mean.value
    assert found.above_floor.endswith("not above it: D")  # the same model as A; B differs by its dtype, C by its weights
    judged, of_each = judge(found, [Gate.parse("kl>1e-3")])
    html = judged.html()
    assert "B passed: kl&gt;0.001" in html
    assert "C failed: kl&gt;0.001" in html
    assert [gate.met for (gate,) in of_each.values()] == [False, True, False]
    assert found.above_floor in html
    assert_whole_by_itself(html)
    assert 'id="quality"' in html


def test_which_is_best_and_which_are_equal(found: Comparisons, names: list[str], text: str) -> None:
    """Five rows and no answer: an order, with intervals paired between neighbours; a copy is equal, and said to be one."""
    order = [number for number, _ in found.ranking]
    assert order == sorted(range(4), key=lambda number: found.candidates[number].language.bits_per_byte.value)
    for (before, _), (number, behind) in zip(found.ranking, found.ranking[1:], strict=False):
        alone = compare(names[before], names[number], on=text, tokens=200).distributions.ratio
        assert (behind.value, behind.low, behind.high) == pytest.approx((alone.value, alone.low, alone.high), rel=1e-6)
    assert found.best.startswith(f"best by bits per byte: {found.letters[order[0]]}; ")
    assert "D equal (x 1.000, exactly)" in found.best
    apart = replace(found, ranking=(found.ranking[0], found.ranking[1]._replace(behind=Estimate(1.02, 1.01, 1.03))))
    assert apart.best.count("worse (x 1.020, 1.010 .. 1.030)") == 1
    assert [each.made_of for each in found.candidates] == ["", "A in bfloat16", "", "A, the same weights"]
    assert "B is A in bfloat16; D is A, the same weights" in " ".join(found.table(80).split())


def test_another_program_is_not_called_a_rounding(names: list[str], text: str, tmp_path: Path) -> None:
    """The same tensors with another epsilon are another model, however equal the weights."""
    shutil.copytree(names[0], tmp_path / "other")
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 1e-3}))
    found = gpt2.compare(names[0], names[1], str(tmp_path / "other"), on=text, tokens=40)
    assert [each.made_of for each in found.candidates] == ["", "A in bfloat16", ""]
    assert found.candidates[2].weights == 0


def test_labels_and_ticks_of_near_models_do_not_overlap(found: Comparisons) -> None:
    """Two models of nearly one size and quality had labels and ticks one upon the other."""
    first, second, third, last = found.candidates
    bits = first.language.bits_per_byte
    near = replace(
        last, size=int(first.size * 1.02), language=replace(last.language, bits_per_byte=Estimate(bits.value + 1e-4, 0, 0))
    )
    several = replace(found, candidates=(first, second, replace(third, size=3 * first.size), near))
    for drawn in several.html().split('<div class="narrow">'):
        texts = re.findall(r">([^<>]+)</text>", drawn)
        assert "A D" in texts
        assert f"{first.size / 1e6:.3g}" in texts
        assert f"{near.size / 1e6:.3g}" not in texts


def test_a_kl_that_is_not_a_number_is_not_taken_for_noise(found: Comparisons) -> None:
    """A broken model was listed among those that rounding explains; with no KL at all, every one was said to be above."""
    first, second, *rest = found.candidates
    unknown = replace(second.against.kl_ab, mean=Estimate(math.nan, math.nan, math.nan))
    broken = replace(second, against=replace(second.against, kl_ab=unknown))
    assert replace(found, candidates=(first, broken, *rest)).above_floor.endswith("not above it: D; not a number: B")
    assert replace(found, candidates=(first,)).above_floor == ""
    nan = Estimate(math.nan, math.nan, math.nan)
    floor = Floor((("attention step by step", nan, math.nan),), 64)
    assert replace(found, floor=floor).above_floor == ""  # it said that every KL is above it


def test_a_runs_folder_is_its_checkpoints_in_the_order_of_steps(
    base: Path, run: Path, text: str, capsys: pytest.CaptureFixture
) -> None:
    """step-100 sorts before step-20 as text; what is best is in between. In Python a run's folder was taken for a model."""
    assert main(["compare", str(base), str(run), "--on", text, "--tokens", "100", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["candidates"]
    assert [row["step"] for row in rows] == [None, 20, 40, 100]
    assert [Path(row["model"]["name"]).name for row in rows] == ["model", "step-20", "best", "step-100"]
    assert 0 < rows[1]["weights"] == rows[2]["weights"] < rows[3]["weights"]
    assert rows[1]["against"]["kl"]["value"] < rows[3]["against"]["kl"]["value"]
    found = gpt2.compare(str(base), str(run), on=text, tokens=40)
    assert [each.step for each in found.candidates] == [None, 20, 40, 100]


def test_each_candidate_is_judged(names: list[str], text: str, capsys: pytest.CaptureFixture) -> None:
    """A gate that looks at one candidate only lets the others through."""
    options = ["--on", text, "--tokens", "100"]
    assert main(["compare", *names, *options, "--fail-if", "kl>1e-3"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2].split(":")[0] for line in lines] == ["passed", "failed", "passed"]
    assert main(["compare", *names, *options, "--fail-if", "kl>1"]) == 0
    assert main(["compare", *names, *options, "--fail-if", "js>1"]) == 2
    assert "compare two models for it" in capsys.readouterr().err
    assert main(["compare", *names, *options, "--blame"]) == 2


def test_another_tokenizer_has_bits_per_byte_alone(names: list[str], text: str) -> None:
    """KL over other tokens is no KL; bits per byte of the same passage still compare."""
    found = gpt2.compare(names[0], names[1], "shakespeare-mini", on=text, tokens=100)
    other = found.candidates[2]
    assert other.against is None
    assert other.language.score.bytes == pytest.approx(found.candidates[0].language.score.bytes, abs=8)
    assert "left out of C" in found.table(80)
    smaller = gpt2.compare("shakespeare-mini", names[0], names[0], on=text, tokens=60).candidates
    assert smaller[1].against is None  # its 300 tokens were held against the 2,048 of the first
    assert smaller[1].language.score.bytes == pytest.approx(smaller[0].language.score.bytes, abs=8)


def test_the_papers_figures_stand_beside_the_official_names_only() -> None:
    """Beside a fine-tune, or on another text, the paper's figure would be a false promise."""
    assert paper_figures("openai-community/gpt2-xl:bf16", "wikitext2:stride=512") == {"perplexity": 18.34}
    assert paper_figures("hf/gpt2", "lambada") == {"perplexity": 35.13, "accuracy": 0.4599}
    assert paper_figures("me/gpt2", "wikitext2") == paper_figures("gpt2", "twelfth-night") == {}
