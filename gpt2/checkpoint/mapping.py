"""From the parts of a port to its parameters: which entry of the checkpoint belongs in every single place, and that in words."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import GPT2Config
from .anatomy import Anatomy, Matrix, Table, Vector
from .dataflow import Region, Source
from .keys import expected

KEEP, ZERO, TORN = -1, -2, -3  # instead of an entry's number: leave as it is; set to zero; two entries contend

# Part -> (tensor of the checkpoint, its share of the columns). The head is the token embedding once more, on its side.
TARGETS = {
    "wte": "wte.weight",
    "wpe": "wpe.weight",
    "head": "wte.weight",
    **{f"attn.{part}": "h.{}.attn.c_attn.weight" for part in "qkv"},
    **{f"attn.{part}.bias": "h.{}.attn.c_attn.bias" for part in "qkv"},
    **{part: f"h.{{}}.{part}.weight" for part in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
    **{f"{part}.bias": f"h.{{}}.{part}.bias" for part in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
    **{f"{norm}.{kind}": f"h.{{}}.{norm}.{kind}" for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")},
    **{f"ln_f.{kind}": f"ln_f.{kind}" for kind in ("weight", "bias")},
}
SHARE = {"attn.q": 0, "attn.k": 1, "attn.v": 2}

Part = Matrix | Vector | Table


@dataclass(frozen=True)
class Conflict:
    """Places of a parameter that two parts of the forward pass use as different entries of the checkpoint."""

    source: str
    taken: str
    refused: str


class Mapping:
    """Entries of the checkpoint are numbered through, tensor after tensor, in the order of the key table."""

    def __init__(self, anatomy: Anatomy, config: GPT2Config) -> None:
        self.anatomy, self.config = anatomy, config
        self.shapes = expected(config)
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        self.starts = dict(zip(self.shapes, itertools.accumulate(sizes, initial=0), strict=False))
        self.placed = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in self.shapes.items()}
        self.conflicts: list[Conflict] = []
        self.parts_of: dict[int, list[Part]] = {}  # first id of a storage -> parts that lie in it
        self._storages = sorted({source.storage for source in anatomy.recording.sources})
        for part in sorted(anatomy.parts, key=lambda part: isinstance(part, Table)):  # what a table leaves, it sets to zero
            if self._fits(part):
                for storage in self._touched(part):
                    self.parts_of.setdefault(storage, []).append(part)
        self._second_biases()

    def name(self, entry: int) -> str:
        """The checkpoint's tensor that an entry belongs to."""
        names = list(self.starts)
        return names[bisect.bisect_right(list(self.starts.values()), entry) - 1]

    def target(self, part: Part) -> str | None:
        template = TARGETS.get(part.part)
        return None if template is None else template.format(part.layer) if "{}" in template else template

    def entries(self, source: Source) -> Tensor:
        """For each place of a parameter, the number of the entry that fills it, or KEEP, ZERO or TORN."""
        found = torch.full((self._size(source.storage),), KEEP)
        for part in self.parts_of.get(source.storage, []):
            for ids, entries in self._cells(part):
                ids, entries = torch.broadcast_tensors(ids, entries)
                places, entries = (ids - source.storage).flatten(), entries.flatten()
                if not isinstance(part, Vector) or self._touched(part) != [source.storage]:
                    inside = (places >= 0) & (places < len(found))
                    places, entries = places[inside], entries[inside]
                before = found[places]
                if isinstance(part, Table):
                    entries = torch.where((before != KEEP) & (entries < 0), before, entries)
                contended = (before >= 0) & (entries >= 0) & (before != entries)
                if bool(contended.any()):
                    names = [self.name(int(x[contended][0])) for x in (before, entries)]
                    self.conflicts.append(Conflict(source.name, *names))
                    entries = torch.where(contended, before, entries)
                found[places] = entries
        region = source.region
        return found.as_strided(region.shape, region.strides, region.start - source.storage)

    def _size(self, storage: int) -> int:
        """How many ids a storage has, up to the next."""
        rest = [s for s in self._storages if s > storage]
        return (rest[0] if rest else self.anatomy.recording.tokens) - storage

    def _fits(self, part: Part) -> bool:
        """Whether the checkpoint has such a part, of that size."""
        if part.part == "head.bias":
            return True
        name = self.target(part)
        if name not in self.shapes:
            return False
        *_, columns = shape = self.shapes[name]
        if isinstance(part, Table):
            return len(part.first) == columns
        if part.part in SHARE or part.part.removesuffix(".bias") in SHARE:
            columns //= 3
        if isinstance(part, Vector):
            return bool((part.places >= 0).all() and (part.places < columns).all())
        if part.part == "head":
            return int(part.inputs.max()) < columns
        return int(part.inputs.max()) < shape[0] and int(part.outputs.max()) < columns

    def _touched(self, part: Part) -> list[int]:
        """The storages that a part lies in."""
        if isinstance(part, Matrix):
            operand = part.node.operands[part.node.weight]
            ids = (
                torch.tensor([operand.start])
                if isinstance(operand, Region)
                else torch.cat([x.flatten() for x, _, _ in part.cells()])
            )
        else:
            ids = part.first if isinstance(part, Table) else part.ids
        found = torch.searchsorted(torch.tensor(self._storages), ids.contiguous(), right=True) - 1
        return [self._storages[i] for i in found.unique().tolist()]

    def _cells(self, part: Part) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter ids, entry numbers), which broadcast."""
        if part.part in ("head.bias", "surplus"):
            yield part.ids, torch.full_like(part.ids, ZERO)
            return
        name = self.target(part)
        start, shape = self.starts[name], self.shapes[name]
        shift = SHARE.get(part.part.removesuffix(".bias"), 0) * shape[-1] // 3
        if isinstance(part, Vector):
            yield part.ids, start + shift + part.places
        elif isinstance(part, Table):
            yield from self._table_cells(part, start, shape)
        elif part.part == "head":
            for ids, rows, columns in part.cells():
                yield ids, torch.where(columns < shape[0], start + columns * shape[1] + rows, ZERO)
        else:
            for ids, rows, columns in part.cells():
                yield ids, torch.where(rows < 0, KEEP, start + rows * shape[1] + shift + columns)

    def _table_cells(self, part: Table, start: int, shape: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        rows = torch.arange(part.rows)
        for some in rows.split(max(1, (1 << 22) // shape[1])):
            beyond = ZERO if part.part == "wte" else KEEP
            entries = torch.where(some[:, None] < shape[0], start + some[:, None] * shape[1] + torch.arange(shape[1]), beyond)
            yield part.first + some[:, None] * part.stride, entries

    def _second_biases(self) -> None:
        """A bias that several parameters share in (one per head, say) goes into the first; the others are set to zero."""
        seen: dict[str, Tensor] = {}
        for parts in self.parts_of.values():
            for number, part in enumerate(parts):
                name = self.target(part)
                if not isinstance(part, Vector) or name is None or not part.part.endswith(("c_proj.bias", "c_fc.bias")):
                    continue
                taken = seen.setdefault(name, torch.zeros(self.shapes[name], dtype=torch.bool))
                if bool(taken[part.places].all()):
                    parts[number] = Vector("surplus", part.layer, part.ids, part.places)
                taken[part.places] = True


def describe(entries: Tensor, mapping: Mapping) -> tuple[tuple[str, ...], str]:
    """The checkpoint's tensors in a parameter, and what was done to them, in words."""
    segments = _segments(entries, mapping)
    names = tuple(dict.fromkeys(name for _, name, _ in segments if name))
    words = [(where, name, _words(part, name, mapping)) for where, name, part in segments]
    if len(words) == 1:
        return names, words[0][2]
    if len({text for _, _, text in words}) == 1 and len(names) == len(words):
        return names, f"stacked along the first axis, each {words[0][2]}" if words[0][
            2
        ] != "none" else "stacked along the first axis"
    return names, "; ".join(f"{where}: {f'{name}, {text}' if name else text}" for where, name, text in words)


