"""`compare --blame` finds the parts that were changed, and nothing else; its figures are those of models built by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.commands import refusal
from support.random_models import noisy, random_model, write_checkpoint
from torch import Tensor

import gpt2
from gpt2.checkpoint.export import export
from gpt2.checkpoint.loading import load
from gpt2.cli.main import main
from gpt2.comparison.blame import Blame, find_blame
from gpt2.config import GPT2Config
from gpt2.measure.estimates import Bootstrap
from gpt2.measure.per_token import measure_pair
from gpt2.measure.windows import Windows
from gpt2.model import GPT2

CONFIG = GPT2Config(300, 24, 64, 3, 4)
IDS = torch.randint(300, (161,), generator=torch.Generator().manual_seed(3))


def model() -> GPT2:
    return random_model(CONFIG, 0.15, dtype=torch.float32)


def changed(*names: str, by: float = 0.1) -> GPT2:
    """The model with noise in some of its parameters."""
    made = model()
    with torch.no_grad():
        for name in names:
            noisy(by, name)(made)
    return made


def blame(a: GPT2, b: GPT2) -> Blame:
    read: list[Callable[[str], Tensor]] = [lambda name, of=of: of.get_parameter(name).detach().clone() for of in (a, b)]
    return find_blame(CONFIG, *read, IDS, Windows(CONFIG.n_positions), Bootstrap(len(IDS) - 1), vocab=CONFIG.vocab_size)


def kl(a: GPT2, b: GPT2) -> float:
    """The mean KL by the same measurement as a comparison, of two whole models."""
    measured = measure_pair(a, b, IDS, Windows(CONFIG.n_positions))
    return measured.kl_ab.mean().item()


@pytest.mark.parametrize("name", ["wte.weight", "wpe.weight", "h.0.ln_1.bias", "h.2.mlp.c_fc.weight", "ln_f.weight"])
def test_one_changed_tensor_carries_everything(name: str) -> None:
    """A tensor that is swapped into the wrong place, or forgotten at the head (wte is tied), is found innocent."""
    part, *_ = name.split(".")
    part, halves = (name[:3], [f"{name[:3]}.{'mlp' if 'mlp' in name else 'attn'}"]) if part == "h" else (part, [])
    a, b = model(), changed(name)
    found = blame(a, b)
    assert ([each.name for each in found.parts], [each.name for each in found.halves]) == ([part], halves)
    whole = pytest.approx(kl(a, b), rel=1e-4)
    assert whole.expected > 1e-4
    assert [(each.alone.value, each.tensors) for each in (*found.parts, *found.halves)] == [(whole, 1)] * (1 + len(halves))
    assert found.parts[0].in_order.value == found.whole.value == whole
    if part == "h.2":  # without sharing, each of a deep model's variants costs a whole pass
        assert found.passes == pytest.approx(1 + 1 / 3)  # a once, and b's last block once


def test_parts_alone_and_in_order_equal_models_built_by_hand() -> None:
    """A stream shared too long, or taken from the wrong model, gives a figure of another mixture."""
    names = ["wte.weight", "h.0.mlp.c_proj.bias", "h.1.attn.c_attn.weight", "h.1.ln_2.weight", "h.2.mlp.c_fc.weight"]
    a, b = model(), changed(*names)
    found, upto = blame(a, b), list[str]()
    assert [each.name for each in found.parts] == ["wte", "h.0", "h.1", "h.2"]
    assert {part.name for part in found.halves} == {"h.0.mlp", "h.1.attn", "h.1.mlp", "h.2.mlp"}
    for part in found.parts:
        own = [name for name in names if name.startswith(f"{part.name}.")]
        upto += own
        for swapped, estimate in ((own, part.alone), (upto, part.in_order)):
            mixed = model()
            with torch.no_grad():
                for name in swapped:
                    mixed.get_parameter(name).copy_(b.get_parameter(name))
            assert estimate.value == pytest.approx(kl(a, mixed), rel=1e-4)
            assert estimate.low < estimate.value < estimate.high
    same = blame(a, a)
    assert (same.parts, same.halves, same.whole.value) == ((), (), 0)


def test_a_quantised_file_and_what_is_kept(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known answer: one part is sensitive to rounding. Kept as it is (``--keep``), it carries nothing, and the KL falls."""
    base = str(write_checkpoint(tmp_path / "base", n_embd=64))
    sensitive = load(base)
    with torch.no_grad():
        sensitive.h[1].mlp.c_proj.weight[::32] = 12.0  # one large entry in a block of 32: the others get few steps
        sensitive.h[1].mlp.c_fc.bias[::32] = -60.0  # and the activation that it multiplies is 0
    gpt2.save(sensitive, gpt2.load_tokenizer(base), tmp_path / "base")
    gguf = {"format": "gguf", "type": "q8_0"}
    export(base, tmp_path / "q8", **gguf)
    assert main(["compare", base, str(tmp_path / "q8"), "--on", text, "--tokens", "150", "--blame", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert max(found["blame"]["halves"], key=lambda part: part["alone"]["value"])["name"] == "h.1.mlp"
    export(base, tmp_path / "kept", keep=("h.1",), **gguf)
    monkeypatch.setattr("gpt2.comparison.pairs.TOKENS", 149)
    compared = gpt2.compare(base, str(tmp_path / "kept"), on=text, tokens=150, blame=True)
    assert compared.blame.tokens == 148
    assert compared.distributions.kl_ab.mean.value < found["distributions"]["kl_ab"]["mean"]["value"] / 2
    assert "h.1" not in [part.name for part in compared.blame.parts]
    assert max(map(len, compared.table(80).partition("Blame")[2].splitlines())) <= 80
    other = str(write_checkpoint(tmp_path / "other", n_embd=64, n_layer=1))
    assert "needs models of one shape" in refusal(gpt2.compare, base, other, blame=True)
    gelu = str(write_checkpoint(tmp_path / "gelu", n_embd=64, activation_function="gelu"))
    assert "differ in activation_function" in refusal(gpt2.compare, base, gelu, blame=True)
    assert "no part 'h.2' in this model" in refusal(export, base, tmp_path / "x", keep=("h.2",), **gguf)
    assert "keep has no effect" in refusal(export, base, tmp_path / "x", keep=("h.1",), format="gguf", type="f32")
    assert "give that type" in refusal(export, base, tmp_path / "x", keep=("h.1",))
