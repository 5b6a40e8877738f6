"""Read the GGUF format: tensors, config and tokenizer of a GPT-2.

The file has a magic number, a version and two counts; typed metadata; the tensors' directory of shapes, types and offsets;
then, aligned, the data (ggml-org/ggml, docs/gguf.md). Every count and length is checked against the remaining bytes before use.
The `gguf` package is not used: it makes a NumPy view per part of each token, and trusts counts up to 2**30.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers import Container, Damaged, Entry, MappedFile, Refused, countable, shown
from gpt2.config import GPT2Config, quoted
from gpt2.data import bpe, byte_level
from gpt2.data.library import LibraryTokenizer
from gpt2.errors import CheckpointError, InputError

# GPT-2 vocabularies have up to 100,000 tokens and as many merges, in 5 MB; far more is an attack.
METADATA_LIMIT, ELEMENTS_LIMIT = 32_000_000, 2_000_000
TEXT_LIMIT = 1000  # characters of a token; GPT-2's longest has 128
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # to struct's letter
STRING, ARRAY = 8, 9
ALIGNMENT = 32  # default of general.alignment


@dataclass(frozen=True)
class Format:
    """A storage format: ``block`` numbers in ``size`` bytes; ``dtype`` holds them exactly."""

    name: str
    block: int
    size: int
    dtype: torch.dtype


# ggml's type number -> format. A Q8_0 block is one float16 scale and 32 int8; their products have 18 bits, exact in float32.
KINDS = {
    0: Format("F32", 1, 4, torch.float32),
    1: Format("F16", 1, 2, torch.float16),
    8: Format("Q8_0", 32, 34, torch.float32),
    30: Format("BF16", 1, 2, torch.bfloat16),
}
OTHER_KINDS = {
    **dict(enumerate(["Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1"], 2)),
    **dict(enumerate(["Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"], 9)),
    **dict(enumerate(["IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M"], 20)),
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
PIECE = 1 << 16  # blocks converted at a time

# Our config's fields -> metadata keys.
CONFIG_KEYS = {
    "n_positions": "gpt2.context_length",
    "n_embd": "gpt2.embedding_length",
    "n_layer": "gpt2.block_count",
    "n_head": "gpt2.attention.head_count",
    "n_inner": "gpt2.feed_forward_length",
    "layer_norm_epsilon": "gpt2.attention.layer_norm_epsilon",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # tokenizer.ggml.token_type
# How llama.cpp splits a text before the merges. Files from before April 2024 have no entry, for which it takes "default", which
# splits runs of digits and signs otherwise than GPT-2 (llama-vocab.cpp); the weights were trained on GPT-2's tokens, read here.
PRE, MISSING = "tokenizer.ggml.pre", "missing, which llama.cpp reads as default"


@dataclass(frozen=True)
class Stored(Entry):
    kind: Format

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) // self.kind.block * self.kind.size


class GGUFFile(Container):
    """A GGUF file, with GGUF's names and torch's order of dimensions (a matrix is [out, in]).

    F32, F16 and BF16 keep their dtype; Q8_0 becomes float32, which is exact.
    """

    kind = "GGUF"
    entries: Mapping[str, Stored]
    metadata: Mapping[str, Any]

    def _directory(self) -> dict[str, Stored]:
        header, size = _Header(self._file), self._file.size
        header.take(4)  # by which it was told from other files
        version = header.number("I")
        if version & 0xFFFF == 0 and version:
            raise Refused("is in big-endian byte order; fetch the little-endian file")
        if version not in (2, 3):
            raise Refused(f"is GGUF version {version}, and 2 and 3 are read; fetch or make a newer file")
        count, values = header.number("Q"), header.number("Q")
        self.metadata = self._values(header, values)
        header.require(count, 24, "tensors")  # at least a name's length, the number of dimensions, a type, an offset
        rows = []
        for _ in range(count):
            name, ndim = header.text(), header.number("I")
            if ndim > 4:
                raise Damaged(f"says that {shown(name)} has {ndim:,} dimensions")
            shape = tuple(header.numbers(ndim, "Q")[::-1])
            rows.append((name, shape, header.number("I"), header.number("Q")))
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment & (alignment - 1):
            raise Damaged(f"has general.alignment {quoted(alignment)}, which is not a power of two")
        entries: dict[str, Stored] = {}
        data = end = padded(header.at, alignment)
        for name, shape, number, offset in rows:
            if name in entries:
                raise Damaged(f"has a directory with {shown(name)} twice")
            kind = self._kind(name, number)
            if not countable(shape) or (shape[-1] if shape else 1) % kind.block:
                raise Damaged(f"has a directory that contradicts itself about {shown(name)}: {kind.name} {quoted(list(shape))}")
            start = padded(end, alignment)
            if data + offset != start:
                fault = "overlaps the tensor before it" if data + offset < start else "leaves a gap before it"
                raise Damaged(f"has a directory in which {shown(name)} {fault}")
            entries[name] = Stored(kind.dtype, shape, start, kind)
            end = entries[name].end
        if rows and not end <= size <= padded(end, alignment):
            raise Damaged(f"has {size:,} bytes where its directory says {end:,}")
        return entries

    def _values(self, header: "_Header", count: int) -> dict[str, Any]:
        header.require(count, 13, "metadata values")  # at least a name's length, a type, a byte
        values: dict[str, Any] = {}
        for _ in range(count):
            name = header.text()
            if name in values:
                raise Damaged(f"has metadata {shown(name)} twice")
            values[name] = header.value(name)
            if name == "general.architecture" and values[name] != "gpt2":  # the first entry: nothing behind it need be whole
                raise Refused(f"is of architecture {quoted(values[name])}, not 'gpt2'; this loader reads GPT-2 only")
        if values.get("split.count", 1) not in (0, 1):
            raise Refused(f"is one part of {quoted(values['split.count'])}; join them with llama.cpp's llama-gguf-split --merge")
        return values

    def _kind(self, name: str, number: int) -> Format:
        if number in KINDS:
            return KINDS[number]
        if number not in OTHER_KINDS:
            raise Damaged(f"has a directory that gives {shown(name)} the type {number:,}, which GGUF does not have")
        readable = ", ".join(kind.name for kind in KINDS.values())
        how = "fetch such a file, or make one with llama.cpp's llama-quantize --allow-requantize IN OUT f16"
        raise Refused(f"{shown(name)} is of type {OTHER_KINDS[number]}, and {readable} are read; {how}")

    def read(self, name: str, dtype: torch.dtype | None = None, *, mapped: bool = True) -> Tensor:
        entry, kind = self.entries[name], self.entries[name].kind
        if kind.block == 1:
            return super().read(name, dtype, mapped=mapped)
        tensor = torch.empty(entry.shape, dtype=dtype or entry.dtype)
        for first, part in enumerate(tensor.view(-1, kind.block).split(PIECE)):
            place = entry.start + first * PIECE * kind.size
            part.copy_(dequantised(self._file.tensor(place, (len(part), kind.size), torch.uint8, mapped=False)))
        return tensor


def dequantised(blocks: Tensor) -> Tensor:
    """Return the numbers of Q8_0 blocks (n, 34) of uint8 as float32 (n, 32): a scale in float16, then 32 times int8."""
    return blocks[:, 2:].view(torch.int8).float() * blocks[:, :2].contiguous().view(torch.float16).float()


def config_of(file: GGUFFile) -> GPT2Config:
    """Return the config as llama.cpp computes it: tanh GELU, scaled attention, tied head. Raises CheckpointError: not a GPT-2."""
    metadata = file.metadata
    embedding = file.entries.get("token_embd.weight")
    needed = ("general.architecture", *(key for field, key in CONFIG_KEYS.items() if field != "n_inner"))
    missing = [key for key in needed if key not in metadata]
    missing += [] if embedding and len(embedding.shape) == 2 else ["token_embd.weight"]
    if missing or embedding is None:
        raise CheckpointError(f"{file.path}: lacks {', '.join(missing)}; convert the checkpoint again")
    shared = metadata.get("gpt2.attention.head_count_kv", metadata[CONFIG_KEYS["n_head"]])
    if shared != metadata[CONFIG_KEYS["n_head"]]:
        raise CheckpointError(f"{file.path}: has {quoted(shared)} heads of keys, not as many as of queries; it is not a GPT-2")
    fields = {field: metadata[key] for field, key in CONFIG_KEYS.items() if key in metadata}
    fields |= {field: metadata.get(f"tokenizer.ggml.{field}") for field in ("bos_token_id", "eos_token_id")}
    if type(epsilon := fields["layer_norm_epsilon"]) is float:
        # 1e-05 for 9.999999747378752e-06
        fields["layer_norm_epsilon"] = float(str(torch.tensor(epsilon, dtype=torch.float32).numpy()))
    try:
        config = GPT2Config(vocab_size=embedding.shape[0], **fields)
    except InputError as error:
        what = str(error).removeprefix("config: ")
        raise CheckpointError(f"{file.path}: its metadata makes no GPT-2: {what}; convert the checkpoint again") from None
    return replace(config, n_inner=None) if config.n_inner == 4 * config.n_embd else config


class NoTokenizer(InputError):
    """There is no tokenizer, or not a byte-level BPE."""


def tokenizer_of(file: GGUFFile) -> LibraryTokenizer:
    """Return the byte-level BPE, without trailing padding tokens (``[PAD50300]``). Raises InputError: damaged. NoTokenizer."""
    metadata, where = file.metadata, f"{file.path}"
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get(PRE, MISSING)
    if model in (None, "none", "no_vocab"):
        raise NoTokenizer(f"{where}: carries no tokenizer; use the one of the checkpoint that it was made from")
    if model != "gpt2" or pre not in ("gpt-2", "default", MISSING):
        kind = f"{quoted(model)}, {quoted(pre)}"
        raise NoTokenizer(f"{where}: its tokenizer is {kind}, not GPT-2's byte-level BPE; pass ids instead")
    tokens, merges = _texts(file, "tokens"), _texts(file, "merges")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise InputError(f"{where}: has {len(tokens):,} tokens, and not as many types of tokens; convert the checkpoint again")
    end = len(tokens)
    while end and (types[end - 1] == UNUSED or (types[end - 1] == USER_DEFINED and tokens[end - 1] == f"[PAD{end - 1}]")):
        end -= 1
    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens[:end]):
        if vocab.setdefault(token, i) != i:
            raise InputError(f"{where}: {quoted(token)} is token {vocab[token]} and token {i}; convert the checkpoint again")
    if missing := [char for char in byte_level.byte_alphabet() if char not in vocab]:
        raise InputError(f"{where}: {len(missing)} of the 256 byte tokens are missing ({missing[0]!r} first); convert it again")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    special = [token for token, i in vocab.items() if types[i] in (CONTROL, UNUSED) or i == eos]
    matched = [token for token, i in vocab.items() if types[i] == USER_DEFINED and i != eos]
    bos = metadata.get("tokenizer.ggml.bos_token_id", 11)  # llama.cpp's, of a file that names none
    first, last = (tokens[i] if isinstance(i, int) and 0 <= i < len(vocab) else None for i in (bos, eos))
    before, behind = (metadata.get(f"tokenizer.ggml.add_{end_of}_token") is True for end_of in ("bos", "eos"))
    around = first if before else None, last if behind else None
    pairs, roles = bpe.as_pairs(merges, where), bpe.ends(last)
    tokenizer = bpe.made_bpe(vocab, pairs, special, matched, roles=roles, around=around, where=where)
    tokenizer.elsewhere = {} if pre == "gpt-2" else {PRE: str(pre)}
    return tokenizer


def _texts(file: GGUFFile, name: str) -> list[str]:
    texts = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(texts, list) or not all(isinstance(text, str) and len(text) <= TEXT_LIMIT for text in texts):
        raise InputError(f"{file.path}: holds no list of {name}, texts of up to {TEXT_LIMIT}; convert the checkpoint again")
    return texts


class _Header:
    """The bytes before the data, read on demand, within the file's size and the limit."""

    def __init__(self, file: MappedFile) -> None:
        self._file, self._bytes, self._elements, self.at = file, bytearray(), 0, 0

    def _reach(self, end: int) -> None:
        if end > self._file.size:
            raise Damaged(f"is cut short: {self._file.size:,} bytes")
        if end > METADATA_LIMIT:
            raise Damaged(f"has more than {METADATA_LIMIT:,} bytes before its data, and no GPT-2 needs as many")
        while len(self._bytes) < end:
            more = self._file.bytes(len(self._bytes), min(1 << 20, METADATA_LIMIT - len(self._bytes)))
            if not more:
                raise Damaged("was cut short while it was read")
            self._bytes += more

    def take(self, count: int) -> bytes:
        start, self.at = self.at, self.at + count
        if self.at > len(self._bytes):
            self._reach(self.at)
        return bytes(self._bytes[start : self.at])

    def numbers(self, count: int, letter: str) -> list[Any]:
        return list(struct.unpack(f"<{count}{letter}", self.take(count * struct.calcsize("<" + letter))))

    def number(self, letter: str) -> Any:
        return self.numbers(1, letter)[0]

    def require(self, count: int, size: int, what: str) -> None:
        """Refuse a count of items of at least ``size`` bytes each that exceeds the file's size or any GPT-2's."""
        if count * size > self._file.size - self.at:
            raise Damaged(f"claims {count:,} {what}, and has {self._file.size:,} bytes")
        self._elements += count
        if self._elements > ELEMENTS_LIMIT:
            raise Damaged(f"claims more than {ELEMENTS_LIMIT:,} values, and no GPT-2 has as many")

    def texts(self, count: int) -> list[str]:
        """Read ``count`` strings, each a length and UTF-8, in one loop without calls: vocabularies are long."""
        read, at, texts = self._bytes, self.at, []
        for _ in range(count):
            if at + 8 > len(read):
                self._reach(at + 8)
            end = at + 8 + int.from_bytes(read[at : at + 8], "little")
            if end > len(read):
                self._reach(end)
            try:
                texts.append(read[at + 8 : end].decode())
            except UnicodeDecodeError:
                raise Damaged(f"has a text that is not UTF-8 at byte {at + 8:,}") from None
            at = end
        self.at = at
        return texts

    def text(self) -> str:
        return self.texts(1)[0]

    def value(self, name: str) -> Any:
        kind = self.number("I")
        if array := kind == ARRAY:
            kind = self.number("I")
        if kind != STRING and kind not in SCALARS:
            raise Damaged(f"has metadata {shown(name)}{', an array' * array} of the type {kind:,}, which GGUF does not have")
        count = self.number("Q") if array else 1
        if array:
            size = struct.calcsize("<" + SCALARS.get(kind, "Q"))  # at least a string's length
            self.require(count, size, f"{'texts' if kind == STRING else 'values'} in {shown(name)}")
        values = self.texts(count) if kind == STRING else self.numbers(count, SCALARS[kind])
        return values if array else values[0]


def padded(at: int, alignment: int = ALIGNMENT) -> int:
    return -(-at // alignment) * alignment
