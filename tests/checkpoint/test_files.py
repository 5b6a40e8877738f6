"""The safetensors reader against the safetensors library, and against files that lie."""

import io
import json
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from support.hf_layouts import TINY, official, sharded, weights, write_config, write_weights

from gpt2.checkpoint.containers import HEADER_LIMIT, read_json
from gpt2.checkpoint.containers.safetensors_file import DTYPES, SafetensorsFile
from gpt2.checkpoint.files import open_weights
from gpt2.errors import CheckpointError

PROC = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")


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


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def row(start: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_reads_what_the_library_reads(tmp_path: Path) -> None:
    """A dtype under the wrong name, a scalar, an empty tensor, or data on an odd byte, read as something else."""
    pick, path = random.Random(1), tmp_path / "a.safetensors"
    mapped_once = unaligned_once = 0
    for _ in range(250):
        tensors = {}
        for number in range(pick.randint(0, 6)):
            shape = [pick.choice([0, 1, 2, 3, 7]) for _ in range(pick.randint(0, 4))]
            dtype = pick.choice(list(DTYPES.values()))
            raw = torch.tensor(list(pick.randbytes(torch.Size(shape).numel() * dtype.itemsize)), dtype=torch.uint8)
            values = raw % 2 if dtype is torch.bool else raw
            tensors[pick.choice(["ä b", "h.{}.x", "{}", "\n{}"]).format(number) + str(number)] = values.view(dtype).reshape(shape)
        write_weights(path, tensors, start=pick.randrange(8))
        file = SafetensorsFile(path)
        with safe_open(path, "pt") as theirs:
            assert set(theirs.keys()) == set(file.entries) == set(tensors)
            for name in tensors:
                expected = theirs.get_tensor(name)
                for mapped in (True, False):
                    tensor = file.read(name, mapped=mapped)
                    assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
                    assert tensor.is_contiguous()
                    assert torch.equal(bits(tensor), bits(expected))
                    assert torch.equal(bits(tensor), bits(tensors[name]))
                entry = file.entries[name]
                mapped_once += entry.start % entry.dtype.itemsize == 0
                unaligned_once += entry.start % entry.dtype.itemsize != 0
    assert mapped_once > 100
    assert unaligned_once > 100


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ([], "not a JSON object"),
        (b"", "not JSON"),
        (b" {}", "not a JSON object"),
        (b"{", "not JSON"),
        (b'{"a": \xff}', "not JSON"),
        (b'{"__metadata__": {"format": "\\ud800"}}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b'{"__metadata__": NaN}', "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "a": 0}', "occurs twice"),
        ({"__metadata__": {"format": 1}, "a": row(0, 16)}, "not text"),
        ({"__metadata__": "pt", "a": row(0, 16)}, "not text"),
        ({"a": 0}, "without dtype"),
        ({"a": [0]}, "without dtype"),
        ({"a": None}, "without dtype"),
        ({"a": {}}, "without dtype"),
        ({"a": {**row(0, 16), "data_offsets": [0]}}, "without dtype"),
        ({"a": {**row(0, 16), "data_offsets": [0, 16, 16]}}, "without dtype"),
        ({"a": {**row(0, 16), "data_offsets": None}}, "without dtype"),
        ({"a": {**row(0, 16), "shape": 4}}, "without dtype"),
        ({"a": {**row(0, 16), "shape": "4\n"}}, "contradicts itself"),
        ({"a": {**row(0, 16), "shape": {"4": 4}}}, "contradicts itself"),
        ({"a": {**row(0, 16), "shape": [4.0]}}, "contradicts itself"),
        ({"a": {**row(0, 16), "shape": [True, 4]}}, "contradicts itself"),
        ({"a": {**row(0, 16), "shape": [-2, -2]}}, "contradicts itself"),
        ({"a": {**row(0, 16), "shape": [2**63, 2]}}, "contradicts itself"),
        ({"a": {**row(0, 16), "shape": [5]}}, "contradicts itself"),
        ({"a": {**row(0, 0), "shape": [0, 2**47, 2**47]}}, "contradicts itself"),
        ({"a": {**row(0, 16), "shape": [3]}}, "contradicts itself"),
        ({"a": {**row(0, 16), "shape": [1] * 100_000}}, "contradicts itself"),
        ({"a": {**row(0, 16), "data_offsets": ["0", "16"]}}, "contradicts itself"),
        ({"a": {**row(0, 16), "data_offsets": [16, 0]}}, "contradicts itself"),
        ({"a": {**row(0, 16), "data_offsets": [-16, 0]}}, "contradicts itself"),
        ({"a": {**row(0, 16), "dtype": "F64"}}, "contradicts itself"),
        ({"a": {**row(0, 16), "dtype": "F8_E4M3"}}, "dtype 'F8_E4M3'"),
        ({"a": {**row(0, 16), "dtype": ["F32"]}}, "dtype ['F32']"),
        ({"a": {**row(0, 16), "dtype": "\x1b[2J\n"}}, "dtype"),
        ({"a": row(0, 12)}, "its header says"),
        ({"a": row(0, 20)}, "its header says"),
        ({"a": row(0, 2**47)}, "its header says"),
        ({"a": row(4, 16)}, "leaves a gap"),
        ({"a": row(0, 4), "b": row(8, 16)}, "leaves a gap"),
        ({"a": row(0, 12), "b": row(8, 16)}, "overlaps"),
        ({"a": row(0, 16), "b": row(0, 16)}, "overlaps"),
        ({"a": row(0, 16), "b": row(4, 8)}, "overlaps"),
        ({"a\n\x1b[2J": row(4, 16)}, "leaves a gap"),
        ({"a" * 1000: row(4, 16)}, "leaves a gap"),
        ({}, "its header says"),
    ],
)
def test_a_lying_header_is_refused(tmp_path: Path, header: Any, says: str) -> None:
    """Overlaps alias two parameters, gaps hide data, wrong offsets read past the end: none may reach memory."""
    path = raw_file(tmp_path / "lie.safetensors", header, bytes(16))
    begin = time.perf_counter()
    refused(lambda: SafetensorsFile(path), says, str(path))
    assert time.perf_counter() - begin < 3
    if "occurs twice" not in says and "F8_E4M3" not in says:  # where we are stricter, knowingly
        with pytest.raises(SafetensorError):
            safe_open(path, "pt")


