"""Causes in the updates of a module or a dump: their rule, constants, rates and decays, and the clipping before them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from gpt2.port.dump.tolerance import UNITS
from gpt2.port.step.causes import Findings
from gpt2.port.step.clipping import BITES, LIMITS, Clip, ClipKind, ClipReading, Norms, judge_clipping, read_clipping, spread
from gpt2.port.step.expected import LARGE, TABLE, Gradients, role_of
from gpt2.port.step.gradients import Evidence, GradientReading
from gpt2.port.step.labels import Formula
from gpt2.port.step.movement import Movement
from gpt2.port.step.records import Gradient, Update
from gpt2.port.step.rules import Array, Rule, Track, directions, fit
from gpt2.port.step.search import EXPLAINED, Answer, Rounding, RuleSearch, Run
from gpt2.port.step.settings import Settings

FITTED = "this rule gives your own parameters, from your own gradients, at every entry that was compared"
EPSILON = 1e-8
CLOSE = 1e-4  # relative difference of constants that are meant to be equal
CORRECTED = {"none": "neither moment", "first": "only the first moment", "second": "only the second"}
WORDS = {"matrix": "matrices", "embedding": "embeddings", "norm": "norms", "bias": "biases"}
FREE = (ClipKind.NORM, ClipKind.PARAMETER, ClipKind.ENTRY, ClipKind.LARGEST)  # clipping of gradients that nothing shows
SEEN = "the dump's parameters before and after each step"
TENSORS = 4  # of a dump that the search uses
SAME = 1e-3  # relative rounding of a dump's gradients before and after clipping
PIECES = (ClipKind.ENTRY, ClipKind.PARAMETER, ClipKind.STACK)
HALF = (
    "the parameters are in half precision, which hides small changes, decay, eps, betas and most clipping: whether these are "
    "right is undetermined; dump the parameters in float32"
)


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


# The updates of a module: exact


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


# The updates of a dump: rounded, from gradients that it has, or that are computed


@dataclass(frozen=True)
class Variant:
    """Gradients that the updates may have used, and the cause if they did: its id, place and detail."""

    gradients: Sequence[Gradient]
    id: str = ""
    where: str | Collection[str] = ""
    detail: str = ""


@dataclass
class UpdateExamination(Evidence):
    """The comparison of one dump's parameters after each step with the rules of optimizers; ``formula``: of the loss trained."""

    reading: GradientReading | None
    formula: Formula

    def __post_init__(self) -> None:
        recorded, first = self.recorded, self.recorded.parameters[0]
        self.storage = max((UNITS[dtype][0] for dtype in recorded.parameter_dtypes), default=0.0)
        self.moved = [n for n in first if n not in recorded.unchanged]
        self.large = [n for n in first if role_of(n) in LARGE]
        sets = (recorded.used, recorded.raw)
        own = (one for one in sets if len(one) == recorded.steps and all(len(each) > len(first) / 2 for each in one))
        self.given = next(own, None)  # the dump's own gradients of all steps, after clipping where it has them
        if self.given is None and self.reading is None and not self.formula.wrong:  # nothing else tells what is trained
            self.formula = self._of_change()
            for id, detail in self.formula.wrong:
                self.findings.add(id, "loss", f"the first change goes against this gradient: {detail}", SEEN)
        self.made = [] if self.given is not None else self._predicted()
        self.gradients: Sequence[Gradient] = [Gradient.of(one) for one in self.given or [one.whole for one in self.made]]
        self.rounding = Rounding(self.storage, {name: one / 4 for name, one in self.allowed.items()}, 1e-9)
        if self.given is not None:
            units = [UNITS[dtype] for dtype in recorded.gradient_dtypes]
            least, relative = max(least for _, least in units), max(unit for unit, _ in units)
            relative = relative if recorded.float64 else max(relative, 3e-7)  # AdamW's own arithmetic in float32
            self.rounding = Rounding(self.storage, dict.fromkeys(first, least), relative)

    def judge(self) -> None:
        """Search the rule, and compare it with the settings."""
        recorded, after, findings = self.recorded, self.recorded.parameters[1:], self.findings
        names = [n for n in self.moved if all(n in one for one in after)]
        if not names:
            return
        if not self.gradients:
            lacking = [n for n in recorded.parameters[0] if any(n not in one for one in after)]
            why = "the gradients of the later ones cannot be computed; dump these parameters, or all gradients"
            words = f"the update is undetermined: without {findings.places(lacking)} after each step, {why}"
            findings.leave_open("update", words)
            return
        known = [n for n in names if all(n in one for one in self.gradients)]
        run = self._run(self.gradients, known)
        if not run.tracks:
            words = "no entry's gradient is known well enough; dump gradients and parameters in float32"
            findings.leave_open("update", words)
            return
        chosen, variants = self._chosen(list(run.tracks.values())), self._variants()
        runs = [[run], *([self._run(one.gradients, chosen)] for one in variants[1:])]
        likely = 2 if len(variants) > 1 and variants[1].id == "gradient-not-zeroed" else 1
        clips, free = self._clips(bool(run.norms.stacks))
        search = RuleSearch(runs, chosen, self.settings, clips, free, likely, self.predictor.deadline)
        answer = search.best()
        if (variant := variants[answer.variant]).id:
            findings.add(variant.id, variant.where, variant.detail, SEEN)
            self.gradients = variant.gradients
            run = self._run(self.gradients, known)
        movement = Movement(answer, [run], self.settings, {name: role_of(name) for name in recorded.parameters[0]})
        for one in [one for one in variants if one.where == "wte" and TABLE in movement.odd]:  # by one of its two gradients
            own = replace(self._run(one.gradients, [TABLE]), norms=run.norms).clipped(answer.clip, [TABLE])
            if any(map(movement.add, own)):
                findings.add(one.id, one.where, one.detail, SEEN)
                break
        self._judge_clip(answer, search)
        self._judge(movement, answer, [n for n in names if n not in known])

    # Gradients

    def _run(self, gradients: Sequence[Gradient], names: Sequence[str]) -> Run:
        sides = itertools.pairwise(self.recorded.parameters)
        updates = [Update(*pair, gradients[step], call=step) for step, pair in enumerate(sides)]
        return Run.of(updates, names, Norms(gradients, self.large, self.recorded.stacks), self.rounding)

    @property
    def _is_clipped(self) -> bool:
        """Whether the gradients are those after clipping."""
        clipped = self.reading is not None and (self.reading.clipped is not None or self.reading.cut)
        return self.given is not None and (self.given is self.recorded.used or clipped)

    def _clips(self, stacked: bool) -> tuple[list[Clip | None], list[ClipKind]]:
        """Return how the gradients may be clipped, the likeliest first, and kinds of clipping whose limit may be any."""
        given = self.settings.clip
        if self._is_clipped:
            return [None], []
        limits = [limit for limit in (given, *LIMITS) if limit]
        usual = [ClipKind.NORM, ClipKind.ENTRY, ClipKind.PARAMETER, ClipKind.STACK, ClipKind.LARGEST, ClipKind.SUM]
        pairs = [*itertools.product(usual, limits), *itertools.product((ClipKind.SQUARES, ClipKind.MATRICES), limits[:1])]
        known = [Clip(kind, limit) for kind, limit in pairs if stacked or kind is not ClipKind.STACK]
        first = [Clip(ClipKind.NORM, given), None] if given else [None]
        return list(dict.fromkeys([*first, *known])), [kind for kind in PIECES[: 2 + stacked] if given != 0]

    def _predicted(self) -> list[Gradients]:
        """Return gradients at the dump's own parameters; none if it lacks parameters between the steps."""
        before, again = self.recorded.parameters[:-1], self.predictor.again
        if any(weights.keys() != before[0].keys() for weights in before):
            return []
        return [self.predictor.gradients(weights, step, again(self.formula, step)) for step, weights in enumerate(before)]

    def _of_change(self) -> Formula:
        """Return the loss against whose gradient most entries move in the first step."""
        first, second = self.recorded.parameters[:2]
        known = [n for n in self.moved if n in second]
        names = [n for n in known if first[n].ndim == 2 and n != TABLE] or known
        best, most = self.formula, -1.0
        for formula in self.predictor.formulas(0).values():
            made = self.predictor.gradients(first, 0, formula).whole
            clear = {n: made[n].abs() > 100 * self.allowed[n] for n in names}
            against = [((second[n] - first[n]).sign() == -made[n].sign())[clear[n]] for n in names]
            share = sum(float(one.double().mean()) for one in against if len(one)) / max(len(names), 1)
            best, most = (formula, share) if share > most + 0.01 else (best, most)
            if not self.predictor.can_try:
                break
        return best

    def _variants(self) -> list[Variant]:
        """Return what the gradients may be: computed ones may be summed over the steps, or lack a part."""
        plain, made = self.gradients, self.made
        found = [Variant(plain)]
        if made and len(plain) > 1:
            detail = "each step uses the sum of its gradient and those of the steps before"
            found.append(Variant(list(itertools.accumulate(plain, Gradient.plus)), "gradient-not-zeroed", "gradient", detail))
        if made and (still := self.recorded.unchanged):
            moving = [Gradient({n: g for n, g in one.items() if n not in still}) for one in plain]
            detail = "no gradient reaches these parameters, and they never change"
            found.append(Variant(moving, "parameters-frozen", still, detail))
        for word, part in (("the head's", "head"), ("the rows'", "table")) if made else ():
            gradients = [Gradient(one | Gradient.of(getattr(own, part))) for one, own in zip(plain, made, strict=True)]
            found.append(Variant(gradients, "tied-gradient-lost", "wte", f"it moves by {word} gradient only, and by no other"))
        return found

    def _chosen(self, tracks: Sequence[Track]) -> list[str]:
        """Return some matrices, and the parameters whose changes are known best."""
        matrices = [one.name for one in tracks if role_of(one.name) == "matrix"] or [one.name for one in tracks]
        picks = [matrices[n] for n in np.unique(np.linspace(0, len(matrices) - 1, TENSORS - 2).round().astype(int))]

        def doubt(one: Track) -> float:
            assert one.noise is not None
            return float(np.median(one.noise) / max(np.median(np.abs(one.change)), 1e-300))

        known = [one.name for one in sorted(tracks, key=doubt) if one.before.shape[1] >= 8]
        return picks + [name for name in known if name not in picks][:3]

    # What they show

    def _judge(self, movement: Movement, answer: Answer, lacking: Sequence[str]) -> None:
        """Compare the movement with the settings; of ``lacking`` parameters, no gradient is known."""
        recorded, findings, own = self.recorded, self.findings, Findings(self.findings.places)
        UpdateComparison(own, movement, self.settings, range(recorded.steps)).judge()
        few = len(movement.odd) > len(movement.rules) / 2 or (movement.odd and answer.error > EXPLAINED)
        if few:  # a rule that gives the change of few parameters is not theirs
            own.causes = []
        if recorded.narrow:  # rounding hides a decay, and the rate of some; of several departures at once, others may do the same
            own.causes = [one for one in own.causes if one.id == "decay-coupled" or not one.id.startswith("decay-")]
            several = len(own.causes) > 1 or answer.error > EXPLAINED
            own.causes = [one for one in own.causes if not several and (one.id != "rate-wrong" or one.where == "optimizer")]
            own.leave_open("update", HALF)
        hidden = ("read off",) if few or recorded.narrow else ("read off: betas",) if recorded.steps == 1 else ()
        findings.causes += own.causes
        findings.notes += [note for note in own.notes if not note.startswith(hidden)]
        findings.unknown |= own.unknown
        findings.errors |= own.errors
        if recorded.steps == 1:
            findings.notes.append("one step does not determine the betas; dump a second one")
        if still := [n for n in recorded.unchanged if self._would_show(n, movement)]:
            findings.add("parameter-missing", still, "these have gradients, and never change", SEEN)
        if lacking:
            words = f"the update of {findings.places(lacking)} was not judged: dump the gradients of all parameters"
            findings.notes.append(words)

    def _would_show(self, name: str, movement: Movement) -> bool:
        """Return whether a parameter has a gradient by which most entries would change in the dump, as the others do."""
        track, rates = self._run(self.gradients, [name]).tracks.get(name), movement.common()[0]
        if track is None or not len(rates):
            return False
        moved = np.abs((rates[:, None] * directions(movement.rule, track)).sum(0))
        return bool((moved > self.storage * np.abs(track.before[0])).mean() > 0.5)

    def _judge_clip(self, answer: Answer, search: RuleSearch) -> None:
        """Compare the clipping with the settings, where the parameters or gradients can show it."""
        wanted, recorded, norm = self.settings.clip, self.recorded, max(one.total for one in self.gradients)
        clip = answer.clip
        if self.given is not None and self.given is recorded.used:
            pairs = zip(recorded.raw, recorded.used, strict=True)
            updates = [Update(held=Gradient.of(raw), gradient=Gradient.of(used)) for raw, used in pairs]
            reading = read_clipping([updates], 1.0, SAME)
        elif self._is_clipped:
            if self.reading is None or self.reading.clipped is None:
                return
            reading = ClipReading(clip=Clip(ClipKind.NORM, self.reading.clipped), largest=norm)
        else:
            if answer.error > EXPLAINED or (wanted is not None and norm <= (wanted or math.inf) * BITES and clip is None):
                return
            other = Clip(ClipKind.NORM, wanted or 1.0) if clip is None else None
            if all(fit(one, answer.rule, answer.rates).error <= EXPLAINED for one in search.tracks(replace(answer, clip=other))):
                words = f"whether gradients (of norms up to {norm:.3g}) are clipped does not show in these parameters; "
                words += "dump the gradients after clipping too, or more steps with other batches"
                self.findings.notes += [] if wanted == 0 else [words]
                return
            if wanted and clip is not None and clip.kind is ClipKind.NORM and clip.limit > norm:
                clip = None
            reading = ClipReading(clip=clip, largest=norm)
        judge_clipping(self.findings, reading, wanted)
