"""What a walk has found, and the causes that this shows, with places and evidence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import FLOAT64_BOUND, Progress, silent, worst_relative_error
from gpt2.measure.rounding import WORST_RATIO, explained_errors
from gpt2.measure.tracing import layer_of, point_at, points, trace
from gpt2.model import GPT2
from gpt2.port.diagnosis.activations import SAME
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.hypotheses import scale_faults
from gpt2.port.diagnosis.places import Place, collapsed, forward_rank
from gpt2.port.diagnosis.report import LIKELY, SURE, Divergence
from gpt2.port.diagnosis.search import Choice, Chooser, Fault, Kind
from gpt2.port.recording.pool import Pool

SEQUENCE = ("layer-order", "layer-missing", "layer-repeated")


@dataclass(frozen=True)
class Walk:
    """The result of a walk; ``explained``: it reaches the port's logits, and nothing on the way is unknown.

    ``lost``: the points with an unknown computation. ``timed_out``: the search ended at its limit of time, at the first of them.
    """

    points: tuple[str, ...]
    explained: bool
    first_divergence: Divergence | None
    causes: tuple[PlacedCause, ...]
    blocks: tuple[int, ...]
    lost: tuple[str, ...]
    timed_out: bool = False

    def edge(self, layers: int) -> str:
        """Say which stage is the last that was recognised before the first unknown one, and which is the first that was not."""
        order, lost = points(layers), Place.of(self.lost[0])
        first = forward_rank(lost, layers)
        while first < len(order) and order[first] in self.points and lost.contains(Place.of(order[first])):
            first += 1
        known = [point for point in order[:first] if point in self.points]
        last = f"{known[-1]} is the last stage that was recognised" if known else "no stage was recognised"
        is_inside = first < len(order) and lost.contains(Place.of(order[first]))
        return f"{last}; {order[first] if is_inside else self.lost[0]} is the first that was not"


class Trail:
    """What a walk has found so far; ``own`` are the port's weights by the checkpoint's names, float64.

    ``values``: by traced point. ``blocks``: the checkpoint's numbers of the running blocks. ``factors``: of their scores, with
    the error of the attention weights. ``missed``: errors of GPT-2's formula where the port follows another. ``lost``: points
    with an unknown computation. ``reached``: the walk arrived at the port's logits. ``timed_out``: it ended at a limit of time.
    ``weights_seen``: ``own`` was read from the port; a dump has no weights, so ``own`` is the checkpoint's.
    """

    def __init__(
        self,
        pool: Pool,
        own: dict[str, Tensor],
        config: GPT2Config,
        ids: Tensor,
        progress: Progress = silent,
        *,
        weights_seen: bool = True,
    ) -> None:
        self._progress, self._at, self.weights_seen = progress, "embed", weights_seen
        self.pool, self.chooser, self.own, self.config, self.ids = pool, Chooser(pool), own, config, ids
        self.values: dict[str, Tensor] = {}
        self.faults: list[Fault] = []
        self.blocks: list[int] = []
        self.factors: dict[int, tuple[float, float | None]] = {}
        self.missed: dict[str, float] = {}
        self.lost: list[str] = []
        self.reached = False
        self.timed_out = False

    def enter(self, layer: int, part: str) -> None:
        """Note where the walk is."""
        self._at = point_at(layer, part)
        self._progress(f"following your values, at {self._at}")

    def run_out(self) -> None:
        """Note that the walk ended at its limit of time."""
        self.timed_out = True
        if not self.lost:
            self.lost.append(self._at)

    def weights(self, layer: int) -> dict[str, Tensor]:
        return {name.removeprefix(f"h.{layer}."): t for name, t in self.own.items() if name.startswith(f"h.{layer}.")}

    def blame(self, layer: int | None, faults: Iterable[Fault], error: float | None) -> None:
        self.faults += [replace(fault, layer=layer, error=error) for fault in faults]

    def settle(self, layer: int | None, choice: Choice[Any], part: str) -> None:
        """Accept a choice at ``part`` of a block, with all options that it starts from, as what the port does."""
        point = point_at(layer, part)
        self.values[point] = choice.value
        if choice.missed is not None:
            self.missed[point] = choice.missed
        option, error, before = choice.option.base, choice.error, layer
        if part == "ln_1":  # the previous block made the stream that enters
            before = layer - 1 if layer else None
        if option is not None and option.kind is not Kind.PARALLEL:
            self.values[point_at(before, "mid" if part == "ln_2" else "embed" if before is None else "")] = option.value
        option = choice.option
        while option is not None:
            self.blame(layer, option.faults, error)
            self.values |= {point_at(layer, name): value for name, value in option.values.items()}
            option, error, layer = option.base, None, before


def account(trail: Trail, reference: GPT2) -> Walk:
    """Compare ``trail`` with the trace of ``reference``, our model in float64, on the same ids."""
    explained = trail.reached and not trail.lost
    traced = trace(reference, trail.ids)
    known = tuple(point for point in points(trail.config.n_layer) if point in trail.values)
    errors = ((point, _departure(trail.values[point], traced[point])) for point in known)
    allowed = trail.pool.allowance
    if trail.pool.narrow and not allowed:
        rounding = explained_errors(reference, trail.ids, torch.float32, worst_relative_error, traced)
        allowed = {point: WORST_RATIO * error for point, error in rounding.items()}
    first = next(((point, error) for point, error in errors if error > max(allowed.get(point, 0.0), FLOAT64_BOUND)), None)
    if first is None and trail.lost:
        point = trail.lost[0]
        first = point, _departure(trail.pool.logits, traced[point]) if point == "logits" else math.inf
    divergence = None if first is None else Divergence(first[0], layer_of(first[0]), first[1])
    faults = [*post_norms(trail.faults), *_scales(trail), *_sequence(trail, reference)]
    causes, lost = _causes(faults, trail, explained), tuple(dict.fromkeys(trail.lost))
    return Walk(known, explained, divergence, tuple(causes), tuple(trail.blocks), lost, trail.timed_out)


def _departure(value: Tensor, expected: Tensor) -> float:
    """Return the error of a port's value; its vocabulary may be padded, or only the last position returned."""
    if value.ndim == expected.ndim == 3:
        shared = min(value.shape[-1], expected.shape[-1])
        value, expected = value[..., :shared], expected[:, -value.shape[1] :, :shared]
    if expected.shape == (1, *value.shape[1:]):  # positions have no batch
        expected = expected.expand(value.shape)
    return worst_relative_error(value, expected) if value.shape == expected.shape else math.inf


