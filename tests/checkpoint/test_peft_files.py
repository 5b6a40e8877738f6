"""Adapters in PEFT's format: PEFT's files open here, our files open in PEFT, and the logits are the same."""

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import forks
from support.checks import content, refused
from support.commands import refusal
from support.hf_layouts import turned
from support.hub_standin import HubStandIn
from support.random_models import random_model

import gpt2
from gpt2 import GPT2, GPT2Config
from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.files import is_adapter
from gpt2.checkpoint.peft_files import CONFIG, WEIGHTS, save_adapter
from gpt2.lora import adapters, inject, merged

TINY = GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2)
IDS = torch.arange(16)[None]
ALL = ["c_attn", "c_proj", "c_fc"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with every parameter drawn at random."""
    return gpt2.save(random_model(TINY, 0.2, dtype=torch.float32), None, tmp_path_factory.mktemp("base") / "model")


def draw(module: torch.nn.Module) -> torch.nn.Module:
    """Adapters as if trained: B of zeros would hide every bug."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module


def ours(path: Path) -> torch.Tensor:
    with torch.no_grad():
        return gpt2.load(str(path), dtype="float64")(IDS)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({key: value for key, value in (config | changes).items() if value is not ...}))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of PEFT and transformers about their own imports."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def peft():
    with quiet():
        return pytest.importorskip("peft")


def reference(base: Path) -> torch.nn.Module:
    from gpt2.parity.reference import load_reference

    return load_reference(base, torch.float32)


def theirs(peft, base: Path, adapter: Path) -> torch.Tensor:
    """transformers' GPT-2 with the adapter opened by PEFT, in float64."""
    with quiet():
        return peft.PeftModel.from_pretrained(reference(base), str(adapter)).double().eval()(IDS).logits


def written_by_peft(peft, base: Path, folder: Path, **settings) -> torch.Tensor:
    """Save an adapter with PEFT; return the logits of PEFT's model, in float64."""
    method = getattr(peft, settings.pop("method", "LoraConfig"))
    lora = {"r": 4, "lora_alpha": 12, "fan_in_fan_out": True} if method is peft.LoraConfig else {}
    settings = {"target_modules": ALL, "task_type": "CAUSAL_LM", **lora} | settings
    grown = settings.pop("rows", TINY.vocab_size)
    with quiet():
        model = reference(base)
        if grown != TINY.vocab_size:
            model.resize_token_embeddings(grown, mean_resizing=False)
        model = draw(peft.get_peft_model(model, method(**settings)))
        model.save_pretrained(folder)
        edit(folder, base_model_name_or_path=str(base))
        return model.double().eval()(IDS).logits


