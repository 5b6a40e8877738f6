"""What a walk blames, where that moves the program and how far, and the causes that a report is made of."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from gpt2.errors import misfit
from gpt2.measure.metrics import max_abs, worst_relative_error
from gpt2.measure.rounding import FORWARD_RATIO
from gpt2.measure.tracing import OUTSIDE, part_of, point_at
from gpt2.port.alternatives.activations import SAME
from gpt2.port.alternatives.alternative import Alternative, Changed
from gpt2.port.alternatives.candidates import Candidate, Placed
from gpt2.port.alternatives.outside import SEQUENCE, sequence_faults
from gpt2.port.graph import ORDER, Model, Program, State
from gpt2.port.search.observe import Seen
from gpt2.port.terms.causes import LIKELY, SURE, Cause
from gpt2.port.terms.report import Divergence
from gpt2.port.terms.tolerance import SLACK, Tolerance

Moves = Mapping[str, Tensor]  # by node: the difference from the right value, over the root mean square of that
Values = Mapping[str, tuple[Tensor, Tensor]]  # by node: the program's value, and what GPT-2's formula gives there


@dataclass(frozen=True)
class Departure:
    """Where a fault moves a program: the error of what is ``shown`` there, and what GPT-2's formula ``missed``.

    ``rounded``: rounding to float32 explains it. ``moves``: what it adds to the right nodes, of a fault that has no formula.
    """

    shown: float
    missed: float
    rounded: bool
    moves: Moves = field(default_factory=dict)


class Blamed:
    """The alternatives (``sites``) and the fitted ``faults`` of a program with the weights in ``model``, as a walk finds them.

    ``exact``: GPT-2's own values by traced point. ``right``: the checkpoint, in a walk through a module, whose own weights are in
    ``model``, and which is given the whole text at once. ``rounding``: what rounding to float32 explains. ``ran``: the blocks so
    far, each with alternatives that explain it alike (``ties``). ``first``: the first place that is not GPT-2's.
    """

    def __init__(self, model: Model, exact: State, right: Model | None = None, rounding: Tolerance | None = None) -> None:
        self.model, self.exact, self.right, self.rounding = model, exact, right, rounding
        self.ran: list[int] = []
        self.ties: list[tuple[Alternative, ...]] = []
        self.sites: list[Placed] = []
        self.faults: list[Cause] = []
        self.departures: dict[Placed | Cause, Departure] = {}
        self.first: Divergence | None = None

    def alternative(self, one: Alternative, layer: int | None, node: str, values: Values, seen: Mapping[str, Seen]) -> None:
        """Note an alternative that changes ``values``, of which ``node`` is the first; ``seen``: what is found of its block."""
        self.sites.append((one, layer))
        shown = next((each.error for name, each in seen.items() if ORDER[name] >= ORDER[node]), 0.0)
        part = next(iter(one.parts(None)), node)
        point = (part if part in OUTSIDE else node) if layer is None else point_at(len(self.ran) - 1, traced(node))
        self._note([(one, layer)], point, values, shown)

    def fitted(self, faults: Sequence[Cause], point: str, values: Values) -> None:
        """Note faults that have no formula, and change ``values``."""
        self.faults += faults
        self._note(faults, point, values)

    def _note(self, blamed: Sequence[Placed | Cause], point: str, values: Values, shown: float = 0.0) -> None:
        same = {node: both for node, both in values.items() if both[0].shape == both[1].shape}
        missed = max(map(worst_relative_error, *zip(*same.values(), strict=True))) if len(same) == len(values) > 0 else math.inf
        explained = FORWARD_RATIO / SLACK * self.rounding.stages.get(part_of(point), 0.0) if self.rounding else 0.0
        moves = {node: (value - right) / _size(right) for node, (value, right) in same.items()}
        departure = Departure(shown, missed, 0 < missed <= explained, moves)
        self.departures |= dict.fromkeys(blamed, departure)
        if self.first is None and not departure.rounded:
            self.first = Divergence(point, missed)

    def forget(self, alternatives: Sequence[Alternative], faults: Sequence[Cause]) -> None:
        """Take back what was blamed last, that of one block."""
        del self.sites[len(self.sites) - len(alternatives) :], self.faults[len(self.faults) - len(faults) :]

    def causes(self, explained: bool) -> Iterator[tuple[Cause, bool]]:
        """Yield the causes, and whether each is no more than rounding to float32."""
        sequence = sequence_faults(self.ran, self.model.config.n_layer, self.right is not None) if explained else []
        sites = list(self._widest())
        whole = Candidate(tuple(sites), head=(*self.faults, *sequence))
        for found in whole.causes(self.model.config.n_layer):
            named = found.id, found.detail
            is_own = [named in ((fault.id, fault.detail) for fault in one.faults(layer)) for one, layer in sites]
            own: list[Placed | Cause] = [site for site, is_one in zip(self.sites, is_own, strict=True) if is_one]
            own += [one for one in self.faults if one.id == found.id and any(place.contains(one.place) for place in found.places)]
            departed = [self.departures[one] for one in own if one in self.departures]
            error, missed = (max((getattr(one, name) for one in departed), default=0.0) for name in ("shown", "missed"))
            evidence = "computed so from your own values, it is what you have there"
            evidence += f", to {error:.0e}" if error else ""
            evidence += f"; GPT-2's formula is off by {missed:.0e}" if math.isfinite(missed) and missed else ""
            evidence += "; with all causes here, the walk ends at your own logits" if explained else ""
            if found.id in SEQUENCE and not own:
                evidence = "your run holds each block's projections, with the weights of these blocks and in this order"
            mend, config = found.mend, self.model.config
            if found.id == "layernorm-eps":
                mend = f"nn.LayerNorm(n_embd, eps={config.layer_norm_epsilon:g})"
            elif found.id == "gelu-variant" and SAME.get(config.activation_function, config.activation_function) != "gelu_new":
                mend = f"the checkpoint's activation is {config.activation_function}"
            moved = self._effect(own, [site for site, is_one in zip(sites, is_own, strict=True) if is_one], found.id in SEQUENCE)
            sure = SURE if explained else LIKELY
            cause = replace(found, evidence=evidence, confidence=sure, mend=mend, effect=moved)
            yield cause, bool(departed) and all(one.rounded for one in departed)

    def _effect(self, own: Sequence[Placed | Cause], sites: Sequence[Placed], is_order: bool) -> float | None:
        """Return how far ``own``, the sites and faults of a cause, move the logits of the checkpoint; None if that is unknown."""
        if self.right is None:
            return None
        every = list(sites)
        for one in own:
            if isinstance(one, Cause) and one in self.departures:
                moves = self.departures[one].moves
                if "logits" in moves:
                    return float(moves["logits"].abs().max() * _size(self.exact["logits"]))
                edits = {node: Changed(node, partial(lambda by, c, y: y + by * _size(y), by)) for node, by in moves.items()}
                added = Alternative("", "", edits)
                every.append((added, one.place.layer if added.edits else None))
        program = Candidate(tuple(every), tuple(self.ran) if is_order and not own else None).program
        return None if program is None else _moved(self.right, self.right, program)

    def _widest(self) -> Iterator[Placed]:
        """Yield the sites; of several alternatives that explain a block alike, that which explains most blocks."""
        blocks = Counter(one for some in self.ties for one in some)
        for one, layer in self.sites:
            alike = self.ties[self.ran.index(layer)] if layer is not None else ()
            yield max((one, *alike), key=lambda other: blocks[other]) if one in alike else one, layer


def traced(node: str) -> str:
    """Return the traced point of a block that shows a node first."""
    heads = {"attn.qh": "attn.q", "attn.kh": "attn.k", "attn.vh": "attn.v", "attn.mixed": "attn.heads"}
    return heads.get(node, node)


# What a mistake alone does


def _size(y: Tensor) -> Tensor:
    return y.square().mean().sqrt().clamp(min=1e-300)


def effect_of_weights(model: Model, tensors: State) -> float | None:
    """Return the largest difference that other ``tensors`` make to a logit of the right ``model``; None if they make none."""
    other = Model({**model.state, **tensors}, model.config, model.ids)
    return _moved(model, other, Program()) or None if tensors else None


def _moved(model: Model, other: Model, program: Program) -> float | None:
    moved = math.nan
    with misfit():
        right = model.always("logits", lambda: model.trace(Program(), every=False)["logits"])
        moved = max_abs(other.trace(program, every=False)["logits"], right)
    return moved if math.isfinite(moved) else None
