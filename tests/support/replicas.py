"""Small replicas of kinds of GPT-2 repositories on the Hub, each a row: a name, a writer, and the verdict of a right loader.

transformers, tokenizers, sentencepiece, PEFT and torch write the files; `nanogpt`, Flax, Keras and GGUF have writers of their
own in this folder, after the original formats. The weights are random, and every parameter matters.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.data import from_directory
from support import gguf_layouts, old_layouts, tf_bundle, tokenizers, torch_layouts
from support.hf_layouts import masks, turned, write_weights
from support.hub_standin import HubStandIn, Unread
from support.random_models import random_model

BASE = "replicas/base"
SINGLE = "model.safetensors"
State = dict[str, Tensor]
Make = Callable[[Path], object]


@dataclass(frozen=True)
class Replica:
    """One kind of repository. ``reason`` is a part of the line that says why it is not equal."""

    make: Make
    verdict: str = "equal"
    reason: str = ""
    gated: bool = False
    size: int = 0  # of weights that are listed and never served; 0: they are served


def gpt2(
    folder: Path,
    tokenizer: Make | None = tokenizers.byte_level,
    *,
    model: str = "GPT2LMHeadModel",
    dtype: torch.dtype = torch.float32,
    rows: int = 0,
    shard_size: str = "1GB",
    **config: Any,
) -> None:
    """What `save_pretrained` of transformers writes: a tiny model with that tokenizer, and ``rows`` more rows than tokens."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    kept, ends, count = {}, {}, 60
    if tokenizer is not None:
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        tokenizer(folder)
        made = transformers.AutoTokenizer.from_pretrained(folder)
        kept = json.loads((folder / "config.json").read_text())
        ends, count = {"bos_token_id": made.bos_token_id, "eos_token_id": made.eos_token_id}, len(made)
    sizes = {"vocab_size": count + rows, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    theirs = getattr(transformers, model)(transformers.GPT2Config(**{**sizes, **ends, **config}))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    theirs.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    edit(folder, **kept)


def edit(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Change a JSON file; ``...`` removes a key."""
    raw = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    (folder / name).write_text(json.dumps({key: value for key, value in (raw | changes).items() if value is not ...}))


def then(*steps: Make, **settings: Any) -> Make:
    """A repository as transformers saves it, changed by each step."""

    def make(folder: Path) -> None:
        gpt2(folder, **settings)
        for step in steps:
            step(folder)

    return make


def stored(change: Callable[[State], Any], name: str = SINGLE, **settings: Any) -> Make:
    """The weights with other names or values, in a file of another name; by torch.save unless it is safetensors."""

    def step(folder: Path) -> None:
        state = change(load_file(folder / SINGLE))
        (folder / SINGLE).unlink()
        if name.endswith(".safetensors"):
            save_file(state, folder / name, {"format": "pt"})
        else:
            torch_layouts.save(folder / name, state, **settings)

    return step


def config_of(folder: Path) -> GPT2Config:
    return GPT2Config.from_hf(json.loads((folder / "config.json").read_text()))


def bare(state: Mapping[str, Tensor]) -> State:
    return {name.removeprefix("transformer."): tensor for name, tensor in state.items() if name != "lm_head.weight"}


def before(prefix: str, change: Callable[[State], State] = dict) -> Callable[[State], State]:
    return lambda state: {prefix + name: tensor for name, tensor in change(state).items()}


def with_head(state: State) -> State:
    return state | {"lm_head.weight": state["transformer.wte.weight"].clone()}


def with_buffers(state: State, prefix: str = "transformer.") -> State:
    config = GPT2Config(60, 64, 16, 2, 2)
    scalars = {f"{prefix}h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(2)}
    return state | {name: mask.to(torch.uint8) for name, mask in masks(config, prefix).items()} | scalars


def value_head(state: State) -> State:
    return with_head(state) | {"v_head.summary.weight": torch.ones(1, 16), "v_head.summary.bias": torch.zeros(1)}


def official(folder: Path) -> None:
    """No prefix, masks, no head, data at an odd byte; and other frameworks' files beside it."""
    state = bare(load_file(folder / SINGLE)) | masks(config_of(folder))
    write_weights(folder / SINGLE, state, start=3)
    for name in ("flax_model.msgpack", "tf_model.h5", "rust_model.ot", "64-8bits.tflite"):
        (folder / name).write_bytes(b"never fetched")


def resized(folder: Path) -> None:
    """A fine-tune for chats: more tokens, and rows for them."""
    from transformers import AutoTokenizer, GPT2LMHeadModel

    tokenizer, model = AutoTokenizer.from_pretrained(folder), GPT2LMHeadModel.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "additional_special_tokens": ["<|user|>", "<|bot|>"]})
    torch.manual_seed(1)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def pad_without_a_row(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)


