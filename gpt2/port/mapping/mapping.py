"""Compute which entry of the checkpoint belongs in each place of a port's parameters, from where its parts lie."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import EllipsisType

import torch
from torch import Tensor

from gpt2.checkpoint.keys import expected
from gpt2.config import GPT2Config
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.parts import Part, Table, Vector, sample
from gpt2.port.recording.dataflow import Region, Source, Use

ZERO, KEEP = -1, -2  # instead of an entry's number: set to zero; leave as it is
MAX_ENTRIES = 1 << 22  # entries that are computed at a time, to save memory

# Part -> tensor of the checkpoint. The head is the token embedding again, transposed.
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
SHARES = {"attn.q": 0, "attn.k": 1, "attn.v": 2}


@dataclass(frozen=True)
class Rectangle:
    """A piece of a parameter and what fills it.

    For (i, j) below ``shape``, the place ``start + i * strides[0] + j * strides[1]`` takes the entry
    ``entry + i * steps[0] + j * steps[1]``. An ``entry`` below zero is KEEP or ZERO for all places.
    """

    start: int
    strides: tuple[int, int]
    entry: int
    steps: tuple[int, int]
    shape: tuple[int, int]

    def strips(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """The first place and the entries of a few rows at a time, so that a large rectangle needs little memory."""
        height = max(1, MAX_ENTRIES // self.shape[1])
        for i in range(0, self.shape[0], height):
            rows = torch.arange(i, min(i + height, self.shape[0]), dtype=dtype) * self.steps[0]
            entries = rows[:, None] + torch.arange(self.shape[1], dtype=dtype) * self.steps[1] + self.entry
            yield self.start + i * self.strides[0], entries


@dataclass(frozen=True)
class Conflict:
    """Places of a parameter that the forward pass uses as two sets of the checkpoint's entries: it holds ``taken``."""

    source: str
    taken: Tensor
    refused: Tensor


