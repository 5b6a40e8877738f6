"""Compute which entry of the checkpoint belongs in each place of a port's parameters, from the positions of its parts."""

import bisect
import itertools
import re
from collections.abc import Mapping
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.checkpoint.keys import expected, head_name
from gpt2.config import GPT2Config
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.stream import ModelPart
from gpt2.port.recording.dataflow import Holder, Region, Use
from gpt2.port.terms.places import Place

ZERO, KEEP = -1, -2  # in place of an entry's number: set to zero; leave unchanged
TABLES = ("wte", "wpe")
AT_ONCE = 1 << 22  # entries that are placed or written at a time, to save memory
LENGTHS = (8, 1, 32)  # of probes; a walk uses the first
MAX_WORK = 2e9  # parameters times tokens of each row: a longer probe has one row
SHARE = re.compile(r"attn\.([qkv])\b")  # a third of c_attn


def probes(config: GPT2Config, anatomy: Anatomy | None = None, rows: int = 2, work: float = MAX_WORK) -> list[Tensor]:
    """Return ids (B, T) of several lengths, drawn from a fixed seed, that a module of this anatomy takes.

    The longest fills the context where that takes no more than ``MAX_WORK``; else it is one row, as long as ``work`` allows.
    """
    length, vocabulary, context = 1, config.vocab_size, config.n_positions
    if anatomy is not None:
        length = anatomy.recording.ids.size(1)  # it may take no shorter text
        vocabulary = min(vocabulary, anatomy.stream.vocabulary, *[] if anatomy.head is None else [len(anatomy.head)])
        context = min(context, len(anatomy.positions.rows) if anatomy.positions else context)
    lengths = [min(each, context) for each in LENGTHS] if length <= min(LENGTHS[0], context) else [length]
    longest = min(context, int(work / config.num_parameters()))
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(vocabulary, (rows, each), generator=generator) for each in dict.fromkeys(lengths)]
    if longest > max(lengths):
        few = rows if config.num_parameters() * longest <= MAX_WORK else 1
        texts.append(torch.randint(vocabulary, (few, longest), generator=generator))
    padded = max(texts, key=Tensor.numel)[0, ::3]
    padded[::2], padded[1::2] = 0, vocabulary - 1  # often of padding
    return texts


class Grid(NamedTuple):
    """The place with the id ``row_ids[i] + column_ids[j]``, at first ``first``, takes ``rows[i] + columns[j]``, KEEP or ZERO."""

    row_ids: Tensor
    column_ids: Tensor
    rows: Tensor
    columns: Tensor
    part: ModelPart
    first: int


class Conflict(NamedTuple):
    """Places of a parameter that the forward pass uses as two sets of entries: ``taken`` was written, ``refused`` was not."""

    source: str
    taken: Tensor
    refused: Tensor


