"""Every way in which people write GPT-2 down, each as its authors write it, into our model.

Whatever wrote a file is a real writer where one is installed (transformers, torch.save, the gguf package) and spelt out here
where not. The judge is transformers where it opens the file itself, and the slow oracle elsewhere, or where transformers is
wrong. The table of gpt2/checkpoint/README.md is this list: a row without a test would be a promise.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.hf_layouts import TINY, masks, official, prefixed, sharded, transformers_saved, weights, write_config, write_weights
from support.oracle import assert_same, oracle
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.configs import config_of
from gpt2.checkpoint.files import open_weights
from gpt2.checkpoint.loading import load
from gpt2.checkpoint.match import match
from gpt2.config import GPT2Config
from gpt2.errors import CheckpointError
from gpt2.model import GPT2

ROOT = Path(__file__).parents[2]
Truth = dict[str, Tensor]


class Dialect(NamedTuple):
    """``write(directory)`` gives what to load, the parameters by our names, and the config that they are to be run with."""

    what: str
    source: str  # who wrote the test's file
    write: Callable[[Path], tuple[Path, Truth, GPT2Config]]
    judge: str = "transformers"


def turned(truth: Truth) -> Truth:
    """The blocks' matrices turned over, to nn.Linear's orientation or back."""
    return {name: tensor.T.contiguous() if name[0] == "h" and tensor.ndim == 2 else tensor for name, tensor in truth.items()}


def hf(layout: Callable, config: GPT2Config = TINY, **changes: Any) -> Callable[[Path], tuple[Path, Truth, GPT2Config]]:
    """A folder as ``layout`` writes it, its config.json with ``changes``."""

    def write(directory: Path) -> tuple[Path, Truth, GPT2Config]:
        truth = layout(directory, config)
        raw = json.loads((directory / "config.json").read_text()) | changes
        (directory / "config.json").write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))
        return directory, truth, config

    return write


def pytorch_bin(directory: Path, config: GPT2Config = TINY, *, zipped: bool = True) -> Truth:
    """As OpenAI's and DialoGPT's repositories before safetensors: masks of bytes, the head tied, and stored under two names."""
    truth = weights(config, seed=5)
    state = {f"transformer.{name}": tensor for name, tensor in truth.items()}
    state |= {name: tensor.to(torch.uint8) for name, tensor in masks(config, "transformer.").items()}
    state |= {f"transformer.h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(config.n_layer)}
    state |= {"lm_head.weight": state["transformer.wte.weight"], "lm_head.decoder.weight": state["transformer.wte.weight"]}
    write_config(directory, config)
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return truth


def old_bin(directory: Path, config: GPT2Config = TINY) -> Truth:
    return pytorch_bin(directory, config, zipped=False)


def sharded_bin(directory: Path, config: GPT2Config = TINY) -> Truth:
    truth = weights(config, seed=6)
    weight_map = {}
    write_config(directory, config)
    for number in range(3):
        file = f"pytorch_model-{number + 1:05}-of-00003.bin"
        part = {f"transformer.{key}": truth[key] for key in list(truth)[number::3]}
        torch.save(part, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in truth.values())}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return truth


def unprefixed_shards(directory: Path, config: GPT2Config = TINY) -> Truth:
    return sharded(directory, config, prefix="")


def linear_shards(directory: Path, config: GPT2Config = TINY) -> Truth:
    """As gpt2-xl-linear-sharded: nn.Linear's orientation under GPT-2's names."""
    truth = weights(config, seed=7)
    write_config(directory, config)
    keys, stored = list(truth), turned(truth)
    weight_map = {}
    for number in range(2):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        part = {f"transformer.{key}": stored[key] for key in keys[number::2]}
        write_weights(directory / file, part)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return truth


def half(directory: Path, config: GPT2Config = TINY) -> Truth:
    truth = weights(config, seed=8, dtype=torch.float16)
    write_weights(write_config(directory, config, torch_dtype="float16") / "model.safetensors", truth, start=0)
    return truth


def mixed(directory: Path, config: GPT2Config = TINY) -> Truth:
    truth = {name: tensor if ".ln_" in name else tensor.bfloat16() for name, tensor in weights(config, seed=9).items()}
    write_weights(write_config(directory, config) / "model.safetensors", truth)
    return {name: tensor.float() for name, tensor in truth.items()}


class TheirBlock(nn.Module):
    """The names and orientation of nanoGPT's and minGPT's modules; what they compute does not matter here."""

    def __init__(self, config: GPT2Config, bias: bool) -> None:
        super().__init__()
        width, inner = config.n_embd, 4 * config.n_embd
        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width, bias), "c_proj": nn.Linear(width, width, bias)})
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, inner, bias), "c_proj": nn.Linear(inner, width, bias)})


class TheirGPT(nn.Module):
    def __init__(self, config: GPT2Config, bias: bool = True, tied: bool = True, masked: bool = False) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(config.vocab_size, config.n_embd), "wpe": nn.Embedding(config.n_positions, config.n_embd)}
        parts["h"] = nn.ModuleList(TheirBlock(config, bias) for _ in range(config.n_layer))
        parts["ln_f"] = nn.LayerNorm(config.n_embd, bias=bias)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(10)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight
        if masked:
            for block in self.transformer.h:
                block.attn.register_buffer("bias", masks(config)["h.0.attn.bias"])

    def truth(self) -> Truth:
        """The parameters by our names, as nn.Linear keeps them."""
        found = {name.removeprefix("transformer."): tensor.detach() for name, tensor in self.named_parameters()}
        found.pop("lm_head.weight", None)
        return found


def nanogpt(*, bias: bool = True, compiled: bool = False, vocab: int = 61, masked: bool = False, **model_args: Any) -> Callable:
    """`ckpt.pt` as nanoGPT's train.py saves it, optimizer and all."""

    def write(directory: Path) -> tuple[Path, Truth, GPT2Config]:
        config = replace(TINY, vocab_size=vocab, activation_function="gelu", bos_token_id=None, eos_token_id=None)
        model = TheirGPT(config, bias, masked=masked)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        before = {name: tensor.clone() for name, tensor in turned(model.truth()).items()}
        args = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 16, "bias": bias, "vocab_size": vocab, "dropout": 0.0}
        state = {("_orig_mod." if compiled else "") + key: tensor for key, tensor in model.state_dict().items()}
        content = {"model": state, "optimizer": optimizer.state_dict(), "model_args": args | model_args, "iter_num": 7}
        content |= {"best_val_loss": torch.tensor(3.5), "config": {"out_dir": "out", "learning_rate": 6e-4, "compile": compiled}}
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(content, directory / "ckpt.pt")
        zeros = {name: torch.zeros(shape) for name, shape in shapes(config).items() if name.endswith(".bias")}
        return directory, zeros | before, config

    return write


