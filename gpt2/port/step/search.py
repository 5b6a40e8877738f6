"""Search the rule of a step's updates, and the clipping before it that nothing else shows, from values and gradients alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from gpt2.port.deadline import Deadline
from gpt2.port.golden_section import least
from gpt2.port.step.clipping import Clip, ClipKind, Norms, clipped, spread
from gpt2.port.step.records import Update
from gpt2.port.step.rules import CORRECTIONS, PLACES, Array, Rule, Track, directions, fit
from gpt2.port.step.settings import Settings

EXACT = 1e-8  # relative error of changes that a rule explains
FITS = 1e-6  # the same, of a rule that is known
ROUNDED = 1e-4  # the same, where the author keeps moments or constants in float32
EXPLAINED = 1.0  # the same of changes with noise, in units of it
LATER = 1e-4  # the same in the sessions after the first
PART, ENTRIES = 192, 256  # entries of each parameter that the search uses; that are compared, where they are rounded
BETAS1 = (0.9, 0.95, 0.8, 0.99, 0.0, 0.999, 0.98, 0.5)
BETAS2 = (0.999, 0.95, 0.99, 0.9, 0.98, 0.995, 0.8)
EPSILONS = (1e-8, 1e-6, 1e-5, 1e-7, 1e-10, 1e-12, 1e-4, 1e-3)
MAX_BETA2, MAX_EPS = 0.99999, 1e-2
DECAYS = (0.1, 0.01, 0.001, 0.05, 1e-4, 0.5)
USUAL, SINGLE = 7, 24  # the first structures of rules: those people use; those with one departure from AdamW
STEADY, STEADY_NOISY = 1e-4, 1e-2  # relative spread of rates that are meant to be one; where the parameters are rounded
GRID, STEPS = 32, 44  # limits that are tried of each kind, and steps that refine the best
NEAR = 0.3  # the error at the best of the limits that are tried, above which it is not refined
CUT = 1.001  # times the least error: any smaller limit gives the same changes


# What is searched


@dataclass(frozen=True)
class Rounding:
    """The errors of a dump's numbers: of parameters, relative; of gradients, absolute by parameter, and relative."""

    parameters: float
    gradients: Mapping[str, float]
    relative: float

    def doubts(self, name: str, gradient: Tensor) -> Tensor:
        """Return the largest relative errors (n,) of gradients (K, n)."""
        return (self.gradients[name] / gradient.abs().clamp(min=1e-300) + self.relative).amax(0)


@dataclass(frozen=True)
class Run:
    """One session's updates: a track for each parameter, and the norms of the gradients that it used."""

    tracks: Mapping[str, Track]
    norms: Norms

    @classmethod
    def of(cls, updates: Sequence[Update], names: Sequence[str], norms: Norms, rounding: Rounding | None = None) -> Run:
        """Return the tracks of some parameters that have one."""
        tracks = (track_of(updates, name, name in norms.large, rounding) for name in names)
        return cls({track.name: track for track in tracks if track is not None}, norms)

    @property
    def moving(self) -> list[str]:
        """The parameters that change, and have a gradient."""
        return [name for name, one in self.tracks.items() if bool((one.change != 0).any()) and bool(one.seen.any())]

    def clipped(self, clip: Clip | None, names: Sequence[str]) -> list[Track]:
        """Return the tracks of some parameters with gradients as clipping makes them."""
        return [clipped(self.tracks[name], clip, self.norms) for name in names if name in self.tracks]


def track_of(updates: Sequence[Update], name: str, large: bool, rounding: Rounding | None = None) -> Track | None:
    """Return a parameter's track; with ``rounding``, at entries whose gradients are known well enough, None if there are none.

    ``large``: a matrix or an embedding.
    """
    seen = [name in one.gradient for one in updates]
    gradients = (one.gradient[name].values if name in one.gradient else 0.0 * one.before[name].reshape(-1) for one in updates)
    gradient = torch.stack(list(gradients))
    keep: Tensor | slice = slice(None)
    if rounding is not None:
        doubts = rounding.doubts(name, gradient)
        keep = torch.nonzero(doubts < 0.05)[:, 0]
        if not len(keep) or not all(seen):
            return None
        if len(keep) > ENTRIES:
            order = keep[gradient[0, keep].abs().argsort()]
            keep = order[torch.linspace(0, len(order) - 1, ENTRIES).round().long()]
    sides = ([getattr(one, side)[name].reshape(-1)[keep] for one in updates] for side in ("before", "after"))
    before, after = map(torch.stack, sides)
    change, noise = after - before, None
    if rounding is not None:
        size = torch.maximum(change.abs().median(1, keepdim=True).values, change.abs())
        noise = (rounding.parameters * (before.abs() + after.abs()) + (doubts[keep] + 1e-9) * size + 1e-30).numpy()
    values, small = (before.numpy(), gradient[:, keep].numpy(), change.numpy()), rounding is not None and not large
    return Track(name, *values, np.array(seen), noise, small, tuple(one.call for one in updates))


