"""The parts of a GPT-2 in a recorded forward pass, and where they lie among the module's parameters.

All is read at one place of the probe, the last token, so that an element's id stands for a unit of the network. Heads, units of a
head and hidden units are numbered as they come: GPT-2 does not change when they change places together. Layers are numbered as
they run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import zip_longest

import torch
from torch import Tensor

from gpt2.port.anatomy.branches import Branch, Branches, Norm
from gpt2.port.anatomy.flow import NORMED, Flow
from gpt2.port.anatomy.parts import Matrix, Part, Vector
from gpt2.port.anatomy.stream import NotGPT2, Stream
from gpt2.port.recording.dataflow import Recording

Role = tuple[str, int | None]  # of a norm: "ln_1", "ln_2" or "ln_f", and the layer


class Anatomy:
    """Everything that was found. ``parts`` say where; the rest, what the module is like.

    ``width``, ``words`` and ``positions`` as in :class:`Stream`, ``attentions``, ``feed_forwards`` and ``adapters`` as in
    :class:`Branches`; ``layers``, the numbers of the blocks; ``head``, the elements that are the logits, None where the forward
    ends in the stream, and ``end_normed``, whether a norm comes before; ``post_norm``, whether norms stand behind the branches;
    ``extra_norms``, which GPT-2 does not have; ``torn`` layers, that confuse heads with positions.

    Raises:
        NotGPT2: no token embedding, or no attention.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.flow = recording, Flow(recording)
        self.stream = Stream(self.flow)
        self.branches = Branches(self.flow, self.stream)
        self.width, self.words, self.positions = self.stream.width, self.stream.words, self.stream.positions
        self.attentions, self.feed_forwards = self.branches.attentions, self.branches.feed_forwards
        self.adapters = self.branches.adapters
        self.torn: set[int] = set()
        self.parts: list[Part] = [*self.words, *([] if self.positions is None else [self.positions])]
        self.layers = self._layers()
        end = recording.output[self.flow.at(self.flow.place, recording.output) == self.flow.here]
        if not len(end):
            raise NotGPT2("its output is not made of the last token")
        self.head = self.flow.origins(end) if self.flow.is_projection(self.flow.owner(self.flow.origins(end))) else None
        for layer, attention, feed_forward in zip_longest(self.layers, self.attentions, self.feed_forwards):
            if attention is not None:
                self._place_attention(layer, attention)
            if feed_forward is not None:
                self._place_feed_forward(layer, feed_forward)
        if self.head is not None:
            self._place("head", None, self.head, torch.arange(len(self.head)))
        self._place_norms(end if self.head is None else self.flow.inputs(self.head[0]))

    def _layers(self) -> list[int]:
        """As they run; but where parameters lie unused and names are numbered, the numbers tell which blocks are left out."""
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
        """A projection and its bias. ``rows`` numbers the inputs; if it is None, they are the stream's coordinates."""
        owners = self.recording.owners(results)
        for number in owners.unique().tolist():
            if not self.flow.is_projection(number):
                continue
            node, mine = self.flow.nodes[number], owners == number
            inputs = self.flow.inputs(results[mine][0])
            self.parts.append(Matrix(part, layer, node, results[mine], (rows or self.stream.coordinates)(inputs), columns[mine]))
            for constant in (self.flow.origins(inputs) < 0).nonzero()[:1, 0]:  # a column of ones: its weights are the bias
                weights = node.operands[node.weight][node.place(results[mine])]
                self.parts.append(Vector(f"{part}.bias", layer, weights[:, constant], columns[mine]))
        biases = self.flow.at(self.stream.biases, results)
        if bool((biases >= 0).any()):
            self.parts.append(Vector(f"{part}.bias", layer, biases[biases >= 0], columns[biases >= 0]))

    def _place_back(self, part: str, layer: int, branch: Branch, units: Tensor) -> None:
        """Projections back to the stream, from ``units``; in their own order where the inputs are others, of other places."""
        table = self.flow.put(self.flow.blank(), units, torch.arange(len(units)))

        def rows(inputs: Tensor) -> Tensor:
            origins = self.flow.origins(inputs)
            found = self.flow.at(table, origins)
            return found if bool(((found >= 0) | (origins < 0)).all()) else torch.arange(len(inputs))

        for number in branch.downs:
            results = self.flow.results(number)
            self._place(part, layer, results, self.stream.coordinates(results), rows)
            if number in self.stream.late:
                late = self.stream.late[number]
                self.parts.append(Vector(f"{part}.bias", layer, late.ids, late.places))

    def _place_attention(self, layer: int, branch: Branch) -> None:
        found = {part: torch.cat([getattr(head, part) for head in branch.heads]) for part in ("q", "k", "v", "mixed")}
        straight = all(len(x.unique()) == len(x) == len(found["q"]) for x in found.values())
        if not straight or any(number in self.flow.torn for number in branch.downs):
            self.torn.add(layer)
        for part in "qkv":
            results = found[part] if straight else self._in_order(branch, part)
            self._place(f"attn.{part}", layer, results, torch.arange(len(results)))
        self._place_back("attn.c_proj", layer, branch, found["mixed"])

    def _in_order(self, branch: Branch, part: str) -> Tensor:
        """What serves as queries (or keys, or values) at any place, in the projections' own order: where heads got mixed up."""
        used = torch.cat([self.flow.weights(self.flow.origins(head.everywhere[part].unique())) for head in branch.heads])
        results = torch.cat([self.flow.results(number) for number in branch.ups])
        return results[torch.isin(self.flow.weights(results), used[used >= 0])]

    def _place_feed_forward(self, layer: int, branch: Branch) -> None:
        hidden = torch.cat([self.flow.results(number) for number in branch.ups])
        self._place("mlp.c_fc", layer, hidden, torch.arange(len(hidden)))
        self._place_back("mlp.c_proj", layer, branch, hidden)

    # Norms

    def _place_norms(self, end: Tensor) -> None:
        """A norm belongs to whom it feeds; where norms stand behind the branches, to the branch that comes before."""
        last, _ = self.branches.norms(end)
        self.end_normed = self.flow.state_of(end) == NORMED
        feeds: list[tuple[Role, list[Norm]]] = []
        for layer, attention, feed_forward in zip_longest(self.layers, self.attentions, self.feed_forwards):
            feeds += [] if attention is None else [(("ln_1", layer), attention.norms)]
            feeds += [] if feed_forward is None else [(("ln_2", layer), feed_forward.norms)]
        feeds.append((("ln_f", None), last))
        onto = [self.flow.onto.get(branch.downs[0]) for branch in self.feed_forwards[:1] if branch.downs]
        self.post_norm = not feeds[0][1] and any(norms for _, norms in feeds) and onto == [NORMED]
        in_order = list({norm.at: norm for _, norms in feeds for norm in reversed(norms)}.values())
        if self.post_norm:
            roles = [(role, norm) for (role, _), norm in zip(feeds, in_order, strict=False)]
        else:
            roles = [(role, norms[0]) for role, norms in feeds if norms]
        for (name, layer), norm in roles:
            for kind, ids in (("weight", norm.scale), ("bias", norm.shift)):
                if ids is not None:
                    self.parts.append(Vector(f"{name}.{kind}", layer, ids, norm.places))
        placed = {norm.at for _, norm in roles}
        self.extra_norms = [norm for norm in in_order if norm.at not in placed]


def _numbers(names: list[str]) -> list[tuple[int, ...]]:
    """The numbers in names, the first of all, the second of all, ..."""
    return list(zip(*([int(n) for n in re.findall(r"\d+", name)] for name in names), strict=True))
