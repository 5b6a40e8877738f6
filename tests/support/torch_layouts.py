"""Tiny checkpoints as torch.save writes them, in its users' layouts; each writer returns the parameters, by our names."""

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from support.hf_layouts import TINY, masks, turned, weights, write_config

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001  # first bytes of a file from before torch 1.6


def save(path: Path, value: Any, *, zipped: bool = True) -> Path:
    """`torch.save`, in the format since torch 1.6 or the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path


def hf_bin(directory: Path, config: GPT2Config = TINY, *, zipped: bool = True) -> dict[str, Tensor]:
    """`pytorch_model.bin`; the official gpt2's is not zipped, DialoGPT's has the prefix, `masked_bias` and the tied head."""
    truth, prefix = weights(config), "transformer."
    state = OrderedDict((prefix + name, tensor) for name, tensor in truth.items())
    state |= {name: tensor.to(torch.uint8) for name, tensor in masks(config, prefix).items()}
    state |= {f"{prefix}h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in range(config.n_layer)}
    state |= dict.fromkeys(("lm_head.weight", "lm_head.decoder.weight"), state[f"{prefix}wte.weight"])
    save(write_config(directory, config) / "pytorch_model.bin", state, zipped=zipped)
    return truth


def linear(truth: Mapping[str, Tensor], prefix: str = "transformer.") -> dict[str, Tensor]:
    """A state dict of nn.Linear modules: matrices [out, in], and the head tied to the embedding."""
    state = {prefix + name: tensor for name, tensor in turned(truth).items()}
    return state | {f"{prefix.removesuffix('transformer.')}lm_head.weight": state[f"{prefix}wte.weight"]}


def nanogpt(
    path: Path,
    config: GPT2Config = TINY,
    *,
    compiled: bool = False,
    bias: Any = True,
    masked: bool = False,
    zipped: bool = True,
    **model_args: Any,
) -> dict[str, Tensor]:
    """`ckpt.pt` of nanoGPT's train.py, with AdamW's state; ``compiled`` adds torch.compile's prefix to the names.

    Without ``bias`` the layers have none, with "ln_" the norms alone; the expected biases are then zero. With ``...`` the
    arguments do not say, as in January 2023. ``masked`` adds mask buffers, as without flash attention.
    """
    truth, prefix = weights(config), "_orig_mod.transformer." if compiled else "transformer."
    without = {name for name in truth if name.endswith("bias") and bias not in (True, ...) and not (bias and bias in name)}
    truth = {name: torch.zeros_like(value) if name in without else value for name, value in truth.items()}
    state = {name: tensor for name, tensor in linear(truth, prefix).items() if name.removeprefix(prefix) not in without}
    state |= masks(config, prefix) if masked else {}
    moments = {"exp_avg": 1e-3, "exp_avg_sq": 1e-6}
    adamw = {
        number: {"step": torch.tensor(2000.0)} | {name: torch.full_like(tensor, value) for name, value in moments.items()}
        for number, tensor in enumerate(state.values())
    }
    groups = [{"lr": 6e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": None, "params": list(adamw)}]
    args = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd, "block_size": config.n_positions}
    args |= {} if bias is ... else {"bias": bool(bias)}
    args |= {"vocab_size": config.vocab_size, "dropout": 0.0}
    run = {"out_dir": "out", "eval_interval": 2000, "learning_rate": 6e-4, "device": "cuda", "compile": compiled}
    checkpoint = {"model": OrderedDict(state), "optimizer": {"state": adamw, "param_groups": groups}, "iter_num": 2000}
    checkpoint |= {"model_args": args | model_args}
    save(path, checkpoint | {"best_val_loss": torch.tensor(3.11), "config": run}, zipped=zipped)
    return truth


def mingpt(path: Path, config: GPT2Config = TINY) -> dict[str, Tensor]:
    """`model.pt` of minGPT's projects: nn.Linear's orientation, float masks, a separate head (here with the same values)."""
    truth = weights(config)
    state = linear(truth) | masks(config, "transformer.")
    save(path, OrderedDict(state) | {"lm_head.weight": truth["wte.weight"].clone()})
    return truth


def untied(directory: Path, config: GPT2Config = TINY) -> dict[str, Tensor]:
    """`pytorch_model.bin` of a GPT-2 whose head has values of its own."""
    truth = weights(replace(config, tie_word_embeddings=False))
    state = {name if name == "lm_head.weight" else f"transformer.{name}": tensor for name, tensor in truth.items()}
    save(write_config(directory, config) / "pytorch_model.bin", state)
    return truth


def named(
    truth: Mapping[str, Tensor], names: Mapping[str, str], leaves: tuple[str, str] = ("weight", "bias")
) -> dict[str, Tensor]:
    """A state dict of nn.Linear modules with another project's ``names`` of modules; "attn.c_attn" may have three, in one."""
    state = {}
    for ours, tensor in turned(truth).items():
        path, _, leaf = ours.rpartition(".")
        layer = re.search(r"\d+", path)
        module = names[path.replace(f"h.{layer[0]}", "h") if layer else path].replace("{}", layer[0] if layer else "")
        leaf = leaves[leaf == "bias"] if "ln_" in path else leaf
        parts = module.split("|")
        for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True):
            state[f"{part}.{leaf}"] = piece.clone()
    return state


