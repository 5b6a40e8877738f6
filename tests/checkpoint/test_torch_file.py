"""The reader of torch.save's files against torch.load, and against files that lie or would run code."""

import contextlib
import gzip
import io
import json
import os
import pickle
import random
import re
import subprocess
import sys
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.hf_layouts import TINY
from support.torch_layouts import (
    Called,
    Stored,
    hf_bin,
    legacy_of,
    lightning,
    linear,
    mingpt,
    nanogpt,
    pickled,
    save,
    sharded_bin,
    zip_of,
)

from gpt2.checkpoint.containers.safetensors_file import DTYPES
from gpt2.checkpoint.containers.torch_file import PICKLE_LIMIT, TorchFile
from gpt2.errors import CheckpointError

PROC = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads /proc")
FORMS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
REBUILD = torch._utils._rebuild_tensor_v2
F32 = torch.FloatStorage
TESTS = Path(__file__).parents[1]


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


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    fresh = [torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()) for tensor in (a, b)]
    bits = [tensor.view(-1).view(torch.uint8) for tensor in fresh]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


def holds(file: TorchFile, state: Any) -> bool:
    """Whether all of a state dict, and nothing else, is read, whichever way."""
    ways: list[dict[str, Any]] = [{}, {"mapped": False}]
    return list(file.entries) == list(state) and all(
        same(file.read(name, **way), tensor) and file.read(name, **way).is_contiguous()
        for name, tensor in state.items()
        for way in ways
    )


# What torch reads


def random_tensor(pick: random.Random) -> torch.Tensor:
    shape = [pick.choice([0, 1, 2, 3, 7]) for _ in range(pick.randint(0, 4))]
    dtype = pick.choice(list(DTYPES.values()))
    tensor = torch.tensor([pick.randint(0, 1) for _ in range(torch.Size(shape).numel())]).to(dtype).reshape(shape)
    if dtype.is_floating_point:
        tensor = torch.empty(shape, dtype=dtype).uniform_(-3, 3)
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
    """A dtype under the wrong name, a view's offset in bytes, strides lost: silently other numbers."""
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
    """Parameters with attributes, tensors with attributes, dtypes of newer torches: each is another call in the pickle."""
    attributed, parameter = torch.randn(3), torch.nn.Parameter(torch.randn(2))
    attributed.tag, parameter.tag = "x", [1]
    state = {"a": attributed, "b": parameter, "c": torch.nn.Parameter(torch.randn(2), requires_grad=False)}
    for zipped in (True, False):
        assert holds(TorchFile(save(tmp_path / "a", state, zipped=zipped)), state)
    typed = Called(
        torch._utils._rebuild_tensor_v3,
        Stored("storage", torch.UntypedStorage, "0", "cpu", 16),
        1,
        (3,),
        (1,),
        0,
        {},
        torch.float32,
    )
    path = zip_of(tmp_path / "b", pickled({"a": typed}), {"0": torch.arange(4.0).numpy().tobytes()})
    assert holds(TorchFile(path), {"a": torch.tensor([1.0, 2, 3])})
    oldest = Called(torch._utils._rebuild_tensor, Stored("storage", torch.cuda.FloatStorage, "0", "cuda:0", 2), 0, (2,), (1,))
    assert holds(TorchFile(zip_of(path, pickled({"a": oldest}), {"0": bytes(8)})), {"a": torch.zeros(2)})


@FORMS
def test_reads_the_state_dict_of_a_module(tmp_path: Path, zipped: bool) -> None:
    """It bears `_metadata`, an attribute that a pickle sets after the items: what is set must not be taken for the value."""
    state = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3)).state_dict()
    assert state._metadata
    assert holds(TorchFile(save(tmp_path / "a", state, zipped=zipped)), state)
    assert holds(TorchFile(save(tmp_path / "a", {"epoch": 1, "model": state}, zipped=zipped)), state)


def test_the_stride_of_a_single_row_means_nothing(tmp_path: Path) -> None:
    """As of a mask cut to one position: still contiguous, so still mapped."""
    state = {"a": torch.arange(12.0).view(3, 4)[1:2], "b": torch.arange(12.0).view(1, 12)[:, 2:9]}
    file = TorchFile(save(tmp_path / "a", state))
    assert holds(file, state)
    assert all(file.entries[name].contiguous for name in state)


def test_an_empty_tensor_may_have_any_other_size(tmp_path: Path) -> None:
    """The control of the overflow among the lies below."""
    for shape in [(0,), (0, 2**40), (2**20, 0, 2**20)]:
        called = Called(REBUILD, Stored("storage", F32, "0", "cpu", 0), 0, shape, (1,) * len(shape), False, {})
        file = TorchFile(zip_of(tmp_path / "a", pickled({"a": called}), {"0": b""}))
        assert file.read("a").shape == file.read("a", torch.bfloat16).shape == shape


def test_reads_files_of_python_2(tmp_path: Path) -> None:
    """Its text is bytes, and its OrderedDict a list of pairs; checkpoints of 2019 were written with it."""
    pid = b"(U\x07storagectorch\nFloatStorage\nU\x01kU\x03cpuK\x02NtQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"K\x00K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n]\x85RtR"
    description = b"\x80\x02ccollections\nOrderedDict\n](](U\x03h.0" + tensor + b"ee\x85R."
    path = legacy_of(tmp_path / "a", description, {"k": (2, torch.tensor([1.0, 2]).numpy().tobytes())}, keys=["k"])
    assert holds(TorchFile(path), {"h.0": torch.tensor([1.0, 2])})


