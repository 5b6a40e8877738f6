"""Loading files into a model: every layout, one line for every mismatch, no unnecessary copy, and a fuzz test."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checks import refused, same
from support.commands import refusal
from support.hf_layouts import TINY, masks, official, prefixed, weights, write_config, write_weights
from torch import Tensor

from gpt2 import config as configs
from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.files import open_weights
from gpt2.checkpoint.keys import TABLE, expected, from_file, layer, to_file
from gpt2.checkpoint.loading import load, load_tokenizer
from gpt2.checkpoint.match import match
from gpt2.errors import InputError
from gpt2.generation import generate
from gpt2.model import GPT2


def assert_holds(model: GPT2, truth: dict[str, Tensor]) -> None:
    """Assert that the parameters equal the expected ones bit for bit, and that there are no others."""
    state = model.state_dict()
    assert state.keys() == truth.keys()
    assert [name for name in truth if not same(state[name].cpu(), truth[name])] == []
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def altered(directory: Path, change: Callable[[dict[str, Tensor]], object], layout: Callable = prefixed) -> Path:
    """A checkpoint whose tensors ``change`` modified after it was written."""
    layout(directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    write_weights(directory / "model.safetensors", tensors)
    return directory


def test_the_key_table_and_its_inverse() -> None:
    """Possible bugs: a row without inverse, or a layer's number read as another's."""
    names = list(expected(TINY))
    assert [from_file(to_file(name)) for name in names] == names == [from_file(name) for name in names]
    assert len(names) == len(set(names)) == 4 + 12 * TINY.n_layer
    assert [layer(name) for name in names] == [None] * 2 + [0] * 12 + [1] * 12 + [None] * 2
    assert layer("h.10.ln_1.bias") == 10
    for name in ("1.attn.bias", "x.ln_1.bias", "1.ln_1.biases", "9" * 5000 + ".ln_1.bias", "²3.ln_1.bias"):
        assert layer(f"h.{name}") is None
    assert len(TABLE) == 16


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("asked", [None, "fp32", "float16", torch.bfloat16, "f64"])
def test_dtypes(tmp_path: Path, stored: torch.dtype, asked: Any) -> None:
    """Weights keep their dtype unless asked; a conversion rounds once, without another dtype in between."""
    truth = weights(dtype=stored)
    write_weights(write_config(tmp_path) / "model.safetensors", truth, start=0)
    target = {None: stored, "fp32": torch.float32, "float16": torch.float16, "f64": torch.float64}.get(asked, asked)
    assert_holds(load(str(tmp_path), dtype=asked), {name: tensor.to(target) for name, tensor in truth.items()})


def test_mixed_dtypes_become_the_narrowest_that_holds_all(tmp_path: Path) -> None:
    """Norms in float32 beside float16 matrices: without a common dtype, the first matmul would raise."""
    truth = weights(dtype=torch.float16)
    mixed = {name: tensor.bfloat16() if ".ln_" in name else tensor for name, tensor in truth.items()}
    write_weights(write_config(tmp_path) / "model.safetensors", mixed)
    model = load(str(tmp_path))
    assert_holds(model, {name: tensor.float() for name, tensor in mixed.items()})
    assert model(torch.tensor([[1, 2]])).isfinite().all()


def test_devices_and_dtypes_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Possible bugs: weights that stay on the CPU, or torch's AssertionError for a missing GPU."""
    official(tmp_path)
    assert {parameter.device.type for parameter in load(str(tmp_path), device=torch.device("cpu")).parameters()} == {"cpu"}
    for wrong in ("gpu", "cuda:99", "", "a\nb", "cpu:x", "meta"):
        said = refusal(load, str(tmp_path), device=wrong)
        assert said.isprintable()
        assert re.search("no device .* here", said)
        assert torch.accelerator.is_available() or said.endswith("; this machine has no accelerator, use cpu")
    for wrong in ("int4", "float", torch.int64, torch.float8_e4m3fn, torch.bool):
        assert re.search("unknown dtype .*; use one of fp32", refusal(load, str(tmp_path), dtype=wrong))
    monkeypatch.setattr("gpt2.checkpoint.loading.require_device", lambda *_: torch.device("meta"))  # stands for a GPU
    assert {parameter.device.type for parameter in load(str(tmp_path)).parameters()} == {"meta"}


