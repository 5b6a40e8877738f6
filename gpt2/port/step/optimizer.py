"""Causes in the update: its formula, constants, rates and decays, against the settings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from gpt2.port.step.causes import Places, Stage, cause
from gpt2.port.step.movement import Movement
from gpt2.port.step.rules import Array, Correction, Eps, Kind, Rule
from gpt2.port.step.settings import Settings

FITTED = "this rule gives your own parameters, from your own gradients, at every entry that was compared"
EPSILON = 1e-8
CLOSE = 1e-4  # relative difference of constants that are meant to be equal
CORRECTED = {Correction.NONE: "neither moment", Correction.FIRST: "only the first moment", Correction.SECOND: "only the second"}
WORDS = {"matrix": "matrices", "embedding": "embeddings", "norm": "norms", "bias": "biases"}
LARGE = ("embedding", "matrix")


def update_stage(movement: Movement, settings: Settings, where: Places, calls: Sequence[int]) -> Stage:
    """Return the causes in the update. ``calls``: the number of the call that each update belongs to."""
    stage = Stage(explained=not movement.odd, error=movement.error)
    if movement.odd:
        stage.notes.append(f"no known rule gives the change of {where(movement.odd)} (error {movement.error:.1e})")
    if movement.known:
        _UpdateCauses(movement, settings, where, calls, stage).find()
    return stage


class _UpdateCauses:
    """The comparison of one movement with the settings; causes and notes go into ``stage``."""

    def __init__(self, movement: Movement, settings: Settings, where: Places, calls: Sequence[int], stage: Stage) -> None:
        self.movement, self.settings, self.where, self.calls, self.stage = movement, settings, where, calls, stage
        self.rates, self.factors = movement.rates()

    def find(self) -> None:
        rule = self.movement.rule
        if rule.kind is not Kind.ADAM:
            id, name = ("optimizer-sgd", "SGD") if rule.kind is Kind.SGD else ("optimizer-other", "Lion")
            momentum = f" with a momentum of {rule.beta1:.4g}" if rule.beta1 else ""
            return self._add(id, f"{name}{momentum}, at a rate of {_listed(self.rates)}")
        if rule.beta1 < 1e-6 and rule.correction is Correction.NONE:
            detail = f"RMSprop, at a rate of {_listed(self.rates)}: no first moment, no correction"
            return self._add("optimizer-other", detail)
        self._formula(rule)
        self._constants(rule)
        self._rates()
        self._decays()
        if self.movement.kept:
            self._add("momentum-kept", "the first step after a new make_step goes on with the moments of the last")

    def _add(self, id: str, detail: str, where: str = "optimizer", fix: str | None = None) -> None:
        self.stage.causes.append(cause(id, where, detail, FITTED, fix=fix))

    def _note(self, words: str) -> None:
        self.stage.notes.append(f"read off: {words}")

    def _formula(self, rule: Rule) -> None:
        if rule.amsgrad:
            self._add("amsgrad", "the largest second moment so far is used")
        if rule.lost:
            return self._add("momentum-lost", "the moments are zero at the beginning of each step")
        if rule.correction is Correction.LATE:
            self._add("bias-correction-step", "the factors 1 - beta**t are those of step t + 1")
        elif rule.correction is not Correction.FULL:
            self._add("bias-correction-missing", f"{CORRECTED[rule.correction]} is divided by 1 - beta**t")
        if rule.place is Eps.INSIDE:
            self._add("eps-inside-root", f"the divisor is sqrt(v + {rule.eps:.4g})")
        elif rule.place is Eps.BEFORE:
            self._add("eps-before-correction", f"{rule.eps:.4g} is added to sqrt(v) before its correction")

    def _constants(self, rule: Rule) -> None:
        settings = self.settings
        betas, given = (rule.beta1, rule.beta2), (settings.beta1, settings.beta2)
        said = f"betas of {betas[0]:.6g} and {betas[1]:.6g}"
        fix = f"torch.optim.AdamW(groups, lr, betas=({given[0] or 0.9:g}, {given[1] or 0.95:g}), eps=1e-8)"
        if not rule.lost:
            differ = any(b is not None and abs(a - b) > CLOSE * (1 - b) for a, b in zip(betas, given, strict=True))
            swapped = all(b is not None and abs(a - b) <= CLOSE for a, b in zip(betas, reversed(given), strict=True))
            if (differ and swapped) or (given == (None, None) and rule.beta1 > rule.beta2):
                self._add("betas-swapped", said, fix=fix)
            elif differ:
                self._add("betas-wrong", said, fix=fix)
            elif None in given:
                self._note(said)
        if rule.place is Eps.OUTSIDE and abs(rule.eps / EPSILON - 1) > 0.02:
            if settings.optimizer_given:
                self._add("eps-wrong", f"an eps of {rule.eps:.4g}, not {EPSILON:g}", fix=fix)
            else:
                self._note(f"an eps of {rule.eps:.4g}")

    # Rates

    def _rates(self) -> None:
        rates, where, settings = self.rates, self.where, self.settings
        twice = [name for name, factor in self.factors.items() if abs(factor - 2) < 0.02]
        others = [name for name in self.factors if name not in twice]
        if twice:
            self._add("parameter-twice", "these parameters move twice as far as the others", where(twice))
        if others:
            times = median(self.factors[name] for name in others)
            self._add("rate-wrong", f"the rate of these parameters is {times:.6g} times that of the others", where(others))
        steady = _is_one(rates)
        if settings.lr is None or not (steady or settings.scheduled):
            return self._note(f"a rate of {_listed(rates)}" + ("" if steady else " (it changes from step to step)"))
        expected = self._expected(0)
        if _same(rates, expected):
            return None
        for shift in (1, -1):
            if _same(rates, self._expected(shift)):
                which = "after" if shift > 0 else "before"
                return self._add("schedule-step", f"the rate of each step is that of the one {which}: {_listed(rates)}")
        said, live = f"a rate of {_listed(rates)}, not {_listed(expected)}", expected != 0
        shifted = [self._expected(shift) for shift in (1, -1)]
        if bool(live.any()) and _is_one(rates[live] / expected[live]):
            self._add("rate-wrong", said)
        elif any(not _is_one(one) and _is_one(rates / np.where(one == 0, 1, one)) for one in shifted):
            self._add("rate-wrong", said)
            self._add("schedule-step", said)
        else:
            self._add("schedule-wrong", said)
        return None

    def _expected(self, shift: int) -> Array:
        """Return the rates that the settings say, of the steps ``shift`` later."""
        return np.array([self.settings.rate(max(0, call + shift)) for call in self.calls])

    # Decays

    def _decays(self) -> None:
        """Add the causes in the decay: which parameters decay, by how much, and how."""
        movement, where, wanted = self.movement, self.where, self.settings.weight_decay
        coupled = {name: movement.rules[name].coupled for name in movement.known if movement.rules[name].coupled}
        values = {name: decay for name in movement.known if (decay := movement.fits[name].decay) is not None}
        amount = median(coupled.values()) if coupled else 0.0
        if coupled:
            how = "is added to the gradient, and so divided by the root of its second moment"
            self._add("decay-coupled", f"{amount:.4g} times the parameter {how}", where(list(coupled)))
            values = {name: coupled.get(name, decay) for name, decay in values.items()}
        roles = {role: [name for name in values if movement.roles[name] == role] for role in WORDS}
        decaying = {role: [name for name in names if values[name]] for role, names in roles.items()}
        if wanted is None:
            some = [values[name] for names in decaying.values() for name in names]
            on = ", ".join(WORDS[role] for role in dict.fromkeys(movement.roles[name] for name in values) if decaying[role])
            return self._note(f"a weight decay of {median(some):.4g}, on {on}" if some else "no weight decay")
        norms, biases = decaying["norm"], decaying["bias"]
        if norms or biases:
            id = "decay-on-all" if norms and biases else "decay-on-norms" if norms else "decay-on-biases"
            self._add(id, "these decay too", where([name for name in values if name in (*norms, *biases)]))
        names = [name for name in values if name in [one for role in LARGE for one in decaying[role]]]
        bare = [name for name in values if movement.roles[name] in LARGE and name not in names]
        if wanted and bare:
            embeddings = all(movement.roles[name] == "embedding" for name in bare) and decaying["matrix"]
            self._add("decay-not-on-embeddings" if embeddings else "decay-missing", "these do not decay", where(bare))
        if not names:
            return None
        if coupled and wanted:
            if abs(amount / wanted - 1) > 0.01:
                self._add("decay-wrong", f"a decay of {amount:.4g}, not {wanted:g}", where(names))
        elif not wanted:
            self._add("decay-wrong", f"a decay of {median(values[name] for name in names):.4g}, not 0", where(names))
        else:
            self._amount(names, wanted)
        return None

    def _amount(self, names: list[str], wanted: float) -> None:
        """Add the causes in how far matrices and embeddings decay."""
        fits, rates = self.movement.fits, self.rates
        live = np.abs(rates) > 0
        if bool(live.any()):
            usual = [name for name in names if abs(float(np.median(fits[name].rates[live] / rates[live])) - 1) < 0.01]
            names = usual or names
        raw = np.nanmedian(np.stack([fits[name].decays for name in names]), axis=0)
        if all(self._is_after(name) for name in names) and any(name not in names for name in fits):
            self._add("decay-after-update", "the decay is of the parameter as updated, not as it was", self.where(names))
        if bool((np.abs(raw / wanted - 1) < 1e-3).all()) and abs(float(np.median(rates)) - 1) > 1e-3:
            detail = f"in each step {wanted:g} of the parameter is taken off, whatever the rate"
            return self._add("decay-without-rate", detail, self.where(names))
        value = float(np.median(raw[live] / rates[live])) if bool(live.any()) else 0.0
        if abs(value / wanted - 1) > 1e-3:
            self._add("decay-wrong", f"a decay of {value:.4g}, not {wanted:g}", self.where(names))
        return None

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
    return len(rates) > 0 and float(np.ptp(rates)) <= CLOSE * float(np.abs(rates).max())


def _same(one: Array, other: Array) -> bool:
    return bool((np.abs(one - other) <= CLOSE * np.abs(other).max()).all())