@FORMS
@pytest.mark.parametrize(
    ("dtype", "mask", "head"),
    [(torch.float32, torch.uint8, False), (torch.float16, torch.bool, True), (torch.bfloat16, torch.float32, True)],
)
def test_hugging_face(tmp_path: Path, zipped: bool, dtype: torch.dtype, mask: torch.dtype, head: bool) -> None:
    """Masks of all the dtypes they have had, `masked_bias` scalars, and the head that shares the embedding's storage."""
    prefix = "transformer." if head else ""
    truth = hf_bin(tmp_path, dtype=dtype, mask=mask, head=head, prefix=prefix, zipped=zipped)
    file = TorchFile(tmp_path / "pytorch_model.bin")
    assert holds(file, torch.load(tmp_path / "pytorch_model.bin", weights_only=True))
    assert all(same(file.read(prefix + name), tensor) for name, tensor in truth.items())
    assert file.entries[f"{prefix}h.1.attn.bias"].dtype == mask
    assert file.model_args is None
    if head:
        assert file.entries["transformer.h.0.attn.masked_bias"].shape == ()
        assert same(file.read("lm_head.weight"), truth["wte.weight"])
        assert not zipped or file.read("lm_head.weight").data_ptr() == file.read("transformer.wte.weight").data_ptr()


@FORMS
def test_shards(tmp_path: Path, zipped: bool) -> None:
    """Every shard is a file of its own."""
    truth = sharded_bin(tmp_path, zipped=zipped)
    shards = [TorchFile(path) for path in sorted(tmp_path.glob("*.bin"))]
    assert len(shards) == 3
    found = {name.removeprefix("transformer."): shard.read(name) for shard in shards for name in shard.entries}
    assert found.keys() == truth.keys()
    assert all(same(found[name], truth[name]) for name in truth)


@FORMS
@pytest.mark.parametrize(("compiled", "bias"), [(False, True), (True, False)])
def test_nanogpt(tmp_path: Path, zipped: bool, compiled: bool, bias: bool) -> None:
    """The weights lie beside an optimizer that is twice as large, and beside what the config must come from."""
    truth = nanogpt(tmp_path / "ckpt.pt", compiled=compiled, bias=bias, zipped=zipped)
    file = TorchFile(tmp_path / "ckpt.pt")
    state = linear(truth, "_orig_mod.transformer." if compiled else "transformer.")
    assert holds(file, {name: tensor for name, tensor in state.items() if bias or not name.endswith("bias")})
    sizes = {"n_layer": 2, "n_head": 3, "n_embd": 12, "block_size": 16, "vocab_size": 61}
    assert file.model_args == {**sizes, "bias": bias, "dropout": 0.0}
    assert file.model_args["bias"] is bias


def test_mingpt_and_lightning(tmp_path: Path) -> None:
    """A bare state dict; and one between a trainer's own keys, some of which hold tensors too."""
    truth = mingpt(tmp_path / "model.pt")
    file = TorchFile(tmp_path / "model.pt")
    assert all(same(file.read(name), tensor) for name, tensor in linear(truth).items())
    assert len(file.entries) == len(truth) + 1 + TINY.n_layer
    truth = lightning(tmp_path / "last.ckpt")
    assert holds(TorchFile(tmp_path / "last.ckpt"), {f"model.{name}": tensor for name, tensor in linear(truth).items()})


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
def test_a_wrapped_state_dict(tmp_path: Path, key: str) -> None:
    state = {"a": torch.ones(2)}
    assert holds(TorchFile(save(tmp_path / "a", {"epoch": 1, key: state, "loss": torch.tensor(3.0)})), state)
    assert holds(TorchFile(save(tmp_path / "a", {"model": {"name": "gpt2"}, "state_dict": state})), state)
    assert holds(TorchFile(save(tmp_path / "a", {key: torch.ones(2)})), {key: torch.ones(2)})


@pytest.mark.parametrize(
    "args",
    [None, [], {1: 2}, {"a": [1]}, {"a": torch.ones(1)}, {"a": "x" * 1000}, {"a" * 1000: 1}, {"a": {"b": 1}},
     {str(n): n for n in range(101)}, {"a": 2**63}, {"a": 10**600}, {"a": b"x"}, {"a": (1,)}],
)  # fmt: skip
def test_model_args_are_plain_or_none(tmp_path: Path, args: Any) -> None:
    """What a config is made from must be words and numbers, few and short."""
    path = save(tmp_path / "a", {"model": {"a": torch.ones(1)}, "model_args": args})
    args = TorchFile(path).model_args
    assert args is None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({}, "no tensors"),
        ({"model": {}}, "no tensor at model"),
        (torch.ones(1), "holds a tensor"),
        (torch.nn.Parameter(torch.ones(1)), "holds a tensor"),
        ([torch.ones(1)], "type list"),
        (None, "holds None"),
        (3, "type int"),
        ({"a": torch.ones(1), "b": 1}, "no tensor at b"),
        ({"a": torch.ones(1), "b": {"c": torch.ones(1)}}, "no tensor at b"),
        ({"a": torch.ones(1), "_metadata\n": None}, "no tensor at '_metadata"),
        ({"a": torch.ones(1), 7: torch.ones(1)}, "no tensor at 7"),
        ({"state_dict": {"model": {"a": torch.ones(1)}}}, "no tensor at state_dict"),
        ({"model": {"a": torch.ones(1)}, "state_dict": {"a": torch.ones(1)}}, "under model, state_dict"),
        ({"a": torch.ones(1), "b": torch.Size([1])}, "b is no tensor"),
        ({"a": torch.ones(1), "b": torch.device("cpu")}, "b is no tensor"),
        ({"a": torch.ones(1).expand(4)}, "a is expanded"),
        ({"a": torch.ones(2, 3).unfold(1, 2, 1)}, "a is expanded"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "a is complex64"),
        ({"a": torch.ones(2, dtype=torch.uint16)}, "a is uint16"),
        ({"a": torch.ones(2).to(torch.float8_e4m3fn)}, "a is float8_e4m3fn"),
        ({"a": torch.ones(2, dtype=torch.complex64).conj().imag}, "a is a negated or conjugated view"),
        ({"a": torch.ones(2, 2).to_sparse()}, "a is sparse"),
        ({"a": torch.empty(2, device="meta")}, "a is on the meta device"),
        ({"a": torch.nn.Parameter(torch.empty(2, device="meta"))}, "a is on the meta device"),
    ],
)  # fmt: skip
@FORMS
def test_what_is_no_state_dict_of_dense_tensors_is_refused(tmp_path: Path, value: Any, says: str, zipped: bool) -> None:
    """Loaded for what it looks like, each of these gives other numbers, or a crash far from here."""
    refused(lambda: TorchFile(save(tmp_path / "a", value, zipped=zipped)), says, str(tmp_path / "a"))


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="deprecated"):
        quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    refused(lambda: TorchFile(save(tmp_path / "a", {"a": quantised})), "a is quantised")


