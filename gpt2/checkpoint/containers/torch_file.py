"""Read `torch.save` files without `torch.load`.

Since torch 1.6 (2020) it is an uncompressed zip archive: the pickle `data.pkl` describes the tensors, and `data/0`, `data/1`,
... are their storages (torch/serialization.py, `_save`). The older form, also the official gpt2's `pytorch_model.bin`, has five
pickles (magic number, version, machine, tensors, storage keys) and then the storages, each after its length (`_legacy_save`).

A pickle can run code, so it is read as data (`pickle_data.py`); every tensor must lie within its storage (`torch_tensors.py`).
Both forms are mapped, and an optimizer's state is never read.
"""

import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers import Container, Damaged, Refused, listed, refuse_other_format, shown
from gpt2.checkpoint.containers.pickle_data import Call, Pickle
from gpt2.checkpoint.containers.torch_tensors import ALLOWED, NotDense, Storage, Strided, describe, is_tensor, kind_of, storage
from gpt2.checkpoint.keys import SYNONYMS, from_file, is_parameter
from gpt2.config import quoted

# nanoGPT's ckpt.pt of GPT-2 XL has a pickle of 200 kB; some contain every loss of a long run.
PICKLE_LIMIT = 16_000_000
DIRECTORY_LIMIT = 4_000_000  # of a zip archive's directory, which takes twenty times that in memory
MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001  # first bytes of a `_legacy_save` file
# Keys of the weights where none of them has a GPT-2's name: nanoGPT, Lightning, torch's tutorials.
WRAPPERS = ("model", "state_dict", "model_state_dict")
DEPTH = 5  # of dicts and lists in each other, in which the state dict is looked for


