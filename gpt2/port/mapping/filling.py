"""Write a checkpoint's entries into a module's parameters, as the mapping says, and describe the source of each parameter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.anatomy.stream import ModelPart
from gpt2.port.mapping.mapping import KEEP, ZERO, WeightMap
from gpt2.port.mapping.report import MappingRow
from gpt2.port.recording.dataflow import Source, Use
from gpt2.port.recording.forward import Borrowed

MAX_ENTRIES = 1 << 22  # entries filled at a time, to save memory

# How each part is recognised in the forward pass.
EVIDENCE = {
    "wte": "the token ids choose its rows",
    "wpe": "added to the stream, other rows at other positions",
    "attn.q": "its results are matched against the keys, for the position that the mix is for",
    "attn.k": "its results are matched against the queries, for the positions that are mixed",
    "attn.v": "its results are what attention mixes",
    "attn.c_proj": "takes the mix back to the stream",
    "mlp.c_fc": "takes the stream to units that only the next projection reads",
    "mlp.c_proj": "takes the hidden units back to the stream",
    "attn.q.bias": "added to the queries",
    "attn.k.bias": "added to the keys",
    "attn.v.bias": "added to the values",
    "attn.c_proj.bias": "added to what attention gives back",
    "mlp.c_fc.bias": "added to the hidden units",
    "mlp.c_proj.bias": "added to what the feed-forward gives back",
    "ln_1": "the normed stream before the queries",
    "ln_2": "the normed stream before the feed-forward",
    "ln_f": "the normed stream at the end",
    "head": "its results are the logits",
    "head.bias": "added to the logits, where GPT-2 adds nothing",
}


@dataclass(frozen=True)
class Filled:
    """The result of filling one parameter: the report's ``row`` (None if nothing was written), and whether it is ``complete``."""

    source: Source
    row: MappingRow | None
    complete: bool
    words: str


def fill(borrowed: Borrowed, mapping: WeightMap, state: Mapping[str, Tensor]) -> list[Filled]:
    results = []
    for source in mapping.sources:
        entries = mapping.entries(source)
        low, high = (int(end) for end in entries.aminmax()) if entries.numel() else (ZERO, ZERO)
        names, words = describe(entries, mapping)
        row = None
        if high != KEEP:
            use = mapping.uses(source)[0]
            put(borrowed.tensors[source.name], entries, mapping, state, use)
            change = f", less {use.shift:.4g}" if use.shift else ""
            change += f", divided by {use.scale:.4g}" if use.scale != 1 else ""
            reasons = dict.fromkeys(_evidence(part) for part in mapping.parts(source))
            row = MappingRow(source.name, source.region.shape, names, words + change, "; ".join(reasons))
        results.append(Filled(source, row, low != KEEP, words))
    return results


def put(target: Tensor, entries: Tensor, mapping: WeightMap, state: Mapping[str, Tensor], use: Use) -> None:
    """Write the checkpoint's entries into a parameter; invert ``use``, so that the forward pass computes with the entries."""
    if target.numel() > MAX_ENTRIES and len(target) > 1:
        for half, numbers in zip(target.chunk(2), entries.chunk(2), strict=True):
            put(half, numbers, mapping, state, use)
        return
    pieces = mapping.by_tensor(entries)
    if all(mine is not ... for _, mine, _ in pieces):
        target.masked_fill_(entries == ZERO, -use.shift / use.scale)
    for name, mine, numbers in pieces:
        values = state[name].flatten().index_select(0, numbers.flatten()).to(target)
        if mine is ...:
            target.copy_(values.view(target.shape)).sub_(use.shift).div_(use.scale)
        else:
            target[mine] = (values - use.shift) / use.scale


def _evidence(part: ModelPart) -> str:
    stem, _, leaf = part.part.partition(".")
    does = f"{'scales' if leaf == 'weight' else 'shifts'} {EVIDENCE[stem]}" if stem.startswith("ln_") else EVIDENCE[part.part]
    return does if part.layer is None else f"block {part.layer}: {does}"


