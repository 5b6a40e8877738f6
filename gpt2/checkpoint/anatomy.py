"""The parts of a GPT-2, found in a recorded forward pass by what they do.

- The stream starts where the token ids choose rows of a table. Whatever is added to it has its coordinates.
- A contraction of activations with activations is attention. The second of them mixes the values by what comes from the first;
  the factor of the first that is indexed as the values are is the keys, the other the queries.
- Projections that end in queries, keys and values, that start from what was mixed, or that end in the output are thereby known.
  Those that remain come in pairs, one fed by the other: the feed-forwards.
- A parameter added to a fresh product is its bias. One that multiplies, or is added to, normalised numbers belongs to a norm,
  and the norm to the projections that it feeds. One that is added to the stream and differs from place to place is the position
  embedding.

All is read at one place of the probe, the last token, so that an element's id stands for a unit of the network. Heads, units of
a head and hidden units are numbered as they come: GPT-2 does not change when they change places together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .dataflow import Kind, Node, Recording
from .flow import Flow, Touch

CHUNK = 1 << 22  # cells of a matrix that are looked at together


@dataclass(frozen=True)
class Matrix:
    """Where a weight matrix lies in the module's parameters.

    ``inputs`` (K,) and ``outputs`` (N,) are rows and columns of the checkpoint's tensor, -1 where it has none; the cell of input
    k and output n is the parameter that multiplies the k-th factor in the n-th of ``results`` of ``node``.
    """

    part: str  # "attn.q", "mlp.c_fc", ...
    layer: int | None
    node: Node
    results: Tensor
    inputs: Tensor
    outputs: Tensor

    def cells(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(parameter ids (n, K), rows (1, K), columns (n, 1)) until all outputs are covered."""
        step = max(1, CHUNK // len(self.inputs))
        for results, outputs in zip(self.results.split(step), self.outputs.split(step), strict=True):
            yield self.node.operands[self.node.weight][self.node.place(results)], self.inputs[None], outputs[:, None]


@dataclass(frozen=True)
class Vector:
    """Where a bias or a norm's scale lies: the parameter ``ids`` (N,) and the entries of the checkpoint's tensor that they are."""

    part: str
    layer: int | None
    ids: Tensor
    places: Tensor


@dataclass(frozen=True)
class Table:
    """An embedding: its entry for row r and coordinate d is the parameter ``first[d] + r * stride``, for r below ``rows``."""

    part: str
    first: Tensor  # (D,)
    stride: int
    rows: int
    skipped: int = 0  # rows before the first that is used


@dataclass(frozen=True)
class Head:
    """One attention head: the results of projections that are its queries, keys and values, and what it mixes; (K,) each."""

    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor


@dataclass(frozen=True)
class Norm:
    """Scale and shift by stream coordinate; None where the module has none."""

    scale: Tensor | None
    shift: Tensor | None
    places: Tensor
    at: int  # the node where it begins


@dataclass
class Branch:
    """An attention or a feed-forward: the stream it starts from, its projections, the norms in front, nearest first."""

    kind: str  # "attn" or "mlp"
    base: int
    nodes: list[int]
    signature: int  # the first weight: a block that runs twice has it twice
    heads: list[Head] = field(default_factory=list)
    norms: list[Norm] = field(default_factory=list)


class NotGPT2(Exception):
    """What a GPT-2 must have and this module has not."""


class Anatomy:
    """Everything that was found. ``parts`` say where, ``remarks`` what is unlike GPT-2, in words for its author."""

    def __init__(self, recording: Recording) -> None:
        self.recording, self.nodes = recording, recording.nodes
        self.flow = Flow(recording)
        self.here = recording.ids.numel() - 1  # the place that everything is read at
        self.parts: list[Matrix | Vector | Table] = []
        self.remarks: list[str] = []
        self.units = torch.full((recording.stop - recording.tokens,), -1)  # origin -> coordinate in its own space
        self.biases = torch.full((recording.stop - recording.tokens,), -1)  # projection result -> parameter id
        self._stream()
        self._find_biases()
        self.attentions = self._attentions()
        self.feed_forwards = self._feed_forwards()
        self.head = self._find_head()
        self._collect()

    # The stream

    def _stream(self) -> None:
        tokens = self.recording.ids.flatten()
        tables = [n for n in self.nodes if n.kind is Kind.LOOKUP and self._rows(n) is not None]
        words = [n for n in tables if torch.equal(self._rows(n), tokens)]
        if not words:
            raise NotGPT2("nothing in its forward looks up a table of parameters by the token ids")
        self.words = words[0]
        start = self.flow.here(self.words, self.here)
        self.width = len(start)
        self._number(self.flow.root(start))
        self.parts.append(self._table("wte", self.words, tokens))

    def _rows(self, node: Node) -> Tensor | None:
        """Which row of a table a lookup reads at each place of the probe; None if it reads several or none."""
        tokens = self.recording.ids.numel()
        found = [node.index.flatten()[self.flow.here(node, place) - node.start] for place in range(tokens)]
        return torch.stack([x[0] for x in found]) if all(len(x) and bool((x == x[0]).all()) for x in found) else None

    def _table(self, part: str, node: Node, rows: Tensor) -> Table | None:
        """The whole table behind what was looked up of it: (row, coordinate) to parameter, which is linear in the row."""
        read = [node.operands[0].flatten()[self.flow.here(node, place) - node.start] for place in range(len(rows))]
        places = self._coordinates(self.flow.here(node, self.here))
        return self._extend(part, torch.stack(read), rows, places)

    def _extend(self, part: str, read: Tensor, rows: Tensor, places: Tensor) -> Table | None:
        """``read`` (R, D) are the parameters in the given rows. How many more rows there are, the source's shape tells."""
        apart = int((rows != rows[0]).int().argmax())
        stride = int((read[apart, 0] - read[0, 0]) // (rows[apart] - rows[0]))
        first = read[0] - rows[0] * stride
        if (
            not torch.equal(first + rows[:, None] * stride, read)
            or len(places.unique()) != len(places)
            or bool((places < 0).any())
        ):
            return None
        first = torch.empty_like(first).index_copy_(0, places, first)
        source = next(s for s in self.recording.sources if s.region.start <= int(read.min()) and int(read.max()) <= s.region.last)
        axes = [i for i, n in enumerate(source.region.shape) if n > 1 and source.region.strides[i] == stride]
        if not axes:
            return Table(part, first, stride, int(rows.max()) + 1)
        size = source.region.shape[axes[0]]
        skipped = int(first.min() - source.region.start) // stride % size
        return Table(part, first, stride, size - skipped, skipped)

    def _number(self, origins: Tensor) -> None:
        self.units[origins - self.recording.tokens] = torch.arange(len(origins))

    def _unit(self, ids: Tensor) -> Tensor:
        """The number of what elements descend from, in the space that was numbered last; -1 for what has none."""
        return self.flow.at(self.units, self.flow.at(self.flow.origin, ids))

    def _coordinates(self, ids: Tensor) -> Tensor:
        """Stream coordinates. A projection of the stream's width that was never added to it (a residual left out) starts anew."""
        roots = self.flow.root(ids)
        found = self.flow.at(self.units, roots)
        if bool(((found < 0) & (roots >= 0)).any()):
            fresh = self.flow.here(self.nodes[self.flow._owner(roots)], self.here)
            if len(fresh) == self.width:
                self._number(fresh)
                found = self.flow.at(self.units, roots)
        return found

    # What is added

    def _find_biases(self) -> None:
        self.positions: Table | None = None
        self.late: list[tuple[int, Vector]] = []  # added to the stream, after the projection's own result was
        for number, touches in self.flow.touches.items():
            node = self.nodes[number]
            results = self.flow.here(node, self.here)
            for touch in touches:
                if touch.kind != "add" or not len(results):
                    continue
                ids = touch.ids.flatten()[results - node.start]
                origins = self.flow.at(self.flow.origin, results)
                if self._differs_by_place(node, touch):
                    self._place_positions(node, touch)
                elif touch.before == "plain":
                    taken = self.flow.at(self.biases, origins) >= 0
                    self.biases[origins[~taken] - self.recording.tokens] = ids[~taken]
                elif touch.before == "summed":
                    self.late.append((self.flow.newest.get(number, -1), Vector("", None, ids, self._coordinates(results))))
        for node in self.nodes:
            rows = self._rows(node) if node.kind is Kind.LOOKUP and node is not self.words else None
            if rows is not None and self.positions is None and len(rows.unique()) == self.recording.ids.size(1):
                self.positions = self._table("wpe", node, rows)

    def _differs_by_place(self, node: Node, touch: Touch) -> bool:
        before, here = (touch.ids.flatten()[self.flow.here(node, place) - node.start] for place in (self.here - 1, self.here))
        return len(before) == len(here) == self.width and not torch.equal(before, here)

    def _place_positions(self, node: Node, touch: Touch) -> None:
        length = self.recording.ids.size(1)
        places = range(self.here + 1 - length, self.here + 1)
        read = torch.stack([touch.ids.flatten()[self.flow.here(node, place) - node.start] for place in places])
        if self.positions is None:
            self.positions = self._extend("wpe", read, torch.arange(length), self._coordinates(self.flow.here(node, self.here)))

    # Branches

    def _input(self, result: int) -> Tensor:
        """The activations (K,) that a projection's result was made of."""
        node = self.nodes[self.recording.owner(result)]
        return node.operands[1 - node.weight][node.place(torch.as_tensor(int(result)))]

    def _signature(self, result: int) -> int:
        node = self.nodes[self.recording.owner(result)]
        return int(node.operands[node.weight][node.place(torch.as_tensor(int(result)))][0])

    def _is_projection(self, number: int) -> bool:
        return number >= 0 and self.nodes[number].kind is Kind.CONTRACTION and self.nodes[number].weight is not None

    def _norms(self, ids: Tensor) -> tuple[list[Norm], int]:
        """Back from a projection's input to the stream: the norms on the way, nearest first, and the stream's element."""
        found: list[dict] = []
        ids = ids[ids >= self.recording.tokens]
        places = self._coordinates(ids)
        while True:
            number = self.flow._owner(ids)
            node = self.nodes[number] if number >= 0 else None
            if node is None or self.flow.state.get(number) != "normed" or node.kind not in (Kind.ELEMENTWISE, Kind.ROWWISE):
                break
            where = node.place(ids)
            for touch in self.flow.touches.get(number, []):
                if touch.kind == "add" and touch.before != "normed":
                    continue
                if touch.kind != "other":
                    name, parameters = {"add": "shift", "mul": "scale"}[touch.kind], touch.ids[where]
                    if found and name in found[-1] and torch.equal(found[-1][name], parameters):
                        continue
                    if not found or name in found[-1] or (name == "shift" and "scale" in found[-1]):
                        found.append({})
                    found[-1] |= {name: parameters, "at": number}
            origins = [self.flow.at(self.flow.origin, operand[where]) for operand in node.operands]
            ids = next(operand[where] for operand, o in zip(node.operands, origins, strict=True) if bool((o >= 0).all()))
        return [Norm(x.get("scale"), x.get("shift"), places, x["at"]) for x in found], int(ids[0]) if len(ids) else -1

    def _heads(self) -> Iterator[Head]:
        at, row = self.flow.at, self.here
        for number, (scores, values, second_is_key) in self.flow.mixes.items():
            mixed = self.flow.here(self.nodes[number], row)
            if not len(mixed):
                continue
            place = self.nodes[number].place(mixed)
            score, value = at(self.flow.origin, scores[place]), at(self.flow.origin, values[place])
            own = (at(self.flow.row, values[place]) == row).int().argmax(-1, keepdim=True)  # the token, seen by itself
            score, value = score.gather(-1, own)[:, 0], value.gather(-1, own)[:, 0]
            for element in dict.fromkeys(score.tolist()):
                node = self.nodes[self.recording.owner(element)]
                a, b = (at(self.flow.origin, x[node.place(torch.tensor(element))]) for x in node.operands)
                mine = score == element
                yield Head(*((a, b) if second_is_key else (b, a)), value[mine], mixed[mine])

    def _attentions(self) -> list[Branch]:
        found: dict[int, Branch] = {}
        for head in self._heads():
            used = sorted({self.flow._owner(x[i]) for x in (head.q, head.k, head.v) for i in range(len(x))})
            if not self._is_projection(self.flow._owner(head.q)):
                continue
            norms, base = self._norms(self._input(head.q[0]))
            branch = found.setdefault(base, Branch("attn", base, [], self._signature(head.q[0]), [], norms))
            branch.heads.append(head)
            branch.nodes += [number for number in used if self._is_projection(number) and number not in branch.nodes]
        if not found:
            raise NotGPT2("nothing in its forward weighs projections of the tokens by one another, as attention does")
        return self._once(list(found.values()))

    def _once(self, branches: list[Branch]) -> list[Branch]:
        """Without the repetitions of blocks that run more than once."""
        return list({branch.signature: branch for branch in reversed(branches)}.values())[::-1]

    def _feed_forwards(self) -> list[Branch]:
        known = {number for branch in self.attentions for number in branch.nodes}
        self.outputs: dict[int, list[int]] = {}  # projections that start from what was mixed, or from another: by what feeds them
        rest = [n for n in range(len(self.nodes)) if self._is_projection(n) and n not in known and self.nodes[n].live]
        feeds = {}
        for number in rest:
            results = self.flow.here(self.nodes[number], self.here)
            if len(results):
                feeds[number] = set(self.recording.owners(self.flow.at(self.flow.origin, self._input(results[0]))).tolist()) - {
                    -1
                }
        self.after_mix = [n for n, by in feeds.items() if by & set(self.flow.mixes)]
        down = {n: by & set(feeds) - set(self.after_mix) for n, by in feeds.items() if n not in self.after_mix}
        found: dict[int, Branch] = {}
        self.down = {n: by for n, by in down.items() if by and self._is_hidden(n, by)}
        for number in sorted({n for by in self.down.values() for n in by}):
            result = self.flow.here(self.nodes[number], self.here)[0]
            norms, base = self._norms(self._input(result))
            found.setdefault(base, Branch("mlp", base, [], self._signature(result), [], norms)).nodes.append(number)
        return self._once(list(found.values()))

    def _is_hidden(self, number: int, by: set[int]) -> bool:
        """Whether a projection starts from another's results themselves, and not from a stream they were added to."""
        ids = self._input(self.flow.here(self.nodes[number], self.here)[0])
        return self.flow.state.get(self.flow._owner(ids)) == "other" or bool(by)

    def _find_head(self) -> Tensor | None:
        """The results that the output's vocabulary entries are, at the probed place; None if the forward ends in the stream."""
        output = self.recording.output
        here = self.flow.at(self.flow.row, output) == self.here
        origins = self.flow.at(self.flow.origin, output[here])
        if not len(origins):
            raise NotGPT2("its output does not come from the last token")
        number = self.flow._owner(origins)
        return origins if self._is_projection(number) else None

    # Parts

    def _collect(self) -> None:
        self.late_of = dict(self.late)
        for layer, branch in enumerate(self.attentions):
            self._collect_attention(layer, branch)
        for layer, branch in enumerate(self.feed_forwards):
            self._collect_feed_forward(layer, branch)
        if self.positions is not None:
            self.parts.append(self.positions)
        if self.head is not None:
            self._projection("head", None, self.head, torch.arange(len(self.head)), "head.bias")
        self._collect_norms()

    def _collect_attention(self, layer: int, branch: Branch) -> None:
        for part in "qkv":
            results = torch.cat([getattr(head, part) for head in branch.heads])
            self._projection(f"attn.{part}", layer, results, torch.arange(len(results)), f"attn.{part}.bias")
        mixed = torch.cat([head.mixed for head in branch.heads])
        coordinates = self.units
        self.units = torch.full_like(coordinates, -1)
        self._number(mixed)
        units, self.units = self.units, coordinates
        mine = [
            n
            for n in self.after_mix
            if bool(
                (
                    self.flow.at(units, self.flow.at(self.flow.origin, self._input(self.flow.here(self.nodes[n], self.here)[0])))
                    >= 0
                ).any()
            )
        ]
        self._back("attn.c_proj", layer, mine, units)

    def _collect_feed_forward(self, layer: int, branch: Branch) -> None:
        hidden = torch.cat([self.flow.here(self.nodes[n], self.here) for n in branch.nodes])
        self._projection("mlp.c_fc", layer, hidden, torch.arange(len(hidden)), "mlp.c_fc.bias")
        coordinates = self.units
        self.units = torch.full_like(coordinates, -1)
        self._number(hidden)
        units, self.units = self.units, coordinates
        self._back("mlp.c_proj", layer, [n for n, by in self.down.items() if by & set(branch.nodes)], units)

    def _back(self, part: str, layer: int, numbers: list[int], units: Tensor) -> None:
        """Projections back to the stream, from units of their own."""
        for number in numbers:
            results = self.flow.here(self.nodes[number], self.here)
            self._projection(part, layer, results, self._coordinates(results), f"{part}.bias", units)
            if number in self.late_of:
                late = self.late_of[number]
                self.parts.append(Vector(f"{part}.bias", layer, late.ids, late.places))

    def _projection(
        self, part: str, layer: int | None, results: Tensor, columns: Tensor, bias: str, units: Tensor | None = None
    ) -> None:
        owners = self.recording.owners(results)
        for number in owners.unique().tolist():
            node, mine = self.nodes[number], owners == number
            if not self._is_projection(number):
                continue
            inputs = self._input(results[mine][0])
            rows = self._coordinates(inputs) if units is None else self.flow.at(units, self.flow.at(self.flow.origin, inputs))
            self.parts.append(Matrix(part, layer, node, results[mine], rows, columns[mine]))
            constant = (inputs < 0).nonzero()[:, 0]
            if len(constant):  # a column of ones: its weights are the bias
                weights = node.operands[node.weight][node.place(results[mine])]
                self.parts.append(Vector(bias, layer, weights[:, constant[0]], columns[mine]))
        ids = self.flow.at(self.biases, results)
        if bool((ids >= 0).any()):
            self.parts.append(Vector(bias, layer, ids[ids >= 0], columns[ids >= 0]))

    def _collect_norms(self) -> None:
        last, _ = self._norms(self._input(self.head[0])) if self.head is not None else self._norms(self._end())
        consumers = [
            (f"{name}", layer, branch.norms)
            for name, branches in (("ln_1", self.attentions), ("ln_2", self.feed_forwards))
            for layer, branch in enumerate(branches)
        ]
        consumers.append(("ln_f", None, last))
        for name, layer, norms in consumers:
            if norms:
                for kind, ids in (("weight", norms[0].scale), ("bias", norms[0].shift)):
                    if ids is not None:
                        self.parts.append(Vector(f"{name}.{kind}", layer, ids, norms[0].places))

    def _end(self) -> Tensor:
        output = self.recording.output
        return output[self.flow.at(self.flow.row, output) == self.here]
