"""Compute what a mistake alone does: how far a right GPT-2 with that mistake, and no other, moves its logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor

from gpt2.measure.metrics import max_abs
from gpt2.port.alternatives.alternative import Alternative, Changed
from gpt2.port.alternatives.candidates import Candidate, Placed
from gpt2.port.graph import Model, Program, Site, State

Moves = Mapping[str, Tensor]  # by node: the difference from the right value, over the root mean square of that


def moved_by(value: Tensor, right: Tensor) -> Tensor:
    """Return the difference of a node's value from the right one, over the root mean square of the right one."""
    return (value - right) / _size(right)


def moving(layer: int | None, moves: Moves) -> tuple[Placed, ...]:
    """Return sites that add such differences to the right values of nodes of a block, or outside the blocks."""
    edits = {node: Changed(node, partial(_added, by)) for node, by in moves.items()}
    one = Alternative("", "", edits)
    return (*[(one, layer)] * bool(one.edits), *[(one, None)] * bool(one.outside))


def effect(model: Model, sites: Iterable[Placed], order: Sequence[int] = ()) -> float | None:
    """Return the largest difference that ``sites`` make to a logit of the right ``model``; None if it cannot be computed.

    ``order``: the blocks that run, where they are others than GPT-2's.
    """
    program = Candidate(tuple(sites), tuple(order) or None).program
    return None if program is None else _moved(model, model, program)


def effect_of_weights(model: Model, tensors: State) -> float | None:
    """Return the largest difference that other ``tensors`` make to a logit of the right ``model``; None if they make none."""
    other = Model({**model.state, **tensors}, model.config, model.ids)
    return _moved(model, other, Program()) or None if tensors else None


def _moved(model: Model, other: Model, program: Program) -> float | None:
    try:
        right = model.always("logits", lambda: model.trace(Program())["logits"])
        moved = max_abs(other.trace(program)["logits"], right)
    except RuntimeError:  # what is wrong does not fit together
        return None
    return moved if math.isfinite(moved) else None


def _added(by: Tensor, c: Site, y: Tensor) -> Tensor:
    return y + by * _size(y)


def _size(y: Tensor) -> Tensor:
    return y.square().mean().sqrt().clamp(min=1e-300)
