"""TensorFlow's checkpoints: files that TensorFlow itself wrote, and invalid files.

TensorFlow 2.21.0 wrote the files under `data/tensorflow`, by `data/make_tensorflow.py`. `tests/support/tf_bundle.py` writes
all others, and a test here compares its bytes with TensorFlow's. TensorFlow is not a dependency. So we checked by hand that
TensorFlow 2.21.0 reads the files of that module, in one block and in many, and that our reader gives TensorFlow's bits for a
checkpoint of gpt2's full shape.
"""

import hashlib
import json
import random
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tf_bundle
from support.checks import bits, refused, same
from support.hf_layouts import TINY
from support.official_repositories import openai_vocabulary
from support.tf_bundle import block, closed, entry, field, handle, header, sealed, table

import gpt2.data
from gpt2.checkpoint.containers.tensorflow_file import (
    INDEX_LIMIT,
    TensorBundle,
    checkpoint_prefix,
)
from gpt2.checkpoint.loading import load

DATA = Path(__file__).parent / "data" / "tensorflow"


def numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The numbers that `make_tensorflow.py` drew."""
    drawn = hashlib.shake_128(name.encode()).digest(torch.Size(shape).numel())
    return torch.frombuffer(bytearray(drawn), dtype=torch.int8).double().reshape(shape) / 64


def gpt2_numbers() -> dict[str, torch.Tensor]:
    """The checkpoint `gpt2`: OpenAI's names and shapes at the sizes of TINY."""
    shapes = {tf_bundle.name_of(name): tensor.shape for name, tensor in tf_bundle.weights(TINY).items()}
    shapes = {name: (1, *shape) if name.endswith("/w") else tuple(shape) for name, shape in shapes.items()}
    return {name: numbers(name, shape).float() for name, shape in shapes.items()} | {"global_step": torch.tensor(1000)}


def test_reads_what_tensorflow_wrote() -> None:
    """TensorFlow wrote these files: our own writer could share the reader's bugs."""
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


def test_slices_that_tensorflow_wrote_are_refused() -> None:
    """The first slice must not be read as the whole variable."""
    refused(lambda: TensorBundle(DATA / "slices" / "model.ckpt"), "model/wte is stored in slices", "without a partitioner")


def test_the_writer_of_these_tests_writes_what_tensorflow_writes(tmp_path: Path) -> None:
    """Otherwise the other tests would show nothing about TensorFlow's files."""
    tf_bundle.write(tmp_path / "model.ckpt", gpt2_numbers())
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (DATA / "gpt2" / file.name).read_bytes(), file


NUMBERS = bytes(range(1, 17))  # the data file of the invalid bundles: one tensor of four floats
HONEST = entry(1, [4], 0, 0, NUMBERS)
ROW = (b"a", HONEST)
FIRST = (b"", header())


def fields(**changes: bytes) -> bytes:
    """A BundleEntryProto with some fields replaced."""
    parts = {
        "dtype": field(1, 1),
        "shape": field(2, field(2, field(1, 4))),
        "size": field(5, 16),
        "crc": tf_bundle.fixed32(6, tf_bundle.checksum(NUMBERS)),
    }
    return b"".join((parts | changes).values())


def one_block(content: bytes, compression: int = 0) -> bytes:
    return closed(sealed(content, compression), [(b"b", handle(0, len(content)))])


def restarts(*places: int) -> bytes:
    return b"".join(n.to_bytes(4, "little") for n in [*places, len(places)])


ROWS = block([FIRST, ROW])
HEADER_ENTRY = bytes([0, 0, len(header())]) + header()


def test_the_honest_ancestor_of_the_lies_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.data-00000-of-00001").write_bytes(NUMBERS)
    for honest in (table([FIRST, ROW]), table([FIRST, (b"a", fields())]), one_block(ROWS)):
        (tmp_path / "m.index").write_bytes(honest)
        assert bytes(bits(TensorBundle(tmp_path / "m").read("a")).tolist()) == NUMBERS
    (tmp_path / "m.index").write_bytes(table([FIRST, (b"a", fields(dtype=field(1, 7)))]))
    refused(lambda: TensorBundle(tmp_path / "m").read("a"), "a is of TensorFlow's dtype 7, which is not a weight's")


LIES = [
    (table([ROW]), "no header entry"),
    (table([FIRST, (b"b", HONEST), ROW]), "not in order"),
    (table([(b"", header(2)), ROW]), "claims 2 data files, and OpenAI's have one"),
    (table([(b"", header(endianness=1)), ROW]), "big-endian"),
    (table([FIRST, (b"a" * 513, HONEST)]), "a name of 513 bytes"),
    (table([FIRST, (b"a", HONEST + field(7, b""))]), "a is stored in slices"),
    (table([FIRST, (b"a", HONEST), (b"b", entry(1, [1], 0, 12, NUMBERS[12:]))]), "b overlaps"),
    (table([FIRST, (b"a", fields(shape=field(2, field(2, field(1, 2**47)) * 2)))]), "contradicts itself about a"),
    (table([FIRST, (b"a", fields(dtype=field(1, 99), size=field(5, 2**47)))]), "m.data-00000-of-00001: is cut short"),
    (one_block(ROWS, compression=1), "compressed"),
    (closed(sealed(ROWS), [(b"b", handle(0, len(ROWS))), (b"c", handle(0, len(ROWS)))]), "overlap"),
    (closed(sealed(ROWS)[:-1] + b"\0", [(b"b", handle(0, len(ROWS)))]), "checksum of the block at byte 0"),
    (bytes(INDEX_LIMIT + 1), "500,001 bytes long"),
]


