"""A block as some alternatives compute it, from a program's own values where they are found; and whether its values show it."""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from gpt2.errors import misfit
from gpt2.measure.tracing import point_at
from gpt2.port.alternatives.alternative import Alternative, merged
from gpt2.port.fits.observed import Observed
from gpt2.port.graph import HIDDEN, NODES, ORDER, READS, Edits, Entrance, Model, State, computed
from gpt2.port.search.batch import Moved, by_node, in_rows, rows_together
from gpt2.port.search.observe import Observation, Seen
from gpt2.port.search.part import Part
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.tolerance import stored

FIRST = ("ln_1", "attn.q", "attn.k", "attn.v")  # nodes that show a block's input
WHOLE = "attn.scores"  # a node whose program's numbers are not taken: what it hides is written in many ways


def _norms_alike(model: Model) -> set[str]:
    """Return the norms with the numbers of another one, as norms without weight and bias: both give the same."""
    names = [name.removesuffix(".weight") for name in model.state if ".ln_" in f".{name}" and name.endswith("weight")]
    pairs = {name: torch.stack((model.state[f"{name}.weight"], model.state[f"{name}.bias"])) for name in names}
    return {one for one, other in itertools.permutations(names, 2) if torch.equal(pairs[one], pairs[other])}


def _descendants() -> dict[str, frozenset[str]]:
    """Return the nodes that depend on each node."""
    out: dict[str, frozenset[str]] = {}
    for node in reversed(NODES):
        readers = [reader for reader in NODES if node in READS[reader]]
        out[node] = frozenset(readers).union(*(out[reader] for reader in readers))
    return out


BEHIND = _descendants()


@dataclass(frozen=True, eq=False)
class Trial:
    """A block as some alternatives compute it: its nodes, with the program's own numbers where they are ``seen``."""

    layer: int
    state: State
    seen: Mapping[str, Seen]
    alternatives: tuple[Alternative, ...] = ()
    edits: Edits = field(default_factory=dict)
    faults: tuple[Cause, ...] = ()  # that were fitted
    unseen: int = 0  # the nodes that the last alternative changes and that are not found
    again: int = 0  # whether the block's result is found, as another value's
    ties: tuple[Alternative, ...] = ()  # that explain as much as the only alternative


