"""Write a GPT-2 as one GGUF file for llama.cpp, in pieces.

The file equals, byte for byte, what llama.cpp's convert_hf_to_gguf.py writes under the name "GPT-2": matrices [out, in]; norms,
biases and positions in float32; tensors in the order of their Hugging Face names.
"""

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers import gguf_file
from gpt2.checkpoint.containers.gguf_file import ARRAY, CONFIG_KEYS, KINDS, SCALARS, STRING, Format, dequantised, padded
from gpt2.checkpoint.keys import layer, to_file, to_gguf
from gpt2.checkpoint.saving import raw_bytes
from gpt2.config import GPT2Config, quoted
from gpt2.data import Tokenizer
from gpt2.data.library import LibraryTokenizer
from gpt2.errors import InputError
from gpt2.model import GPT2

TANH_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
# Type of the matrices -> llama.cpp's number of the file type (llama.h, llama_ftype).
TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}
KIND = {kind.name.lower(): (number, kind) for number, kind in KINDS.items()}
U32, I32, F32, BOOL = 4, 5, 6, 7  # GGUF's numbers of metadata types
PIECE = 1 << 20  # weights converted at a time
Metadata = dict[str, tuple[int, Any]]  # name -> (type, value); for an array the type of its elements, and a list
Row = tuple[str, Tensor, int, Format]  # name in the file, values, GGUF's number of the kind, kind


def require_formulas(config: GPT2Config, what: str, has: str, more: Mapping[str, bool] | None = None) -> None:
    """Raise InputError if a program whose formulas are constants of its code would compute another function.

    ``more`` are further departures from what the program ``has``, and whether the config has each of them.
    """
    departures = {
        f"activation_function {config.activation_function!r}": config.activation_function not in TANH_GELU,
        "scale_attn_weights false": not config.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx true": config.scale_attn_by_inverse_layer_idx,
        **(more or {}),
    }
    if odd := next((name for name, departs in departures.items() if departs), None):
        raise InputError(f"{what}: {odd}, and {has}; export it as hf")


def type_of(name: str, shape: Sequence[int], type: str) -> str:
    """Return the type in which llama.cpp stores our parameter ``name`` in a file whose matrices are ``type``."""
    if len(shape) != 2 or name == "wpe.weight":
        return "f32"
    row = shape[0] if name.startswith("h.") else shape[1]  # in the file, matrices are [out, in]
    return "f16" if row % KIND[type][1].block else type


def as_stored(name: str, tensor: Tensor, type: str) -> Tensor:
    """Return a parameter in float32 as a reader of such a file gets it, in our orientation."""
    kind = KIND[type_of(name, tensor.shape, type)][1]
    if kind.block == 1:
        return tensor.to(kind.dtype).float()
    rows = tensor.t() if name.startswith("h.") else tensor
    values = dequantised(_quantised(rows.float().contiguous())).view(rows.shape)
    return values.t() if name.startswith("h.") else values


def parameters_of(parts: Collection[str], names: Collection[str]) -> set[str]:
    """Return the parameters that belong to parts such as ``h.0``, ``h.3.mlp`` or ``wte``. Raises InputError: no such part."""
    chosen = set()
    for part in parts:
        if not (of_part := {name for name in names if name == part or name.startswith(f"{part}.")}):
            raise InputError(f"no part {quoted(part)} in this model; name blocks (h.0), halves of them (h.0.mlp), or wte")
        chosen |= of_part
    return chosen


def gguf_pieces(
    model: GPT2, tokenizer: Tokenizer | None, type: str, name: str, keep: Collection[str] = (), kept_type: str = "f32"
) -> tuple[Iterator[bytes | memoryview], list[str]]:
    """Return the file's pieces in order, and notes on what GGUF cannot express; parts in ``keep`` are stored as ``kept_type``.

    Raises InputError: GGUF cannot hold the model, or there is no such part.
    """
    config, notes = model.config, []
    has = "llama.cpp's GPT-2 has the tanh GELU and scores divided by the square root of the head's size, nothing else"
    require_formulas(config, f"{name}: cannot be expressed in GGUF", has)
    if config.reorder_and_upcast_attn:
        notes.append("reorder_and_upcast_attn is not expressed: the same function, rounded otherwise")
    if not isinstance(tokenizer, LibraryTokenizer) or not tokenizer.own:
        notes += [] if tokenizer is None else ["without its tokenizer: GPT-2's in GGUF is a byte-level BPE, no other; pass ids"]
        tokenizer = None
    elif tokenizer.template:
        notes.append(f"without the template that puts {tokenizer.decode(tokenizer.template)} around a text")
    rows: list[Row] = []
    state, fallen = model.state_dict(), 0
    kept = parameters_of(keep, state)
    for ours in sorted(state, key=to_file):
        tensor = state[ours].t() if layer(ours) is not None and state[ours].ndim == 2 else state[ours]
        wanted = kept_type if ours in kept else type
        number, kind = KIND[type_of(ours, state[ours].shape, wanted)]
        fallen += bool(tensor.size(-1) % KIND[wanted][1].block and kind.name == "F16")
        rows.append((to_gguf(ours), tensor, number, kind))
    if fallen:
        notes.append(f"{fallen} matrices in f16: the length of their rows is not a multiple of {KIND[type][1].block}")
    if config.eos_token_id is None and tokenizer is not None and tokenizer.eot is None:
        notes.append("without an end of text, for which llama.cpp takes token 11; run it with --ignore-eos")
    return _pieces(_metadata(config, tokenizer, TYPES[type]), rows), notes


