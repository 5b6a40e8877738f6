"""The reader of torch.save's files against torch.load, and against files that are invalid or would run code."""

import contextlib
import os
import pickle
import random
import re
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checks import PROC, all_same, random_bits, refused, same
from support.hf_layouts import TINY
from support.torch_layouts import VERSION, Called, Stored, legacy_of, nanogpt, pickled, save, zip_of

from gpt2.checkpoint.containers.safetensors_file import DTYPES
from gpt2.checkpoint.containers.torch_file import PICKLE_LIMIT, TorchFile

FORMS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
REBUILD = torch._utils._rebuild_tensor_v2
F32 = torch.FloatStorage


def holds(file: TorchFile, state: Any) -> bool:
    """Whether a file gives exactly this state dict by every way of reading."""
    read = {mapped: {name: file.read(name, mapped=mapped) for name in file.entries} for mapped in (True, False)}
    whole = all(tensor.is_contiguous() for tensors in read.values() for tensor in tensors.values())
    return whole and list(file.entries) == list(state) and all(all_same(tensors, state) for tensors in read.values())


def tensor(offset=0, shape=(2,), stride=(1,), *rest, kind=F32, key="0", count=2, device="cpu") -> Called:
    """The pickled description of a tensor of two floats, with any part replaced."""
    storage = Stored("storage", kind, key, device, count)
    return Called(REBUILD, storage, offset, shape, stride, *(rest or (False, OrderedDict())))


def random_tensor(pick: random.Random) -> torch.Tensor:
    tensor = random_bits(pick, dtype := pick.choice(list(DTYPES.values())))
    shape = tensor.shape
    match pick.randrange(6):
        case 0 if len(shape) >= 2:
            tensor = tensor.transpose(0, -1)
        case 1 if shape and shape[0] > 1:
            tensor = tensor[1:]
        case 2 if shape and shape[-1] > 2:
            tensor = tensor[..., 1::2]
        case 3 if dtype.is_floating_point:
            tensor = torch.nn.Parameter(tensor)
    return tensor


@FORMS
def test_reads_what_torch_reads(tmp_path: Path, zipped: bool) -> None:
    """A wrong dtype, a view's offset in bytes, or lost strides give other numbers without an error."""
    pick, path = random.Random(2), tmp_path / "a.pt"
    kinds: Counter[str] = Counter()
    for _ in range(120):
        state: dict[str, Any] = OrderedDict() if pick.random() < 0.5 else {}
        for number in range(pick.randint(1, 6)):
            tensor = random_tensor(pick)
            kinds["turned" if not tensor.is_contiguous() else "part" if tensor.storage_offset() else "whole"] += 1
            state[pick.choice(["ä b", "h.{}.x", "{}", "\n{}"]).format(number) + str(number)] = tensor
        state["tied"] = state[next(iter(state))]
        torch.save(state, path, _use_new_zipfile_serialization=zipped, pickle_protocol=pick.choice([2, 3, 4, 5]))
        file = TorchFile(path)
        assert holds(file, torch.load(path, weights_only=False))
        assert holds(file, state)
        for name, tensor in state.items():
            assert same(file.read(name, torch.float16), tensor.to(torch.float16).contiguous())
    assert min(kinds["turned"], kinds["part"], kinds["whole"]) > 15


def test_reads_what_torch_wraps_tensors_in(tmp_path: Path) -> None:
    """Parameters with attributes, tensors with attributes and newer dtypes are different calls in the pickle."""
    attributed, parameter = torch.randn(3), torch.nn.Parameter(torch.randn(2))
    attributed.tag, parameter.tag = "x", [1]
    state = {"a": attributed, "b": parameter, "c": torch.nn.Parameter(torch.randn(2), requires_grad=False)}
    for zipped in (True, False):
        assert holds(TorchFile(save(tmp_path / "a", state, zipped=zipped)), state)
    storage = Stored("storage", torch.UntypedStorage, "0", "cpu", 16)
    typed = Called(torch._utils._rebuild_tensor_v3, storage, 1, (3,), (1,), 0, {}, torch.float32)
    path = zip_of(tmp_path / "b", pickled({"a": typed}), {"0": torch.arange(4.0).numpy().tobytes()})
    assert holds(TorchFile(path), {"a": torch.tensor([1.0, 2, 3])})
    oldest = Called(torch._utils._rebuild_tensor, Stored("storage", torch.cuda.FloatStorage, "0", "cuda:0", 2), 0, (2,), (1,))
    assert holds(TorchFile(zip_of(path, pickled({"a": oldest}), {"0": bytes(8)})), {"a": torch.zeros(2)})


