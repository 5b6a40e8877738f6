"""Follow each element of a recorded forward pass: the projection that it comes from, and what was added or multiplied since."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from gpt2.port.recording.dataflow import Node, NodeKind, Recording

LINEAR = {"add", "sub", "mul", "div", "neg", "dropout"}


class StreamState(Enum):
    PROJECTED = "a table entry, or a product with at most a bias"
    SUMMED = "a sum of several projections: the residual stream"
    NORMED = "divided by a statistic, or multiplied by a parameter"
    NONLINEAR = "anything else"


class Effect(Enum):
    ADD = "add"
    MUL = "mul"
    OTHER = "other"


@dataclass(frozen=True)
class Touch:
    """Parameters that act on single elements of an activation."""

    effect: Effect
    ids: Tensor  # the parameters' ids, in the shape of the node
    before: StreamState = StreamState.NONLINEAR  # the activation's state


class Flow:
    """The nodes that depend on tokens and that the output needs, read in order into tables.

    Tables over all computed elements (-1: no value): ``origin``: the projection result or table entry that the element comes
    from; of several summands, the oldest. ``place``: its token, counted through the batch. ``key_place``: for attention scores,
    the second factor's token. ``joined``: for an origin, the older origin that it was added to.

    By node: ``newest``: the projection last added to a sum. ``onto``: the state of the stream that this projection was added to.
    ``mixes``: scores and values (*results, summed) of attention's second product. ``votes``: places where the scores' second
    factor is the keys, minus places where the first is. ``mixes_places``: projections that read several tokens.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.nodes = recording, recording.nodes
        self.here = recording.ids.numel() - 1  # the last token, for which parts are read
        self.origin, self.place, self.key_place, self.joined = (self.blank() for _ in range(4))
        self.state: dict[int, StreamState] = {}
        self.touches: dict[int, list[Touch]] = {}
        self.newest: dict[int, int] = {}
        self.onto: dict[int, StreamState] = {}
        self.mixes: dict[int, tuple[Tensor, Tensor]] = {}
        self.votes: dict[int, int] = {}
        self.mixes_places: set[int] = set()
        self._scores: set[int] = set()
        self.place[1 : recording.ids.numel() + 1] = torch.arange(recording.ids.numel())
        readers: dict[NodeKind, Callable[[int, Node], None]] = {
            NodeKind.LOOKUP: self._lookup,
            NodeKind.CONTRACTION: self._contraction,
            NodeKind.ELEMENTWISE: self._elementwise,
            NodeKind.ROWWISE: self._rowwise,
            NodeKind.OTHER: self._other,
        }
        for number in sorted(recording.needed):
            node = self.nodes[number]
            if node.live and node.kind in readers:
                readers[node.kind](number, node)

    def blank(self) -> Tensor:
        """Return a table without values; its first entry is that of all which is not computed."""
        return torch.full((self.recording.stop - self.recording.tokens + 1,), -1)

    def at(self, table: Tensor, ids: Tensor) -> Tensor:
        """Read a table; -1 for parameters and for elements without an id."""
        return table.take((ids - (self.recording.tokens - 1)).clamp_(min=0))

    def put(self, table: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        table[ids - (self.recording.tokens - 1)] = values
        return table

    def of(self, table: Tensor, node: Node) -> Tensor:
        """Return a writable view of a table for all results of a node."""
        first = node.start - self.recording.tokens + 1
        return table[first : first + node.stop - node.start].view(node.shape)

    def origins(self, ids: Tensor) -> Tensor:
        return self.at(self.origin, ids)

    def root(self, ids: Tensor) -> Tensor:
        """Follow ``joined`` to the oldest origin."""
        ids = self.origins(ids)
        while bool(((older := self.at(self.joined, ids)) >= 0).any()):
            ids = torch.where(older >= 0, older, ids)
        return ids

    def owner(self, ids: Tensor) -> int:
        """Return the node of the first computed element among ``ids``; -1 if there is none."""
        first = int(ids[(0,) * ids.ndim]) if ids.numel() else -1
        if first < self.recording.tokens and ids.numel() > 1 and (known := ids[ids >= self.recording.tokens]).numel():
            first = int(known[0])
        return self.recording.owner(first) if first >= self.recording.tokens else -1

    def state_of(self, ids: Tensor) -> StreamState:
        return self.state.get(self.owner(ids), StreamState.NONLINEAR)

    def results(self, number: int) -> Tensor:
        """Return the ids of a node's results for the last token, in order."""
        node = self.nodes[number]
        return (self.of(self.place, node) == self.here).flatten().nonzero()[:, 0] + node.start

    def by_place(self, number: int, values: Tensor) -> dict[int, Tensor]:
        """Group ``values``, in a node's shape or order, by the token of each result."""
        places = self.of(self.place, self.nodes[number]).flatten()
        order = places.argsort(stable=True)
        tokens, counts = places[order].unique_consecutive(return_counts=True)
        groups = values.flatten()[order].split(counts.tolist())
        return {token: group for token, group in zip(tokens.tolist(), groups, strict=True) if token >= 0}

    def is_projection(self, number: int) -> bool:
        return number >= 0 and self.nodes[number].kind is NodeKind.CONTRACTION and self.nodes[number].weight is not None

    def inputs(self, result: Tensor) -> Tensor:
        """Return the activations (K,) that a projection's result was computed from."""
        node = self.nodes[self.recording.owner(result)]
        return node.inputs[node.place(int(result))]

    def projections(self, results: Tensor) -> Iterator[tuple[Node, Tensor]]:
        """Yield each projection that computed some of the results, and which of them."""
        for node in (self.nodes[number] for number in self.recording.owners(results) if self.is_projection(number)):
            yield node, (results >= node.start) & (results < node.stop)

    def first_weights(self, results: Tensor) -> Tensor:
        """Return the id of each projection result's first weight: equal for all tokens, so it identifies a unit."""
        weights = torch.full_like(results, -1)
        for node, mine in self.projections(results):
            weights[mine] = node.weights[(*node.place(results[mine]), torch.tensor(0))]
        return weights

    def _new_origin(self, number: int, node: Node, state: StreamState = StreamState.PROJECTED) -> None:
        self.of(self.origin, node).copy_(torch.arange(node.start, node.stop).view(node.shape))
        self.state[number] = state

    def _lookup(self, number: int, node: Node) -> None:
        self._new_origin(number, node)
        places = self.at(self.place, node.tensors[1]) if len(node.operands) > 1 else torch.tensor(-1)
        if bool((places < 0).any()) and node.index is not None:
            match = node.index[..., None] == self.recording.ids.flatten()
            places = torch.where(match.any(-1), match.int().argmax(-1), -1)
        self.of(self.place, node).copy_(self._in_turn(node) if bool((places < 0).any()) else places)

    def _in_turn(self, node: Node) -> Tensor:
        """Assign tokens in the order of (B, T, ...), for results with unknown tokens."""
        size = node.stop - node.start
        return torch.arange(size).view(node.shape) // max(1, size // self.recording.ids.numel())

    def _other(self, number: int, node: Node) -> None:
        if node.learned:  # a mask or a position that is computed from the token ids alone is no activation
            self._new_origin(number, node, StreamState.NONLINEAR)

    def _rowwise(self, number: int, node: Node) -> None:
        for table in (self.origin, self.place):
            self.of(table, node).copy_(self.at(table, node.tensors[0]))
        self.state[number] = StreamState.NORMED

    def _contraction(self, number: int, node: Node) -> None:
        self._new_origin(number, node)
        if node.weight is not None:
            self._projection(number, node)
            return
        a, b = node.tensors
        from_scores = [self.owner(self.origins(factor[..., 0])) in self._scores for factor in (a, b)]
        if any(from_scores):
            self._mix(number, node, *((a, b) if from_scores[0] else (b, a)))
        else:
            self._scores.add(number)
            self.of(self.place, node).copy_(self.at(self.place, a[..., 0]))
            self.of(self.key_place, node).copy_(self.at(self.place, b[..., 0]))

    def _projection(self, number: int, node: Node) -> None:
        first, last = (self.at(self.place, node.inputs[..., end]) for end in (0, -1))
        places = torch.where(first < 0, last, first)
        if bool(((places != last) & (last >= 0)).any()):
            self.mixes_places.add(number)
        unclear = number in self.mixes_places or bool((places < 0).any())
        self.of(self.place, node).copy_(self._in_turn(node) if unclear else places)

    def _mix(self, number: int, node: Node, scores: Tensor, values: Tensor) -> None:
        """Record attention's second product; the keys are the factor of the scores that has the values' tokens."""
        scored, places = self.origins(scores), self.at(self.place, values)
        first, second = self.at(self.place, scored), self.at(self.key_place, scored)
        self.votes[number] = int((second == places).sum()) - int((first == places).sum())
        self.mixes[number] = scores, values
        self.of(self.place, node).copy_((first if self.votes[number] >= 0 else second)[..., 0])

    def _elementwise(self, number: int, node: Node) -> None:
        origins = [self.origins(operand) for operand in node.tensors]
        activations = [i for i, origin in enumerate(origins) if bool((origin >= 0).any())]
        if not activations:  # depends on token ids only: keeps its place
            self.of(self.place, node).copy_(torch.stack([self.at(self.place, operand) for operand in node.tensors]).amax(0))
            return
        oldest = self._descend(node, activations, origins)
        if len(activations) == 1:
            self._one_activation(number, node, activations[0])
        else:
            self._sum(number, node, activations, origins, oldest)

    def _descend(self, node: Node, activations: list[int], origins: list[Tensor]) -> Tensor:
        """Give the results the oldest origin of their operands, and its place."""
        first, *rest = activations
        oldest, places = origins[first], self.at(self.place, node.tensors[first])
        for i in rest:  # of equal ones, the last
            taken = (origins[i] == oldest) | ((origins[i] >= 0) & ((oldest < 0) | (origins[i] < oldest)))
            oldest = torch.where(taken, origins[i], oldest)
            places = torch.where(taken, self.at(self.place, node.tensors[i]), places)
        self.of(self.origin, node).copy_(oldest)
        self.of(self.place, node).copy_(places)
        return oldest

    def _sum(self, number: int, node: Node, activations: list[int], origins: list[Tensor], oldest: Tensor) -> None:
        differ = [(origins[i] >= 0) & (origins[i] != oldest) for i in activations]
        if node.op not in ("add", "sub") or not any(bool(x.any()) for x in differ):
            self.state[number] = StreamState.NONLINEAR
            return
        for i, x in zip(activations, differ, strict=True):
            self.put(self.joined, origins[i][x], oldest[x])
        *_, (_, before), (newest, _) = sorted((self._newest(node.tensors[i]), i) for i in activations)
        self.state[number], self.newest[number] = StreamState.SUMMED, newest
        self.onto[newest] = self.state_of(node.tensors[before])

    def _newest(self, ids: Tensor) -> int:
        return self.newest.get(self.owner(ids), self.owner(self.origins(ids)))

    def _one_activation(self, number: int, node: Node, main: int) -> None:
        """Read a node that changes one activation by constants, parameters or statistics."""
        sides = [operand for i, operand in enumerate(node.tensors) if i != main]
        before = self.state_of(node.tensors[main])
        op = "" if node.op == "sub" and main > 0 else node.op
        touches = [replace(touch, before=before) for side in sides for touch in self._touches(op, side)]
        if touches:
            self.touches[number] = touches
        statistic = any(self.nodes[owner].live for side in sides if (owner := self.owner(side)) >= 0)
        scaled = before is not StreamState.NONLINEAR and any(touch.effect is Effect.MUL for touch in touches)
        if statistic or scaled:
            self.state[number] = StreamState.NORMED
        else:
            self.state[number] = before if node.op in LINEAR else StreamState.NONLINEAR
        if self.state[number] is StreamState.SUMMED:
            self.newest[number] = self._newest(node.tensors[main])

    def _touches(self, op: str, side: Tensor) -> list[Touch]:
        """Return the parameters that reach an activation through ``side``, its partner in ``op``."""
        if bool((side < self.recording.tokens).all()):
            return [Touch(Effect(op) if op in ("add", "mul") else Effect.OTHER, side)] if bool((side >= 0).any()) else []
        node = self.nodes[number] if (number := self.owner(side)) >= 0 else None
        if node is None or node.kind is not NodeKind.ELEMENTWISE or bool((side < node.start).any() or (side >= node.stop).any()):
            return []
        index, touches = node.place(side), []
        for position, operand in enumerate(node.tensors):
            touches += self._touches(_combined(op, node, position), operand[index])
        return touches


def _combined(op: str, node: Node, position: int) -> str:
    """Return the effect ("add", "mul" or "") of a node's operand on an activation that meets the node's result by ``op``."""
    if op == "add" and (node.op == "add" or (node.op == "sub" and position == 0)):
        return "add"
    if node.op == "mul" and (op == "mul" or (op == "add" and node.live)):  # parameter * statistic, added, is a scale
        return "mul"
    return ""
