"""Causes in updates: their rule, constants, rates and decays, against the settings; and in those of a module, which are exact."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from gpt2.port.step.causes import Findings
from gpt2.port.step.clipping import Clip, ClipKind, ClipReading, Norms, spread
from gpt2.port.step.expected import LARGE
from gpt2.port.step.movement import Movement
from gpt2.port.step.records import Update
from gpt2.port.step.rule_search import RuleSearch
from gpt2.port.step.rules import Array, Rule
from gpt2.port.step.settings import Settings
from gpt2.port.step.tracks import Run

FITTED = "this rule gives your own parameters, from your own gradients, at every entry that was compared"
EPSILON = 1e-8
CLOSE = 1e-4  # relative difference of constants that are meant to be equal
CORRECTED = {"none": "neither moment", "first": "only the first moment", "second": "only the second"}
WORDS = {"matrix": "matrices", "embedding": "embeddings", "norm": "norms", "bias": "biases"}
FREE = (ClipKind.NORM, ClipKind.PARAMETER, ClipKind.ENTRY, ClipKind.LARGEST)  # clipping of gradients that nothing shows


class UpdateComparison:
    """The comparison of a movement with the settings; ``calls``: the number of the call that each update belongs to."""

    def __init__(self, findings: Findings, movement: Movement, settings: Settings, calls: Sequence[int]) -> None:
        self.findings, self.movement, self.settings, self.calls = findings, movement, settings, calls
        self.rates, self.factors = movement.common()

    def judge(self) -> None:
        """Add the causes."""
        movement, rule, at = self.movement, self.movement.rule, f"at a rate of {_listed(self.rates)}"
        error = max((one.error for one in movement.fits.values()), default=0.0)
        self.findings.differ("update", error)
        if movement.odd:
            words = f"no known rule gives the change of {self.findings.places(movement.odd)} (error {error:.1e})"
            self.findings.leave_open("update", words)
        if not movement.known:
            return
        if rule.kind != "adam":
            momentum = f" with a momentum of {rule.beta1:.4g}" if rule.beta1 else ""
            sgd = rule.kind == "sgd"
            self._add("optimizer-sgd" if sgd else "optimizer-other", f"{'SGD' if sgd else 'Lion'}{momentum}, {at}")
        elif rule.beta1 < 1e-6 and rule.correction == "none":
            self._add("optimizer-other", f"RMSprop, {at}: no first moment, no correction")
        else:
            self._formula(rule)
            self._constants(rule)
            self._rates()
            self._decays()
            if movement.kept:
                self._add("momentum-kept", "the first step after a new make_step goes on with the moments of the last")

    def _add(self, id: str, detail: str, where: str | Collection[str] = "optimizer", fix: str = "") -> None:
        self.findings.add(id, where, detail, FITTED, fix)

    def _read_off(self, words: str) -> None:
        self.findings.notes.append(f"read off: {words}")

    def _formula(self, rule: Rule) -> None:
        if rule.amsgrad:
            self._add("amsgrad", "the largest second moment so far is used")
        if rule.lost:
            self._add("momentum-lost", "the moments are zero at the beginning of each step")
            return
        if rule.correction == "late":
            self._add("bias-correction-step", "the factors 1 - beta**t are those of step t + 1")
        elif rule.correction != "full":
            self._add("bias-correction-missing", f"{CORRECTED[rule.correction]} is divided by 1 - beta**t")
        if rule.place == "inside":
            self._add("eps-inside-root", f"the divisor is sqrt(v + {rule.eps:.4g})")
        elif rule.place == "before":
            self._add("eps-before-correction", f"{rule.eps:.4g} is added to sqrt(v) before its correction")

    def _constants(self, rule: Rule) -> None:
        betas, given, settings = (rule.beta1, rule.beta2), (self.settings.beta1, self.settings.beta2), self.settings
        said, eps = f"betas of {betas[0]:.6g} and {betas[1]:.6g}", f"an eps of {rule.eps:.4g}"
        fix = f"torch.optim.AdamW(groups, lr, betas=({given[0] or 0.9:g}, {given[1] or 0.95:g}), eps=1e-8)"
        differ = any(b is not None and abs(a - b) > CLOSE * (1 - b) for a, b in zip(betas, given, strict=True))
        swapped = all(b is not None and abs(a - b) <= CLOSE for a, b in zip(betas, reversed(given), strict=True))
        if not rule.lost and (differ or (given == (None, None) and rule.beta1 > rule.beta2)):
            self._add("betas-swapped" if swapped or not differ else "betas-wrong", said, fix=fix)
        elif not rule.lost and None in given:
            self._read_off(said)
        if rule.place == "outside" and abs(rule.eps / EPSILON - 1) > 0.02:
            if (settings.lr, *given, settings.weight_decay, settings.clip) == (None,) * 5:
                self._read_off(eps)
            else:  # then it is AdamW's
                self._add("eps-wrong", f"{eps}, not {EPSILON:g}", fix=fix)

    def _rates(self) -> None:
        rates, settings, calls = self.rates, self.settings, np.array(self.calls)
        twice = [name for name, factor in self.factors.items() if abs(factor - 2) < 0.02]
        others = [name for name in self.factors if name not in twice]
        if twice:
            self._add("parameter-twice", "these parameters move twice as far as the others", twice)
        if others:
            times = median(self.factors[name] for name in others)
            self._add("rate-wrong", f"the rate of these parameters is {times:.6g} times that of the others", others)
        steady = _is_one(rates)
        if settings.lr is None or not (steady or settings.scheduled):
            self._read_off(f"a rate of {_listed(rates)}" + ("" if steady else " (it changes from step to step)"))
            return
        # the rates that the settings say, also those of the steps after and before
        expected, after, before = (np.array([settings.rate(max(0, call + by)) for call in calls]) for by in (0, 1, -1))
        said, live = f"a rate of {_listed(rates)}, not {_listed(expected)}", expected != 0
        if _same(rates, expected):
            return
        if _same(rates, after) or _same(rates, before):
            which = "after" if _same(rates, after) else "before"
            self._add("schedule-step", f"the rate of each step is that of the one {which}: {_listed(rates)}")
        elif bool(live.any()) and _is_one(rates[live] / expected[live]):
            self._add("rate-wrong", said)
        elif any(not _is_one(one) and _is_one(rates / np.where(one == 0, 1, one)) for one in (after, before)):
            self._add("rate-wrong", said)
            self._add("schedule-step", said)
        else:
            self._add("schedule-wrong", said)

    def _decays(self) -> None:
        """Add the causes in the decay: which parameters decay, by how much, and how."""
        movement, wanted, roles = self.movement, self.settings.weight_decay, self.movement.roles
        coupled = {name: movement.rules[name].coupled for name in movement.known if movement.rules[name].coupled}
        values = {name: decay for name in movement.known if (decay := movement.fits[name].decay) is not None}
        amount = median(coupled.values()) if coupled else 0.0
        if coupled:
            how = "is added to the gradient, and so divided by the root of its second moment"
            self._add("decay-coupled", f"{amount:.4g} times the parameter {how}", list(coupled))
            values = {name: coupled.get(name, decay) for name, decay in values.items()}
        decaying = {role: [name for name in values if values[name] and roles[name] == role] for role in WORDS}
        if wanted is None:
            some = [values[name] for names in decaying.values() for name in names]
            on = ", ".join(WORDS[role] for role in dict.fromkeys(roles[name] for name in values) if decaying[role])
            self._read_off(f"a weight decay of {median(some):.4g}, on {on}" if some else "no weight decay")
            return
        if small := [name for name in values if name in (*decaying["norm"], *decaying["bias"])]:
            id = "decay-on-biases" if not decaying["norm"] else "decay-on-all" if decaying["bias"] else "decay-on-norms"
            self._add(id, "these decay too", small)
        large = [name for name in values if roles[name] in LARGE]
        names, bare = ([name for name in large if bool(values[name]) is decays] for decays in (True, False))
        if wanted and bare:
            embeddings = all(roles[name] == "embedding" for name in bare) and decaying["matrix"]
            self._add("decay-not-on-embeddings" if embeddings else "decay-missing", "these do not decay", bare)
        if names and wanted and not coupled:
            self._amount(names, wanted)
        elif names and (not wanted or abs(amount / wanted - 1) > 0.01):
            value = amount if wanted else median(values[name] for name in names)
            self._add("decay-wrong", f"a decay of {value:.4g}, not {wanted:g}", names)

    def _amount(self, names: list[str], wanted: float) -> None:
        """Add the causes in how far matrices and embeddings decay."""
        fits, rates = self.movement.fits, self.rates
        live = np.abs(rates) > 0
        if bool(live.any()):
            usual = [name for name in names if abs(float(np.median(fits[name].rates[live] / rates[live])) - 1) < 0.01]
            names = usual or names
        raw = np.nanmedian(np.stack([fits[name].decays for name in names]), axis=0)
        if all(self._is_after(name) for name in names) and any(name not in names for name in fits):
            self._add("decay-after-update", "the decay is of the parameter as updated, not as it was", names)
        value = float(np.median(raw[live] / rates[live])) if bool(live.any()) else 0.0
        if bool((np.abs(raw / wanted - 1) < 1e-3).all()) and abs(float(np.median(rates)) - 1) > 1e-3:
            self._add("decay-without-rate", f"in each step {wanted:g} of the parameter is taken off, whatever the rate", names)
        elif abs(value / wanted - 1) > 1e-3:
            self._add("decay-wrong", f"a decay of {value:.4g}, not {wanted:g}", names)

    def _is_after(self, name: str) -> bool:
        """Whether a parameter's rates are smaller than the others' by just its decay."""
        one = self.movement.fits[name]
        known = ~np.isnan(one.decays) & (np.abs(self.rates) > 0) & (np.abs(one.decays) > 1e-9)
        lost = 1 - one.rates[known] / self.rates[known]
        return bool(known.any()) and bool((np.abs(lost / one.decays[known] - 1) < 0.1).all())


def _listed(rates: Array) -> str:
    """Return rates in words: one number, or the first few."""
    if not len(rates):
        return "0"
    if _is_one(rates):
        return f"{float(np.median(rates)):.6g}"
    return ", ".join(f"{rate:.4g}" for rate in rates[:4]) + (", ..." if len(rates) > 4 else "")


def _is_one(rates: Array) -> bool:
    """Whether rates are meant to be one number."""
    return len(rates) > 0 and spread(rates) <= CLOSE


def _same(one: Array, other: Array) -> bool:
    return bool((np.abs(one - other) <= CLOSE * np.abs(other).max()).all())


def judge_module(
    findings: Findings, sessions: Sequence[Sequence[Update]], clip: ClipReading, settings: Settings, roles: Mapping[str, str]
) -> Movement | None:
    """Add the causes in the updates of several sessions; return how parameters move, None if none with a gradient does.

    ``clip``: what is read of the clipping; what the rule alone shows is written to it.
    """
    large = [name for name, role in roles.items() if role in LARGE]
    parts = max(update.summed for session in sessions for update in session)
    shares = [1 / parts, 1.0] if parts > 1 else [1.0]  # of gradients that ``.grad`` never holds: averaged, or summed

    def run(updates: Sequence[Update], share: float) -> Run:
        scaled = [replace(one, gradient=one.gradient.times(share)) for one in updates]
        return Run.of(scaled, list(updates[0].before), Norms([one.gradient for one in scaled], large))

    variants = [[run(updates, share) for updates in sessions] for share in shares]
    moving = variants[0][0].moving
    if not moving:
        return None
    names = [name for name in moving if roles[name] == "matrix"] or moving
    chosen = [names[len(names) // 3], names[2 * len(names) // 3]] if len(names) > 2 else names
    wanted = [None, Clip(ClipKind.NORM, settings.clip)] if settings.clip and parts else [None]
    answer = RuleSearch(variants, chosen, settings, wanted, FREE if parts else ()).best()
    movement = Movement(answer, variants[answer.variant], settings, roles)
    UpdateComparison(findings, movement, settings, [one.call for one in sessions[0]]).judge()
    share = shares[answer.variant]
    clip.factor, clip.clip = clip.factor * share, answer.clip or clip.clip
    if parts and not movement.odd:
        clip.largest = share * max(update.gradient.total for session in sessions for update in session if update.summed)
    return movement
