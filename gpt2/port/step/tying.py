"""Two parameters that a step ties by hand: it adds their gradients, and copies one's values to the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpt2.port.step.clipping import passage
from gpt2.port.step.records import Gradient, Sampler, Watched


def join_tied(sessions: Sequence[Sequence[Watched]], names: Sequence[str], sampler: Sampler) -> None:
    """Make one parameter of those that are equal after every update, if one of them is updated by the sum of their gradients.

    ``names``: those that were one tensor before make_step. The others are removed from what was seen.
    """
    if len(names) < 2 or not _stay_equal(sessions, names):
        return
    keeper = next((name for name in names if _uses_sum(sessions, name, names)), None)
    if keeper is None:
        return
    for call in (call for session in sessions for call in session):
        for backward in call.backwards:
            _join(backward.arrived, keeper, names)
            _join(backward.held, keeper, names)
        for update in call.updates:
            if 0 < update.backwards <= len(call.backwards):
                _measure(call.backwards[update.backwards - 1].held, update.gradient, keeper, sampler)
        for name in (name for name in names if name != keeper):
            call.trains.discard(name)
            call.start.remove(name)
            for update in call.updates:
                update.gradient.remove(name)
                update.before.pop(name, None)
                update.after.pop(name, None)
    for name in (name for name in names if name != keeper):
        del sampler.parameters[name], sampler.indices[name]


def _stay_equal(sessions: Sequence[Sequence[Watched]], names: Sequence[str]) -> bool:
    updates = [update for session in sessions for call in session for update in call.updates]
    return bool(updates) and all(torch.equal(update.after[names[0]], update.after[name]) for update in updates for name in names)


def _uses_sum(sessions: Sequence[Sequence[Watched]], keeper: str, names: Sequence[str]) -> bool:
    """Whether ``.grad`` of the keeper is a multiple of the sum of all gradients, or cut from it, at every update."""
    for call in (call for session in sessions for call in session):
        for update in call.updates:
            if not 0 < update.backwards <= len(call.backwards) or keeper not in update.gradient.samples:
                return False
            total = Gradient().plus(call.backwards[update.backwards - 1].held)
            _join(total, keeper, names)
            if keeper not in total.samples or keeper in passage(total, update.gradient).odd:
                return False
    return True


def _join(gradient: Gradient, keeper: str, names: Sequence[str]) -> None:
    """Add the gradients of the others to the keeper's, and remove them."""
    for name in (name for name in names if name != keeper and name in gradient.samples):
        one = Gradient()
        one.set(keeper, gradient.samples[name], gradient.two[name], gradient.one[name], gradient.largest[name])
        total = gradient.only(keeper).plus(one)
        gradient.set(keeper, total.samples[keeper], total.two[keeper], total.one[keeper], total.largest[keeper])
        gradient.remove(name)


def _measure(held: Gradient, used: Gradient, name: str, sampler: Sampler) -> None:
    """Set the norms of a sum of which a sample is known only, from those of ``.grad``, which is a multiple of it."""
    if sampler.indices[name] is None or name not in held.samples:
        return
    sample = held.samples[name]
    ratio = float(sample @ used.samples[name] / (sample @ sample))
    if ratio > 0:
        held.set(name, sample, used.two[name] / ratio, used.one[name] / ratio, used.largest[name] / ratio)
