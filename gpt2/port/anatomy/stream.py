"""Find the embeddings in a recorded forward pass, and the parameters that are added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.port.anatomy.flow import Effect, Flow, StreamState
from gpt2.port.recording.dataflow import NodeKind


class NotGPT2(Exception):
    """Raised when the module lacks a part that every GPT-2 has; the message says which."""


@dataclass(frozen=True)
class ModelPart:
    """A part of a GPT-2: parameters that are some rows and columns of one of the checkpoint's tensors.

    The parameter with the id ``row_ids[i] + column_ids[j]`` is the entry at row ``rows[i]`` and column ``columns[j]``; -1 means
    that the tensor has no such row or column. A vector is a single row. ``part`` is the tensor's name without layer and
    ".weight": "wte", "ln_1.bias"; "attn.q", "attn.k", "attn.v" for c_attn; "head" for the output head (the token embedding
    again).
    """

    part: str
    layer: int | None
    rows: Tensor  # (N,)
    row_ids: Tensor  # (N,)
    columns: Tensor  # (M,)
    column_ids: Tensor  # (M,)

    @property
    def ids(self) -> Tensor:
        """The ids (M,) of the parameters in the first row."""
        return self.row_ids[0] + self.column_ids


def vector(part: str, layer: int | None, ids: Tensor, places: Tensor) -> ModelPart:
    """Return a bias or a norm's scale or shift as a part: ``ids`` (M,) are the entries ``places`` of the tensor."""
    row = torch.zeros(1, dtype=torch.int64)
    return ModelPart(part, layer, row, row, places, ids)


class Stream:
    """The residual stream: its ``width``, the token embedding ``words``, and ``positions`` or None.

    ``biases``: a table of :class:`Flow` with the parameter added to each projection result. ``late_biases``: by projection, the
    parameters added to the stream right after it, and their coordinates. Coordinates are those of the token embedding.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow, self.recording = flow, flow.recording
        self.positions: ModelPart | None = None
        self.biases = flow.blank()
        self.late_biases: dict[int, tuple[Tensor, Tensor]] = {}
        self._coordinates = flow.blank()  # by origin
        self._read_tables()
        self._read_additions()

    @property
    def vocabulary(self) -> int:
        return len(self.words.rows)

    def coordinates(self, ids: Tensor) -> Tensor:
        """Return elements' stream coordinates, else -1; a projection of full width with no residual begins a new stream."""
        roots = self.flow.root(ids)
        if bool(((self.flow.at(self._coordinates, roots) < 0) & (roots >= 0)).any()):
            new = self.flow.results(self.flow.owner(roots))
            if len(new) == self.width:
                self.flow.put(self._coordinates, new, torch.arange(self.width))
        return self.flow.at(self._coordinates, roots)

    def _read_tables(self) -> None:
        """Find the tables that are indexed by token ids or by positions."""
        read: dict[str, dict[int, Tensor]] = {}  # by parameter and place: the entries read
        rows: dict[str, dict[int, int]] = {}  # and their rows
        lookups: dict[str, list[int]] = {}
        for number, node in enumerate(self.recording.nodes):
            if node.kind is NodeKind.LOOKUP and node.index is not None:
                entries = node.tensors[0]
                name = self.recording.name(int(entries.flatten()[0]))
                lookups.setdefault(name, []).append(number)
                read[name] = self.flow.by_place(number, entries) | read.get(name, {})
                rows[name] = {p: int(x[0]) for p, x in self.flow.by_place(number, node.index).items()} | rows.get(name, {})
        tokens = dict(enumerate(self.recording.ids.flatten().tolist()))
        words = [name for name, by_place in rows.items() if by_place == tokens]
        if not words:
            raise NotGPT2("nothing in its forward looks up a table of parameters by the token ids")
        name = max(words, key=lambda name: len(read[name][self.flow.here]))
        self.width = len(read[name][self.flow.here])
        self._starts = set(lookups[name])
        self._start = next(results for number in lookups[name] if len(results := self.flow.results(number)))
        self.flow.put(self._coordinates, self.flow.root(self._start), torch.arange(self.width))
        if (table := self._table("wte", read[name], rows[name])) is None:
            raise NotGPT2(f"its token embedding ({name}) is not a table with a row for each token")
        self.words = table
        for name in [name for name in rows if name not in words]:
            if self.positions is None and len(set(rows[name].values())) == self.recording.ids.size(1):
                self.positions = self._table("wpe", read[name], rows[name])

    def _table(self, part: str, read: dict[int, Tensor], rows: dict[int, int]) -> ModelPart | None:
        """Return the table that rows ``read`` (D,) form, by place, or None: ids in a table rise evenly with the row."""
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
        before = int(first.min() - region.start) // stride % size if axes else 0  # rows of the parameter before the table's first
        number = torch.arange(size - before)
        ids = torch.empty_like(first).index_copy_(0, places, first)
        return ModelPart(part, None, number, number * stride, torch.arange(self.width), ids)

    def _read_additions(self) -> None:
        """Find biases, and positions that are added without a lookup: these differ from place to place."""
        length = self.recording.ids.size(1)
        window = range(self.flow.here + 1 - length, self.flow.here + 1)  # the last sequence of the probe
        added: dict[str, dict[int, Tensor]] = {}  # by parameter and place: ids added to the embeddings
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
            origins = self.flow.origins(results)
            if touch.before is StreamState.PROJECTED and self.flow.is_projection(self.flow.owner(origins)):
                free = self.flow.at(self.biases, origins) < 0
                self.flow.put(self.biases, origins[free], ids[free])
            elif touch.before is StreamState.SUMMED and self.flow.newest[number] not in self.late_biases:
                self.late_biases[self.flow.newest[number]] = ids, self.coordinates(results)  # x + attention + bias
        for read in added.values():
            if self.positions is None and all(p in read for p in window) and not torch.equal(read[window[0]], read[window[-1]]):
                rows = {place: place - window[0] for place in window}
                self.positions = self._table("wpe", {place: read[place] for place in window}, rows)