# Code


class Hostile:
    """Unpickled, it makes a folder. A different way each: a function of the system, a shell, eval, exec."""

    def __init__(self, way: str, canary: Path) -> None:
        self.way, self.canary = way, str(canary)

    def __reduce__(self) -> tuple[Any, ...]:
        code = f"__import__('os').mkdir({self.canary!r})"
        ways = {"mkdir": (os.mkdir, self.canary), "system": (os.system, f"mkdir {self.canary}"), "eval": (eval, code)}
        ways |= {"exec": (exec, code), "makedirs": (os.makedirs, self.canary)}
        function, *args = ways[self.way]
        return function, tuple(args)


NAMES = {
    "mkdir": "posix.mkdir",
    "system": "posix.system",
    "eval": "builtins.eval",
    "exec": "builtins.exec",
    "makedirs": "os.makedirs",
}


def unpickle(path: Path) -> None:
    with open(path, "rb") as file:
        pickle.load(file)


def run(path: Path) -> None:
    torch.load(path, weights_only=False)


def hostile_file(form: str, path: Path, evil: Any) -> Callable[[Path], Any]:
    """Write one, and say who would fall for it."""
    good = {"a": torch.ones(2)}
    head = [pickled(0x1950A86A20F9469CFC6C), pickled(1001), pickled({"little_endian": True})]
    match form:
        case "zip" | "legacy":
            save(path, {**good, "b": evil}, zipped=form == "zip")
        case "bare" | "bare 0" | "bare 4":
            path.write_bytes(pickle.dumps(evil, protocol=int(form[5:] or 2)))
            return unpickle
        case "magic" | "version" | "sys_info":
            at = ["magic", "version", "sys_info"].index(form)
            head[at] = pickled([evil] if form == "sys_info" else evil)
            legacy_of(path, pickled({}), {}, head=head)
            return unpickle if form == "magic" else run
        case "keys":
            legacy_of(path, pickled({}), {}, keys=evil)
        case "device":  # the id of a storage is a pickled value too
            pid = Stored("storage", F32, "0", evil, 2)
            zip_of(path, pickled({"a": Called(REBUILD, pid, 0, (2,), (1,), False, {})}), {"0": bytes(8)})
        case "hooks":
            pid = Stored("storage", F32, "0", "cpu", 2)
            zip_of(path, pickled({"a": Called(REBUILD, pid, 0, (2,), (1,), False, evil)}), {"0": bytes(8)})
        case "state":
            zip_of(path, pickled({"a": Called(OrderedDict, state={"x": evil})}), {})
        case "key":
            zip_of(path, pickled({evil: 1}), {})
        case "nanogpt":
            nanogpt(path)
            checkpoint = torch.load(path, weights_only=True)
            save(path, checkpoint | {"config": {"device": evil}})
        case "optimizer":
            save(path, {"model": good, "optimizer": {"state": {0: {"step": evil}}}}, zipped=False)
        case "protocol 4":
            torch.save({"b": evil}, path, pickle_protocol=4)
        case "ignored":  # made and thrown away again before the first tensor
            zip_of(path, b"\x80\x02(" + pickled(evil)[2:-1] + b"1}.", {})
    return run


@pytest.mark.parametrize("way", [*NAMES])
@pytest.mark.parametrize(
    "form",
    ["zip", "legacy", "bare", "bare 0", "bare 4", "magic", "version", "sys_info", "keys", "device", "hooks", "state", "key",
     "nanogpt", "optimizer", "protocol 4"],
)  # fmt: skip
def test_code_is_named_and_never_run(tmp_path: Path, form: str, way: str) -> None:
    """The reason that safetensors exists. The control: whoever unpickles the same file does run it."""
    path, canary = tmp_path / "pytorch_model.bin", tmp_path / "canary"
    victim = hostile_file(form, path, Hostile(way, canary))
    message = refused(lambda: TorchFile(path), "would run code", NAMES[way], "sandbox", str(path))
    assert message.count(NAMES[way]) == 1
    assert not canary.exists()
    with contextlib.suppress(Exception):  # torch chokes on what is left of some of them, after the harm is done
        victim(path)
    assert canary.exists()


