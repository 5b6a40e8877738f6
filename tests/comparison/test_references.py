"""A saved reference, a trace and llama.cpp's KL base file as sides of a comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.llama_base import write_llama_base
from support.references import forged

import gpt2
from gpt2.cli.main import main
from gpt2.comparison.passage import Settings, open_passage
from gpt2.comparison.run import compare
from gpt2.comparison.saving import Keep, save_reference
from gpt2.comparison.sides.opening import open_side
from gpt2.errors import CheckpointError, InputError


@pytest.fixture(scope="module")
def model(base: Path) -> str:
    return str(base)


@pytest.fixture(scope="module")
def saved(model: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    keep = Keep(tmp_path_factory.mktemp("reference") / "ref.safetensors", activations=True)
    return f"trace:{save_reference(model, keep, Settings(on=text, tokens=200))}"


def test_a_side_equals_its_own_reference_and_another_does_not(model: str, saved: str, text: str, tmp_path: Path) -> None:
    """Rows that are off by one, rounded or renormalised would show as a difference; a blind comparison shows none at all."""
    same = compare(saved, model)
    assert same.ok
    assert same.distributions.kl_ab.max == same.distributions.kl_ba.max == same.distributions.js.max == 0
    assert len(same.activations.points) == 5 + 14 * 2
    assert same.bits_per == "bits per byte"
    alone = compare(model, f"{model}:bf16", on=text, tokens=200)
    later = compare(saved, f"{model}:bf16")
    assert later.distributions == alone.distributions  # every figure, with its interval
    assert later.activations == alone.activations
    assert later.distributions.kl_ab.mean.value > 0
    assert later.text == alone.text
    short = Keep(tmp_path / "short.safetensors", activations=True)  # than the context: its activations were refused
    assert compare(f"trace:{save_reference(model, short, Settings(on=text, tokens=20))}", model).ok
    both = compare(saved, saved)  # without any tokenizer
    assert both.distributions.a.score.bytes == alone.distributions.a.score.bytes
    assert "trace:" in both.table(80)


def test_saving_beside_a_comparison_is_saving_alone(
    model: str, text: str, saved: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """The forward passes are shared: a tee that loses or repeats a window would write another file."""
    out, top = tmp_path / "beside.safetensors", tmp_path / "top.safetensors"
    arguments = ["compare", model, f"{model}:bf16", "--on", text, "--tokens", "200", "--save", str(out), "--save-activations"]
    assert main([*arguments, "--json", "-"]) == 0
    assert out.read_bytes() == Path(saved.removeprefix("trace:")).read_bytes()
    assert f"wrote {out}" in capsys.readouterr().err
    assert main(["compare", model, "--on", text, "--save", str(top), "--save-top", "5"]) == 0
    about = json.loads(top.read_bytes()[8:].split(b'"about":', 1)[1].split(b'","about_crc32')[0] + b'"')
    assert json.loads(about)["side"]["files"].keys() >= {"config.json", "model.safetensors"}


@pytest.mark.parametrize("form", ["t.safetensors", "t.npz", "t"])
def test_what_gpt2_trace_wrote_is_a_side(model: str, text: str, tmp_path: Path, form: str) -> None:
    """Each row of a trace is run alone: predictions across two rows, or of a row's first token, would be nonsense."""
    gpt2.trace(model, text=text, tokens=20, dtype="float64").save(tmp_path / form)
    found = compare(f"trace:{tmp_path / form}", model)
    assert found.distributions.tokens == 4 * 19
    assert found.distributions.kl_ab.max < 1e-10
    assert max(point.error for point in found.activations.points) < 1e-5
    other = compare(f"trace:{tmp_path / form}", f"{model}:bf16")
    assert other.distributions.kl_ab.max > 1e-6