def adapter(folder: Path, tokenizer: bool = False, **settings: Any) -> None:
    """What PEFT saves: the adapter alone, and the name of its base."""
    from transformers import GPT2LMHeadModel

    base = folder.with_name(f"{folder.name}-base")
    gpt2(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft

        model = peft.get_peft_model(GPT2LMHeadModel.from_pretrained(base), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        torch.manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(folder)
    edit(folder, "adapter_config.json", base_model_name_or_path=BASE)
    if tokenizer:
        tokenizers.byte_level(folder)


def nanogpt(folder: Path, **settings: Any) -> None:
    torch_layouts.nanogpt(folder / "ckpt.pt", **settings)


def gguf(folder: Path, kind: Any = gguf_layouts.F32) -> None:
    """A GGUF alone, with its tokenizer inside."""
    tokens = folder.with_name(f"{folder.name}-tokens")
    tokens.mkdir()
    tokenizers.byte_level(tokens)
    tokenizer = from_directory(tokens)
    ends = {"bos_token_id": tokenizer.eot, "eos_token_id": tokenizer.eot}
    config = replace(gguf_layouts.WIDE, vocab_size=tokenizer.n_vocab, n_positions=64, **ends)
    truth = random_model(config, 0.1, dtype=torch.float32).state_dict()
    gguf_layouts.write(folder / "model-f.gguf", config, kind, truth=truth, tokenizer=tokenizer)


def author_s_tokenizer(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", tokenizer_class="Ours", auto_map={"AutoTokenizer": ["ours.Ours", None]})
    (folder / "ours.py").write_text("raise SystemExit('the author s code ran')\n")


def not_a_number(state: State) -> State:
    return state | {"transformer.ln_f.weight": torch.full_like(state["transformer.ln_f.weight"], torch.nan)}


CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
REPLICAS: dict[str, Replica] = {
    # Types and files of the weights.
    "float32": Replica(gpt2),
    "bfloat16": Replica(partial(gpt2, dtype=torch.bfloat16)),
    "shards": Replica(partial(gpt2, shard_size="20KB")),
    "bin": Replica(then(stored(with_head, "pytorch_model.bin"))),
    "bin before torch 1.6": Replica(then(stored(with_buffers, "pytorch_model.bin", zipped=False))),
    "Flax": Replica(old_layouts.flax),
    "OpenAI's TensorFlow": Replica(tf_bundle.openai),
    "GGUF": Replica(gguf),
    "GGUF of Q8_0": Replica(partial(gguf, kind=gguf_layouts.Q8_0)),
    # Names and shapes of the weights.
    "the official layout": Replica(then(official)),
    "GPT2Model without a head": Replica(partial(gpt2, model="GPT2Model")),
    "matrices of nn.Linear": Replica(then(stored(lambda state: before("transformer.", turned)(bare(state))))),
    "Lightning": Replica(lambda folder: torch_layouts.lightning(folder / "last.ckpt"), "refused", "n_head"),
    "nanoGPT": Replica(nanogpt),
    # Heads.
    "untied head": Replica(partial(gpt2, tie_word_embeddings=False)),
    "untied head by config, equal values": Replica(then(stored(with_head), partial(edit, tie_word_embeddings=False))),
    "sequence classifier": Replica(partial(gpt2, model="GPT2ForSequenceClassification", num_labels=3)),
    "double heads": Replica(partial(gpt2, model="GPT2DoubleHeadsModel")),
    "TRL's value head": Replica(then(stored(value_head, "pytorch_model.bin"))),
    # Settings of config.json.
    "scaled by layer": Replica(partial(gpt2, scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=True)),
    "exact GELU, n_inner": Replica(partial(gpt2, activation_function="gelu", n_inner=40)),
    "gelu_pytorch_tanh": Replica(partial(gpt2, activation_function="gelu_pytorch_tanh", layer_norm_epsilon=1e-6)),
    "ReLU": Replica(partial(gpt2, activation_function="relu")),
    "unscaled attention": Replica(partial(gpt2, scale_attn_weights=False)),
    "keys of an old transformers": Replica(
        then(partial(edit, n_ctx=64, summary_type="cls_index", task_specific_params={"text-generation": {"do_sample": True}}))
    ),
    "no end": Replica(then(partial(edit, bos_token_id=None, eos_token_id=None))),
    "ends in generation_config.json": Replica(
        then(partial(edit, name="generation_config.json", eos_token_id=[3, 5, 259], do_sample=True, repetition_penalty=1.3))
    ),
    # Rows, tokens and tokenizers.
    "padded vocabulary": Replica(partial(gpt2, rows=13)),
    "resized for added tokens": Replica(then(resized)),
    "[PAD] without a row": Replica(then(pad_without_a_row)),
    "chat template": Replica(then(partial(edit, name="tokenizer_config.json", chat_template=CHAT))),
    "no tokenizer": Replica(partial(gpt2, tokenizer=None)),
    **{f"tokenizer {kind}": Replica(partial(gpt2, tokenizer=make)) for kind, make in tokenizers.KINDS.items()},
    # Beside a base.
    "LoRA": Replica(partial(adapter, r=4, target_modules=["c_attn"], fan_in_fan_out=True)),
    "LoRA with a tokenizer": Replica(partial(adapter, tokenizer=True, r=2, target_modules=["c_proj", "c_fc"], use_rslora=True)),
    # What is refused, and why.
    "another architecture": Replica(then(partial(edit, model_type="llama")), "refused", "llama"),
    "author's tokenizer": Replica(then(author_s_tokenizer), "refused", "transformers cannot open it"),
    "NaN": Replica(then(stored(not_a_number)), "refused", "not finite"),
    "gated": Replica(gpt2, "refused", "gated", gated=True),
    "large": Replica(gpt2, "too large", "bytes to download", size=1 << 40),
}


def name_of(kind: str) -> str:
    """The repository of a kind."""
    return f"replicas/{re.sub(r'[^A-Za-z0-9]+', '-', kind).strip('-')}"


def publish(hub: HubStandIn, kind: str, folder: Path) -> str:
    """Make a replica, put it on a Hub, and return its name there."""
    replica, name = REPLICAS[kind], name_of(kind)
    folder.mkdir(parents=True)
    replica.make(folder)
    files: dict[str, Any] = {path.name: path for path in folder.iterdir() if path.is_file()}
    if replica.size:
        files[SINGLE] = Unread(replica.size)
    hub.add_repo(name, files, lfs=tuple(file for file in files if re.search(r"\.(safetensors|bin|pt|gguf|h5)$", file)))
    if replica.gated:
        hub.gate(name, 403)
    return name


def publish_base(hub: HubStandIn, folder: Path) -> None:
    """The base that adapters name."""
    gpt2(folder)
    hub.add_repo(BASE, {path.name: path for path in folder.iterdir()}, lfs=(SINGLE,))