class WeightMap:
    """Which entry of the checkpoint fills each place; entries are numbered tensor after tensor, in the order of the key table.

    ``placed``: by tensor, the entries that have a place. ``misfits``: parts that the checkpoint lacks or has in another size.
    ``in_buffers``: parts that lie in buffers while others lie in parameters, with the buffers' names. ``fills_buffers``: all
    parts lie in buffers, or ``from_buffers`` maps these as well. ``conflicts``: complete after :meth:`entries` of all sources.
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
        self._grids: dict[int, list[Grid]] = {storage: [] for storage in self._storages}
        holders = {source.storage: source for source in anatomy.recording.sources if not source.is_parameter}
        holders |= {source.storage: source for source in anatomy.recording.sources if source.is_parameter}
        places = [(part, holders[self._storage(int(part.ids[0]))]) for part in anatomy.parts]
        self.fills_buffers = from_buffers or not any(holder.is_parameter for _, holder in places)
        self.in_buffers = [(part, holder.name) for part, holder in places if not (self.fills_buffers or holder.is_parameter)]
        parts = [part for part, holder in places if self.fills_buffers or holder.is_parameter]
        for part in sorted(parts, key=lambda part: part.part in TABLES):  # tables last: they set the remaining places to zero
            if self._fits(part):
                self._add(part)
            else:
                self.misfits.append(part)

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
    def sources(self) -> list[Holder]:
        """The parameters to fill, each under one name; also buffers, if the module keeps its weights there."""
        sources = (source for source in self.anatomy.recording.sources if source.is_parameter or self.fills_buffers)
        by_region: dict[Region, Holder] = {}
        for source in sources:
            by_region.setdefault(source.region, source)
        return list(by_region.values())

    def use(self, source: Holder) -> Use:
        """Return the use of a parameter's value for which it is filled."""
        return self.uses(source)[0]

    def uses(self, source: Holder) -> list[Use]:
        """Return how the forward pass uses a parameter's value; the unchanged value comes first."""
        return sorted(self.anatomy.recording.uses.get(source.storage, {Use()}), key=lambda use: (use != Use(), use))

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

    def values(self, entries: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers of these entries in float64; NaN for ZERO and KEEP. Raises KeyError for a tensor that is missing."""
        values = torch.full(entries.shape, torch.nan, dtype=torch.float64)
        for name, mine, places in self.by_tensor(entries):
            values[mine] = tensors[name].flatten()[places.long()].double()
        return values

    def entries(self, source: Holder) -> Tensor:
        """Return for each place of a parameter the number of the entry that fills it, or KEEP or ZERO."""
        rest = [storage for storage in self._storages if storage > source.storage]
        size = (rest[0] if rest else self.anatomy.recording.tokens) - source.storage
        filled = torch.full((size,), KEEP, dtype=self.dtype)
        for grid in self._grids[source.storage]:
            columns = grid.columns.to(self.dtype)
            for some in torch.arange(len(grid.rows)).split(max(1, AT_ONCE // max(1, len(columns)))):
                places = grid.row_ids[some, None] + (grid.column_ids - source.storage)
                before, entries = filled[places], grid.rows[some, None].to(self.dtype) + columns
                if bool((before != KEEP).any()):
                    differ = (before >= 0) & (entries >= 0) & (before != entries)  # another part has filled them
                    if bool(differ.any()):
                        self.conflicts.append(Conflict(source.name, before[differ], entries[differ]))
                    entries = torch.where((before >= 0) | ((before == ZERO) & (entries == KEEP)), before, entries)
                filled[places] = entries
        region = source.region
        return filled.as_strided(region.shape, region.strides, region.start - source.storage)

    def parts(self, source: Holder) -> list[ModelPart]:
        region, grids = source.region, self._grids[source.storage]
        parts = [grid.part for grid in grids if region.start <= grid.first <= region.last]
        return list({id(part): part for part in parts}.values())

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
        known = part.columns >= 0
        has_columns = bool((part.columns < width).all()) and bool(known.any() if part.part == "head" else known.all())
        return has_columns and (part.part in (*TABLES, "head") or bool((part.rows < height).all()))

    def _add(self, part: ModelPart) -> None:
        """Place a part; zero rows that the checkpoint lacks (not positions), a head's bias, and a second bias."""
        name, rows, known = self.target(part), part.rows, part.columns >= 0
        again = part.part.endswith(("c_proj.bias", "c_fc.bias")) and bool(self.placed[name][part.columns].all())
        height, width = (0, 0) if again else self._size(part)
        share = SHARE.match(part.part)
        step, first = (3 * width, "qkv".index(share[1]) * width) if share else (width, 0)
        inside, beyond = (rows >= 0) & (rows < height), rows >= height
        columns, column_ids = part.columns[known], part.column_ids[known]
        for taken, along in (inside, columns), (beyond, columns * 0):
            if not len(row_ids := part.row_ids[taken]):
                continue
            numbers = torch.full(row_ids.shape, KEEP if part.part == "wpe" else ZERO)
            if taken is inside:
                numbers = rows[inside] * step + first + self.starts[name]
                self.placed[name].view(-1, self.shapes[name][-1])[rows[inside][:, None], columns + first] = True
            for some in self._apart(row_ids + column_ids[:1]):
                for others in self._apart(column_ids + row_ids[:1]):
                    begin = int(row_ids[some][0] + column_ids[others][0])
                    grid = Grid(row_ids[some], column_ids[others], numbers[some], along[others], part, begin)
                    self._grids[self._storage(begin)].append(grid)

    def _apart(self, ids: Tensor) -> list[Tensor] | list[slice]:
        """Return the indices of the ids in each storage, each id once; repeated ids in groups of their own."""
        rising = len(ids) == 1 or bool((ids.diff() > 0).all())
        if rising and len(ids) and self._storage(int(ids[0])) == self._storage(int(ids[-1])):
            return [slice(None)]
        order = ids.argsort(stable=True)
        _, run, counts = ids[order].unique_consecutive(return_inverse=True, return_counts=True)
        group = torch.bucketize(ids, torch.tensor(self._storages), right=True) * len(ids)
        group[order] += torch.arange(len(ids)) - (counts.cumsum(0) - counts)[run]
        return [(group == number).nonzero()[:, 0] for number in group.unique()]
