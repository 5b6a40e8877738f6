"""Follow each element of a recorded forward pass: which projection it comes from, and what was added or multiplied on the way.

Nothing here knows GPT-2's parts. It knows projections (contractions with parameters), sums, norms, and attention, which is the
only place where activations are multiplied with activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from gpt2.port.recording.dataflow import Kind, Node, Recording

LINEAR = {"add", "sub", "mul", "div", "neg", "dropout"}


class State(Enum):
    """What the results of a node are."""

    PROJECTED = "a table entry, or a product with at most a bias"
    SUMMED = "a sum of several projections: the residual stream"
    NORMED = "divided by a statistic, or multiplied by a parameter"
    NONLINEAR = "anything else"


class Effect(Enum):
    """What a parameter does to an activation."""

    ADD = "add"
    MUL = "mul"
    OTHER = "other"


@dataclass(frozen=True)
class Touch:
    """Parameters that act on single elements of an activation."""

    effect: Effect
    ids: Tensor  # of the parameters, in the shape of the node
    before: State = State.NONLINEAR  # of the activation


class Flow:
    """A recording's nodes that depend on tokens and that the output depends on, read in order.

    Tables over all computed elements (-1 for no value; :meth:`at` reads them):

    ``origin``: the projection result or table entry that an element descends from, one to one; of several that were added, the
    oldest. ``place``: the token of the probe that it stands for, counted through the batch. ``key_place``: of attention scores,
    the token of the second factor (``place`` is that of the first). ``joined``: of an origin, an older one that it was added to.

    By node: ``state``; ``touches``; ``newest``, of a sum, the projection that was added last, and ``onto``, of such a projection,
    the state of what it was added to; ``mixes``, the scores and values (*results, summed) of attention's second product;
    ``votes``, of such a product, how many places say that the scores' second factor is the keys, minus those for the first.
    ``mixes_places`` are the projections whose inputs stand for several tokens.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.nodes = recording, recording.nodes
        self.here = recording.ids.numel() - 1  # the last token; the parts are read there
        self.origin, self.place, self.key_place, self.joined = (self.blank() for _ in range(4))
        self.state: dict[int, State] = {}
        self.touches: dict[int, list[Touch]] = {}
        self.newest: dict[int, int] = {}
        self.onto: dict[int, State] = {}
        self.mixes: dict[int, tuple[Tensor, Tensor]] = {}
        self.votes: dict[int, int] = {}
        self.mixes_places: set[int] = set()
        self._scores: set[int] = set()
        self.place[: recording.ids.numel()] = torch.arange(recording.ids.numel())
        readers: dict[Kind, Callable[[int, Node], None]] = {
            Kind.LOOKUP: self._lookup,
            Kind.CONTRACTION: self._contraction,
            Kind.ELEMENTWISE: self._elementwise,
            Kind.ROWWISE: self._rowwise,
            Kind.OTHER: lambda number, node: self._new_origin(number, node, State.NONLINEAR),
        }
        for number in sorted(recording.needed):
            node = self.nodes[number]
            if node.live and node.kind in readers:
                readers[node.kind](number, node)

    def blank(self) -> Tensor:
        """An empty table over all computed elements."""
        return torch.full((self.recording.stop - self.recording.tokens,), -1)

    def at(self, table: Tensor, ids: Tensor) -> Tensor:
        """What a table holds for elements; -1 for parameters and elements without an id."""
        return torch.where(ids >= self.recording.tokens, table[(ids - self.recording.tokens).clamp(min=0)], -1)

    def put(self, table: Tensor, ids: Tensor, values: Tensor) -> Tensor:
        """Write to a table, and return it."""
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
        """The node that computed the first of these elements that was computed; -1 if none was."""
        known = ids[ids >= self.recording.tokens]
        return self.recording.owner(known.flatten()[0]) if known.numel() else -1

    def state_of(self, ids: Tensor) -> State:
        return self.state.get(self.owner(ids), State.NONLINEAR)

    def results(self, number: int) -> Tensor:
        """Ids of what a node computed for the last token, in its order."""
        node = self.nodes[number]
        return (self.of(self.place, node) == self.here).flatten().nonzero()[:, 0] + node.start

    def by_place(self, number: int, values: Tensor) -> dict[int, Tensor]:
        """``values``, in a node's shape or order, grouped by the token that each result stands for."""
        places = self.of(self.place, self.nodes[number]).flatten()
        order = places.argsort(stable=True)
        tokens, counts = places[order].unique_consecutive(return_counts=True)
        groups = values.flatten()[order].split(counts.tolist())
        return {int(token): group for token, group in zip(tokens, groups, strict=True) if token >= 0}

    def is_projection(self, number: int) -> bool:
        return number >= 0 and self.nodes[number].kind is Kind.CONTRACTION and self.nodes[number].weight is not None

    def inputs(self, result: Tensor) -> Tensor:
        """The activations (K,) that a projection's result was made of."""
        node = self.nodes[self.recording.owner(result)]
        return node.inputs[node.place(result.reshape(()))]

    def first_weights(self, results: Tensor) -> Tensor:
        """Of each projection result, the id of its first weight: the same for all tokens, so it identifies a unit."""
        weights, owners = torch.full_like(results, -1), self.recording.owners(results)
        for number in owners.unique().tolist():
            if self.is_projection(number):
                node, mine = self.nodes[number], owners == number
                weights[mine] = node.weights[(*node.place(results[mine]), torch.tensor(0))]
        return weights

    def _new_origin(self, number: int, node: Node, state: State = State.PROJECTED) -> None:
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
        """One token after the other, in the order of (B, T, ...): for results whose tokens are unknown."""
        size = node.stop - node.start
        return torch.arange(size).view(node.shape) // max(1, size // self.recording.ids.numel())

    def _rowwise(self, number: int, node: Node) -> None:
        for table in (self.origin, self.place):
            self.of(table, node).copy_(self.at(table, node.tensors[0]))
        self.state[number] = State.NORMED

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
        """Weighted values. Keys are the factor of the scores that has the values' tokens; the result has the other's token."""
        scored, places = self.origins(scores), self.at(self.place, values)
        first, second = self.at(self.place, scored), self.at(self.key_place, scored)
        self.votes[number] = int((second == places).sum()) - int((first == places).sum())
        self.mixes[number] = scores, values
        self.of(self.place, node).copy_((first if self.votes[number] >= 0 else second)[..., 0])

    def _elementwise(self, number: int, node: Node) -> None:
        origins = [self.origins(operand) for operand in node.tensors]
        activations = [i for i, origin in enumerate(origins) if bool((origin >= 0).any())]
        if not activations:  # made of token ids alone: it keeps its place
            self.of(self.place, node).copy_(torch.stack([self.at(self.place, operand) for operand in node.tensors]).amax(0))
        elif len(activations) == 1:
            self._descend(node, activations, origins)
            self._one_activation(number, node, activations[0])
        elif not self._is_mix_of_one_key(number, node, activations, origins):
            self._sum(number, node, activations, origins, self._descend(node, activations, origins))

    def _descend(self, node: Node, activations: list[int], origins: list[Tensor]) -> Tensor:
        """Give the results the oldest origin of their operands, and its place."""
        never = torch.iinfo(torch.int64).max
        oldest = torch.stack([torch.where(origins[i] < 0, never, origins[i]) for i in activations]).amin(0)
        oldest = torch.where(oldest == never, -1, oldest)
        self.of(self.origin, node).copy_(oldest)
        places = self.of(self.place, node)
        for i in activations:
            places.copy_(torch.where(origins[i] == oldest, self.at(self.place, node.tensors[i]), places))
        return oldest

    def _is_mix_of_one_key(self, number: int, node: Node, activations: list[int], origins: list[Tensor]) -> bool:
        """Whether this is attention's second product, written as a multiplication for a single key."""
        from_scores = [self.owner(origins[i]) in self._scores for i in activations]
        if node.op != "mul" or len(activations) != 2 or from_scores.count(True) != 1:
            return False
        scores, values = activations if from_scores[0] else activations[::-1]
        self._new_origin(number, node)
        self._mix(number, node, node.tensors[scores][..., None], node.tensors[values][..., None])
        return True

    def _sum(self, number: int, node: Node, activations: list[int], origins: list[Tensor], oldest: Tensor) -> None:
        """Several activations in one result: a residual sum, if their origins differ."""
        differ = [(origins[i] >= 0) & (origins[i] != oldest) for i in activations]
        if node.op not in ("add", "sub") or not any(bool(x.any()) for x in differ):
            self.state[number] = State.NONLINEAR
            return
        for i, x in zip(activations, differ, strict=True):
            self.put(self.joined, origins[i][x], oldest[x])
        *_, (_, before), (newest, _) = sorted((self._newest(node.tensors[i]), i) for i in activations)
        self.state[number], self.newest[number] = State.SUMMED, newest
        self.onto[newest] = self.state_of(node.tensors[before])

    def _newest(self, ids: Tensor) -> int:
        """The last projection that contributes to a summand."""
        return self.newest.get(self.owner(ids), self.owner(self.origins(ids)))

    def _one_activation(self, number: int, node: Node, main: int) -> None:
        """One activation, changed by constants, parameters and statistics."""
        sides = [operand for i, operand in enumerate(node.tensors) if i != main]
        before = self.state_of(node.tensors[main])
        op = "" if node.op == "sub" and main > 0 else node.op
        touches = [replace(touch, before=before) for side in sides for touch in self._touches(op, side)]
        if touches:
            self.touches[number] = touches
        statistic = any(self.nodes[owner].live for side in sides if (owner := self.owner(side)) >= 0)
        if statistic or any(touch.effect is Effect.MUL for touch in touches):
            self.state[number] = State.NORMED
        else:
            self.state[number] = before if node.op in LINEAR else State.NONLINEAR
        if self.state[number] is State.SUMMED:
            self.newest[number] = self._newest(node.tensors[main])

    def _touches(self, op: str, side: Tensor) -> list[Touch]:
        """The parameters that reach an activation through ``side``, the other operand of ``op``."""
        if bool((side < self.recording.tokens).all()):
            return [Touch(Effect(op) if op in ("add", "mul") else Effect.OTHER, side)] if bool((side >= 0).any()) else []
        number = self.owner(side)
        node = self.nodes[number] if number >= 0 else None
        if node is None or node.kind is not Kind.ELEMENTWISE or bool((side < node.start).any() or (side >= node.stop).any()):
            return []
        index, touches = node.place(side), []
        for position, operand in enumerate(node.tensors):
            touches += self._touches(_combined(op, node, position), operand[index])
        return touches


def _combined(op: str, node: Node, position: int) -> str:
    """What one of a node's operands does to an activation that meets the node's result by ``op``: "add", "mul" or ""."""
    if op == "add" and (node.op == "add" or (node.op == "sub" and position == 0)):
        return "add"
    if node.op == "mul" and (op == "mul" or (op == "add" and node.live)):  # a parameter times a statistic, added, is a scale
        return "mul"
    return ""
