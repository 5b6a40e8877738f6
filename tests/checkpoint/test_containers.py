"""Tests of every container of weights: memory mapping, damage, and files whose content does not match their name."""

import gc
import gzip
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support import forks, gguf_layouts, hf_layouts, tf_bundle, torch_layouts
from support.checks import PROC, mapped, refused
from support.commands import ASSET
from torch import Tensor

import gpt2
from gpt2.checkpoint import containers
from gpt2.checkpoint.containers.gguf_file import GGUFFile
from gpt2.checkpoint.containers.safetensors_file import SafetensorsFile
from gpt2.checkpoint.containers.tensorflow_file import TensorBundle
from gpt2.checkpoint.containers.torch_file import TorchFile


class Kind(NamedTuple):
    """``write(path, tensors)`` writes a file with another library, ``read(path)`` opens it with ours."""

    write: Callable[[Path, dict[str, Tensor]], object]
    read: Callable[[Path], Any]
    data: str = ""  # suffix of the file that holds the data
    directory: str = ""  # suffix of the file that is opened first


KINDS = {
    "safetensors": Kind(partial(hf_layouts.write_weights, start=0), SafetensorsFile),
    "torch": Kind(torch_layouts.save, TorchFile),
    "torch before 1.6": Kind(partial(torch_layouts.save, zipped=False), TorchFile),
    "gguf": Kind(gguf_layouts.write_tensors, GGUFFile),
    "tensorflow": Kind(tf_bundle.write, TensorBundle, ".data-00000-of-00001", ".index"),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def data_file(kind: Kind, path: Path) -> Path:
    return path.with_name(path.name + kind.data)


def test_writing_to_a_tensor_leaves_the_file_alone(kind: Kind, path: Path) -> None:
    """Writing to a tensor must not change the file: with a shared mapping, training would write to the checkpoint."""
    kind.write(path, {"a": torch.ones(3000)})
    before, again = data_file(kind, path).read_bytes(), kind.read(path)
    file = kind.read(path)
    tensor = file.read("a")
    tensor.mul_(5)
    assert tensor.sum() == 15_000
    file.read("a")  # TensorFlow's checksum no longer fits
    assert data_file(kind, path).read_bytes() == before
    assert again.read("a").sum() == kind.read(path).read("a").sum() == 3000


def test_directory_and_data_are_of_one_file(kind: Kind, path: Path) -> None:
    """A training run may rename a new checkpoint over the one being loaded: the new data must not be read with the old header."""
    kind.write(path, {"a": torch.ones(4), "b": torch.ones(4)})
    file = kind.read(path)
    new = path.with_name("new")
    kind.write(new, {"x": torch.full((8,), 2.0)})
    os.replace(data_file(kind, new), data_file(kind, path))
    assert file.read("a").tolist() == file.read("b", mapped=False).tolist() == [1] * 4


def test_a_file_cut_while_open_is_refused(kind: Kind, path: Path) -> None:
    """At the end of a file `readinto` returns 0 for ever, and reading a missing page of a mapping ends the process."""
    kind.write(path, {"a": torch.ones(5000)})
    file = kind.read(path)
    os.truncate(data_file(kind, path), file.entries["a"].start + 5)
    for way in ({"mapped": False}, {"dtype": torch.float16}, {}):
        refused(lambda way=way: file.read("a", **way), "cut short while it was read", str(data_file(kind, path)))


@PROC
def test_a_mapped_tensor_lies_in_a_private_mapping_and_closes_its_file(kind: Kind, path: Path) -> None:
    """A "mapped" read must not copy, and must close its file descriptor."""
    kind.write(path, {"a": torch.ones(5000), "b": torch.ones(5000)})
    gc.collect()
    data, descriptors = data_file(kind, path), len(os.listdir("/proc/self/fd"))
    file = kind.read(path)
    copied = file.read("a", mapped=False)
    assert not mapped(data)
    a, b, aligned = file.read("a"), file.read("b"), file.entries["a"].start % 4 == 0

    def rights(tensor: Tensor) -> list[str]:
        return [rights for span, rights in mapped(data) if tensor.data_ptr() in span]

    assert aligned or kind is KINDS["torch before 1.6"]
    assert rights(a) == rights(b) == (["rw-p"] if aligned else [])
    assert rights(copied) == []
    del file, b
    assert a.sum() == 5000, "the mapping outlives the file object"
    del a
    assert not mapped(data)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_mapped_tensor_is_pickled_alone(kind: Kind, path: Path) -> None:
    """Views of one storage over the whole file: pickling a bias of 12 numbers must not write gigabytes."""
    kind.write(path, {"a": torch.ones(100_000), "b": torch.ones(3)})
    assert len(pickle.dumps(kind.read(path).read("b"))) < 3000


@pytest.mark.parametrize("kind", [kind for name, kind in KINDS.items() if name != "safetensors"])
def test_a_file_that_cannot_be_mapped_is_read(kind: Kind, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network and FUSE file systems do not support mmap. (Then the safetensors library reads nothing.)"""

    def no_mmap(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr("mmap.mmap", no_mmap)
    kind.write(path, {"a": torch.arange(5.0)})
    assert kind.read(path).read("a").tolist() == [0, 1, 2, 3, 4]


def test_a_file_cut_anywhere_is_refused(kind: Kind, path: Path) -> None:
    """A download that was cut at any byte: in a count, a name, between two tensors, or in a zip's directory."""
    kind.write(path, {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.float16)})
    padding = kind.write is gguf_layouts.write_tensors  # the last tensor's padding may be missing
    for file in {path.with_name(path.name + end) for end in (kind.directory, kind.data)}:
        whole = file.read_bytes()
        end = max(entry.end for entry in kind.read(path).entries.values()) if padding else len(whole)
        for size in sorted({*range(0, end, 3), *range(max(0, end - 60), end)}):
            file.write_bytes(whole[:size])
            refused(lambda: kind.read(path), str(file), " again")
        file.write_bytes(whole)
    assert len(kind.read(path).entries) == 2


def test_a_file_that_cannot_be_opened_is_named(kind: Kind, path: Path) -> None:
    opened = path.with_name(path.name + kind.directory)
    refused(lambda: kind.read(path), f"{opened}: cannot be read (No such file or directory)")
    opened.mkdir()
    refused(lambda: kind.read(path), f"{opened}: cannot be read (Is a directory)")


TEXT = b"To be, or not to be, that is the question:\n" * 9
OTHER_FILES: list[tuple[str, bytes, str]] = [
    *((name, b"<!DOCTYPE html><html><body>Not found</body></html>", "a web page") for name in KINDS if name != "gguf"),
    *((name, b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull") for name in KINDS if name != "gguf"),
    *((name, b"GGUF\x03\0\0\0\0\0\0\0", "GGUF") for name in ("safetensors", "torch")),
    *((name, b"", "is empty") for name in ("safetensors", "torch", "gguf", "tensorflow")),
    ("safetensors", TEXT, "claims a header"),
    ("torch", b"\0" * 40, "neither a zip archive nor a pickle"),
    ("torch", gzip.compress(bytes(99)), "gzip"),
    ("torch", pickle.dumps({"a": 1}), "a pickle, but not one of torch.save"),
    ("torch", torch_layouts.pickled(torch_layouts.MAGIC) + torch_layouts.pickled(7), "version 7"),
    ("gguf", b"GGU", "is cut short: 3 bytes"),
    ("tensorflow", b"PK\x03\x04" + bytes(100), "torch.save"),
]


@pytest.mark.parametrize(("name", "content", "says"), OTHER_FILES, ids=[f"{name}: {says}" for name, _, says in OTHER_FILES])
def test_a_file_of_another_kind_is_named(name: str, content: bytes, says: str, path: Path) -> None:
    """A saved web page, or a git-lfs pointer, was reported as a "header of 7,310,577,365,312,239,177 bytes"."""
    opened = path.with_name(path.name + KINDS[name].directory)
    opened.write_bytes(content)
    refused(lambda: KINDS[name].read(path), says, str(opened))


# Cut the file right after the model was loaded from it, as a download in place would.
COMMAND = """
import os, sys
from pathlib import Path
cut = sys.argv.pop(1)  # never the embedded model, of which this is a copy
from gpt2.checkpoint.checkpoint import StoredCheckpoint
real = StoredCheckpoint.load
def load(checkpoint, *args, **settings):
    model = real(checkpoint, *args, **settings)
    if str(checkpoint.path) == cut:
        os.truncate(Path(cut, "model.safetensors"), 100_000)
    return model
StoredCheckpoint.load = load
from gpt2.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


COMMANDS = "generate MODEL --prompt O", "compare MODEL shakespeare-mini --tokens 16", "export MODEL OUT"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_cut_short_is_one_line(tmp_path: Path, command: str) -> None:
    """The process ended with "Bus error" in a shell, and with no message under a scheduler."""
    model, words = shutil.copytree(ASSET, tmp_path / "model"), command.split()
    places = {"MODEL": str(model), "OUT": str(tmp_path / "out")}
    err = forks.run("-c", COMMAND, model, *(places.get(word, word) for word in words), status=2).stderr
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith(f"gpt2 {words[0]}: ")
    assert "model.safetensors" in last


def test_a_file_that_is_whole_or_gone_or_longer_is_none(tmp_path: Path) -> None:
    """Negative controls: a mapping stays valid when the file is deleted, replaced or made longer."""
    model = shutil.copytree(ASSET, tmp_path / "model")
    loaded = gpt2.load(str(model))
    expected = gpt2.generate(loaded, [1, 2, 3], 5, temperature=0)
    weights = model / "model.safetensors"
    with weights.open("ab") as file:
        file.write(b"more")
    containers.require_whole_files()
    weights.unlink()
    weights.write_bytes(b"another")
    containers.require_whole_files()
    assert gpt2.generate(loaded, [1, 2, 3], 5, temperature=0) == expected