@dataclass(frozen=True)
class Answer:
    """A rule, and its error relative to the changes, or in units of their noise.

    ``clip``: the clipping before it; ``variant``: the number of the variant of the gradients. ``rates``: those that the settings
    say, if these explain the changes too.
    """

    rule: Rule
    error: float
    clip: Clip | None = None
    variant: int = 0
    rates: Array | None = None


NOTHING = Answer(Rule(), math.inf)


# The rule of some tracks


class Search:
    """The search for a rule that explains ``tracks``, a few parameters together; each keeps its own rates and decays."""

    def __init__(self, tracks: Sequence[Track], settings: Settings) -> None:
        self.noisy = any(track.noise is not None for track in tracks)
        self.enough = EXPLAINED if self.noisy else EXACT
        self.tracks = list(tracks) if self.noisy else [_chosen(track) for track in tracks]
        one, two = settings.beta1, settings.beta2
        self.betas1, self.betas2 = (
            tuple(dict.fromkeys(beta for beta in betas if beta is not None))
            for betas in ((one, *BETAS1, two), (two, *BETAS2, one))
        )
        self.decays = tuple(dict.fromkeys(d for d in (settings.weight_decay, *DECAYS) if d))
        self.sizes = np.array([float((track.change**2).sum()) for track in self.tracks])
        self.size = max(float(self.sizes.sum()), 1e-300)

    def error(self, rule: Rule) -> float:
        if rule.beta2 > MAX_BETA2 or rule.eps > MAX_EPS:  # these make Adam what SGD is
            return math.inf
        return float(self._errors(rule))

    def _errors(self, rule: Rule) -> Array:
        """Return the error of all tracks: the largest where they have noise, else that of all changes together."""
        errors = np.stack([fit(track, rule).error for track in self.tracks])
        found: Array = errors.max(0) if self.noisy else np.sqrt(np.tensordot(self.sizes, errors**2, axes=1) / self.size)
        return found

    def best(self, most: int | None = None) -> Answer:
        """Return the first of ``most`` structures that explains the changes, else the rule with the least error."""
        *_, best = itertools.islice(self.improving(), most)
        return best

    def improving(self) -> Iterator[Answer]:
        """Yield the best rule so far after each structure, the usual before the rare, until one explains the changes."""
        best = NOTHING
        for structure in self._structures():
            found = self._refined(self._from_grid(structure))
            if found.error < best.error / 30 or found.error <= self.enough < best.error:
                best = found
            if best.error <= self.enough:
                break
            yield best
        rule = best.rule
        if rule.kind == "adam" and max(rule.beta1, rule.beta2) < 1e-3:  # moments that hold one step: they are lost
            lost = self._tried(Rule(eps=rule.eps, place=rule.place, coupled=rule.coupled, lost=True))
            best = lost if lost.error <= max(self.enough, 2 * best.error) else best
        yield best

    def _structures(self) -> Iterator[Rule]:
        adam, momentum = Rule(), Rule(kind="sgd", beta1=0.9)
        lost, largest = replace(adam, lost=True), replace(adam, amsgrad=True)
        coupled = [replace(adam, coupled=decay) for decay in self.decays]
        yield from (adam, lost, replace(momentum, beta1=0.0), replace(lost, counted=True), momentum, *coupled[:2])
        departures = [replace(adam, correction=c, place=p) for c, p in itertools.product(CORRECTIONS, PLACES)]
        yield from (one for one in departures if one != adam)
        yield from (largest, replace(momentum, nesterov=True), Rule(kind="lion"))
        yield from (replace(largest, place="inside"), replace(largest, correction="none"))
        for one in coupled:
            yield from (one, replace(one, correction="none"), replace(one, correction="late"))
            yield from (replace(one, place="inside"), replace(one, amsgrad=True))
            yield replace(momentum, coupled=one.coupled)  # with momentum, decay is in the gradient

    def _from_grid(self, rule: Rule) -> Answer:
        """Return the best of the usual constants for a structure."""
        betas1 = self.betas1 if rule.beta1 and not (rule.lost and not rule.counted) else [rule.beta1]
        betas2 = self.betas2 if rule.kind != "sgd" and len(betas1) > 1 else [rule.beta2]
        choices = [replace(rule, beta1=a, beta2=b) for a, b in itertools.product(betas1, betas2)]
        best = self._least(choices)
        if best.error > self.enough and rule.kind == "adam":
            best = min(best, self._least([replace(best.rule, eps=eps) for eps in EPSILONS]), key=lambda one: one.error)
            if best.rule.eps != rule.eps:
                near = [replace(one, eps=best.rule.eps) for one in choices]
                best = min(best, self._least(near), key=lambda one: one.error)
        return best

    def _least(self, rules: list[Rule]) -> Answer:
        """Return the first rule that explains the changes, else the one with the least error; they differ in constants only."""
        first = self._tried(rules[0])
        if first.error <= self.enough or len(rules) == 1:
            return first
        beta1, beta2, eps = np.array([[[rule.beta1], [rule.beta2], [rule.eps]] for rule in rules]).transpose(1, 0, 2)
        errors = self._errors(replace(rules[0], beta1=beta1, beta2=beta2, eps=eps))
        good = np.flatnonzero(errors <= self.enough)
        at = int(good[0]) if len(good) else int(errors.argmin())
        return Answer(rules[at], float(errors[at]))

    def _refined(self, found: Answer) -> Answer:
        """Return the rule with its constants fitted, rounded to the digits that people write where that explains as much.

        Not under noise: of two steps, other betas do what another clipping does.
        """
        if self.noisy or found.error <= EXACT or found.error > 0.5 or found.rule.kind != "adam":
            return found
        found = self._descended(found)
        for eps in (found.rule.eps, *sorted(EPSILONS, key=lambda eps: abs(math.log(eps / (found.rule.eps or 1e-30))))[:3]):
            if found.error <= EXACT:
                break
            tidy = self._tried(_tidy(replace(found.rule, eps=eps)))
            if tidy.error < 10 * found.error:
                again = self._descended(tidy, with_eps=False)
                found = min(found, tidy, again, key=lambda one: one.error)
        tidy = self._tried(_tidy(found.rule))
        return tidy if tidy.error <= max(2 * found.error, EXACT / 10) else found

    def _tried(self, rule: Rule) -> Answer:
        return Answer(rule, self.error(rule))

    def _descended(self, found: Answer, with_eps: bool = True) -> Answer:
        """Return the rule with constants fitted by Gauss and Newton's method, on their logarithms."""
        axes = np.eye(4)[[True, True, with_eps, found.rule.coupled > 0]]
        for _ in range(12):
            x, residual = _numbers(found.rule), self._residual(found.rule)
            columns = [(self._residual(_rule(found.rule, x + 1e-6 * axis)) - residual) / 1e-6 for axis in axes]
            move, *_ = np.linalg.lstsq(np.stack(columns, 1), -residual, rcond=1e-12)
            move = np.clip(move, -2, 2) @ axes
            tries = (self._tried(_rule(found.rule, x + scale * move)) for scale in (1.0, 0.3, 0.1, 0.01))
            better = next((one for one in tries if one.error < found.error), found)
            done = better.error > found.error * 0.99 or better.error <= EXACT / 100
            found = better
            if done:
                break
        return found

    def _residual(self, rule: Rule) -> Array:
        parts = []
        for track in self.tracks:
            one = fit(track, rule)
            moved = one.rates[:, None] * directions(rule, track) + np.nan_to_num(one.decays)[:, None] * track.before
            parts.append((track.change + moved).ravel())
        return np.concatenate(parts) / math.sqrt(self.size)


