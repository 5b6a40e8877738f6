"""Match every tensor of a checkpoint to a parameter of the model; report all mismatches at once.

Files differ in names (:mod:`gpt2.checkpoint.keys`), orientation and omissions. The orientation is decided once per file, from
the matrices that are not square: the square `attn.c_proj` fits both ways, so a decision per tensor would load it transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from gpt2.checkpoint import keys
from gpt2.checkpoint.containers import Container, listed
from gpt2.config import GPT2Config
from gpt2.errors import CheckpointError


@dataclass(frozen=True)
class Assignment:
    """The mapping from parameters to tensors of the files."""

    files: Mapping[str, Container]  # key -> the open file that holds it
    sources: Mapping[str, str]  # parameter -> key
    shapes: Mapping[str, tuple[int, ...]]  # parameter -> shape, in the order of the forward pass
    transposed: bool  # the blocks' matrices are stored [out, in], as in nn.Linear
    absent: tuple[str, ...]  # all biases, if the file has none: zeros
    dropped: tuple[str, ...]  # redundant keys

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every stored tensor."""
        return reduce(torch.promote_types, (self.files[key].entries[key].dtype for key in self.sources.values()))

    def read(self, name: str, dtype: torch.dtype, *, mapped: bool = True) -> Tensor:
        """Read one parameter to the CPU: a view of the mapped file if dtype and alignment allow it and ``mapped``."""
        if name in self.absent:
            return torch.zeros(self.shapes[name], dtype=dtype)
        key = self.sources[name]
        tensor = self.files[key].read(key, dtype, mapped=mapped)
        tensor = tensor.squeeze(0) if tensor.ndim == 3 else tensor
        return tensor.t() if self.transposed and name in matrices(self.shapes) else tensor


def matrices(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the parameters that nn.Linear stores transposed. Embeddings are not among them."""
    return [name for name, shape in shapes.items() if len(shape) == 2 and name.startswith("h.")]


def match(files: Mapping[str, Container], config: GPT2Config, where: Path) -> Assignment:
    """Assign every tensor to one parameter, or to a reason for dropping it. Raises CheckpointError: lists all mismatches."""
    wanted = keys.expected(config)
    sources: dict[str, str] = {}
    extras: dict[str, str] = {}
    twice: list[str] = []
    for key in files:
        name = keys.from_file(key)
        taken = sources if name in wanted else extras
        twice += [key] if name in taken else []
        taken[name] = key
    entries = {name: files[key].entries[key] for name, key in (sources | extras).items()}
    dropped, faults = _drop(files, extras, sources.get("wte.weight"))
    biases = {name for name in wanted if name.endswith(".bias")}
    absent = () if biases & sources.keys() else tuple(name for name in wanted if name in biases)
    faults |= {
        "missing": [name for name in wanted if name not in sources and name not in absent],
        "present with and without prefix": twice,
        "not floating point": [key for name, key in sources.items() if not entries[name].dtype.is_floating_point],
    }
    # If the tensors agree on another size than the config's, one statement explains many mismatches.
    stated = {**vars(config), "n_inner": config.inner}
    actual = keys.sizes({name: entry.shape for name, entry in entries.items()})
    problems = [f"config says {key} {stated[key]}, the tensors {size}" for key, size in actual.items() if size != stated[key]]
    problems += [f"{title}: {listed(wrong)}" for title, wrong in faults.items() if wrong]
    shapes = {name: entries[name].shape for name in wanted if name in sources}
    shapes |= {name: keys.without_leading_one(shapes[name]) for name in matrices(wanted) if name in shapes}
    turned_shapes = {name: wanted[name][::-1] for name in matrices(wanted)}
    oblong = [name for name, shape in turned_shapes.items() if name in shapes and shape != wanted[name]]
    straight = [name for name in oblong if shapes[name] == wanted[name]]
    reversed_ = [name for name in oblong if shapes[name] == turned_shapes[name]]
    transposed = len(reversed_) > len(straight)
    fits = wanted | (turned_shapes if transposed else {})
    misshapen = [
        f"{sources[name]} is {list(shapes[name])}, expected {list(fits[name])}" for name in shapes if shapes[name] != fits[name]
    ]
    if misshapen:
        more = f" and {len(misshapen) - 4:,} more" if len(misshapen) > 4 else ""
        why = f" ({len(straight)} matrices lie [in, out] and {len(reversed_)} [out, in])" if straight and reversed_ else ""
        problems.append(f"misshapen: {', '.join(misshapen[:4])}{more}{why}")
    if problems:
        raise CheckpointError(
            f"{where}: the tensors do not fit the config: {'; '.join(problems)}; correct the config or the file"
        )
    return Assignment(files, sources, wanted, transposed, absent, tuple(dropped))


def _drop(
    files: Mapping[str, Container], extras: Mapping[str, str], embedding: str | None
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the redundant keys, and the faults of all other extra keys."""
    dropped: list[str] = []
    faults: dict[str, list[str]] = {}
    for name, key in extras.items():
        if keys.CAUSAL_MASK.fullmatch(name):
            empty, fault = _is_causal_mask(files[key], key), "not the causal mask"
        elif keys.MASKED_SCORE.fullmatch(name):
            empty, fault = files[key].entries[key].shape in ((), (1,)), "not a scalar"
        elif name in keys.TIED_HEADS:
            same = embedding is not None and _same(files, key, embedding)
            empty, fault = same, "an untied head, which GPT-2 does not have"
        else:
            empty, fault = bool(keys.TRAINING_STATE.fullmatch(name)), "unexpected"
        (dropped if empty else faults.setdefault(fault, [])).append(key)
    return dropped, faults


def _is_causal_mask(file: Container, key: str) -> bool:
    shape = file.entries[key].shape
    if len(shape) != 4 or shape[:2] != (1, 1) or shape[2] != shape[3] or shape[3] == 0:
        return False
    mask = file.read(key)[0, 0]
    return torch.equal(mask, torch.ones_like(mask).tril())


def _same(files: Mapping[str, Container], one: str, other: str) -> bool:
    """Return whether two tensors are equal bit by bit."""
    a, b = files[one].entries[one], files[other].entries[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    bits = [files[key].read(key).reshape(-1).view(torch.uint8) for key in (one, other)]
    return torch.equal(*bits)
