"""From the parts of a port to its parameters: which entry of the checkpoint belongs in every single place."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.checkpoint.keys import expected
from gpt2.config import GPT2Config
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.parts import Part, Table, Vector, first_id
from gpt2.port.recording.dataflow import Source

ZERO, KEEP = -1, -2  # instead of an entry's number: set to zero; leave as it is
PIECE = 1 << 22  # entries that are held at a time

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
SHARES = {"attn.q": 0, "attn.k": 1, "attn.v": 2}


@dataclass(frozen=True)
class Rectangle:
    """A piece of a parameter and what fills it: the place ``start + i * strides[0] + j * strides[1]`` takes the entry
    ``entry + i * steps[0] + j * steps[1]``, for (i, j) below ``shape``; an ``entry`` below zero is KEEP or ZERO for all."""

    start: int
    strides: tuple[int, int]
    entry: int
    steps: tuple[int, int]
    shape: tuple[int, int]

    def strips(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Piece by piece, so that a large one needs little memory: the first place, and the entries."""
        height = max(1, PIECE // self.shape[1])
        for i in range(0, self.shape[0], height):
            rows = torch.arange(i, min(i + height, self.shape[0]), dtype=dtype) * self.steps[0]
            entries = rows[:, None] + torch.arange(self.shape[1], dtype=dtype) * self.steps[1] + self.entry
            yield self.start + i * self.strides[0], entries


@dataclass(frozen=True)
class Conflict:
    """Places of a parameter that the forward pass uses as two different sets of the checkpoint's entries."""

    source: str
    taken: Tensor
    refused: Tensor


class Mapping:
    """Entries of the checkpoint are numbered through, tensor after tensor, in the order of the key table."""

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
        self.misfits: list[Part] = []  # parts that the checkpoint has not, or of another size
        self.in_buffers: list[tuple[Part, str]] = []  # parts that are no parameters, beside others that are
        shared: dict[str, Tensor] = {}
        for part in sorted(self._parts(), key=lambda part: isinstance(part, Table)):  # what a table leaves, it sets to zero
            if not self._fits(part):
                self.misfits.append(part)
                continue
            for rectangle in self._cut(self._once(part, shared)):
                storage = self._storages[bisect.bisect_right(self._storages, rectangle.start) - 1]
                self._rectangles[storage].append((rectangle, part))

    def owner(self, entry: int) -> str:
        """The checkpoint's tensor that an entry belongs to; "" below zero."""
        return self.names[bisect.bisect_right(list(self.starts.values()), entry) - 1] if entry >= 0 else ""

    def target(self, part: Part) -> str | None:
        """The checkpoint's tensor that a part is."""
        template = TARGETS.get(part.part)
        return template and template.format(part.layer)

    def entries(self, source: Source) -> Tensor:
        """For each place of a parameter, the number of the entry that fills it, or KEEP or ZERO."""
        rest = [storage for storage in self._storages if storage > source.storage]
        size = (rest[0] if rest else self.anatomy.recording.tokens) - source.storage
        found = torch.full((size,), KEEP, dtype=self.dtype)
        for r, _ in self._rectangles[source.storage]:
            for start, entries in r.strips(self.dtype):
                view = found.as_strided(entries.shape, r.strides, start - source.storage)
                if bool((view != KEEP).any()):  # used before
                    contend = (view >= 0) & (entries >= 0) & (view != entries)
                    if bool(contend.any()):
                        self.conflicts.append(Conflict(source.name, view[contend], entries[contend]))
                    entries = torch.where((view >= 0) | ((view == ZERO) & (entries == KEEP)), view, entries)
                view.copy_(entries)
        region = source.region
        return found.as_strided(region.shape, region.strides, region.start - source.storage)

    def parts(self, source: Source) -> list[Part]:
        """The parts that lie in a parameter."""
        region = source.region
        inside = [part for r, part in self._rectangles[source.storage] if region.start <= r.start <= region.last]
        return list({id(part): part for part in inside}.values())

    def refused(self, name: str) -> bool:
        """Whether the module has such a part, but of another size than the checkpoint's."""
        return any(self.target(part) == name for part in self.misfits)

    def is_shifted(self, table: Table) -> bool:
        """Whether a table is used from a later row on although it has no rows to spare: by mistake, it seems."""
        spare = table.rows >= self.shapes[self.target(table)][0]
        words = {self.anatomy.recording.name(int(words.first[0])) for words in self.anatomy.words}
        return table.skipped > 0 and not spare and self.anatomy.recording.name(int(table.first[0])) not in words

    def _parts(self) -> list[Part]:
        """All parts, without those that lie in buffers, unless the module keeps all of its weights in buffers."""
        sources = self.anatomy.recording.sources
        parameters = {source.storage for source in sources if source.is_parameter}
        names = {source.storage: source.name for source in sources}
        inside = [(part, self._storages[bisect.bisect_right(self._storages, first_id(part)) - 1]) for part in self.anatomy.parts]
        if any(storage in parameters for _, storage in inside):
            self.in_buffers = [(part, names[storage]) for part, storage in inside if storage not in parameters]
            inside = [(part, storage) for part, storage in inside if storage in parameters]
        self.fills_buffers = not parameters & {storage for _, storage in inside}
        return [part for part, _ in inside]

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

    def _once(self, part: Part, shared: dict[str, Tensor]) -> Part:
        """A bias that several parameters have a share in (one per head, say) goes into the first; the others become zero."""
        if not isinstance(part, Vector) or not part.part.endswith(("c_proj.bias", "c_fc.bias")):
            return part
        name = self.target(part)
        taken = shared.setdefault(name, torch.zeros(self.shapes[name], dtype=torch.bool))
        again = bool(taken[part.places].all())
        taken[part.places] = True
        return Vector("surplus", None, part.ids, part.places) if again else part

    def _cut(self, part: Part) -> Iterator[Rectangle]:
        """A part as rectangles."""
        if part.part in ("head.bias", "surplus"):
            for i, n, stride, _ in _runs(part.ids, torch.zeros_like(part.ids)):
                yield Rectangle(int(part.ids[i]), (stride, 0), ZERO, (0, 0), (n, 1))
            return
        name = self.target(part)
        start, shape = self.starts[name], self.shapes[name]
        row = shape[-1]  # from one row of the tensor to the next
        shift = start + SHARES.get(part.part.removesuffix(".bias"), 0) * row // 3
        if isinstance(part, Vector):
            yield from self._outer(
                name, part.ids, part.places + shift, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
            )
        elif isinstance(part, Table):
            part = (
                replace(part, first=part.first - part.skipped * part.stride, rows=part.rows + part.skipped)
                if self.is_shifted(part)
                else part
            )
            rows = torch.arange(part.rows)
            beyond = ZERO if part.part == "wte" else KEEP
            yield from self._outer(
                name, rows * part.stride, (part.begin + rows) * row + start, part.first, torch.arange(row), shape[0], beyond
            )
        else:
            known = part.inputs >= 0
            inputs = part.inputs[known]
            for f, g, outputs in part.outer():
                along = (outputs * row, inputs, shape[0]) if part.part == "head" else (outputs, inputs * row, None)
                yield from self._outer(name, f, along[0] + shift, g[known], along[1], along[2], ZERO)

    def _outer(
        self, name: str, f: Tensor, to_f: Tensor, g: Tensor, to_g: Tensor, limit: int | None = None, beyond: int = ZERO
    ) -> Iterator[Rectangle]:
        """Places ``f + g`` take entries ``to_f + to_g``; the first ``limit`` of f only, the others ``beyond``."""
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
    """Cut two sequences where either changes its pace, so that both rise evenly: (first, how many, their two steps)."""
    n = len(places)
    steps = torch.stack((places.diff(), entries.diff()), dim=1)
    even = torch.zeros(n, dtype=torch.bool)  # whether an element goes on at the pace of the two before
    even[2:] = (steps[1:] == steps[:-1]).all(1)
    rises = torch.zeros(n, dtype=torch.bool)
    rises[1:] = (steps[:, 0] > 0) & (steps[:, 1] >= 0)
    even, rises, paces = even.tolist(), rises.tolist(), steps.tolist()
    found, i = [], 0
    while i < n:
        stop = i + 1
        while stop < n and rises[stop] and (stop == i + 1 or even[stop]):
            stop += 1
        found.append((i, stop - i, *(paces[i] if stop - i > 1 else (0, 0))))
        i = stop
    return found