def _numbers(rule: Rule) -> Array:
    """Return the logarithms of what may be fitted: 1 - beta1, 1 - beta2, eps, and a coupled decay."""
    return np.log(np.maximum([1 - rule.beta1, 1 - rule.beta2, rule.eps, rule.coupled], 1e-30))


def _rule(rule: Rule, x: Array) -> Rule:
    """Return the rule with constants of these logarithms."""
    one, two, eps, coupled = np.exp(np.minimum(x, [0.0, 0.0, 0.0, 5.0])).tolist()
    return replace(rule, beta1=1 - one, beta2=1 - two, eps=eps, coupled=coupled if rule.coupled else 0.0)


def _tidy(rule: Rule) -> Rule:
    """Return the rule with its constants rounded to the digits that people write."""
    eps, coupled = float(f"{rule.eps:.2g}") if rule.eps > 1e-20 else 0.0, float(f"{rule.coupled:.4g}")
    return replace(rule, beta1=round(rule.beta1, 5), beta2=round(rule.beta2, 6), eps=eps, coupled=coupled)


def _chosen(track: Track) -> Track:
    """Return a part of a track: entries whose gradients differ in size, with small ones, where eps shows."""
    if track.before.shape[1] <= PART:
        return track
    size = np.abs(track.gradient).sum(0)
    order = np.argsort(size)
    order = order[size[order] > 0] if bool((size > 0).any()) else order
    return track.part(order[np.unique(np.linspace(0, len(order) - 1, PART).astype(np.int64))])