class Mapping:
    """Which entry fills each place. Entries are numbered tensor after tensor, in the order of the key table.

    ``placed``: by tensor, the entries that have a place. ``misfits``: parts that the checkpoint lacks, or has in another size.
    ``in_buffers``: parts that lie in buffers while others lie in parameters, and the buffers' names. ``fills_buffers``: all parts
    lie in buffers. ``conflicts`` are complete once :meth:`entries` was called for all sources.
    """

    def __init__(self, anatomy: Anatomy, config: GPT2Config) -> None:
        self.anatomy, self.config = anatomy, config
        self.shapes = expected(config)
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        self.starts = dict(zip(self.shapes, itertools.accumulate(sizes, initial=0), strict=False))
        self.names = list(self.shapes)
        self.dtype = torch.int32 if sum(sizes) < 2**31 else torch.int64
        self.placed = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in self.shapes.items()}
        self.conflicts: list[Conflict] = []
        self._storages = sorted({source.storage for source in anatomy.recording.sources})
        self._rectangles: dict[int, list[tuple[Rectangle, Part]]] = {storage: [] for storage in self._storages}
        self.misfits: list[Part] = []
        self.in_buffers: list[tuple[Part, str]] = []
        shared: dict[str, Tensor] = {}
        for part in sorted(self._parts(), key=lambda part: isinstance(part, Table)):  # tables last: they set what is left to zero
            if not self._fits(part):
                self.misfits.append(part)
                continue
            for rectangle in self._cut(part, self._is_surplus(part, shared)):
                self._rectangles[self._storage(rectangle.start)].append((rectangle, part))

    def _storage(self, id: int) -> int:
        return self._storages[bisect.bisect_right(self._storages, id) - 1]

    def owner(self, entry: int) -> str:
        """The checkpoint's tensor that an entry belongs to; "" below zero."""
        return self.names[bisect.bisect_right(list(self.starts.values()), entry) - 1] if entry >= 0 else ""

    def target(self, part: Part) -> str:
        """The checkpoint's tensor that a part is; "" for none."""
        return TARGETS.get(part.part, "").format(part.layer)

    @property
    def sources(self) -> list[Source]:
        """The parameters to fill, without other names of the same; buffers too, if the module keeps its weights there."""
        sources = (source for source in self.anatomy.recording.sources if source.is_parameter or self.fills_buffers)
        by_region: dict[Region, Source] = {}
        for source in sources:
            by_region.setdefault(source.region, source)
        return list(by_region.values())

    def uses(self, source: Source) -> list[Use]:
        """How the forward pass uses a parameter's value; the unchanged value first."""
        return sorted(self.anatomy.recording.uses.get(source.storage, {Use()}), key=lambda use: use != Use())

    def by_tensor(self, entries: Tensor) -> list[tuple[str, Tensor | EllipsisType, Tensor]]:
        """Group entries by the checkpoint's tensor: its name, a mask of its entries, and their flat indices in it.

        The mask is ``...`` if all entries are of one tensor. Entries below zero are in no group.
        """
        if not entries.numel():
            return []
        low, high = (int(end) for end in entries.aminmax())
        if low >= 0 and (name := self.owner(low)) == self.owner(high):
            return [(name, ..., entries - self.starts[name])]
        groups: list[tuple[str, Tensor | EllipsisType, Tensor]] = []
        for name, start in self.starts.items():
            stop = start + torch.Size(self.shapes[name]).numel()
            if low < stop and high >= start and bool((mine := (entries >= start) & (entries < stop)).any()):
                groups.append((name, mine, entries[mine] - start))
        return groups

    def entries(self, source: Source) -> Tensor:
        """For each place of a parameter, the number of the entry that fills it, or KEEP or ZERO."""
        rest = [storage for storage in self._storages if storage > source.storage]
        size = (rest[0] if rest else self.anatomy.recording.tokens) - source.storage
        filled = torch.full((size,), KEEP, dtype=self.dtype)
        for r, _ in self._rectangles[source.storage]:
            for start, entries in r.strips(self.dtype):
                view = filled.as_strided(entries.shape, r.strides, start - source.storage)
                if bool((view != KEEP).any()):  # filled by another part before
                    differ = (view >= 0) & (entries >= 0) & (view != entries)
                    if bool(differ.any()):
                        self.conflicts.append(Conflict(source.name, view[differ], entries[differ]))
                    entries = torch.where((view >= 0) | ((view == ZERO) & (entries == KEEP)), view, entries)
                view.copy_(entries)
        region = source.region
        return filled.as_strided(region.shape, region.strides, region.start - source.storage)

    def parts(self, source: Source) -> list[Part]:
        """The parts that lie in a parameter."""
        region = source.region
        parts = [part for r, part in self._rectangles[source.storage] if region.start <= r.start <= region.last]
        return list({id(part): part for part in parts}.values())

    def refused(self, name: str) -> bool:
        """Whether the module has such a part, but of another size than the checkpoint's."""
        return any(self.target(part) == name for part in self.misfits)

    def is_shifted(self, table: Table) -> bool:
        """Whether a table is used from a later row on, although it then has fewer rows than the checkpoint: a mistake."""
        spare = table.rows >= self.shapes[self.target(table)][0]
        words = {self.anatomy.recording.name(int(words.first[0])) for words in self.anatomy.words}
        return table.skipped > 0 and not spare and self.anatomy.recording.name(int(table.first[0])) not in words

    def _parts(self) -> list[Part]:
        """All parts, without those that lie in buffers, unless the module keeps all of its weights in buffers."""
        sources = self.anatomy.recording.sources
        parameters = {source.storage for source in sources if source.is_parameter}
        names = {source.storage: source.name for source in sources}
        places = [(part, self._storage(int(sample(part)[0]))) for part in self.anatomy.parts]
        self.fills_buffers = not any(storage in parameters for _, storage in places)
        if not self.fills_buffers:
            self.in_buffers = [(part, names[storage]) for part, storage in places if storage not in parameters]
            places = [(part, storage) for part, storage in places if storage in parameters]
        return [part for part, _ in places]

    def _fits(self, part: Part) -> bool:
        """Whether the checkpoint has such a part, of that size."""
        name = self.target(part)
        if self.anatomy.width != self.config.n_embd or (part.part != "head.bias" and name not in self.shapes):
            return False
        if part.part == "head.bias":
            return True
        *_, columns = shape = self.shapes[name]
        if isinstance(part, Table):
            return len(part.first) == columns
        if part.part.removesuffix(".bias") in SHARES:
            columns //= 3
        if isinstance(part, Vector):
            return bool((part.places >= 0).all() and (part.places < columns).all())
        if part.part == "head":
            return int(part.inputs.max()) < columns
        return int(part.inputs.max()) < shape[0] and 0 <= int(part.outputs.min()) <= int(part.outputs.max()) < columns

    def _is_surplus(self, part: Part, shared: dict[str, Tensor]) -> bool:
        """Whether an earlier part is this bias already: of several parameters (one for each head), the first is filled."""
        if not isinstance(part, Vector) or not part.part.endswith(("c_proj.bias", "c_fc.bias")):
            return False
        name = self.target(part)
        taken = shared.setdefault(name, torch.zeros(self.shapes[name], dtype=torch.bool))
        again = bool(taken[part.places].all())
        taken[part.places] = True
        return again

    def _cut(self, part: Part, surplus: bool) -> Iterator[Rectangle]:
        """A part as rectangles; a surplus bias, and one of the head, is set to zero."""
        if isinstance(part, Vector) and (surplus or part.part == "head.bias"):
            for i, n, stride, _ in _runs(part.ids, torch.zeros_like(part.ids)):
                yield Rectangle(int(part.ids[i]), (stride, 0), ZERO, (0, 0), (n, 1))
            return
        name = self.target(part)
        start, shape = self.starts[name], self.shapes[name]
        row = shape[-1]  # from one row of the tensor to the next
        shift = start + SHARES.get(part.part.removesuffix(".bias"), 0) * row // 3
        if isinstance(part, Vector):
            zero = torch.zeros(1, dtype=torch.int64)
            yield from self._outer(name, part.ids, part.places + shift, zero, zero)
        elif isinstance(part, Table):
            if self.is_shifted(part):
                part = replace(part, first=part.first - part.skipped * part.stride, rows=part.rows + part.skipped)
            rows = torch.arange(part.rows)
            beyond = ZERO if part.part == "wte" else KEEP
            yield from self._outer(
                name, rows * part.stride, (part.begin + rows) * row + start, part.first, torch.arange(row), shape[0], beyond
            )
        else:
            known = part.inputs >= 0
            inputs = part.inputs[known]
            for f, g, outputs in part.outer_sums():
                if part.part == "head":
                    yield from self._outer(name, f, outputs * row + shift, g[known], inputs, shape[0])
                else:
                    yield from self._outer(name, f, outputs + shift, g[known], inputs * row)

    def _outer(
        self, name: str, f: Tensor, to_f: Tensor, g: Tensor, to_g: Tensor, limit: int | None = None, beyond: int = ZERO
    ) -> Iterator[Rectangle]:
        """Places ``f + g`` take entries ``to_f + to_g``: of f, those below row ``limit`` of the tensor; the others ``beyond``."""
        cut = len(f) if limit is None else int((to_f < self.starts[name] + limit * self.shapes[name][-1]).sum())
        order = torch.argsort(to_f, stable=True)
        f, to_f = f[order], to_f[order]
        for j, m, b, d in _runs(g, to_g):
            for i, n, a, c in _runs(f[:cut], to_f[:cut]):
                yield (r := Rectangle(int(f[i] + g[j]), (a, b), int(to_f[i] + to_g[j]), (c, d), (n, m)))
                self.placed[name].as_strided(r.shape, r.steps, r.entry - self.starts[name]).fill_(True)
            for i, n, a, _ in _runs(f[cut:], torch.zeros_like(f[cut:])):
                yield Rectangle(int(f[cut + i] + g[j]), (a, b), beyond, (0, 0), (n, m))


def _runs(places: Tensor, entries: Tensor) -> list[tuple[int, int, int, int]]:
    """Cut two sequences into runs in which both rise evenly: (first index, length, step of the first, step of the second)."""
    n = len(places)
    steps = torch.stack((places.diff(), entries.diff()), dim=1)
    even = torch.zeros(n, dtype=torch.bool)  # whether the step to an element equals the step before
    even[2:] = (steps[1:] == steps[:-1]).all(1)
    rises = torch.zeros(n, dtype=torch.bool)
    rises[1:] = (steps[:, 0] > 0) & (steps[:, 1] >= 0)
    is_even, is_rising, pairs = even.tolist(), rises.tolist(), steps.tolist()
    runs, i = [], 0
    while i < n:
        stop = i + 1
        while stop < n and is_rising[stop] and (stop == i + 1 or is_even[stop]):
            stop += 1
        runs.append((i, stop - i, *(pairs[i] if stop - i > 1 else (0, 0))))
        i = stop
    return runs