def test_code_that_is_popped_again_is_refused(tmp_path: Path) -> None:
    """The control of the opcodes that no tensors need: POP_MARK hides what was called."""
    hostile_file("ignored", tmp_path / "a", Hostile("mkdir", tmp_path / "canary"))
    refused(lambda: TorchFile(tmp_path / "a"), "posix.mkdir")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (b"cos\nsystem\n.", "for os.system, and"),
        (b"c__builtin__\neval\n.", "for builtins.eval, and"),
        (b"ctorch\nload\n.", "for torch.load, and"),
        (b"ctorch.serialization\nload\n.", "for torch.serialization.load, and"),
        (b"ctorch.hub\nload\n.", "for torch.hub.load, and"),
        (b"ctorch._utils\n_rebuild_xla_tensor\n.", "_rebuild_xla_tensor"),
        (b"ctorch\nSize.__init__\n.", "Size.__init__"),
        (b"ctorch\nFloatStorage.from_file\n.", "FloatStorage.from_file"),
        (b"ctorch.storage\nUntypedStorage.from_file\n.", "from_file"),
        (b"ccollections\nOrderedDict.fromkeys\n.", "fromkeys"),
        (b"ctorch\n Size\n.", "'torch. Size'"),
        (b"ctorch._utils\n_rebuild_tensor_v2\x00\n.", "_v2"),
        (b"c\x1b[2J\nsystem\n.", "x1b"),
        (b"c" + b"a" * 990 + b"\nsystem\n.", "aaa"),
        (b"(ios\nsystem\n.", "for os.system, and"),
        (b"\x8c\x02os\x8c\x06system\x93.", "for os.system, and"),
        (b"\x82\x01.", "no tensors need"),
        (b"}}\x93.", "makes no sense"),
        (b"\x8c\x02osN\x93.", "makes no sense"),
        (b"c" + b"a" * 1001 + b"\nsystem\n.", "aaa"),
        (b"cos\n\xff\n.", "not UTF-8"),
    ],
)
def test_names_beyond_torch_s_list_are_refused(tmp_path: Path, code: bytes, says: str) -> None:
    """Whole modules were once allowed by prefix elsewhere, and so was `torch.load` itself. Mentioned is enough."""
    refused(lambda: TorchFile(zip_of(tmp_path / "a", b"\x80\x02" + code, {})), says)


def test_all_that_torch_allows_is_known(tmp_path: Path) -> None:
    """A checkpoint that torch's own weights_only takes must not be called code; and no list of ours may be longer."""
    from torch._weights_only_unpickler import _get_allowed_globals

    from gpt2.checkpoint.containers.torch_tensors import ALLOWED, STORAGES

    theirs = set(_get_allowed_globals())
    tensor_classes = {name for name in theirs if re.fullmatch(r"torch\.(cuda\.|sparse\.|cuda\.sparse\.)?\w+Tensor", name)}
    assert theirs - ALLOWED - tensor_classes == set(), "classes of torch 0.3, which no GPT-2 was ever saved with"
    assert ALLOWED - theirs <= {name.replace("torch.", "torch.cuda.", 1) for name in STORAGES}


def test_torchscript_is_refused(tmp_path: Path) -> None:
    """It is a program by design, and torch.load hands it on to torch.jit.load."""
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "model.pt")
    refused(lambda: TorchFile(tmp_path / "model.pt"), "TorchScript", "would run code", "state dict")


# Archives that lie


def archive(path: Path, members: dict[str, bytes], **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


ONE = pickled({"a": Called(REBUILD, Stored("storage", F32, "0", "cpu", 2), 0, (2,), (1,), False, OrderedDict())})
DATA = torch.tensor([1.0, 2.0]).numpy().tobytes()


def test_a_true_archive_is_read(tmp_path: Path) -> None:
    """The control of the tests below: their archive without the lie, aligned or not."""
    starts = set()
    for filler in range(4):
        file = TorchFile(zip_of(tmp_path / "a", ONE, {"filler": bytes(filler), "0": DATA}))
        assert holds(file, {"a": torch.tensor([1.0, 2.0])})
        assert file.read("a").data_ptr() % 4 == 0, "some processors, and some kernels, fault on an unaligned float"
        starts.add(file.entries["a"].start % 4)
    assert starts == {0, 1, 2, 3}
    assert holds(TorchFile(legacy_of(tmp_path / "a", ONE, {"0": (2, DATA)})), {"a": torch.tensor([1.0, 2.0])})


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    """A kilobyte of zip that becomes a gigabyte of pickle."""
    path = zip_of(tmp_path / "a", bytes(50_000_000), {"0": DATA}, compression=zipfile.ZIP_DEFLATED)
    begin = time.process_time()
    refused(lambda: TorchFile(path), "compressed")
    assert time.process_time() - begin < 1
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", ONE)
        file.writestr("archive/data/0", bytes(8), zipfile.ZIP_BZIP2)
    refused(lambda: TorchFile(path), "archive/data/0 in it is compressed")


def patched(path: Path, signature: bytes, at: int, new: bytes, which: int = 0) -> Path:
    """Overwrite a field of the ``which``-th zip record that begins with ``signature``."""
    data = bytearray(path.read_bytes())
    start = [found.start() for found in re.finditer(re.escape(signature), data)][which] + at
    data[start : start + len(new)] = new
    path.write_bytes(data)
    return path


CENTRAL, LOCAL, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"


@pytest.mark.parametrize(
    ("signature", "at", "new", "which", "says"),
    [
        (CENTRAL, 8, b"\x01", 0, "compressed"),  # encrypted
        (CENTRAL, 20, b"\x09", 1, "compressed"),  # another size packed than unpacked
        (CENTRAL, 20, b"\xff\xff\x00\x00\xff\xff\x00\x00", 1, "lies about archive/data/0"),  # beyond the directory
        (CENTRAL, 20, b"\x48\x00\x00\x00\x48\x00\x00\x00", 1, "lies about archive/data/0"),  # into the directory
        (CENTRAL, 42, bytes(4), 1, "lies about archive/data"),  # two members share their data
        (CENTRAL, 42, b"\xf0\xff\xff\x7f", 1, "lies about archive/data/0"),
        (CENTRAL, 42, b"\x03\x00\x00\x00", 0, "lies about archive/data.pkl"),
        (CENTRAL, 16, b"\x01\x02\x03\x04", 0, "checksum"),
        (CENTRAL, 6, b"\xff\x00", 0, "zip file version 25.5"),
        (LOCAL, 26, b"\xff\xff", 1, "lies about archive/data/0"),
        (LOCAL, 2, b"\x03\x03", 1, "lies about archive/data/0"),
        (END, 12, b"\xff\xff\xff\x7f", 0, "cannot be read"),
        (END, 16, b"\xff\xff\xff\x7f", 0, "zip directory"),
        (END, 16, b"\x00\x00\x00\x00", 0, "zip directory"),
    ],
)
def test_a_lying_zip_directory_is_refused(tmp_path: Path, signature: bytes, at: int, new: bytes, which: int, says: str) -> None:
    """Aliased members, data beyond the file, sizes that only one of two readers believes."""
    refused(lambda: TorchFile(patched(zip_of(tmp_path / "a", ONE, {"0": DATA}), signature, at, new, which)), says)


@pytest.mark.parametrize("offset", [2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_member_far_beyond_the_file_is_refused(tmp_path: Path, offset: int) -> None:
    """The 64-bit form of the directory can name bytes that no seek takes."""
    with zipfile.ZipFile(tmp_path / "a", "w") as file:
        file.writestr("archive/data.pkl", ONE)
        file.infolist()[0].header_offset = offset
    refused(lambda: TorchFile(tmp_path / "a"), "lies about archive/data.pkl")


def test_a_huge_zip_directory_is_refused_unread(tmp_path: Path) -> None:
    """zipfile makes half a kilobyte of objects of each entry's 50 bytes: 5 GB of a file of 500 MB."""
    entry = CENTRAL + b"\x14\0\x14\0" + bytes(38) + b""
    size = 100_000 * len(entry)
    end = END + bytes(4) + (100_000 % 65536).to_bytes(2, "little") * 2 + size.to_bytes(4, "little") + bytes([4, 0, 0, 0, 0, 0])
    (tmp_path / "a").write_bytes(LOCAL + entry * 100_000 + end)
    begin = time.process_time()
    refused(lambda: TorchFile(tmp_path / "a"), f"claims {size:,} bytes")
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"a/data.pkl": ONE, "b/data.pkl": ONE}, "not one of torch.save"),
        ({"data.pkl": ONE}, "not one of torch.save"),
        ({"a/b/data.pkl": ONE}, "not one of torch.save"),
        ({"a/weights.npy": DATA}, "not one of torch.save"),
        ({"a/data.pkl": ONE, "b/data/0": DATA}, "needs a storage of 8 bytes"),
        ({"a/data.pkl": ONE, "a/data/00": DATA}, "needs a storage of 8 bytes"),
        ({"a/data.pkl": ONE, "a/data/0": DATA[:-1]}, "needs a storage of 8 bytes"),
        ({"a/data.pkl": ONE, "a/data/0": DATA + b"\0"}, "needs a storage of 8 bytes"),
        ({"a/data.pkl": b"", "a/data/0": DATA}, "cut short"),
        ({"a/data.pkl": bytes(PICKLE_LIMIT + 1), "a/data/0": DATA}, "no GPT-2 needs more than"),
        ({"a/data.pkl": ONE, "a/data/0": DATA, "a/byteorder": b"big"}, "big-endian"),
        ({"a/data.pkl": ONE, "a/data/0": DATA, "a/constants.pkl": b""}, "TorchScript"),
    ],
)
def test_other_archives_are_refused(tmp_path: Path, members: dict[str, bytes], says: str) -> None:
    """Whatever else is a zip: NumPy's, a TorchScript program, two checkpoints in one."""
    refused(lambda: TorchFile(archive(tmp_path / "a", members)), says)