class Blocks:
    """The blocks of a program with the weights in ``model``, of which an ``observation`` holds values.

    ``known``: the alternatives of each faulty block so far, the last first.
    """

    def __init__(self, observation: Observation, model: Model) -> None:
        self.observation, self.model, self.layers = observation, model, model.config.n_layer
        self.known: list[tuple[Alternative, ...]] = []
        self.shapes: dict[str, torch.Size] = {}  # of the nodes of each block, as GPT-2 has them

    def block(self, layer: int, x: Tensor) -> Trial:
        """Return GPT-2's own nodes of a block, with the program's numbers where they are found."""
        site, state, seen = self.model.site(layer, {"x": x}), {"x": x}, dict[str, Seen]()
        for node in NODES:
            state[node] = computed(site, state, node, {})
            self._look(node, state, seen)
        self.shapes = {node: value.shape for node, value in state.items()}
        return Trial(layer, state, seen)

    def _look(self, node: str, state: State, seen: dict[str, Seen], fault: bool = False) -> None:
        """Find a node's value, and take the program's numbers for it."""
        value = state[node]
        if node in HIDDEN or any(one is value or torch.equal(one, value) for name, one in state.items() if name != node):
            return  # it is found in any case
        found = self.observation.find(node, value, fault)
        if found is None or any(torch.equal(one.own, found.own) for one in seen.values()):
            return  # another node's array shows nothing of this one
        seen[node] = found
        if node != WHOLE:
            state[node] = found.own

    def missing(self, base: Trial) -> list[str]:
        """Return the nodes that are not found, nor anything that follows from them."""
        return [node for node in NODES if node not in base.seen and BEHIND[node].isdisjoint(base.seen)]

    def part(self, base: Trial, node: str, seen: Observed) -> Part:
        """Return the part of a block from the first node that is not found to an array that may be the value of ``node``."""
        after, point = ORDER[self.missing(base)[0]] - 1, point_at(base.layer, node)
        entrance = Entrance(base.layer, {name: base.state[name] for name in ("x", *NODES[: after + 1])}, after)
        allowed = {point: seen.bound + stored(seen.value, self.observation.pool.dtypes[seen.number])}
        return Part(self.model, point, entrance, {point: seen.value}, allowed)

    def goes_on(self, trial: Trial) -> bool:
        """Return whether a block is explained: its result is found, or what follows from it."""
        return "" in trial.seen or self.shown_behind(trial.layer, trial.state[""], trial.alternatives)

    def shown_behind(self, layer: int, x: Tensor, own: Sequence[Alternative] = ()) -> bool:
        """Return whether what follows block ``layer`` shows its result ``x``: the next block's first nodes, or the logits.

        Perhaps with the faults of this block (``own``), or of an earlier one. -1 for the embeddings. What is known shows nothing.
        """
        following = layer + 1 if layer + 1 < self.layers else None
        wanted = FIRST if following is not None else ("ln_f",)
        alike = self.model.always("alike", lambda: _norms_alike(self.model))  # these show a stream, and not who reads it
        for some in dict.fromkeys(((), tuple(own), *self.known)):
            every = (one.at(following) for one in some)
            edits = {node: formula for one in every for node, formula in one.items() if node in wanted}
            site, state = self.model.site(following or 0, {"x": x}), {"x": x}
            for node in wanted if edits or not some else ():
                state[node] = computed(site, state, node, edits)
                if torch.equal(state[node], x) or (node in wanted[:1] and site.full(node) in alike):
                    continue  # it is found in any case
                seen = self.observation.find(node, state[node], fault=node in edits)
                if seen is not None and not self.observation.used.issuperset(seen.entries):
                    return True
            if "ln_f" in state and self.observation.are_logits(state["ln_f"], self.model.table):
                return True
        return False

    def screened(self, base: Trial, some: Iterable[Alternative], until: str = "", but: str = "") -> Iterator[Alternative]:
        """Yield those alternatives of a block, run up to a node as rows of a batch, for which :meth:`tried` may return something.

        Their values are compared with the program's by sums alone, those of the node ``but`` not at all.
        """
        # the last node of another shape, as of another number of heads: what begins before it is not run as rows
        odd = max((ORDER[node] for node in NODES if base.state[node].shape != self.shapes[node]), default=-1)
        rows = list[tuple[int, Alternative, Edits]]()  # each with the node at which it begins
        for one in some:
            both = merged(base.edits, edits) if (edits := one.at(base.layer)) else None
            if both is not None and (begin := min(map(ORDER.__getitem__, edits))) > odd:
                rows.append((begin, one, both))
            elif both is not None:
                yield one
        rows.sort(key=lambda row: row[0])
        most = rows_together(self.model, 1, len(self.model.table) if base.layer + 1 == self.layers else 1)
        for few in (rows[n : n + most] for n in range(0, len(rows), most)):
            self.model.budget.check()
            shown = self._shown(base, [begin for begin, *_ in few], [edits for *_, edits in few], until, but)
            yield from (one for (_, one, _), is_shown in zip(few, shown, strict=True) if is_shown)

    def _shown(self, base: Trial, begins: Sequence[int], every: Sequence[Edits], until: str, but: str) -> list[bool]:
        """Return whether what each of some edits changes may be found: in nodes from its number of ``begins`` to ``until``, or,
        behind a whole block, in what follows. They are sorted by their begin: the first ones have changed a node."""
        count, odd, batch, moved, edited = len(every), set[int](), State(), Moved(), by_node(every)
        shown, site = torch.zeros(count, dtype=torch.bool), self.model.site(base.layer, base.state)
        for node in NODES[begins[0] : ORDER[until] + 1]:
            begun, right = bisect_right(begins, ORDER[node]), base.state[node]
            own = {n: formula for n, formula in edited.get(node, {}).items() if n < begun}
            moved[node] = set(own).union(*(moved.get(read, ()) for read in READS[node]))
            still = [n for n in range(begun) if n not in moved[node]]
            if len(still) < begun:
                made = in_rows(site, node, base.state, batch, own, begun, odd, moved)
                made[still] = right
                batch[node] = torch.cat([made, right.expand(count - begun, *right.shape)]) if begun < count else made
                if node not in HIDDEN and node != (but or None):
                    found = self.observation.may_find(node, made)
                    found[still] = False
                    shown[:begun] |= found
        layer = base.layer + 1 if base.layer + 1 < self.layers else None
        for some in ((), *self.known) if until == "" else ():
            edits = {node: formula for one in some for node, formula in one.at(layer).items()}
            after, later = {"x": batch[""]}, {"x": moved[""]}
            following = self.model.site(layer or 0, {"x": batch[""][0]})
            for node in (FIRST if layer else ("ln_f",)) if edits or not some else ():
                own = {n: edits[node] for n in range(count) if node in edits}
                after[node] = in_rows(following, node, {}, after, own, count, odd, later)
                shown |= self.observation.may_find(node, after[node])
            if "ln_f" in after:
                shown |= self.observation.may_be_logits(after["ln_f"], self.model.table)
        shown[list(odd)] = True
        return shown.tolist()

    def tried(self, base: Trial, one: Alternative, shown: bool = True) -> Trial | None:
        """Return ``base`` with one more alternative; None if it changes nothing, or nothing that it changes is ``shown``."""
        edits = one.at(base.layer)
        if not edits:
            return None
        both = merged(base.edits, edits)
        if both is None:
            return None
        begin = min(ORDER[node] for node in edits)
        state = {node: value for node, value in base.state.items() if ORDER.get(node, -1) < begin}
        seen = {node: each for node, each in base.seen.items() if ORDER[node] < begin}
        site = self.model.site(base.layer, state)
        known = list(base.seen.values())
        changed, found, again = set[str](), False, 0
        for node in NODES[begin:]:
            old = value = base.state[node]
            if node in both or not changed.isdisjoint(READS[node]):
                fits = False
                with misfit():  # two alternatives may not fit together, as of other numbers of heads
                    value, fits = computed(site, state, node, both), True
                if not fits:
                    return None
            if value is old or torch.equal(value, old):
                state[node] = old
                if node in base.seen:
                    seen[node] = base.seen[node]
                continue
            if (node == "" and value.shape != old.shape) or not (isfinite(value[..., 0].min()) or bool(value.isfinite().any())):
                return None
            state[node] = value
            changed.add(node)
            same = next((one for one in known if torch.equal(value, one.own)), None)
            if same is not None:  # it is found in any case, and shows nothing of what follows
                if node == "":
                    again = 1
                else:
                    seen[node] = same
                continue
            self._look(node, state, seen, fault=node in edits)
            found |= node in seen
        if not changed:
            return None
        unseen = len(changed - seen.keys())
        trial = Trial(base.layer, state, seen, (*base.alternatives, one), both, base.faults, unseen, again)
        return trial if found or not shown or self.shown_behind(base.layer, state[""]) else None
