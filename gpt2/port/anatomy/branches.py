"""Attention and feed-forwards, found by what they do.

A contraction of activations with activations is attention, and comes twice: the second weighs the values by what comes of the
first. Projections that end in queries, keys and values, or that start from what was mixed, are thereby known. Of the others,
those that start from another's results, and not from the stream, are the second layer of a feed-forward, that other the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.port.anatomy.flow import BENT, NORMED, PLAIN, Flow
from gpt2.port.anatomy.stream import NotGPT2, Stream


@dataclass(frozen=True)
class Head:
    """One attention head: the projection results that are its queries, keys and values, and what it mixes; (K,) each.

    ``everywhere`` has the queries, keys and values of all places, as they went into the products.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor
    everywhere: dict[str, Tensor] = field(repr=False)


@dataclass(frozen=True)
class Norm:
    """Scale and shift (D,) for the stream coordinates ``places``; None where there is none. ``at`` is its first node."""

    scale: Tensor | None
    shift: Tensor | None
    places: Tensor
    at: int


@dataclass
class Branch:
    """An attention or a feed-forward. ``ups`` are the projections that start from the stream, ``downs`` those back to it."""

    base: int  # the element of the stream that it starts from
    weight: int  # its first; what runs twice has it twice
    norms: list[Norm]  # on the way from the stream, the nearest first
    normed: bool
    ups: list[int] = field(default_factory=list)
    downs: list[int] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    times: int = 1


