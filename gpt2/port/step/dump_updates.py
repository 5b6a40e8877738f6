"""Causes in the updates of a dump: they are rounded, and come from gradients that it has, or that are computed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gpt2.port.dump.tolerance import UNITS
from gpt2.port.step.causes import Findings
from gpt2.port.step.clipping import BITES, LIMITS, Clip, ClipKind, ClipReading, Norms, judge_clipping, read_clipping
from gpt2.port.step.expected import LARGE, TABLE, Gradients, role_of
from gpt2.port.step.gradients import Evidence, GradientReading
from gpt2.port.step.labels import Formula
from gpt2.port.step.movement import Movement
from gpt2.port.step.records import Gradient, Update
from gpt2.port.step.rule_search import RuleSearch
from gpt2.port.step.rules import Track, directions, fit
from gpt2.port.step.search import EXPLAINED, Answer
from gpt2.port.step.tracks import Rounding, Run
from gpt2.port.step.updates import UpdateComparison

SEEN = "the dump's parameters before and after each step"
TENSORS = 4  # of a dump that the search uses
SAME = 1e-3  # relative rounding of a dump's gradients before and after clipping
PIECES = (ClipKind.ENTRY, ClipKind.PARAMETER, ClipKind.STACK)
HALF = (
    "the parameters are in half precision, which hides small changes, decay, eps, betas and most clipping: whether these are "
    "right is undetermined; dump the parameters in float32"
)


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