@FORMS
def test_reads_the_state_dict_of_a_module(tmp_path: Path, zipped: bool) -> None:
    """The pickle of a module's state dict sets the attribute `_metadata` last; it must not replace the value."""
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3)).state_dict()
    assert state._metadata
    assert holds(TorchFile(save(tmp_path / "a", state, zipped=zipped)), state)
    assert holds(TorchFile(save(tmp_path / "a", {"epoch": 1, "model": state}, zipped=zipped)), state)


def test_reads_files_of_python_2(tmp_path: Path) -> None:
    """Python 2 pickles text as bytes, and an OrderedDict as a list of pairs; checkpoints of 2019 have both."""
    pid = b"(U\x07storagectorch\nFloatStorage\nU\x01kU\x03cpuK\x02NtQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"K\x00K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n]\x85RtR"
    description = b"\x80\x02ccollections\nOrderedDict\n](](U\x03h.0" + tensor + b"ee\x85R."
    path = legacy_of(tmp_path / "a", description, {"k": (2, torch.tensor([1.0, 2]).numpy().tobytes())}, keys=["k"])
    assert holds(TorchFile(path), {"h.0": torch.tensor([1.0, 2])})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({}, "no tensors"),
        ({"model": {}}, "no tensor at model"),
        (torch.ones(1), "holds a tensor"),
        ({"b": 1, "_metadata\n": None}, "no tensor at b, '_metadata"),
        ({"one": {"wte.weight": torch.ones(1)}, "two": [{"gpt.wpe.weight": torch.ones(1)}]}, "under one, two.0"),
        ({"a": torch.ones(1).expand(4)}, "a is expanded"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "a is complex64"),
        ({"a": torch.ones(2).to(torch.float8_e4m3fn)}, "a is float8_e4m3fn"),
        ({"a": torch.ones(2, dtype=torch.complex64).conj().imag}, "a is a negated or conjugated view"),
        ({"a": torch.ones(2, 2).to_sparse()}, "a is of the kind sparse; save a plain tensor"),
        ({"a": torch.empty(2, device="meta")}, "a is of the kind meta"),
        ({}, "a is of the kind qtensor"),
    ],
)  # fmt: skip
@FORMS
def test_what_is_no_state_dict_of_dense_tensors_is_refused(tmp_path: Path, value: Any, says: str, zipped: bool) -> None:
    """Read as dense tensors, these would give other numbers or a later crash."""
    if says == "a is of the kind qtensor":
        with warnings.catch_warnings(action="ignore"):  # it is deprecated
            value = {"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}
    refused(lambda: TorchFile(save(tmp_path / "a", value, zipped=zipped)), says, str(tmp_path / "a"))


def unpickle(path: Path) -> None:
    pickle.loads(path.read_bytes())


run = partial(torch.load, weights_only=False)


def hostile_file(form: str, path: Path, evil: Any) -> Callable[[Path], Any]:
    """Write a hostile file; return a reader that would run its code."""
    good = {"a": torch.ones(2)}
    match form:
        case "zip" | "legacy":
            save(path, {**good, "b": evil}, zipped=form == "zip")
        case "bare":
            path.write_bytes(pickle.dumps(evil, protocol=2))
            return unpickle
        case "magic":
            head = [pickled(evil), pickled(VERSION), pickled({"little_endian": True})]
            legacy_of(path, pickled({}), {}, head=head)
            return unpickle
        case "keys":
            legacy_of(path, pickled({}), {}, keys=evil)
        case "device":  # a storage's id is a pickled value too
            zip_of(path, pickled({"a": tensor(device=evil)}), {"0": bytes(8)})
        case "hooks":
            zip_of(path, pickled({"a": tensor(0, (2,), (1,), False, evil)}), {"0": bytes(8)})
        case "state":
            zip_of(path, pickled({"a": Called(OrderedDict, state={"x": evil})}), {})
        case "key":
            zip_of(path, pickled({evil: 1}), {})
        case "optimizer":
            save(path, {"model": good, "optimizer": {"state": {0: {"step": evil}}}}, zipped=False)
    return run


PLACES = ["zip", "legacy", "bare", "magic", "keys", "device", "hooks", "state", "key", "optimizer"]


@pytest.mark.parametrize("form", PLACES)
def test_code_is_never_run(tmp_path: Path, form: str) -> None:
    """What can be read is read, with a note of what its pickle names. Control: unpickling the same file does run the code."""
    path, canary = tmp_path / "pytorch_model.bin", tmp_path / "canary"
    victim = hostile_file(form, path, Called(os.system, f"mkdir {canary}"))
    if form in ("zip", "legacy", "device", "hooks", "optimizer"):
        file = TorchFile(path)
        assert file.entries
        assert all(file.read(name).numel() for name in file.entries)
        (note,) = file.notes
        assert "posix.system" in note
    else:
        refused(lambda: TorchFile(path), str(path))
    assert not canary.exists()
    with contextlib.suppress(Exception):  # torch fails on some of them after the code has run
        victim(path)
    assert canary.exists()


ONE = pickled({"a": tensor()})
DATA = torch.tensor([1.0, 2.0]).numpy().tobytes()


def test_a_true_archive_is_read(tmp_path: Path) -> None:
    """Control of the tests below: the same archive without the error, aligned or not."""
    starts = set()
    for filler in range(4):
        file = TorchFile(zip_of(tmp_path / "a", ONE, {"filler": bytes(filler), "0": DATA}))
        assert holds(file, {"a": torch.tensor([1.0, 2.0])})
        assert file.read("a").data_ptr() % 4 == 0, "some processors, and some kernels, fault on an unaligned float"
        starts.add(file.entries["a"].start % 4)
    assert starts == {0, 1, 2, 3}
    assert holds(TorchFile(legacy_of(tmp_path / "a", ONE, {"0": (2, DATA)})), {"a": torch.tensor([1.0, 2.0])})


Write = Callable[[Path], object]


def patched(signature: bytes, at: int, new: bytes, which: int = 0) -> Write:
    """A zip with a field of the ``which``-th record that begins with ``signature`` overwritten."""

    def write(path: Path) -> None:
        data = bytearray(zip_of(path, ONE, {"0": DATA}).read_bytes())
        start = [found.start() for found in re.finditer(re.escape(signature), data)][which] + at
        data[start : start + len(new)] = new
        path.write_bytes(data)

    return write


def archive(members: dict[str, bytes], last: int = zipfile.ZIP_STORED) -> Write:
    """A zip of these members, the last one compressed by ``last``."""

    def write(path: Path) -> None:
        with zipfile.ZipFile(path, "w") as file:
            for name, content in members.items():
                file.writestr(name, content, last if name == [*members][-1] else zipfile.ZIP_STORED)

    return write


def twice(path: Path) -> None:
    """One of two members of one name could be checked and the other one loaded."""
    archive({"archive/data.pkl": ONE, "archive/data/0": DATA, "archive/data/1": DATA})(path)
    path.write_bytes(path.read_bytes().replace(b"archive/data/1", b"archive/data/0"))


def large_directory(path: Path) -> None:
    """zipfile makes half a kilobyte of objects for each entry of 50 bytes: 5 GB for a file of 500 MB."""
    entries = (CENTRAL + b"\x14\0\x14\0" + bytes(38)) * 100_000
    count, size = (100_000 % 65536).to_bytes(2, "little") * 2, len(entries).to_bytes(4, "little")
    path.write_bytes(LOCAL + entries + END + bytes(4) + count + size + bytes([4, 0, 0, 0, 0, 0]))


CENTRAL, LOCAL, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"
ARCHIVES: list[tuple[Write, str]] = [
    (patched(CENTRAL, 20, b"\xff\xff\x00\x00\xff\xff\x00\x00", 1), "lies about archive/data/0"),  # past the directory
    (patched(CENTRAL, 16, b"\x01\x02\x03\x04"), "checksum"),
    (patched(LOCAL, 26, b"\xff\xff", 1), "lies about archive/data/0"),
    (large_directory, "claims 4,600,000 bytes"),
    (twice, "twice"),
    # A bomb: a kilobyte of zip that unpacks to a gigabyte of pickle.
    (archive({"archive/data.pkl": bytes(50_000_000)}, zipfile.ZIP_DEFLATED), "compressed"),
    (archive({"archive/data.pkl": ONE, "archive/data/0": bytes(8)}, zipfile.ZIP_BZIP2), "archive/data/0 in it is compressed"),
    # Other archives: NumPy's, a TorchScript program, two checkpoints in one.
    (archive({"a/data.pkl": ONE, "b/data.pkl": ONE}), "not one of torch.save"),
    (archive({"a/data.pkl": bytes(PICKLE_LIMIT + 1), "a/data/0": DATA}), "no GPT-2 needs more than"),
    (archive({"a/data.pkl": ONE, "a/data/0": DATA, "a/byteorder": b"big"}), "big-endian"),
    (archive({"a/data.pkl": ONE, "a/data/0": DATA, "a/constants.pkl": b""}), "TorchScript"),
]


@pytest.mark.parametrize(("write", "says"), ARCHIVES, ids=[f"{number}: {says}" for number, (_, says) in enumerate(ARCHIVES)])
def test_an_archive_that_lies_or_is_another_is_refused(tmp_path: Path, write: Write, says: str) -> None:
    """Members that share data, data past the end of the file, two sizes for one member; and it is refused unread."""
    write(tmp_path / "a")
    refused(lambda: TorchFile(tmp_path / "a"), says)


SENSE = "makes no sense"
V3, RAW = torch._utils._rebuild_tensor_v3, Stored("storage", torch.UntypedStorage, "0", "cpu", 8)
LIES = [
    (tensor(shape=(3,)), "reaches beyond"),
    (tensor(1), "reaches beyond"),
    (tensor(shape=(2**40,), stride=(0,)), "expanded"),
    (tensor(1, stride=(-1,)), SENSE),
    (tensor(shape=(2**48,)), SENSE),
    (Called(REBUILD, 0, 0, (2,), (1,)), SENSE),
    (tensor(key=0), "where a storage should be"),
    (tensor(count=2**60), "where a storage should be"),
    (tensor(0, (2,), (1,), False, {}, {"neg": True}), "negated"),
    (Called(torch._utils._rebuild_parameter, 1, False, {}), "of the kind parameter"),
    (Called(V3, RAW, 0, (2,), (1,), False, {}, torch.float64), "beyond"),
]  # fmt: skip


@pytest.mark.parametrize(("lie", "says"), LIES, ids=[str(number) for number in range(len(LIES))])
@FORMS
def test_a_tensor_that_leaves_its_storage_is_refused(tmp_path: Path, lie: Called, says: str, zipped: bool) -> None:
    """torch resizes the storage to the claimed size without a check: terabytes, or memory past the mapping."""
    description = pickled({"a\x1b[2J": lie})
    if zipped:
        path = zip_of(tmp_path / "a", description, {"0": DATA})
    else:
        path = legacy_of(tmp_path / "a", description, {"0": (2, DATA)})
    refused(lambda: TorchFile(path), "" if not zipped else says)


@pytest.mark.parametrize(
    ("storages", "keys", "state", "says"),
    [
        ({"0": (3, DATA + bytes(4))}, None, {"a": tensor()}, "another size"),
        ({"0": (2, DATA[:-1])}, None, {"a": tensor()}, "where its storages end"),
        ({"0": (2, DATA)}, ["0", "0"], {"a": tensor()}, "lists a storage '0'"),
        ({}, {"0": 1}, {"a": tensor()}, "needs a storage of 8 bytes"),
        # The length in bytes would depend on which of two dtypes is used.
        ({"0": (2, DATA)}, None, {"a": tensor(), "b": tensor(kind=torch.HalfStorage)}, "contradicts itself"),
    ],
)
def test_a_lying_list_of_storages_is_refused(tmp_path: Path, storages: Any, keys: Any, state: Any, says: str) -> None:
    """The old format says each length twice; torch allocates the first before it reads the second."""
    refused(lambda: TorchFile(legacy_of(tmp_path / "a", pickled(state), storages, keys=keys)), says)


@pytest.mark.parametrize("push", [b"N", b"}", b"]\x94", b"(", b"K\x01"])
def test_a_pickle_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, push: bytes) -> None:
    """Sixteen million dicts of two bytes each take 2 GB of memory."""
    monkeypatch.setattr("gpt2.checkpoint.containers.pickle_data.INSTRUCTIONS_LIMIT", 5000)
    refused(lambda: TorchFile(zip_of(tmp_path / "a", b"\x80\x02" + push * 5001, {})), "more than 5,000 instructions")
    assert holds(TorchFile(zip_of(tmp_path / "a", ONE, {"0": DATA})), {"a": torch.tensor([1.0, 2.0])})


