"""Tiny GPT-2s in GGUF, written by the `gguf` package with its tensor names, as llama.cpp's converter does."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from torch import Tensor, from_numpy

from gpt2.config import GPT2Config
from gpt2.data.library import LibraryTokenizer
from support.hf_layouts import TINY, weights

F32, F16, BF16, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0"))
FILE_TYPES = {F32: 0, F16: 1, BF16: 32, Q8_0: 7}
# Rows of whole Q8_0 blocks; a vocabulary large enough for a byte-level BPE.
WIDE = GPT2Config(vocab_size=300, n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=299, eos_token_id=299)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], kind: gguf.GGMLQuantizationType | None = None) -> None:
    """Write a file of any tensors with any names; its only metadata is the architecture."""
    writer = gguf.GGUFWriter(path, "gpt2")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy(), raw_dtype=kind)
    finish(writer)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(
    path: Path,
    config: GPT2Config = WIDE,
    kind: gguf.GGMLQuantizationType = F32,
    *,
    truth: Mapping[str, Tensor] | None = None,
    tokenizer: LibraryTokenizer | None = None,
    change: Callable[[gguf.GGUFWriter], Any] = lambda _: None,
) -> dict[str, Tensor]:
    """Write a file like convert_hf_to_gguf.py; return the tensors by our names. ``change`` gets the writer before it writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("GPT-2")
    writer.add_size_label(gguf.size_label(config.num_parameters(), config.num_parameters(), 0, 0))
    writer.add_block_count(config.n_layer)
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_feed_forward_length(config.inner)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, config)
    change(writer)
    held = {}
    truth = weights(config) if truth is None else truth
    for ours in sorted(truth, key=hf_name):
        matrix = ours.startswith("h.") and truth[ours].ndim == 2
        array = (truth[ours].T if matrix else truth[ours]).contiguous().float().numpy()
        stored = kind if truth[ours].ndim == 2 and ours != "wpe.weight" else F32
        if stored == Q8_0 and array.shape[-1] % 32:
            stored = F16
        data = quantize(array, stored)
        writer.add_tensor(gguf_name(ours, config), data, raw_dtype=stored)
        exact = from_numpy(dequantize(data, stored).copy())
        held[ours] = (exact.T if matrix else exact).contiguous()
    finish(writer)
    return {ours: held[ours] for ours in truth}


def hf_name(ours: str) -> str:
    return ours if ours == "lm_head.weight" else f"transformer.{ours}"


@functools.cache
def _names(n_layer: int) -> gguf.TensorNameMap:
    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, n_layer)


def gguf_name(ours: str, config: GPT2Config = TINY) -> str:
    """The package's name for one of Hugging Face's tensors."""
    found = _names(config.n_layer).get_name(hf_name(ours), try_suffixes=(".weight", ".bias"))
    assert found is not None, ours
    return found


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: LibraryTokenizer, config: GPT2Config) -> None:
    special = tokenizer.special_tokens
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    pads = [f"[PAD{i}]" for i in range(tokenizer.n_vocab, config.vocab_size)]
    writer.add_token_list([*tokenizer.vocab, *pads])
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokenizer.vocab]
    writer.add_token_types([*kinds, *[gguf.TokenType.UNUSED] * len(pads)])
    if tokenizer.merges:
        writer.add_token_merges([f"{a} {b}" for a, b in tokenizer.merges])
    if config.bos_token_id is not None:
        writer.add_bos_token_id(config.bos_token_id)
    if config.eos_token_id is not None:
        writer.add_eos_token_id(config.eos_token_id)
    if tokenizer.eot is not None:
        writer.add_unk_token_id(tokenizer.eot)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def arithmetic(config: GPT2Config) -> dict[str, Tensor]:
    """Weights with the same values on every machine and release: no random generator, no rounding."""
    result = {}
    for number, (name, like) in enumerate(weights(config).items()):
        count = np.arange(like.numel(), dtype=np.uint64) * np.uint64(2654435761) + np.uint64(97 * number)
        values = ((count >> np.uint64(7)) % np.uint64(4096)).astype(np.float32) / 8192 - 0.25
        result[name] = from_numpy(values.reshape(like.shape).copy())
    return result
