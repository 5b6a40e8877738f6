"""Describe in words what was done to the checkpoint's tensors to make a parameter of them: transposed, stacked, cut."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.mapping.mapping import KEEP, ZERO, Mapping


def describe(entries: Tensor, mapping: Mapping) -> tuple[tuple[str, ...], str]:
    """The checkpoint's tensors in a parameter, and what was done to them, in words."""
    segments = _segments(entries, mapping)
    names = tuple(dict.fromkeys(name for _, name, _ in segments if name))
    words = [(where, name, _words(part, name, mapping)) for where, name, part in segments]
    if len(words) == 1:
        return names, words[0][2]
    if len({text for _, _, text in words}) == 1 and len(names) == len(words):
        each = f", each {words[0][2]}" if words[0][2] != "none" else ""
        return names, f"stacked along the first axis{each}"
    return names, "; ".join(f"{where}: {f'{name}, {text}' if name else text}" for where, name, text in words)


def _segments(entries: Tensor, mapping: Mapping) -> list[tuple[str, str, Tensor]]:
    """Pieces along one axis that come from one tensor each: (where, tensor's name or "", entries)."""

    def owner(low: int, high: int) -> str | int | None:
        """The one tensor, or the one number below zero, that all entries from low to high belong to; None for several."""
        if low < 0:
            return low if high == low else None
        return name if (name := mapping.owner(low)) == mapping.owner(high) else None

    whole = owner(int(entries.min()), int(entries.max()))
    if whole is not None:
        return [("", whole if isinstance(whole, str) else "", entries)]
    for axis in range(entries.ndim):
        others = [other for other in range(entries.ndim) if other != axis]
        ends = (entries.amin(others), entries.amax(others)) if others else (entries, entries)
        owners = [owner(*ends) for ends in zip(*(end.tolist() for end in ends), strict=True)]
        if None in owners:
            continue
        result, start = [], 0
        for name, run in itertools.groupby(owners):
            stop = start + len(list(run))
            what = ("rows" if axis == 0 else "columns") if entries.ndim > 1 else "entries"
            part = entries.narrow(axis, start, stop - start)
            part = part.squeeze(axis) if stop - start == 1 and entries.ndim > 1 else part
            result.append((f"{what} {start}:{stop}", name if isinstance(name, str) else "", part))
            start = stop
        return result
    return [("", mapping.owner(int(entries.max())), entries)]


def _words(entries: Tensor, name: str, mapping: Mapping) -> str:
    """What was done to one tensor to get ``entries``."""
    if not name:
        return {ZERO: "zeros", KEEP: "left as they are"}[int(entries.flatten()[0])]
    if int(entries.min()) < 0:
        return "in part"
    shape, start = mapping.shapes[name], mapping.starts[name]
    rows, columns = (torch.arange(n, dtype=entries.dtype) for n in (shape if len(shape) == 2 else (1, *shape)))
    whole = start + rows[:, None] * len(columns) + columns
    if entries.shape == shape and torch.equal(entries, whole.view(shape)):
        return "none"
    if entries.ndim == 2 and entries.shape == whole.mT.shape and torch.equal(entries, whole.mT):
        return "transposed"
    places = torch.unravel_index(entries - start, shape)
    moves = [[axis for axis in range(entries.ndim) if not bool((p == p.narrow(axis, 0, 1)).all())] for p in places]
    order = [axis for axes in moves for axis in axes]
    if len(set(order)) < len(order):
        return "rearranged entry by entry"
    words = []
    for number, (place, axes) in enumerate(zip(places, moves, strict=True)):
        for axis in range(entries.ndim):
            place = place if axis in axes else place.narrow(axis, 0, 1)
        kind = "entries" if len(shape) == 1 else ("rows", "columns")[number]
        words.append(_span(place.flatten().tolist(), kind, shape[number], mapping.config, name))
    words = [word for word in words if word]
    if order != sorted(order) and entries.ndim == 2:
        words.append("transposed")
    elif entries.ndim > len(shape):
        words.append(f"reshaped to ({', '.join(map(str, entries.shape))})")
    return ", ".join(words) or "none"


def _span(index: list[int], kind: str, size: int, config: GPT2Config, name: str) -> str:
    """Which rows, columns or entries of the checkpoint's tensor were taken, and in which order; "" for all in order."""
    if index == list(range(size)):
        return ""
    cuts = [0, *(i for i in range(1, len(index)) if index[i] != index[i - 1] + 1), len(index)]
    runs = [(index[a], index[b - 1] + 1) for a, b in itertools.pairwise(cuts)]
    if name == "wpe.weight" and kind == "rows" and len(runs) == 1 and runs[0][0] == 0:
        return f"first {runs[0][1]} positions"
    order = _order(index, config, name, kind)
    if order:
        return f"{kind} by ({order})"
    shown = ", ".join(f"{a}:{b}" if b - a > 1 else str(a) for a, b in runs[:4])
    of = f" ({_share(runs[0], size, config)})" if ".c_attn." in name and kind != "rows" and len(runs) == 1 else ""
    return f"{kind} {shown}{', ...' if len(runs) > 4 else ''}{of}"


def _order(index: list[int], config: GPT2Config, name: str, kind: str) -> str:
    """The order of the axes q|k|v, head and unit, if the selection only reorders them; "" otherwise."""
    axes = {"head": config.n_head, "unit": config.head_dim}
    if ".c_attn." in name and kind != "rows":
        axes = {"q|k|v": 3, **axes}
    elif not (name.endswith("attn.c_proj.weight") and kind == "rows"):
        return ""
    natural = torch.arange(torch.Size(axes.values()).numel()).view(*axes.values())
    for order in itertools.permutations(range(len(axes))):
        if index == natural.permute(order).flatten().tolist():
            return ", ".join(list(axes)[axis] for axis in order)
    return ""


def _share(run: tuple[int, int], size: int, config: GPT2Config) -> str:
    """Which of q, k and v, and which head, a run of columns of c_attn is."""
    width, (start, stop) = size // 3, run
    parts = [part for number, part in enumerate("qkv") if start < (number + 1) * width and stop > number * width]
    inside = start % width
    if len(parts) == 1 and stop - start == config.head_dim and inside % config.head_dim == 0:
        return f"head {inside // config.head_dim} of {parts[0]}"
    return ", ".join(parts)