HASH = 2**61 - 1  # CPython's modulus for the hash of an integer
PUSHES = [
    (b"}" + b")" * 100_000 + b"\x86" * 99_999 + b"Ns.", "no tensor at 'a key'"),  # its hash overflows C's stack
    (b"}q\x00U\x01ah\x00s.", "no tensor at a"),  # contains itself
    (b"ctorch\nSize\nq\x00" + b"h\x00" * 100_000 + b")R" + b"\x85R" * 99_000 + b".", "holds the object torch.Size"),
    (b"}(" + b"".join(b"\x8a\x0a" + (k * HASH).to_bytes(10, "little") + b"N" for k in range(1, 25_000)) + b"u.", "huge numbers"),
    (b"}U\x01aK\x01sU\x01aK\x02s.", "key twice"),
    (b"ccollections\nOrderedDict\n](](U\x01aK\x01e](U\x01aK\x01ee\x85R.", "key twice"),
    (b"X\xff\xff\xff\xff.", "cut short"),
    (b"(" + pickled(Called(os.mkdir, "canary"))[2:-1] + b"1}.", "no tensors need"),  # POP_MARK hides a call's result
    (b"cos\nsystem\n.", "the object os.system where"),
    (b"\x8c\x02os\x8c\x06system\x93.", "the object os.system where"),
    (b"co\\x73\nsyst\\hem\n.", "x73"),  # must not escape: unpickling would import a module of this name
]  # fmt: skip