def _metadata(config: GPT2Config, tokenizer: LibraryTokenizer | None, file_type: int) -> Metadata:
    """Return the metadata in the order of llama.cpp's converter."""
    sizes = ("n_layer", "n_positions", "n_embd", "n_inner", "n_head")
    metadata: Metadata = {
        "general.architecture": (STRING, "gpt2"),
        "general.type": (STRING, "model"),
        "general.name": (STRING, "GPT-2"),
        "general.size_label": (STRING, _size_label(config.num_parameters())),
        **{CONFIG_KEYS[field]: (U32, config.inner if field == "n_inner" else getattr(config, field)) for field in sizes},
        CONFIG_KEYS["layer_norm_epsilon"]: (F32, config.layer_norm_epsilon),
        "general.file_type": (U32, file_type),
        "general.quantization_version": (U32, 2),
    }
    # Without an end-of-text id, llama.cpp uses token 11, GPT-2's comma.
    eot = None if tokenizer is None or tokenizer.eos is None or tokenizer.eos >= config.vocab_size else tokenizer.eos
    ids = {"bos": config.bos_token_id, "eos": config.eos_token_id, "unknown": None}
    ids = {end: eot if id is None else id for end, id in ids.items()}
    ends = {f"tokenizer.ggml.{end}_token_id": (U32, id) for end, id in ids.items() if id is not None}
    if tokenizer is None:
        return metadata | {"gpt2.vocab_size": (U32, config.vocab_size), "tokenizer.ggml.model": (STRING, "none")} | ends
    control, defined = tokenizer.special_tokens.values(), tokenizer.matched.values()
    types = dict.fromkeys(control, gguf_file.CONTROL) | dict.fromkeys(defined, gguf_file.USER_DEFINED)
    tokens = [tokenizer.backend.id_to_token(i) for i in range(config.vocab_size)]
    types |= {i: gguf_file.UNUSED for i, token in enumerate(tokens) if token is None}
    return metadata | {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "gpt-2"),
        "tokenizer.ggml.tokens": (STRING, [f"[PAD{i}]" if token is None else token for i, token in enumerate(tokens)]),
        "tokenizer.ggml.token_type": (I32, [types.get(i, gguf_file.NORMAL) for i in range(len(tokens))]),
        "tokenizer.ggml.merges": (STRING, [f"{a} {b}" for a, b in tokenizer.merges or ()]),
        **ends,
        "tokenizer.ggml.add_bos_token": (BOOL, False),
        "tokenizer.ggml.add_eos_token": (BOOL, False),
        **({"tokenizer.chat_template": (STRING, tokenizer.chat.jinja())} if tokenizer.chat else {}),
    }


def _size_label(count: int) -> str:
    """Format a parameter count by GGUF's naming convention: 124M, 1.6B."""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
    unit, letter = next((row for row in units if count > row[0]), (1e3, "K"))
    digits = len(str(round(count / unit)).lstrip("0"))
    return f"{count / unit:.{max(2 - digits, 0)}f}{letter}"


def _pieces(metadata: Mapping[str, tuple[int, Any]], rows: list[Row]) -> Iterator[bytes | memoryview]:
    """Yield the file in pieces; no tensor is converted as a whole."""
    header = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(rows), len(metadata)))
    for name, (kind, value) in metadata.items():
        values = value if isinstance(value, list) else [value]
        header += _text(name)
        header += struct.pack("<IIQ", ARRAY, kind, len(value)) if isinstance(value, list) else struct.pack("<I", kind)
        header += b"".join(_text(one) if kind == STRING else struct.pack("<" + SCALARS[kind], one) for one in values)
    offset = 0
    for name, tensor, number, stored in rows:
        header += _text(name) + struct.pack(f"<I{tensor.ndim}QIQ", tensor.ndim, *reversed(tensor.shape), number, offset)
        offset += padded(tensor.numel() // stored.block * stored.size)
    yield bytes(header) + bytes(padded(len(header)) - len(header))
    for name, tensor, _, stored in rows:
        size = 0
        for part in tensor.detach().view(-1, tensor.size(-1)).split(max(1, PIECE // tensor.size(-1))):
            piece = raw_bytes(_encoded(part.cpu(), stored, name))
            size += len(piece)
            yield piece
        yield bytes(padded(size) - size)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(8, "little") + encoded


def _encoded(rows: Tensor, kind: Format, name: str) -> Tensor:
    stored = _quantised(rows.float()) if kind.block > 1 else rows.to(kind.dtype)
    scales = stored[:, :2].contiguous().view(torch.float16) if kind.block > 1 else stored
    if not scales.isfinite().all() and (kind.block > 1 or rows.isfinite().all()):
        raise InputError(f"{name}: has values that {kind.name} cannot hold; choose bf16 or f32")
    return stored.contiguous()


def _quantised(rows: Tensor) -> Tensor:
    """Quantise float32 to Q8_0 as ggml-quants.c does; zeros where float16 rounds a scale to 0, to be written alike twice."""
    blocks = rows.reshape(-1, 32)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    stored = scales.half()
    scaled = (blocks * (1 / scales)).abs()
    whole = scaled.floor()
    numbers = (whole + (2 * (scaled - whole)).floor()).copysign(blocks)
    numbers = torch.where((stored == 0) | ~stored.isfinite(), 0, numbers).to(torch.int8)
    return torch.cat([stored.view(torch.uint8), numbers.view(torch.uint8)], dim=1)