def test_the_same_member_twice_is_refused(tmp_path: Path) -> None:
    """Two readers may choose a different one of them, and check one while loading the other."""
    path = archive(tmp_path / "a", {"archive/data.pkl": ONE, "archive/data/0": DATA, "archive/data/1": DATA})
    path.write_bytes(path.read_bytes().replace(b"archive/data/1", b"archive/data/0"))
    refused(lambda: TorchFile(tmp_path / "a"), "twice")


def test_checksums(tmp_path: Path) -> None:
    """A flipped bit in the description turns one tensor into another; with torch's checksums off there is none to hold it to."""
    path = save(tmp_path / "a", {"h.0.weight": torch.ones(2)})
    path.write_bytes(path.read_bytes().replace(b"h.0.weight", b"h.1.weight"))
    refused(lambda: TorchFile(path), "checksum")
    torch.serialization.set_crc32_options(False)
    try:
        save(path, {"a": torch.ones(2)})
    finally:
        torch.serialization.set_crc32_options(True)
    assert holds(TorchFile(path), {"a": torch.ones(2)})


# Pickles that lie


def tensor(
    offset: Any = 0,
    shape: Any = (2,),
    stride: Any = (1,),
    *rest: Any,
    kind: Any = F32,
    key: Any = "0",
    count: Any = 2,
    tail: Any = (),
) -> Called:
    """A mention of the tensor of two floats, each part of which may be wrong."""
    return Called(
        REBUILD, Stored("storage", kind, key, "cpu", count, *tail), offset, shape, stride, *(rest or (False, OrderedDict()))
    )


