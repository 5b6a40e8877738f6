"""Find the embeddings, attention and feed-forwards in a recorded forward pass, by what they compute.

Attention contracts activations with activations twice, for the scores and for the weighted values; this identifies the
projections around it. Of the others, one that reads another projection's results, not the stream, ends a feed-forward.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from gpt2.port.anatomy.flow import Effect, Flow, StreamState
from gpt2.port.recording.dataflow import NodeKind


class NotGPT2(Exception):
    """Raised when the module lacks a part that every GPT-2 has; the message says which."""


@dataclass(frozen=True)
class ModelPart:
    """A part of a GPT-2: parameters that are some rows and columns of one of the checkpoint's tensors.

    The parameter with the id ``row_ids[i] + column_ids[j]`` is the entry at row ``rows[i]`` and column ``columns[j]``; -1 means
    that the tensor has no such row or column. A vector is a single row. ``part`` is the tensor's name without layer and
    ".weight": "wte", "ln_1.bias"; "attn.q", "attn.k", "attn.v" for c_attn; "head" for the output head (tied or not).
    """

    part: str
    layer: int | None
    rows: Tensor  # (N,)
    row_ids: Tensor  # (N,)
    columns: Tensor  # (M,)
    column_ids: Tensor  # (M,)

    @property
    def ids(self) -> Tensor:
        """The ids (M,) of the parameters in the first row."""
        return self.row_ids[0] + self.column_ids


def vector(part: str, layer: int | None, ids: Tensor, places: Tensor) -> ModelPart:
    """Return a bias or a norm's scale or shift as a part: ``ids`` (M,) are the entries ``places`` of the tensor."""
    row = torch.zeros(1, dtype=torch.int64)
    return ModelPart(part, layer, row, row, places, ids)