def _segments(entries: Tensor, mapping: Mapping) -> list[tuple[str, str, Tensor]]:
    """Pieces along one axis that come from one tensor each: (where, tensor's name or "", entries)."""

    def owner(part: Tensor) -> set[int]:
        starts = torch.tensor(list(mapping.starts.values()))
        found = torch.where(part < 0, part, torch.searchsorted(starts, part.contiguous(), right=True) - 1)
        return set(found.unique().tolist())

    def label(found: set[int]) -> str:
        number = next(iter(found))
        return list(mapping.starts)[number] if number >= 0 else ""

    whole = owner(entries)
    if len(whole) == 1 or entries.ndim == 0:
        return [("", label(whole), entries)]
    for axis in range(entries.ndim):
        slices = [owner(part) for part in entries.unbind(axis)]
        if any(len(found) > 1 for found in slices):
            continue
        result, start = [], 0
        for found, run in itertools.groupby(slices, key=lambda found: next(iter(found))):
            stop = start + len(list(run))
            what = ("rows" if axis == 0 else "columns") if entries.ndim > 1 else "entries"
            part = entries.narrow(axis, start, stop - start)
            part = part.squeeze(axis) if stop - start == 1 and entries.ndim > 1 else part
            result.append((f"{what} {start}:{stop}", label({found}), part))
            start = stop
        return result
    return [("", label({max(whole)}), entries)]


