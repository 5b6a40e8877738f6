"""The reader of GGUF files against the `gguf` package, and against invalid files."""

import dataclasses
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from support.checks import refused, same
from support.gguf_layouts import BF16, F16, F32, Q8_0, WIDE, add_tokenizer, gguf_name, write, write_tensors
from support.hf_layouts import TINY

from gpt2.checkpoint.containers import gguf_file
from gpt2.checkpoint.containers.gguf_file import GGUFFile, NoTokenizer, config_of, tokenizer_of
from gpt2.checkpoint.loading import load
from gpt2.data.bpe import train_bpe
from gpt2.data.library import LibraryTokenizer
from gpt2.errors import CheckpointError, InputError

KINDS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16, Q8_0: torch.float32}


@pytest.fixture(scope="module")
def tokenizer() -> LibraryTokenizer:
    """300 tokens: bytes, merges, and the end of the text."""
    return train_bpe("to be or not to be that is the question whether tis nobler in the mind to suffer " * 3, WIDE.vocab_size)


def without(name: str) -> Callable[[gguf.GGUFWriter], Any]:
    """A change that removes a value from a file."""
    return lambda writer: writer.kv_data[0].pop(name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_reads_what_the_package_reads(tmp_path: Path, tokenizer: LibraryTokenizer, kind: gguf.GGMLQuantizationType) -> None:
    """Reversed dimensions, a wrong base for offsets, or a value of the wrong width give other weights without an error."""
    write(tmp_path / "a.gguf", kind=kind, tokenizer=tokenizer)
    ours, theirs = GGUFFile(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "a.gguf")
    assert list(ours.entries) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        entry, values = ours.entries[tensor.name], torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        assert (entry.shape, entry.dtype) == (values.shape, KINDS[tensor.tensor_type])
        for way in ({}, {"mapped": False}):
            assert same(ours.read(tensor.name, **way), values.to(entry.dtype))
            assert same(ours.read(tensor.name, torch.float64, **way), values.double())
            assert same(ours.read(tensor.name, torch.bfloat16, **way), values.bfloat16())
    assert ours.metadata == {name: field.contents() for name, field in theirs.fields.items() if name[:5] != "GGUF."}


def test_every_kind_of_metadata(tmp_path: Path) -> None:
    """A bool read as four bytes shifts all that follows."""
    values = {
        "x.u8": (255, "uint8"), "x.i8": (-128, "int8"), "x.u16": (65535, "uint16"), "x.i16": (-32768, "int16"),
        "x.u32": (2**32 - 1, "uint32"), "x.i32": (-(2**31), "int32"), "x.u64": (2**64 - 1, "uint64"),
        "x.i64": (-(2**63), "int64"), "x.f32": (0.5, "float32"), "x.f64": (0.1, "float64"), "x.t": (True, "bool"),
        "x.f": (False, "bool"), "x.s": ("ä\n☃", "string"), "x.a": ([1, -2, 3], "array"), "x.b": ([True, False], "array"),
        "x.c": ([0.5, -1.5], "array"), "x.d": (["", "ß", "long " * 50], "array"),
    }  # fmt: skip

    def change(writer: gguf.GGUFWriter) -> None:
        for name, (value, kind) in values.items():
            getattr(writer, f"add_{kind}")(name, value)

    held = write(tmp_path / "a.gguf", TINY, change=change)
    file = GGUFFile(tmp_path / "a.gguf")
    assert {name: file.metadata[name] for name in values} == {name: value for name, (value, _) in values.items()}
    assert all(type(file.metadata[name]) is type(value) for name, (value, _) in values.items())
    assert same(file.read("token_embd.weight"), held["wte.weight"])


@pytest.mark.parametrize("alignment", [1, 2, 8, 64, 4096])
def test_every_alignment(tmp_path: Path, alignment: int) -> None:
    """A tensor at an odd byte cannot be mapped; an alignment other than 32 moves every tensor."""
    truth = {"ln_f.weight": torch.ones(12), "wte.weight": torch.randn(61, 3), "wpe.weight": torch.randn(1, 7)}
    odd = []
    for length in range(1, 5):  # one of these puts the data at an odd byte, if the alignment allows it

        def change(writer: gguf.GGUFWriter, length: int = length) -> None:
            writer.add_custom_alignment(alignment)
            writer.add_string("x", "y" * length)

        held = write(tmp_path / "a.gguf", TINY, F16, truth=truth, change=change)
        file = GGUFFile(tmp_path / "a.gguf")
        odd += [entry for entry in file.entries.values() if entry.start % entry.dtype.itemsize]
        assert all(same(file.read(gguf_name(name)).float(), tensor) for name, tensor in held.items())
    assert bool(odd) == (alignment < 4)


def test_q8_0_is_exact_for_every_scale_and_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Possible bugs: subnormal scales flushed to zero, -128 clamped, a block split between two pieces."""
    monkeypatch.setattr(gguf_file, "PIECE", 37)
    scales = np.arange(65536, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    scales = scales[np.isfinite(scales.view(np.float16)).ravel()]  # 63,488 of them
    numbers = ((np.arange(len(scales) * 32, dtype=np.uint32) * 2654435761) >> 13).astype(np.uint8).reshape(-1, 32)
    assert len(set(numbers.ravel())) == 256
    blocks = np.concatenate([scales, numbers], axis=1)[::11].copy()
    write_tensors(tmp_path / "a.gguf", {"q": torch.from_numpy(blocks.reshape(4, -1))}, Q8_0)
    read = GGUFFile(tmp_path / "a.gguf").read("q")
    assert same(read, torch.from_numpy(dequantize(blocks.reshape(4, -1), Q8_0).copy()))
    exact = blocks[:, :2].copy().view(np.float16).astype(np.float64) * blocks[:, 2:].view(np.int8)
    assert torch.equal(read.double().view(-1), torch.from_numpy(exact).view(-1))


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    """A file with the vocabulary only, as in llama.cpp's tests, or an embedding of one dimension."""
    for truth in ({}, {"wte.weight": torch.ones(32)}):
        write(tmp_path / "a.gguf", truth=truth)
        refused(lambda: config_of(GGUFFile(tmp_path / "a.gguf")), "lacks token_embd.weight; ")


def vocabulary(tokenizer: LibraryTokenizer, tokens: list[str] | None = None, types: list[int] | None = None) -> Callable:
    """A change of the file: another list of tokens or types."""

    def change(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, tokenizer, dataclasses.replace(WIDE, vocab_size=tokenizer.n_vocab))
        if tokens is not None:
            writer.kv_data[0].pop("tokenizer.ggml.tokens")
            writer.add_token_list(tokens)
        if types is not None:
            writer.kv_data[0].pop("tokenizer.ggml.token_type")
            writer.add_token_types(types)

    return change


def test_tokens_that_only_fill_up_are_left_out(tmp_path: Path, tokenizer: LibraryTokenizer) -> None:
    """The tokenizer must not encode `[PAD300]` as a token. Converters of 2023 mark padding user-defined, newer ones unused."""
    padded = dataclasses.replace(WIDE, vocab_size=320)
    write(tmp_path / "a.gguf", padded, tokenizer=tokenizer)
    assert tokenizer_of(GGUFFile(tmp_path / "a.gguf")).fingerprint == tokenizer.fingerprint
    tokens = [*tokenizer.vocab, *(f"[PAD{i}]" for i in range(300, 320))]
    change = vocabulary(tokenizer, tokens, [1] * 299 + [3] + [4] * 20)
    write(tmp_path / "b.gguf", padded, change=change)
    assert tokenizer_of(GGUFFile(tmp_path / "b.gguf")).fingerprint == tokenizer.fingerprint
    # An added token and a gap in the middle are not padding; both keep their ids.
    write(tmp_path / "d.gguf", padded, change=vocabulary(tokenizer, [*tokenizer.vocab, "smile"], [1] * 299 + [3, 4]))
    assert added(tmp_path / "d.gguf") == ({"<|endoftext|>": 299}, {"smile": 300})
    tokens = [*tokenizer.vocab, "hole", "smile", "[MASK]"]
    write(tmp_path / "c.gguf", padded, change=vocabulary(tokenizer, tokens, [1] * 299 + [3, 5, 4, 3]))
    assert added(tmp_path / "c.gguf") == ({"<|endoftext|>": 299, "hole": 300, "[MASK]": 302}, {"smile": 301})


def added(file: Path) -> tuple[dict[str, int], dict[str, int]]:
    tokenizer = tokenizer_of(GGUFFile(file))
    return dict(tokenizer.special_tokens), tokenizer.matched


def test_an_old_tokenizer_comes_back(tmp_path: Path, tokenizer: LibraryTokenizer) -> None:
    """Another order of merges, or a lost special token, gives other ids. The pre-tokenizer had no name before 2024."""

    def old(writer: gguf.GGUFWriter) -> None:
        add_tokenizer(writer, tokenizer, WIDE)
        without("tokenizer.ggml.pre")(writer)
        without("tokenizer.ggml.token_type")(writer)

    write(tmp_path / "a.gguf", change=old)
    found = tokenizer_of(GGUFFile(tmp_path / "a.gguf"))
    assert (found.fingerprint, found.eot) == (tokenizer.fingerprint, 299)


EPSILON, GGML = "gpt2.attention.layer_norm_epsilon", "tokenizer.ggml."


@pytest.mark.parametrize(
    ("reads", "change", "says", "error"),
    [
        (config_of, without("gpt2.context_length"), "lacks gpt2.context_length; ", CheckpointError),
        (config_of, lambda w: w.add_string("general.architecture", "llama"), "architecture 'llama', not 'gpt2'", CheckpointError),
        (config_of, lambda w: w.add_head_count(5), "n_embd 64 is not divisible by n_head 5", CheckpointError),
        (config_of, lambda w: w.add_head_count_kv(2), "has 2 heads of keys", CheckpointError),
        (config_of, lambda w: w.add_float32(EPSILON, float("nan")), "layer_norm_epsilon is nan", CheckpointError),
        (tokenizer_of, lambda w: w.add_string(GGML + "model", "none"), "carries no tokenizer", NoTokenizer),
        (tokenizer_of, lambda w: w.add_string(GGML + "model", "llama"), "'llama', 'gpt-2', not GPT-2's", NoTokenizer),
        (tokenizer_of, lambda w: w.add_string(GGML + "pre", "llama-bpe"), "'gpt2', 'llama-bpe', not GPT-2's", NoTokenizer),
        (tokenizer_of, without(GGML + "tokens"), "holds no list of tokens", InputError),
        (tokenizer_of, lambda w: w.add_array(GGML + "tokens", [1, 2]), "holds no list of tokens", InputError),
        (tokenizer_of, lambda w: w.add_array(GGML + "token_type", [1, 2]), "not as many types", InputError),
        (tokenizer_of, lambda w: w.add_array(GGML + "merges", ["a b c"]), "merge 0 is 'a b c'", InputError),
        (tokenizer_of, lambda w: w.add_array(GGML + "tokens", ["a"] * 300), "'a' is token 0 and token 1", InputError),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Duplicated key name")
def test_metadata_that_makes_no_model_or_tokenizer_is_refused(tmp_path: Path, tokenizer, reads, change, says, error) -> None:
    """Numbers of an untrusted file become sizes; the text gets other ids, or loading ends in a traceback."""

    def changed(writer: gguf.GGUFWriter) -> None:
        if reads is tokenizer_of:
            add_tokenizer(writer, tokenizer, WIDE)
        change(writer)

    path = tmp_path / "a.gguf"
    write(path, change=changed)
    refused(lambda: reads(GGUFFile(path)), says, str(path), error=error)
    if reads is config_of:
        refused(lambda: load(str(path)), says)


def header(tensors: bytes = b"", values: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + values + tensors


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def value(name: bytes, kind: int, content: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + content


def row(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def padded(content: bytes, more: int = 0) -> bytes:
    return content + bytes(-len(content) % 32 + more)


TRUE = padded(header(row(b"a", (3,)) + row(b"b", (), offset=32), value(b"k", 4, b"\7\0\0\0"), (2, 1)), 36)
LIES: list[tuple[bytes, str]] = [
    (header(version=4), "GGUF version 4"),
    (header(version=3 << 24), "big-endian byte order; fetch the little-endian file"),
    (header(counts=(0, 2**60)), "claims 1,152,921,504,606,846,976 metadata values"),
    (header(values=struct.pack("<Q", 2**62) + b"x" * 20, counts=(0, 1)), "is cut short"),
    (header(values=value(b"k", 9, struct.pack("<IQ", 8, 2**60)) + bytes(99), counts=(0, 1)), "texts in k, and has"),
    (header(values=value(b"k", 4, bytes(4)) * 2, counts=(0, 2)), "metadata k twice"),
    (header(values=value(b"general.alignment", 4, b"\3\0\0\0"), counts=(0, 1)), "general.alignment 3, which is not a power"),
    (header(values=value(b"split.count", 2, b"\3\0"), counts=(0, 1)), "is one part of 3; join them"),
    (padded(header(row(b"a", (4,)) + row(b"a", (4,), offset=32), counts=(2, 0)), 64), "a twice"),
    (padded(header(row(b"a", (2**63,)), counts=(1, 0)), 64), "contradicts itself about a"),
    (padded(header(row(b"a", (4,), offset=32), counts=(1, 0)), 64), "a leaves a gap before it"),
    (padded(header(row(b"a", (16,)) + row(b"b", (4,), offset=32), counts=(2, 0)), 96), "b overlaps the tensor before it"),
    (padded(header(row(b"a", (4,), kind=41), counts=(1, 0)), 64), "the type 41, which GGUF does not have"),
    (padded(header(row(b"\n\x1b[2J" * 500, (4,), kind=12), counts=(1, 0)), 64), "is of type Q4_K"),
    (TRUE[:-1], "bytes where its directory says"),
    (TRUE + bytes(29), "bytes where its directory says"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "says"), LIES, ids=[says[:40] for _, says in LIES])
def test_a_lie_is_refused_at_once(tmp_path: Path, content: bytes, says: str) -> None:
    """A count of 2**60 in a file of 100 bytes would loop for an hour or take all memory. (The gguf package does either.)"""
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        refused(lambda: GGUFFile(path), says, str(path))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_the_truth_is_accepted(tmp_path: Path) -> None:
    """Control of the test above."""
    path = tmp_path / "a.gguf"
    for content in (TRUE, TRUE + bytes(28)):  # the last tensor's padding is optional
        path.write_bytes(content)
        file = GGUFFile(path)
        assert file.metadata == {"k": 7}
        assert {name: tuple(file.read(name).shape) for name in file.entries} == {"a": (3,), "b": ()}
    path.write_bytes(header(version=2))
    assert GGUFFile(path).entries == {}


@pytest.mark.parametrize("kind", [kind for kind in gguf.GGMLQuantizationType if kind not in KINDS], ids=lambda kind: kind.name)
def test_other_types_are_refused_by_name(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Most GGUF files on the Hub are Q4_K: they are valid, but do not hold exact weights."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    (tmp_path / "a.gguf").write_bytes(padded(header(row(b"blk.0.x", (block,), kind), counts=(1, 0)), size))
    if kind.name in gguf_file.OTHER_KINDS.values():
        refused(lambda: GGUFFile(tmp_path / "a.gguf"), f"blk.0.x is of type {kind.name}, and F32, F16, Q8_0, BF16 are read")
    else:  # newer than this reader
        refused(lambda: GGUFFile(tmp_path / "a.gguf"), f"the type {kind.value}, which GGUF does not have")


def test_a_header_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 2 GB of empty texts would become 40 GB of Python objects."""
    path = tmp_path / "a.gguf"
    monkeypatch.setattr(gguf_file, "ELEMENTS_LIMIT", 2000)
    texts = value(b"k", 9, struct.pack("<IQ", 8, 1998)) + text("ä".encode()) * 1998
    path.write_bytes(header(values=texts, counts=(0, 1)))
    assert len(GGUFFile(path).metadata["k"]) == 1998
    path.write_bytes(header(values=texts + value(b"j", 9, struct.pack("<IQ", 0, 1)) + b"a", counts=(0, 2)))
    refused(lambda: GGUFFile(path), "claims more than 2,000 values")
    monkeypatch.setattr(gguf_file, "METADATA_LIMIT", 5000)
    path.write_bytes(header(values=value(b"k", 8, text(b" " * 5000)), counts=(0, 1)))
    refused(lambda: GGUFFile(path), "has more than 5,000 bytes before its data")