# Gradients that are clipped, or lack a part


@dataclass(frozen=True)
class RuleSearch:
    """The search for the rule of a few parameters, ``names``, that explains all sessions.

    ``variants``: what the gradients may be that the updates used, each by session; of ``likely`` ones, every clipping is tried
    before any rare rule. ``clips``: how they may be clipped, the likeliest first; ``free``: kinds of clipping whose limit may be
    any. Behind ``deadline``, the answer is the best so far.
    """

    variants: Sequence[Sequence[Run]]
    names: Sequence[str]
    settings: Settings
    clips: Sequence[Clip | None] = (None,)
    free: Sequence[ClipKind] = ()
    likely: int = 1
    deadline: Deadline = field(default_factory=Deadline)

    @property
    def noisy(self) -> bool:
        """Whether the changes are rounded."""
        return any(track.noise is not None for track in self.tracks(NOTHING))

    def tracks(self, answer: Answer, session: int = 0) -> list[Track]:
        """Return the tracks that are searched, with the gradients of an answer."""
        return self.variants[answer.variant][session].clipped(answer.clip, self.names)

    def best(self) -> Answer:
        """Return the first answer that explains all changes, the usual before the rare; else the one with the least error."""
        best, enough = NOTHING, EXPLAINED if self.noisy else FITS if self.free else ROUNDED
        for answer in self._attempts():
            best = answer if best is NOTHING or answer.error < best.error else best
            if self._explains(answer, enough):
                return self._plain(answer)
            if self.deadline.passed:
                break
        return self._plain(best)

    def _explains(self, answer: Answer, enough: float) -> bool:
        """Whether an answer gives the changes of all sessions."""
        return answer.error <= enough and self._later(answer) <= LATER

    def _later(self, answer: Answer) -> float:
        """Return the largest error of a rule in the sessions after the first."""
        later = (track for n in range(1, len(self.variants[answer.variant])) for track in self.tracks(answer, n))
        return max((fit(track, answer.rule).error for track in later), default=0.0)

    def _attempts(self) -> Iterator[Answer]:
        """Yield attempts, the likeliest first: several rules may explain changes that are rounded; an exact one is theirs."""
        variants = range(len(self.variants))
        ways = [[replace(NOTHING, clip=clip, variant=variant) for clip in self.clips] for variant in variants]
        first = [one for some in ways[: 1 if self.noisy else None] for one in some[:2]]
        together = [[one] for one in first] if self.noisy else [first]
        yield self._side_by_side(together[0], SINGLE)
        for one in itertools.chain(*ways[: self.likely]) if len(self.clips) > 2 else ():
            yield self._side_by_side([one], USUAL)
        for search in (True,) if self.noisy else (False, True):
            yield from self._limited(search=search)
        for tries in together:
            yield self._side_by_side(tries, None)
        for some in ways[self.likely :]:
            yield self._side_by_side(some[:1], SINGLE)
            for one in some:
                yield self._side_by_side([one], USUAL)

    def _side_by_side(self, tries: Sequence[Answer], most: int | None) -> Answer:
        """Return the first rule of ``most`` structures that explains all sessions with the gradients of a try; else the nearest.

        Of several that do, one with a usual eps and one rate for all steps, which SGD without its clipping has not.
        """
        last, searches = list(tries), [Search(self.tracks(one), self.settings) for one in tries]

        def oddness(answer: Answer) -> tuple[bool, bool]:
            rates = _rates(self.tracks(answer), answer.rule)
            return min(abs(answer.rule.eps / eps - 1) for eps in EPSILONS) > 0.01, spread(rates) > STEADY

        for bests in itertools.zip_longest(*(itertools.islice(search.improving(), most) for search in searches)):
            pairs = zip(last, bests, strict=True)
            last = [one if best is None else replace(one, rule=best.rule, error=best.error) for one, best in pairs]
            if explained := [one for one in last if self._explains(one, searches[0].enough)]:
                return min(explained, key=oddness)
        return min(last, key=lambda one: one.error)

    # Limits that nobody would guess

    def _limited(self, *, search: bool) -> Iterator[Answer]:
        """Yield rules with the limits of clipping that bring them nearest; with ``search``, also the rules near to these."""
        settings = self.settings
        given = [(settings.beta1, settings.beta2)] if settings.beta1 and settings.beta2 else [(0.9, 0.95), (0.9, 0.999)]
        rules = [Rule(beta1=one, beta2=two) for one, two in given]
        coupled = [replace(rules[0], coupled=settings.weight_decay)] if settings.weight_decay else []
        rules += [] if self.noisy else [*coupled, Rule(kind="sgd", beta1=0.0)]
        for kind, rule in itertools.product(self.free, rules):
            error, clip = self._nearest(kind, rule)
            if clip is not None and search and error > FITS and (error < NEAR or self.noisy):
                tracks = self.tracks(replace(NOTHING, clip=clip))
                rule = Search(tracks, self.settings).best(USUAL if self.noisy else None).rule
                error, clip = self._nearest(kind, rule)
            if clip is not None and (error <= FITS or self.noisy):
                one = Answer(rule, error, clip)
                yield replace(one, error=Search(self.tracks(one), self.settings).error(rule))

    def _nearest(self, kind: ClipKind, rule: Rule) -> tuple[float, Clip | None]:
        """Return the least error of a rule with clipping of one kind, and this clipping; None if all is cut off in it."""
        bounded = [0.0]  # what clipping of this kind bounds: between the least and the largest, a limit changes something
        for run, name in itertools.product(self.variants[0][:2], self.names):
            largest = np.abs(run.tracks[name].gradient).max(1)
            bounded += [*largest, *(largest / 100)] if kind is ClipKind.ENTRY else [*run.norms.of_kind(kind, name)]
        bounded = [float(value) for value in bounded if value > 0] or [1.0]

        def error(log: float) -> float:
            one = Answer(rule, math.inf, Clip(kind, math.exp(log)))
            tracks = [replace(track, noise=None) for track in self.tracks(one)]  # a residual is not limited, as by noise
            return max(Search(tracks, self.settings).error(rule), self._later(one))

        points = np.linspace(math.log(min(bounded) / 10), math.log(max(bounded)), GRID).tolist()
        errors = [error(point) for point in points]
        near, step, lowest = points[int(np.argmin(errors))], points[1] - points[0], min(errors)
        if (lowest > NEAR and not self.noisy) or errors[0] <= CUT * lowest + EXACT:
            return lowest, None
        found, log = least(error, near - step, near + step, STEPS)
        return found, Clip(kind, float(f"{math.exp(log):.7g}"))

    # One of several names of a rule

    def _plain(self, answer: Answer) -> Answer:
        """Return the answer with the rates that the settings say, or with the rule whose rates are the likeliest.

        A factor of a step cannot be told from its rate: moments without correction move a parameter as those do whose eps is
        added before the correction, at other rates. Where noise hides eps, all corrections do.
        """
        tracks, settings, rule = self.tracks(answer), self.settings, answer.rule
        search, steps = Search(tracks, settings), tracks[0].calls or range(len(tracks[0].before))
        expected = np.array([settings.rate(step) for step in steps]) if settings.scheduled else np.ones(len(steps))
        if rule.kind == "adam" and not rule.lost and bool((expected > 0).all()):
            alike = (replace(rule, correction=c, place=p) for p in PLACES for c in CORRECTIONS)
            alike = (one for one in alike if search.error(one) <= max(search.enough, 2 * answer.error))
            close = STEADY_NOISY if self.noisy else STEADY
            rule = next((one for one in alike if spread(_rates(tracks, one) / expected) < close), rule)
        if self.noisy and settings.lr is not None:
            rates = np.array([settings.rate(step) for step in steps])
            for one in (answer.rule, rule):
                error = max(fit(track, one, rates).error for track in tracks)
                if error <= EXPLAINED:
                    return replace(answer, rule=one, error=error, rates=rates)
        return replace(answer, rule=rule)


def _rates(tracks: Sequence[Track], rule: Rule) -> Array:
    """Return the rates of most tracks, (K,)."""
    rates: Array = np.median(np.stack([fit(track, rule).rates for track in tracks]), axis=0)
    return rates
