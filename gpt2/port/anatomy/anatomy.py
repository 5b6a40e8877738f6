"""Find the parts of a GPT-2 in a recorded forward pass, and where they lie among the module's parameters.

Everything is read for the last token of the probe, so that an element's id stands for a unit of the network. Heads, units of a
head and hidden units are numbered as they come: GPT-2 computes the same when they change places together. Layers are numbered in
the order in which they run.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.port.anatomy.branches import Branch, Branches, Norm
from gpt2.port.anatomy.flow import Flow, State
from gpt2.port.anatomy.parts import Matrix, Part, Vector
from gpt2.port.anatomy.stream import NotGPT2, Stream
from gpt2.port.recording.dataflow import Recording


@dataclass(frozen=True)
class Block:
    """One transformer block: its number in the checkpoint, and its branches; None for one that does not run."""

    layer: int
    attention: Branch | None
    feed_forward: Branch | None


class Anatomy:
    """The structure of a recorded module; ``parts`` say where GPT-2's parts lie.

    ``width``, ``words`` and ``positions`` as in :class:`Stream`; ``attentions``, ``feed_forwards`` and ``adapters`` as in
    :class:`Branches`. ``blocks`` has each block once and ``run_order`` the layer of each block that runs, repeated ones again.
    ``head``: the elements that are the logits; None where the forward returns hidden states. ``final_norm``: whether a norm comes
    before the head. ``post_norm``: whether norms stand behind the branches. ``extra_norms``: those that GPT-2 does not have.
    ``mixed_layers``: the layers whose attention mixes up heads and positions.

    Raises:
        NotGPT2: there is no token embedding, or no attention.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.flow = recording, Flow(recording)
        self.stream = Stream(self.flow)
        self.branches = Branches(self.flow, self.stream)
        self.width, self.words, self.positions = self.stream.width, self.stream.words, self.stream.positions
        self.attentions, self.feed_forwards = self.branches.attentions, self.branches.feed_forwards
        self.adapters = self.branches.adapters
        self.mixed_layers: set[int] = set()
        self.parts: list[Part] = [*self.words, *([] if self.positions is None else [self.positions])]
        self.layers = self._layers()
        branches = itertools.zip_longest(self.attentions, self.feed_forwards)
        self.blocks = [Block(layer, *pair) for layer, pair in zip(self.layers, branches, strict=False)]
        self.run_order = [self.layers[number] for number in self.branches.order]
        end = recording.output[self.flow.at(self.flow.place, recording.output) == self.flow.here]
        if not len(end):
            raise NotGPT2("its output is not made of the last token")
        self.head = self.flow.origins(end) if self.flow.is_projection(self.flow.owner(self.flow.origins(end))) else None
        for block in self.blocks:
            if block.attention is not None:
                self._place_attention(block.layer, block.attention)
            if block.feed_forward is not None:
                self._place_feed_forward(block.layer, block.feed_forward)
        if self.head is not None:
            self._place("head", None, self.head, torch.arange(len(self.head)))
        self._place_norms(end if self.head is None else self.flow.inputs(self.head[0]))

    def _layers(self) -> list[int]:
        """0, 1, ... as blocks run. If some blocks' parameters are unused and names are numbered, the names give the numbers."""
        order = list(range(max(len(self.attentions), len(self.feed_forwards))))
        names = [self.recording.name(branch.weight) for branch in self.attentions]
        pattern = re.sub(r"\d+", "#", names[0])
        unused = [source.name for source in self.recording.sources if source.storage not in self.recording.uses]
        idle = [name for name in unused if re.sub(r"\d+", "#", name) == pattern]
        if not idle or any(re.sub(r"\d+", "#", name) != pattern for name in names):
            return order
        for runs, left in zip(_numbers(names), _numbers(idle), strict=True):  # one number of the names after the other
            first = min(*runs, *left)
            if list(runs) == sorted(set(runs)) and sorted(runs + left) == list(range(first, first + len(runs + left))):
                return [number - first for number in runs]
        return order

    # Projections

    def _place(
        self, part: str, layer: int | None, results: Tensor, columns: Tensor, rows: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Add a projection and its bias to the parts. ``rows`` numbers the inputs; by default by the stream's coordinates."""
        owners = self.recording.owners(results)
        for number in owners.unique().tolist():
            if not self.flow.is_projection(number):
                continue
            node, mine = self.flow.nodes[number], owners == number
            inputs = self.flow.inputs(results[mine][0])
            self.parts.append(Matrix(part, layer, node, results[mine], (rows or self.stream.coordinates)(inputs), columns[mine]))
            for constant in (self.flow.origins(inputs) < 0).nonzero()[:1, 0]:  # a column of ones: its weights are the bias
                weights = node.weights[node.place(results[mine])]
                self.parts.append(Vector(f"{part}.bias", layer, weights[:, constant], columns[mine]))
        biases = self.flow.at(self.stream.biases, results)
        if bool((biases >= 0).any()):
            self.parts.append(Vector(f"{part}.bias", layer, biases[biases >= 0], columns[biases >= 0]))

    def _place_down(self, part: str, layer: int, branch: Branch, units: Tensor) -> None:
        """Add the projections back to the stream. Inputs are numbered as in ``units``; others, in their own order."""
        table = self.flow.put(self.flow.blank(), units, torch.arange(len(units)))

        def rows(inputs: Tensor) -> Tensor:
            origins = self.flow.origins(inputs)
            numbers = self.flow.at(table, origins)
            return numbers if bool(((numbers >= 0) | (origins < 0)).all()) else torch.arange(len(inputs))

        for number in branch.downs:
            results = self.flow.results(number)
            self._place(part, layer, results, self.stream.coordinates(results), rows)
            if number in self.stream.late_biases:
                late = self.stream.late_biases[number]
                self.parts.append(Vector(f"{part}.bias", layer, late.ids, late.places))

    def _place_attention(self, layer: int, branch: Branch) -> None:
        units = {part: torch.cat([getattr(head, part) for head in branch.heads]) for part in ("q", "k", "v", "mixed")}
        one_to_one = all(len(x.unique()) == len(x) == len(units["q"]) for x in units.values())
        if not one_to_one or any(number in self.flow.mixes_places for number in branch.downs):
            self.mixed_layers.add(layer)
        for part in "qkv":
            results = units[part] if one_to_one else self._in_order(branch, part)
            self._place(f"attn.{part}", layer, results, torch.arange(len(results)))
        self._place_down("attn.c_proj", layer, branch, units["mixed"])

    def _in_order(self, branch: Branch, part: str) -> Tensor:
        """Queries, keys or values in the projections' own order, for an attention that mixes up heads and positions."""
        used = torch.cat([self.flow.first_weights(self.flow.origins(head.all_places[part].unique())) for head in branch.heads])
        results = torch.cat([self.flow.results(number) for number in branch.ups])
        return results[torch.isin(self.flow.first_weights(results), used[used >= 0])]

    def _place_feed_forward(self, layer: int, branch: Branch) -> None:
        hidden = torch.cat([self.flow.results(number) for number in branch.ups])
        self._place("mlp.c_fc", layer, hidden, torch.arange(len(hidden)))
        self._place_down("mlp.c_proj", layer, branch, hidden)

    # Norms

    def _place_norms(self, end: Tensor) -> None:
        """A norm belongs to what it feeds; where norms stand behind the branches, to the branch before it."""
        last, _ = self.branches.norms(end)
        self.final_norm = self.flow.state_of(end) is State.NORMED
        feeds: list[tuple[str, int | None, list[Norm]]] = []  # the norm's part and layer, and the norms that are there
        for block in self.blocks:
            feeds += [] if block.attention is None else [("ln_1", block.layer, block.attention.norms)]
            feeds += [] if block.feed_forward is None else [("ln_2", block.layer, block.feed_forward.norms)]
        feeds.append(("ln_f", None, last))
        onto = [self.flow.onto.get(branch.downs[0]) for branch in self.feed_forwards[:1] if branch.downs]
        self.post_norm = not feeds[0][2] and any(norms for *_, norms in feeds) and onto == [State.NORMED]
        in_order = list({norm.at: norm for *_, norms in feeds for norm in reversed(norms)}.values())
        if self.post_norm:
            placed = [(part, layer, norm) for (part, layer, _), norm in zip(feeds, in_order, strict=False)]
        else:
            placed = [(part, layer, norms[0]) for part, layer, norms in feeds if norms]
        for part, layer, norm in placed:
            for kind, ids in (("weight", norm.scale), ("bias", norm.shift)):
                if ids is not None:
                    self.parts.append(Vector(f"{part}.{kind}", layer, ids, norm.places))
        nodes = {norm.at for *_, norm in placed}
        self.extra_norms = [norm for norm in in_order if norm.at not in nodes]


def _numbers(names: list[str]) -> list[tuple[int, ...]]:
    """The numbers in names: the first of each, the second of each, ..."""
    return list(zip(*([int(n) for n in re.findall(r"\d+", name)] for name in names), strict=True))
