"""From any model that loads to a directory that other programs open: Hugging Face's layout, or one GGUF file for llama.cpp.

The GGUF file is what llama.cpp's convert_hf_to_gguf.py makes of the same model under the name "GPT-2", byte for byte: matrices
[out, in], norms, biases and positions always in float32, tensors in the order of their Hugging Face names.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import Checkpoint, RandomCheckpoint, StoredCheckpoint, open_checkpoint
from gpt2.checkpoint.containers.gguf_file import (
    ALIGNMENT,
    ARRAY,
    CONFIG_KEYS,
    CONTROL,
    KINDS,
    NORMAL,
    STRING,
    Kind,
    NoTokenizer,
)
from gpt2.checkpoint.describe import File
from gpt2.checkpoint.files import WEIGHTS
from gpt2.checkpoint.keys import GGUF, layer, to_file
from gpt2.checkpoint.loading import require_vocabulary
from gpt2.checkpoint.names import EXPORTS, ModelName
from gpt2.checkpoint.saving import save, sha256, write_file
from gpt2.config import GPT2Config, quoted
from gpt2.data.bpe import BPE
from gpt2.data.bpe_files import ADDED, FILES
from gpt2.data.chars import FILE as CHARS
from gpt2.errors import InputError

if TYPE_CHECKING:
    from gpt2.data import Tokenizer
    from gpt2.model import GPT2

FORMATS = ("hf", "gguf")
GGUF_FILE = "model.gguf"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", ADDED, CHARS, *(name for pair in FILES for name in pair))
TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
# How the matrices are stored -> llama.cpp's number for such a file (llama.h, llama_ftype).
TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
OF_DTYPE = {torch.float64: "f32", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
KIND = {kind.name.lower(): (number, kind) for number, kind in KINDS.items()}
U32, I32, F32, BOOL = 4, 5, 6, 7  # numbers of GGUF's types of metadata
PIECE = 1 << 20  # weights converted at a time


@dataclass(frozen=True)
class Export:
    """What was written. ``type`` is how the matrices are stored; ``notes`` say what is not as it is in the source."""

    model: str
    directory: str
    format: str
    type: str
    config: GPT2Config
    files: tuple[File, ...]
    notes: tuple[str, ...]


def export(
    name: str,
    directory: str | Path,
    *,
    format: str = "hf",
    type: str | None = None,
    revision: str | None = None,
    offline: bool = False,
) -> Export:
    """Write the model ``name`` (as in :func:`gpt2.load`) to ``directory``, with its tokenizer where it has one.

    ``hf`` is what :func:`gpt2.save` writes, in the model's dtype: transformers, vLLM, CTranslate2 and llama.cpp's converter
    open it. ``gguf`` is one file, ``model.gguf``, its matrices stored as ``type`` ("f32", "f16", "bf16", "q8_0"; default: the
    model's dtype). An embedding with more rows than the tokenizer has tokens is cropped. The same model gives the same bytes,
    also when it was loaded from such an export. A reader sees an old file or a new one and never half of one.

    Raises:
        InputError: no such model, a format that cannot express it, a directory that cannot be written or holds another
            tokenizer. CheckpointError: the model cannot be read.
    """
    if format not in FORMATS:
        raise InputError(f"unknown format {quoted(format)}; known: {', '.join(FORMATS)}")
    if type is not None and format != "gguf":
        raise InputError(f"type {quoted(type)} is for gguf; hf keeps the model's dtype, so put one behind its name: {name}:bf16")
    if type is not None and type not in TYPES:
        raise InputError(f"unknown type {quoted(type)}; known: {', '.join(TYPES)}")
    if not str(directory):
        raise InputError("the folder to write has an empty name; give one, or . for this one")
    directory = Path(directory)
    model, tokenizer, notes = _load(name, revision, offline)
    if format == "hf":
        _refuse_other_tokenizer(directory, tokenizer)
        save(model, tokenizer, directory)
        type = str(model.wte.weight.dtype).removeprefix("torch.")
        names = ["config.json", "generation_config.json", WEIGHTS, *sorted(TOKENIZER_FILES)]
        notes += _unlike_others(model.config)
    else:
        type = type or OF_DTYPE[model.wte.weight.dtype]
        content, more = _gguf(model, tokenizer, type, name)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_file(directory / GGUF_FILE, content)
        except OSError as error:
            why = error.strerror or error
            raise InputError(f"{directory}: cannot write the checkpoint ({why}); choose another folder, or make room") from error
        names, notes = [GGUF_FILE], notes + more
    paths = [directory / name for name in names if (directory / name).is_file()]
    files = tuple(File(path.name, path.stat().st_size, sha256(path)) for path in paths)
    return Export(name, str(directory), format, type, model.config, files, tuple(notes))


def _load(name: str, revision: str | None, offline: bool) -> tuple[GPT2, Tokenizer | None, list[str]]:
    """The model as it is to be written, its tokenizer, and what was changed."""
    checkpoint = open_checkpoint(ModelName.parse(name, EXPORTS, revision=revision), offline=offline)
    model = checkpoint.load()
    try:
        tokenizer = _tokenizer(checkpoint)
    except NoTokenizer as error:
        return model, None, [f"without a tokenizer: {error}"]
    require_vocabulary(tokenizer, model.config, name)
    config, notes, n_vocab = model.config, [], tokenizer.n_vocab
    if n_vocab < config.vocab_size:
        rows = f"from {config.vocab_size:,} rows to the tokenizer's {n_vocab:,}"
        notes.append(f"embedding cropped {rows}")
        model.wte = nn.Embedding.from_pretrained(model.wte.weight.detach()[:n_vocab], freeze=False)
        config = replace(config, vocab_size=n_vocab)
    for field in ("bos_token_id", "eos_token_id"):
        token = getattr(config, field)
        if token is not None and token >= n_vocab:
            config = GPT2Config(**{**vars(config), field: tokenizer.eot})
            notes.append(f"{field} {token:,} is beyond the vocabulary, written as {tokenizer.eot}")
    model.config = config
    return model, tokenizer, notes


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Raises:
        NoTokenizer: there is none, or one that is neither byte-level BPE nor characters. InputError: it is damaged.
    """
    if isinstance(checkpoint, RandomCheckpoint):
        raise NoTokenizer("the weights are random")
    assert isinstance(checkpoint, StoredCheckpoint)
    path = checkpoint.path
    folder = path if path.is_dir() else path.parent
    ours = [name for name in (CHARS, *(name for pair in FILES for name in pair)) if (folder / name).is_file()]
    try:
        return checkpoint.tokenizer()
    except NoTokenizer:
        raise
    except InputError as error:
        if ours or checkpoint.container == "GGUF":
            raise
        raise NoTokenizer(str(error)) from None


def _refuse_other_tokenizer(directory: Path, tokenizer: Tokenizer | None) -> None:
    """Refuse a directory with files of a tokenizer that would be left there, and be read as this model's."""
    own: set[str] = set()
    if tokenizer is not None:
        own = {"tokenizer.json", "tokenizer_config.json", *((*FILES[0], ADDED) if isinstance(tokenizer, BPE) else (CHARS,))}
    left = [name for name in TOKENIZER_FILES if name not in own and (directory / name).exists()]
    if left:
        raise InputError(f"{directory}: holds {left[0]} of another tokenizer; choose another folder, or remove it")


def _unlike_others(config: GPT2Config) -> list[str]:
    """What of a config the readers of Hugging Face's layout take for something else, as seen in their sources."""
    notes = []
    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
        notes.append(
            "of its scaling of attention only transformers knows: CTranslate2, vLLM and llama.cpp leave it out or refuse it"
        )
    if config.reorder_and_upcast_attn:
        notes.append("reorder_and_upcast_attn: vLLM refuses it")
    if config.layer_norm_epsilon != 1e-5:
        notes.append(f"layer_norm_epsilon {config.layer_norm_epsilon:g}: CTranslate2 computes with 1e-05")
    llama = [] if config.inner == 4 * config.n_embd else [f"a feed-forward of {config.inner:,} for {4 * config.n_embd:,}"]
    llama += [] if config.activation_function in TANH_GELU else [f"{config.activation_function} for the tanh GELU"]
    if llama:
        notes.append(f"llama.cpp's converter takes {' and '.join(llama)}, without a word")
    return notes


def _gguf(model: GPT2, tokenizer: Tokenizer | None, type: str, name: str) -> tuple[Iterator[bytes | memoryview], list[str]]:
    """The pieces of a GGUF file, and what it does not say as the source did."""
    config, notes = model.config, []
    odd = None if config.activation_function in TANH_GELU else f"activation_function {config.activation_function!r}"
    odd = odd if config.scale_attn_weights else "scale_attn_weights false"
    odd = "scale_attn_by_inverse_layer_idx true" if config.scale_attn_by_inverse_layer_idx else odd
    if odd:
        has = "llama.cpp's GPT-2 has the tanh GELU and scores divided by the square root of the head's size, nothing else"
        raise InputError(f"{name}: cannot be expressed in GGUF: {odd}, and {has}; export it as hf")
    if config.reorder_and_upcast_attn:
        notes.append("reorder_and_upcast_attn is not expressed: the same function, rounded otherwise")
    if tokenizer is not None and not isinstance(tokenizer, BPE):
        notes.append("without its tokenizer: GGUF has none of characters; pass ids")
        tokenizer = None
    tensors: list[tuple[str, Tensor, int, Kind]] = []
    state = model.state_dict()
    fallen = []
    for ours in sorted(state, key=to_file):
        tensor = state[ours].t() if layer(ours) is not None and state[ours].ndim == 2 else state[ours]
        number, kind = KIND[type if tensor.ndim == 2 and ours != "wpe.weight" else "f32"]
        if tensor.size(-1) % kind.block:  # as llama.cpp does
            number, kind = KIND["f16"]
            fallen.append(ours)
        tensors.append((_gguf_name(ours), tensor, number, kind))
    if fallen:
        notes.append(f"{len(fallen)} matrices in f16: their rows are no multiple of {KIND[type][1].block}")
    metadata = _metadata(config, tokenizer, TYPES[type])
    if config.eos_token_id is None and tokenizer is not None and tokenizer.eot is None:
        notes.append("without an end of text, for which llama.cpp takes token 11; run it with --ignore-eos")
    return _pieces(metadata, tensors), notes


def _gguf_name(ours: str) -> str:
    number = layer(ours)
    return GGUF[ours] if number is None else GGUF[f"h.{{}}.{ours.split('.', 2)[2]}"].format(number)


def _metadata(config: GPT2Config, tokenizer: BPE | None, file_type: int) -> dict[str, tuple[int, Any]]:
    """Name -> (type, value), in the converter's order; of an array, its elements' type, and a list."""
    sizes = {
        "n_layer": config.n_layer,
        "n_positions": config.n_positions,
        "n_embd": config.n_embd,
        "n_inner": config.inner,
        "n_head": config.n_head,
    }
    said: dict[str, tuple[int, Any]] = {
        "general.architecture": (STRING, "gpt2"),
        "general.type": (STRING, "model"),
        "general.name": (STRING, "GPT-2"),
        "general.size_label": (STRING, _size_label(config.num_parameters())),
        **{CONFIG_KEYS[field]: (U32, size) for field, size in sizes.items()},
        CONFIG_KEYS["layer_norm_epsilon"]: (F32, config.layer_norm_epsilon),
        "general.file_type": (U32, file_type),
        "general.quantization_version": (U32, 2),
    }
    if tokenizer is None:
        return (
            said | {"gpt2.vocab_size": (U32, config.vocab_size), "tokenizer.ggml.model": (STRING, "none")} | _ends(config, None)
        )
    special = set(tokenizer.special_tokens)
    said |= {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "gpt-2"),
        "tokenizer.ggml.tokens": (STRING, list(tokenizer.vocab)),
        "tokenizer.ggml.token_type": (I32, [CONTROL if token in special else NORMAL for token in tokenizer.vocab]),
        "tokenizer.ggml.merges": (STRING, [f"{a} {b}" for a, b in tokenizer.merges]),
        **_ends(config, tokenizer.eot),
    }
    return said | {"tokenizer.ggml.add_bos_token": (BOOL, False), "tokenizer.ggml.add_eos_token": (BOOL, False)}


