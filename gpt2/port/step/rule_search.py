"""Find the rule that gives a dump's parameters from its gradients, up to the rounding of the dump."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from gpt2.port.deadline import Deadline
from gpt2.port.golden_section import least
from gpt2.port.step.clipping import LIMITS, Clip, ClipKind, Norms, clipped
from gpt2.port.step.gradients import role_of
from gpt2.port.step.layouts import Weights
from gpt2.port.step.rules import Array, Fit, Rule, Track, fit
from gpt2.port.step.settings import Settings
from gpt2.port.step.stepping import plainest
from gpt2.port.step.updates import EXACT, EXPLAINED, SINGLE, USUAL, Found, Search

ENTRIES = 256  # of each parameter that are compared
SAME = 1.001  # times the least error
BETAS = ((0.9, 0.95), (0.9, 0.999))


@dataclass(frozen=True)
class Answer:
    """A rule and clipping; ``as_set``: with the rates that the settings say; ``cumulated``: of gradients that are not zeroed."""

    rule: Rule
    clip: Clip | None
    error: float
    as_set: bool
    cumulated: bool = False


def gauged(
    name: str,
    parameters: Sequence[Weights],
    gradients: Sequence[Tensor],
    storage: float,
    noise: float,
    relative: float,
) -> Track | None:
    """Return a parameter's track at entries whose gradient is known well enough; None if there are none.

    ``storage``: the relative rounding of parameters; ``noise`` and ``relative``: the absolute and relative error of gradients.
    """
    before = torch.stack([parameters[step][name].reshape(-1) for step in range(len(gradients))])
    after = torch.stack([parameters[step + 1][name].reshape(-1) for step in range(len(gradients))])
    gradient = torch.stack([g.reshape(-1) for g in gradients])
    doubt = (noise / gradient.abs().clamp(min=1e-300) + relative).amax(0)
    keep = torch.nonzero(doubt < 0.05)[:, 0]
    if not len(keep):
        return None
    if len(keep) > ENTRIES:
        order = keep[gradient[0, keep].abs().argsort()]
        keep = order[torch.linspace(0, len(order) - 1, ENTRIES).round().long()]
    before, after, gradient, doubt = before[:, keep], after[:, keep], gradient[:, keep], doubt[keep]
    change = after - before
    size = change.abs().median(1, keepdim=True).values
    error = storage * (before.abs() + after.abs()) + (doubt + 1e-9) * torch.maximum(size, change.abs()) + 1e-30
    seen = np.ones(len(gradients), dtype=np.bool_)
    return Track(name, before.numpy(), gradient.numpy(), change.numpy(), seen, error.numpy(), role_of(name) in ("norm", "bias"))


@dataclass(frozen=True)
class RuleSearch:
    """The search for one rule on a few parameters, with each clipping where ``clips``.

    ``cumulated``: the tracks of gradients to which those of all steps before are added, with their norms. Behind ``deadline``,
    the answer is the best so far.
    """

    tracks: Sequence[Track]
    settings: Settings
    norms: Norms
    clips: bool = True
    cumulated: Sequence[Track] = ()
    cumulated_norms: Norms | None = None
    deadline: Deadline = field(default_factory=Deadline)

    def best(self) -> Answer:
        """Return the first answer that explains all changes, the usual before the rare; else the one with the least error."""
        best: tuple[Found, Clip | None, bool] | None = None
        for most, clip, summed in self._attempts():
            *_, found = itertools.islice(Search(self.clipped(clip, summed), self.settings).improving(), most)
            if best is None or found.error < best[0].error:
                best = found, clip, summed
            if found.error <= EXPLAINED or self.deadline.passed:
                break
        assert best is not None
        return self._answer(*best)

    def _answer(self, found: Found, clip: Clip | None, cumulated: bool) -> Answer:
        tracks = self.clipped(clip, cumulated)
        steps = range(len(tracks[0].before))
        rates = np.array([self.settings.rate(step) for step in steps]) if self.settings.lr is not None else None
        rules = [found.rule, plainest(found, tracks, self.settings, steps)]
        for rule in rules if rates is not None else ():
            error = max(fit(track, rule, rates).error for track in tracks)
            if error <= EXPLAINED:
                return Answer(rule, clip, error, True, cumulated)
        return Answer(rules[-1], clip, found.error, False, cumulated)

    def clipped(self, clip: Clip | None, cumulated: bool = False) -> list[Track]:
        """Return the tracks with gradients as this clipping makes them."""
        tracks, norms = (self.cumulated, self.cumulated_norms or self.norms) if cumulated else (self.tracks, self.norms)
        return [clipped(track, clip, norms) for track in tracks]

    def _attempts(self) -> Iterator[tuple[int | None, Clip | None, bool]]:
        """Yield how many structures of rules to try with which clipping, and whether gradients are summed."""
        wanted = Clip(ClipKind.NORM, self.settings.clip) if self.settings.clip and self.clips else None
        limits = [limit for limit in (self.settings.clip, *LIMITS) if limit] if self.clips else []
        usual = (ClipKind.NORM, ClipKind.ENTRY, *self._pieces, ClipKind.LARGEST, ClipKind.SUM)
        rare = (ClipKind.SQUARES, ClipKind.MATRICES)
        pairs = [*itertools.product(usual, limits), *itertools.product(rare, limits[:1])]
        clips = [Clip(kind, limit) for kind, limit in pairs]
        yield SINGLE, wanted, False
        for summed in (False, True) if self.cumulated else (False,):
            for clip in dict.fromkeys([wanted, None, *clips]):
                yield USUAL, clip, summed
        for clip in self._nearest() if self.clips and self.settings.clip != 0 else ():
            yield USUAL, clip, False
        for clip in dict.fromkeys([wanted, None]):
            yield None, clip, False

    @property
    def _pieces(self) -> tuple[ClipKind, ...]:
        """The kinds of clipping of each array alone."""
        return (ClipKind.PARAMETER, ClipKind.STACK) if self.norms.stack else (ClipKind.PARAMETER,)

    def _nearest(self) -> Iterator[Clip]:
        """Yield for each kind that cuts arrays or entries the limit with which AdamW comes nearest to the changes."""
        betas = [(self.settings.beta1, self.settings.beta2)] if self.settings.beta1 and self.settings.beta2 else BETAS
        grid = np.linspace(math.log(1e-3), math.log(100), 40)
        for kind in (ClipKind.ENTRY, *self._pieces):

            def error(log: float, kind: ClipKind = kind) -> float:
                tracks = [replace(one, noise=None) for one in self.clipped(Clip(kind, math.exp(log)))]  # not limited, as noise is
                return min(sum(fit(one, Rule(beta1=b1, beta2=b2)).error for one in tracks) for b1, b2 in betas)

            errors = [error(log) for log in grid]
            near = grid[np.argmin(errors)]
            if errors[0] <= SAME * min(errors) + EXACT:  # all is cut off: any smaller limit gives the same changes
                continue
            yield Clip(kind, math.exp(least(error, near - (grid[1] - grid[0]), near + (grid[1] - grid[0]), steps=60)[1]))


def fit_parameter(one: Track, rule: Rule, rates: Array, choices: Sequence[float]) -> tuple[Rule, Fit]:
    """Fit a parameter: with the rates of most and the expected decay, with another one, or with rates of its own."""
    small, one = one.small, replace(one, small=False)
    rules = [rule, replace(rule, coupled=0.0)] if rule.coupled else [rule]
    rules = rules[::-1] if small else rules
    order = [0.0, *choices] if small or (rule.coupled and not small) else list(choices)
    tried: list[tuple[Rule, Fit]] = []
    for each in rules:
        for decay in order:
            decays = decay * rates
            tried.append((each, fit(one, each, rates, decays)))
            if tried[-1][1].error <= EXPLAINED:
                return tried[-1]
    for each in rules:
        free = fit(one, each)
        own = [fit(one, each, free.rates, decay * free.rates) for decay in order]
        tried += [(each, found) for found in (fit(one, each, rates), *own, free)]
    best = min(tried, key=lambda pair: pair[1].error)
    return next(pair for pair in tried if pair[1].error <= max(1.1 * best[1].error, EXPLAINED))
