"""Find the embeddings in a recorded forward pass, and the parameters that are added to the residual stream.

Coordinates of the stream are those of the token embedding. What is added to it element by element has the same coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.port.anatomy.flow import Effect, Flow, State, Touch
from gpt2.port.recording.dataflow import Kind


class NotGPT2(Exception):
    """The module lacks something that every GPT-2 has; the message says what."""


@dataclass(frozen=True)
class Part:
    """A part of a GPT-2: parameters that are some rows and columns of one of the checkpoint's tensors.

    The parameter with the id ``row_ids[i] + column_ids[j]`` is the tensor's entry at row ``rows[i]`` and column ``columns[j]``. A
    row or column -1 is none of the tensor's. A vector is a single row. ``part`` is the tensor's name without the layer and
    ".weight": "wte", "ln_1.bias"; of c_attn it is "attn.q", "attn.k" or "attn.v", and the output head, which is the token
    embedding again, is "head". ``skipped``: how many rows of an embedding's parameter lie before the first that is used.
    """

    part: str
    layer: int | None
    rows: Tensor  # (N,)
    row_ids: Tensor  # (N,)
    columns: Tensor  # (M,)
    column_ids: Tensor  # (M,)
    skipped: int = 0

    @property
    def ids(self) -> Tensor:
        """(M,) parameters in the first row."""
        return self.row_ids[0] + self.column_ids


def vector(part: str, layer: int | None, ids: Tensor, places: Tensor) -> Part:
    """A bias, or a norm's scale or shift: the parameters ``ids`` (M,) are the entries ``places`` of the checkpoint's tensor."""
    row = torch.zeros(1, dtype=torch.int64)
    return Part(part, layer, row, row, places, ids)


class Stream:
    """``width``; ``words`` and ``positions``, the embedding tables (words perhaps in shards; positions None if none are learned).

    ``biases`` is a table of :class:`Flow`: the parameter that is added to each projection result. ``late_biases``: by projection,
    the parameters that are added to the stream right after its result, and their coordinates.

    Raises:
        NotGPT2: no table is looked up by the token ids.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow, self.recording = flow, flow.recording
        self.words: list[Part] = []
        self.positions: Part | None = None
        self.biases = flow.blank()
        self.late_biases: dict[int, tuple[Tensor, Tensor]] = {}
        self._coordinates = flow.blank()  # by origin
        self._read_tables()
        self._read_additions()

    @property
    def vocabulary(self) -> int:
        """How many tokens have an embedding."""
        return max(int(table.rows[-1]) + 1 for table in self.words)

    def coordinates(self, ids: Tensor) -> Tensor:
        """The stream coordinates of elements; -1 for elements that are not in the stream.

        A projection of the stream's width that is not added to anything (the residual is missing) begins a new stream.
        """
        roots = self.flow.root(ids)
        if bool(((self.flow.at(self._coordinates, roots) < 0) & (roots >= 0)).any()):
            new = self.flow.results(self.flow.owner(roots))
            if len(new) == self.width:
                self.flow.put(self._coordinates, new, torch.arange(self.width))
        return self.flow.at(self._coordinates, roots)

    def _read_tables(self) -> None:
        """Tables whose rows are chosen by the token ids, or by the tokens' positions."""
        tokens: list[int] = self.recording.ids.flatten().tolist()
        read: dict[str, dict[int, Tensor]] = {}  # by parameter and place: the entries that were read
        rows: dict[str, dict[int, int]] = {}  # and their row
        lookups: dict[str, list[int]] = {}
        for number, node in enumerate(self.recording.nodes):
            if node.kind is Kind.LOOKUP and node.index is not None:
                entries = node.tensors[0]
                name = self.recording.name(int(entries.flatten()[0]))
                lookups.setdefault(name, []).append(number)
                read[name] = self.flow.by_place(number, entries) | read.get(name, {})
                rows[name] = {p: int(x[0]) for p, x in self.flow.by_place(number, node.index).items()} | rows.get(name, {})
        begins = {name: _begin([by_place.get(place) for place in range(len(tokens))], tokens) for name, by_place in rows.items()}
        words = {name: begin for name, begin in begins.items() if begin is not None}
        self.width = max((len(read[name][self.flow.here]) for name in words), default=0)
        words = {name: begin for name, begin in words.items() if len(read[name][self.flow.here]) == self.width}
        if not words:
            raise NotGPT2("nothing in its forward looks up a table of parameters by the token ids")
        self._starts = {number for name in words for number in lookups[name]}
        self._start = next(results for number in sorted(self._starts) if len(results := self.flow.results(number)))
        self.flow.put(self._coordinates, self.flow.root(self._start), torch.arange(self.width))
        for name, begin in words.items():
            if (table := self._table("wte", read[name], rows[name], begin)) is None:
                raise NotGPT2(f"its token embedding ({name}) is no table with a row for each token")
            self.words.append(table)
        for name in [name for name in rows if name not in words]:
            if self.positions is None and len(set(rows[name].values())) == self.recording.ids.size(1):
                self.positions = self._table("wpe", read[name], rows[name])

    def _table(self, part: str, read: dict[int, Tensor], rows: dict[int, int], begin: int = 0) -> Part | None:
        """The table of which parameters (D,) were read in some rows, by place; None if they do not form one.

        Ids in a table rise evenly with the row. The parameter's axis with the same stride says how many rows there are. Row 0 is
        row ``begin`` of the checkpoint's table; rows before the checkpoint's first are skipped.
        """
        places = self.coordinates(self._start)
        if any(len(x) != self.width or bool((x < 0).any()) for x in read.values()) or len(set(rows.values())) < 2:
            return None
        low, high = min(rows, key=lambda place: rows[place]), max(rows, key=lambda place: rows[place])
        stride = int((read[high][0] - read[low][0]) // (rows[high] - rows[low]))
        first = read[low] - rows[low] * stride
        if not all(torch.equal(first + row * stride, read[place]) for place, row in rows.items()):
            return None
        region = self.recording.source(int(read[low][0])).region
        axes = [axis for axis, n in enumerate(region.shape) if n > 1 and region.strides[axis] == stride]
        size = region.shape[axes[0]] if axes else rows[high] + 1
        before = int(first.min() - region.start) // stride % size if axes else 0
        number = torch.arange(max(0, -begin), size - before)
        columns, ids = torch.arange(self.width), torch.empty_like(first).index_copy_(0, places, first)
        return Part(part, None, number + begin, number * stride, columns, ids, before + max(0, -begin))

    def _read_additions(self) -> None:
        """Biases, and positions that are not looked up but added as they are: they differ from place to place."""
        length = self.recording.ids.size(1)
        window = range(self.flow.here + 1 - length, self.flow.here + 1)  # the last sequence of the probe
        added: dict[str, dict[int, Tensor]] = {}  # by parameter and place: what is added to the embeddings
        for number, touch in [(number, touch) for number, touches in self.flow.touches.items() for touch in touches]:
            if touch.effect is not Effect.ADD:
                continue
            by_place = self.flow.by_place(number, touch.ids)
            place = self.flow.here if self.flow.here in by_place else next(iter(by_place))
            node = self.recording.nodes[number]
            ids, results = by_place[place], self.flow.by_place(number, torch.arange(node.start, node.stop))[place]
            if len(ids) == self.width and self.flow.owner(self.flow.root(results)) in self._starts:
                name = self.recording.name(int(ids[0]))
                added[name] = by_place | added.get(name, {})
            self._read_bias(number, touch, ids, results)
        for read in added.values():
            if self.positions is None and all(p in read for p in window) and not torch.equal(read[window[0]], read[window[-1]]):
                rows = {place: place - window[0] for place in window}
                self.positions = self._table("wpe", {place: read[place] for place in window}, rows)

    def _read_bias(self, number: int, touch: Touch, ids: Tensor, results: Tensor) -> None:
        origins = self.flow.origins(results)
        if touch.before is State.PROJECTED and self.flow.is_projection(self.flow.owner(origins)):
            free = self.flow.at(self.biases, origins) < 0
            self.flow.put(self.biases, origins[free], ids[free])
        elif touch.before is State.SUMMED and self.flow.newest[number] not in self.late_biases:
            self.late_biases[self.flow.newest[number]] = ids, self.coordinates(results)


def _begin(rows: list[int | None], tokens: list[int]) -> int | None:
    """The token id of row 0 of a table that is read by token ids; None for another. Tokens of another shard read row 0."""
    distances = {token - row for token, row in zip(tokens, rows, strict=True) if row}
    return distances.pop() if len(distances) == 1 and None not in rows else None