class TorchFile(Container):
    """A torch.save file: the tensors of the one state dict in it, and nanoGPT's ``model_args``.

    Whatever else it holds stays opaque, such as an optimizer's state, or objects of its author's classes.
    """

    kind = "torch.save"
    entries: Mapping[str, Strided]
    model_args: Mapping[str, Any] | None

    def _directory(self) -> dict[str, Strided]:
        zipped = self._file.bytes(0, 4) == b"PK\x03\x04"
        self._foreign: dict[str, None] = {}
        value, places = self._from_zip() if zipped else self._from_pickles()
        self.model_args = _arguments(value) if type(value) is dict else None
        if self._foreign:
            self.notes = (f"its pickle also names {listed(list(self._foreign))}: left unread, and not called",)
        entries = {}
        for name, call in self._state_dict(value).items():
            try:
                entries[name] = describe(call, places)
            except NotDense as error:
                raise Refused(f"{shown(name)} is {error}; save a plain tensor (its dequantize() or full_tensor())") from None
            except Damaged as error:
                raise Damaged(f"has a tensor {shown(name)} that {error}") from None
        return entries

    def _unpickle(self, data: bytes, start: int = 0) -> Pickle:
        pickle = Pickle(data, start)
        self._foreign |= dict.fromkeys(name for name in pickle.names if name not in ALLOWED)
        return pickle

    def _from_zip(self) -> tuple[Any, dict[str, tuple[int, int]]]:
        """Return the pickle's value, and the place of each storage: key -> (start, bytes)."""
        members = self._members()
        roots = [name.removesuffix("/data.pkl") for name in members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise Refused("is a zip archive, but not one of torch.save; write its tensors as safetensors")
        (root,) = roots
        order = members.get(f"{root}/byteorder")
        if order is not None and self._file.bytes(*order[:2]) != b"little":
            raise Refused("was written on a big-endian machine; convert it to safetensors there")
        start, size, crc = members[f"{root}/data.pkl"]
        if size > PICKLE_LIMIT:
            raise Damaged(f"has a pickle of {size:,} bytes, and no GPT-2 needs more than {PICKLE_LIMIT:,}")
        data = self._file.bytes(start, size)
        if crc and zlib.crc32(data) != crc:  # 0 is torch's set_crc32_options(False)
            raise Damaged("has a pickle that does not match its checksum")
        prefix = f"{root}/data/"
        places = {name.removeprefix(prefix): row[:2] for name, row in members.items() if name.startswith(prefix)}
        return self._unpickle(data).value, places

    def _members(self) -> dict[str, tuple[int, int, int]]:
        """Read the archive's directory: name -> (data start, size, crc); nothing compressed or shared."""
        try:
            archive = zipfile.ZipFile(_Bounded(self._file.file.fileno(), closefd=False))
        except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, OverflowError, struct.error) as error:
            raise Damaged(f"has a zip directory that cannot be read ({str(error)[:80]})") from None
        if any(name.endswith("/constants.pkl") for name in archive.namelist()):
            raise Refused("is a TorchScript program, which would run code; give the state dict it was made from")
        members: dict[str, tuple[int, int, int]] = {}
        end = 0
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            name = info.orig_filename
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
                raise Refused(f"{shown(name)} in it is compressed, which torch.save never does; unpack and save it again")
            local = self._file.bytes(info.header_offset, 30)
            start = info.header_offset + 30 + sum(int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
            outside = info.header_offset < end or start + info.file_size > archive.start_dir
            if outside or not local.startswith(b"PK\x03\x04"):
                raise Damaged(f"has a zip directory that lies about {shown(name)}")
            if name in members:
                raise Damaged(f"has {shown(name)} twice in its zip directory")
            members[name] = (start, info.file_size, info.CRC)
            end = start + info.file_size
        return members

    def _from_pickles(self) -> tuple[Any, dict[str, tuple[int, int]]]:
        """Do what :meth:`_from_zip` does for the form before torch 1.6."""
        data = self._file.bytes(0, PICKLE_LIMIT)
        if not data.startswith((pickle.PROTO, pickle.GLOBAL)):  # a pickle of protocol 0 begins with GLOBAL
            refuse_other_format(self._file)
            raise Damaged("is neither a zip archive nor a pickle")
        magic = self._unpickle(data)
        if magic.value != MAGIC:
            raise Refused("is a pickle, but not one of torch.save; give a checkpoint")
        version = self._unpickle(data, magic.end)
        if version.value != VERSION:
            raise Damaged(f"is of version {quoted(version.value)}, and torch only ever wrote {VERSION}")
        described = self._unpickle(data, self._unpickle(data, version.end).end)
        keys = self._unpickle(data, described.end)
        held: dict[str, Storage] = {}
        for one in map(storage, described.persistent):
            if held.setdefault(one.key, one) != one:
                raise Damaged(f"contradicts itself about storage {shown(one.key)}")
        places: dict[str, tuple[int, int]] = {}
        at = keys.end
        for key in keys.value if isinstance(keys.value, list) else []:
            if type(key) is not str or key not in held or key in places:
                raise Damaged(f"lists a storage {quoted(key)} that it does not describe")
            places[key] = (at + 8, held[key].nbytes)
            end = at + 8 + held[key].nbytes
            if end <= self._file.size and self._file.bytes(at, 8) != held[key].count.to_bytes(8, "little"):
                raise Damaged(f"has another size for storage {shown(key)} than it describes")
            at = end
        if at != self._file.size:
            raise Damaged(f"has {self._file.size:,} bytes where its storages end at byte {at:,}")
        return described.value, places

    def _state_dict(self, value: Any) -> dict[str, Call]:
        """Return the only dict of tensors with a GPT-2's names in a pickle's value; where none has, all of them."""
        held = dict(_tensors(value))
        known = [path for path, state in held.items() if any(is_parameter(from_file(name)) for name in state)]
        wrapped = [path for path in held if path.rpartition(".")[2] in WRAPPERS]
        paths = known or wrapped or list(held)
        if len(known) > 1:
            where = listed([path or "the top" for path in paths])
            raise Refused(f"has weights under {where}; save one of them alone")
        if not paths:
            if type(value) is dict:
                what = f"has no tensor at {listed(list(map(str, value)))}" if value else "holds no tensors"
            else:
                what = f"holds {kind_of(value)} where a state dict should be"
            raise Refused(f"{what}; save model.state_dict()")
        several = {f"{path}.{key}".lstrip("."): tensor for path in paths for key, tensor in held[path].items()}  # Megatron's
        found = held[paths[0]] if len(paths) == 1 else several
        self.plain = not paths[0] and len(found) == len(value.items if type(value) is Call else value)
        return found

    def read(self, name: str, dtype: torch.dtype | None = None, *, mapped: bool = True) -> Tensor:
        entry = self.entries[name]
        if entry.contiguous:
            return super().read(name, dtype, mapped=mapped)
        reach = 1 + sum(step * (length - 1) for step, length in zip(entry.stride, entry.shape, strict=True))
        source = self._file.tensor(entry.start, (reach,), entry.dtype, mapped=False)
        tensor = torch.empty(entry.shape, dtype=dtype or entry.dtype)
        return tensor.copy_(source.as_strided(entry.shape, entry.stride))


def _tensors(value: Any) -> Iterator[tuple[str, dict[str, Call]]]:
    """Yield every dict's tensors, by the path of keys to it; an optimizer's state is left out."""
    seen: set[int] = set()
    layer: list[tuple[str, Any]] = [("", value)]
    for _ in range(DEPTH):
        inside: list[tuple[str, Any]] = []
        for path, each in layer:
            each = each.items if type(each) is Call else each
            if id(each) in seen or type(each) not in (dict, list, tuple) or (type(each) is dict and "param_groups" in each):
                continue
            seen.add(id(each))
            pairs = list(each.items() if type(each) is dict else enumerate(each))
            if found := {key: item for key, item in pairs if type(key) is str and is_tensor(item)}:
                yield path, found
            inside += [(f"{path}.{key}".lstrip("."), item) for key, item in pairs if not is_tensor(item)]
        layer = inside


def _arguments(value: dict[str, Any]) -> Mapping[str, Any] | None:
    """Return nanoGPT's model_args, or else what beside the weights says a number of heads (karpathy/build-nanogpt's config)."""
    beside = [each.state if type(each) is Call else each for each in value.values()]
    said = [each for each in beside if _plain(each) and any(SYNONYMS.get(key, key) == "n_head" for key in each)]
    return next((args for args in (value.get("model_args"), *said) if _plain(args)), None)


def _plain(value: Any) -> bool:
    """Return whether a value looks like nanoGPT's model_args: a few names, each with a number, flag, word or None."""
    scalars = (str, int, float, bool, type(None))
    few = type(value) is dict and len(value) <= 100
    return few and all(type(key) is str and type(item) in scalars for key, item in value.items())


class _Bounded(io.FileIO):
    """The file for `zipfile`, which reads as much as the archive claims: limited to a directory's size."""

    def read(self, count: int | None = -1) -> bytes:
        if count is not None and count > DIRECTORY_LIMIT:
            raise zipfile.BadZipFile(f"it claims {count:,} bytes")
        return super().read(count)