SENSE = "makes no sense"
V3, RAW = torch._utils._rebuild_tensor_v3, Stored("storage", torch.UntypedStorage, "0", "cpu", 8)
LIES = [
    (tensor(shape=(3,)), "reaches beyond"),
    (tensor(1), "reaches beyond"),
    (tensor(2**40), "reaches beyond"),
    (tensor(stride=(2,)), "reaches beyond"),
    (tensor(stride=(2**47,)), "reaches beyond"),
    (tensor(shape=(2**47,)), "reaches beyond"),
    (tensor(shape=(2**40, 2**40), stride=(2**40, 1)), SENSE),
    (tensor(shape=(0, 2**47, 2**47), stride=(1, 1, 1)), SENSE),
    (tensor(shape=(2**47, 2**47, 0), stride=(1, 1, 1)), SENSE),
    (tensor(shape=(2**40,), stride=(0,)), "expanded"),
    (tensor(shape=(2, 2**40), stride=(1, 0)), "expanded"),
    (tensor(shape=(2, 2), stride=(1, 1)), "expanded"),
    (tensor(-1), SENSE),
    (tensor(shape=(-2,)), SENSE),
    (tensor(1, stride=(-1,)), SENSE),
    (tensor(shape=(2**48,)), SENSE),
    (tensor(0.0), SENSE),
    (tensor(True), SENSE),
    (tensor(shape=(True,)), SENSE),
    (tensor(shape=[2]), SENSE),
    (tensor(shape=(2, 1)), SENSE),
    (tensor(shape=(), stride=(1,)), SENSE),
    (tensor(shape=(1,) * 9, stride=(1,) * 9), SENSE),
    (tensor(shape=("2",)), SENSE),
    (tensor(shape=None), SENSE),
    (Called(REBUILD), SENSE),
    (Called(REBUILD, 0, 0, (2,), (1,)), SENSE),
    (Called(REBUILD, Stored("storage"), 0, (2,), (1,)), "where a storage should be"),
    (tensor(kind=torch.float32), "where a storage should be"),
    (tensor(kind="FloatStorage"), "where a storage should be"),
    (tensor(kind=torch.storage.TypedStorage), "where a storage should be"),
    (tensor(key=0), "where a storage should be"),
    (tensor(count=-2), "where a storage should be"),
    (tensor(count=2.0), "where a storage should be"),
    (tensor(count=2**60), "where a storage should be"),
    (tensor(tail=(None, None)), "where a storage should be"),
    (tensor(tail=(("1", 0, 2),)), "where a storage should be"),
    (tensor(kind=torch.nn.Parameter), "where a storage should be"),
    (tensor(0, (2,), (1,), False, {}, {"neg": True}), "negated"),
    (Called(REBUILD, Stored(tensor()), 0, (2,), (1,)), "where a storage should be"),
    (Called(REBUILD, Stored(Stored("storage")), 0, (2,), (1,)), "where a storage should be"),
    (tensor(kind=b"1" * 300), "where a storage should be"),
    (Called(torch._utils._rebuild_parameter, 1, False, {}), "no tensor"),
    (Called(torch._utils._rebuild_parameter), "no tensor"),
    (Called(torch._tensor._rebuild_from_type_v2, REBUILD, torch.Tensor), "no tensor"),
    (Called(V3, RAW, 0, (2,), (1,), False, {}, torch.float64), "beyond"),
    (Called(V3, RAW, 0, (2,), (1,), False, {}, "float32"), "is None"),
    (Called(V3, RAW, 0, (2,), (1,)), "is None"),
]  # fmt: skip


@pytest.mark.parametrize(("lie", "says"), LIES, ids=[str(number) for number in range(len(LIES))])
@FORMS
def test_a_tensor_that_leaves_its_storage_is_refused(tmp_path: Path, lie: Called, says: str, zipped: bool) -> None:
    """torch resizes the storage to whatever is claimed, before anyone can look: terabytes, or what lies beyond the mapping."""
    description = pickled({"a\x1b[2J": lie})
    if zipped:
        path = zip_of(tmp_path / "a", description, {"0": DATA})
    else:
        path = legacy_of(tmp_path / "a", description, {"0": (2, DATA)})
    begin = time.process_time()
    refused(lambda: TorchFile(path), "" if not zipped else says)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("storages", "keys", "count", "says"),
    [
        ({"0": (3, DATA + bytes(4))}, None, 2, "another size"),
        ({"0": (2**61, DATA)}, None, 2, "another size"),
        ({"0": (2, DATA[:-1])}, None, 2, "where its storages end"),
        ({"0": (2, DATA + b"\0")}, None, 2, "where its storages end"),
        ({"0": (2, DATA)}, None, 2**47, "where its storages end"),
        ({"0": (2, DATA)}, ["0", "0"], 2, "lists a storage '0'"),
        ({"0": (2, DATA)}, ["1"], 2, "lists a storage '1'"),
        ({"0": (2, DATA)}, [0], 2, "lists a storage 0"),
        ({"0": (2, DATA)}, [["0"]], 2, "lists a storage ['0']"),
        ({"0": (2, DATA)}, [], 2, "where its storages end"),
        ({}, [], 2, "needs a storage of 8 bytes"),
        ({}, {"0": 1}, 2, "needs a storage of 8 bytes"),
        ({}, None, 2, "needs a storage of 8 bytes"),
    ],
)
def test_a_lying_list_of_storages_is_refused(tmp_path: Path, storages: Any, keys: Any, count: int, says: str) -> None:
    """The old form says each length twice; torch allocates the first before it has seen the second."""
    path = legacy_of(tmp_path / "a", pickled({"a": tensor(count=count)}), storages, keys=keys)
    refused(lambda: TorchFile(path), says)


def test_a_message_does_not_unfold_what_a_pickle_folds(tmp_path: Path) -> None:
    """Sixty calls, each of the one before twice, are 2 ** 60 when written out."""
    folded: Any = 1
    for _ in range(60):
        folded = Called(torch.Size, folded, folded)
    for id in ((folded,), ("storage", [folded], folded, {"a": folded}, 1)):
        path = zip_of(tmp_path / "a", pickled({"a": Called(REBUILD, Stored(*id), 0, (2,), (1,))}), {})
        assert "torch.Size(...)" in refused(lambda path=path: TorchFile(path), "where a storage should be")


def test_one_storage_of_two_kinds_is_refused(tmp_path: Path) -> None:
    """In the old form its length in bytes depends on which of the two is believed."""
    description = pickled({"a": tensor(), "b": tensor(kind=torch.HalfStorage)})
    refused(lambda: TorchFile(legacy_of(tmp_path / "a", description, {"0": (2, DATA)})), "contradicts itself")


@pytest.mark.parametrize("push", [b"N", b"}", b"]\x94", b"(", b"K\x01"])
def test_a_pickle_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, push: bytes) -> None:
    """Sixteen million dicts of two bytes each are 2 GB of memory."""
    monkeypatch.setattr("gpt2.checkpoint.containers.pickle_data.INSTRUCTIONS_LIMIT", 5000)
    refused(lambda: TorchFile(zip_of(tmp_path / "a", b"\x80\x02" + push * 5001, {})), "more than 5,000 instructions")
    assert holds(TorchFile(zip_of(tmp_path / "a", ONE, {"0": DATA})), {"a": torch.tensor([1.0, 2.0])})