def test_random_models_are_drawn_from_their_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the global generator, the weights would depend on earlier code; a bias or norm with its default value hides bugs."""
    monkeypatch.setitem(configs.OFFICIAL_SIZES, "tiny", TINY)
    torch.manual_seed(1)
    first, state = load("random:tiny:7"), torch.get_rng_state()
    torch.manual_seed(2)
    again = load("random:tiny:7")
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "the global generator was used"
    assert_holds(again, first.state_dict())
    others = load("random:tiny:8").state_dict()
    for name, tensor in first.state_dict().items():
        assert not torch.equal(tensor, others[name])
        assert tensor.unique().numel() > 0.9 * tensor.numel(), f"{name} is not random"
    assert torch.equal(load("random:tiny").wte.weight, load("random:tiny:0").wte.weight)
    assert_holds(load("random:tiny:7:bf16"), {name: tensor.bfloat16() for name, tensor in first.state_dict().items()})
    assert load("random:tiny:7:int8").wte.weight.dtype == torch.int8  # was a traceback
    assert "seed" in refusal(load, f"random:tiny:{2**64}")
    assert "without a tokenizer" in refusal(load_tokenizer, "random:tiny")


def entry_flipped(mask: Tensor, row: int, column: int) -> Tensor:
    return mask.index_put((*torch.tensor([[0], [0], [row], [column]]),), 1 - mask[0, 0, row, column])


MASK, HEAD = "transformer.h.1.attn.bias", "lm_head.weight"
MASKS = (
    lambda mask: torch.ones_like(mask),  # all ones
    lambda mask: mask.transpose(2, 3),  # upper
    lambda mask: mask.triu(-4),  # a band
    lambda mask: entry_flipped(mask, 9, 3),  # one entry off
    lambda mask: entry_flipped(mask, 3, 9),  # one look ahead
    lambda mask: mask * 2,  # scaled
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int64])
def test_a_causal_mask_of_any_dtype_is_dropped(tmp_path: Path, dtype: torch.dtype) -> None:
    """uint8 and bool masks: three generations of transformers wrote three dtypes."""
    truth = weights()
    write_weights(write_config(tmp_path) / "model.safetensors", truth | {key: mask.to(dtype) for key, mask in masks().items()})
    assert_holds(open_path(tmp_path).load(), truth)
    assert set(match(open_weights(tmp_path), TINY, tmp_path).dropped) == set(masks())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.update({HEAD: t[HEAD][1:].contiguous()}), "lm_head.weight is [60, 12], expected [61,"),
        (lambda t: t.update({HEAD: t[HEAD].reshape(12, 61)}), "lm_head.weight is [12, 61], expected [61,"),
        (lambda t: t.update({"lm_head.decoder.weight": torch.zeros(61, 12)}), "there twice, with other values: lm_head."),
        (lambda t: t.update({"lm_head.bias": torch.zeros(61)}), "unexpected: lm_head.bias"),
        (lambda t: t.update({"transformer.h.1.attn.masked_bias": torch.zeros(2)}), "not a scalar: transformer.h.1.attn.masked"),
        (lambda t: t.update({"h.2.attn.masked_bias.x": torch.zeros(())}), "unexpected: h.2.attn.masked_bias.x"),
        (lambda t: (t.pop("transformer.wte.weight"), t.pop("lm_head.weight")), "missing: wte.weight"),
        *((lambda t, mask=mask: t.update({MASK: mask(t[MASK]).contiguous()}), f"not the causal mask: {MASK};") for mask in MASKS),
    ],
)
def test_a_buffer_that_is_not_what_it_claims_is_refused(tmp_path: Path, change: Callable, says: str) -> None:
    """A tensor that is dropped unseen may be one that the model computes with: a banded or bidirectional mask makes another."""
    refused(lambda: open_path(altered(tmp_path, change)).load(), says, str(tmp_path))


def test_a_tied_head_of_nan_is_still_tied(tmp_path: Path) -> None:
    """NaN differs from NaN; the checkpoint of a diverged run must still open for inspection."""
    both = ("lm_head.weight", "transformer.wte.weight")
    altered(tmp_path, lambda tensors: [tensors[key].view(-1)[3:4].fill_(float("nan")) for key in both])
    model = open_path(tmp_path).load()
    assert model.wte.weight.isnan().sum() == 1
    refused(lambda: generate(model, [0], 1), f"{tmp_path}: the logits are not finite numbers", error=InputError)


def test_everything_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    """With one error per attempt, the user needs one attempt per error."""

    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["transformer.ln_f.bias"], tensors["transformer.h.0.ln_1.bias"]
        tensors |= {"adapter.weight": torch.zeros(2), "a\nb\x1b[2J": torch.zeros(2), "wte.weight": torch.zeros(61, 12)}
        tensors["transformer.h.1.ln_2.weight"] = torch.zeros(13)
        tensors["transformer.h.1.ln_2.bias"] = torch.zeros(12, dtype=torch.int32)
        tensors["h.0.attn.bias"] = tensors.pop("transformer.h.0.attn.bias", masks()["h.0.attn.bias"]).transpose(2, 3).contiguous()
        tensors["lm_head.weight"] = torch.ones(61, 11)

    refused(
        lambda: open_path(altered(tmp_path, change)).load(),
        "missing: h.0.ln_1.bias, ln_f.bias;",
        "unexpected: ",
        "adapter.weight",
        "'a\\nb\\x1b[2J'",
        "there twice, with other values: ",
        "wte.weight",
        "transformer.h.1.ln_2.weight is [13], expected [12]",
        "not floating point: transformer.h.1.ln_2.bias",
        "not the causal mask: h.0.attn.bias",
        "lm_head.weight is [61, 11], expected [61, 12]",
    )


def test_a_thousand_misfits_are_still_one_short_line(tmp_path: Path) -> None:
    """For another model's file every key is unexpected, every parameter missing, and some keys are duplicates."""
    write_config(tmp_path, n_layer=500)
    many = {f"{prefix}layers.{n}.weight": torch.zeros(1) for n in range(3000) for prefix in ("", "transformer.")}
    many["wte.weight"] = torch.zeros(1)
    write_weights(tmp_path / "model.safetensors", many)
    message = refused(lambda: open_path(tmp_path).load(), "and 5,998 more", "--like")
    assert len(message) < 900


