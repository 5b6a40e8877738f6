"""The update: rules by which an optimizer moves a parameter, how one is recognised, and what of it is not as the settings say.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2; Kingma and Ba, "Adam" (2015); for Lion
Chen et al. (2023), algorithm 2. With gradients g of step t, m = b1 m + (1 - b1) g and v = b2 v + (1 - b2) g^2, the direction is
(m / c1) / (sqrt(v / c2) + eps), with c = 1 - b^t. A parameter p becomes p - rate direction - decay p; rate and decay of each step
are solved by least squares.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gpt2.port.step.causes import FIXES, StepFindings
from gpt2.port.step.settings import StepSettings
from gpt2.port.step.watching import Update, Watched
from gpt2.port.terms.places import joined

FITTED = "this rule gives your own parameters, from your own gradients, at every entry that was compared"
WORDS = {"matrix": "matrices", "embedding": "embeddings", "norm": "norms", "bias": "biases"}
Array = NDArray[np.float64]
ROUNDING = 2 * 2.0**-52  # of a parameter, when a change is added to it in float64
EXACT = 1e-8  # relative error of changes that a rule explains
FITS = 1e-6  # the same, of a rule that is known
ROUNDED = 1e-4  # the same, where the author keeps moments or constants in float32; also in later sessions
CLOSE = 1e-4  # relative difference of constants, or of rates, that are meant to be equal
BETTER = 30  # times smaller is the error of a rarer rule that is preferred
NOISE = 8  # standard errors of a decay, of which a smaller one is none
FEW = 2  # parameters of one role by no known rule, after which no other is searched for
PART = 192  # entries of each parameter that the search uses
BETAS1 = (0.9, 0.95, 0.8, 0.99, 0.0, 0.999, 0.98, 0.5)
BETAS2 = (0.999, 0.95, 0.99, 0.9, 0.98, 0.995, 0.8)
EPSILON = 1e-8
EPSILONS = (EPSILON, 1e-6, 1e-5, 1e-7, 1e-10, 1e-12, 1e-4, 1e-3)
DECAYS = (0.1, 0.01, 0.001, 0.05, 1e-4, 0.5)


@dataclass(frozen=True)
class Rule:
    """An optimizer's formula, without its rate and its decoupled decay.

    ``correction``: the beta whose power corrects each moment, 0 for none; ``late``: the power of the step after. ``place``: eps
    is added to the corrected root, inside the root, or to the root before its correction. ``coupled``: a decay that is added to
    the gradient. ``lost``: the moments begin at zero in every step; ``counted``: but the number of the step, which corrects them,
    does not. Lion's direction is the sign of a first moment, whose average goes on with beta2. SGD that is late is Nesterov's.
    """

    kind: Literal["adam", "sgd", "lion"] = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = EPSILON
    correction: tuple[int, int] = (1, 2)
    late: bool = False
    place: Literal["outside", "inside", "before"] = "outside"
    amsgrad: bool = False
    coupled: float = 0.0
    lost: bool = False
    counted: bool = False


# How a formula departs from AdamW's: a field of the rule and its value, the cause, and words.
DEPARTURES: tuple[tuple[str, Any, str, str], ...] = (
    ("lost", True, "momentum-lost", "the moments are zero at the beginning of each step"),
    ("correction", (0, 0), "bias-correction-missing", "neither moment is divided by 1 - beta**t"),
    ("correction", (1, 0), "bias-correction-missing", "the second moment is not divided by 1 - beta**t"),
    ("correction", (0, 2), "bias-correction-missing", "the first moment is not divided by 1 - beta**t"),
    ("late", True, "bias-correction-step", "the factors 1 - beta**t are those of step t + 1"),
    ("correction", (2, 1), "bias-correction-step", "the factor 1 - beta**t of each moment is the other's"),
    ("correction", (1, 1), "bias-correction-step", "the factor 1 - beta**t of the second moment is that of the first"),
    ("correction", (2, 2), "bias-correction-step", "the factor 1 - beta**t of the first moment is that of the second"),
    ("place", "inside", "eps-inside-root", "the divisor is sqrt(v + {eps:.4g})"),
    ("place", "before", "eps-before-correction", "{eps:.4g} is added to sqrt(v) before its correction"),
    ("amsgrad", True, "amsgrad", "the largest second moment so far is used"),
)
FACTORS = ((1, 0), (0, 2), (2, 1), (2, 2))  # corrections that differ from another one by a factor of each step alone


class Track(NamedTuple):
    """One parameter over K updates: values before, gradients, and changes, each (K, n); ``seen``: whether it had a gradient."""

    before: Array
    gradient: Array
    change: Array
    seen: NDArray[np.bool_]

    @classmethod
    def of(cls, updates: Sequence[Update], name: str) -> "Track":
        """Return the track of a parameter over a session."""
        before, after = (torch.stack([getattr(one, side)[name] for one in updates]).numpy() for side in ("before", "after"))
        gradients = [one.gradient[name].values if name in one.gradient else 0 * one.before[name] for one in updates]
        seen = np.array([name in one.gradient for one in updates])
        return cls(before, torch.stack(gradients).numpy(), after - before, seen)

    @property
    def sample(self) -> "Track":
        """Entries whose gradients differ in size, with small ones, where eps shows."""
        size = np.abs(self.gradient).sum(0)
        order = np.argsort(size)[(size == 0).sum() if size.any() else 0 :]
        index = order[np.unique(np.linspace(0, len(order) - 1, PART).astype(np.int64))]
        return Track(self.before[:, index], self.gradient[:, index], self.change[:, index], self.seen)


def directions(rule: Rule, track: Track) -> Array:
    """Return the directions (K, n) in which a rule moves a parameter, from its own values and gradients."""
    out, kept = np.zeros(track.before.shape), rule.counted or not rule.lost
    g = track.gradient[track.seen] + rule.coupled * track.before[track.seen]
    m = _averaged((1 - rule.beta1 * (rule.kind != "sgd")) * g, rule.beta1, rule.lost)
    m = g + rule.beta1 * m if rule.kind == "sgd" and rule.late else m
    if rule.kind == "adam":
        v = _averaged((1 - rule.beta2) * g * g, rule.beta2, rule.lost)
        most = np.maximum.accumulate(v) if rule.amsgrad and not rule.lost else v
        betas = [(0.0, rule.beta1, rule.beta2)[one] for one in rule.correction]
        c1, c2 = (np.array([1 - beta ** (1 + rule.late + n * kept) for n in range(len(g))])[:, None] for beta in betas)
        inside, before, outside = ((rule.place == place) * rule.eps for place in ("inside", "before", "outside"))
        root = np.sqrt(most / c2 + inside) + before / np.sqrt(c2) + outside
        m = m / (c1 * np.where(root == 0, 1.0, root))
    elif rule.kind == "lion":
        slow = _averaged((1 - rule.beta2) * g, rule.beta2, rule.lost)
        m = np.sign((1 - rule.beta1) * g + rule.beta1 * np.concatenate([0 * g[:1], slow[:-1]]))
    out[track.seen] = m
    return out


def _averaged(moments: Array, beta: float, lost: bool) -> Array:
    """Add to new moments (K, n), in place, those of the step before times beta, if they are not ``lost``."""
    for t in range(1, 1 if lost else len(moments)):
        moments[t] += beta * moments[t - 1]
    return moments


@dataclass(frozen=True)
class RuleFit:
    """A rule on one parameter: rates and decays (K,), NaN if unknown, relative error; ``doubts``: of each rate, by rounding."""

    rule: Rule
    rates: Array
    decays: Array
    error: float
    doubts: Array

    @property
    def decay(self) -> float | None:
        """The decay over the rate, or that of the gradient; None if it cannot be known."""
        known = ~np.isnan(self.decays) & (np.abs(self.rates) > 0)
        if self.rule.coupled or not known.any():
            return self.rule.coupled or None
        values = self.decays[known] / self.rates[known]
        value = float(np.median(np.where(self.rates[known] < 0, abs(values), values)))  # a step that climbs may decay or grow
        return 0.0 if abs(value) < 1e-6 else value


def fit(track: Track, rule: Rule) -> RuleFit:
    """Fit the rates and decays of each step to ``change = -rate direction - decay before``."""
    change, before, direction = track.change, track.before, directions(rule, track)
    uu, up, pp = (direction * direction).sum(-1), (direction * before).sum(-1), (before * before).sum(-1)
    ud, pd = -(direction * change).sum(-1), -(before * change).sum(-1)
    determinant = uu * pp - up * up
    both = determinant > 1e-9 * uu * pp
    safe = np.where(both, determinant, 1.0)
    rates = np.where(both, (pp * ud - up * pd) / safe, ud / np.where(uu > 0, uu, np.inf))
    decays = np.where(both, (uu * pd - up * ud) / safe, np.nan)
    residual = change + rates[:, None] * direction + np.nan_to_num(decays)[:, None] * before
    sigma = np.linalg.norm(residual, axis=1) / np.sqrt(len(before[0]) * np.where(pp > 0, pp, np.inf))
    decays = np.where(np.abs(decays) < NOISE * sigma, 0.0, decays)
    left = float(np.linalg.norm(residual)) - ROUNDING * float(pp.sum()) ** 0.5
    error = max(0.0, left) / (float(np.linalg.norm(change)) or np.inf)
    return RuleFit(rule, rates, decays, error, ROUNDING * np.sqrt(pp / np.where(uu > 0, uu, np.inf)))


def variants(settings: StepSettings) -> list[Rule]:
    """Return the table of rules that people write: AdamW first, and the usual mistakes before the rare."""
    adam, sgd = Rule(beta1=settings.beta1 or 0.9, beta2=settings.beta2 or 0.999), Rule("sgd", 0.0)
    momentum = replace(sgd, beta1=0.9)
    departures: list[dict[str, Any]] = [{field: value} for field, value, *_ in DEPARTURES if value not in FACTORS]
    lost, *others = (replace(adam, **one) for one in departures)
    rules = [adam, lost, sgd, replace(lost, counted=True), momentum, replace(momentum, late=True)]
    rules += [replace(adam, coupled=decay) for decay in (settings.weight_decay, *DECAYS) if decay]
    rules += [*others, replace(adam, beta1=0.0, correction=(0, 0))]
    rules += [replace(one, **two) for one in others for two in departures[1:]]
    rules += [*(replace(one, coupled=settings.weight_decay or 0.01) for one in (*others, momentum)), Rule("lion", beta2=0.99)]
    return list(dict.fromkeys(rules))


def constants(rule: Rule, settings: StepSettings) -> Iterator[Rule]:
    """Yield a rule with other usual betas, also swapped, and AdamW with another eps too; then with another eps alone."""
    adam, given = rule.kind == "adam", (settings.beta1, settings.beta2)
    firsts = [*filter(None, given), *BETAS1] if rule.beta1 else [0.0]
    seconds = [rule.beta2] if rule.kind == "sgd" else [*filter(None, given), *BETAS2]
    plain = rule == Rule(beta1=rule.beta1, beta2=rule.beta2)
    for a, b in itertools.product(firsts, seconds) if not rule.lost or rule.counted else ():
        yield from (replace(rule, beta1=a, beta2=b, eps=eps) for eps in (rule.eps, *(EPSILONS if plain else ())))
    yield from (replace(rule, eps=eps) for eps in (EPSILONS if adam else ()))


def recognised_rule(tracks: Sequence[Track], settings: StepSettings, expected: Array | None = None) -> tuple[Rule, float]:
    """Return the rule that moved some parameters, and its error: AdamW as the settings say, or the first of the table that does.

    ``expected``: the rates (K,) of the settings. A factor of a step cannot be told from its rate: moments without correction move
    a parameter as those do whose eps is added before the correction, at other rates. So rates that are steady beside the expected
    ones decide between rules that give the same changes; or beside the decays, where nothing is said.
    """
    tracks, table = [track.sample for track in tracks], variants(settings)
    best, error = table[0], np.inf
    for number, rule in enumerate(itertools.chain(table, *(constants(rule, settings) for rule in table))):
        if error <= (EXACT if number < len(table) else FITS):
            break
        errors = (fit(track, rule).error for track in tracks)
        if len(own := [*itertools.takewhile(lambda one: one < error / BETTER or one <= EXACT, errors)]) == len(tracks):  # noqa: B023
            best, error = rule, max(own)
    decays: Array = np.median([fit(track, best).decays for track in tracks], axis=0)
    expected = expected if expected is not None else decays if bool((decays > 0).all()) else np.ones_like(decays)
    if best.kind != "adam" or best.lost or not bool((expected > 0).all()):
        return best, error
    plain = replace(best, correction=(1, 2), late=False)
    rows: list[dict[str, Any]] = [{}, *({name: value} for name, value, *_ in DEPARTURES if name in ("correction", "late"))]
    alike = [replace(plain, place=place, **row) for place in ("outside", "inside", "before") for row in rows]
    for one in (one for one in alike if max(fit(track, one).error for track in tracks) <= max(EXACT, 2 * error)):
        if steady(np.median([fit(track, one).rates for track in tracks], axis=0) / expected):
            return one, error
    return best, error


def spread(values: Sequence[float] | Array) -> float:
    """Return the difference of the largest and the least value, over the largest one's size."""
    return float(max(values) - min(values)) / (float(max(map(abs, values))) or np.inf)