def llms_from_scratch(path: Path, config: GPT2Config, *, qkv_bias: bool = True) -> dict[str, Tensor]:
    """`model.pth` of the book "Build a Large Language Model": a head of its own, three matrices for c_attn, masks above."""
    truth = weights(replace(config, tie_word_embeddings=False))
    if not qkv_bias:
        truth |= {name: torch.zeros_like(tensor) for name, tensor in truth.items() if name.endswith("c_attn.bias")}
    at = "trf_blocks.{}."
    names = {"wte": "tok_emb", "wpe": "pos_emb", "ln_f": "final_norm", "lm_head": "out_head", "h.ln_1": f"{at}norm1"}
    names |= {"h.attn.c_attn": "|".join(f"{at}att.W_{part}" for part in ("query", "key", "value"))}
    names |= {"h.attn.c_proj": f"{at}att.out_proj", "h.ln_2": f"{at}norm2"}
    names |= {"h.mlp.c_fc": f"{at}ff.layers.0", "h.mlp.c_proj": f"{at}ff.layers.2"}
    state = named(truth, names, ("scale", "shift"))
    state = {name: tensor for name, tensor in state.items() if qkv_bias or not re.search(r"W_\w+\.bias", name)}
    mask = torch.ones(config.n_positions, config.n_positions).triu(1)
    state |= {f"trf_blocks.{layer}.att.{('mask', 'causal_mask')[layer % 2]}": mask.clone() for layer in range(config.n_layer)}
    save(path, {"model_state_dict": state, "optimizer_state_dict": {"state": {0: {"exp_avg": mask}}, "param_groups": []}})
    return truth


def mingpt_2020(path: Path, config: GPT2Config) -> dict[str, Tensor]:
    """A state dict of minGPT before 2022: three matrices for c_attn, positions with a leading axis, a head of its own."""
    truth = weights(replace(config, tie_word_embeddings=False))
    at = "blocks.{}."
    names = {"wte": "tok_emb", "wpe": "pos_emb", "ln_f": "ln_f", "lm_head": "head", "h.ln_1": f"{at}ln1", "h.ln_2": f"{at}ln2"}
    names |= {"h.attn.c_attn": "|".join(f"{at}attn.{part}" for part in ("query", "key", "value"))}
    names |= {"h.attn.c_proj": f"{at}attn.proj", "h.mlp.c_fc": f"{at}mlp.0", "h.mlp.c_proj": f"{at}mlp.2"}
    state = named(truth, names)
    state["pos_emb"] = state.pop("pos_emb.weight")[None]
    save(path, state | {name.format(0): mask for name, mask in zip([f"{at}attn.mask"], masks(config).values(), strict=False)})
    return truth


