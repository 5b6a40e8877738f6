"""Parameters that a step ties by hand: it adds their gradients, updates one of them, and copies it into the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpt2.port.step.clipping import passage
from gpt2.port.step.records import Gradient, Sampler, Update, Watched


def join_tied(sessions: Sequence[Sequence[Watched]], names: Sequence[str], sampler: Sampler) -> None:
    """Make one parameter of those that are equal after every update, if one of them is updated by the sum of their gradients.

    ``names``: those that were one tensor before make_step. The others are removed from what was seen.
    """
    calls = [call for session in sessions for call in session]
    updates = [update for call in calls for update in call.updates]
    equal = all(torch.equal(update.after[names[0]], update.after[name]) for update in updates for name in names)

    def uses_sum(update: Update, keeper: str) -> bool:
        """Whether ``.grad`` of the keeper is a multiple of the sum of all gradients, or cut from it."""
        total = Gradient().plus(update.held)
        _join(total, keeper, names)
        return keeper in update.gradient.samples and keeper in total.samples and keeper not in passage(total, update.gradient).odd

    keepers = (one for one in names if all(uses_sum(update, one) for update in updates))
    if len(names) < 2 or not updates or not equal or (keeper := next(keepers, None)) is None:
        return
    for gradient in (one for call in calls for backward in call.backwards for one in (backward.arrived, backward.held)):
        _join(gradient, keeper, names)
    if not sampler.whole(keeper):  # of a sum, a sample is known only: its norms are those of .grad, its multiple
        for update in updates:
            sample = update.held.samples[keeper]
            ratio = float(sample @ update.gradient.samples[keeper] / (sample @ sample))
            if ratio > 0:
                update.held.sizes[keeper] = update.gradient.sizes[keeper].times(1 / ratio)
    for name in set(names) - {keeper}:
        for call in calls:
            call.trains.discard(name)
            call.start.remove(name)
        for update in updates:
            update.gradient.remove(name)
            update.before.pop(name, None)
            update.after.pop(name, None)
        del sampler.parameters[name], sampler.indices[name]


def _join(gradient: Gradient, keeper: str, names: Sequence[str]) -> None:
    """Add the gradients of the other names to the keeper's, and remove them."""
    for name in names:
        if name != keeper and name in gradient.samples:
            gradient.add(keeper, gradient.samples[name], gradient.sizes[name])
            gradient.remove(name)
