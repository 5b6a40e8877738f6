"""The parts of a GPT-2, found in a recorded forward pass by what they do.

- The stream starts where the token ids choose rows of a table. Whatever is added to it has its coordinates.
- A contraction of activations with activations is attention. The second of them mixes the values by what comes from the first;
  the factor of the first that is indexed as the values are is the keys, the other the queries.
- Projections that end in queries, keys and values, that start from what was mixed, or that end in the output are thereby known.
  Those that remain come in pairs, one fed by the other: the feed-forwards.
- A parameter added to a fresh product is its bias. One that multiplies, or is added to, normalised numbers belongs to a norm,
  and the norm to the projections that it feeds. One that is added to the stream and differs from place to place is the position
  embedding.

All is read at one place of the probe, the last token, so that an element's id stands for a unit of the network. Heads, units of
a head and hidden units are numbered as they come: GPT-2 does not change when they change places together. Layers are numbered as
they run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .dataflow import Kind, Node, Recording
from .flow import Flow
from .parts import Matrix, Part, Table, Vector


class NotGPT2(Exception):
    """What every GPT-2 has and this module has not."""


@dataclass(frozen=True)
class Head:
    """One attention head: the projection results that are its queries, keys and values, and what it mixes; (K,) each."""

    q: Tensor
    k: Tensor
    v: Tensor
    mixed: Tensor
    everywhere: dict[str, Tensor] = field(default_factory=dict, repr=False)  # q, k and v of all places, as they went in


@dataclass(frozen=True)
class Norm:
    """Scale and shift (D,) for the stream coordinates ``places``; None where the module has none."""

    scale: Tensor | None
    shift: Tensor | None
    places: Tensor
    at: int  # the first node of it


@dataclass
class Branch:
    """An attention or a feed-forward. ``ups`` are the projections that start from the stream, ``downs`` those back to it."""

    base: int  # the element of the stream that it starts from
    signature: int  # its first weight: what runs twice has it twice
    norms: list[Norm]  # on the way from the stream, the nearest first
    normed: bool
    ups: list[int] = field(default_factory=list)
    downs: list[int] = field(default_factory=list)
    heads: list[Head] = field(default_factory=list)
    times: int = 1


class Anatomy:
    """Everything that was found. ``parts`` say where it lies; the rest what the module is like.

    ``width``, ``positions`` (None: none learned), ``attentions``, ``feed_forwards``; ``layers`` the number of each block;
    ``head`` the logits' elements at the probed place, None where the forward ends in the stream; ``post_norm``: norms come after
    the branches; ``extra_norms`` that GPT-2 does not have; ``torn`` layers that confuse heads with positions.

    Raises:
        NotGPT2: no token embedding or no attention in it.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording, self.nodes, self.flow = recording, recording.nodes, Flow(recording)
        self.here = recording.ids.numel() - 1
        self.parts: list[Part] = []
        self.torn: set[int] = set()
        self.positions: Table | None = None
        self._units = self._blank()  # origin -> stream coordinate
        self._biases = self._blank()  # projection result -> parameter
        self._late: dict[int, Vector] = {}  # projection -> what was added to the stream after it
        self._read_stream()
        self._read_additions()
        self.attentions = self._once(self._find_attentions())
        self.feed_forwards = self._once(self._find_feed_forwards())
        self.head = self._find_head()
        self.layers = self._number_layers()
        for place, layer in enumerate(self.layers):
            if place < len(self.attentions):
                self._place_attention(layer, self.attentions[place])
            if place < len(self.feed_forwards):
                self._place_feed_forward(layer, self.feed_forwards[place])
        if self.head is not None:
            self._place("head", None, self.head, torch.arange(len(self.head)))
        self._place_norms()

    # Elements

    def _blank(self) -> Tensor:
        return torch.full((self.recording.stop - self.recording.tokens,), -1)

    def _results(self, number: int) -> Tensor:
        """What a node computed at the probed place."""
        return self.flow.here(self.nodes[number], self.here)

    def _input(self, result: Tensor) -> Tensor:
        """The activations (K,) that a projection's result was made of."""
        node = self.nodes[self.recording.owner(result)]
        return node.operands[1 - node.weight][node.place(torch.as_tensor(int(result)))]

    def _signatures(self, results: Tensor) -> Tensor:
        """For projection results, the first weight of each: the same for the same unit at all places."""
        found, owners = torch.full_like(results, -1), self.recording.owners(results)
        for number in owners.unique().tolist():
            if self._is_projection(number):
                node, mine = self.nodes[number], owners == number
                found[mine] = node.operands[node.weight][node.place(results[mine])][:, 0]
        return found

    def _origins(self, ids: Tensor) -> Tensor:
        return self.flow.at(self.flow.origin, ids)

    def _is_projection(self, number: int) -> bool:
        return number >= 0 and self.nodes[number].kind is Kind.CONTRACTION and self.nodes[number].weight is not None

    def _number(self, table: Tensor, origins: Tensor) -> Tensor:
        table[origins - self.recording.tokens] = torch.arange(len(origins))
        return table

    def _coordinates(self, ids: Tensor) -> Tensor:
        """Stream coordinates. A projection of the stream's width that was never added to it (a residual left out) starts anew."""
        roots = self.flow.root(ids)
        if bool(((self.flow.at(self._units, roots) < 0) & (roots >= 0)).any()):
            fresh = self._results(self.flow.owner(roots))
            if len(fresh) == self.width:
                self._number(self._units, fresh)
        return self.flow.at(self._units, roots)

    # The stream, and what is added

    def _read_stream(self) -> None:
        tokens, lookups = self.recording.ids.flatten(), [n for n, node in enumerate(self.nodes) if node.kind is Kind.LOOKUP]
        tables: dict[str, list[int]] = {}
        for number in lookups:
            tables.setdefault(self.name(int(self.nodes[number].operands[0].flatten()[0])), []).append(number)
        read = {name: self._read({n: self.nodes[n].operands[0] for n in numbers}) for name, numbers in tables.items()}
        rows = {name: self._read({n: self.nodes[n].index for n in numbers}) for name, numbers in tables.items()}
        begins = {
            name: _begin(torch.stack([rows[name][place][0] for place in range(len(tokens))]), tokens)
            for name in tables
            if len(rows[name]) == len(tokens)
        }
        words = {name: begin for name, begin in begins.items() if begin is not None}
        self.width = max((len(read[name][self.here]) for name in words), default=0)
        words = {name: begin for name, begin in words.items() if len(read[name][self.here]) == self.width}
        if not self.width:
            raise NotGPT2("nothing in its forward looks up a table of parameters by the token ids")
        self._words = {number for name in words for number in tables[name]}
        start = torch.cat([results for n in sorted(self._words) if len(results := self._results(n))])[: self.width]
        self._number(self._units, self.flow.root(start))
        self.words: list[Table] = []
        for name, begin in words.items():
            table = self._table("wte", read[name], {place: int(x[0]) for place, x in rows[name].items()}, start)
            if table is None:
                raise NotGPT2(f"its token embedding ({name}) is no table with a row per token")
            unread = max(0, -begin)  # rows before the first token's
            table = replace(table, first=table.first + unread * table.stride, rows=table.rows - unread, begin=max(0, begin))
            self.words.append(table)
        self.parts += self.words
        for name in tables.keys() - words.keys():  # positions that follow from the tokens, by counting them, say
            if len({int(x[0]) for x in rows[name].values()}) == self.recording.ids.size(1):
                self._set_positions(self._table("wpe", read[name], {place: int(x[0]) for place, x in rows[name].items()}, start))

    @property
    def vocabulary(self) -> int:
        """How many tokens have an embedding."""
        return max(table.begin + table.rows for table in self.words)

    def _read(self, numbers: dict[int, Tensor]) -> dict[int, Tensor]:
        """What nodes have at each place of the probe: one of their operands, or what else has their shape."""
        found: dict[int, Tensor] = {}
        for number, values in numbers.items():
            node = self.nodes[number]
            for place, results in self.flow.by_place(node).items():
                found.setdefault(place, values.flatten()[results - node.start])
        return found

    def _set_positions(self, table: Table | None) -> None:
        if self.positions is None and table is not None:
            self.positions = table
            self.parts.append(table)

    def _table(self, part: str, read: dict[int, Tensor], rows: dict[int, int], results: Tensor) -> Table | None:
        """The table of which parameters were ``read`` (D,) in ``rows``, place by place, for ``results`` at the probed one.

        A table is linear in the row; how far it reaches, the axis of the source says that has the same stride.
        """
        places = self._coordinates(results)
        if any(len(x) != self.width or bool((x < 0).any()) for x in read.values()) or len(set(rows.values())) < 2:
            return None
        one = min(rows, key=rows.get)
        other = max(rows, key=rows.get)
        stride = int((read[other][0] - read[one][0]) // (rows[other] - rows[one]))
        first = read[one] - rows[one] * stride
        if len(places.unique()) != self.width or bool((places < 0).any()):
            return None
        if not all(torch.equal(first + row * stride, read[place]) for place, row in rows.items()):
            return None
        regions = [source.region for source in self.recording.sources]
        region = next(r for r in regions if r.start <= int(read[one].min()) and int(read[other].max()) <= r.last)
        axes = [axis for axis, n in enumerate(region.shape) if n > 1 and region.strides[axis] == stride]
        size = region.shape[axes[0]] if axes else rows[other] + 1
        skipped = int(first.min() - region.start) // stride % size if axes else 0
        return Table(part, torch.empty_like(first).index_copy_(0, places, first), stride, size - skipped, skipped)

    def _read_additions(self) -> None:
        length = self.recording.ids.size(1)
        window = range(self.here + 1 - length, self.here + 1)
        to_stream: dict[str, dict[int, Tensor]] = {}  # what each source adds to the stream, in one node after the other
        for number, touches in self.flow.touches.items():
            node, results = self.nodes[number], self._results(number)
            if not len(results):
                results = next(iter(self.flow.by_place(node).values()), results)
            for touch in touches:
                if touch.kind != "add" or not len(results):
                    continue
                ids, origins = touch.ids.flatten()[results - node.start], self._origins(results)
                source = self.name(int(ids[0]))
                if len(results) == self.width and self.flow.owner(self.flow.root(results)) in self._words:
                    seen = to_stream.setdefault(source, {})
                    seen |= {place: x for place, x in self._read({number: touch.ids}).items() if place not in seen}
                if touch.before == "plain" and self._is_projection(self.flow.owner(origins)):
                    free = self.flow.at(self._biases, origins) < 0
                    self._biases[origins[free] - self.recording.tokens] = ids[free]
                elif touch.before == "summed" and (after := self.flow.newest.get(number, -1)) not in self._late:
                    self._late[after] = Vector("", None, ids, self._coordinates(results))
        start = next(results for n in sorted(self._words) if len(results := self._results(n)))
        for read in to_stream.values():
            if all(place in read for place in window) and not torch.equal(read[window[0]], read[window[-1]]):
                self._set_positions(self._table("wpe", {p: read[p] for p in window}, {p: p - window[0] for p in window}, start))

    # Branches

    def _norms(self, ids: Tensor) -> tuple[list[Norm], int]:
        """Back from a projection's input to the stream: the norms on the way, nearest first, and an element of the stream."""
        found: list[dict] = []
        ids = ids[ids >= self.recording.tokens]
        places = self._coordinates(ids)
        while self.flow.state.get(number := self.flow.owner(ids)) == "normed":
            node = self.nodes[number]
            where = node.place(ids)
            for touch in self.flow.touches.get(number, []):
                name = {"add": "shift", "mul": "scale"}.get(touch.kind)
                if name is None or (name == "shift" and touch.before != "normed"):
                    continue
                parameters = touch.ids[where]
                if found and torch.equal(found[-1].get(name, ids[:0]), parameters):
                    continue
                if not found or name in found[-1] or name == "shift":  # a shift comes last, so it is met first
                    found.append({})
                found[-1] |= {name: parameters, "at": number}
            mains = (operand[where] for operand in node.operands)
            ids = next(main for main in mains if bool((self._origins(main) >= 0).all()))
        return [Norm(norm.get("scale"), norm.get("shift"), places, norm["at"]) for norm in found], int(ids[0])

    def _branch(self, found: dict[int, Branch], result: Tensor) -> Branch:
        """The branch among ``found`` that starts where the projection of ``result`` does; a new one, if there is none."""
        ids = self._input(result)
        norms, base = self._norms(ids)
        normed = self.flow.state.get(self.flow.owner(ids)) == "normed"
        return found.setdefault(base, Branch(base, int(self._signatures(result[None])), norms, normed))

    def _heads(self) -> Iterator[Head]:
        second_by_all = sum(self.flow.votes.values()) >= 0
        for number, (scores, values) in self.flow.mixes.items():
            mixed, vote = self._results(number), self.flow.votes[number]
            second_is_key = vote > 0 if vote else second_by_all
            place = self.nodes[number].place(mixed)
            score, value = self._origins(scores[place]), self._origins(values[place])  # (n, S)
            itself = self.flow.at(self.flow.row, values[place]) == self.here
            if not bool(itself.any()):  # a mix of other tokens only
                continue
            itself = itself.int().argmax(-1, keepdim=True)
            score, value = score.gather(-1, itself)[:, 0], value.gather(-1, itself)[:, 0]
            mixed = self.flow.root(mixed)
            for element in dict.fromkeys(score.tolist()):
                node = self.nodes[self.recording.owner(element)]
                factors = node.operands if second_is_key else node.operands[::-1]
                q, k = (self._origins(factor[node.place(torch.tensor(element))]) for factor in factors)
                if self._is_projection(self.flow.owner(q)):
                    everywhere = dict(zip("qkv", (*factors, values), strict=True))
                    yield Head(q, k, value[score == element], mixed[score == element], everywhere)

    def _find_attentions(self) -> list[Branch]:
        found: dict[int, Branch] = {}
        for head in self._heads():
            branch = self._branch(found, head.q[0])
            branch.heads.append(head)
            used = self.recording.owners(torch.cat((head.q, head.k, head.v))).unique().tolist()
            branch.ups += [number for number in used if self._is_projection(number) and number not in branch.ups]
        if not found:
            raise NotGPT2("nothing in its forward weighs projections of the tokens by one another, as attention does")
        mixed = {int(m): branch for branch in found.values() for head in branch.heads for m in head.mixed}
        self._feeds = {
            number: origins
            for number, node in enumerate(self.nodes)
            if self._is_projection(number) and node.live and len(results := self._results(number))
            if len(origins := (x := self.flow.root(self._input(results[0])))[x >= 0])
        }
        self._set_adapters_aside()
        for number, origins in self._feeds.items():
            fed_by = [mixed[int(origin)] for origin in origins if int(origin) in mixed]
            if fed_by:
                fed_by[0].downs.append(number)
        return list(found.values())

    def _find_feed_forwards(self) -> list[Branch]:
        known = {number for branch in self.attentions for number in branch.ups + branch.downs}
        rest = [number for number in self._feeds if number not in known]
        found: dict[int, Branch] = {}
        for down in rest:
            if self.flow.state.get(self.flow.owner(self._input(self._results(down)[0]))) not in ("other", "plain"):
                continue  # it starts from the stream, into which others went
            for up in sorted(set(self.recording.owners(self._feeds[down]).tolist()) & set(rest)):
                branch = self._branch(found, self._results(up)[0])
                branch.ups += [up] if up not in branch.ups else []
                branch.downs += [down] if down not in branch.downs else []
        return list(found.values())

    def _set_adapters_aside(self) -> None:
        """Pairs of projections whose result is added to that of a single one, of the same input: low-rank fine-tuning."""
        found: set[int] = set()
        for down, origins in self._feeds.items():
            for up in set(self.recording.owners(origins).tolist()) & set(self._feeds):
                beside = self._results(down)[:1]
                while int(beside := self.flow.at(self.flow.joined, beside)) >= 0:
                    number = self.recording.owner(beside)
                    inputs = self._input(beside) if self._is_projection(number) else beside
                    found |= {up, down} if torch.equal(inputs, self._input(self._results(up)[0])) else set()
        self.adapters = {int(self._signatures(self._results(number)[:1])) for number in found}
        self._feeds = {number: origins for number, origins in self._feeds.items() if number not in found}

    @staticmethod
    def _once(branches: list[Branch]) -> list[Branch]:
        """Every block once, however often it runs."""
        found: dict[int, Branch] = {}
        for branch in branches:
            if branch.signature in found:
                found[branch.signature].times += 1
            else:
                found[branch.signature] = branch
        return list(found.values())

    def _find_head(self) -> Tensor | None:
        output = self.recording.output
        self.end = output[self.flow.at(self.flow.row, output) == self.here]
        origins = self._origins(self.end)
        if not len(origins):
            raise NotGPT2("its output is not made of the last token")
        return origins if self._is_projection(self.flow.owner(origins)) else None

    def _number_layers(self) -> list[int]:
        """As they run; but where parameters lie unused and names are numbered, the numbers tell which blocks are left out."""
        layers = list(range(max(len(self.attentions), len(self.feed_forwards))))
        names = [self.name(branch.signature) for branch in self.attentions]
        unused = [source.name for source in self.recording.sources if source.storage not in self.recording.uses]
        numbers = [[int(n) for n in re.findall(r"\d+", name)] for name in names]
        patterns = {re.sub(r"\d+", "#", name) for name in names}
        idle = [[int(n) for n in re.findall(r"\d+", name)] for name in unused if re.sub(r"\d+", "#", name) in patterns]
        for place in range(min(map(len, numbers))) if len(patterns) == 1 else ():
            runs, idles = [n[place] for n in numbers], [n[place] for n in idle]
            first = min(runs + idles)
            if idles and runs == sorted(set(runs)) and sorted(runs + idles) == list(range(first, first + len(runs + idles))):
                return [n - first for n in runs]
        return layers

    def name(self, id: int) -> str:
        """The parameter that an element is of; "" for none."""
        found = (source.name for source in self.recording.sources if source.region.start <= id <= source.region.last)
        return next(found, "")

    # Where it all lies

    def _place(
        self, part: str, layer: int | None, results: Tensor, columns: Tensor, rows: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """A projection and its bias. ``rows`` numbers the units of the inputs; the stream's coordinates do, if it is None."""
        rows = rows or (lambda inputs: self._coordinates(inputs))
        owners = self.recording.owners(results)
        for number in owners.unique().tolist():
            if not self._is_projection(number):
                continue
            node, mine = self.nodes[number], owners == number
            inputs = self._input(results[mine][0])
            self.parts.append(Matrix(part, layer, node, results[mine], rows(inputs), columns[mine]))
            for constant in (self._origins(inputs) < 0).nonzero()[:1, 0]:  # a column of ones: its weights are the bias
                weights = node.operands[node.weight][node.place(results[mine])]
                self.parts.append(Vector(f"{part}.bias", layer, weights[:, constant], columns[mine]))
        ids = self.flow.at(self._biases, results)
        if bool((ids >= 0).any()):
            self.parts.append(Vector(f"{part}.bias", layer, ids[ids >= 0], columns[ids >= 0]))

    def _place_back(self, part: str, layer: int, branch: Branch, units: Tensor) -> None:
        """Projections back to the stream, from numbered units."""

        def rows(inputs: Tensor) -> Tensor:
            origins = self.flow.root(inputs)
            found = self.flow.at(units, origins)
            return found if bool(((found >= 0) | (origins < 0)).all()) else torch.arange(len(inputs))

        for number in branch.downs:
            results = self._results(number)
            self._place(part, layer, results, self._coordinates(results), rows)
            if number in self._late:
                self.parts.append(Vector(f"{part}.bias", layer, self._late[number].ids, self._late[number].places))

    def _place_attention(self, layer: int, branch: Branch) -> None:
        found = {part: torch.cat([getattr(head, part) for head in branch.heads]) for part in ("q", "k", "v", "mixed")}
        straight = all(len(x.unique()) == len(x) == len(found["q"]) for x in found.values())
        if not straight or any(number in self.flow.torn for number in branch.downs):
            self.torn.add(layer)
        for part in "qkv":
            results = found[part] if straight else self._columns(branch, part)
            self._place(f"attn.{part}", layer, results, torch.arange(len(results)))
        self._place_back("attn.c_proj", layer, branch, self._number(self._blank(), found["mixed"]))

    def _columns(self, branch: Branch, part: str) -> Tensor:
        """Results that serve as queries (or keys, values) at any place, in their own order: where heads and places got mixed."""
        used = torch.cat([self._signatures(self._origins(head.everywhere[part].unique())).unique() for head in branch.heads])
        results = torch.cat([self._results(number) for number in branch.ups])
        return results[torch.isin(self._signatures(results), used[used >= 0])]

    def _place_feed_forward(self, layer: int, branch: Branch) -> None:
        hidden = torch.cat([self._results(number) for number in branch.ups])
        self._place("mlp.c_fc", layer, hidden, torch.arange(len(hidden)))
        self._place_back("mlp.c_proj", layer, branch, self._number(self._blank(), hidden))

    def _place_norms(self) -> None:
        end = self.end if self.head is None else self._input(self.head[0])
        last, _ = self._norms(end)
        self.end_normed = self.flow.state.get(self.flow.owner(end)) == "normed"
        consumers: list[tuple[str, int | None, list[Norm]]] = []
        for place, layer in enumerate(self.layers):
            for name, branches in (("ln_1", self.attentions), ("ln_2", self.feed_forwards)):
                consumers += [(name, layer, branches[place].norms)] if place < len(branches) else []
        consumers.append(("ln_f", None, last))
        self.post_norm = self._is_post_norm(consumers)
        norms = {norm.at: norm for *_, found in consumers for norm in reversed(found)}  # in the order of execution
        if self.post_norm:
            roles = [(name, layer, norm) for (name, layer, _), norm in zip(consumers, norms.values(), strict=False)]
        else:
            roles = [(name, layer, found[0]) for name, layer, found in consumers if found]
        for name, layer, norm in roles:
            for kind, ids in (("weight", norm.scale), ("bias", norm.shift)):
                if ids is not None:
                    self.parts.append(Vector(f"{name}.{kind}", layer, ids, norm.places))
        placed = {norm.at for *_, norm in roles}
        self.extra_norms = [norm for norm in norms.values() if norm.at not in placed]

    def _is_post_norm(self, consumers: list[tuple[str, int | None, list[Norm]]]) -> bool:
        """Whether norms stand behind the branches, in the stream: the first comes after the first attention, whose result is
        added to what is not normed, and the next branch is added to what is."""
        onto = [self.flow.onto.get(branch.downs[0]) for branch in self.feed_forwards if branch.downs]
        return bool(consumers) and not consumers[0][2] and any(found for *_, found in consumers) and onto[:1] == ["normed"]


def _begin(rows: Tensor, tokens: Tensor) -> int | None:
    """Where in the vocabulary a table begins that is read by the tokens; for a token of another shard, a shard reads its row 0."""
    apart = (tokens - rows)[rows != 0].unique()
    return int(apart) if len(apart) == 1 and bool(((tokens - rows == apart) | (rows == 0)).all()) else None