def test_llama_cpps_base_file_is_a_side(model: str, tmp_path: Path) -> None:
    """Its 16 bits cost less than 1e-3 nats; the second half of a chunk read as the first would cost whole nats."""
    ids = torch.randint(200, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = gpt2.load(model)(ids)
    path = write_llama_base(tmp_path / "base.kld", ids.numpy(), logits.numpy())
    found = compare(f"trace:{path}", model)
    assert found.distributions.tokens == 4 * 15
    assert found.distributions.kl_ab.max < 1e-6
    assert found.distributions.same_top.value > 0.98
    assert "16 bits" in found.a.implementation


def test_a_reference_of_something_else_is_one_line(
    model: str, saved: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Compared with another text, tokenizer or a damaged file, every figure would be wrong, with nothing to see."""
    reference = Path(saved.removeprefix("trace:"))
    damaged = tmp_path / "damaged.safetensors"
    data = bytearray(reference.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        compare(f"trace:{damaged}", model)
    with pytest.raises(InputError, match="leave --on out"):
        compare(saved, model, on="twelfth-night")
    with pytest.raises(InputError, match="cannot be matched"):
        compare(saved, "shakespeare-mini")
    side, other = open_side(saved), gpt2.load_tokenizer("shakespeare-mini")
    with pytest.raises(InputError, match="another tokenizer"):
        open_passage([side, side], [None, other], Settings())
    save_reference(model, Keep(tmp_path / "b.safetensors"), Settings(on=text, tokens=100))
    with pytest.raises(InputError, match="different texts"):
        compare(saved, f"trace:{tmp_path / 'b.safetensors'}")
    assert main(["compare", f"trace:{damaged}", model]) == 2
    assert main(["compare", f"trace:{model}/model.safetensors", model]) == 2
    assert main(["compare", "trace:none.safetensors", model]) == 2
    assert main(["compare", model, "--save", "ref.npz"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 4


def test_what_a_reference_says_of_its_side_is_not_believed(saved: str) -> None:
    """An activation without a dimension, or scores with three, were tracebacks; so was a side whose config is a list."""
    reference = Path(saved.removeprefix("trace:"))
    for name, shape in (("embed", ()), ("h.0.attn.scores", (1, 2, 5)), ("embed", (1, 5000, 8)), ("h.9999", (1, 5, 8))):
        held = {f"at.{name}": torch.zeros(shape)}
        path = forged(reference, lambda about, arrays, held=held: arrays.update(held))
        with pytest.raises(CheckpointError, match="no activation of its text"):
            open_side(f"trace:{path}")
    for claim in ({"config": [1]}, {"parameters": "many"}, {"name": None}):
        path = forged(reference, lambda about, arrays, claim=claim: about["side"].update(claim))
        with pytest.raises(CheckpointError, match="is not known here"):
            open_side(f"trace:{path}")


def test_kl_from_the_likeliest_tokens_is_bounded_from_both_sides(model: str, saved: str, text: str, tmp_path: Path) -> None:
    """A bound on the wrong side of what all logits give promises too much; the likeliest tokens of another place are no bound."""
    keep, coarse = Keep(tmp_path / "top.safetensors", top=20), f"{model}:bf16"
    top = f"trace:{save_reference(model, keep, Settings(on=text, tokens=200))}"
    for pair, whole in (((top, coarse), (saved, coarse)), ((coarse, top), (coarse, saved))):
        bounds, exact = compare(*pair).bounds, compare(*whole).distributions
        assert 0 < bounds.kl_low.value < exact.kl_ab.mean.value < bounds.kl_high.value
        assert bounds.assumed == (pair[0] == coarse)  # that what is left out is like the shown
        assert bounds.same_top == exact.same_top
        assert bounds.ratio.value == pytest.approx(exact.ratio.value, rel=1e-9)
    assert compare(top, model).bounds.kl_low.value < 1e-15


def test_two_recordings_of_which_one_holds_the_likeliest_tokens(model: str, saved: str, text: str, tmp_path: Path) -> None:
    """The checks of a server run our side with less context, which a recording cannot do: it was refused as another text."""
    other = gpt2.load(model)
    with torch.no_grad():
        for number, parameter in enumerate(other.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)), alpha=0.05)
    name = str(gpt2.save(other, gpt2.load_tokenizer(model), tmp_path / "other"))
    keep = Keep(tmp_path / "top.safetensors", top=5)
    top = f"trace:{save_reference(name, keep, Settings(on=text, tokens=200))}"
    bounds = compare(saved, top).bounds
    assert bounds.kl_low.value == pytest.approx(compare(model, top).bounds.kl_low.value, rel=0.01)
    assert bounds.findings[-1].id in ("weights-nearly-equal", "other-model")  # which is said where nothing explains it


def test_a_side_without_a_tokenizer_is_saved_with_its_partners(model: str, text: str, tmp_path: Path) -> None:
    """Only its partner knows the size of a port's vocabulary: saving a port ended in a traceback."""
    port = tmp_path / "port_to_save.py"
    port.write_text("import gpt2\n\n\ndef build(folder):\n    return gpt2.load(folder)\n")
    keep = Keep(tmp_path / "port.safetensors")
    compare(str(port), model, on=text, tokens=100, save=keep)
    found = compare(f"trace:{keep.path}", model)
    assert found.distributions.kl_ab.max < 1e-12
    assert found.bits_per == "bits per byte"
