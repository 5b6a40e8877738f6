"""Compute which entry of the checkpoint belongs in each place of a port's parameters, from the positions of its parts."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterator
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.checkpoint.keys import expected, head_name
from gpt2.config import GPT2Config
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.stream import ModelPart
from gpt2.port.recording.dataflow import Region, Source, Use
from gpt2.port.terms.places import Place

ZERO, KEEP = -1, -2  # in place of an entry's number: set to zero; leave unchanged
TABLES = ("wte", "wpe")
SHARE = re.compile(r"attn\.([qkv])\b")  # a third of c_attn


class Rectangle(NamedTuple):
    """For (i, j) below ``shape``, ``start + i*strides[0] + j*strides[1]`` takes the entry ``entry + i*steps[0] + j*steps[1]``.

    If ``entry`` is KEEP or ZERO, that holds for all places.
    """

    start: int
    strides: tuple[int, int]
    entry: int
    steps: tuple[int, int]
    shape: tuple[int, int]


class Conflict(NamedTuple):
    """Places of a parameter that the forward pass uses as two sets of entries: ``taken`` was written, ``refused`` was not."""

    source: str
    taken: Tensor
    refused: Tensor


class WeightMap:
    """Which entry of the checkpoint fills each place; entries are numbered tensor after tensor, in the order of the key table.

    ``placed``: by tensor, the entries that have a place. ``misfits``: parts that the checkpoint lacks or has in another size.
    ``in_buffers``: parts that lie in buffers while others lie in parameters, with the buffers' names. ``fills_buffers``: all
    parts lie in buffers, or ``from_buffers`` maps these as well. ``conflicts`` are complete after :meth:`entries` has run for all
    sources.
    """

    def __init__(self, anatomy: Anatomy, config: GPT2Config, *, from_buffers: bool = False) -> None:
        self.anatomy, self.config = anatomy, config
        self.shapes = expected(config)
        sizes = [torch.Size(shape).numel() for shape in self.shapes.values()]
        self.starts = dict(zip(self.shapes, itertools.accumulate(sizes, initial=0), strict=False))
        self.dtype = torch.int32 if sum(sizes) < 2**31 else torch.int64
        self.placed = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in self.shapes.items()}
        self.conflicts: list[Conflict] = []
        self.misfits: list[ModelPart] = []
        self._storages = sorted({source.storage for source in anatomy.recording.sources})
        self._rectangles: dict[int, list[tuple[Rectangle, ModelPart]]] = {storage: [] for storage in self._storages}
        holders = {source.storage: source for source in anatomy.recording.sources if not source.is_parameter}
        holders |= {source.storage: source for source in anatomy.recording.sources if source.is_parameter}
        places = [(part, holders[self._storage(int(part.ids[0]))]) for part in anatomy.parts]
        self.fills_buffers = from_buffers or not any(holder.is_parameter for _, holder in places)
        self.in_buffers = [(part, holder.name) for part, holder in places if not (self.fills_buffers or holder.is_parameter)]
        parts = [part for part, holder in places if self.fills_buffers or holder.is_parameter]
        for part in sorted(parts, key=lambda part: part.part in TABLES):  # tables last: they set the remaining places to zero
            if not self._fits(part):
                self.misfits.append(part)
                continue
            for rectangle in self._cut(part):
                self._rectangles[self._storage(rectangle.start)].append((rectangle, part))

    def _storage(self, id: int) -> int:
        return self._storages[bisect.bisect_right(self._storages, id) - 1]

    def owner(self, entry: int) -> str:
        """Return the name of the tensor that an entry belongs to; "" for ZERO and KEEP."""
        return list(self.starts)[bisect.bisect_right(list(self.starts.values()), entry) - 1] if entry >= 0 else ""

    def place(self, entry: int) -> Place:
        """Return the place of an entry, of which third if it is c_attn's."""
        name = self.owner(entry)
        place, width = Place.of(name), self.shapes[name][-1]
        column = (entry - self.starts[name]) % width
        return Place(place.layer, place.part, "qkv"[column * 3 // width]) if ".c_attn." in name else place

    def target(self, part: ModelPart) -> str:
        """Return the name of the checkpoint's tensor for a part; "" for a bias of the head."""
        name = re.sub(r"^attn\.[qkv]\b", "attn.c_attn", head_name(self.shapes) if part.part == "head" else part.part)
        name += "" if name.endswith((".weight", ".bias")) else ".weight"
        return "" if part.part == "head.bias" else name if part.layer is None else f"h.{part.layer}.{name}"

    @property
    def sources(self) -> list[Source]:
        """The parameters to fill, each under one name; also buffers, if the module keeps its weights there."""
        sources = (source for source in self.anatomy.recording.sources if source.is_parameter or self.fills_buffers)
        by_region: dict[Region, Source] = {}
        for source in sources:
            by_region.setdefault(source.region, source)
        return list(by_region.values())

    def uses(self, source: Source) -> list[Use]:
        """Return how the forward pass uses a parameter's value; the unchanged value comes first."""
        return sorted(self.anatomy.recording.uses.get(source.storage, {Use()}), key=lambda use: use != Use())

    def by_tensor(self, entries: Tensor) -> list[tuple[str, Tensor | EllipsisType, Tensor]]:
        """Group entries by tensor: name, mask (``...`` for all), flat indices in the tensor. ZERO and KEEP are left out."""
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
        """Return for each place of a parameter the number of the entry that fills it, or KEEP or ZERO."""
        rest = [storage for storage in self._storages if storage > source.storage]
        size = (rest[0] if rest else self.anatomy.recording.tokens) - source.storage
        filled = torch.full((size,), KEEP, dtype=self.dtype)
        for r, _ in self._rectangles[source.storage]:
            view = filled.as_strided(r.shape, r.strides, r.start - source.storage)
            rows, columns = (torch.arange(n, dtype=self.dtype) * step for n, step in zip(r.shape, r.steps, strict=True))
            if int(view.max()) == KEEP:
                torch.add(rows[:, None] + r.entry, columns, out=view)
                continue
            entries = rows[:, None] + r.entry + columns
            differ = (view >= 0) & (entries >= 0) & (view != entries)  # another part has filled them
            if bool(differ.any()):
                self.conflicts.append(Conflict(source.name, view[differ], entries[differ]))
            view.copy_(torch.where((view >= 0) | ((view == ZERO) & (entries == KEEP)), view, entries))
        region = source.region
        return filled.as_strided(region.shape, region.strides, region.start - source.storage)

    def parts(self, source: Source) -> list[ModelPart]:
        region = source.region
        parts = [part for r, part in self._rectangles[source.storage] if region.start <= r.start <= region.last]
        return list({id(part): part for part in parts}.values())

    @property
    def skips_positions(self) -> bool:
        """Whether the port reads positions from a later row of a table without spare rows: a mistake."""
        table = self.anatomy.positions
        if table is None or not table.skipped or len(table.rows) >= self.config.n_positions:
            return False
        name = self.anatomy.recording.name
        return name(int(table.ids[0])) not in {name(int(words.ids[0])) for words in self.anatomy.words}

    def _size(self, part: ModelPart) -> tuple[int, int]:
        """Return the checkpoint's number of rows and columns of a part; a vector is one row."""
        *rows, columns = self.shapes.get(self.target(part), (0, 0))
        return (rows[0] if rows else 1), columns // 3 if SHARE.match(part.part) else columns

    def _fits(self, part: ModelPart) -> bool:
        """Return whether the checkpoint has such a part, of that size; tables may have more rows or fewer."""
        if self.anatomy.width != self.config.n_embd:
            return False
        if part.part == "head.bias":
            return True
        height, width = self._size(part)
        has_columns = bool((part.columns < width).all()) and (part.part == "head" or bool((part.columns >= 0).all()))
        return has_columns and (part.part in (*TABLES, "head") or bool((part.rows < height).all()))

    def _cut(self, part: ModelPart) -> Iterator[Rectangle]:
        """Yield a part as rectangles; zero rows that the checkpoint lacks (not positions), a head's bias, and a second bias."""
        name, rows, row_ids = self.target(part), part.rows, part.row_ids
        if part is self.anatomy.positions and self.skips_positions:
            rows = torch.arange(len(rows) + part.skipped)
            row_ids = (rows - part.skipped) * (row_ids[1] - row_ids[0])
        again = part.part.endswith(("c_proj.bias", "c_fc.bias")) and bool(self.placed[name][part.columns].all())
        height, width = (0, 0) if again else self._size(part)
        first = self.starts.get(name, 0)
        step, start = width, first
        if share := SHARE.match(part.part):
            step, start = 3 * width, first + "qkv".index(share[1]) * width
        inside, known, beyond = (rows >= 0) & (rows < height), part.columns >= 0, rows >= height
        in_tensor, outside = _runs(row_ids[inside], rows[inside] * step), _runs(row_ids[beyond], 0 * rows[beyond])
        for column_id, column, m, b, d in _runs(part.column_ids[known], part.columns[known]):
            for row_id, row, n, a, c in in_tensor:
                yield (r := Rectangle(row_id + column_id, (a, b), start + row + column, (c, d), (n, m)))
                self.placed[name].as_strided(r.shape, r.steps, r.entry - first).fill_(True)
            for row_id, _, n, a, _ in outside:
                yield Rectangle(row_id + column_id, (a, b), KEEP if part.part == "wpe" else ZERO, (0, 0), (n, m))


def _runs(places: Tensor, entries: Tensor) -> list[tuple[int, int, int, int, int]]:
    """Cut two sequences into runs in which both rise evenly: (first place, first entry, length, step of places, of entries)."""
    points = list(zip(places.tolist(), entries.tolist(), strict=True))
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(points)]
    runs, i = [], 0
    while i < len(points):
        step, stop = (0, 0), i + 1
        if i < len(steps) and steps[i][0] > 0 and steps[i][1] >= 0:
            step = steps[i]
            while stop < len(points) and steps[stop - 1] == step:
                stop += 1
        runs.append((*points[i], stop - i, *step))
        i = stop
    return runs