HASH = 2**61 - 1  # what CPython takes the hash of a whole number modulo
PUSHES = [
    (b"}" + b")" * 100_000 + b"\x86" * 99_999 + b"Ns.", SENSE),  # a key so deep that its hash overflows C's stack
    (b")" + b"\x85" * 150_000 + b".", "type tuple"),
    (b")" + b"q\x00h\x00\x86" * 50_000 + b".", "type tuple"),  # 2 ** 50,000 elements, if one followed them all
    (b"}q\x00U\x01ah\x00s.", "no tensor at a"),  # holds itself
    (b"ctorch\nSize\nq\x00" + b"h\x00" * 100_000 + b")R" + b"\x85R" * 99_000 + b".", "holds a torch.Size"),
    (b"}(" + b"".join(b"\x8a\x0a" + (k * HASH).to_bytes(10, "little") + b"N" for k in range(1, 25_000)) + b"u.", "huge numbers"),
    (b"}U\x01aK\x01sU\x01aK\x02s.", "key twice"),
    (b"}(U\x01aK\x01U\x01aK\x02u.", "key twice"),
    (b"ccollections\nOrderedDict\n](](U\x01aK\x01e](U\x01aK\x01ee\x85R.", "key twice"),
    (b"ccollections\nOrderedDict\n](](U\x01aee\x85R.", SENSE),
    (b"ccollections\nOrderedDict\nU\x02abU\x02ab\x86R.", SENSE),
    (b"ccollections\nOrderedDict\nK\x01\x85R.", SENSE),
    (b"]N.", "holds None"),
    (b"NR.", SENSE),
    (b"N)R.", SENSE),
    (b"}(Nu.", SENSE),
    (b"Na.", SENSE),
    (b"N(Ne.", SENSE),
    (b"N(NNu.", SENSE),
    (b"h\x00.", SENSE),
    (b"j\x00\x00\x00\x00.", SENSE),
    (b"q\x00.", SENSE),
    (b"\x94.", SENSE),
    (b"t.", SENSE),
    (b"NN(\x86t.", SENSE),
    (b"(N0t.", "no tensors need"),
    (b"b.", SENSE),
    (b"Q.", SENSE),
    (b"NQ.", "type Persistent"),
    (b".", SENSE),
    (b"\x85.", SENSE),
    (b"N\x87.", SENSE),
    (b"X\xff\xff\xff\xff.", "cut short"),
    (b"\x8a\xff.", "cut short"),
    (b"\x8b\xff\xff\xff\xff.", "no tensors need"),
    (b"I1\n.", "no tensors need"),
    (b"L" + b"9" * 5000 + b"L\n.", "no tensors need"),
    (b"X\x01\x00\x00\x00\xff.", "not UTF-8"),
    (b"X\x03\x00\x00\x00\xed\xa0\x80.", "not UTF-8"),
    (b"G\x00.", "cut short"),
    (b"N", "cut short"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "says"), PUSHES, ids=[str(number) for number in range(len(PUSHES))])
def test_a_pickle_that_makes_no_sense_is_refused(tmp_path: Path, program: bytes, says: str) -> None:
    """A stack machine driven by a stranger: beneath its stack, without end, in circles, or slower with every step."""
    path = zip_of(tmp_path / "a", b"\x80\x02" + program, {"0": DATA})
    begin = time.process_time()
    refused(lambda: TorchFile(path), says)
    assert time.process_time() - begin < 10


# Files that are something else, or not whole


@FORMS
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, zipped: bool) -> None:
    """A download that broke off, at every byte: in each pickle, between storages, in the zip's directory."""
    path = save(tmp_path / "a", {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.float16)}, zipped=zipped)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        refused(lambda: TorchFile(path), str(path), "fetch it again")
    path.write_bytes(whole)
    assert len(TorchFile(path).entries) == 2


def safetensors(path: Path) -> bytes:
    save_file({"a": torch.ones(2)}, path)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda path: b"", "is empty"),
        (lambda path: b"\0" * 40, "neither a zip archive nor a pickle"),
        (lambda path: random.Random(0).randbytes(5000), "neither"),
        (lambda path: b"To be, or not to be, that is the question:\n" * 9, "neither"),
        (safetensors, "neither"),
        (lambda path: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 548118077\n", "git lfs pull"),
        (lambda path: b"<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
        (lambda path: b"GGUF\x03\0\0\0\0\0\0\0", "GGUF"),
        (lambda path: b"\x89HDF\r\n\x1a\n" + bytes(90), "HDF5"),
        (lambda path: gzip.compress(ONE), "gzip"),
        (lambda path: pickle.dumps({"a": 1}), "a pickle, but not one of torch.save"),
        (lambda path: pickle.dumps({"a": [1.0, 2.0]}, protocol=5), "a pickle, but not one of torch.save"),
        (lambda path: pickled(0x1950A86A20F9469CFC6C) + pickled(7), "version 7"),
        (lambda path: b"PK\x05\x06" + bytes(18), "neither"),
        (lambda path: b"PK\x03\x04", "File is not a zip file"),
    ],
)
def test_what_is_not_torch_s_is_told_for_what_it_is(tmp_path: Path, content: Callable[[Path], bytes], says: str) -> None:
    """A page saved instead of a file, or a git-lfs pointer, reported as a broken pickle."""
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(content(path))
    refused(lambda: TorchFile(path), says, str(path))


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    refused(lambda: TorchFile(tmp_path / "no"), "No such file")
    refused(lambda: TorchFile(tmp_path), "directory")


# The mapping


