"""Find a block's projections among recorded tensors: of queries, keys and values, and of any other linear layer.

Shapes: inputs (B, T, D); q, k, v (B, T, D), split into heads (B, H, T, K).
"""

from __future__ import annotations

from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Chooser, Fault, Option, Recorded
from gpt2.port.diagnosis.wiring import STREAM

HEADS = (1, 0, 2)  # axes of (B, H, T, K) that a port may split: heads, rows, tokens
Projected = dict[str, Recorded]  # "q", "k" and "v" of an input, each (B, T, D)


def affine(chooser: Chooser, x: Tensor, weight: Tensor, bias: Tensor, part: str, heads: int = 0) -> Recorded | None:
    """Find ``x @ weight + bias`` among the recorded tensors, else without bias; ``heads``: also as split into heads."""
    product = x @ weight
    tries: list[tuple[Tensor, tuple[Fault, ...]]] = [(product + bias, ())]
    if bool(bias.any()):
        tries.append((product, (Fault("missing-bias", part, "no bias is added"),)))
    for value, faults in tries:
        laid, axes = (Layout.RIGHT.split(value, heads), HEADS) if heads else (value, STREAM)
        if (recorded := chooser.recorded(laid, axes)) is not None:
            own = Layout.RIGHT.merge(recorded.value) if heads else recorded.value
            return Recorded(own, recorded.error, faults)
    return None


def added(bias: Tensor, projection: Recorded, part: str) -> list[Option]:
    """Return a projection's possible results; a bias missing there may be added later, to the sum."""
    if not projection.faults:
        return [Option.known("projected", projection.value)]
    whole = projection.value + bias
    return [
        Option.known("bias later", whole, values={part: whole}),
        Option.known("no bias", projection.value, *projection.faults, silent=True, values={part: projection.value}),
    ]


def project(
    chooser: Chooser, config: GPT2Config, x: Tensor, weights: dict[str, Tensor], min_recorded: int = 1
) -> Projected | None:
    """Return queries, keys and values of ``x``, if at least ``min_recorded`` of them are recorded."""
    parts: Projected = {}
    thirds = zip("qkv", weights["attn.c_attn.weight"].chunk(3, 1), weights["attn.c_attn.bias"].chunk(3, 0), strict=True)
    for name, weight, bias in thirds:
        recorded = affine(chooser, x, weight, bias, "attn", config.n_head)
        parts[name] = recorded or Recorded(x @ weight + bias, None)
        if len(parts) - sum(one.error is not None for one in parts.values()) > 3 - min_recorded:
            return None
    return parts