def steady(values: Array) -> bool:
    """Return whether rates are meant to be equal."""
    return spread(values) <= CLOSE


class StepMoves:
    """The rule and fit of each parameter that moves; ``odd``: without a rule. ``kept``: moments go on from session to session."""

    def __init__(
        self, findings: StepFindings, sessions: Sequence[Sequence[Watched]], settings: StepSettings, roles: Mapping[str, str]
    ) -> None:
        self.findings, self.settings, self.roles = findings, settings, roles
        self.by_optimizer = any(call.by_optimizer for call in sessions[0])
        self.calls = np.array([number for number, call in enumerate(sessions[0]) for _ in call.updates])
        first, *later = self.sessions = [[update for call in calls for update in call.updates] for calls in sessions]
        moving = [n for n in first[0].before if any(u.moves(n) for u in first) and any(n in u.gradient for u in first)]
        self.fits: dict[str, RuleFit] = {}
        self.odd: list[str] = []
        self.kept, self.unknown = False, True
        if not (moving and any(update.gradient.total for update in first)):
            return
        tracks = {name: Track.of(first, name) for name in moving}
        names = [name for name in moving if roles[name] == "matrix"] or moving
        said = np.array([settings.rate(call) for call in self.calls]) if settings.scheduled else None
        chosen = [tracks[names[part * len(names) // 3]] for part in (1, 2)]
        self.rule, self.error = recognised_rule(chosen, settings, said)
        for name, track in tracks.items():
            self._fit(name, track)
        self._test_later([session for session in later if session], tracks)
        self.unknown = self.error > ROUNDED or len(self.known) < len(self.odd)  # what the best explains, it does by chance

    @property
    def known(self) -> dict[str, RuleFit]:
        return {name: one for name, one in self.fits.items() if name not in self.odd}

    def _fit(self, name: str, track: Track) -> None:
        """Fit a parameter by the rule of most, by those of others, without or with a coupled decay, or by one of its own."""
        found = [fit(track, self.rule)]
        if found[0].error > FITS:
            known = dict.fromkeys([self.rule, *(one.rule for one in self.known.values())])
            decays = (0.0, self.settings.weight_decay or 0.0)
            more = [one for rule in known for one in (rule, *(replace(rule, coupled=decay) for decay in decays))]
            found += [fit(track, one) for one in more]
        alike = sum(self.roles[one] == self.roles[name] for one in self.odd)
        if self.error <= ROUNDED < min(one.error for one in found) and alike < FEW:
            found.append(fit(track, recognised_rule([track], self.settings)[0]))
        self.fits[name] = best = min(found, key=lambda one: one.error * (1 if one.rule == self.rule else BETTER))
        self.odd += [name] * (best.error > (ROUNDED if self.error > FITS else FITS))

    def _test_later(self, sessions: Sequence[Sequence[Update]], tracks: dict[str, Track]) -> None:
        """Test the rules in later sessions, from moments of zero or those that the session before left."""
        for session in sessions:
            later = {name: Track.of(session, name) for name in self.known}
            moved = {name: one.rule for name, one in self.known.items() if later[name].change.any()}
            rest = [name for name, rule in moved.items() if fit(later[name], rule).error > ROUNDED]
            tracks = {n: Track(*(np.concatenate(both) for both in zip(tracks[n], later[n], strict=True))) for n in rest}
            failed = [name for name in rest if fit(tracks[name], moved[name]).error > ROUNDED]
            if rest:
                self.kept = 2 * len(rest) - len(failed) > len(moved)
                self.odd += failed if len(failed) > len(self.fits) // 4 else []
                return
            tracks = later

    def _compare_rates(self) -> None:
        """Set ``rates`` (K,), those of most parameters without decay, ``factors`` of others, and ``loose``: if they vary."""
        fits = list(self.known.values())
        plain = [one.rates for one in fits if np.abs(np.nan_to_num(one.decays)).max() <= 1e-6 * np.abs(one.rates).max()]
        self.rates: Array = np.median(plain or [one.rates for one in fits], axis=0)
        self.factors, self.loose, wanted = dict[str, float](), list[str](), self.settings.weight_decay
        self.expected = np.array([self.settings.rate(call) if self.settings.lr is not None else np.nan for call in self.calls])
        own = [one for one in fits if one.decay and not one.rule.coupled and wanted and not self.by_optimizer]
        decays, rates = (np.nanmedian([getattr(one, kind) for one in own] or [[0]], axis=0) for kind in ("decays", "rates"))
        wrong = bool(own) and not _same(rates, self.expected)  # torch's optimizers multiply both by one rate
        self.decays_right = wrong and _same(decays, (wanted or 0) * self.expected)
        for name, one in self.known.items():
            live = np.abs(self.rates) > 100 * one.doubts
            factors = one.rates[live] / self.rates[live] if live.any() else np.ones(1)
            if np.abs(factors - 1).max() > 0.01:
                self.factors[name] = float(np.median(factors))
                self.loose += [name] * (spread(factors) >= 0.01)

    def judge(self) -> None:
        """Add the causes in how parameters move."""
        error = max(one.error for one in self.fits.values())
        self.findings.differ("update", error)
        if self.odd:
            words = f"no known rule gives the change of {joined(self.findings.places(self.odd))} (error {error:.1e})"
            self.findings.leave_open("update", words)
        if self.unknown:
            return
        self._compare_rates()
        rule, at = self.rule, f"at a rate of {_listed(self.rates)}"
        name = "RMSprop" if rule.beta1 < 1e-6 and rule.correction == (0, 0) else "AdamW"
        name = {"sgd": f"SGD with a momentum of {rule.beta1:.4g}", "lion": "Lion"}.get(rule.kind, name)
        if name != "AdamW":
            self._add("optimizer-sgd" if rule.kind == "sgd" else "optimizer-other", f"{name}, {at}")
            return
        for name, value, id, words in DEPARTURES:
            if getattr(rule, name) == value and not (rule.lost and name in ("correction", "late", "place")):
                self._add(id, words.format(eps=rule.eps))
        self._constants(rule)
        self._rates()
        if others := [name for name, one in self.known.items() if one.rule.kind == "sgd"]:
            self._add("optimizer-sgd", "these go by SGD, unlike the others", others)
        values = {name: decay for name, one in self.known.items() if (decay := one.decay) is not None}
        if coupled := [name for name in values if self.fits[name].rule.coupled]:
            how = "is added to the gradient, and so divided by the root of its second moment"
            detail = f"{median(values[name] for name in coupled):.4g} times the parameter {how}"
            beta1, beta2 = self.settings.beta1 or rule.beta1, self.settings.beta2 or rule.beta2
            fix = FIXES["decay-coupled"].replace("0.9, 0.95", f"{beta1:.6g}, {beta2:.6g}")
            self._add("decay-coupled", detail, coupled, fix)
        self._decays(values, self.settings.weight_decay, bool(coupled))
        if self.kept:
            self._add("momentum-kept", "the first step after a new make_step goes on with the moments of the last")

    def _add(self, id: str, detail: str, where: str | Collection[str] = "optimizer", fix: str = "") -> None:
        self.findings.add(id, where, detail, FITTED, fix)

    def _read_off(self, words: str) -> None:
        self.findings.notes.append(f"read off: {words}")

    def _constants(self, rule: Rule) -> None:
        given, betas = (self.settings.beta1, self.settings.beta2), (rule.beta1, rule.beta2)
        said = f"betas of {rule.beta1:.6g} and {rule.beta2:.6g}"
        right = (0.9 if given[0] is None else given[0], 0.95 if given[1] is None else given[1])
        fix = f"torch.optim.AdamW(groups, lr, betas=({right[0]:g}, {right[1]:g}), eps=1e-8)"
        pairs = (zip(order, given, strict=True) for order in (betas, betas[::-1]))
        wrong, unlike = (any(b is not None and abs(a - b) > CLOSE * (1 - b) for a, b in pair) for pair in pairs)
        swapped = not unlike and (rule.beta1 > rule.beta2 or None not in given)
        if not rule.lost and (wrong or (given == (None, None) and swapped)):
            self._add("betas-swapped" if swapped else "betas-wrong", said, fix=fix)
        elif not rule.lost and None in given:
            self._read_off(said)
        if rule.place == "outside" and rule.eps != EPSILON:
            if (self.settings.lr, *given, self.settings.weight_decay, self.settings.clip) == (None,) * 5:
                self._read_off(f"an eps of {rule.eps:.4g}")
            else:  # then it is AdamW's
                self._add("eps-wrong", f"an eps of {rule.eps:.4g}, not {EPSILON:g}", fix=fix)

    def _rates(self) -> None:
        settings, rates, expected = self.settings, self.rates, self.expected
        if constant := {name: factor for name, factor in self.factors.items() if name not in self.loose}:
            least, most = (pick(constant.values()) for pick in (min, max))
            times = f"{least:.4g}" + f" to {most:.4g}" * (most - least > 0.01) + " times that of the others"
            id = "parameter-twice" if least > 1.98 and most < 2.02 else "rate-wrong"
            self._add(id, f"the rate of these parameters is {times}", list(constant))
        own = [self.known[name].rates for name in self.loose]
        if not (self.by_optimizer or all(_same(one, own[0]) for one in own)):
            self._add("optimizer-other", "the rates of these change from step to step, each in its own way", self.loose)
            return  # the others' are no schedule
        if off := [name for name in self.loose if not (settings.scheduled and _same(self.known[name].rates, expected))]:
            listed = _listed(self.known[off[0]].rates)
            self._add("schedule-wrong", f"a rate of {listed}, where that of the others is {_listed(rates)}", off)
        where: str | list[str] = [one for one in self.known if one not in self.factors] if len(off) < len(own) else "optimizer"
        if settings.lr is None or not (steady(rates) or settings.scheduled or self.decays_right):
            self._read_off(f"a rate of {_listed(rates)}{'' if steady(rates) else ' (it changes from step to step)'}")
            return
        shifted = (np.array([settings.rate(max(0, call + by)) for call in self.calls]) for by in (1, -1))
        said = f"a rate of {_listed(rates)}, not {_listed(expected)}" + "; the decay is right as it is" * self.decays_right
        if _same(rates, expected):
            return
        apart = rates[expected != 0] / expected[expected != 0]
        if self.decays_right and not (steady(apart) or steady(rates)):
            words = f"the decay is of the right rate, and the rest {_listed(apart)} times what it should be"
            self._add("bias-correction-step", words)
        elif which := [words for words, one in zip(("after", "before"), shifted, strict=True) if _same(rates, one)]:
            self._add("schedule-step", f"the rate of each step is that of the one {which[0]}: {_listed(rates)}", where)
        elif expected.any() and steady(apart):
            fix = f'for group in optimizer.param_groups: group["lr"] = {expected[0]:g}' if steady(expected) else ""
            self._add("rate-wrong", said, where, fix)
        else:
            self._add("schedule-wrong", said, where)

    def _decays(self, values: dict[str, float], wanted: float | None, coupled: bool) -> None:
        """Add the causes in the decays of parameters: which of them decay, by how much, and how."""
        decaying = {role: [name for name in values if values[name] and self.roles[name] == role] for role in WORDS}
        if wanted is None:
            sizes = {WORDS[role]: f"{median(values[n] for n in names):.4g}" for role, names in decaying.items() if names}
            on = {size: ", ".join(role for role, own in sizes.items() if own == size) for size in sizes.values()}
            words = ", and ".join(f"of {size}, on {roles}" for size, roles in on.items())
            self._read_off(f"a weight decay {words}" if on else "no weight decay")
            return
        large = [name for name in values if self.roles[name] in ("matrix", "embedding")]
        if small := [name for name in values if values[name] and name not in large]:
            id = "decay-on-biases" if not decaying["norm"] else "decay-on-all" if decaying["bias"] else "decay-on-norms"
            self._add(id, "these decay too", small)
        names, bare = ([name for name in large if bool(values[name]) is decays] for decays in (True, False))
        if wanted and bare:
            embeddings = decaying["matrix"] and all(self.roles[name] == "embedding" for name in bare)
            self._add("decay-not-on-embeddings" if embeddings else "decay-missing", "these do not decay", bare)
        if not names:
            return
        names = [name for name in names if name not in self.factors] or names
        if wanted and not coupled:
            decays = np.stack([self.fits[name].decays for name in names])
            lacking = 1 - np.stack([self.fits[name].rates for name in names]) / np.where(self.rates == 0, np.nan, self.rates)
            after = (np.abs(lacking - decays) < 0.1 * np.abs(decays)) | (self.rates == 0)
            if after.all() and len(names) < len(self.fits):
                self._add("decay-after-update", "the decay is of the parameter as updated, not as it was", names)
            raw = np.nanmedian(decays, axis=0)
            if (np.abs(raw / wanted - 1) < 1e-3).all() and abs(float(np.median(self.rates)) - 1) > 1e-3:
                self._add("decay-without-rate", f"in each step {wanted:g} of the parameter is taken off, at any rate", names)
                return
        value = median(values[name] for name in names)
        if self.decays_right:  # of the rate that the settings say
            return
        if not wanted or abs(value / wanted - 1) > (1e-2 if coupled else 1e-3):
            self._add("decay-wrong", f"a decay of {value:.4g}, not {wanted:g}", names)
        elif not coupled:
            own = np.median([self.fits[name].rates for name in names], axis=0)
            live = (np.abs(own) > 0.01 * np.abs(own).max()) & (raw != 0)
            if live.any() and spread(np.abs(raw[live] / own[live])) > 0.05:
                self._add("decay-wrong", f"a decay of {value:.4g} in most steps, but not in each", names)


def _listed(rates: Array) -> str:
    """Return rates in words: one number, or the first few."""
    if steady(rates):
        return f"{float(np.median(rates)):.6g}"
    return ", ".join(f"{rate:.4g}" for rate in rates[:4]) + (", ..." if len(rates) > 4 else "")


def _same(one: Array, other: Array) -> bool:
    return bool((np.abs(one - other) <= CLOSE * np.abs(other).max()).all())