def test_a_lying_index_is_refused(tmp_path: Path) -> None:
    """With valid checksums: two parameters in one place, reads past the end, sizes beyond the file."""
    (tmp_path / "m.data-00000-of-00001").write_bytes(NUMBERS)
    for index, says in LIES:
        (tmp_path / "m.index").write_bytes(index)
        refused(lambda: TensorBundle(tmp_path / "m"), says, str(tmp_path / "m."))


def test_a_flipped_bit_in_the_data_is_refused_wherever_it_is(tmp_path: Path) -> None:
    """Only the tensor with the flipped bit is refused."""
    tf_bundle.openai(tmp_path, TINY)
    prefix, data = tmp_path / "model.ckpt", tmp_path / "model.ckpt.data-00000-of-00001"
    truth = {name: bits(TensorBundle(prefix).read(name)) for name in TensorBundle(prefix).entries}
    pick, honest = random.Random(2), data.read_bytes()
    for at in range(0, len(honest), 23):
        data.write_bytes(honest[:at] + bytes([honest[at] ^ 1 << pick.randrange(8)]) + honest[at + 1 :])
        bundle = TensorBundle(prefix)
        (hit,) = [name for name, entry in bundle.entries.items() if entry.start <= at < entry.end]
        for arguments in ({}, {"mapped": False}, {"dtype": torch.float64}):
            refused(partial(bundle.read, hit, **arguments), f"{hit} is damaged", str(data))
        assert all(torch.equal(bits(bundle.read(name)), truth[name]) for name in truth if name != hit)


def test_a_data_file_that_is_missing_short_or_none_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index has a few kilobytes and is rarely cut; the 498 MB beside it often are. Their checksum is taken in pieces."""
    monkeypatch.setattr("gpt2.checkpoint.containers.tensorflow_file.PIECE", 1001)
    tf_bundle.write(tmp_path / "m", {"a": torch.arange(1000.0), "b": torch.ones(3)})
    assert TensorBundle(tmp_path / "m").read("a").sum() == 499_500
    data = tmp_path / "m.data-00000-of-00001"
    honest = data.read_bytes()
    for content, says in (
        (honest[:-1], "is cut short: 4,011"),
        (b"version https://git-lfs", "git lfs pull"),
        (b"<html>", "web page"),
    ):
        data.write_bytes(content)
        refused(lambda: TensorBundle(tmp_path / "m"), says, str(data))
    data.unlink()
    refused(lambda: TensorBundle(tmp_path / "m"), "No such file", str(data))


def test_the_largest_lie_takes_little_memory(tmp_path: Path) -> None:
    """20,000 names of ten bytes in the file that share 500 bytes with the previous one."""
    first = bytes([0, 0xF4, 3, 0]) + b"a" * 500
    names = b"".join(bytes([0xF4, 3, 6, 0]) + b"%06d" % n for n in range(20_000))
    (tmp_path / "m.index").write_bytes(one_block(HEADER_ENTRY + first + names + restarts(0)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(lambda: TensorBundle(tmp_path / "m"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # kilobytes


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('all_model_checkpoint_paths: "model-7"\nmodel_checkpoint_path: "model-9"', "model-9"),
        ('model_checkpoint_path: "/home/me/runs/model-7"', "model-7"),
        ('model_checkpoint_path: "C:\\\\runs\\\\model-7"', "model-7"),
        ('model_checkpoint_path: "../secret/model-8"', "no model-8.index is there"),
        ('model_checkpoint_path: "model-8"', "no model-8.index is there"),
        ("<html>", "names no checkpoint"),
    ],
)
def test_the_file_checkpoint_names_the_bundle(tmp_path: Path, text: str, found: str) -> None:
    """The newest of several is meant, wherever it was trained; nothing outside the folder is opened."""
    for place in (tmp_path / "model-7", tmp_path / "model-9", tmp_path.parent / "secret/model-8"):
        tf_bundle.write(place, {"a": torch.ones(1)})
    (tmp_path / "checkpoint").write_bytes(text.encode())
    if (tmp_path / f"{found}.index").exists():
        assert checkpoint_prefix(tmp_path) == tmp_path / found
    else:
        refused(lambda: checkpoint_prefix(tmp_path), found, str(tmp_path / "checkpoint"))


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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_head": None}, "does not say n_head"),
        ({"n_head": True}, "n_head must be int, found True"),
        ({"n_head": 10**400}, "n_head is 1000"),
        ({"n_layer": 3}, "config says n_layer 3, the tensors 2"),
    ],
)
def test_hparams_that_are_none_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    """No tensor's shape shows the number of heads: with a wrong one the model loads and writes nonsense."""
    tf_bundle.openai(tmp_path, TINY)
    file = tmp_path / "hparams.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused(lambda: load(str(tmp_path)), says, str(tmp_path))


def test_the_tokenizer_of_openais_folder_is_the_official_one(tmp_path: Path) -> None:
    """A folder as `download_model.py` fills it: its vocabulary has other file names than Hugging Face's."""
    for file in openai_vocabulary():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tf_bundle.openai(tmp_path)
    assert checkpoint_prefix(tmp_path) == tmp_path / "model.ckpt"
    tokenizer = gpt2.data.from_directory(tmp_path)
    assert tokenizer.n_vocab == 50257
    assert tokenizer.eot == 50256
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.decode([15496, 995]) == "Hello world"