@pytest.mark.parametrize(("program", "says"), PUSHES, ids=[str(number) for number in range(len(PUSHES))])
def test_a_pickle_that_makes_no_sense_is_refused(tmp_path: Path, program: bytes, says: str) -> None:
    """It may underflow, contain itself or slow down with every step; a name in it is never looked up, nor printed as it is."""
    path = zip_of(tmp_path / "a", b"\x80\x02" + program, {"0": DATA})
    refused(lambda: TorchFile(path), says)


@PROC
@FORMS
def test_an_optimizer_s_state_is_never_read(tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """nanoGPT's ckpt.pt has three times the size of its weights, and torch.load reads the old format completely."""
    # bytes read to find the pickles of the old format
    monkeypatch.setattr("gpt2.checkpoint.containers.torch_file.PICKLE_LIMIT", 20_000)
    nanogpt(tmp_path / "a", type(TINY)(vocab_size=5000, n_positions=64, n_embd=48, n_layer=2, n_head=3), zipped=zipped)

    def count() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]

    overhead = -count() + count()
    before = count()
    file = TorchFile(tmp_path / "a")
    halves = {name: file.read(name, torch.bfloat16) for name in file.entries if name != "lm_head.weight"}
    read = count() - before - overhead
    wanted = 2 * sum(tensor.nbytes for tensor in halves.values())
    assert wanted < read < wanted + 100_000
    assert 3 * wanted < (tmp_path / "a").stat().st_size
