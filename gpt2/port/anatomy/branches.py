"""Find attention and feed-forwards in a recorded forward pass, by what they compute.

Attention contracts activations with activations twice, for the scores and for the weighted values; this identifies the
projections around it. Of the others, one that reads another projection's results, and not the stream, is a feed-forward's second
layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gpt2.port.anatomy.flow import Effect, Flow, StreamState
from gpt2.port.anatomy.stream import NotGPT2, Stream


@dataclass(frozen=True)
class AttentionHead:
    """One attention head: ids (K,) of its queries, keys, values and weighted sums; ``all_places`` has them for all tokens.

    ``alone``: it has one key for the last token, and not those of other heads beside it.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor
    all_places: dict[str, Tensor] = field(repr=False)
    alone: bool


@dataclass(frozen=True)
class Affine:
    """A norm's scale and shift (D,), or None, for the stream coordinates ``places``. ``at``: its first node."""

    scale: Tensor | None
    shift: Tensor | None
    places: Tensor
    at: int


@dataclass
class Branch:
    """An attention ("attn") or feed-forward ("mlp"): ``ups`` project from the stream, ``downs`` back to it."""

    part: str
    base: int  # the id of the stream element where it starts
    weight: int  # the id of its first weight; identifies a branch that runs twice
    norms: list[Affine]  # between the stream and the branch, nearest first
    normed: bool
    ups: list[int] = field(default_factory=list)
    downs: list[int] = field(default_factory=list)
    heads: list[AttentionHead] = field(default_factory=list)
    times: int = 1  # how often it runs
    layer: int = -1  # the block's number in the checkpoint

    @property
    def norm(self) -> str:
        return "ln_1" if self.part == "attn" else "ln_2"


