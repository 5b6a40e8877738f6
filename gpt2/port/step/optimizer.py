"""Causes in the update: its formula, constants, rates and decays, against the settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

import numpy as np

from gpt2.port.step.causes import Places, Stage, cause
from gpt2.port.step.movement import Movement
from gpt2.port.step.rules import Array, Rule
from gpt2.port.step.settings import Settings

FITTED = "this rule gives your own parameters, from your own gradients, at every entry that was compared"
EPSILON = 1e-8
CLOSE = 1e-4  # relative difference of constants that are meant to be equal
CORRECTED = {"none": "neither moment", "first": "only the first moment", "second": "only the second"}
WORDS = {"matrix": "matrices", "embedding": "embeddings", "norm": "norms", "bias": "biases"}
LARGE = ("embedding", "matrix")
Found = Iterator[tuple[str, ...]]  # id, detail, and where they are not the usual ones: place, fix
READ = "read off"  # in place of an id: a note


def update_stage(movement: Movement, settings: Settings, where: Places, calls: Sequence[int]) -> Stage:
    """Return the causes in the update. ``calls``: the number of the call that each update belongs to."""
    stage = Stage(explained=not movement.odd, error=movement.error)
    if movement.odd:
        stage.notes.append(f"no known rule gives the change of {where(movement.odd)} (error {movement.error:.1e})")
    for id, detail, *more in _Comparison(movement, settings, where, calls).found() if movement.known else ():
        if id == READ:
            stage.notes.append(f"{READ}: {detail}")
        else:
            place, fix = (*more, *("optimizer", "")[len(more) :])
            stage.causes.append(cause(id, place, detail, FITTED, fix=fix or None))
    return stage


class _Comparison:
    """The comparison of one movement with the settings."""

    def __init__(self, movement: Movement, settings: Settings, where: Places, calls: Sequence[int]) -> None:
        self.movement, self.settings, self.where, self.calls = movement, settings, where, calls
        self.rates, self.factors = movement.common()

    def found(self) -> Found:
        rule, at = self.movement.rule, f"at a rate of {_listed(self.rates)}"
        if rule.kind != "adam":
            momentum = f" with a momentum of {rule.beta1:.4g}" if rule.beta1 else ""
            sgd = rule.kind == "sgd"
            yield "optimizer-sgd" if sgd else "optimizer-other", f"{'SGD' if sgd else 'Lion'}{momentum}, {at}"
        elif rule.beta1 < 1e-6 and rule.correction == "none":
            yield "optimizer-other", f"RMSprop, {at}: no first moment, no correction"
        else:
            yield from self._formula(rule)
            yield from self._constants(rule)
            yield from self._rates()
            yield from self._decays()
            if self.movement.kept:
                yield "momentum-kept", "the first step after a new make_step goes on with the moments of the last"

    def _formula(self, rule: Rule) -> Found:
        if rule.amsgrad:
            yield "amsgrad", "the largest second moment so far is used"
        if rule.lost:
            yield "momentum-lost", "the moments are zero at the beginning of each step"
            return
        if rule.correction == "late":
            yield "bias-correction-step", "the factors 1 - beta**t are those of step t + 1"
        elif rule.correction != "full":
            yield "bias-correction-missing", f"{CORRECTED[rule.correction]} is divided by 1 - beta**t"
        if rule.place == "inside":
            yield "eps-inside-root", f"the divisor is sqrt(v + {rule.eps:.4g})"
        elif rule.place == "before":
            yield "eps-before-correction", f"{rule.eps:.4g} is added to sqrt(v) before its correction"

    def _constants(self, rule: Rule) -> Found:
        betas, given = (rule.beta1, rule.beta2), (self.settings.beta1, self.settings.beta2)
        said, place = f"betas of {betas[0]:.6g} and {betas[1]:.6g}", "optimizer"
        fix = f"torch.optim.AdamW(groups, lr, betas=({given[0] or 0.9:g}, {given[1] or 0.95:g}), eps=1e-8)"
        differ = any(b is not None and abs(a - b) > CLOSE * (1 - b) for a, b in zip(betas, given, strict=True))
        swapped = all(b is not None and abs(a - b) <= CLOSE for a, b in zip(betas, reversed(given), strict=True))
        if rule.lost:
            pass
        elif (differ and swapped) or (given == (None, None) and rule.beta1 > rule.beta2):
            yield "betas-swapped", said, place, fix
        elif differ:
            yield "betas-wrong", said, place, fix
        elif None in given:
            yield READ, said
        if rule.place == "outside" and abs(rule.eps / EPSILON - 1) > 0.02:
            eps, s = f"an eps of {rule.eps:.4g}", self.settings
            wanted = (s.lr, *given, s.weight_decay, s.clip) != (None,) * 5  # then it is AdamW's
            yield ("eps-wrong", f"{eps}, not {EPSILON:g}", place, fix) if wanted else (READ, eps)

    def _rates(self) -> Found:
        rates, settings = self.rates, self.settings
        twice = [name for name, factor in self.factors.items() if abs(factor - 2) < 0.02]
        others = [name for name in self.factors if name not in twice]
        if twice:
            yield "parameter-twice", "these parameters move twice as far as the others", self.where(twice)
        if others:
            times = median(self.factors[name] for name in others)
            yield "rate-wrong", f"the rate of these parameters is {times:.6g} times that of the others", self.where(others)
        steady = _is_one(rates)
        if settings.lr is None or not (steady or settings.scheduled):
            yield READ, f"a rate of {_listed(rates)}" + ("" if steady else " (it changes from step to step)")
            return
        # the rates that the settings say, also those of the steps after and before
        expected, after, before = (np.array([settings.rate(max(0, call + by)) for call in self.calls]) for by in (0, 1, -1))
        said, live = f"a rate of {_listed(rates)}, not {_listed(expected)}", expected != 0
        if _same(rates, expected):
            return
        if _same(rates, after) or _same(rates, before):
            which = "after" if _same(rates, after) else "before"
            yield "schedule-step", f"the rate of each step is that of the one {which}: {_listed(rates)}"
        elif bool(live.any()) and _is_one(rates[live] / expected[live]):
            yield "rate-wrong", said
        elif any(not _is_one(one) and _is_one(rates / np.where(one == 0, 1, one)) for one in (after, before)):
            yield from (("rate-wrong", said), ("schedule-step", said))
        else:
            yield "schedule-wrong", said

    def _decays(self) -> Found:
        """Yield the causes in the decay: which parameters decay, by how much, and how."""
        movement, where, wanted = self.movement, self.where, self.settings.weight_decay
        coupled = {name: movement.rules[name].coupled for name in movement.known if movement.rules[name].coupled}
        values = {name: decay for name in movement.known if (decay := movement.fits[name].decay) is not None}
        amount = median(coupled.values()) if coupled else 0.0
        if coupled:
            how = "is added to the gradient, and so divided by the root of its second moment"
            yield "decay-coupled", f"{amount:.4g} times the parameter {how}", where(list(coupled))
            values = {name: coupled.get(name, decay) for name, decay in values.items()}
        decaying = {role: [name for name in values if values[name] and movement.roles[name] == role] for role in WORDS}
        if wanted is None:
            some = [values[name] for names in decaying.values() for name in names]
            on = ", ".join(WORDS[role] for role in dict.fromkeys(movement.roles[name] for name in values) if decaying[role])
            yield READ, f"a weight decay of {median(some):.4g}, on {on}" if some else "no weight decay"
            return
        if small := [name for name in values if name in (*decaying["norm"], *decaying["bias"])]:
            id = "decay-on-biases" if not decaying["norm"] else "decay-on-all" if decaying["bias"] else "decay-on-norms"
            yield id, "these decay too", where(small)
        large = [name for name in values if movement.roles[name] in LARGE]
        names, bare = ([name for name in large if bool(values[name]) is decays] for decays in (True, False))
        if wanted and bare:
            embeddings = all(movement.roles[name] == "embedding" for name in bare) and decaying["matrix"]
            yield "decay-not-on-embeddings" if embeddings else "decay-missing", "these do not decay", where(bare)
        if names and wanted and not coupled:
            yield from self._amount(names, wanted)
        elif names and (not wanted or abs(amount / wanted - 1) > 0.01):
            value = amount if wanted else median(values[name] for name in names)
            yield "decay-wrong", f"a decay of {value:.4g}, not {wanted:g}", where(names)

    def _amount(self, names: list[str], wanted: float) -> Found:
        """Yield the causes in how far matrices and embeddings decay."""
        fits, rates = self.movement.fits, self.rates
        live = np.abs(rates) > 0
        if bool(live.any()):
            usual = [name for name in names if abs(float(np.median(fits[name].rates[live] / rates[live])) - 1) < 0.01]
            names = usual or names
        raw, place = np.nanmedian(np.stack([fits[name].decays for name in names]), axis=0), self.where(names)
        if all(self._is_after(name) for name in names) and any(name not in names for name in fits):
            yield "decay-after-update", "the decay is of the parameter as updated, not as it was", place
        value = float(np.median(raw[live] / rates[live])) if bool(live.any()) else 0.0
        if bool((np.abs(raw / wanted - 1) < 1e-3).all()) and abs(float(np.median(rates)) - 1) > 1e-3:
            yield "decay-without-rate", f"in each step {wanted:g} of the parameter is taken off, whatever the rate", place
        elif abs(value / wanted - 1) > 1e-3:
            yield "decay-wrong", f"a decay of {value:.4g}, not {wanted:g}", place

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
