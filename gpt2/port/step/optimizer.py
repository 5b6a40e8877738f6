"""Causes in the update's constants: betas, eps, bias correction, decay and rates, against the settings."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from gpt2.port.diagnosis.report import Cause
from gpt2.port.step.causes import cause
from gpt2.port.step.rules import Array, Correction, Eps, Kind, Rule
from gpt2.port.step.settings import Settings
from gpt2.port.step.stepping import Movement, decay_of, rates_of
from gpt2.port.step.trained import Places, Stage

FITTED = "this rule gives your own parameters, from your own gradients, at every entry that was compared"
EPSILON = 1e-8
CLOSE = 1e-4  # relative difference of constants that are meant to be equal


def update_stage(movement: Movement, settings: Settings, where: Places, calls: Sequence[int]) -> Stage:
    """Return the causes in the update. ``calls``: the number of the call that each update belongs to."""
    stage = Stage(explained=not movement.odd, error=movement.error)
    if not movement.rules:
        return stage
    rule = movement.rule
    if movement.odd:
        error = f"{movement.error:.1e}"
        stage.notes.append(f"no known rule gives the change of {where(movement.odd)} (error {error})")
        if len(movement.odd) == len(movement.rules):
            return stage
    rates, factors = rates_of(movement)
    if rule.kind is not Kind.ADAM:
        name = "SGD" if rule.kind is Kind.SGD else "Lion"
        momentum = f" with a momentum of {rule.beta1:.4g}" if rule.beta1 else ""
        id = "optimizer-sgd" if rule.kind is Kind.SGD else "optimizer-other"
        stage.causes.append(cause(id, "optimizer", f"{name}{momentum}, at a rate of {_listed(rates)}", FITTED))
        return stage
    if rule.beta1 < 1e-6 and rule.correction is Correction.NONE:
        detail = f"RMSprop, at a rate of {_listed(rates)}: no first moment, no correction"
        stage.causes.append(cause("optimizer-other", "optimizer", detail, FITTED))
        return stage
    stage.causes += _formula(rule)
    stage.causes += _constants(rule, settings, stage.notes)
    stage.causes += _rates(rates, factors, settings, where, calls, stage.notes)
    _decays(movement, rates, settings, where, stage)
    if movement.kept:
        detail = "the first step after a new make_step goes on with the moments of the last"
        stage.causes.append(cause("momentum-kept", "optimizer", detail, FITTED))
    return stage


def _formula(rule: Rule) -> list[Cause]:
    found = []
    if rule.amsgrad:
        found.append(cause("amsgrad", "optimizer", "the largest second moment so far is used", FITTED))
    if rule.lost:
        found.append(cause("momentum-lost", "optimizer", "the moments are zero at the beginning of each step", FITTED))
        return found
    if rule.correction is Correction.LATE:
        found.append(cause("bias-correction-step", "optimizer", "the factors 1 - beta**t are those of step t + 1", FITTED))
    elif rule.correction is not Correction.FULL:
        which = {
            Correction.NONE: "neither moment",
            Correction.FIRST: "only the first moment",
            Correction.SECOND: "only the second",
        }
        detail = f"{which[rule.correction]} is divided by 1 - beta**t"
        found.append(cause("bias-correction-missing", "optimizer", detail, FITTED))
    if rule.place is Eps.INSIDE:
        found.append(cause("eps-inside-root", "optimizer", f"the divisor is sqrt(v + {rule.eps:.4g})", FITTED))
    elif rule.place is Eps.BEFORE:
        detail = f"{rule.eps:.4g} is added to sqrt(v) before its correction"
        found.append(cause("eps-before-correction", "optimizer", detail, FITTED))
    return found


def _constants(rule: Rule, settings: Settings, notes: list[str]) -> list[Cause]:
    found = []
    betas, given = (rule.beta1, rule.beta2), (settings.beta1, settings.beta2)
    said = f"betas of {betas[0]:.6g} and {betas[1]:.6g}"
    if not rule.lost:
        differs = [b is not None and abs(a - b) > CLOSE * (1 - b) for a, b in zip(betas, given, strict=True)]
        swapped = None not in given and all(abs(a - b) <= CLOSE for a, b in zip(betas, reversed(given), strict=True))  # type: ignore[operator]
        if (any(differs) and swapped) or (given == (None, None) and rule.beta1 > rule.beta2):
            found.append(cause("betas-swapped", "optimizer", said, FITTED, fix=_adamw(settings)))
        elif any(differs):
            found.append(cause("betas-wrong", "optimizer", said, FITTED, fix=_adamw(settings)))
        elif None in given:
            notes.append(f"read off: {said}")
    if rule.place is Eps.OUTSIDE and abs(rule.eps / EPSILON - 1) > 0.02:
        if settings.optimizer_given:
            found.append(
                cause("eps-wrong", "optimizer", f"an eps of {rule.eps:.4g}, not {EPSILON:g}", FITTED, fix=_adamw(settings))
            )
        else:
            notes.append(f"read off: an eps of {rule.eps:.4g}")
    return found


def _adamw(settings: Settings) -> str:
    return f"torch.optim.AdamW(groups, lr, betas=({settings.beta1 or 0.9:g}, {settings.beta2 or 0.95:g}), eps=1e-8)"


def _listed(rates: Array) -> str:
    """Return rates in words: one number, or the first few."""
    if not len(rates):
        return "0"
    if float(rates.max() - rates.min()) <= CLOSE * float(np.abs(rates).max()):
        return f"{float(np.median(rates)):.6g}"
    return ", ".join(f"{rate:.4g}" for rate in rates[:4]) + (", ..." if len(rates) > 4 else "")


def _rates(
    rates: Array, factors: dict[str, float], settings: Settings, where: Places, calls: Sequence[int], notes: list[str]
) -> list[Cause]:
    found = []
    twice = [name for name, factor in factors.items() if abs(factor - 2) < 0.02]
    others = [name for name in factors if name not in twice]
    if twice:
        found.append(cause("parameter-twice", where(twice), "these parameters move twice as far as the others", FITTED))
    if others:
        detail = f"the rate of these parameters is {median(factors[name] for name in others):.6g} times that of the others"
        found.append(cause("rate-wrong", where(others), detail, FITTED))
    steady = len(rates) > 0 and float(rates.max() - rates.min()) <= CLOSE * float(np.abs(rates).max())
    if settings.lr is None or not (steady or settings.scheduled):
        notes.append(f"read off: a rate of {_listed(rates)}" + ("" if steady else " (it changes from step to step)"))
        return found
    expected = np.array([settings.rate(call) for call in calls])
    if _same(rates, expected):
        return found
    for shift in (1, -1):
        if _same(rates, np.array([settings.rate(max(0, call + shift)) for call in calls])):
            detail = f"the rate of each step is that of the one {'after' if shift > 0 else 'before'}: {_listed(rates)}"
            return [*found, cause("schedule-step", "optimizer", detail, FITTED)]
    live = expected != 0
    factor = rates[live] / expected[live]
    said = f"a rate of {_listed(rates)}, not {_listed(expected)}"
    if len(factor) and float(factor.max() - factor.min()) <= CLOSE * float(np.abs(factor).max()):
        return [*found, cause("rate-wrong", "optimizer", said, FITTED)]
    shifted = [_ratio(rates, settings, calls, shift) for shift in (1, -1)]
    if any(shifted):
        return [*found, cause("rate-wrong", "optimizer", said, FITTED), cause("schedule-step", "optimizer", said, FITTED)]
    return [*found, cause("schedule-wrong", "optimizer", said, FITTED)]


def _ratio(rates: Array, settings: Settings, calls: Sequence[int], shift: int) -> bool:
    expected = np.array([settings.rate(max(0, call + shift)) for call in calls])
    factor = rates / np.where(expected == 0, 1, expected)
    varies = float(expected.max() - expected.min()) > CLOSE * float(expected.max())
    return varies and float(factor.max() - factor.min()) <= CLOSE * float(np.abs(factor).max())


def _same(one: Array, other: Array) -> bool:
    return bool((np.abs(one - other) <= CLOSE * np.abs(other).max()).all())


def _decays(movement: Movement, rates: Array, settings: Settings, where: Places, stage: Stage) -> None:
    """Add the causes in the decay: which parameters decay, by how much, and how."""
    coupled = {name: rule.coupled for name, rule in movement.rules.items() if rule.coupled and name not in movement.odd}
    values = {
        name: decay for name, one in movement.fits.items() if name not in movement.odd and (decay := decay_of(one)) is not None
    }
    if coupled:
        value = median(coupled.values())
        detail = f"{value:.4g} times the parameter is added to the gradient, and so divided by the root of its second moment"
        stage.causes.append(cause("decay-coupled", where(list(coupled)), detail, FITTED))
        values = {name: coupled.get(name, decay) for name, decay in values.items()}
    decaying = {name: value for name, value in values.items() if value}
    by_role: dict[str, tuple[list[str], list[str]]] = {}
    for name in values:
        by_role.setdefault(movement.roles[name], ([], []))[0 if name in decaying else 1].append(name)
    if settings.weight_decay is None:
        stage.notes.append(_described(decaying, by_role))
        return
    wanted = settings.weight_decay
    norms, biases = (by_role.get(role, ([], []))[0] for role in ("norm", "bias"))
    if norms or biases:
        id = "decay-on-all" if norms and biases else "decay-on-norms" if norms else "decay-on-biases"
        stage.causes.append(cause(id, where([*norms, *biases]), "these decay too", FITTED))
    large = {role: by_role.get(role, ([], [])) for role in ("embedding", "matrix")}
    if not wanted:
        names = [name for with_decay, _ in large.values() for name in with_decay]
        if names:
            detail = f"a decay of {median(decaying[name] for name in names):.4g}, not 0"
            stage.causes.append(cause("decay-wrong", where(names), detail, FITTED))
        return
    without = [name for _, bare in large.values() for name in bare]
    if without and all(movement.roles[name] == "embedding" for name in without) and large["matrix"][0]:
        stage.causes.append(cause("decay-not-on-embeddings", where(without), "these do not decay", FITTED))
    elif without:
        stage.causes.append(cause("decay-missing", where(without), "these do not decay", FITTED))
    names = [name for with_decay, _ in large.values() for name in with_decay]
    if not names:
        return
    if coupled:
        if abs(median(coupled.values()) / wanted - 1) > 0.01:
            stage.causes.append(
                cause("decay-wrong", where(names), f"a decay of {median(coupled.values()):.4g}, not {wanted:g}", FITTED)
            )
        return
    stage.causes += _amount(movement, names, rates, wanted, where)


def _amount(movement: Movement, names: list[str], rates: Array, wanted: float, where: Places) -> list[Cause]:
    """Return the causes in how far matrices and embeddings decay."""
    found = []
    normal = [name for name in names if abs(_factor(movement, name, rates) - 1) < 0.01]
    names = normal or names
    decays = np.stack([movement.fits[name].decays for name in names])
    raw = np.nanmedian(decays, axis=0)
    after = [name for name in names if _is_after(movement, name, rates)]
    if len(after) == len(names) and any(name not in names for name in movement.fits):
        detail = "the decay is of the parameter as updated, not as it was"
        found.append(cause("decay-after-update", where(names), detail, FITTED))
    if bool((np.abs(raw / wanted - 1) < 1e-3).all()) and abs(float(np.median(rates)) - 1) > 1e-3:
        detail = f"in each step {wanted:g} of the parameter is taken off, whatever the rate"
        return [*found, cause("decay-without-rate", where(names), detail, FITTED)]
    live = np.abs(rates) > 0
    value = float(np.median(raw[live] / rates[live])) if bool(live.any()) else 0.0
    if abs(value / wanted - 1) > 1e-3:
        found.append(cause("decay-wrong", where(names), f"a decay of {value:.4g}, not {wanted:g}", FITTED))
    return found


def _factor(movement: Movement, name: str, rates: Array) -> float:
    live = np.abs(rates) > 0
    return float(np.median(movement.fits[name].rates[live] / rates[live])) if bool(live.any()) else 1.0


def _is_after(movement: Movement, name: str, rates: Array) -> bool:
    """Whether a parameter's rates are smaller than the others' by just its decay."""
    one = movement.fits[name]
    known = ~np.isnan(one.decays) & (np.abs(rates) > 0) & (np.abs(one.decays) > 1e-9)
    if not bool(known.any()):
        return False
    lost = 1 - one.rates[known] / rates[known]
    return bool((np.abs(lost / one.decays[known] - 1) < 0.1).all())


def _described(decaying: dict[str, float], by_role: dict[str, tuple[list[str], list[str]]]) -> str:
    if not decaying:
        return "read off: no weight decay"
    words = {"matrix": "matrices", "embedding": "embeddings", "norm": "norms", "bias": "biases"}
    on = [words[role] for role, (names, _) in by_role.items() if names]
    return f"read off: a weight decay of {median(decaying.values()):.4g}, on {', '.join(on)}"