SETTINGS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "two layers apart": {"rank_pattern": {"attn.c_proj": 2}, "alpha_pattern": {"c_fc": 5, "h.1.attn.c_attn": 3}},
    "one layer": {"layers_to_transform": [1]},
    "by expression": {"target_modules": r".*\.h\.0\..*c_(fc|attn)"},
    "fan_in_fan_out left to PEFT": {"fan_in_fan_out": False},
    "the head": {"target_modules": ["c_attn", "lm_head"]},
    "the embedding": {"target_modules": ["c_attn", "wte"]},
    "embedding and head together": {"target_modules": ["wte", "lm_head"], "ensure_weight_tying": True},
    "a whole head": {"modules_to_save": ["lm_head"]},
    "whole modules": {"modules_to_save": ["wte", "lm_head", "ln_1", "ln_f"]},
    "biases": {"bias": "all"},
    "a new row": {"rows": TINY.vocab_size + 1},
    "a new row of an adapted embedding": {"target_modules": ["wte"], "rows": TINY.vocab_size + 1},
}
REFUSED = {  # what is refused with advice
    "DoRA": {"use_dora": True},
    "DoRA of the head": {"use_dora": True, "target_modules": ["lm_head"]},
    "DoRA of the embedding": {"use_dora": True, "target_modules": ["c_attn", "wte"]},
    "single tokens": {"trainable_token_indices": [3, 4]},
    "LoHa of the head": {"method": "LoHaConfig", "r": 4, "alpha": 12, "target_modules": ["lm_head"]},
    "IA3": {"method": "IA3Config", "target_modules": ["c_attn"], "feedforward_modules": [], "fan_in_fan_out": True},
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_advice_of_a_refusal_leads_to_the_model_that_peft_computes(peft, base: Path, tmp_path: Path, what: str) -> None:
    """Merging, as was advised, added an adapter of the tied head to the embedding too: another model, without a word."""
    expected = written_by_peft(peft, base, tmp_path / "adapter", **REFUSED[what])
    advice = refusal(gpt2.load, str(tmp_path / "adapter"))
    assert "merge it with PEFT" in advice
    with quiet():
        model = reference(base)
        if "untie the base's head" in advice:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
            model.config.tie_word_embeddings = False
        merged = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter")).double().merge_and_unload()
        merged.save_pretrained(tmp_path / "merged")
    assert apart(ours(tmp_path / "merged"), expected) < 1e-10


@pytest.mark.parametrize("what", SETTINGS)
def test_what_peft_writes_opens_here(peft, base: Path, tmp_path: Path, what: str) -> None:
    expected = written_by_peft(peft, base, tmp_path, **SETTINGS[what])
    assert apart(ours(tmp_path), expected) < 1e-10
    assert apart(ours(base), expected[..., : TINY.vocab_size]) > 1e-2  # negative control: without it the logits differ


@pytest.mark.parametrize("targets", [("c_attn", "c_proj", "c_fc"), ("attn.c_proj",), ("mlp.c_proj", "c_attn")])
def test_what_is_written_here_opens_in_peft(peft, base: Path, tmp_path: Path, targets: tuple[str, ...]) -> None:
    model = draw(inject(gpt2.load(str(base)), r=3, alpha=5.0, targets=targets))
    save_adapter(model, tmp_path, str(base))
    expected = theirs(peft, base, tmp_path)
    with torch.no_grad():
        assert apart(model.double()(IDS), expected) < 1e-10
        assert apart(merged(model)(IDS), expected) < 1e-10
    assert apart(ours(tmp_path), expected) < 1e-10


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return save_adapter(draw(inject(gpt2.load(str(base)), r=4, alpha=12.0)), tmp_path / "adapter", str(base))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("gpt2", ("openai-community/gpt2", None)),
        ("gpt2:fp32", ("openai-community/gpt2", None)),
        ("org/name@v1", ("org/name", "v1")),
        ("shakespeare-mini", ("shakespeare-mini", None)),
        (None, (None, None)),
    ],
)
def test_the_base_is_named_as_others_know_it(tmp_path: Path, name: str | None, written: tuple) -> None:
    """`gpt2` is a folder in this repository, and other programs cannot read `org/name@v1`."""
    save_adapter(inject(GPT2(TINY)), tmp_path, name)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == written


def rewrite(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in change(load_file(folder / WEIGHTS)).items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return write


def rename(old: str, new: str) -> Callable[[Path], None]:
    return rewrite(lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()})


def on_another_base(folder: Path) -> None:
    other = gpt2.save(GPT2(GPT2Config(31, 16, n_embd=8, n_layer=1, n_head=2)), None, folder.parent / "other")
    edit(folder, base_model_name_or_path=str(other))


# Changes of the config as a dict, or of the folder -> what is said.
HARMS: dict[str, tuple[Any, str]] = {
    "no base": ({"base_model_name_or_path": None}, "its base model cannot be opened: it names none; put the base"),
    "a base that is gone": ({"base_model_name_or_path": "/nowhere/at/all"}, "no such file or directory: /nowhere/at/all"),
    "a base that is no name": ({"base_model_name_or_path": "my best"}, "unknown model 'my best'"),
    "a base that is itself": (lambda folder: edit(folder, base_model_name_or_path=str(folder)), "is an adapter too"),
    "a base of another shape": (on_another_base, "h.0.attn.c_attn.weight is [8, 24], the adapter's [16, 48]"),
    "biases that are not there": ({"bias": "all"}, "holds nothing of bias, which adapter_config.json says was trained"),
    "whole modules that are not there": ({"modules_to_save": ["wte"]}, "holds nothing of wte, which"),
    "what is not invented yet": ({"use_lora_9": 1}, "uses use_lora_9, which"),
    "a base that it changed": ({"init_lora_weights": "pissa_niter_4"}, "uses init_lora_weights, which"),
    "another rank": ({"r": 8}, "says rank 8 for transformer.h.0.attn.c_attn, the tensors 4 and 4"),
    "an expression that takes for ever": ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern has the pattern '(a+)+$'"),
    "an embedding": (rename("h.0.attn.c_attn.lora_A.weight", "wte.lora_embedding_A"), "holds base_model"),
    "a layer too many": (rename("h.1.", "h.7."), "h.7.attn.c_attn.weight is not there"),
    "no tensors": (lambda folder: (folder / WEIGHTS).unlink(), f"has no {WEIGHTS}"),
}


@pytest.mark.parametrize("what", HARMS)
def test_what_is_no_adapter_of_its_base_is_refused(adapter: Path, what: str) -> None:
    """Without DoRA's magnitudes or PiSSA's base the logits would be nearly right; its own base would recurse for ever."""
    change, says = HARMS[what]
    edit(adapter, **change) if isinstance(change, dict) else change(adapter)
    message = refused(lambda: gpt2.load(str(adapter)), says)
    if what.startswith(("no base", "a base that is")):  # a tokenizer's said "it names none", and not of what
        assert refused(lambda: gpt2.load_tokenizer(str(adapter)), says) == message
    assert change is not on_another_base or ("does not fit its base" in message and "and 6 more" in message)


