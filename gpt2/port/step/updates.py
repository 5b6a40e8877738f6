"""The update: the rule by which each parameter moves (``rules.py``), and what of it is not as the settings say."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from gpt2.port.step.causes import FIXES, StepFindings
from gpt2.port.step.rules import BETTER, CLOSE, DEPARTURES, FITS, ROUNDED, Array, Rule, RuleFit, Track, find_rule, fit, steady
from gpt2.port.step.settings import StepSettings
from gpt2.port.step.watching import Update, Watched
from gpt2.port.terms.places import joined

FITTED = "this rule gives your own parameters, from your own gradients, at every entry that was compared"
WORDS = {"matrix": "matrices", "embedding": "embeddings", "norm": "norms", "bias": "biases"}
FEW = 2  # parameters of one role by no known rule, after which no other is searched for


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
        self.kept, self.unknown, self.rest = False, True, list[str]()  # the rest: whose rule fails in a later session
        if not (moving and any(update.gradient.total for update in first)):
            return
        tracks = {name: Track.of(first, name) for name in moving}
        names = [name for name in moving if roles[name] == "matrix"] or moving
        said = np.array([settings.rate(call) for call in self.calls]) if settings.scheduled else None
        chosen = [tracks[names[part * len(names) // 3]] for part in (1, 2)]
        self.rule, self.error = find_rule(chosen, settings, said)
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
            found.append(fit(track, find_rule([track], self.settings)[0]))
        self.fits[name] = best = min(found, key=lambda one: one.error * (1 if one.rule == self.rule else BETTER))
        self.odd += [name] * (best.error > (ROUNDED if self.error > FITS else FITS))

    def _test_later(self, sessions: Sequence[Sequence[Update]], tracks: dict[str, Track]) -> None:
        """Test the rules in later sessions, from moments of zero or those that the session before left."""
        for session in sessions:
            later = {name: Track.of(session, name) for name in self.known}
            moved = {name: one.rule for name, one in self.known.items() if later[name].change.any()}
            self.rest = rest = [name for name, rule in moved.items() if fit(later[name], rule).error > ROUNDED]
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
        self.expected = np.array([self.settings.rate(call) if self.settings.lr is not None else np.nan for call in self.calls])
        self.rates: Array = np.median(plain or [one.rates for one in fits], axis=0)
        whole = self.rates / (1 - np.median([np.nan_to_num(one.decays) for one in fits], axis=0))
        if not plain and np.abs(whole - self.expected).max() < np.abs(self.rates - self.expected).max():  # all decay after it
            self.rates = whole
        self.factors, self.loose, wanted = dict[str, float](), list[str](), self.settings.weight_decay
        own = [one for one in fits if one.decay and not one.rule.coupled and wanted and not self.by_optimizer]
        decays, rates = (np.nanmedian([getattr(one, kind) for one in own] or [[0]], axis=0) for kind in ("decays", "rates"))
        wrong = bool(own) and not _same(rates, self.expected)  # torch's optimizers multiply both by one rate
        self.decays_right = wrong and _same(decays, (wanted or 0) * self.expected)
        for name, one in self.known.items():
            live = np.abs(self.rates) > 100 * one.doubts
            factors = one.rates[live] / self.rates[live] if live.any() else np.ones(1)
            if np.abs(factors - 1).max() > 0.01:
                self.factors[name] = float(np.median(factors))
                self.loose += [name] * (not steady(factors, 0.01))

    def judge(self, changed: bool) -> None:
        """Add the causes in how parameters move; the gradient may be ``changed`` before, perhaps by a decay."""
        error = max(one.error for one in self.fits.values())
        self.findings.differ("update", error)
        if self.odd:
            words = f"no known rule gives the change of {joined(self.findings.places(self.odd))} (error {error:.1e})"
            self.findings.leave_open("update", words)
        if self.unknown:
            return
        self._compare_rates()
        rule, at = self.rule, f"at a rate of {_listed(self.rates)}"
        name = "RMSprop (no first moment, no correction)" if rule.beta1 < 1e-6 and rule.correction == (0, 0) else "AdamW"
        momentum = f" with a{' Nesterov' * rule.late} momentum of {rule.beta1:.4g}"
        name = {"sgd": "SGD" + momentum * bool(rule.beta1), "lion": "Lion"}.get(rule.kind, name)
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
        self._decays(values, self.settings.weight_decay, bool(coupled), changed)
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
        if rule.place == "outside" and rule.eps != Rule.eps:
            if (self.settings.lr, *given, self.settings.weight_decay, self.settings.clip) == (None,) * 5:
                self._read_off(f"an eps of {rule.eps:.4g}")
            else:  # then it is AdamW's
                self._add("eps-wrong", f"an eps of {rule.eps:.4g}, not {Rule.eps:g}", fix=fix)

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

    def _decays(self, values: dict[str, float], wanted: float | None, coupled: bool, changed: bool) -> None:
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
        if wanted and bare and not changed:
            embeddings = decaying["matrix"] and all(self.roles[name] == "embedding" for name in bare)
            self._add("decay-not-on-embeddings" if embeddings else "decay-missing", "these do not decay", bare)
        if not names:
            return
        names = [name for name in names if name not in self.factors] or names
        if wanted and not coupled:
            decays = np.stack([self.fits[name].decays for name in names])
            lacking = 1 - np.stack([self.fits[name].rates for name in names]) / np.where(self.rates == 0, np.nan, self.rates)
            after = (np.abs(lacking - decays) < 0.1 * np.abs(decays)) | (self.rates == 0)
            if after.all() and self.rates.any():
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
            if live.any() and not steady(np.abs(raw[live] / own[live]), 0.05):
                self._add("decay-wrong", f"a decay of {value:.4g} in most steps, but not in each", names)


def _listed(rates: Array) -> str:
    """Return rates in words: one number, or the first few."""
    if steady(rates):
        return f"{float(np.median(rates)):.6g}"
    return ", ".join(f"{rate:.4g}" for rate in rates[:4]) + (", ..." if len(rates) > 4 else "")


def _same(one: Array, other: Array) -> bool:
    return bool((np.abs(one - other) <= CLOSE * np.abs(other).max()).all())
