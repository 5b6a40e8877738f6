"""The safetensors reader against the safetensors library, and against invalid files."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from support.checks import random_bits, refused, same
from support.hf_layouts import sharded, weights, write_weights

from gpt2.checkpoint.containers import HEADER_LIMIT, read_json
from gpt2.checkpoint.containers.safetensors_file import DTYPES, SafetensorsFile
from gpt2.checkpoint.files import open_weights


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def row(start: int, end: int, shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


def test_reads_what_the_library_reads(tmp_path: Path) -> None:
    """Possible bugs: a wrong dtype, or a wrong scalar, empty tensor, or tensor at an odd byte."""
    pick, path = random.Random(1), tmp_path / "a.safetensors"
    mapped_once = unaligned_once = 0
    for _ in range(250):
        names = [pick.choice(["ä b", "h.{}.x", "{}", "\n{}"]).format(n) + str(n) for n in range(pick.randint(0, 6))]
        tensors = {name: random_bits(pick, pick.choice(list(DTYPES.values()))) for name in names}
        write_weights(path, tensors, start=pick.randrange(8))
        file = SafetensorsFile(path)
        with safe_open(path, "pt") as theirs:
            assert set(theirs.keys()) == set(file.entries) == set(tensors)
            for name in tensors:
                for mapped in (True, False):
                    tensor = file.read(name, mapped=mapped)
                    assert tensor.is_contiguous()
                    assert same(tensor, theirs.get_tensor(name))
                    assert same(tensor, tensors[name])
                entry = file.entries[name]
                mapped_once += entry.start % entry.dtype.itemsize == 0
                unaligned_once += entry.start % entry.dtype.itemsize != 0
    assert mapped_once > 100
    assert unaligned_once > 100


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"a": row(0, 16) | {"dtype": "F8_E4M3", "shape": [16]}}, "dtype 'F8_E4M3'"),
        ({"a": row(0, 16), "b": row(16, 16, [0, 2**62])}, "a shape that is too large"),
        ({"a": ["F32", [4], [0, 16]]}, "in an unknown form"),  # the library reads both, and ours ended in a TypeError
        ({"a\n\x1b[2J": row(4, 16)}, r"`a\n\x1b[2J`"),
        # It is parsed as JSON, which takes many times its size in memory.
        ((b"{}", b"", 2**63), "claims a header"),
        ((b"{}", b"", HEADER_LIMIT), "the safetensors library refuses"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_lying_header_is_refused(tmp_path: Path, header: Any, says: str) -> None:
    """What the library accepts and no GPT-2 has, and what would take memory before the library looks at it."""
    path = tmp_path / "lie.safetensors"
    path.write_bytes(raw(*header) if isinstance(header, tuple) else raw(header, bytes(16)))
    refused(lambda: SafetensorsFile(path), says, str(path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw.pop("weight_map"), "no weight_map"),
        (lambda raw: raw.update(weight_map={}), "no weight_map"),
        (lambda raw: raw["weight_map"].update({"transformer.wte.weight": ["a"]}), "no weight_map"),
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
    """A shard of another revision, or a path that leaves the folder, must be refused."""
    sharded(tmp_path)
    assert len(open_weights(tmp_path)) == 28
    raw = json.loads((index := tmp_path / "model.safetensors.index.json").read_text())
    change(raw)
    index.write_text(json.dumps(raw))
    refused(lambda: open_weights(tmp_path), says, str(tmp_path))


def test_shards_that_hold_one_tensor_twice_are_refused(tmp_path: Path) -> None:
    """Otherwise the tensor that is read last would win, without an error."""
    sharded(tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    shards[1].write_bytes(shards[0].read_bytes())
    refused(lambda: open_weights(tmp_path), "is also in model-00001-of-00003.safetensors")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1]", b"[" * 100_000])
def test_json_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    """Invalid JSON: half a config, or gigabytes."""
    (tmp_path / "config.json").write_bytes(content)
    refused(lambda: read_json(tmp_path / "config.json"), "config.json")
    refused(lambda: read_json(tmp_path / "none.json"), "none.json", "No such file")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ([], "the folder is empty"),
        (["rust_model.ot", "model.onnx"], "model.onnx, rust_model.ot cannot be opened; give the safetensors"),
        ([f"m-{n:05}-of-00002.bin" for n in (1, 2)], "are parts of one model, told by an index: fetch m.bin.index.json too"),
        (["ckpt.pt", "best.pt"], "best.pt, ckpt.pt could each be it, give one of them"),
        (["a\nb\x1b[2J", "c"], "the folder holds 'a\\nb\\x1b[2J', c"),
        ([f"f{n}" for n in range(9)], "f0, f1, f2, f3, f4, f5 and 3 more"),
        (["step-9/model.safetensors", "step-10/model.safetensors", "recipe.json"], "/step-10"),
        (["step-10/model.safetensors", "best/model.safetensors"], "/best"),
        (["checkpoint-9/model.safetensors", "checkpoint-10/model.safetensors"], "/checkpoint-10"),
        (["refs/main", "snapshots/0a/model.safetensors"], "of the Hub's cache, give"),
        (["step-10/progress.json", "best/progress.json"], "the folder holds best, step-10"),
    ],
)
def test_a_folder_without_weights_says_what_it_holds(tmp_path: Path, names: list[str], says: str) -> None:
    """Two common mistakes: a folder with `.bin` only, or the folder of a run instead of its `best/`."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    refused(lambda: open_weights(tmp_path), says, f"{tmp_path}: no model.safetensors there")


def test_one_file_comes_before_an_index(tmp_path: Path) -> None:
    """transformers prefers the single file too: otherwise both would load different weights from one folder."""
    sharded(tmp_path, seed=1)
    write_weights(tmp_path / "model.safetensors", weights(seed=2))
    assert {file.path.name for file in open_weights(tmp_path).values()} == {"model.safetensors"}