def describe(entries: Tensor, mapping: WeightMap) -> tuple[tuple[str, ...], str]:
    """Return the names of the checkpoint's tensors in a parameter, and what was done to them, in words."""
    segments = _segments(entries, mapping)
    names = tuple(dict.fromkeys(name for _, name, _ in segments if name))
    words = [(where, name, _words(part, name, mapping)) for where, name, part in segments]
    if len(words) == 1:
        return names, words[0][2]
    if len({text for _, _, text in words}) == 1 and len(names) == len(words):
        each = f", each {words[0][2]}" if words[0][2] != "none" else ""
        return names, f"stacked along the first axis{each}"
    return names, "; ".join(f"{where}: {f'{name}, {text}' if name else text}" for where, name, text in words)


def _segments(entries: Tensor, mapping: WeightMap) -> list[tuple[str, str, Tensor]]:
    """Cut along one axis into pieces from one tensor each: (where, the tensor's name or "", entries)."""
    names, starts = list(mapping.starts), torch.tensor(list(mapping.starts.values()), dtype=entries.dtype)

    def owners(entries: Tensor) -> Tensor:
        return torch.where(entries < 0, entries, torch.searchsorted(starts, entries.contiguous(), right=True) - 1)

    for axis in range(entries.ndim):
        others = [other for other in range(entries.ndim) if other != axis]
        low, high = (owners(end) for end in ((entries.amin(others), entries.amax(others)) if others else (entries, entries)))
        if not torch.equal(low, high):
            continue
        numbers, counts = low.unique_consecutive(return_counts=True)
        parts = entries.split(counts.tolist(), axis)
        if len(parts) == 1:
            return [("", names[int(numbers)] if int(numbers) >= 0 else "", entries)]
        result, start = [], 0
        for number, part in zip(numbers.tolist(), parts, strict=True):
            stop = start + part.size(axis)
            what = ("rows" if axis == 0 else "columns") if entries.ndim > 1 else "entries"
            part = part.squeeze(axis) if stop - start == 1 and entries.ndim > 1 else part
            result.append((f"{what} {start}:{stop}", names[number] if number >= 0 else "", part))
            start = stop
        return result
    return [("", mapping.owner(int(entries.max())), entries)]


def _words(entries: Tensor, name: str, mapping: WeightMap) -> str:
    """Describe how ``entries`` were taken from one tensor."""
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
        index = place[tuple(slice(None) if axis in axes else slice(1) for axis in range(entries.ndim))]
        kind = "entries" if len(shape) == 1 else ("rows", "columns")[number]
        words.append(_span(index.flatten().tolist(), kind, shape[number], mapping.config, name))
    if order != sorted(order) and entries.ndim == 2:
        words.append("transposed")
    elif entries.ndim > len(shape):
        words.append(f"reshaped to ({', '.join(map(str, entries.shape))})")
    return ", ".join(filter(None, words)) or "none"


def _span(index: list[int], kind: str, size: int, config: GPT2Config, name: str) -> str:
    """Describe which rows, columns or entries of a tensor were taken, and their order; "" for all in order."""
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
    """Return the order of the axes q|k|v, head and unit, if the selection only reorders them; "" otherwise."""
    sizes = {"head": config.n_head, "unit": config.head_dim}
    if ".c_attn." in name and kind != "rows":
        sizes = {"q|k|v": 3, **sizes}
    elif not (name.endswith("attn.c_proj.weight") and kind == "rows"):
        return ""
    natural = torch.arange(math.prod(sizes.values())).view(*sizes.values())
    orders = itertools.permutations(range(len(sizes)))
    order = next((order for order in orders if index == natural.permute(order).flatten().tolist()), ())
    return ", ".join(list(sizes)[axis] for axis in order)


def _share(run: tuple[int, int], size: int, config: GPT2Config) -> str:
    width, (start, stop) = size // 3, run
    head, unit = divmod(start % width, config.head_dim)
    parts = "qkv"[start // width : (stop - 1) // width + 1]
    return f"head {head} of {parts}" if stop - start == config.head_dim and not unit and len(parts) == 1 else ", ".join(parts)
