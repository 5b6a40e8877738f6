"""The weights that a port holds, in the checkpoint's own layout: what :func:`gpt2.load_into` does, read backwards.

The mapping says which entry of the checkpoint belongs in every place of a port. So what lies there is the port's own value of
that entry, and all of them together are a checkpoint that our model could run with.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.port.anatomy.parts import Matrix
from gpt2.port.mapping.mapping import KEEP, ZERO, Mapping
from gpt2.port.recording.dataflow import Source, Use

ONES = (".ln_1.weight", ".ln_2.weight", "ln_f.weight")  # what a norm without a scale multiplies with is one

ROUNDING = 1e-15


@dataclass(frozen=True)
class Own:
    """``weights`` by the checkpoint's names, float64, and ``placed``, of the same shapes, where the port has an entry at all.

    Elsewhere the weights hold what leaves GPT-2 as the port is (no bias, a scale of one), or, of a matrix, the checkpoint's own.
    ``names`` are the port's parameters that hold each tensor; ``head`` (V, D) the head's, where it is another parameter than the
    token embedding, and its name; ``extra`` what is added where GPT-2 adds nothing, and its norm; ``shared``, of a share of
    c_attn without a parameter of its own, the parameter that serves, and as what it serves besides.
    """

    weights: dict[str, Tensor]
    placed: dict[str, Tensor]
    names: dict[str, tuple[str, ...]]
    head: Tensor | None = None
    head_name: str = ""
    extra: dict[str, float] = field(default_factory=dict)
    shared: dict[str, tuple[str, str]] = field(default_factory=dict)


@torch.no_grad()
def own_weights(mapping: Mapping, tensors: MappingType[str, Tensor], state: MappingType[str, Tensor]) -> Own:
    """Read them out of ``tensors``, the port's parameters and buffers by name; ``state`` is the checkpoint."""
    weights: dict[str, Tensor] = {}
    placed = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in state.items()}
    names: dict[str, list[str]] = {name: [] for name in state}
    extra: dict[str, float] = {}
    shared: dict[str, tuple[str, str]] = {}
    heads: list[tuple[str, Tensor, Tensor]] = []
    recording, seen = mapping.anatomy.recording, set()
    words = {recording.source(int(table.first[0])).storage for table in mapping.anatomy.words}
    for source in recording.sources:
        if not (source.is_parameter or mapping.fills_buffers) or source.region in seen:
            continue
        seen.add(source.region)
        entries, value = mapping.entries(source), _value(mapping, source, tensors[source.name])
        parts = mapping.parts(source)
        if parts and all(part.part == "head" and isinstance(part, Matrix) for part in parts) and source.storage not in words:
            heads.append((source.name, entries, value))
            continue
        surplus = entries == ZERO
        if parts and bool(surplus.any()) and source.storage not in words and bool((norm := value[surplus].norm()) > 0):
            extra[source.name] = float(norm)
        if name := _whole(mapping, entries, value, weights, placed):
            names[name].append(source.name)
            continue
        for name in _scatter(mapping, entries, value, weights, placed):
            names[name].append(source.name)
    weights = {name: weights[name] if name in weights else _neutral(name, tensor.shape) for name, tensor in state.items()}
    for conflict in mapping.conflicts:  # what serves as two parts
        taken = torch.empty(conflict.taken.shape, dtype=torch.float64)
        for name, mine, places in _split(mapping, conflict.taken):
            taken[mine] = weights[name].flatten()[places]
        for name in _scatter(mapping, conflict.refused, taken, weights, placed):
            names[name].append(conflict.source)
            if ".c_attn." in name:
                one, other = (_share(mapping, int(entries[0])) for entries in (conflict.refused, conflict.taken))
                shared[f"{name} ({one})"] = conflict.source, other
    for name, tensor in list(weights.items()):
        if tensor.ndim > 1 and bool(placed[name].any() if name == "wpe.weight" else not placed[name].all()):
            weights[name] = torch.where(placed[name], tensor, state[name].double())
        if torch.equal(weights[name], state[name]):
            weights[name] = state[name]  # the same object, so that nobody need compare again
        else:  # (g - 1) + 1 is not g
            same = (weights[name] - state[name]).abs() <= ROUNDING * (1 + state[name].abs())
            weights[name] = torch.where(same, state[name], weights[name])
    return Own(weights, placed, {name: tuple(found) for name, found in names.items()}, *_head(mapping, heads), extra, shared)


