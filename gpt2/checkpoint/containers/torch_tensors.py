"""Interpret a torch pickle's records: the allowed names, and the tensors that its calls describe.

A tensor is a call of `torch._utils._rebuild_tensor_v2` with a storage, an offset, a shape and strides (torch/_tensor.py,
`_reduce_ex_internal`); a parameter is a call of `_rebuild_parameter` with a tensor.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._weights_only_unpickler import _get_allowed_globals

from gpt2.checkpoint.containers import Damaged, Entry, countable, shown
from gpt2.checkpoint.containers.pickle_data import Call, Name, Persistent
from gpt2.checkpoint.containers.safetensors_file import DTYPES
from gpt2.config import quoted

STORAGES = {f"torch.{name}": dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()}
STORAGES["torch.storage.UntypedStorage"] = torch.uint8
REBUILD = ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
WRAPPED = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
OTHER = re.compile(r"torch\._utils\._rebuild_(\w+?)(_tensor)?(_no_storage|_from_\w+)?", re.ASCII)  # other kinds of tensors
TYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# The names in a pickle of weights alone: those of torch's weights_only. None is ever called, and no other either.
ALLOWED = frozenset([*_get_allowed_globals(), *(name.replace("torch.", "torch.cuda.", 1) for name in STORAGES)])


@dataclass(frozen=True)
class Strided(Entry):
    """A tensor with ``stride`` in elements, by dimension."""

    stride: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        return torch.empty_strided(self.shape, self.stride, device="meta").is_contiguous()


@dataclass(frozen=True)
class Storage:
    """A run of ``count`` elements in the file."""

    key: str
    dtype: torch.dtype
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


class NotDense(ValueError):
    """An unsupported kind of tensor: sparse, quantised, complex, expanded."""


def storage(id: Any) -> Storage:
    """Return the storage of a persistent id. Raises Damaged: the id means none."""
    # ("storage", class, key, device, elements), and in the old form also None, formerly a view of another storage.
    if type(id) is tuple and len(id) in (5, 6) and id[0] == "storage" and id[5:] in ((), (None,)):
        _, what, key, _, count = id[:5]
        dtype = STORAGES.get(what.name.replace("torch.cuda.", "torch.", 1)) if type(what) is Name else None
        if dtype is not None and type(key) is str and type(count) is int and 0 <= count < 1 << 48:
            return Storage(key, dtype, count)
    raise Damaged(f"has {quoted(id)} where a storage should be")


def describe(call: Call, places: Mapping[str, tuple[int, int]]) -> Strided:
    """Return the tensor of ``call``, checked to lie within its storage (``places``: key -> first byte, bytes)."""
    for _ in range(4):  # a parameter of a tensor with attributes
        if call.name in WRAPPED and call.args and type(call.args[0]) is Call:
            call = call.args[0]
        elif call.name == FROM_TYPE and len(call.args) == 4 and _are(call.args, (Name, Name, tuple)):
            call = Call(call.args[0].name, call.args[2])
    if call.name not in REBUILD:
        other = OTHER.fullmatch(call.name)
        raise NotDense(f"of the kind {other[1]}" if other else "no tensor")
    if len(call.args) < 4 or not _are(call.args, (Persistent, int, tuple, tuple)):
        raise Damaged("is described in a way that makes no sense")
    source, offset, shape, stride, *rest = call.args
    whole = all(type(n) is int and 0 <= n < 1 << 48 for n in (offset, *shape, *stride))
    if not whole or len(shape) != len(stride) or len(shape) > 8 or not countable(shape):
        raise Damaged("is described in a way that makes no sense")
    held = storage(source.id)
    dtype: torch.dtype | None = held.dtype
    if call.name == REBUILD[2]:  # which states a dtype of its own
        stated = rest[2] if len(rest) > 2 else None
        dtype = TYPES.get(stated.name) if type(stated) is Name else None
    if dtype is None or dtype not in DTYPES.values():
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES.values())
        raise NotDense(f"{str(dtype).removeprefix('torch.')}, none of {known}")
    if any(type(extra) is dict and any(extra.values()) for extra in rest[2:]):
        raise NotDense("a negated or conjugated view")
    start, size = places.get(held.key, (0, -1))
    if size != held.nbytes:
        raise Damaged(f"needs a storage of {held.nbytes:,} bytes that is not there")
    if math.prod(shape):
        reach = 0  # index of the last element
        for step, length in sorted(pair for pair in zip(stride, shape, strict=True) if pair[1] > 1):
            if step <= reach:
                raise NotDense("expanded, elements used more than once")
            reach += step * (length - 1)
        if (offset + reach + 1) * dtype.itemsize > size:
            raise Damaged("reaches beyond its storage")
    return Strided(dtype, shape, start + offset * dtype.itemsize, stride)


def is_tensor(value: Any) -> bool:
    """Return whether a pickle's value is a tensor, of any kind."""
    return type(value) is Call and (value.name == FROM_TYPE or OTHER.fullmatch(value.name) is not None)


def kind_of(value: Any) -> str:
    """Describe a pickle's value in words."""
    if isinstance(value, Name):
        return "a tensor" if is_tensor(value) else f"the object {shown(value.name)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _are(values: Sequence[Any], types: Sequence[type]) -> bool:
    return all(type(value) is kind for value, kind in zip(values, types, strict=False))