def _words(entries: Tensor, name: str, mapping: Mapping) -> str:
    """What was done to one tensor to get ``entries``."""
    if not name:
        return {ZERO: "zeros", KEEP: "left as they are"}.get(int(entries.flatten()[0]), "?")
    shape = mapping.shapes[name]
    if bool((entries < 0).any()):
        return "scattered among places that are left as they are"
    places = torch.unravel_index(entries - mapping.starts[name], shape)
    long = [axis for axis, n in enumerate(entries.shape) if n > 1]
    moves = [[axis for axis in long if not torch.equal(p, p.select(axis, 0).unsqueeze(axis).expand_as(p))] for p in places]
    if len({axis for axes in moves for axis in axes}) < sum(map(len, moves)):
        return "rearranged entry by entry"
    words = []
    for number, (place, axes) in enumerate(zip(places, moves, strict=True)):
        index = place
        for axis in reversed(range(place.ndim)):
            index = index if axis in axes else index.select(axis, 0)
        kind = "entries" if len(shape) == 1 else ("rows", "columns")[number]
        words.append(_span(index.flatten().tolist(), kind, shape[number], mapping, name, number == len(shape) - 1))
    words = [word for word in words if word]
    order = [axis for axes in moves for axis in axes]
    sizes = [entries.shape[axis] for axis in order]
    if order != sorted(order) and len(order) == 2:
        words.append("transposed")
    elif order != sorted(order) or len(order) > len(shape) or tuple(entries.shape) != tuple(sizes):
        if len(shape) == 2 and tuple(entries.shape) != shape or len(shape) == 1 and entries.ndim > 1:
            words.append(f"reshaped to ({', '.join(map(str, entries.shape))})")
    return ", ".join(words) or "none"


def _span(index: list[int], kind: str, size: int, mapping: Mapping, name: str, last: bool) -> str:
    """A selection along one axis of the checkpoint's tensor; "" for all in order."""
    if index == list(range(size)):
        return ""
    cuts = [0, *(i for i in range(1, len(index)) if index[i] != index[i - 1] + 1), len(index)]
    runs = [(index[a], index[b - 1] + 1) for a, b in itertools.pairwise(cuts)]
    of = f" ({_share(runs[0], size, mapping.config)})" if ".c_attn." in name and last and len(runs) == 1 else ""
    if len(runs) == 1:
        a, b = runs[0]
        return (f"{kind} {a}:{b}" if b - a > 1 else f"{kind} {a}") + of
    shown = ", ".join(f"{a}:{b}" if b - a > 1 else str(a) for a, b in runs[:4])
    return f"{kind} {shown}{', ...' if len(runs) > 4 else ''}"


def _share(run: tuple[int, int], size: int, config: GPT2Config) -> str:
    """Which of q, k, v and which head a run of columns of c_attn is."""
    width, (start, stop) = size // 3, run
    parts = [part for number, part in enumerate("qkv") if start < (number + 1) * width and stop > number * width]
    inside = start % width
    if len(parts) == 1 and stop - start == config.head_dim and inside % config.head_dim == 0:
        return f"head {inside // config.head_dim} of {parts[0]}"
    return ", ".join(parts)
