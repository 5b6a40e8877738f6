"""How a step moves each parameter, by which rule, and what of that is not as the settings say."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch

from gpt2.port.step.causes import StepFindings
from gpt2.port.step.records import Update
from gpt2.port.step.rules import DEPARTURES, FITS, ROUNDED, Array, Rule, RuleFit, Track, fit, recognised_rule, spread
from gpt2.port.step.settings import StepSettings
from gpt2.port.terms.places import joined

FITTED = "this rule gives your own parameters, from your own gradients, at every entry that was compared"
EPSILON = 1e-8
CLOSE = 1e-4  # relative difference of constants that are meant to be equal
WORDS = {"matrix": "matrices", "embedding": "embeddings", "norm": "norms", "bias": "biases"}


def tracks_of(updates: Sequence[Update], names: Collection[str]) -> dict[str, Track]:
    """Return the tracks of some parameters over a session."""
    tracks = {}
    for name in names:
        before, after = (torch.stack([getattr(one, side)[name] for one in updates]).numpy() for side in ("before", "after"))
        seen = np.array([name in one.gradient for one in updates])
        gradients = [one.gradient[name].values if name in one.gradient else 0 * one.before[name] for one in updates]
        tracks[name] = Track(before, torch.stack(gradients).numpy(), after - before, seen)
    return tracks


class StepMoves:
    """The rule and the fit of each parameter that moves in the first session; ``odd``: those that no rule explains.

    ``kept``: moments go on from one session to the next. :meth:`judge` adds the causes to ``findings``.
    """

    def __init__(
        self, findings: StepFindings, sessions: Sequence[Sequence[Update]], settings: StepSettings, roles: Mapping[str, str]
    ) -> None:
        self.findings, self.settings, self.roles, first = findings, settings, roles, sessions[0]
        self.calls = np.array([one.call for one in first])
        moving = [n for n in first[0].before if any(u.moves(n) for u in first) and any(n in u.gradient for u in first)]
        self.fits: dict[str, RuleFit] = {}
        self.odd: list[str] = []
        self.factors: dict[str, float] = {}
        self.kept = False
        if not moving:
            return
        tracks, names = tracks_of(first, moving), [name for name in moving if roles[name] == "matrix"] or moving
        said = np.array([settings.rate(call) if settings.scheduled else 1.0 for call in self.calls])
        chosen = [tracks[names[part * len(names) // 3]] for part in (1, 2)]
        rule, error = recognised_rule(chosen, settings, np.where(said == 0, np.nan, said))
        for name, track in tracks.items():
            self._fit(name, track, rule, error)
        self._test_later(sessions[1:], tracks)
        if self.known:
            self._compare_rates()

    @property
    def rule(self) -> Rule:
        """The rule of most parameters."""
        used = [one.rule for one in self.fits.values()]
        return max(dict.fromkeys(used), key=used.count)

    @property
    def known(self) -> dict[str, RuleFit]:
        return {name: one for name, one in self.fits.items() if name not in self.odd}

    def _fit(self, name: str, track: Track, rule: Rule, error: float) -> None:
        """Fit a parameter by the rule of most, by those of others, without or with a coupled decay, or by one of its own."""
        found = fit(track, rule)
        if found.error > FITS:
            tried = dict.fromkeys([rule, *(one.rule for one in self.known.values())])
            decays = (None, 0.0, self.settings.weight_decay or 0.0)
            every = (one if decay is None else replace(one, coupled=decay) for decay in decays for one in tried)
            found = min((fit(track, one) for one in every), key=lambda one: one.error * (1.0 if one.rule == rule else 1.1))
        if found.error > FITS and error <= ROUNDED:
            own = fit(track, recognised_rule([track], self.settings)[0])
            found = own if own.error < found.error / 30 else found
        self.fits[name] = found
        self.odd += [name] * (found.error > (ROUNDED if error > FITS else FITS))

    def _test_later(self, sessions: Sequence[Sequence[Update]], tracks: dict[str, Track]) -> None:
        """Test the rules in later sessions, from moments of zero or those that the session before left."""
        for session in sessions:
            later = tracks_of(session, self.known)
            moved = {name: one.rule for name, one in self.known.items() if bool((later[name].change != 0).any())}
            rest = [name for name, rule in moved.items() if fit(later[name], rule).error > ROUNDED]
            failed = [name for name in rest if fit(later[name], moved[name], tracks[name]).error > ROUNDED]
            self.kept = 2 * len(rest) - len(failed) > len(moved)
            if rest:
                self.odd += failed if len(failed) > len(self.fits) // 4 else []
                return
            tracks = later

    def _compare_rates(self) -> None:
        """Set ``rates`` (K,), those of most parameters without decay, and ``factors``: what the rates of others are of them."""
        fits = list(self.known.values())
        plain = [one for one in fits if np.abs(np.nan_to_num(one.decays)).max() <= 1e-6 * np.abs(one.rates).max()] or fits
        self.rates: Array = np.median(np.stack([one.rates for one in plain]), axis=0)
        for name, one in self.known.items():
            live = np.abs(self.rates) > 100 * one.doubts
            factor = median((one.rates[live] / self.rates[live]).tolist()) if bool(live.any()) else 1.0
            if abs(factor - 1) > 0.01:
                self.factors[name] = factor

    def judge(self) -> None:
        """Add the causes in how parameters move."""
        error = max(one.error for one in self.fits.values())
        self.findings.differ("update", error)
        if self.odd:
            words = f"no known rule gives the change of {joined(self.findings.places(self.odd))} (error {error:.1e})"
            self.findings.leave_open("update", words)
        if not self.known:
            return
        rule, at = self.rule, f"at a rate of {_listed(self.rates)}"
        if rule.kind != "adam":
            self._add("optimizer-sgd", f"SGD{f' with a momentum of {rule.beta1:.4g}' if rule.beta1 else ''}, {at}")
            return
        if rule.beta1 < 1e-6 and rule.correction == "none":
            self._add("optimizer-other", f"RMSprop, {at}: no first moment, no correction")
            return
        for name, value, id, words in DEPARTURES:
            if getattr(rule, name) == value and not (rule.lost and name in ("correction", "place")):
                self._add(id, words.format(eps=rule.eps))
        self._constants(rule)
        self._rates()
        coupled = {name: one.rule.coupled for name, one in self.known.items() if one.rule.coupled}
        values = {name: decay for name, one in self.known.items() if (decay := one.decay) is not None} | coupled
        if coupled:
            how = "is added to the gradient, and so divided by the root of its second moment"
            self._add("decay-coupled", f"{median(coupled.values()):.4g} times the parameter {how}", list(coupled))
        self._decays(values, self.settings.weight_decay, bool(coupled))
        if self.kept:
            self._add("momentum-kept", "the first step after a new make_step goes on with the moments of the last")

    def _add(self, id: str, detail: str, where: str | Collection[str] = "optimizer", fix: str = "") -> None:
        self.findings.add(id, where, detail, FITTED, fix)

    def _read_off(self, words: str) -> None:
        self.findings.notes.append(f"read off: {words}")

    def _constants(self, rule: Rule) -> None:
        given, said = (self.settings.beta1, self.settings.beta2), f"betas of {rule.beta1:.6g} and {rule.beta2:.6g}"
        right = (0.9 if given[0] is None else given[0], 0.95 if given[1] is None else given[1])
        fix = f"torch.optim.AdamW(groups, lr, betas=({right[0]:g}, {right[1]:g}), eps=1e-8)"

        def differ(one: float, other: float) -> bool:
            return any(b is not None and abs(a - b) > CLOSE * (1 - b) for a, b in zip((one, other), given, strict=True))

        swapped = not differ(rule.beta2, rule.beta1) and (rule.beta1 > rule.beta2 or None not in given)
        if not rule.lost and (differ(rule.beta1, rule.beta2) or (given == (None, None) and swapped)):
            self._add("betas-swapped" if swapped else "betas-wrong", said, fix=fix)
        elif not rule.lost and None in given:
            self._read_off(said)
        if rule.place == "outside" and rule.eps != EPSILON:
            if (self.settings.lr, *given, self.settings.weight_decay, self.settings.clip) == (None,) * 5:
                self._read_off(f"an eps of {rule.eps:.4g}")
            else:  # then it is AdamW's
                self._add("eps-wrong", f"an eps of {rule.eps:.4g}, not {EPSILON:g}", fix=fix)

    def _rates(self) -> None:
        settings, rates = self.settings, self.rates
        if self.factors:
            times = median(self.factors.values())
            id = "parameter-twice" if abs(times - 2) < 0.02 else "rate-wrong"
            self._add(id, f"the rate of these parameters is {times:.4g} times that of the others", list(self.factors))
        if settings.lr is None or not (spread(rates) <= CLOSE or settings.scheduled):
            self._read_off(f"a rate of {_listed(rates)}" + ("" if spread(rates) <= CLOSE else " (it changes from step to step)"))
            return
        # the rates that the settings say, and those of the steps after and before
        expected, *shifted = (np.array([settings.rate(max(0, call + by)) for call in self.calls]) for by in (0, 1, -1))
        said = f"a rate of {_listed(rates)}, not {_listed(expected)}"
        if _same(rates, expected):
            return
        if which := [words for words, one in zip(("after", "before"), shifted, strict=True) if _same(rates, one)]:
            self._add("schedule-step", f"the rate of each step is that of the one {which[0]}: {_listed(rates)}")
        elif expected.any() and spread(rates[expected != 0] / expected[expected != 0]) <= CLOSE:
            self._add("rate-wrong", said, fix=f"lr={expected[0]:g}, in all groups" if spread(expected) <= CLOSE else "")
        else:
            self._add("schedule-wrong", said)

    def _decays(self, values: dict[str, float], wanted: float | None, coupled: bool) -> None:
        """Add the causes in the decays of parameters: which of them decay, by how much, and how."""
        decaying = {role: [name for name in values if values[name] and self.roles[name] == role] for role in WORDS}
        if wanted is None:
            some = [value for value in values.values() if value]
            on = ", ".join(WORDS[role] for role, names in decaying.items() if names)
            self._read_off(f"a weight decay of {median(some):.4g}, on {on}" if some else "no weight decay")
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
        value, live, found = median(values[name] for name in names), self.rates != 0, [self.fits[name] for name in names]
        if wanted and not coupled:
            short = [np.abs(1 - (one.rates / self.rates + one.decays)[live]) for one in found]
            later = [error < 0.1 * np.abs(one.decays[live]) for error, one in zip(short, found, strict=True)]
            if np.all(later) and len(names) < len(self.fits):
                self._add("decay-after-update", "the decay is of the parameter as updated, not as it was", names)
            raw = np.nanmedian(np.stack([one.decays for one in found]), axis=0)
            if bool((np.abs(raw / wanted - 1) < 1e-3).all()) and abs(float(np.median(self.rates)) - 1) > 1e-3:
                words = f"in each step {wanted:g} of the parameter is taken off, whatever the rate"
                self._add("decay-without-rate", words, names)
                return
        if not wanted or abs(value / wanted - 1) > (1e-2 if coupled else 1e-3):
            fix = f"weight_decay={wanted:g}, for these parameters"
            self._add("decay-wrong", f"a decay of {value:.4g}, not {wanted:g}", names, fix)


def _listed(rates: Array) -> str:
    """Return rates in words: one number, or the first few."""
    if spread(rates) <= CLOSE:
        return f"{float(np.median(rates)):.6g}"
    return ", ".join(f"{rate:.4g}" for rate in rates[:4]) + (", ..." if len(rates) > 4 else "")


def _same(one: Array, other: Array) -> bool:
    return bool((np.abs(one - other) <= CLOSE * np.abs(other).max()).all())