class Stream:
    """The residual stream: its ``width``, the token embedding ``words``, and ``positions`` or None.

    ``biases``: a table of :class:`Flow` with the parameter added to each projection result. ``late_biases``: by projection, the
    parameters added to the stream right after it, and their coordinates. Coordinates are those of the token embedding.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow, self.recording = flow, flow.recording
        self.positions: ModelPart | None = None
        self.biases = flow.blank()
        self.late_biases: dict[int, tuple[Tensor, Tensor]] = {}
        self._coordinates = flow.blank()  # by origin
        self._read_tables()
        self._read_additions()

    @property
    def vocabulary(self) -> int:
        return len(self.words.rows)

    def coordinates(self, ids: Tensor) -> Tensor:
        """Return elements' stream coordinates, else -1; a projection of full width with no residual begins a new stream."""
        roots = self.flow.root(ids)
        if bool(((self.flow.at(self._coordinates, roots) < 0) & (roots >= 0)).any()):
            new = self.flow.results(self.flow.owner(roots))
            if len(new) == self.width:
                self.flow.put(self._coordinates, new, torch.arange(self.width))
        return self.flow.at(self._coordinates, roots)

    def _read_tables(self) -> None:
        """Find the tables that are indexed by token ids or by positions."""
        read: dict[str, dict[int, Tensor]] = {}  # by parameter and place: the entries read
        rows: dict[str, dict[int, int]] = {}  # and their rows
        lookups: dict[str, list[int]] = {}
        for number, node in enumerate(self.recording.nodes):
            if node.kind is NodeKind.LOOKUP and node.index is not None:
                entries = node.tensors[0]
                name = self.recording.name(int(entries.flatten()[0]))
                lookups.setdefault(name, []).append(number)
                read[name] = self.flow.by_place(number, entries) | read.get(name, {})
                rows[name] = {p: int(x[0]) for p, x in self.flow.by_place(number, node.index).items()} | rows.get(name, {})
        tokens = dict(enumerate(self.recording.ids.flatten().tolist()))
        words = [name for name, by_place in rows.items() if by_place == tokens]
        if not words:
            if rows:
                raise NotGPT2(f"its forward looks up {next(iter(rows))} by other numbers than the ids, as behind F.pad or + 1")
            raise NotGPT2("nothing in its forward looks up a table of parameters by the token ids")
        name = max(words, key=lambda name: len(read[name][self.flow.here]))
        self.width = len(read[name][self.flow.here])
        self._starts = set(lookups[name])
        self._start = next(results for number in lookups[name] if len(results := self.flow.results(number)))
        self.flow.put(self._coordinates, self.flow.root(self._start), torch.arange(self.width))
        if (table := self._table("wte", read[name], rows[name])) is None:
            raise NotGPT2(f"its token embedding ({name}) is not a table with a row for each token")
        self.words = table
        for name in [name for name in rows if name not in words]:
            if self.positions is None and len(set(rows[name].values())) == self.recording.ids.size(1):
                self.positions = self._table("wpe", read[name], rows[name])

    def _table(self, part: str, read: dict[int, Tensor], rows: dict[int, int]) -> ModelPart | None:
        """Return the table that rows ``read`` (D,) form, by place, or None: ids in a table rise evenly with the row."""
        places = self.coordinates(self._start)
        low, high = min(rows, key=lambda place: rows[place]), max(rows, key=lambda place: rows[place])
        alone = self.recording.source(int(read[low].amin())).region.shape == (1, self.width)  # a table of one row
        if any(len(x) != self.width or bool((x < 0).any()) for x in read.values()) or len(set(rows.values())) < 2 - alone:
            return None
        stride = int((read[high][0] - read[low][0]) // max(rows[high] - rows[low], 1))
        first = read[low] - rows[low] * stride
        if not all(torch.equal(first + row * stride, read[place]) for place, row in rows.items()):
            return None
        region = self.recording.source(int(read[low][0])).region
        axes = [axis for axis, n in enumerate(region.shape) if n > 1 and region.strides[axis] == stride]
        size = region.shape[axes[0]] if axes else rows[high] + 1
        before = int(first.min() - region.start) // stride % size if axes else 0  # rows of the parameter before the table's first
        number = torch.arange(size - before)
        ids = torch.empty_like(first).index_copy_(0, places, first)
        return ModelPart(part, None, number, number * stride, torch.arange(self.width), ids)

    def _read_additions(self) -> None:
        """Find biases, and positions that are added without a lookup: these differ from place to place."""
        length = self.recording.ids.size(1)
        window = range(self.flow.here + 1 - length, self.flow.here + 1)  # the last sequence of the probe
        added: dict[str, dict[int, Tensor]] = {}  # by parameter and place: ids added to the embeddings
        for number, touch in [(number, touch) for number, touches in self.flow.touches.items() for touch in touches]:
            if touch.effect is not Effect.ADD:
                continue
            node, results = self.recording.nodes[number], self.flow.results(number)
            if not len(results):  # not the last token's
                if not (placed := self.flow.by_place(number, torch.arange(node.start, node.stop))):
                    name = self.recording.name(int(touch.ids.amax()))
                    raise NotGPT2(f"its forward adds {name} to what is of no known token, as a product with a constant matrix is")
                results = next(iter(placed.values()))
            ids = touch.ids.flatten()[results - node.start]
            if len(ids) == self.width and self.flow.owner(self.flow.root(results)) in self._starts:
                name = self.recording.name(int(ids[0]))
                added[name] = self.flow.by_place(number, touch.ids) | added.get(name, {})
            origins = self.flow.origins(results)
            if touch.before is StreamState.PROJECTED and self.flow.is_projection(self.flow.owner(origins)):
                free = self.flow.at(self.biases, origins) < 0
                self.flow.put(self.biases, origins[free], ids[free])
            elif touch.before is StreamState.SUMMED and self.flow.newest[number] not in self.late_biases:
                self.late_biases[self.flow.newest[number]] = ids, self.coordinates(results)  # x + attention + bias
        for read in added.values():
            if self.positions is not None or any(p not in read for p in window):
                continue
            if length == 1 or not torch.equal(read[window[0]], read[window[-1]]):
                rows = {place: place - window[0] for place in window}
                self.positions = self._table("wpe", {place: read[place] for place in window}, rows)


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
    weight: int  # the id of its first weight; identifies a branch that runs twice
    norms: list[Affine]  # between the stream and the branch, nearest first
    normed: bool
    base: int = -1  # an element of the stream that it reads
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
        self._read: dict[tuple[str | int, ...], Branch] = {}  # by part and the ids that it reads
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
        if (key := (part, *ids.tolist())) in self._read:  # another head of an attention
            return self._read[key]
        norms, base = self.norms(ids)
        new = Branch(part, int(self.flow.first_weights(result[None])), norms, self.flow.state_of(ids) is StreamState.NORMED, base)
        return self._read.setdefault(key, branches.setdefault(base, new))

    def _remove_adapters(self) -> set[int]:
        """Remove low-rank adapters from the projections and return the ids of their first weights."""
        numbers: set[int] = set()
        for down, origins in self._inputs.items():
            for up in {*self.recording.owners(origins)} & set(self._inputs):
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
            scored, value = self.flow.origins(scores[node.place(mixed)]), values[node.place(mixed)]  # (n, S)
            is_here = self.flow.at(self.flow.place, value) == self.flow.here
            if not bool(is_here.any()):
                continue  # the last token is not mixed here
            own, alone = is_here.int().argmax(-1, keepdim=True), bool((is_here.sum(-1) == 1).all())
            scored, value = scored.gather(-1, own)[:, 0], value.gather(-1, own)[:, 0]
            for score in dict.fromkeys(scored.tolist()):
                product, mine = self.flow.nodes[self.recording.owner(score)], scored == score
                a, b = product.tensors
                factors = (a, b) if (self.flow.votes[number] or all_votes) >= 0 else (b, a)
                q, k = (self._each_of_pairs(factor[product.place(score)]) for factor in factors)
                if self.flow.is_projection(self.flow.owner(q)):
                    v = self._each_of_pairs(value[mine])
                    yield AttentionHead(q, k, v, mixed[mine], dict(zip("qkv", (*factors, values), strict=True)), alone)

    def _each_of_pairs(self, ids: Tensor) -> Tensor:
        """Return the origins of queries, keys or values ``ids`` (K,), each once, although rotary positions mix them in pairs.

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
        return dict(zip(self.flow.joined[joined].tolist(), (joined + self.recording.tokens - 1).tolist(), strict=True))

    def _attentions(self) -> list[Branch]:
        branches: dict[int, Branch] = {}
        by_result: dict[int, Branch] = {}
        for head in self._heads():
            branch = self._branch(branches, "attn", head.q[0])
            branch.heads.append(head)
            owners = self.recording.owners(torch.cat((head.q, head.k, head.v)))
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
            state = self.flow.state_of(self.flow.inputs(self.flow.results(down)[0]))
            if state in (StreamState.SUMMED, StreamState.NORMED):
                continue  # it starts from the stream
            for up in sorted({*self.recording.owners(self._inputs[down])} & set(rest)):
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
