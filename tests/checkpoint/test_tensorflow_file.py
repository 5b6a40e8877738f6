"""TensorFlow's checkpoints: `data/tensorflow` has those of TensorFlow 2.21.0 (Saver v1, format V2; `slices` by its partitioner),
the others are of `tests/support/tf_bundle.py`."""

import hashlib
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tf_bundle
from support.checks import bits, refused, same
from support.hf_layouts import TINY
from support.tf_bundle import block, closed, entry, handle, header, sealed, table

from gpt2.checkpoint.containers.tensorflow_file import INDEX_LIMIT, TensorBundle, checkpoint_prefix
from gpt2.checkpoint.loading import load

DATA = Path(__file__).parent / "data" / "tensorflow"


def numbers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The numbers in TensorFlow's own files, drawn from each name."""
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


NUMBERS = bytes(range(1, 17))  # the data file of the invalid bundles: one tensor of four floats
HONEST = entry(1, [4], 0, 0, NUMBERS)
ROW = (b"a", HONEST)
FIRST = (b"", header())


ROWS = block([FIRST, ROW])


def test_the_honest_ancestor_of_the_lies_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.data-00000-of-00001").write_bytes(NUMBERS)
    (tmp_path / "m.index").write_bytes(table([FIRST, ROW]))
    assert bytes(bits(TensorBundle(tmp_path / "m").read("a")).tolist()) == NUMBERS
    (tmp_path / "m.index").write_bytes(table([FIRST, (b"a", entry(7, [4], 0, 0, NUMBERS))]))
    refused(lambda: TensorBundle(tmp_path / "m").read("a"), "a is of TensorFlow's dtype 7, which is not a weight's")


LISTED = [(b"b", handle(0, len(ROWS)))]
LIES = [
    (table([ROW]), "no header entry"),
    (table([FIRST, (b"b", HONEST), ROW]), "not in order"),
    (table([(b"", header(2)), ROW]), "claims 2 data files, and OpenAI's have one"),
    (table([(b"", header(endianness=1)), ROW]), "big-endian"),
    (table([FIRST, (b"a" * 513, HONEST)]), "a name of 513 bytes"),
    (table([FIRST, ROW, (b"b", entry(1, [1], 0, 12, NUMBERS[12:]))]), "b overlaps"),
    (table([FIRST, (b"a", entry(1, [2**47, 2**47], 0, 0, NUMBERS))]), "contradicts itself about a"),
    (table([FIRST, (b"a", entry(1, [4], 0, 99, NUMBERS))]), "m.data-00000-of-00001: is cut short"),
    (closed(sealed(ROWS, 1), LISTED), "compressed"),
    (closed(sealed(ROWS), [*LISTED, (b"c", handle(0, len(ROWS)))]), "overlap"),
    (closed(sealed(ROWS)[:-1] + b"\0", LISTED), "checksum of the block at byte 0"),
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
    for at in range(0, len(honest), 151):
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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('all_model_checkpoint_paths: "model-7"\nmodel_checkpoint_path: "model-9"', "model-9"),
        ('model_checkpoint_path: "/home/me/runs/model-7"', "model-7"),
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
    ("change", "says"), [({"n_head": None}, "does not say n_head"), ({"n_layer": 3}, "config says n_layer 3, the tensors 2")]
)
def test_hparams_that_are_none_are_refused(tmp_path: Path, change: Any, says: str) -> None:
    """No tensor's shape shows the number of heads: with a wrong one the model loads and writes nonsense."""
    tf_bundle.openai(tmp_path, TINY)
    file = tmp_path / "hparams.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    refused(lambda: load(str(tmp_path)), says, str(tmp_path))
