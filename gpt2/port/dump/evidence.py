"""Collect what a dump shows at traced points where the walk does not arrive: the evidence for a search by model.

Right values are recognised by value. Streams that are wrong are put in order by what each block would make of the one before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import point_at, points
from gpt2.model import GPT2
from gpt2.port.alternatives.outside import sequence_faults
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.places import Place
from gpt2.port.diagnosis.report import LIKELY, Divergence
from gpt2.port.dump.pool import DumpPool
from gpt2.port.dump.tolerance import UNITS
from gpt2.port.graph import ORDER, Model, run_block, stage_of

RECORDED: tuple[tuple[str, ...], ...] = (
    ("",),
    ("mid",),
    ("mlp.c_proj",),
    ("attn.c_proj",),
    ("ln_1",),
    ("ln_2",),
    ("attn.heads",),
    ("mid", ""),
    ("attn.c_proj", "mlp.c_proj"),
    ("ln_1", "ln_2"),
)  # one tensor a block, or two
STREAMS = ("", "mid")
SIZED = {stage for stages in RECORDED for stage in stages}
LEAST_LIKENESS = 0.1  # of a stream and what the right block makes of the one before it, as a cosine
BY_CHANCE = 4.0  # standard deviations of such a cosine for an array that has nothing to do with the model


def streams(pool: DumpPool, ids: Tensor, width: int, used: set[int]) -> dict[int, Tensor]:
    """Return the arrays that may be a stream (B, T, D), laid out so, by their entries' numbers; not those ``used``."""
    batch, tokens = ids.shape
    out: dict[int, Tensor] = {}
    for number, entry in enumerate(pool.entries):
        if entry.numel() != batch * tokens * width or number in used or not bool(entry.isfinite().all()):
            continue
        if entry.shape[-1] == width or entry.ndim == 1:
            time_first = entry.ndim == 3 and entry.shape[:2] == (tokens, batch) and tokens != batch
            out[number] = (entry.transpose(0, 1) if time_first else entry).reshape(batch, tokens, width)
        elif entry.shape[0] == width:
            out[number] = entry.movedim(0, -1).reshape(batch, tokens, width)
    return out


@dataclass(frozen=True)
class Placement:
    """Arrays of a dump at traced points; ``stages``: the stages of a block that these points are, "" for its result."""

    stages: tuple[str, ...]
    values: Mapping[str, Tensor]
    likeness: float


def placements(model: Model, held: Collection[str], arrays: Mapping[int, Tensor]) -> list[Placement]:
    """Return what unknown ``arrays`` of a stream's size may be, the likeliest first: results of blocks, of norms, of branches.

    Each block computes from the arrays before; at a recorded stage, the array most like the result takes its place. So where
    one block alone is wrong, everything else is exact. ``held``: points whose right value is recorded.
    """
    found = [_placed(model, stages, held, arrays) for stages in RECORDED]
    return sorted((one for one in found if one.values), key=lambda one: -one.likeness)


def _placed(model: Model, stages: tuple[str, ...], held: Collection[str], arrays: Mapping[int, Tensor]) -> Placement:
    layers = range(model.config.n_layer)
    left, values, likeness, x = dict(arrays), {}, 0.0, model.embed()
    least = max(LEAST_LIKENESS, BY_CHANCE / x.numel() ** 0.5)
    order = points(len(layers))
    behind = max((order.index(point) for point in held if point == "ln_f" or stage_of(point) in STREAMS), default=-1)
    for layer in layers:
        state = {"x": x}
        for stage in (*stages, "") if stages[-1] else stages:
            after = max((ORDER[done] for done in state if done in ORDER), default=-1)
            state = run_block(model.site(layer, state), state, {}, after, ORDER[stage])
            point = point_at(layer, stage)
            if stage not in stages:
                continue
            if point in held:
                likeness += 1.0
                continue
            if order.index(point) < behind:  # what a right stream was made of is right
                continue
            like = {number: _likeness(state[stage], array) for number, array in left.items()}
            best = max(like, key=lambda number: like[number], default=None)
            if best is not None and like[best] >= least:
                state[stage] = values[point] = left.pop(best)
                likeness += like[best]
        x = state[""]
    recorded = sum(stage_of(point) in SIZED for point in held) + len(arrays)
    return Placement(stages, values, likeness / max(len(stages) * len(layers), recorded))


def order_run(
    reference: GPT2, start: Tensor, arrays: Mapping[int, Tensor], logits: Tensor, bound: float
) -> list[tuple[int, int]]:
    """Return the blocks that run, each with the number of its result: what it makes of the array before, up to ``bound``.

    ``start`` (B, T, D) enters the first block, and ``logits`` must follow from the last. Empty if some array is not explained so.
    """
    ran: list[tuple[int, int]] = []
    left, stream = dict(arrays), start
    while left:
        expected = len(ran)
        for layer in sorted(range(reference.config.n_layer), key=lambda n: n != expected):
            result = reference.h[layer](stream)
            number = next((n for n, array in left.items() if worst_relative_error(array, result) <= bound), None)
            if number is not None:
                ran.append((layer, number))
                stream = left.pop(number)
                break
        else:
            return []
    made = reference.head(reference.ln_f(stream))[:, -logits.shape[1] :]
    return ran if worst_relative_error(logits[..., : made.shape[-1]], made) <= bound else []


def misordered(
    reference: GPT2, exact: Mapping[str, Tensor], arrays: Mapping[int, Tensor], logits: Tensor, bound: float
) -> tuple[Divergence | None, list[PlacedCause]]:
    """Return the faults in the sequence of blocks that :func:`order_run` reads, and the first wrong stream.

    ``exact``: the right values by traced point. No causes where the sequence is right, or cannot be read.
    """
    layers = range(reference.config.n_layer)
    ran = order_run(reference, exact["embed"], arrays, logits, bound)
    blocks = [block for block, _ in ran]
    if not ran or blocks == list(layers):
        return None, []
    errors = {n: worst_relative_error(arrays[number], exact[f"h.{n}"]) for n, (_, number) in zip(layers, ran, strict=False)}
    first = next((Divergence(f"h.{n}", n, error) for n, error in errors.items() if error > bound), None)
    evidence = "each recorded stream is what one of these blocks makes of the one before it, and the logits follow from the last"
    faults = sequence_faults(blocks, len(layers))
    causes = [PlacedCause(one.id, (Place(one.layer, ""),), one.detail, evidence, LIKELY) for one in faults]
    return first, causes


def _likeness(one: Tensor, other: Tensor) -> float:
    return float((one * other).sum() / (one.norm() * other.norm()).clamp(min=1e-300))


def with_storage(allowed: Mapping[str, float], evidence: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Return the allowed errors with the rounding of storage in ``dtype``, relative to the root mean square of each value."""
    unit, smallest = UNITS[dtype]
    out = dict(allowed)
    for point, value in evidence.items():
        finite = value[value.isfinite()]
        if finite.numel():
            rms = float(finite.square().mean().sqrt().clamp(min=1e-300))
            out[point] = allowed.get(point, max(allowed.values())) + (unit * float(finite.abs().max()) + smallest) / rms
    return out
