"""Every common layout of GPT-2 checkpoints, loaded into our model; each row of gpt2/checkpoint/README.md's table needs a test.

The real library writes the files where it is installed; the judge is transformers where it opens them, else the slow oracle.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gguf import GGMLQuantizationType
from support import gguf_layouts, llmc_layouts, old_layouts, tf_bundle, torch_layouts
from support.checks import refused
from support.forks import TESTS
from support.hf_layouts import TINY, official, prefixed, sharded, transformers_saved, turned, weights, write_config, write_weights
from support.oracle import assert_same, oracle
from torch import Tensor

from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.loading import load
from gpt2.config import GPT2Config

Truth = dict[str, Tensor]
Writer = Callable[[Path], tuple[Path, Truth, GPT2Config]]


class Dialect(NamedTuple):
    """``write(directory)`` returns the path to load, the parameters by our names, and the expected config."""

    what: str
    write: Writer
    judge: str = "transformers"


def hf(layout: Callable, config: GPT2Config = TINY, **changes: Any) -> Writer:
    """A folder as ``layout`` writes it, its config.json with ``changes``."""

    def write(directory: Path) -> tuple[Path, Truth, GPT2Config]:
        truth = layout(directory, config)
        raw = json.loads((directory / "config.json").read_text()) | changes
        (directory / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
        return directory, truth, config

    return write


def half(directory: Path, config: GPT2Config) -> Truth:
    truth = weights(config, dtype=torch.float16)
    write_weights(write_config(directory, config, torch_dtype="float16") / "model.safetensors", truth, start=0)
    return truth


def mixed(directory: Path, config: GPT2Config) -> Truth:
    truth = {name: tensor if ".ln_" in name else tensor.bfloat16() for name, tensor in weights(config).items()}
    write_weights(write_config(directory, config) / "model.safetensors", truth)
    return {name: tensor.float() for name, tensor in truth.items()}


def file(layout: Callable, name: str, config: GPT2Config, **settings: Any) -> Writer:
    """A folder with one file in it; the config has no ids for the beginning and end of a text."""
    config = replace(config, bos_token_id=None, eos_token_id=None)
    return lambda directory: (directory, layout(directory / name, config, **settings), config)


def nanogpt(vocab: int = 61, **settings: Any) -> Writer:
    config = replace(TINY, vocab_size=vocab, activation_function="gelu")
    return file(torch_layouts.nanogpt, "ckpt.pt", config, **settings)


def gguf(kind: str) -> Writer:
    config = replace(TINY, n_embd=96, vocab_size=64)
    return file(gguf_layouts.write, "model.gguf", config, kind=GGMLQuantizationType[kind])


def llmc(version: int) -> Writer:
    return file(llmc_layouts.write, "gpt2_124M.bin", TINY, version=version)


def lightning(directory: Path) -> tuple[Path, Truth, GPT2Config]:
    write_config(directory)
    return directory / "last.ckpt", torch_layouts.lightning(directory / "last.ckpt"), TINY


def untied(layout: Callable, *path: str, config: GPT2Config = TINY, **settings: Any) -> Writer:
    """A file with a head of its own, in a folder with or without a config.json."""
    expected = replace(config, tie_word_embeddings=False)
    return lambda directory: (directory, layout(directory.joinpath(*path), config, **settings), expected)


def gguf_head(directory: Path) -> tuple[Path, Truth, GPT2Config]:
    """What llama-quantize --leave-output-tensor makes: one matrix in two types, so two matrices."""
    config = replace(TINY, n_embd=96, vocab_size=64, bos_token_id=None, eos_token_id=None)
    head = weights(config)["wte.weight"].half()
    whole = lambda writer: writer.add_tensor("output.weight", head.numpy())  # noqa: E731
    truth = gguf_layouts.write(directory / "model.gguf", config, GGMLQuantizationType.Q8_0, change=whole)
    return directory, truth | {"lm_head.weight": head.float()}, replace(config, tie_word_embeddings=False)


NANO = replace(TINY, n_embd=48, n_layer=3)  # minGPT's "gpt-nano": its name implies 3 heads
LINEAR = partial(sharded, change=turned)
STEP = {"global_step": torch.tensor(5)}  # of a fine-tuned model
CRFM = replace(TINY, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True)
CEREBRAS = replace(TINY, n_embd=34, n_head=17, n_inner=136, n_layer=1, n_positions=2048, activation_function="gelu")
RINNA = replace(TINY, vocab_size=44, n_inner=50, activation_function="gelu_fast")
UNSCALED = replace(TINY, scale_attn_weights=False)
ODD = replace(TINY, vocab_size=100, n_embd=15)
CHINESE = replace(TINY, vocab_size=21, bos_token_id=50256, eos_token_id=50256)
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

BARE = replace(NANO, bos_token_id=None, eos_token_id=None)
BOOK = untied(torch_layouts.llms_from_scratch, "model.pth", config=BARE)
BOOK_NO_BIAS = untied(torch_layouts.llms_from_scratch, "model.pth", config=BARE, qkv_bias=False)
MINGPT_2020 = untied(torch_layouts.mingpt_2020, "model.pt", config=replace(BARE, activation_function="gelu"))
SLM = file(torch_layouts.slm, "ckpt.pt", replace(TINY, activation_function="gelu"))
MINGPT, OPENAI = file(torch_layouts.mingpt, "model.pt", NANO), file(tf_bundle.openai, "", TINY, more=STEP)
BY_LAYER = {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}
ALIASES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 16}
ALIASES |= dict.fromkeys(("n_embd", "n_layer", "n_head", "n_positions"), ...)

DIALECTS = {
    "official": Dialect("safetensors as `openai-community/gpt2`: no prefix, mask buffers, unaligned", hf(official)),
    "prefix": Dialect("`transformer.` prefix, `masked_bias`, the tied head stored again (DialoGPT, mGPT)", hf(prefixed)),
    "transformers": Dialect("what `save_pretrained` writes", hf(transformers_saved)),
    "shards": Dialect("sharded safetensors", hf(partial(transformers_saved, shard_size="8KB"))),
    "shards-no-prefix": Dialect("sharded safetensors without prefix", hf(partial(sharded, prefix=""))),
    "linear-shards": Dialect("`[out, in]` matrices, the square ones too (gpt2-xl-linear-sharded)", hf(LINEAR), "oracle"),
    "float16": Dialect("float16 weights", hf(half)),
    "mixed": Dialect("bfloat16 matrices beside float32 norms", hf(mixed)),
    "bin": Dialect("`pytorch_model.bin`, byte masks, `lm_head.decoder.weight`", hf(torch_layouts.hf_bin)),
    "bin-2019": Dialect("the same before torch 1.6: no zip archive", hf(partial(torch_layouts.hf_bin, zipped=False))),
    "bin-shards": Dialect("sharded `.bin`", hf(partial(sharded, write=torch_layouts.save, name="pytorch_model.bin"))),
    "crfm": Dialect("scores divided by the layer, upcast (stanford-crfm)", hf(official, CRFM, **BY_LAYER)),
    "crfm-oracle": Dialect("the same, judged by the paper's formula", hf(official, CRFM, **BY_LAYER), "oracle"),
    "unscaled": Dialect("`scale_attn_weights: false`", hf(official, UNSCALED, scale_attn_weights=False), "oracle"),
    "cerebras": Dialect("erf GELU, `n_inner`, 2048 positions, 17 heads (Cerebras-GPT)", hf(official, CEREBRAS, **NO_DROPOUT)),
    "rinna": Dialect("`gelu_fast`, a narrow `n_inner` (rinna-1b)", hf(prefixed, RINNA)),
    "mgpt": Dialect("another vocabulary, an odd width (mGPT)", hf(prefixed, ODD)),
    "chinese": Dialect("bos and eos outside the vocabulary (Chinese ports)", hf(official, CHINESE)),
    "new-config": Dialect("a config without `n_ctx`", hf(official, n_ctx=...)),
    "alias-config": Dialect("a config that says `hidden_size`, `num_hidden_layers`, ...", hf(official, **ALIASES)),
    "nanogpt": Dialect("nanoGPT `ckpt.pt`: `[out, in]`, erf GELU, optimizer beside it", nanogpt(), "oracle"),
    "nanogpt-compiled": Dialect("nanoGPT, compiled (`_orig_mod.`), mask buffers", nanogpt(compiled=True, masked=True), "oracle"),
    "nanogpt-padded": Dialect("nanoGPT, vocabulary padded, no biases", nanogpt(64, bias=False, compiled=True), "oracle"),
    "nanogpt-norms": Dialect("nanoGPT's names, biases in the norms alone", nanogpt(bias="ln_"), "oracle"),
    "slm": Dialect("our names in `blocks`, `gamma` and `beta`, `num_heads` (SLM_4096)", SLM, "oracle"),
    "mingpt": Dialect("minGPT state dict, no config: heads from its published sizes", MINGPT, "oracle"),
    "lightning": Dialect("Lightning and DistributedDataParallel wrappers", lightning, "oracle"),
    "untied": Dialect("a head of its own, of which the config says nothing", untied(torch_layouts.untied)),
    "llms-from-scratch": Dialect("LLMs-from-scratch: three matrices for c_attn, a head of its own", BOOK, "oracle"),
    "llms-from-scratch-no-bias": Dialect("the same without the biases of queries, keys and values", BOOK_NO_BIAS, "oracle"),
    "litgpt": Dialect("litgpt's names (`attn.qkv`, `mlp.fc`), with learned positions", untied(torch_layouts.litgpt), "oracle"),
    "mingpt-2020": Dialect("minGPT of 2020: positions (1, P, D), erf GELU, a head of its own", MINGPT_2020, "oracle"),
    "openai": Dialect("OpenAI's TensorFlow files, no TensorFlow", OPENAI, "oracle"),
    "keras": Dialect("`tf_model.h5`: Keras' names in HDF5, biases (1, n), no TensorFlow", hf(old_layouts.keras), "oracle"),
    "flax": Dialect("`flax_model.msgpack`: Flax's names, `[out, in]`, no Flax", hf(old_layouts.flax), "oracle"),
    "gguf-f32": Dialect("GGUF, F32", gguf("F32"), "oracle"),
    "gguf-f16": Dialect("GGUF, F16", gguf("F16"), "oracle"),
    "gguf-q8": Dialect("GGUF, Q8_0", gguf("Q8_0"), "oracle"),
    "gguf-head": Dialect("GGUF whose output has another type than its embeddings", gguf_head, "oracle"),
    "llmc": Dialect("llm.c, float32 (version 3), vocabulary padded", llmc(3), "oracle"),
    "llmc-bf16": Dialect("llm.c, bfloat16 (version 5)", llmc(5), "oracle"),
    "llmc-first": Dialect("llm.c's first float32 (version 1), not padded", llmc(1), "oracle"),
}


def judged(path: Path, truth: Truth, config: GPT2Config, judge: str, ids: Tensor) -> Tensor:
    """Logits (B, T, V) in float64, from another implementation."""
    if judge == "oracle":
        wide = {name: tensor.double() for name, tensor in truth.items()}
        return torch.stack([oracle(wide, config, row.tolist()) for row in ids])
    from gpt2.parity.reference import load_reference, opens

    assert opens(open_path(path)), "transformers is only a judge where it reads the files itself"
    with torch.no_grad():
        return load_reference(path, torch.float64)(ids).logits


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_is_read_as_its_authors_meant_it(tmp_path: Path, name: str) -> None:
    """A matrix that is transposed or not, or a wrong head count or GELU, gives a model that loads, runs, and is wrong."""
    dialect = DIALECTS[name]
    path, truth, config = dialect.write(tmp_path / "model")
    model = load(str(path))
    state = model.state_dict()
    assert state.keys() == truth.keys()
    for parameter, tensor in truth.items():
        assert torch.equal(state[parameter], tensor.to(state[parameter].dtype)), parameter
    assert replace(model.config, **NO_DROPOUT) == replace(config, **NO_DROPOUT)
    ids = torch.randint(config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert_same(load(str(path), dtype="f64")(ids), judged(path, truth, config, dialect.judge, ids))


def test_matrices_that_lie_both_ways_are_refused(tmp_path: Path) -> None:
    """PEFT transposed all matrices but one kind; the loader must not guess the rest."""
    truth = weights()
    stored = turned(truth) | {"h.1.mlp.c_fc.weight": truth["h.1.mlp.c_fc.weight"]}
    write_weights(write_config(tmp_path) / "model.safetensors", stored)
    lie = "(1 matrices lie [in, out] and 5 [out, in])"
    refused(lambda: load(str(tmp_path)), "misshapen: h.1.mlp.c_fc.weight is [12, 48], expected [48, 12]", lie)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (nanogpt(n_head=5), "n_embd 12 is not divisible by n_head 5"),
        (nanogpt(vocab_size=50304), "config says vocab_size 50304, the tensors 61"),
        (nanogpt(n_layer=3), "config says n_layer 3, the tensors 2"),
        (nanogpt(n_head="three"), "n_head must be int"),
        (nanogpt(n_head=None), "does not say n_head"),
        (nanogpt(num_heads=6), "says n_head 3 and num_heads 6"),
    ],
)
def test_model_args_that_lie_are_told(tmp_path: Path, write: Callable, says: str) -> None:
    """nanoGPT's sizes come from an untrusted pickle."""
    refused(lambda: load(str(write(tmp_path)[0])), says)