def slm(path: Path, config: GPT2Config) -> dict[str, Tensor]:
    """As kunalkohli/SLM_4096 saves: our names in `blocks`, a tied head, a config beside; with other names of norms and sizes."""
    truth = weights(config)
    parts = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    names = {"wte": "tok_emb", "wpe": "pos_emb", "ln_f": "ln_f"} | {f"h.{part}": f"blocks.{{}}.{part}" for part in parts}
    state = {re.sub(r"(ln_\w)\.weight", r"\1.gamma", name): tensor for name, tensor in named(truth, names).items()}
    state = {re.sub(r"(ln_\w)\.bias", r"\1.beta", name): tensor for name, tensor in state.items()}
    state |= {name.replace("h.", "blocks."): mask for name, mask in masks(config).items()} | {"head.weight": truth["wte.weight"]}
    args = {"vocab_size": config.vocab_size, "block_size": config.n_positions, "num_heads": config.n_head}
    save(path, {"model_state": state, "config": args | {"d_model": config.n_embd}, "stoi": {"a": 0}})
    return truth


def litgpt(directory: Path, config: GPT2Config = TINY) -> dict[str, Tensor]:
    """`lit_model.pth` with litgpt's names; a GPT-2 needs the learned positions that litgpt's own models lack."""
    truth = weights(replace(config, tie_word_embeddings=False))
    at = "transformer.h.{}."
    names = {"wte": "transformer.wte", "wpe": "transformer.wpe", "ln_f": "transformer.ln_f", "lm_head": "lm_head"}
    names |= {
        "h.ln_1": f"{at}norm_1",
        "h.ln_2": f"{at}norm_2",
        "h.attn.c_attn": f"{at}attn.qkv",
        "h.attn.c_proj": f"{at}attn.proj",
    }
    names |= {"h.mlp.c_fc": f"{at}mlp.fc", "h.mlp.c_proj": f"{at}mlp.proj"}
    save(write_config(directory, config) / "lit_model.pth", {"model": named(truth, names)})
    return truth


def lightning(path: Path, config: GPT2Config = TINY) -> dict[str, Tensor]:
    """A `.ckpt` of PyTorch Lightning, of a DistributedDataParallel model: the weights under `state_dict`, with two prefixes."""
    truth = weights(config)
    trainer = {"epoch": 3, "global_step": 1200, "pytorch-lightning_version": "2.5.0", "callbacks": {}, "loops": {"fit_loop": {}}}
    trainer |= {"hyper_parameters": {"lr": 3e-4}, "optimizer_states": [{"state": {0: {"step": torch.tensor(9.0)}}}]}
    state = OrderedDict((f"model.module.{name}", tensor) for name, tensor in linear(truth).items())
    save(path, trainer | {"lr_schedulers": [], "state_dict": state})
    return truth


class Stored:
    """A storage in one of torch's pickles, with any id."""

    def __init__(self, *id: Any) -> None:
        self.id = id


class Called:
    """An object that a pickle describes as the result of a call."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def pickled(value: Any, protocol: int = 2) -> bytes:
    """A pickle of `Stored` and `Called` objects and plain values."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return value.id if isinstance(value, Stored) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol).dump(value)
    return buffer.getvalue()


def zip_of(path: Path, description: bytes, storages: Mapping[str, bytes]) -> Path:
    """An archive like torch's, without alignment."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", description)
        for key, data in storages.items():
            archive.writestr(f"archive/data/{key}", data)
        archive.writestr("archive/version", b"3\n")
    return path


def legacy_of(
    path: Path, description: bytes, storages: Mapping[str, tuple[int, bytes]], *, head: Sequence[bytes] = (), keys: Any = None
) -> Path:
    """The format before torch 1.6; ``storages`` are key -> (elements, data), ``head`` its first three pickles."""
    usual = [pickled(MAGIC), pickled(VERSION), pickled({"protocol_version": VERSION, "little_endian": True})]
    parts = [*(head or usual), description, pickled(sorted(storages) if keys is None else keys)]
    parts += [count.to_bytes(8, "little") + data for _, (count, data) in sorted(storages.items())]
    path.write_bytes(b"".join(parts))
    return path
