"""Which part of GPT-2 every number in a recorded forward pass plays: embeddings, heads, norms, feed-forwards, the head.

What is recorded says who multiplies, adds or looks up whom; GPT-2 is recognised in it by what its parts do, not by their names:

- The stream starts where the token ids choose rows. Whatever is added to it has its coordinates.
- A contraction of activations with activations is attention: the second kind, whose one factor comes from the first, mixes the
  values; the factor of the first that is indexed as the values are is the keys, the other the queries.
- Projections that end in queries, keys and values, that start from mixed values, or that end in the output are thereby known.
  What remains comes in pairs, one fed by the other: the feed-forwards.
- A parameter added to a fresh product is its bias; one that multiplies or is added to normalised numbers belongs to a norm, and
  the norm to whom it feeds; one added to the stream that differs from position to position is the position embedding.

All of it is read at one place of the probe, the last token, so that an element's id stands for a unit of the network.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .dataflow import Kind, Node, Recording

ADDS, SCALES = {"add", "sub"}, {"mul", "div"}


@dataclass(frozen=True)
class Touch:
    """Parameters at work on single elements: ``kind`` is "add", "mul", or "other" for what cannot be undone here."""

    kind: str
    ids: Tensor  # of the parameters, in the shape of the node
    before: str = ""  # the state of what they meet


@dataclass
class Flow:
    """A recording, read forwards once.

    ``origin`` of an element is the projection result or table entry that it descends from, one to one; the oldest, where several
    were added. ``row`` is the position in the probe that it belongs to. ``state`` says of a node what its results are: "plain"
    (a product, with at most a bias), "summed", "normed" or "other".
    """

    recording: Recording
    origin: Tensor = field(init=False)
    row: Tensor = field(init=False)
    key_row: Tensor = field(init=False)  # of attention scores: the position of the other factor
    joined: Tensor = field(init=False)  # an origin -> an older one that it was added to
    state: dict[int, str] = field(default_factory=dict)
    touches: dict[int, list[Touch]] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)  # a summed node -> the projection added last
    onto: dict[int, str] = field(default_factory=dict)  # that projection -> the state of what it was added to
    torn: set[int] = field(default_factory=set)  # projections whose inputs come from several positions
    scores: set[int] = field(default_factory=set)
    mixes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # node -> scores (*results, S) and values
    votes: dict[int, int] = field(
        default_factory=dict
    )  # such a node -> how sure it is that the scores' second factor is the keys

    def __post_init__(self) -> None:
        rec = self.recording
        size = rec.stop - rec.tokens
        self.origin, self.row, self.key_row, self.joined = (torch.full((size,), -1) for _ in range(4))
        self.row[: rec.ids.numel()] = torch.arange(rec.ids.numel())
        self.needed = rec.needed()
        for number, node in enumerate(rec.nodes):
            if not node.live or number not in self.needed:
                continue
            reader = getattr(self, f"_{node.kind.value}", None)
            if reader is not None:
                reader(number, node)

    def at(self, table: Tensor, ids: Tensor) -> Tensor:
        """``table`` (one of this class's) at elements; -1 for parameters and nowhere."""
        known = ids >= self.recording.tokens
        return torch.where(known, table[(ids - self.recording.tokens).clamp(min=0)], -1)

    def results(self, table: Tensor, node: Node) -> Tensor:
        """``table`` at all results of a node, to read and to write."""
        return table[node.start - self.recording.tokens : node.stop - self.recording.tokens].view(node.shape)

    def by_place(self, node: Node) -> dict[int, Tensor]:
        """:meth:`here` of all positions that a node has results at."""
        rows = self.results(self.row, node).flatten()
        order = rows.argsort(stable=True)
        places, counts = rows[order].unique_consecutive(return_counts=True)
        return {int(p): ids + node.start for p, ids in zip(places, order.split(counts.tolist()), strict=True) if p >= 0}

    def here(self, node: Node, row: int) -> Tensor:
        """Ids of a node's results at one position of the probe, in their order."""
        return (self.results(self.row, node) == row).flatten().nonzero()[:, 0] + node.start

    def root(self, ids: Tensor) -> Tensor:
        """The oldest origin that elements were added to."""
        ids = self.at(self.origin, ids)
        while True:
            older = self.at(self.joined, ids)
            if bool((older < 0).all()):
                return ids
            ids = torch.where(older >= 0, older, ids)

    def _own(self, number: int, node: Node) -> None:
        self.results(self.origin, node).copy_(torch.arange(node.start, node.stop).view(node.shape))
        self.state[number] = "plain"

    def _other(self, number: int, node: Node) -> None:
        self._own(number, node)
        self.state[number] = "other"

    def _lookup(self, number: int, node: Node) -> None:
        self._own(number, node)
        rows = self.at(self.row, node.operands[1]) if len(node.operands) > 1 else torch.tensor(-1)
        if bool((rows < 0).any()):
            match = node.index[..., None] == self.recording.ids.flatten()
            rows = torch.where(match.any(-1), match.int().argmax(-1), -1)
        self.results(self.row, node).copy_(self._in_turn(node) if bool((rows < 0).any()) else rows)

    def _in_turn(self, node: Node) -> Tensor:
        """Positions, where nothing says which: one after the other, as (B, T, ...) lies."""
        size = node.stop - node.start
        return torch.arange(size).view(node.shape) // max(1, size // self.recording.ids.numel())

    def _rowwise(self, number: int, node: Node) -> None:
        for table in (self.origin, self.row):
            self.results(table, node).copy_(self.at(table, node.operands[0]))
        self.state[number] = "normed"

    def _contraction(self, number: int, node: Node) -> None:
        self._own(number, node)
        if node.weight is not None:
            inputs = node.operands[1 - node.weight]
            rows, last = self.at(self.row, inputs[..., 0]), self.at(self.row, inputs[..., -1])
            rows = torch.where(rows < 0, last, rows)
            if bool(((rows != last) & (last >= 0)).any()):
                self.torn.add(number)
            if number in self.torn or bool((rows < 0).any()):
                rows = self._in_turn(node)
            self.results(self.row, node).copy_(rows)
            return
        a, b = node.operands
        from_scores = [self.owner(self.at(self.origin, factor[..., 0])) in self.scores for factor in (a, b)]
        if any(from_scores):
            self._mix(number, node, *((a, b) if from_scores[0] else (b, a)))
        else:
            self.scores.add(number)
            self.results(self.row, node).copy_(self.at(self.row, a[..., 0]))
            self.results(self.key_row, node).copy_(self.at(self.row, b[..., 0]))

    def _mix(self, number: int, node: Node, scores: Tensor, values: Tensor) -> None:
        """Values, weighed: what is indexed as they are was the keys, and the result stands where the other stood."""
        origin, positions = self.at(self.origin, scores), self.at(self.row, values)
        first, second = self.at(self.row, origin), self.at(self.key_row, origin)
        self.votes[number] = int((second == positions).sum()) - int((first == positions).sum())
        self.mixes[number] = scores, values
        self.results(self.row, node).copy_((first if self.votes[number] >= 0 else second)[..., 0])

    def _elementwise(self, number: int, node: Node) -> None:
        origins = [self.at(self.origin, operand) for operand in node.operands]
        mains = [i for i, origin in enumerate(origins) if bool((origin >= 0).any())]
        if not mains:  # a number made of tokens keeps its position
            self.results(self.row, node).copy_(torch.stack([self.at(self.row, operand) for operand in node.operands]).amax(0))
            return
        if node.op == "mul" and len(mains) == 2:
            from_scores = [self.owner(origins[i]) in self.scores for i in mains]
            if from_scores.count(True) == 1:  # a mix, one token at a time
                scores, values = mains if from_scores[0] else mains[::-1]
                self._own(number, node)
                self._mix(number, node, node.operands[scores][..., None], node.operands[values][..., None])
                return
        never = torch.iinfo(torch.int64).max
        oldest = torch.stack([torch.where(origins[i] < 0, never, origins[i]) for i in mains]).amin(0)
        oldest = torch.where(oldest == never, -1, oldest)
        self.results(self.origin, node).copy_(oldest)
        rows = self.results(self.row, node)
        for i in reversed(mains):  # the position is the oldest one's
            rows.copy_(torch.where(origins[i] == oldest, self.at(self.row, node.operands[i]), rows))
        younger = [origins[i] for i in mains if not torch.equal(origins[i], oldest)]
        for origin in younger if node.op in ADDS else ():
            apart = (origin >= 0) & (origin != oldest)
            self.joined[origin[apart] - self.recording.tokens] = oldest[apart]
        if len(mains) > 1:
            summed = node.op in ADDS and bool(younger)
            self.state[number] = "summed" if summed else "other"
            if summed:
                *_, (_, oldest_main), (self.newest[number], _) = sorted((self._newest(node.operands[i]), i) for i in mains)
                self.onto[self.newest[number]] = self.state.get(self.owner(node.operands[oldest_main]), "other")
            return
        main = mains[0]
        sides = [operand for i, operand in enumerate(node.operands) if i != main]
        before = self.state.get(self.owner(node.operands[main]), "other")
        touches = [touch for side in sides for touch in self._touches(node.op if main == 0 or node.op != "sub" else "", side)]
        if touches:
            self.touches[number] = [replace(touch, before=before) for touch in touches]
        statistic = any(self._live(side) for side in sides)
        scaled = any(touch.kind == "mul" for touch in touches)
        linear = node.op in ADDS | SCALES | {"neg", "dropout"}
        self.state[number] = "normed" if statistic or scaled else before if linear else "other"
        if number not in self.newest and self.state[number] == "summed":
            self.newest[number] = self.newest.get(self.owner(node.operands[main]), -1)

    def _newest(self, ids: Tensor) -> int:
        """The last projection that made what is being added."""
        number = self.owner(ids)
        if number in self.newest:
            return self.newest[number]
        return self.owner(self.at(self.origin, ids))

    def owner(self, ids: Tensor) -> int:
        known = ids[ids >= self.recording.tokens]
        return self.recording.owner(known.flatten()[0]) if known.numel() else -1

    def _live(self, side: Tensor) -> bool:
        number = self.owner(side)
        return number >= 0 and self.recording.nodes[number].live

    def _touches(self, op: str, side: Tensor) -> list[Touch]:
        """Parameters in what is added to, or multiplied with, an activation; they may come through operators of their own."""
        if bool((side < self.recording.tokens).all()):
            kind = "add" if op == "add" else "mul" if op == "mul" else "other"
            return [Touch(kind, side)] if bool((side >= 0).any()) else []
        number = self.owner(side)
        node = self.recording.nodes[number] if number >= 0 else None
        if node is None or node.kind is not Kind.ELEMENTWISE or bool((side < node.start).any() or (side >= node.stop).any()):
            return []
        place, found = node.place(side), []
        for position, operand in enumerate(node.operands):
            inner = {("add", "add"): "add", ("add", "mul"): "mul" if node.live else "", ("mul", "mul"): "mul"}.get((op, node.op), "")
            if (op, node.op, position) == ("add", "sub", 0):
                inner = "add"
            found += self._touches(inner, operand[place])
        return found