def test_a_config_that_contradicts_the_container_is_told(tmp_path: Path) -> None:
    """No tensor shows the number of heads: a config.json of another model would load without an error."""
    path, _, _ = nanogpt()(tmp_path)
    write_config(path, replace(TINY, n_head=4))
    refused(lambda: load(str(path)), "disagree: n_head 4 and 3")
    for args in ({}, {"n_head": None}, {"n_head": None, "num_heads": 3}):  # what they do not say, config.json does
        torch_layouts.nanogpt(path / "ckpt.pt", **args)
        write_config(path, replace(TINY, activation_function="gelu_new"))
        assert load(str(path)).config.n_head == 3
    assert load(str(path)).config.activation_function == "gelu_new"  # the config of an old nanoGPT: values written by hand win


def test_heads_are_not_guessed(tmp_path: Path) -> None:
    """A bare state dict of an unpublished shape: any divisor of the width would load, and only one is correct."""
    torch.save(weights(), tmp_path / "model.pt")
    refused(lambda: load(str(tmp_path / "model.pt")), "do not tell the number of heads")
    write_config(tmp_path)
    assert load(str(tmp_path / "model.pt")).config.n_head == 3


def test_the_first_of_several_containers(tmp_path: Path) -> None:
    """Of safetensors and .bin, safetensors is read: it cannot run code."""
    truth = official(tmp_path)
    torch.save({name: tensor + 1 for name, tensor in truth.items()}, tmp_path / "pytorch_model.bin")
    assert torch.equal(load(str(tmp_path)).wte.weight, truth["wte.weight"])


def test_the_readmes_table_is_this_list() -> None:
    """The README's rows and the tests must be the same list."""
    text = (TESTS.parent / "gpt2/checkpoint/README.md").read_text()
    table = text[text.index("<!-- dialects -->") : text.index("<!-- /dialects -->")]
    rows = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ") and not row.startswith("| ---")]
    assert rows[1:] == [dialect.what for dialect in DIALECTS.values()]


def test_the_tokenizer_is_the_weights_own(tmp_path: Path) -> None:
    """A GGUF file beside safetensors: weights and vocabulary must come from the same file."""
    import gpt2

    model, tokenizer = gpt2.load(), gpt2.load_tokenizer()
    gpt2.save(model, tokenizer, tmp_path)
    gguf("F32")(tmp_path)  # has no tokenizer
    assert gpt2.load_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint
