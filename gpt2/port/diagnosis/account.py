"""Sum up a walk: the first divergence, and each cause once, with all its places and the evidence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import layer_of, points, trace
from gpt2.model import GPT2
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.hypotheses import Fault, scale_faults
from gpt2.port.diagnosis.places import ForwardOrder, Place, collapsed
from gpt2.port.diagnosis.report import LIKELY, SURE, Divergence
from gpt2.port.diagnosis.trail import PlacedFault, Trail

BOUND = 1e-10  # of a traced point against the reference's
NARROW_BOUND = 1e-6  # the same where the port computes in less than float64
SEQUENCE = ("layer-order", "layer-missing", "layer-repeated")


@dataclass(frozen=True)
class Walk:
    """The result of a walk.

    ``points`` are the traced points at which the port's value is known. ``explained``: the walk reaches the port's own logits,
    and nothing on the way is unknown. ``causes`` are sorted by the first place where each shows. ``blocks`` are the numbers of
    the blocks whose weights were used, as they ran. At the ``lost`` points the port computes something unknown.
    """

    points: tuple[str, ...]
    explained: bool
    first_divergence: Divergence | None
    causes: tuple[PlacedCause, ...]
    blocks: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()


def account(trail: Trail, reference: GPT2) -> Walk:
    """What ``trail`` shows, compared with the trace of ``reference``, our model in float64, on the same ids."""
    explained = trail.reached and not trail.lost
    traced = trace(reference, trail.ids)
    bound = NARROW_BOUND if trail.narrow else BOUND
    known = [point for point in points(trail.config.n_layer) if point in trail.values]
    first = None
    for point in known:
        if (error := _departure(trail.values[point], traced[point])) > bound:
            first = Divergence(point, layer_of(point), error)
            break
    if first is None and trail.lost:
        first = Divergence(trail.lost[0], layer_of(trail.lost[0]), math.inf)
    faults = [*_post_norms(trail.faults), *_scales(trail), *_sequence(trail, reference)]
    causes = _causes(faults, trail, explained)
    return Walk(tuple(known), explained, first, tuple(causes), tuple(trail.blocks), tuple(dict.fromkeys(trail.lost)))


def _departure(mine: Tensor, theirs: Tensor) -> float:
    """The error of a port's value, of what it has: its vocabulary may be padded, or only the last position returned."""
    if mine.shape[-1] != theirs.shape[-1] and mine.ndim == theirs.ndim == 3:
        shared = min(mine.shape[-1], theirs.shape[-1])
        mine, theirs = mine[..., :shared], theirs[..., :shared]
    if mine.shape[1:2] != theirs.shape[1:2] and theirs.ndim == 3:
        theirs = theirs[:, -mine.shape[1] :]
    theirs = theirs.expand(mine.shape) if theirs.shape[:1] == (1,) else theirs
    return worst_relative_error(mine, theirs) if mine.shape == theirs.shape else math.inf


def _post_norms(faults: list[PlacedFault]) -> list[PlacedFault]:
    """Norms that are behind the branches and not before them are one fault for each block."""
    out = []
    for layer in dict.fromkeys(one.layer for one in faults):
        mine = [one for one in faults if one.layer == layer]
        missing = {one.fault.part for one in mine if one.fault.id == "norm-missing"}
        moved = [part for part in ("ln_1", "ln_2") if part in missing & {one.fault.norm_after for one in mine}]
        if moved:
            words = "the norms stand behind the branches, ln(x + branch(x)), not before them"
            out.append(PlacedFault(layer, Fault("post-norm", "" if len(moved) == 2 else moved[0], words), None))
        for one in mine:
            if not (one.fault.norm_after in moved or (one.fault.id == "norm-missing" and one.fault.part in moved)):
                out.append(one)
    return out


def _scales(trail: Trail) -> list[PlacedFault]:
    """What is wrong with the factors of the scores. In one block the root of four heads and the block's number may be the same
    factor: then the cause that fits more blocks is meant."""
    config = trail.config

    def count(id: str, inverse_first: bool) -> int:
        by_block = (scale_faults(config, layer, factor, inverse_first) for layer, factor in trail.factors.items())
        return sum(any(fault.id == id for fault in faults) for faults in by_block)

    inverse_first = count("scale-inverse-layer", True) > count("scale-by-width", False)
    return [
        PlacedFault(layer, fault, trail.errors.get(f"h.{layer}.attn.weights"))
        for layer, factor in trail.factors.items()
        for fault in scale_faults(config, layer, factor, inverse_first)
    ]


def _sequence(trail: Trail, reference: GPT2) -> list[PlacedFault]:
    """What is wrong with the sequence of blocks. They are numbered by whose weights of the checkpoint they hold."""
    layers = trail.config.n_layer
    theirs = {name: tensor[:8].double() for name, tensor in reference.state_dict().items() if name.endswith("c_fc.weight")}

    def holder(block: int) -> int:
        """The checkpoint's block with these weights; a few rows are as good as all."""
        mine = trail.own[f"h.{block}.mlp.c_fc.weight"][:8]
        return next((n for n in range(layers) if torch.allclose(theirs[f"h.{n}.mlp.c_fc.weight"], mine)), block)

    holders = [holder(block) for block in trail.blocks]
    ran = holders if len(set(holders)) == len(set(trail.blocks)) else trail.blocks
    if ran == list(range(layers)) or not trail.reached:
        return []
    names = ", ".join(f"h.{block}" for block in ran)
    faults: list[PlacedFault] = []
    for block in sorted(set(ran)):
        if ran.count(block) > 1:
            fault = Fault("layer-repeated", "", f"it runs {ran.count(block)} times; the blocks run are {names}")
            faults.append(PlacedFault(block, fault, None))
    for block in sorted(set(range(layers)) - set(ran)):
        faults.append(PlacedFault(block, Fault("layer-missing", "", f"it does not run; the blocks run are {names}"), None))
    firsts = list(dict.fromkeys(ran))
    if firsts != sorted(firsts):
        astray = next(i for i, block in enumerate(firsts) if block != sorted(firsts)[i])
        faults.append(PlacedFault(astray, Fault("layer-order", "", f"the blocks run as {names}"), None))
    return faults


def _causes(faults: list[PlacedFault], trail: Trail, explained: bool) -> list[PlacedCause]:
    """Each cause once, with all its places."""
    groups: dict[tuple[str, str], list[PlacedFault]] = {}
    order = ForwardOrder(trail.config.n_layer)
    for one in sorted(faults, key=lambda one: order.rank(one.place)):
        groups.setdefault((one.fault.id, one.fault.kind or one.fault.detail), []).append(one)
    layers = len(trail.blocks) if trail.reached else trail.config.n_layer
    causes = []
    for (id, _), same in groups.items():
        first = same[0]
        places = collapsed(sorted((one.place for one in same), key=lambda place: place.layer is None), layers)
        evidence = _evidence(id, first.place, same, trail)
        if explained:
            evidence += "; with all causes here, the walk ends at your own logits"
        confidence = SURE if explained else LIKELY
        fix, fitted = _fix(id, trail.config), first.fault.fitted
        causes.append(PlacedCause(id, places, first.fault.detail, evidence, confidence, fix, first.fault.kind, fitted))
    return causes


def _evidence(id: str, place: Place, same: list[PlacedFault], trail: Trail) -> str:
    if id in SEQUENCE:
        return "each block's projections were found in your run, with the weights of these blocks and in this order"
    error = max((one.error for one in same if one.error is not None), default=None)
    close = "" if error is None else " to the last bit" if error == 0 else f" to {error:.0e}"
    evidence = f"computed so from your own weights and inputs, {place} is what your module has there{close}"
    missed = trail.missed.get(place.name, 0.0)
    return f"{evidence}; GPT-2's formula is off by {missed:.0e}" if missed > BOUND else evidence


def _fix(id: str, config: GPT2Config) -> str | None:
    """The corrected line, where it depends on the checkpoint's config."""
    if id == "layernorm-eps":
        return f"nn.LayerNorm(n_embd, eps={config.layer_norm_epsilon:g})"
    if id == "gelu-variant" and config.activation_function not in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        return f"the checkpoint's activation is {config.activation_function}"
    return None
