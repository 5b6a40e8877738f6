"""Collect what a dump shows at traced points where the walk does not arrive: the evidence for a search by simulation.

Right values are recognised by value. Streams that are wrong are put in order by what each block would make of the one before it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import point_at
from gpt2.model import GPT2
from gpt2.port.dump.pool import DumpPool
from gpt2.port.dump.tolerance import UNITS

LEAST_LIKENESS = 0.1  # of a stream and what the right block makes of the one before it, as a cosine


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


def chained(reference: GPT2, start: Tensor, first: int, arrays: Mapping[int, Tensor]) -> dict[str, int]:
    """Return the entries' numbers by the block whose output they may be, from block ``first`` on; ``start`` enters it.

    Each block takes the array before it; the next is the one most like the result, so that the rest of the chain is exact
    where one block alone is wrong.
    """
    left, found, stream = dict(arrays), {}, start
    for layer in range(first, reference.config.n_layer):
        if not left:
            break
        result = reference.h[layer](stream)
        like = {number: _likeness(result, array) for number, array in left.items()}
        best = max(like, key=lambda number: like[number])
        if like[best] < LEAST_LIKENESS:
            break
        found[point_at(layer, "")] = best
        stream = left.pop(best)
    return found


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