def test_a_true_header_is_accepted(tmp_path: Path) -> None:
    """The control of the test above: its file without the lie."""
    file = SafetensorsFile(
        raw_file(tmp_path / "a", {"a": row(0, 12), "b": row(12, 16, []), "c": row(16, 16, [0, 2**40])}, bytes(16))
    )
    assert {name: file.read(name).shape for name in "ab"} == {"a": (3,), "b": ()}


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """A download that broke off, at every byte: in the length, in the header, in each tensor, one byte before the end."""
    path = write_weights(tmp_path / "a.safetensors", {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.float16)})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refused(lambda: SafetensorsFile(path), str(path), "fetch it again")
    path.write_bytes(whole + b"\0")
    refused(lambda: SafetensorsFile(path), "its header says")
    path.write_bytes(whole)
    assert len(SafetensorsFile(path).entries) == 2


def pickled(value: object, zipped: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\0" * 7, "only 7 bytes"),
        (b"\0" * 8, "not JSON"),
        (random.Random(0).randbytes(5000), "claims a header"),
        (b"To be, or not to be, that is the question:\n" * 9, "claims a header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 548105171\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
        (b"GGUF\x03\0\0\0\0\0\0\0", "GGUF"),
        ((2**63).to_bytes(8, "little") + b"{}", "claims a header"),
        ((HEADER_LIMIT + 1).to_bytes(8, "little") + b"{}" + b" " * HEADER_LIMIT, "claims a header"),
        ((HEADER_LIMIT).to_bytes(8, "little") + b"{}", "cut short"),
    ],
)
def test_what_is_not_safetensors_is_told_for_what_it_is(tmp_path: Path, content: bytes, says: str) -> None:
    """A page saved instead of a file, or a git-lfs pointer, reported as a "header of 7,310,577,365,312,239,177 bytes"."""
    (write_config(tmp_path) / "model.safetensors").write_bytes(content)
    refused(lambda: open_weights(tmp_path), says, str(tmp_path / "model.safetensors"))


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    """A shared mapping would train straight into the checkpoint."""
    path = write_weights(tmp_path / "a.safetensors", {"a": torch.ones(3000)}, start=0)
    before, again = path.read_bytes(), SafetensorsFile(path)
    tensor = SafetensorsFile(path).read("a")
    tensor.mul_(5)
    assert tensor.sum() == 15_000
    assert path.read_bytes() == before
    assert again.read("a").sum() == 3000