def test_other_files_of_the_same_numbers_give_the_same_model(base: Path, adapter: Path, tmp_path: Path) -> None:
    """PEFT wrote `adapter_model.bin` once. Of [out, in] matrices A B is transposed once: only the square one shows twice."""
    expected = ours(adapter)
    torch.save(load_file(adapter / WEIGHTS), adapter / "adapter_model.bin")
    (adapter / WEIGHTS).unlink()
    assert torch.equal(ours(adapter), expected)
    (folder := tmp_path / "linear").mkdir()
    stored = {name.removeprefix("transformer."): tensor for name, tensor in load_file(base / "model.safetensors").items()}
    save_file(turned(stored), folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((base / "config.json").read_bytes())
    edit(adapter, base_model_name_or_path=str(folder))
    assert apart(ours(adapter), expected) < 1e-12


def test_a_model_without_adapters_has_none_to_save(tmp_path: Path) -> None:
    assert "this model has none" in refusal(save_adapter, GPT2(TINY), tmp_path, None)
    assert "merge its adapters" in refusal(gpt2.save, inject(GPT2(TINY)), None, tmp_path)
    assert len(adapters(inject(GPT2(TINY)))) == 8


def test_every_command_takes_an_adapter_or_says_what_to_do(base: Path, adapter: Path, tmp_path: Path) -> None:
    """info, compare (with either implementation), export and verify use the merged model."""
    from gpt2.checkpoint.describe import describe
    from gpt2.checkpoint.export import export

    assert f"a LoRA adapter of {base}, merged into 8 of its matrices as it is read" in describe(str(adapter)).notes
    weights = gpt2.compare(str(base), f"hf/{adapter}", tokens=16).weights
    assert sorted({tensor.rank for tensor in weights.tensors if tensor.rank is not None}) == [0, 4]
    export(str(adapter), str(tmp_path / "merged"))
    assert torch.equal(ours(tmp_path / "merged"), gpt2.load(str(adapter)).double()(IDS))


@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_verify_refuses_an_adapter_that_is_merged_wrongly_into_a_square_matrix(base: Path, adapter: Path, turned: bool) -> None:
    def build(path: Path, dtype: torch.dtype | None) -> GPT2:
        model, bare = open_path(path).load(dtype), open_path(base).load(dtype).h[1].attn.c_proj.weight
        with torch.no_grad():
            weight = model.h[1].attn.c_proj.weight
            weight.copy_(bare + (weight - bare).t() if turned else weight)
        return model

    report = gpt2.verify(str(adapter), build=build, keep_going=True, quick=True)
    failed = {check.id for check in report.checks if not check.ok}
    assert failed >= {"adapter", "activations", "logits"} if turned else not failed


def test_a_model_beside_an_adapter_is_what_is_loaded(base: Path, adapter: Path) -> None:
    """The adapter was added to a model that already contained it. With PEFT, transformers would add it: another reference."""
    from gpt2.parity import reference

    gpt2.save(gpt2.load(str(base)), None, adapter)
    assert not is_adapter(adapter)
    assert torch.equal(ours(adapter), ours(base))
    assert reference.opens(open_path(base))
    assert not reference.opens(open_path(adapter))
    assert gpt2.compare(str(base), f"hf/{adapter}", tokens=16).weights.same_numbers


FROM_THE_HUB = """
import sys, torch, gpt2
for offline in (False, True):
    model = gpt2.load("me/adapter", dtype="float64", offline=offline)
    torch.save(model(torch.arange(16)[None]).detach(), sys.argv[1])
"""


def test_an_adapter_and_its_base_from_the_hub(base: Path, adapter: Path, tmp_path: Path) -> None:
    """Both are downloaded, the base at the adapter's revision, and work offline. A folder with the base's name was taken."""
    expected = ours(adapter)
    edit(adapter, base_model_name_or_path="org/base", revision="v1")
    with HubStandIn() as hub:
        hub.add_repo("org/base", content(base), lfs=("model.safetensors",), branch="v1")
        hub.add_repo("org/base", {"config.json": b"another since"})
        hub.add_repo("me/adapter", content(adapter), lfs=(WEIGHTS,))
        gpt2.save(GPT2(TINY), None, tmp_path / "here" / "org" / "base")
        environ, logits = hub.environ(tmp_path / "cache"), tmp_path / "logits"
        forks.run("-c", FROM_THE_HUB, logits, environ=environ, cwd=tmp_path / "here", strict=True)
    assert torch.equal(torch.load(logits), expected)