class Branches:
    """``attentions`` and ``feed_forwards`` in the order in which they run, each once; ``adapters``, the first weights of
    projections in pairs of low rank that are added to others.

    Raises:
        NotGPT2: no attention.
    """

    def __init__(self, flow: Flow, stream: Stream) -> None:
        self.flow, self.stream, self.recording = flow, stream, flow.recording
        projections = [n for n in sorted(self.recording.needed) if flow.is_projection(n) and flow.nodes[n].live]
        feeds = {n: flow.origins(flow.inputs(results[0])) for n in projections if len(results := flow.results(n))}
        self._feeds = {n: origins[origins >= 0] for n, origins in feeds.items() if bool((origins >= 0).any())}
        self.adapters = self._set_adapters_aside()
        attentions = self._attentions()
        if not attentions:
            raise NotGPT2("nothing in its forward weighs projections of the tokens by one another, as attention does")
        known = {number for branch in attentions for number in branch.ups + branch.downs}
        self.attentions = _once(attentions)
        self.feed_forwards = _once(self._feed_forwards([number for number in self._feeds if number not in known]))

    def norms(self, ids: Tensor) -> tuple[list[Norm], int]:
        """Back from a projection's input to the stream: the norms on the way, nearest first, and an element of the stream."""
        found: list[dict] = []
        ids = ids[ids >= self.recording.tokens]
        places = self.stream.coordinates(ids)
        while self.flow.state_of(ids) == NORMED:
            number = self.flow.owner(ids)
            node = self.flow.nodes[number]
            where = node.place(ids)
            for touch in self.flow.touches.get(number, []):
                name = {"add": "shift", "mul": "scale"}.get(touch.kind)
                if name is None or (name == "shift" and touch.before != NORMED):
                    continue
                if found and torch.equal(found[-1].get(name, ids[:0]), touch.ids[where]):
                    continue  # the same once more: x * s + (b - mean * s)
                if not found or name in found[-1] or name == "shift":  # the shift comes last, so it is met first
                    found.append({})
                found[-1] |= {name: touch.ids[where], "at": number}
            mains = (operand[where] for operand in node.operands)
            ids = next(main for main in mains if bool((self.flow.origins(main) >= 0).all()))
        return [Norm(norm.get("scale"), norm.get("shift"), places, norm["at"]) for norm in found], int(ids[0])

    def _branch(self, found: dict[int, Branch], result: Tensor) -> Branch:
        """The branch that starts where the projection of ``result`` does; a new one, if none does."""
        ids = self.flow.inputs(result)
        norms, base = self.norms(ids)
        new = Branch(base, int(self.flow.weights(result[None])), norms, self.flow.state_of(ids) == NORMED)
        return found.setdefault(base, new)

    def _set_adapters_aside(self) -> set[int]:
        """Pairs of projections whose result is added to that of a single one, of the same input: low-rank fine-tuning."""
        found: set[int] = set()
        for down, origins in self._feeds.items():
            for up in set(self.recording.owners(origins).tolist()) & set(self._feeds):
                beside = self.flow.results(down)[:1]
                while int(beside := self.flow.at(self.flow.joined, beside)) >= 0:
                    if self.flow.is_projection(self.flow.owner(beside)):
                        same = torch.equal(self.flow.inputs(beside), self.flow.inputs(self.flow.results(up)[0]))
                        found |= {up, down} if same else set()
        self._feeds = {number: origins for number, origins in self._feeds.items() if number not in found}
        return {int(self.flow.weights(self.flow.results(number)[:1])) for number in found}

    def _heads(self) -> Iterator[Head]:
        by_all = sum(self.flow.votes.values())
        for number, (scores, values) in self.flow.mixes.items():
            mixed, node = self.flow.results(number), self.flow.nodes[number]
            scored, value = (self.flow.origins(x[node.place(mixed)]) for x in (scores, values))  # (n, S)
            itself = self.flow.at(self.flow.place, values[node.place(mixed)]) == self.flow.here
            if not bool(itself.any()):
                continue  # the token is not among those that are mixed here
            own = itself.int().argmax(-1, keepdim=True)
            scored, value, mixed = scored.gather(-1, own)[:, 0], value.gather(-1, own)[:, 0], self._whole(mixed)
            for score in dict.fromkeys(scored.tolist()):
                product, mine = self.flow.nodes[self.recording.owner(score)], scored == score
                factors = product.operands if (self.flow.votes[number] or by_all) >= 0 else product.operands[::-1]
                q, k = (self.flow.origins(factor[product.place(torch.tensor(score))]) for factor in factors)
                if self.flow.is_projection(self.flow.owner(q)):
                    yield Head(q, k, value[mine], mixed[mine], dict(zip("qkv", (*factors, values), strict=True)))

    def _whole(self, mixed: Tensor) -> Tensor:
        """The oldest part of a mix that is summed up in parts."""
        older = self.flow.at(self.flow.joined, mixed)
        return self._whole(older) if self.flow.owner(older) in self.flow.mixes else mixed

    def _attentions(self) -> list[Branch]:
        found: dict[int, Branch] = {}
        mixed: dict[int, Branch] = {}
        for head in self._heads():
            branch = self._branch(found, head.q[0])
            branch.heads.append(head)
            used = self.recording.owners(torch.cat((head.q, head.k, head.v))).unique().tolist()
            branch.ups += [number for number in used if self.flow.is_projection(number) and number not in branch.ups]
            mixed |= dict.fromkeys(head.mixed.tolist(), branch)
        for number, origins in self._feeds.items():
            branch = next((mixed[origin] for origin in origins.tolist() if origin in mixed), None)
            if branch is not None:
                branch.downs.append(number)
        return list(found.values())

    def _feed_forwards(self, rest: list[int]) -> list[Branch]:
        found: dict[int, Branch] = {}
        for down in rest:
            if self.flow.state_of(self.flow.inputs(self.flow.results(down)[0])) not in (PLAIN, BENT):
                continue  # it starts from the stream, to which others were added
            for up in sorted(set(self.recording.owners(self._feeds[down]).tolist()) & set(rest)):
                branch = self._branch(found, self.flow.results(up)[0])
                branch.ups += [up] if up not in branch.ups else []
                branch.downs += [down] if down not in branch.downs else []
        return list(found.values())


def _once(branches: list[Branch]) -> list[Branch]:
    """Every block once, however often it runs."""
    found: dict[int, Branch] = {}
    for branch in branches:
        if branch.weight in found:
            found[branch.weight].times += 1
        else:
            found[branch.weight] = branch
    return list(found.values())