def test_header_and_data_are_of_one_file(tmp_path: Path) -> None:
    """A run that renames a better `best/` over the one being loaded: the new data under the old header."""
    path = write_weights(tmp_path / "a.safetensors", {"a": torch.ones(4), "b": torch.ones(4)}, start=0)
    file = SafetensorsFile(path)
    os.replace(write_weights(tmp_path / "new", {"x": torch.full((8,), 2.0)}, start=0), path)
    assert file.read("a").tolist() == file.read("b", mapped=False).tolist() == [1] * 4


def test_a_file_cut_while_open_is_refused(tmp_path: Path) -> None:
    """`readinto` returns 0 at the end of a file, for ever."""
    path = write_weights(tmp_path / "a.safetensors", {"a": torch.ones(4)})
    file = SafetensorsFile(path)
    os.truncate(path, path.stat().st_size - 5)
    refused(lambda: file.read("a", mapped=False), "cut short while it was read")
    refused(lambda: file.read("a"), "cut short while it was read")


@PROC
def test_a_mapped_tensor_lies_in_a_private_mapping_and_closes_its_file(tmp_path: Path) -> None:
    """A "mapped" read that copies; and descriptors that leak until the process may open no more."""
    path = write_weights(tmp_path / "a.safetensors", {"a": torch.ones(5000), "b": torch.ones(5000)}, start=0)
    descriptors = len(os.listdir("/proc/self/fd"))
    file = SafetensorsFile(path)
    a, b, copied = file.read("a"), file.read("b"), file.read("a", mapped=False)

    def lies_in(tensor: torch.Tensor) -> list[str]:
        rows = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
        spans = [(*(int(x, 16) for x in row[0].split("-")), row[1]) for row in rows]
        return [rights for start, end, rights in spans if start <= tensor.data_ptr() < end]

    assert lies_in(a) == lies_in(b) == ["rw-p"]
    assert lies_in(copied) == []
    del file, b
    assert a.sum() == 5000, "the mapping outlives the file object"
    del a
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_mapped_tensor_is_pickled_alone(tmp_path: Path) -> None:
    """Views of one storage over the whole file: saving a bias of 12 numbers would write gigabytes."""
    write_weights(tmp_path / "a.safetensors", {"a": torch.ones(100_000), "b": torch.ones(3)}, start=0)
    assert len(pickled(SafetensorsFile(tmp_path / "a.safetensors").read("b"), zipped=True)) < 3000