def shapes(config: GPT2Config) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in weights(config).items()}


def mingpt(directory: Path) -> tuple[Path, Truth, GPT2Config]:
    """A state dict alone, as minGPT's projects save it, of its own "gpt-nano" (3 layers, 3 heads, 48 wide), the head equal."""
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=48, n_layer=3, n_head=3, bos_token_id=None, eos_token_id=None)
    model = TheirGPT(config, masked=True)
    directory.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), directory / "model.pt")
    return directory / "model.pt", turned(model.truth()), config


def wrapped(directory: Path) -> tuple[Path, Truth, GPT2Config]:
    """A Lightning checkpoint of a DistributedDataParallel model, a config.json beside it."""
    truth = weights(seed=11)
    state = {f"model.module.transformer.{name}": tensor for name, tensor in turned(truth).items()}
    write_config(directory)
    torch.save({"epoch": 3, "state_dict": state, "pytorch-lightning_version": "2.5.0"}, directory / "last.ckpt")
    return directory / "last.ckpt", truth, TINY


def openai(directory: Path) -> tuple[Path, Truth, GPT2Config]:
    """OpenAI's own files, `w` with a leading axis of one, and the counter that a fine-tuned one has."""
    from support import tf_bundle

    truth = weights(seed=12)
    stored = {}
    for name, tensor in truth.items():
        key = "model/" + re.sub(r"^h\.(\d+)\.", r"h\1/", name).replace(".weight", "/w").replace(".bias", "/b").replace(".", "/")
        key = key.removesuffix("/w") if name[0] == "w" else key
        key = key[:-1] + "g" if "ln_" in name and key.endswith("/w") else key
        stored[key] = tensor[None] if key.endswith("/w") else tensor
    directory.mkdir(parents=True, exist_ok=True)
    tf_bundle.write(directory / "model.ckpt", stored | {"global_step": torch.tensor(5)})
    (directory / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"\nall_model_checkpoint_paths: "model.ckpt"\n')
    hparams = {"n_vocab": 61, "n_ctx": 16, "n_embd": 12, "n_head": 3, "n_layer": 2}
    (directory / "hparams.json").write_text(json.dumps(hparams))
    return directory, truth, replace(TINY, bos_token_id=None, eos_token_id=None)


def gguf(kind: str) -> Callable[[Path], tuple[Path, Truth, GPT2Config]]:
    """As llama.cpp's converter names and turns them, through the gguf package's own writer and quantiser."""

    def write(directory: Path) -> tuple[Path, Truth, GPT2Config]:
        import gguf
        import numpy as np

        config = replace(TINY, n_embd=96, vocab_size=64, bos_token_id=None, eos_token_id=None)
        of = getattr(gguf.GGMLQuantizationType, kind)
        names = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm", "ln_1": "attn_norm", "ln_2": "ffn_norm"}
        names |= {"attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
        directory.mkdir(parents=True, exist_ok=True)
        writer = gguf.GGUFWriter(directory / "model.gguf", "gpt2")
        writer.add_context_length(config.n_positions)
        writer.add_embedding_length(config.n_embd)
        writer.add_feed_forward_length(config.inner)
        writer.add_block_count(config.n_layer)
        writer.add_head_count(config.n_head)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        truth = {}
        for name, tensor in weights(config, seed=13).items():
            part, _, leaf = re.sub(r"^h\.\d+\.", "", name).rpartition(".")
            key = (f"blk.{name.split('.')[1]}." if name[0] == "h" else "") + f"{names[part]}.{leaf}"
            turned = tensor.T.contiguous() if name[0] == "h" and tensor.ndim == 2 else tensor
            if tensor.ndim == 1 or kind == "F32":
                data, stored = turned.numpy(), turned
                writer.add_tensor(key, data)
            elif kind == "F16":
                data = turned.numpy().astype(np.float16)
                stored = torch.from_numpy(data).float()
                writer.add_tensor(key, data)
            else:
                data = gguf.quants.quantize(turned.numpy(), of)
                stored = torch.from_numpy(gguf.quants.dequantize(data, of))
                writer.add_tensor(key, data, raw_dtype=of)
            truth[name] = stored.T.contiguous() if name[0] == "h" and tensor.ndim == 2 else stored
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return directory, truth, config

    return write


CRFM = replace(TINY, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True)
CEREBRAS = replace(
    TINY, n_embd=34, n_head=17, n_inner=136, n_positions=2048, activation_function="gelu", resid_pdrop=0.0, attn_pdrop=0.0
)
RINNA = replace(TINY, vocab_size=44, n_inner=50, activation_function="gelu_fast")
UNSCALED = replace(TINY, scale_attn_weights=False)
ODD = replace(TINY, vocab_size=100, n_embd=15)
CHINESE = replace(TINY, vocab_size=21, bos_token_id=50256, eos_token_id=50256)
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

DIALECTS = {
    "official": Dialect("safetensors as `openai-community/gpt2`: no prefix, mask buffers, unaligned", "ours", hf(official)),
    "prefix": Dialect("`transformer.` prefix, `masked_bias`, the tied head stored again (DialoGPT, mGPT)", "ours", hf(prefixed)),
    "transformers": Dialect("what `save_pretrained` writes", "transformers 5.23", hf(transformers_saved)),
    "shards": Dialect("sharded safetensors", "ours", hf(sharded)),
    "shards-no-prefix": Dialect("sharded safetensors without prefix", "ours", hf(unprefixed_shards)),
    "linear-shards": Dialect(
        "`[out, in]` matrices, the square ones too (gpt2-xl-linear-sharded)", "ours", hf(linear_shards), "oracle"
    ),
    "float16": Dialect("float16 weights", "ours", hf(half)),
    "mixed": Dialect("bfloat16 matrices beside float32 norms", "ours", hf(mixed)),
    "bin": Dialect("`pytorch_model.bin`, byte masks, `lm_head.decoder.weight`", "torch.save", hf(pytorch_bin)),
    "bin-2019": Dialect("the same before torch 1.6: no zip archive", "torch.save", hf(old_bin)),
    "bin-shards": Dialect("sharded `.bin`", "torch.save", hf(sharded_bin)),
    "crfm": Dialect(
        "scores divided by the layer, upcast (stanford-crfm)",
        "ours",
        hf(official, CRFM, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
    ),
    "crfm-oracle": Dialect(
        "the same, judged by the paper's formula",
        "ours",
        hf(official, CRFM, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True),
        "oracle",
    ),
    "unscaled": Dialect("`scale_attn_weights: false`", "ours", hf(official, UNSCALED, scale_attn_weights=False), "oracle"),
    "cerebras": Dialect(
        "erf GELU, `n_inner`, 2048 positions, 17 heads (Cerebras-GPT)", "ours", hf(official, CEREBRAS, **NO_DROPOUT)
    ),
    "rinna": Dialect("`gelu_fast`, a narrow `n_inner` (rinna-1b)", "ours", hf(prefixed, RINNA)),
    "mgpt": Dialect("another vocabulary, an odd width (mGPT)", "ours", hf(prefixed, ODD)),
    "chinese": Dialect("bos and eos outside the vocabulary (Chinese ports)", "ours", hf(official, CHINESE)),
    "new-config": Dialect("a config without `n_ctx`", "ours", hf(official, n_ctx=...)),
    "alias-config": Dialect(
        "a config that says `hidden_size`, `num_hidden_layers`, ...",
        "ours",
        hf(
            official,
            **{"n_embd": ..., "n_layer": ..., "n_head": ..., "n_positions": ...},
            **{"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "max_position_embeddings": 16},
        ),
    ),
    "nanogpt": Dialect("nanoGPT `ckpt.pt`: `[out, in]`, erf GELU, optimizer beside it", "torch.save", nanogpt(), "oracle"),
    "nanogpt-compiled": Dialect(
        "nanoGPT, compiled (`_orig_mod.`), mask buffers", "torch.save", nanogpt(compiled=True, masked=True), "oracle"
    ),
    "nanogpt-padded": Dialect(
        "nanoGPT, vocabulary padded, no biases", "torch.save", nanogpt(bias=False, vocab=64, compiled=True), "oracle"
    ),
    "mingpt": Dialect("minGPT state dict, no config: heads from its published sizes", "torch.save", mingpt, "oracle"),
    "lightning": Dialect("Lightning and DistributedDataParallel wrappers", "torch.save", wrapped, "oracle"),
    "openai": Dialect("OpenAI's TensorFlow files, no TensorFlow", "ours, held to TensorFlow's", openai, "oracle"),
    "gguf-f32": Dialect("GGUF, F32", "gguf package", gguf("F32"), "oracle"),
    "gguf-f16": Dialect("GGUF, F16", "gguf package", gguf("F16"), "oracle"),
    "gguf-q8": Dialect("GGUF, Q8_0", "gguf package", gguf("Q8_0"), "oracle"),
}  # fmt: skip


def judged(path: Path, truth: Truth, config: GPT2Config, judge: str, ids: Tensor) -> Tensor:
    """Logits (B, T, V) in float64, by somebody else."""
    if judge == "oracle":
        wide = {name: tensor.double() for name, tensor in truth.items()}
        return torch.stack([oracle(wide, config, row.tolist()) for row in ids])
    from gpt2.parity.reference import load_reference, opens

    assert opens(open_path(path)), "transformers is only a judge where it reads the files itself"
    with torch.no_grad():
        return load_reference(path, torch.float64)(ids).logits


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_is_read_as_its_authors_meant_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A matrix turned or not, a head count or a GELU assumed: each gives a model that loads, runs, and is wrong."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
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


def test_square_matrices_follow_the_others(tmp_path: Path) -> None:
    """The one matrix that fits either way: left alone where all others are turned, nothing shows but the logits."""
    directory, truth, config = DIALECTS["linear-shards"].write(tmp_path)
    files = open_weights(directory)
    assignment = match(files, config_of(directory, files), directory)
    assert assignment.turned
    stored = files["transformer.h.1.attn.c_proj.weight"].read("transformer.h.1.attn.c_proj.weight")
    assert not torch.equal(stored, truth["h.1.attn.c_proj.weight"])
    assert torch.equal(assignment.read("h.1.attn.c_proj.weight", torch.float32), stored.t())
    wrong = truth | {"h.1.attn.c_proj.weight": stored}
    ids = torch.tensor([[1, 2, 3]])
    model = load(str(directory), dtype="f64")
    with pytest.raises(AssertionError):
        assert_same(model(ids).detach(), judged(directory, wrong, config, "oracle", ids))


def test_turning_costs_no_copy(tmp_path: Path) -> None:
    """A transposing copy of gpt2-xl is six gigabytes and a second."""
    truth = weights()
    write_weights(write_config(tmp_path) / "model.safetensors", turned(truth), start=0)
    model = load(str(tmp_path))
    weight = model.h[0].attn.c_attn.weight
    assert weight.t().is_contiguous()
    file = open_weights(tmp_path)["wte.weight"]
    span = file.entries["h.0.attn.c_attn.weight"]
    assert weight.data_ptr() - model.wte.weight.data_ptr() == span.start - file.entries["wte.weight"].start


def test_matrices_that_lie_both_ways_are_refused(tmp_path: Path) -> None:
    """PEFT turned all matrices but one kind; what is left must not be guessed at."""
    truth = weights()
    stored = turned(truth) | {"h.1.mlp.c_fc.weight": truth["h.1.mlp.c_fc.weight"]}
    write_weights(write_config(tmp_path) / "model.safetensors", stored)
    with pytest.raises(CheckpointError) as caught:
        load(str(tmp_path))
    assert "misshapen: h.1.mlp.c_fc.weight is [12, 48], expected [48, 12]" in str(caught.value)
    assert "(1 matrices lie [in, out] and 5 [out, in])" in str(caught.value)


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (nanogpt(n_head=5), "n_embd 12 is not divisible by n_head 5"),
        (nanogpt(vocab_size=50304), "config says vocab_size 50304, the tensors 61"),
        (nanogpt(n_layer=3), "config says n_layer 3, the tensors 2"),
        (nanogpt(n_head="three"), "n_head must be int"),
        (nanogpt(n_head=None), "does not say n_head"),
    ],
)
def test_model_args_that_lie_are_told(tmp_path: Path, write: Callable, says: str) -> None:
    """nanoGPT's sizes come out of a pickle from anywhere."""
    with pytest.raises(CheckpointError) as caught:
        load(str(write(tmp_path)[0]))
    assert says in str(caught.value)


def test_a_config_that_contradicts_the_container_is_told(tmp_path: Path) -> None:
    """The number of heads shows in no tensor: a config.json left over from another model would load without a word."""
    path, _, _ = nanogpt()(tmp_path)
    write_config(path, replace(TINY, n_head=4))
    with pytest.raises(CheckpointError, match="disagree: n_head 4 and 3"):
        load(str(path))
    write_config(path, replace(TINY, activation_function="gelu_new"))
    assert load(str(path)).config.activation_function == "gelu_new"  # an old nanoGPT's: what is written by hand counts


def test_heads_are_not_guessed(tmp_path: Path) -> None:
    """A bare state dict of a shape that nobody published: any divisor of the width would load, and only one is right."""
    torch.save(weights(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="do not tell the number of heads"):
        load(str(tmp_path / "model.pt"))
    write_config(tmp_path)
    assert load(str(tmp_path / "model.pt")).config.n_head == 3


def test_an_untied_head_is_refused(tmp_path: Path) -> None:
    """minGPT trains its head apart from its embedding: dropped, the model would load and say something else."""
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=48, n_layer=3, n_head=3)
    torch.save(TheirGPT(config, tied=False).state_dict(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"an untied head, which GPT-2 does not have: lm_head\.weight"):
        load(str(tmp_path / "model.pt"))


def test_one_missing_bias_is_a_damaged_file(tmp_path: Path) -> None:
    """Zeros stand for biases only where the whole file has none."""
    truth = weights()
    write_config(tmp_path)
    write_weights(tmp_path / "model.safetensors", {name: t for name, t in truth.items() if name != "h.1.attn.c_proj.bias"})
    with pytest.raises(CheckpointError, match=r"missing: h\.1\.attn\.c_proj\.bias"):
        load(str(tmp_path))


def test_the_first_of_several_containers(tmp_path: Path) -> None:
    """safetensors beside a .bin: the one that nobody needs to be trusted for."""
    truth = official(tmp_path)
    torch.save({name: tensor + 1 for name, tensor in truth.items()}, tmp_path / "pytorch_model.bin")
    assert torch.equal(load(str(tmp_path)).wte.weight, truth["wte.weight"])


def test_the_readmes_table_is_this_list() -> None:
    """A row without a test is a promise; a test without a row helps nobody to choose."""
    text = (ROOT / "gpt2/checkpoint/README.md").read_text()
    table = text[text.index("<!-- dialects -->") : text.index("<!-- /dialects -->")]
    rows = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| ") and not row.startswith("| ---")]
    assert rows[1:] == [dialect.what for dialect in DIALECTS.values()]


def test_models_of_turned_files_train_and_save(tmp_path: Path) -> None:
    """Views with odd strides in places that expect rows: saving, copying, stepping."""
    import copy

    from gpt2.checkpoint.saving import save

    path, truth, _ = DIALECTS["lightning"].write(tmp_path / "in")
    model: GPT2 = load(str(path))
    save(model, None, tmp_path / "out")
    again = load(str(tmp_path / "out"))
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in truth.items())
    copied = copy.deepcopy(model).train()
    optimizer = torch.optim.AdamW(copied.parameters(), lr=1e-3, fused=True)
    copied(torch.tensor([[1, 2, 3]])).sum().backward()
    optimizer.step()
    assert not torch.equal(copied.h[0].attn.c_attn.weight, model.h[0].attn.c_attn.weight)


def test_the_tokenizer_is_the_weights_own(tmp_path: Path) -> None:
    """A GGUF beside safetensors: the weights come from one, so must the vocabulary."""
    import gpt2

    model, tokenizer = gpt2.load(), gpt2.load_tokenizer()
    gpt2.save(model, tokenizer, tmp_path)
    gguf("F32")(tmp_path)  # carries no tokenizer
    assert gpt2.load_tokenizer(str(tmp_path)).fingerprint == tokenizer.fingerprint
