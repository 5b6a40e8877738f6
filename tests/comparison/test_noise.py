"""`compare --noise`: one floor, from what rounding explains; a batch and padding stay under it, another dtype does not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.commands import mistake, refusal
from support.random_models import changed, noisy, write_checkpoint

import gpt2
from gpt2.cli.main import main
from gpt2.comparison.noise import Noise, measure_noise
from gpt2.comparison.settings import Settings
from gpt2.measure.estimates import Estimate
from gpt2.measure.metrics import token_losses
from gpt2.model import GPT2


@pytest.fixture(scope="module")
def found(base: Path, text: str) -> Noise:
    return measure_noise(str(base), Settings(on=text, tokens=200))


def test_a_batch_and_padding_round_and_do_no_more(found: Noise, base: Path, text: str) -> None:
    """A way that computes another function, such as padding with wrong positions, would be taken for noise."""
    batch, padding, dtype = found.ways
    assert found.floor is not None
    for way in (batch, padding):
        assert way.kl.value <= found.floor.kl
        assert way.logit <= 2 * found.floor.logit
        assert way.flipped == 0
    assert dtype.name == "in bfloat16"
    compared = gpt2.compare(str(base), f"{base}:bf16", on=text, tokens=200)
    assert compared.weights.same_numbers  # rounding must not look like training
    assert 1e-3 < compared.weights.total.distance < 3e-3
    assert ("rounded to bfloat16" in compared.table(), compared.a.dtype, compared.b.dtype) == (True, "float32", "bfloat16")
    assert 1e-3 < max(point.error for point in compared.activations.points) < 0.2
    assert found.floor.kl < dtype.kl.value == pytest.approx(compared.distributions.kl_ab.mean.value, rel=0.3)
    other = measure_noise(f"{base}:bf16", Settings(on=text, tokens=200))
    assert other.ways[2].name == "in float32"
    assert other.floor.kl > other.ways[2].kl.low / 2  # two roundings, on the first of the tokens


def test_padding_without_its_mask_is_seen(base: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: padding that is read moves every position by seven."""
    forward = GPT2.forward
    monkeypatch.setattr(GPT2, "forward", lambda self, ids, attention_mask=None, **rest: forward(self, ids, **rest))
    broken = measure_noise(str(base), Settings(on=text, tokens=60))
    assert broken.ways[0].kl.value < 1e-10
    assert broken.ways[1].kl.value > 1e-3


def test_the_table_and_the_json_say_one_thing(found: Noise, base: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The line that a reader acts on must have the floor's own figures, and 80 columns."""
    said = f"In float32 a KL must exceed {found.floor.kl:.2g} nats, and a logit move by more than {found.floor.logit:.2g}"
    assert said in " ".join(found.table(80).split())
    assert max(map(len, found.table(80).splitlines())) <= 80
    model = str(base)
    assert main(["compare", model, "--noise", "--on", text, "--tokens", "200", "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["floor"]["ways"][0][1]["high"] == found.floor.kl
    assert [way["name"] for way in body["ways"]] == [way.name for way in found.ways]


def test_int8_has_no_floor_and_a_short_context_has_room_for_padding(base: Path, text: str, tmp_path: Path) -> None:
    """What rounding explains is of sums in a float dtype; of whole numbers the ways alone are shown."""
    whole = measure_noise(f"{base}:int8", Settings(on=text, tokens=60))
    assert whole.floor is None
    assert "to mean anything" not in whole.table(80)
    write_checkpoint(tmp_path / "short", n_positions=4)
    short = measure_noise(str(tmp_path / "short"), Settings(on=text, tokens=20))
    assert short.ways[1].kl.value <= short.floor.kl


def test_flags_without_effect_are_refused(base: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that is silently ignored looks as if it had been obeyed."""
    model = str(base)
    assert "B has no effect with --noise; leave it out" in mistake(capsys, "compare", model, model, "--noise")
    assert "--blame has no effect with --noise" in mistake(capsys, "compare", model, "--noise", "--blame")
    assert "leave out hf/" in refusal(measure_noise, f"hf/{model}", Settings())
    assert "too few" in refusal(measure_noise, model, Settings(tokens=1))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        pytest.param(0.0, "exactly 0", marks=pytest.mark.slow),
        (1e-9, "not above it"),
        (0.1, "times that"),
        (":bf16", "not above it: rounding to float32 and bfloat16 alone makes as much"),  # a coarser dtype raises the floor
    ],
)
def test_every_comparison_says_whether_it_is_above_the_floor(
    base: Path, text: str, tmp_path: Path, size: float | str, said: str
) -> None:
    """A difference that rounding alone makes must not be reported as one of the models, nor as a better one."""
    other = f"{base}{size}"
    if isinstance(size, float):
        other = str(changed(base, tmp_path, noisy(size, "h.0.mlp.c_fc.weight")))
    compared = gpt2.compare(str(base), other, on=text, tokens=200)
    assert said in compared.above_floor
    assert compared.above_floor in " ".join(compared.table(200).split())
    both = replace(compared.distributions, ratio=Estimate(0.98, 0.97, 0.99))
    explained = replace(compared, distributions=both, floor=replace(compared.floor, ratio=Estimate(1.0, 0.97, 1.01)))
    assert ("B predicts this text better" in "".join(explained.sentence())) == ("times" in said)


@pytest.mark.parametrize(("size", "said"), [(2e-5, "for rounding to bfloat16 explains"), (1e-4, "B predicts this text better")])
def test_a_kl_below_the_floor_may_hold_a_better_model(base: Path, text: str, tmp_path: Path, size: float, said: str) -> None:
    """KL grows with the square of a small step along the gradient, and the loss linearly: better models were called equal."""

    @torch.enable_grad()
    def step(model: GPT2) -> None:
        ids = torch.tensor(gpt2.load_tokenizer(str(base)).encode(Path(text).read_text())[:192]).view(-1, 32)
        token_losses(model(ids[:, :-1]), ids[:, 1:]).mean().backward()
        for parameter in model.parameters():
            parameter.data -= size * parameter.grad

    names = f"{base}:bf16", f"{changed(base, tmp_path, step)}:bf16"
    found = gpt2.compare(*names, on=text, tokens=200)
    assert found.distributions.kl_ab.mean.low < found.floor.kl
    assert found.distributions.ratio.high < 1
    assert said in found.sentence()[1]
    assert ("A equal" in gpt2.compare(*names, names[0], on=text, tokens=200).best) == ("rounding" in said)