def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network and FUSE file systems have no mmap."""
    path = write_weights(tmp_path / "a.safetensors", {"a": torch.arange(5.0)}, start=0)

    def no_mmap(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr("gpt2.checkpoint.containers.mapped_file.mmap.mmap", no_mmap)
    assert SafetensorsFile(path).read("a").tolist() == [0, 1, 2, 3, 4]


@PROC
def test_an_unaligned_file_is_read_once(tmp_path: Path) -> None:
    """One read per tensor and none twice: the official gpt2 is 548 MB, from disk on a first load."""
    config = type(TINY)(vocab_size=5000, n_positions=64, n_embd=48, n_layer=2, n_head=3)
    official(tmp_path, config)
    files = open_weights(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size

    def count() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]

    overhead = -count() + count()
    before = count()
    tensors = {name: file.read(name) for name, file in files.items()}
    read = count() - before - overhead
    assert read == sum(tensor.nbytes for tensor in tensors.values())
    assert 0.99 * size < read < size


def rewrite(path: Path, change: Callable[[dict], object]) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw.pop("weight_map"), "no weight_map"),
        (lambda raw: raw.update(weight_map=[]), "no weight_map"),
        (lambda raw: raw.update(weight_map={}), "no weight_map"),
        (lambda raw: raw["weight_map"].update({"transformer.wte.weight": ["a"]}), "no weight_map"),
        (lambda raw: raw["weight_map"].update({"transformer.wte.weight": None}), "no weight_map"),
        (lambda raw: raw["weight_map"].update({"transformer.wte.weight": "../secret.safetensors"}), "no weight_map"),
        (lambda raw: raw["weight_map"].update({"transformer.wte.weight": "/etc/a.safetensors"}), "no weight_map"),
        (lambda raw: raw["weight_map"].update({"transformer.wte.weight": "pytorch_model.bin"}), "no weight_map"),
        (lambda raw: raw["weight_map"].update({"transformer.wte.weight": "model-9.safetensors"}), "No such file"),
        (lambda raw: raw["weight_map"].update({"transformer.wte.weight": "model-00002-of-00003.safetensors"}), "disagrees"),
        (lambda raw: raw["weight_map"].update({"a\nb": "model-00002-of-00003.safetensors"}), "disagrees"),
        (lambda raw: raw["weight_map"].pop("transformer.wte.weight"), "disagrees with its shards about transformer.wte.weight"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path, change: Callable, says: str) -> None:
    """A shard of another revision, or a path that leaves the folder."""
    sharded(tmp_path)
    assert len(open_weights(tmp_path)) == 28
    rewrite(tmp_path / "model.safetensors.index.json", change)
    refused(lambda: open_weights(tmp_path), says, str(tmp_path))


def test_shards_that_hold_one_tensor_twice_are_refused(tmp_path: Path) -> None:
    """The last one read would win, silently."""
    sharded(tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].write_bytes(shards[0].read_bytes())
    refused(lambda: open_weights(tmp_path), "is also in model-00001-of-00003.safetensors")


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(lambda: open_weights(tmp_path), "model-00002-of-00003.safetensors", "No such file")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000, b" " * (HEADER_LIMIT + 1)])
def test_json_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    """A config of half a page, or of gigabytes."""
    (tmp_path / "config.json").write_bytes(content)
    refused(lambda: read_json(tmp_path / "config.json"), "config.json")
    refused(lambda: read_json(tmp_path / "none.json"), "none.json", "No such file")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([], "the folder is empty"),
        (["tf_model.h5", "flax_model.msgpack"], "flax_model.msgpack, tf_model.h5 cannot be opened, convert"),
        (["ckpt.pt", "best.pt"], "best.pt, ckpt.pt could each be it, give one of them"),
        (["a\nb\x1b[2J", "c"], "the folder holds 'a\\nb\\x1b[2J', c"),
        ([f"f{n}" for n in range(9)], "f0, f1, f2, f3, f4, f5 and 3 more"),
        (["step-9/model.safetensors", "step-10/model.safetensors", "recipe.json"], "/step-10"),
        (["step-10/model.safetensors", "best/model.safetensors"], "/best"),
        (["step-10/progress.json", "best/progress.json"], "the folder holds best, step-10"),
    ],
)
def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path, names: list[str], says: str) -> None:
    """`.bin` only, or the folder of a run instead of the `best/` in it: the two that people give most."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    refused(lambda: open_weights(tmp_path), says, f"{tmp_path}: no model.safetensors there")


def test_one_file_comes_before_an_index(tmp_path: Path) -> None:
    """transformers prefers the single file too: otherwise the two would load different weights from one folder."""
    sharded(tmp_path, seed=1)
    write_weights(tmp_path / "model.safetensors", weights(seed=2))
    assert {file.path.name for file in open_weights(tmp_path).values()} == {"model.safetensors"}