@pytest.mark.parametrize("family", TABLE)
def test_each_family_is_needed_and_of_its_shape(tmp_path: Path, family: str) -> None:
    """Check every row of the table: missing, one longer, transposed, with one more axis, of integers."""
    name = family.format(1)
    truth = official(tmp_path)
    path = tmp_path / "model.safetensors"
    tensor = truth[name]
    wrong = {
        "misshapen": [torch.cat([tensor, tensor[:1]]), tensor[None, None], tensor.sum(), tensor[:0]],
        "not floating point": [tensor.long()],
    }
    wrong["misshapen"] += [tensor.T] if tensor.ndim == 2 and name != "h.1.attn.c_proj.weight" else []
    for title, faults in wrong.items():
        for fault in faults:
            write_weights(path, truth | {name: fault.contiguous()})
            refused(lambda: open_path(tmp_path).load(), f"{title}: {name}")
    write_weights(path, {key: value for key, value in truth.items() if key != name})
    refused(lambda: open_path(tmp_path).load(), f"missing: {name};")
    write_weights(path, truth)
    assert_holds(open_path(tmp_path).load(), truth)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "no config.json there"),
        ("{", "config.json is not JSON"),
        ("\ufeff{}", "config.json: begins with a byte-order mark; save"),  # as editors on Windows save it
        ('{"n_layer": 2}', "config.json: lacks vocab_size"),
        ({"layer_norm_epsilon": float("nan")}, "config.json: layer_norm_epsilon is nan"),
        ({"model_type": "gpt_neo"}, "model_type is 'gpt_neo'"),
        # An old DialoGPT-medium's config says width 768 and its tensors 1024: "size mismatch" 290 times does not help.
        ({"vocab_size": 50257}, "config says vocab_size 50257, the tensors 61"),
        ({"n_embd": 768}, "config says n_embd 768, the tensors 12"),
        ({"n_layer": 3}, "config says n_layer 3, the tensors 2"),
        ({"n_layer": 9999}, "and 119,960 more"),
    ],
)
def test_a_config_that_is_none_or_contradicts_the_tensors_says_why(tmp_path: Path, config: Any, says: str) -> None:
    """The user must get one line, not a traceback from json, torch or os."""
    official(tmp_path)
    if isinstance(config, dict):
        write_config(tmp_path, **config)
    else:
        (tmp_path / "config.json").unlink() if config is None else (tmp_path / "config.json").write_text(config)
    more = ("correct the config or the file", f"{tmp_path}: ") if "tensors" in says or "more" in says else (str(tmp_path),)
    refused(lambda: load(str(tmp_path)), says, *more)


def test_what_the_machine_cannot_hold_is_refused_before_it_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config of 10,000 wide layers took memory until the process was killed. Control: a mapped file needs none."""
    official(tmp_path, TINY)
    monkeypatch.setattr("gpt2.errors.machine_memory", lambda: 20_000.0)
    open_path(tmp_path).load()
    says = ("its weights in float64", "need about 0.0 GB, this machine has 0.0; leave the dtype out")
    refused(lambda: load(f"{tmp_path}:f64"), *says, error=InputError)
    refused(lambda: GPT2(TINY), "parameters need about", "choose a smaller model", error=InputError)