def _neutral(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, 1.0 if f".{name}".endswith(ONES) else 0.0, dtype=torch.float64)


def _value(mapping: Mapping, source: Source, tensor: Tensor) -> Tensor:
    """What the computation sees of a parameter."""
    use = min(mapping.anatomy.recording.uses.get(source.storage, {Use()}), key=lambda use: use != Use())
    value = tensor.detach().to("cpu", torch.float64)
    return value if use == Use() else value * use.scale + use.shift


def _split(mapping: Mapping, entries: Tensor) -> list[tuple[str, Tensor, Tensor]]:
    """Entries by the tensor that they are of: its name, a mask of those entries, and their places in it."""
    found = []
    low, high = (int(end) for end in entries.aminmax()) if entries.numel() else (KEEP, KEEP)
    if low >= 0 and (name := mapping.owner(low)) == mapping.owner(high):  # all of one tensor: no masks needed
        return [(name, ..., entries - mapping.starts[name])]
    for name, start in mapping.starts.items():
        stop = start + torch.Size(mapping.shapes[name]).numel()
        if high < start or low >= stop:
            continue
        mine = (entries >= start) & (entries < stop)
        if bool(mine.any()):
            found.append((name, mine, entries[mine] - start))
    return found


def _share(mapping: Mapping, entry: int) -> str:
    """Which of q, k and v an entry of c_attn is of; the tensor's name for another."""
    name = mapping.owner(entry)
    width = mapping.shapes[name][-1]
    return "qkv"[(entry - mapping.starts[name]) % width * 3 // width] if ".c_attn." in name else name


def _whole(mapping: Mapping, entries: Tensor, value: Tensor, weights: dict[str, Tensor], placed: dict[str, Tensor]) -> str:
    """Take a parameter that is one tensor of the checkpoint, as it is or on its side, without a copy: its name, "" for others."""
    name = mapping.owner(int(entries.flatten()[0])) if entries.numel() else ""
    if not name or name in weights or entries.numel() != placed[name].numel():
        return ""
    numbers = torch.arange(entries.numel(), dtype=entries.dtype).view(placed[name].shape) + mapping.starts[name]
    for turned in (False, True) if entries.ndim == 2 else (False,):
        there = numbers.t() if turned else numbers
        if entries.shape == there.shape and torch.equal(entries, there):
            weights[name] = value.t() if turned else value
            placed[name].fill_(True)
            return name
    return ""


def _scatter(
    mapping: Mapping, entries: Tensor, value: Tensor, weights: dict[str, Tensor], placed: dict[str, Tensor]
) -> list[str]:
    """Put values where their entries belong; which tensors those are of."""
    found = _split(mapping, entries)
    for name, mine, places in found:
        if name not in weights:
            weights[name] = _neutral(name, mapping.shapes[name])
        elif not weights[name].is_contiguous() or not bool((~placed[name]).any()):
            weights[name] = weights[name].clone(memory_format=torch.contiguous_format)  # the parameter's own memory
        weights[name].view(-1)[places] = value[mine]
        placed[name].view(-1)[places] = True
    return [name for name, _, _ in found]


def _head(mapping: Mapping, heads: list[tuple[str, Tensor, Tensor]]) -> tuple[Tensor | None, str]:
    """The head's own matrix (V, D), zero where it has none; of a vocabulary that is cut in pieces, together."""
    if not heads:
        return None, ""
    found = torch.zeros(mapping.shapes["wte.weight"], dtype=torch.float64)
    seen = torch.zeros(mapping.shapes["wte.weight"], dtype=torch.bool)
    for _, entries, value in heads:
        _scatter(mapping, entries, value, {"wte.weight": found}, {"wte.weight": seen})
    return found, heads[0][0]
