"""Find the parts of a GPT-2 in a recorded forward pass, and their positions among the module's parameters.

Parts are read for the last token of the probe, so that an element's id identifies a unit. Heads and units are numbered as found:
GPT-2 computes the same when they are permuted consistently.
"""

import itertools
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gpt2.port.anatomy.flow import Flow, StreamState
from gpt2.port.anatomy.stream import Affine, Branch, Branches, ModelPart, NotGPT2, Stream, vector
from gpt2.port.recording.dataflow import Node, Recording, Region


class Anatomy:
    """The structure of a recorded module; ``parts`` hold the ids of GPT-2's parts. Raises NotGPT2.

    ``layers``: the blocks' numbers in the checkpoint. ``parallel``: those whose branches read the same stream. ``head``: ids of
    the logits, None if the forward returns hidden states. ``post_norm``: norms come after the branches. ``extra_norms``: norms
    that GPT-2 does not have. ``mixed_layers``: layers where attention mixes heads and positions. ``shared_heads``: by layer, of
    how many heads the queries ("q"), keys ("k") or values ("v") are, where several heads share them. For the others, see
    :class:`Stream` and :class:`Branches`.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.flow = recording, Flow(recording)
        for number, name in recording.made_weights():
            beside = self.flow.owner(self.flow.at(self.flow.joined, self.flow.results(number)[:1]))
            if not self.flow.is_projection(beside):  # else it is added to a projection's result, as an adapter's is
                raise NotGPT2(f"its forward computes the weights of a projection, from {name} and perhaps others")
        self.stream = Stream(self.flow)
        self.width, self.positions = self.stream.width, self.stream.positions
        reader = Branches(self.flow, self.stream)
        self.attentions, self.feed_forwards, self.adapters = reader.attentions, reader.feed_forwards, reader.adapters
        self.branches: list[Branch] = []
        self.mixed_layers: set[int] = set()
        self.shared_heads: dict[int, dict[str, int]] = {}
        self.parts: list[ModelPart] = [self.stream.words, *([] if self.positions is None else [self.positions])]
        for branches, layers in zip((self.attentions, self.feed_forwards), self._layers(), strict=True):
            for branch, layer in zip(branches, layers, strict=False):
                branch.layer = layer
                self.branches.append(branch)
        self.branches.sort(key=lambda branch: (branch.layer, branch.part))
        self.layers = sorted({branch.layer for branch in self.branches})
        self.parallel = {
            one.layer for one, other in itertools.pairwise(self.branches) if (one.layer, one.base) == (other.layer, other.base)
        }
        end = recording.output[self.flow.at(self.flow.place, recording.output) == self.flow.here]
        if not len(end):
            raise NotGPT2("its output is not made of the last token")
        self.head = self.flow.origins(end) if self.flow.is_projection(self.flow.owner(self.flow.origins(end))) else None
        for branch in self.branches:
            if branch.part == "attn":
                self._place_attention(branch)
            else:
                hidden = torch.cat([self.flow.results(number) for number in branch.ups])
                self._place("mlp.c_fc", branch.layer, hidden, torch.arange(len(hidden)))
                self._place_down(branch, hidden)
        if self.head is not None:
            self._place("head", None, self.head, torch.arange(len(self.head)))
        end = end if self.head is None else self.flow.inputs(self.head[0])
        self.final_norm = self.flow.state_of(end) is StreamState.NORMED
        self._place_norms(reader.norms(end)[0])

    def _layers(self) -> tuple[list[int], list[int]]:
        """Number the attentions and the feed-forwards as they run, or by the parameters' names, if some are unused or absent."""
        names = [[self.recording.name(one.weight) for one in some] for some in (self.attentions, self.feed_forwards)]
        patterns = {re.sub(r"\d+", "#", name) for some in names for name in some}
        unused = [source.name for source in self.recording.sources if source.storage not in self.recording.uses]
        names.append([name for name in unused if re.sub(r"\d+", "#", name) in patterns])
        numbers = [[[int(number) for number in re.findall(r"\d+", name)] for name in some] for some in names]
        for at in range(min(len(each) for some in numbers for each in some)):
            runs, others, idle = ([each[at] for each in some] for some in numbers)
            every, first = {*runs, *others, *idle}, min(runs + others + idle)
            rising = all(some == sorted(set(some)) for some in (runs, others))
            if rising and len(every) == max(every) + 1 - first and (not others or {*runs} & {*others}):  # a block has one number
                return [number - first for number in runs], [number - first for number in others]
        order = list(range(max(len(self.attentions), len(self.feed_forwards))))
        return order, order

    def _place(
        self, part: str, layer: int | None, results: Tensor, outputs: Tensor, number: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Add a projection and its bias to the parts. ``number`` numbers the inputs; default: the stream's coordinates."""
        for node, mine in self.flow.projections(results):
            columns = outputs[mine]
            inputs = (number or self.stream.coordinates)(self.flow.inputs(results[mine][0]))
            for some, first, along in _outer_sums(node, results[mine]):
                if part == "head":
                    self.parts.append(ModelPart(part, layer, columns[some], first, inputs, along))
                else:
                    self.parts.append(ModelPart(part, layer, inputs, along, columns[some], first))
        biases = self.flow.at(self.stream.biases, results)
        if bool((biases >= 0).any()):
            self.parts.append(vector(f"{part}.bias", layer, biases[biases >= 0], outputs[biases >= 0]))

    def _place_down(self, branch: Branch, units: Tensor) -> None:
        """Add the projections back to the stream; number inputs as in ``units``, or in their own order if not found there."""
        table = self.flow.put(self.flow.blank(), units, torch.arange(len(units)))

        def number_inputs(ids: Tensor) -> Tensor:
            origins = self.flow.origins(ids)
            numbers = self.flow.at(table, origins)
            return numbers if bool(((numbers >= 0) | (origins < 0)).all()) else torch.arange(len(ids))

        for number in branch.downs:
            results = self.flow.results(number)
            self._place(f"{branch.part}.c_proj", branch.layer, results, self.stream.coordinates(results), number_inputs)
            if number in self.stream.late_biases:
                self.parts.append(vector(f"{branch.part}.c_proj.bias", branch.layer, *self.stream.late_biases[number]))

    def _place_attention(self, branch: Branch) -> None:
        units = {part: torch.cat([getattr(head, part) for head in branch.heads]) for part in ("q", "k", "v", "mixed")}
        whole = [units["q"], units["mixed"], *(getattr(head, part) for head in branch.heads for part in "kv")]
        one_to_one = all(len(x) == len(units["q"]) for x in units.values()) and all(len(x.unique()) == len(x) for x in whole)
        counts = {part: self._different(units[part], [len(getattr(head, part)) for head in branch.heads]) for part in "qkv"}
        fewer = {part: count for part, count in counts.items() if count < len(branch.heads)}
        one_to_one &= not fewer or all(head.alone for head in branch.heads)
        if one_to_one and fewer:
            self.shared_heads[branch.layer] = fewer
        if not one_to_one or any(number in self.flow.mixes_places for number in branch.downs):
            self.mixed_layers.add(branch.layer)
        for part in "qkv":
            results = units[part] if one_to_one else self._in_order(branch, part)
            self._place(f"attn.{part}", branch.layer, results, torch.arange(len(results)))
        self._place_down(branch, units["mixed"])

    def _different(self, results: Tensor, lengths: list[int]) -> int:
        """Return how many heads' results differ, by the first weight of each; by its id, if no projection made it."""
        first = self.flow.first_weights(results)
        return len({tuple(head.tolist()) for head in torch.where(first < 0, results, first).split(lengths)})

    def _in_order(self, branch: Branch, part: str) -> Tensor:
        """Return queries, keys or values in the projections' own order, for an attention that mixes heads and positions."""
        used = torch.cat([self.flow.first_weights(self.flow.origins(head.all_places[part].unique())) for head in branch.heads])
        results = torch.cat([self.flow.results(number) for number in branch.ups])
        return results[torch.isin(self.flow.first_weights(results), used[used >= 0])]

    def _place_norms(self, last: list[Affine]) -> None:
        """Add the norms: a norm belongs to the branch it feeds, in a post-norm model to the branch before it."""
        feeds: list[tuple[str, int | None, list[Affine]]] = [(one.norm, one.layer, one.norms) for one in self.branches]
        feeds.append(("ln_f", None, last))
        onto = [self.flow.onto.get(branch.downs[0]) for branch in self.feed_forwards[:1] if branch.downs]
        self.post_norm = not feeds[0][2] and any(norms for *_, norms in feeds) and onto == [StreamState.NORMED]
        in_order = list({norm.at: norm for *_, norms in feeds for norm in reversed(norms)}.values())
        if self.post_norm:
            placed = [(part, layer, norm) for (part, layer, _), norm in zip(feeds, in_order, strict=False)]
        else:
            placed = [(part, layer, norms[0]) for part, layer, norms in feeds if norms]
        self.final_norm &= not self.post_norm or any(part == "ln_f" for part, *_ in placed)
        for part, layer, norm in placed:
            for kind, ids in (("weight", norm.scale), ("bias", norm.shift)):
                if ids is not None:
                    self.parts.append(vector(f"{part}.{kind}", layer, ids, norm.places))
        self.extra_norms = [norm for norm in in_order if norm.at not in {norm.at for *_, norm in placed}]


def _outer_sums(node: Node, results: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the ids of the parameters (N, K) behind results (N,), as slices with sums of ids (n, 1) and (K,)."""
    place, weights = node.place(results), node.weights
    first = weights[(*place, torch.tensor(0))]
    if isinstance(weights, Region):
        yield slice(None), first, torch.arange(weights.shape[-1]) * weights.strides[-1]
        return
    along = weights[place] - first[:, None]
    alike = bool((along == along[0]).all())
    for some in [slice(None)] if alike else [slice(n, n + 1) for n in range(len(results))]:
        yield some, first[some], along[some][0]