def _ends(config: GPT2Config, eot: int | None) -> dict[str, tuple[int, Any]]:
    """Without them llama.cpp takes token 11, GPT-2's comma, for the end of the text."""
    ids = {"bos": config.bos_token_id, "eos": config.eos_token_id, "unknown": None}
    ids = {name: eot if token is None else token for name, token in ids.items()}
    return {f"tokenizer.ggml.{name}_token_id": (U32, token) for name, token in ids.items() if token is not None}


def _size_label(count: int) -> str:
    """A number of parameters as GGUF's naming convention writes it: 124M, 1.6B."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count > unit or letter == "K":
            digits = len(str(round(count / unit)).lstrip("0"))
            return f"{count / unit:.{max(2 - digits, 0)}f}{letter}"
    raise AssertionError


def _pieces(
    metadata: Mapping[str, tuple[int, Any]], tensors: list[tuple[str, Tensor, int, Kind]]
) -> Iterator[bytes | memoryview]:
    """The file, piece by piece: no tensor is converted as a whole."""
    header = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)))
    for name, (kind, value) in metadata.items():
        header += _text(name)
        if isinstance(value, list):
            header += struct.pack("<IIQ", ARRAY, kind, len(value))
            header += b"".join(map(_text, value)) if kind == STRING else struct.pack(f"<{len(value)}i", *value)
        else:
            header += struct.pack("<I", kind)
            header += _text(value) if kind == STRING else struct.pack({U32: "<I", F32: "<f", BOOL: "<?"}[kind], value)
    offset = 0
    for name, tensor, number, stored in tensors:
        header += _text(name) + struct.pack(f"<I{tensor.ndim}QIQ", tensor.ndim, *reversed(tensor.shape), number, offset)
        offset += _padded(tensor.numel() // stored.block * stored.size)
    yield bytes(header) + bytes(_padded(len(header)) - len(header))
    for name, tensor, _, stored in tensors:
        size = 0
        for rows in tensor.detach().view(-1, tensor.size(-1)).split(max(1, PIECE // tensor.size(-1))):
            piece = _encoded(rows.cpu(), stored, name).view(-1).view(torch.uint8).numpy().data
            size += len(piece)
            yield piece
        yield bytes(_padded(size) - size)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(8, "little") + encoded


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _encoded(rows: Tensor, kind: Kind, name: str) -> Tensor:
    """Rows as ``kind`` stores them, contiguous."""
    stored = _quantised(rows.float()) if kind.block > 1 else rows.to(kind.dtype)
    scales = stored[:, :2].contiguous().view(torch.float16) if kind.block > 1 else stored
    if not scales.isfinite().all() and (kind.block > 1 or rows.isfinite().all()):
        raise InputError(f"{name}: has values that {kind.name} cannot hold; choose bf16 or f32")
    return stored.contiguous()


def _quantised(rows: Tensor) -> Tensor:
    """float32 to blocks of Q8_0: the largest of 32 numbers becomes 127, the others are rounded, halves away from zero.

    As ggml-quants.c does it, but that where the scale is below float16's smallest, and the block so zero, its 32 numbers are
    zeros too: otherwise the same weights, written again, would be other bytes.
    """
    blocks = rows.reshape(-1, 32)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    stored = scales.half()
    scaled = (blocks * (1 / scales)).abs()
    whole = scaled.floor()
    numbers = (whole + (2 * (scaled - whole)).floor()).copysign(blocks)
    numbers = torch.where((stored == 0) | ~stored.isfinite(), 0, numbers).to(torch.int8)
    return torch.cat([stored.view(torch.uint8), numbers.view(torch.uint8)], dim=1)
