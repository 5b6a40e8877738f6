"""The stream, and what is added to it: token and position embeddings, and the biases of projections.

Coordinates of the stream are those of the token embedding; whatever is added to it, element by element, has the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gpt2.port.anatomy.flow import PLAIN, SUMMED, Flow, Touch
from gpt2.port.anatomy.parts import Table, Vector
from gpt2.port.recording.dataflow import Kind


class NotGPT2(Exception):
    """What every GPT-2 has and this module has not."""


class Stream:
    """``width``; ``words`` and ``positions``, tables (the former in shards, perhaps; the latter None where none are learned);
    ``biases``, a table of :class:`Flow` that has the parameter added to each projection result; ``late``, of a projection, what
    was added to the stream right after it.

    Raises:
        NotGPT2: no table is looked up by the token ids.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow, self.recording = flow, flow.recording
        self.words: list[Table] = []
        self.positions: Table | None = None
        self.biases = flow.blank()
        self.late: dict[int, Vector] = {}
        self._units = flow.blank()  # origin -> coordinate
        self._read_tables()
        self._read_additions()

    @property
    def vocabulary(self) -> int:
        """How many tokens have an embedding."""
        return max(table.begin + table.rows for table in self.words)

    def coordinates(self, ids: Tensor) -> Tensor:
        """Of elements of the stream; -1 for all else. A projection of the stream's width that nothing was added to (a residual
        left out) begins a new stream."""
        roots = self.flow.root(ids)
        if bool(((self.flow.at(self._units, roots) < 0) & (roots >= 0)).any()):
            fresh = self.flow.results(self.flow.owner(roots))
            if len(fresh) == self.width:
                self.flow.put(self._units, fresh, torch.arange(self.width))
        return self.flow.at(self._units, roots)

    def _read_tables(self) -> None:
        """Tables that the tokens choose from: by their ids, or by their number."""
        tokens, read, rows, lookups = self.recording.ids.flatten(), {}, {}, {}
        for number, node in enumerate(self.recording.nodes):
            if node.kind is Kind.LOOKUP:
                name = self.recording.name(int(node.operands[0].flatten()[0]))
                lookups.setdefault(name, []).append(number)
                read[name] = self.flow.by_place(number, node.operands[0]) | read.get(name, {})
                rows[name] = {p: int(x[0]) for p, x in self.flow.by_place(number, node.index).items()} | rows.get(name, {})
        begins = {name: _begin(list(map(found.get, range(len(tokens)))), tokens.tolist()) for name, found in rows.items()}
        words = [name for name, begin in begins.items() if begin is not None]
        self.width = max((len(read[name][self.flow.here]) for name in words), default=0)
        words = [name for name in words if len(read[name][self.flow.here]) == self.width]  # others are beside it
        if not words:
            raise NotGPT2("nothing in its forward looks up a table of parameters by the token ids")
        self._starts = {number for name in words for number in lookups[name]}
        self._start = next(results for number in sorted(self._starts) if len(results := self.flow.results(number)))
        self.flow.put(self._units, self.flow.root(self._start), torch.arange(self.width))
        for name in words:
            self.words.append(self._words(name, read[name], rows[name], begins[name]))
        for name in [name for name in rows if name not in words]:
            if self.positions is None and len(set(rows[name].values())) == self.recording.ids.size(1):
                self.positions = self._table("wpe", read[name], rows[name])

    def _words(self, name: str, read: dict[int, Tensor], rows: dict[int, int], begin: int) -> Table:
        table = self._table("wte", read, rows)
        if table is None:
            raise NotGPT2(f"its token embedding ({name}) is no table with a row for each token")
        unread = max(0, -begin)  # rows before the first token's
        first = table.first + unread * table.stride
        return replace(table, first=first, rows=table.rows - unread, skipped=table.skipped + unread, begin=max(0, begin))

    def _table(self, part: str, read: dict[int, Tensor], rows: dict[int, int]) -> Table | None:
        """The table of which parameters (D,) were read in some rows, place by place; None if they are of none.

        A table is linear in the row; how far it reaches, the axis of the parameter says that has the same stride.
        """
        places = self.coordinates(self._start)
        if any(len(x) != self.width or bool((x < 0).any()) for x in read.values()) or len(set(rows.values())) < 2:
            return None
        one, other = min(rows, key=rows.get), max(rows, key=rows.get)
        stride = int((read[other][0] - read[one][0]) // (rows[other] - rows[one]))
        first = read[one] - rows[one] * stride
        if not all(torch.equal(first + row * stride, read[place]) for place, row in rows.items()):
            return None
        region = self.recording.source(int(read[one][0])).region
        axes = [axis for axis, n in enumerate(region.shape) if n > 1 and region.strides[axis] == stride]
        size = region.shape[axes[0]] if axes else rows[other] + 1
        skipped = int(first.min() - region.start) // stride % size if axes else 0
        return Table(part, torch.empty_like(first).index_copy_(0, places, first), stride, size - skipped, skipped)

    def _read_additions(self) -> None:
        """Biases, and positions that are added without being looked up by tokens: they differ from place to place."""
        length = self.recording.ids.size(1)
        window = range(self.flow.here + 1 - length, self.flow.here + 1)  # the last sequence of the probe
        added: dict[str, dict[int, Tensor]] = {}  # what each parameter adds to the stream, in one node or several
        for number, touch in [(number, touch) for number, touches in self.flow.touches.items() for touch in touches]:
            if touch.kind != "add":
                continue
            found = self.flow.by_place(number, touch.ids)
            place, ids = next(((p, x) for p, x in found.items() if p == self.flow.here), next(iter(found.items())))
            results = self._results(number, place)
            if len(ids) == self.width and self.flow.owner(self.flow.root(results)) in self._starts:
                added[source] = found | added.get(source := self.recording.name(int(ids[0])), {})
            self._read_bias(number, touch, ids, results)
        for read in added.values():
            if self.positions is None and all(p in read for p in window) and not torch.equal(read[window[0]], read[window[-1]]):
                rows = {place: place - window[0] for place in window}
                self.positions = self._table("wpe", {place: read[place] for place in window}, rows)

    def _results(self, number: int, place: int) -> Tensor:
        node = self.recording.nodes[number]
        return self.flow.by_place(number, torch.arange(node.start, node.stop))[place]

    def _read_bias(self, number: int, touch: Touch, ids: Tensor, results: Tensor) -> None:
        origins = self.flow.origins(results)
        if touch.before == PLAIN and self.flow.is_projection(self.flow.owner(origins)):
            free = self.flow.at(self.biases, origins) < 0
            self.flow.put(self.biases, origins[free], ids[free])
        elif touch.before == SUMMED and self.flow.newest[number] not in self.late:
            self.late[self.flow.newest[number]] = Vector("", None, ids, self.coordinates(results))


def _begin(rows: list[int | None], tokens: list[int]) -> int | None:
    """Where in the vocabulary a table begins that the tokens read; for a token of another shard, row 0 is read."""
    apart = {token - row for token, row in zip(tokens, rows, strict=True) if row}
    return apart.pop() if len(apart) == 1 and None not in rows else None