class Branches:
    """The attentions and feed-forwards in the order in which they run, each once; ``adapters``: first weights of LoRA pairs."""

    def __init__(self, flow: Flow, stream: Stream) -> None:
        self.flow, self.stream, self.recording = flow, stream, flow.recording
        projections = [n for n in sorted(self.recording.needed) if flow.is_projection(n) and flow.nodes[n].live]
        inputs = {n: flow.origins(flow.inputs(results[0])) for n in projections if len(results := flow.results(n))}
        self._inputs = {n: origins[origins >= 0] for n, origins in inputs.items() if bool((origins >= 0).any())}
        self.adapters = self._remove_adapters()
        attentions = self._attentions()
        if not attentions:
            raise NotGPT2("nothing in its forward weighs projections of the tokens by one another, as attention does")
        known = {number for branch in attentions for number in branch.ups + branch.downs}
        self.attentions = _each_once(attentions)
        self.feed_forwards = _each_once(self._feed_forwards([number for number in self._inputs if number not in known]))

    def norms(self, ids: Tensor) -> tuple[list[Affine], int]:
        """Return the norms between the stream and a projection's inputs ``ids``, nearest first, and an element of the stream."""
        met: list[tuple[int, dict[Effect, Tensor]]] = []  # first node, and its parameters
        ids = ids[ids >= self.recording.tokens]
        places = self.stream.coordinates(ids)
        while self.flow.state_of(ids) is StreamState.NORMED:
            number = self.flow.owner(ids)
            node = self.flow.nodes[number]
            index = node.place(ids)
            for touch in self.flow.touches.get(number, []):
                effect, parameters = touch.effect, touch.ids[index]
                if effect is Effect.OTHER or (effect is Effect.ADD and touch.before is not StreamState.NORMED):
                    continue
                if not met or effect in met[-1][1] or effect is Effect.ADD:  # backwards, the shift comes first
                    met.append((number, {}))
                met[-1] = number, {**met[-1][1], effect: parameters}
            operands = (operand[index] for operand in node.tensors)
            ids = next(operand for operand in operands if bool((self.flow.origins(operand) >= 0).all()))
        return [Affine(by.get(Effect.MUL), by.get(Effect.ADD), places, number) for number, by in met], int(ids[0])

    def _branch(self, branches: dict[int, Branch], part: str, result: Tensor) -> Branch:
        ids = self.flow.inputs(result)
        norms, base = self.norms(ids)
        new = Branch(part, base, int(self.flow.first_weights(result[None])), norms, self.flow.state_of(ids) is StreamState.NORMED)
        return branches.setdefault(base, new)

    def _remove_adapters(self) -> set[int]:
        """Remove low-rank adapters from the projections and return the ids of their first weights."""
        numbers: set[int] = set()
        for down, origins in self._inputs.items():
            for up in set(self.recording.owners(origins).tolist()) & set(self._inputs):
                beside = self.flow.results(down)[:1]
                while int(beside := self.flow.at(self.flow.joined, beside)) >= 0:
                    if self.flow.is_projection(self.flow.owner(beside)):
                        same = torch.equal(self.flow.inputs(beside), self.flow.inputs(self.flow.results(up)[0]))
                        numbers |= {up, down} if same else set()
        self._inputs = {number: origins for number, origins in self._inputs.items() if number not in numbers}
        return {int(self.flow.first_weights(self.flow.results(number)[:1])) for number in numbers}

    def _heads(self) -> Iterator[AttentionHead]:
        all_votes = sum(self.flow.votes.values())
        for number, (scores, values) in self.flow.mixes.items():
            mixed, node = self.flow.results(number), self.flow.nodes[number]
            scored, value = (self.flow.origins(x[node.place(mixed)]) for x in (scores, values))  # (n, S)
            is_here = self.flow.at(self.flow.place, values[node.place(mixed)]) == self.flow.here
            if not bool(is_here.any()):
                continue  # the last token is not mixed here
            own, alone = is_here.int().argmax(-1, keepdim=True), bool((is_here.sum(-1) == 1).all())
            scored, value = scored.gather(-1, own)[:, 0], value.gather(-1, own)[:, 0]
            for score in dict.fromkeys(scored.tolist()):
                product, mine = self.flow.nodes[self.recording.owner(score)], scored == score
                a, b = product.tensors
                factors = (a, b) if (self.flow.votes[number] or all_votes) >= 0 else (b, a)
                q, k = (self._each_of_pairs(factor[product.place(torch.tensor(score))]) for factor in factors)
                if self.flow.is_projection(self.flow.owner(q)):
                    yield AttentionHead(q, k, value[mine], mixed[mine], dict(zip("qkv", (*factors, values), strict=True)), alone)

    def _each_of_pairs(self, ids: Tensor) -> Tensor:
        """Return the origins of queries or keys ``ids`` (K,), each once, although rotary positions mix them in pairs.

        Both sums of a pair have the older number as origin. The second of them takes the number that was added to it.
        """
        origins = self.flow.origins(ids)
        firsts: set[int] = set()
        for i, origin in enumerate(origins.tolist()):
            partner = self._partners.get(origin, -1) if origin in firsts else -1
            if partner >= 0 and self.recording.owner(partner) == self.recording.owner(origin):
                origins[i] = partner
            firsts.add(origin)
        return origins

    @cached_property
    def _partners(self) -> dict[int, int]:
        """By origin: a younger origin that was added to it."""
        joined = (self.flow.joined >= 0).nonzero()[:, 0]
        return dict(zip(self.flow.joined[joined].tolist(), (joined + self.recording.tokens).tolist(), strict=True))

    def _attentions(self) -> list[Branch]:
        branches: dict[int, Branch] = {}
        by_result: dict[int, Branch] = {}
        for head in self._heads():
            branch = self._branch(branches, "attn", head.q[0])
            branch.heads.append(head)
            owners = self.recording.owners(torch.cat((head.q, head.k, head.v))).unique().tolist()
            branch.ups += [number for number in owners if self.flow.is_projection(number) and number not in branch.ups]
            by_result |= dict.fromkeys(head.mixed.tolist(), branch)
        for number, origins in self._inputs.items():
            origin = next((origin for origin in origins.tolist() if origin in by_result), None)
            if origin is not None:
                by_result[origin].downs.append(number)
        return list(branches.values())

    def _feed_forwards(self, rest: list[int]) -> list[Branch]:
        branches: dict[int, Branch] = {}
        for down in rest:
            if self.flow.state_of(self.flow.inputs(self.flow.results(down)[0])) not in (
                StreamState.PROJECTED,
                StreamState.NONLINEAR,
            ):
                continue  # it starts from the stream
            for up in sorted(set(self.recording.owners(self._inputs[down]).tolist()) & set(rest)):
                branch = self._branch(branches, "mlp", self.flow.results(up)[0])
                branch.ups += [up] if up not in branch.ups else []
                branch.downs += [down] if down not in branch.downs else []
        return list(branches.values())


def _each_once(branches: Iterable[Branch]) -> list[Branch]:
    """Return every branch once, with the number of times that it runs."""
    by_weight: dict[int, Branch] = {}
    for branch in branches:
        first = by_weight.setdefault(branch.weight, branch)
        first.times += first is not branch
    return list(by_weight.values())
