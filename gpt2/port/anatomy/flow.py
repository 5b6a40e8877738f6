"""A recorded forward pass, read once from its start: what each number descends from, and what is done to it on the way.

Nothing here knows GPT-2's parts yet; it knows projections (contractions with parameters), sums, norms, and attention, which is
the one place where activations are multiplied with activations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.port.recording.dataflow import Kind, Node, Recording

ADDS, SCALES = {"add", "sub"}, {"mul", "div"}
PLAIN, SUMMED, NORMED, BENT = "plain", "summed", "normed", "bent"  # of results: a product with at most a bias; a sum of such;
# divided by a statistic or multiplied by a parameter; put through anything else


@dataclass(frozen=True)
class Touch:
    """Parameters at work on single elements: ``kind`` is "add", "mul", or "other" for what cannot be undone here."""

    kind: str
    ids: Tensor  # of the parameters, in the shape of the node
    before: str = ""  # the state of what they meet


class Flow:
    """A recording's nodes that are made of tokens and needed for the output, read in order.

    Tables over all computed elements (-1 where there is nothing to say; :meth:`at` looks up):

    ``origin``: the projection result or table entry that an element descends from, one to one; of several added, the oldest.
    ``place``: the token of the probe that it stands for, counted through the batch. ``key_place``: of attention scores, the token
    that the second factor stands for, ``place`` being the first's. ``joined``: of an origin, an older one that it was added to.

    By node: its ``state``; ``touches``; ``newest``, of a sum, the projection that was added last, and ``onto``, of such a
    projection, the state of what it was added to; ``mixes``, the scores and values (*results, summed) of attention's second
    product; ``votes``, of such, by how much the scores' second factor was more likely the keys than the first; ``torn``,
    projections whose inputs stand for several tokens.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.nodes = recording, recording.nodes
        self.here = recording.ids.numel() - 1  # the last token, at which units are told apart
        self.origin, self.place, self.key_place, self.joined = (self.blank() for _ in range(4))
        self.state: dict[int, str] = {}
        self.touches: dict[int, list[Touch]] = {}
        self.newest: dict[int, int] = {}
        self.onto: dict[int, str] = {}
        self.mixes: dict[int, tuple[Tensor, Tensor]] = {}
        self.votes: dict[int, int] = {}
        self.torn: set[int] = set()
        self._scores: set[int] = set()
        self.place[: recording.ids.numel()] = torch.arange(recording.ids.numel())
        readers = {
            Kind.LOOKUP: self._lookup,
            Kind.CONTRACTION: self._contraction,
            Kind.ELEMENTWISE: self._elementwise,
            Kind.ROWWISE: self._rowwise,
            Kind.OTHER: self._other,
        }
        for number in sorted(recording.needed):
            node = self.nodes[number]
            if node.live and node.kind in readers:
                readers[node.kind](number, node)

    # Looking up

    def blank(self) -> Tensor:
        """A table over all computed elements, with nothing in it."""
        return torch.full((self.recording.stop - self.recording.tokens,), -1)

    def at(self, table: Tensor, ids: Tensor) -> Tensor:
        """What a table holds for elements; -1 for parameters and nowhere."""
        return torch.where(ids >= self.recording.tokens, table[(ids - self.recording.tokens).clamp(min=0)], -1)

    def put(self, table: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        table[ids - self.recording.tokens] = values
        return table

    def of(self, table: Tensor, node: Node) -> Tensor:
        """A table's part for all results of a node, to read and to write."""
        return table[node.start - self.recording.tokens : node.stop - self.recording.tokens].view(node.shape)

    def origins(self, ids: Tensor) -> Tensor:
        return self.at(self.origin, ids)

    def root(self, ids: Tensor) -> Tensor:
        """The oldest origin that elements' own was ever added to."""
        ids = self.origins(ids)
        while bool(((older := self.at(self.joined, ids)) >= 0).any()):
            ids = torch.where(older >= 0, older, ids)
        return ids

    def owner(self, ids: Tensor) -> int:
        """The node that elements are results of, by the first of them that is one; -1 if none is."""
        known = ids[ids >= self.recording.tokens]
        return self.recording.owner(known.flatten()[0]) if known.numel() else -1

    def state_of(self, ids: Tensor) -> str:
        return self.state.get(self.owner(ids), BENT)

    def results(self, number: int) -> Tensor:
        """Ids of what a node computed at the probed place, in its order."""
        node = self.nodes[number]
        return (self.of(self.place, node) == self.here).flatten().nonzero()[:, 0] + node.start

    def by_place(self, number: int, values: Tensor) -> dict[int, Tensor]:
        """``values`` in a node's shape (or in its order), apart for each place that it has results at."""
        places = self.of(self.place, self.nodes[number]).flatten()
        order = places.argsort(stable=True)
        found, counts = places[order].unique_consecutive(return_counts=True)
        return {int(p): x for p, x in zip(found, values.flatten()[order].split(counts.tolist()), strict=True) if p >= 0}

    def is_projection(self, number: int) -> bool:
        return number >= 0 and self.nodes[number].kind is Kind.CONTRACTION and self.nodes[number].weight is not None

    def inputs(self, result: Tensor) -> Tensor:
        """The activations (K,) that a projection's result was made of."""
        node = self.nodes[self.recording.owner(result)]
        return node.operands[1 - node.weight][node.place(result.reshape(()))]

    def weights(self, results: Tensor) -> Tensor:
        """Of projection results, the first weight of each, which is the same at all places: the name of a unit."""
        found, owners = torch.full_like(results, -1), self.recording.owners(results)
        for number in owners.unique().tolist():
            if self.is_projection(number):
                node, mine = self.nodes[number], owners == number
                found[mine] = node.operands[node.weight][node.place(results[mine])][:, 0]
        return found

    # Reading

    def _fresh(self, number: int, node: Node, state: str = PLAIN) -> None:
        self.of(self.origin, node).copy_(torch.arange(node.start, node.stop).view(node.shape))
        self.state[number] = state

    def _other(self, number: int, node: Node) -> None:
        self._fresh(number, node, BENT)

    def _lookup(self, number: int, node: Node) -> None:
        self._fresh(number, node)
        places = self.at(self.place, node.operands[1]) if len(node.operands) > 1 else torch.tensor(-1)
        if bool((places < 0).any()):
            match = node.index[..., None] == self.recording.ids.flatten()
            places = torch.where(match.any(-1), match.int().argmax(-1), -1)
        self.of(self.place, node).copy_(self._in_turn(node) if bool((places < 0).any()) else places)

    def _in_turn(self, node: Node) -> Tensor:
        """Places, where nothing says which: one token after the other, as (B, T, ...) lies."""
        size = node.stop - node.start
        return torch.arange(size).view(node.shape) // max(1, size // self.recording.ids.numel())

    def _rowwise(self, number: int, node: Node) -> None:
        for table in (self.origin, self.place):
            self.of(table, node).copy_(self.at(table, node.operands[0]))
        self.state[number] = NORMED

    def _contraction(self, number: int, node: Node) -> None:
        self._fresh(number, node)
        if node.weight is not None:
            self._projection(number, node)
            return
        a, b = node.operands
        from_scores = [self.owner(self.origins(factor[..., 0])) in self._scores for factor in (a, b)]
        if any(from_scores):
            self._mix(number, node, *((a, b) if from_scores[0] else (b, a)))
        else:
            self._scores.add(number)
            self.of(self.place, node).copy_(self.at(self.place, a[..., 0]))
            self.of(self.key_place, node).copy_(self.at(self.place, b[..., 0]))

    def _projection(self, number: int, node: Node) -> None:
        inputs = node.operands[1 - node.weight]
        first, last = (self.at(self.place, inputs[..., end]) for end in (0, -1))
        places = torch.where(first < 0, last, first)
        if bool(((places != last) & (last >= 0)).any()):
            self.torn.add(number)
        self.of(self.place, node).copy_(self._in_turn(node) if number in self.torn or bool((places < 0).any()) else places)

    def _mix(self, number: int, node: Node, scores: Tensor, values: Tensor) -> None:
        """Values, weighed: what stands where they do was the keys, and the result stands where the other factor did."""
        scored, places = self.origins(scores), self.at(self.place, values)
        first, second = self.at(self.place, scored), self.at(self.key_place, scored)
        self.votes[number] = int((second == places).sum()) - int((first == places).sum())
        self.mixes[number] = scores, values
        self.of(self.place, node).copy_((first if self.votes[number] >= 0 else second)[..., 0])

    def _elementwise(self, number: int, node: Node) -> None:
        origins = [self.origins(operand) for operand in node.operands]
        mains = [i for i, origin in enumerate(origins) if bool((origin >= 0).any())]
        if not mains:  # what is made of tokens alone keeps its place
            self.of(self.place, node).copy_(torch.stack([self.at(self.place, operand) for operand in node.operands]).amax(0))
        elif len(mains) == 1:
            self._descend(node, mains, origins)
            self._alone(number, node, mains[0])
        elif not self._mixes_one_by_one(number, node, mains, origins):
            self._meet(number, node, mains, origins, self._descend(node, mains, origins))

    def _descend(self, node: Node, mains: list[int], origins: list[Tensor]) -> Tensor:
        """Results descend from the oldest of the origins that meet in them, and stand where it stands."""
        never = torch.iinfo(torch.int64).max
        oldest = torch.stack([torch.where(origins[i] < 0, never, origins[i]) for i in mains]).amin(0)
        oldest = torch.where(oldest == never, -1, oldest)
        self.of(self.origin, node).copy_(oldest)
        places = self.of(self.place, node)
        for i in mains:
            places.copy_(torch.where(origins[i] == oldest, self.at(self.place, node.operands[i]), places))
        return oldest

    def _mixes_one_by_one(self, number: int, node: Node, mains: list[int], origins: list[Tensor]) -> bool:
        """Whether this is attention's second product, spelt out for a single key."""
        from_scores = [self.owner(origins[i]) in self._scores for i in mains]
        if node.op != "mul" or len(mains) != 2 or from_scores.count(True) != 1:
            return False
        scores, values = mains if from_scores[0] else mains[::-1]
        self._fresh(number, node)
        self._mix(number, node, node.operands[scores][..., None], node.operands[values][..., None])
        return True

    def _meet(self, number: int, node: Node, mains: list[int], origins: list[Tensor], oldest: Tensor) -> None:
        """Several activations in one: a residual sum, if their origins differ."""
        apart = [(origins[i] >= 0) & (origins[i] != oldest) for i in mains]
        if node.op not in ADDS or not any(bool(x.any()) for x in apart):
            self.state[number] = BENT
            return
        for i, x in zip(mains, apart, strict=True):
            self.put(self.joined, origins[i][x], oldest[x])
        *_, (_, before), (newest, _) = sorted((self._newest(node.operands[i]), i) for i in mains)
        self.state[number], self.newest[number] = SUMMED, newest
        self.onto[newest] = self.state_of(node.operands[before])

    def _newest(self, ids: Tensor) -> int:
        """The last projection that made what is being added."""
        return self.newest.get(self.owner(ids), self.owner(self.origins(ids)))

    def _alone(self, number: int, node: Node, main: int) -> None:
        """One activation, and what is done to it by constants, parameters and statistics."""
        sides = [operand for i, operand in enumerate(node.operands) if i != main]
        before = self.state_of(node.operands[main])
        op = "" if node.op == "sub" and main > 0 else node.op
        touches = [replace(touch, before=before) for side in sides for touch in self._touches(op, side)]
        if touches:
            self.touches[number] = touches
        statistic = any(self.nodes[owner].live for side in sides if (owner := self.owner(side)) >= 0)
        linear = node.op in ADDS | SCALES | {"neg", "dropout"}
        self.state[number] = NORMED if statistic or any(t.kind == "mul" for t in touches) else before if linear else BENT
        if self.state[number] == SUMMED:
            self.newest[number] = self._newest(node.operands[main])

    def _touches(self, op: str, side: Tensor) -> list[Touch]:
        """Parameters in what is added to, or multiplied with, an activation; they may come through operators of their own."""
        if bool((side < self.recording.tokens).all()):
            kind = op if op in ("add", "mul") else "other"
            return [Touch(kind, side)] if bool((side >= 0).any()) else []
        number = self.owner(side)
        node = self.nodes[number] if number >= 0 else None
        if node is None or node.kind is not Kind.ELEMENTWISE or bool((side < node.start).any() or (side >= node.stop).any()):
            return []
        place, found = node.place(side), []
        for position, operand in enumerate(node.operands):
            found += self._touches(_inside(op, node, position), operand[place])
        return found


def _inside(op: str, node: Node, position: int) -> str:
    """What happens to an activation that meets a node's result by ``op``, by one of the node's operands."""
    if op == "add" and (node.op == "add" or (node.op == "sub" and position == 0)):
        return "add"
    if node.op == "mul" and (op == "mul" or (op == "add" and node.live)):  # added, a parameter times a statistic is a scale
        return "mul"
    return ""