@FORMS
def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path, zipped: bool) -> None:
    """A shared mapping would train straight into the checkpoint."""
    path = save(tmp_path / "a", {"a": torch.ones(3000)}, zipped=zipped)
    before, again = path.read_bytes(), TorchFile(path)
    written = TorchFile(path).read("a")
    written.mul_(5)
    assert written.sum() == 15_000
    assert path.read_bytes() == before
    assert again.read("a").sum() == 3000


def test_description_and_data_are_of_one_file(tmp_path: Path) -> None:
    """A run that renames its new `ckpt.pt` over the one being loaded."""
    path = save(tmp_path / "a", {"a": torch.ones(4), "b": torch.ones(4)})
    file = TorchFile(path)
    os.replace(save(tmp_path / "new", {"x": torch.full((8,), 2.0)}), path)
    assert file.read("a").tolist() == file.read("b", mapped=False).tolist() == [1] * 4


def test_a_file_cut_while_open_is_refused(tmp_path: Path) -> None:
    """`readinto` returns 0 at the end of a file, for ever."""
    path = save(tmp_path / "a", {"a": torch.ones(4)})
    file = TorchFile(path)
    os.truncate(path, file.entries["a"].start + 5)
    refused(lambda: file.read("a", mapped=False), "cut short while it was read")
    refused(lambda: file.read("a", torch.float16), "cut short while it was read")


@PROC
def test_a_mapped_tensor_lies_in_a_private_mapping_and_closes_its_file(tmp_path: Path) -> None:
    """A "mapped" read that copies; and descriptors that leak until the process may open no more."""
    path = save(tmp_path / "a", {"a": torch.ones(5000), "b": torch.ones(5000)})
    descriptors = len(os.listdir("/proc/self/fd"))
    file = TorchFile(path)
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
    buffer = io.BytesIO()
    torch.save(TorchFile(save(tmp_path / "a", {"a": torch.ones(100_000), "b": torch.ones(3)})).read("b"), buffer)
    assert len(buffer.getvalue()) < 3000


def test_a_file_that_cannot_be_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network and FUSE file systems have no mmap."""

    def no_mmap(*_: object, **__: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr("gpt2.checkpoint.containers.mapped_file.mmap.mmap", no_mmap)
    assert TorchFile(save(tmp_path / "a", {"a": torch.arange(5.0)})).read("a").tolist() == [0, 1, 2, 3, 4]


@PROC
@FORMS
def test_an_optimizer_s_state_is_never_read(tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """nanoGPT's ckpt.pt is three times the size of its weights, all of which torch.load reads in the old form."""
    # of the old form, so much is read to find the pickles
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


def test_a_disk_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback out of a network drive."""

    class Broken:
        def seek(self, *_: object) -> None:
            pass

        def read(self, *_: object) -> None:
            raise OSError(5, "Input/output error")

        readinto = read

    file = TorchFile(save(tmp_path / "a", {"a": torch.ones(4)}))
    monkeypatch.setattr(file._file, "file", Broken())
    refused(lambda: file.read("a", mapped=False), "Input/output error")
    refused(lambda: file._file.bytes(0, 4), "Input/output error")


# Memory, and thousands of damaged files

PEAK = """
import json, re, sys
from pathlib import Path
import torch
from gpt2.checkpoint.containers.torch_file import TorchFile
def memory(kind): return int(re.search(kind + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
torch.ones(1000).to(torch.bfloat16)
before = memory("VmRSS")
file = TorchFile(Path(sys.argv[1]))
held = {name: file.read(name, torch.bfloat16) for name in file.entries}
print(json.dumps({"above": memory("VmHWM") - before, "target": sum(tensor.nbytes for tensor in held.values())}))
"""


def peak_of_bf16(path: Path, megabytes: int, zipped: bool) -> float:
    """Peak memory while a float32 file of so many MB becomes bf16, above what the process began with, in target sizes."""
    width = 1024
    state = {f"h.{layer}.weight": torch.randn(width, width) for layer in range(megabytes // 4)}
    save(path, state, zipped=zipped)
    del state
    child = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    path.unlink()
    row = json.loads(child.stdout)
    assert row["target"] == (megabytes // 4) * width * width * 2
    return row["above"] / row["target"]


@PROC
def test_converting_never_holds_the_source(tmp_path: Path) -> None:
    """The float32 model beside the bf16 one: three times the memory that was asked for."""
    assert peak_of_bf16(tmp_path / "a.bin", 64, zipped=True) < 1.15
    assert peak_of_bf16(tmp_path / "a.bin", 64, zipped=False) < 1.40  # 16 MB of which is the search for the pickles' end


@PROC
@pytest.mark.slow
def test_converting_half_a_gigabyte(tmp_path: Path) -> None:
    """The same at the size of the official gpt2."""
    ratios = [peak_of_bf16(tmp_path / "a.bin", 512, zipped=zipped) for zipped in (True, False)]
    print("peak memory of .bin -> bf16, in target sizes: zip {:.3f}, legacy {:.3f}".format(*ratios))
    assert max(ratios) < 1.10


def fuzz(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """What `torch_fuzz.py` found, in a process that may crash or hang without taking the tests along."""
    command = [sys.executable, "-X", "faulthandler", "-m", "support.torch_fuzz", str(count), str(seed), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    child = subprocess.run(command, capture_output=True, text=True, timeout=60 + count / 10, env=environment, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    found = json.loads(child.stdout.splitlines()[-1])
    assert found["loaded"] + sum(found["refused"].values()) == count
    assert found["slowest_s"] < 2
    assert found["grown_mb"] < 50
    return found


def test_damaged_files_load_or_are_refused(tmp_path: Path) -> None:
    """Any byte may be wrong. And the damage must go deep: enough files load still, and enough are refused for other reasons."""
    found = fuzz(500, 0, tmp_path)
    assert found["loaded"] > 50
    assert len(found["refused"]) > 30


@pytest.mark.slow
def test_ten_thousand_damaged_files(tmp_path: Path) -> None:
    """The same, longer, from another seed."""
    assert fuzz(10_000, 1, tmp_path)["loaded"] > 1000