def post_norms(faults: list[Fault]) -> list[Fault]:
    """Merge norms that stand after the branches, and not before, into one fault for each block."""
    out = []
    for layer in dict.fromkeys(one.layer for one in faults):
        mine = [one for one in faults if one.layer == layer]
        missing = {one.part for one in mine if one.id == "norm-missing"}
        early = [one for one in mine if (one.id, one.part, one.kind) == ("extra-norm", "attn", "by ln_2")]
        if early and "ln_2" in missing:  # the stream is overwritten by its norm
            words = "the feed-forward's result is added to its normalised input, not to the stream before the norm"
            out.append(Fault("residual-from-normed", "", words, layer=layer))
            mine = [one for one in mine if one not in early and (one.id, one.part) != ("norm-missing", "ln_2")]
            missing.remove("ln_2")
        moved = [part for part in ("ln_1", "ln_2") if part in missing & {one.norm_after for one in mine}]
        if moved:
            words = "the norms stand behind the branches, ln(x + branch(x)), not before them"
            out.append(Fault("post-norm", "" if len(moved) == 2 else moved[0], words, layer=layer))
        for one in mine:
            if not (one.norm_after in moved or (one.id == "norm-missing" and one.part in moved)):
                out.append(one)
    return out


def _scales(trail: Trail) -> list[Fault]:
    """Return the faults in the scores' factors; if two causes give the same factor, choose the one that fits more blocks."""
    factors = [factor for factor, _ in trail.factors.values()]
    alike = len(factors) > 1 and all(math.isclose(factor, factors[0], rel_tol=1e-7) for factor in factors)
    alike &= not trail.config.scale_attn_by_inverse_layer_idx  # then no factor depends on the layer
    by_number, by_width = (
        [
            replace(fault, layer=layer, error=error)
            for layer, (factor, error) in trail.factors.items()
            for fault in scale_faults(trail.config, 0 if alike else layer, factor, inverse_first, not trail.pool.narrow)
        ]
        for inverse_first in (True, False)
    )
    inverse = sum(one.id == "scale-inverse-layer" for one in by_number)
    return by_number if inverse > sum(one.id == "scale-by-width" for one in by_width) else by_width


def _sequence(trail: Trail, reference: GPT2) -> list[Fault]:
    """Return the faults in the sequence of blocks; they are numbered by the checkpoint's weights that they hold."""
    layers = trail.config.n_layer
    ours = {name: tensor[:8].double() for name, tensor in reference.state_dict().items() if name.endswith("c_fc.weight")}

    def holder(block: int) -> int:
        """Return the checkpoint's block with these weights; comparing a few rows is enough."""
        mine = trail.own[f"h.{block}.mlp.c_fc.weight"][:8]
        return next((n for n in range(layers) if torch.allclose(ours[f"h.{n}.mlp.c_fc.weight"], mine)), block)

    holders = [holder(block) for block in trail.blocks]
    ran = holders if len(set(holders)) == len(set(trail.blocks)) else trail.blocks
    return sequence_faults(ran, layers, trail.weights_seen) if trail.reached else []


def sequence_faults(ran: Sequence[int], layers: int, weights_seen: bool = False) -> list[Fault]:
    """Return the faults of a run of the blocks ``ran``, in a model of ``layers`` blocks.

    If one block takes the place of all, its weights in every block give the same numbers, and are the commoner mistake.
    ``weights_seen``: they are not in every block.
    """
    if list(ran) == list(range(layers)):
        return []
    names = ", ".join(f"h.{block}" for block in ran) or "none"
    if len(set(ran)) == 1 < len(ran) and layers > 1:
        if weights_seen or len(ran) != layers:
            return [Fault("layer-repeated", "", f"it runs {len(ran)} times, in place of every block", layer=ran[0])]
        words = f"it computes with the weights of h.{ran[0]}, or that block runs {len(ran)} times"
        return [Fault("wrong-tensor", "", words, layer=block) for block in range(layers) if block != ran[0]]
    faults = []
    for block in range(layers):
        if (times := ran.count(block)) > 1:
            faults.append(Fault("layer-repeated", "", f"it runs {times} times; the blocks run are {names}", layer=block))
        elif not times:
            faults.append(Fault("layer-missing", "", f"it does not run; the blocks run are {names}", layer=block))
    firsts = list(dict.fromkeys(ran))
    if firsts != sorted(firsts):
        astray = next(i for i, block in enumerate(firsts) if block != sorted(firsts)[i])
        faults.append(Fault("layer-order", "", f"the blocks run as {names}", layer=astray))
    return faults


def _causes(faults: list[Fault], trail: Trail, explained: bool) -> list[PlacedCause]:
    """Return each cause once, with all its places."""
    groups: dict[tuple[str, str], list[Fault]] = {}
    for one in sorted(faults, key=lambda one: forward_rank(one.place, trail.config.n_layer)):
        groups.setdefault((one.id, one.kind or one.detail), []).append(one)
    layers = len(trail.blocks) if trail.reached else trail.config.n_layer
    causes = []
    for (id, _), same in groups.items():
        fault, fix = same[0], same[0].fix
        if id == "layernorm-eps":
            fix = f"nn.LayerNorm(n_embd, eps={trail.config.layer_norm_epsilon:g})"
        elif id == "gelu-variant" and (name := trail.config.activation_function) != "gelu_new" and SAME.get(name) != "gelu_new":
            fix = f"the checkpoint's activation is {name}"
        places = collapsed(sorted((one.place for one in same), key=lambda place: place.layer is None), layers)
        evidence = _evidence(id, fault.place, same, trail)
        evidence += "; with all causes here, the walk ends at your own logits" if explained else ""
        confidence = SURE if explained else LIKELY
        causes.append(PlacedCause(id, places, fault.detail, evidence, confidence, fix, fault.kind, fault.fitted))
    return causes


def _evidence(id: str, place: Place, same: list[Fault], trail: Trail) -> str:
    if id in SEQUENCE:
        return "your run holds each block's projections, with the weights of these blocks and in this order"
    error = max((one.error for one in same if one.error is not None), default=None)
    close = "" if error is None else " to the last bit" if error == 0 else f" to {error:.0e}"
    evidence = f"computed so from your own weights and inputs, {place} is what you have there{close}"
    missed = trail.missed.get(place.name, 0.0)
    return f"{evidence}; GPT-2's formula is off by {missed:.0e}" if missed > FLOAT64_BOUND else evidence
