"""Causes in a dump's update: the rule that gives its parameters, the clipping before it, and each parameter's rate and decay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpt2.port.dump.tolerance import UNITS
from gpt2.port.step.causes import STAGES, Stage, cause
from gpt2.port.step.clipping import BITES, LIMITS, Clip, ClipKind, ClipReading, Norms, clip_stage, clipped, read_clipping
from gpt2.port.step.dump_gradients import Evidence, GradientReading
from gpt2.port.step.expected import TABLE, Gradients, role_of
from gpt2.port.step.fitting import EXPLAINED
from gpt2.port.step.labels import Formula
from gpt2.port.step.movement import Movement
from gpt2.port.step.optimizer import update_stage
from gpt2.port.step.records import Gradient, Update
from gpt2.port.step.rules import Track, directions, fit
from gpt2.port.step.search import Answer, RuleSearch, Run

SEEN = "the dump's parameters before and after each step"
TENSORS = 4  # that the search uses
ENTRIES = 256  # of each parameter that are compared
SAME = 1e-3  # relative rounding of gradients before and after clipping
PIECES = (ClipKind.ENTRY, ClipKind.PARAMETER, ClipKind.STACK)
HALF = (
    "the parameters are in half precision, which hides decay, eps, betas and most clipping: whether these are right is "
    "undetermined; dump the parameters in float32"
)


@dataclass(frozen=True)
class Variant:
    """Gradients that the updates may have used, and the cause if they did: its id, place and detail."""

    gradients: Sequence[Gradient]
    id: str = ""
    where: str = ""
    detail: str = ""


@dataclass
class UpdateExamination(Evidence):
    """The comparison of one dump's parameters after each step with the rules of optimizers; ``formula``: of the loss trained."""

    reading: GradientReading | None
    formula: Formula

    def __post_init__(self) -> None:
        recorded, first = self.recorded, self.recorded.parameters[0]
        self.found = {name: Stage() for name in STAGES}
        self.storage = max((UNITS[dtype][0] for dtype in recorded.parameter_dtypes), default=0.0)
        self.moved = [n for n in first if n not in recorded.unchanged]
        sets = (recorded.used, recorded.raw)
        own = (one for one in sets if len(one) == recorded.steps and all(len(each) > len(first) / 2 for each in one))
        self.given = next(own, None)  # the dump's own gradients of all steps, after clipping where it has them
        if self.given is None and self.reading is None and not self.formula.wrong:  # nothing else tells what is trained
            self.formula = self._of_change()
            words = "the first change goes against this gradient"
            found = (cause(id, "loss", f"{words}: {detail}", SEEN) for id, detail in self.formula.wrong)
            self.found["loss"].causes += found
        self.made = [] if self.given is not None else self._predicted()
        self.gradients = [Gradient.of(one) for one in self.given or [one.whole for one in self.made]]

    def stages(self) -> dict[str, Stage]:
        """Search the rule, and compare it with the settings."""
        recorded, after, stage = self.recorded, self.recorded.parameters[1:], self.found["update"]
        names = [n for n in self.moved if all(n in one for one in after)]
        if not names:
            return self.found
        if not self.gradients:
            lacking = [n for n in recorded.parameters[0] if any(n not in one for one in after)]
            stage.leave_open(
                f"the update is undetermined: without {self.places(lacking)} after each step, the gradients of the later ones "
                "cannot be computed; dump these parameters, or all gradients"
            )
            return self.found
        known = [n for n in names if all(n in one.samples for one in self.gradients)]
        run = self._run(self.gradients, known)
        if not run.tracks:
            stage.leave_open("no entry's gradient is known well enough; dump gradients and parameters in float32")
            return self.found
        chosen, variants = self._chosen(list(run.tracks.values())), self._variants()
        runs = [[run], *([self._run(one.gradients, chosen)] for one in variants[1:])]
        likely = 2 if len(variants) > 1 and variants[1].id == "gradient-not-zeroed" else 1
        clips, free = self._clips(bool(run.norms.stacks))
        self.search = RuleSearch(runs, chosen, self.settings, clips, free, likely, self.predictor.deadline)
        answer = self.search.best()
        if (variant := variants[answer.variant]).id:
            self._blame(variant)
            self.gradients = list(variant.gradients)
            run = self._run(self.gradients, known)
        roles = {name: role_of(name) for name in recorded.parameters[0]}
        movement = Movement.of(answer, [run], self.settings, roles)
        for one in [one for one in variants if one.where == "wte" and TABLE in movement.odd]:  # by one of its two gradients
            track = self._track(TABLE, one.gradients)
            if track is not None and movement.add(clipped(track, answer.clip, run.norms)):
                self._blame(one)
                break
        self._clip(answer)
        self._judge(movement, answer, [n for n in names if n not in known])
        return self.found

    def _blame(self, one: Variant) -> None:
        self.found["gradient"].causes.append(cause(one.id, one.where, one.detail, SEEN))

    # Gradients

    @property
    def _is_clipped(self) -> bool:
        """Whether the gradients are those after clipping."""
        clipped = self.reading is not None and (self.reading.clipped is not None or bool(self.reading.clip.causes))
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
            moving = [Gradient.of({n: g for n, g in one.whole.items() if n not in still}) for one in made]
            detail = "no gradient reaches these parameters, and they never change"
            found.append(Variant(moving, "parameters-frozen", self.places(still), detail))
        for word, part in (("the head's", "head"), ("the rows'", "table")) if made else ():
            shares = [Gradient.of(getattr(one, part)) for one in made]
            gradients = [Gradient(a.samples | b.samples, a.sizes | b.sizes) for a, b in zip(plain, shares, strict=True)]
            found.append(Variant(gradients, "tied-gradient-lost", "wte", f"it moves by {word} gradient only, and by no other"))
        return found

    def _run(self, gradients: Sequence[Gradient], names: Sequence[str]) -> Run:
        large = [n for n in self.recorded.parameters[0] if role_of(n) in ("matrix", "embedding")]
        tracks = (self._track(n, gradients) for n in names if all(n in one.samples for one in gradients))
        return Run({track.name: track for track in tracks if track is not None}, Norms(gradients, large, self.recorded.stacks))

    def _track(self, name: str, gradients: Sequence[Gradient]) -> Track | None:
        """Return a parameter's track at entries whose gradient is known well enough; None if there are none."""
        noise, relative = self.allowed[name] / 4, 1e-9  # the absolute and the relative error of the gradient
        if self.given is not None:
            units = [UNITS[dtype] for dtype in self.recorded.gradient_dtypes]
            noise, relative = max(least for _, least in units), max(unit for unit, _ in units)
            relative = relative if self.recorded.float64 else max(relative, 3e-7)  # AdamW's own arithmetic in float32
        values = [one[name].reshape(-1) for one in self.recorded.parameters]
        gradient = torch.stack([one.samples[name] for one in gradients])
        doubt = (noise / gradient.abs().clamp(min=1e-300) + relative).amax(0)
        keep = torch.nonzero(doubt < 0.05)[:, 0]
        if not len(keep):
            return None
        if len(keep) > ENTRIES:
            order = keep[gradient[0, keep].abs().argsort()]
            keep = order[torch.linspace(0, len(order) - 1, ENTRIES).round().long()]
        before, after = (torch.stack([one[keep] for one in some]) for some in (values[:-1], values[1:]))
        gradient, change = gradient[:, keep], after - before
        size = change.abs().median(1, keepdim=True).values
        error = self.storage * (before.abs() + after.abs()) + (doubt[keep] + 1e-9) * torch.maximum(size, change.abs()) + 1e-30
        seen, small = np.ones(len(gradients), dtype=np.bool_), role_of(name) in ("norm", "bias")
        return Track(name, before.numpy(), gradient.numpy(), change.numpy(), seen, error.numpy(), small)

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
        recorded = self.recorded
        stage = self.found["update"] = update_stage(movement, self.settings, self.places, list(range(recorded.steps)))
        few = len(movement.odd) > len(movement.rules) / 2 or (movement.odd and answer.error > EXPLAINED)
        if few:  # a rule that gives the change of few parameters is not theirs
            stage.causes = []
        if recorded.narrow:  # rounding hides a decay, and the rate of some; of several departures at once, others may do the same
            stage.causes = [one for one in stage.causes if one.id == "decay-coupled" or not one.id.startswith("decay-")]
            several = len(stage.causes) > 1 or answer.error > EXPLAINED
            stage.causes = [one for one in stage.causes if not several and (one.id != "rate-wrong" or one.where == "optimizer")]
            stage.leave_open(HALF)
        hidden = ("read off",) if few or recorded.narrow else ("read off: betas",) if recorded.steps == 1 else ()
        stage.notes = [note for note in stage.notes if not note.startswith(hidden)]
        if recorded.steps == 1:
            stage.notes.append("one step does not determine the betas; dump a second one")
        if still := [n for n in recorded.unchanged if self._would_show(n, movement)]:
            detail = "these have gradients, and never change"
            stage.causes.append(cause("parameter-missing", self.places(still), detail, SEEN))
        if lacking:
            stage.notes.append(f"the update of {self.places(lacking)} was not judged: dump the gradients of all parameters")

    def _would_show(self, name: str, movement: Movement) -> bool:
        """Return whether a parameter has a gradient by which most entries would change in the dump, as the others do."""
        track = self._track(name, self.gradients) if all(name in one.samples for one in self.gradients) else None
        rates = movement.common()[0]
        if track is None or not len(rates):
            return False
        moved = np.abs((rates[:, None] * directions(movement.rule, track)).sum(0))
        return bool((moved > self.storage * np.abs(track.before[0])).mean() > 0.5)

    def _clip(self, answer: Answer) -> None:
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
            rates = np.array([self.settings.rate(step) for step in range(recorded.steps)]) if answer.as_set else None
            if all(fit(one, answer.rule, rates).error <= EXPLAINED for one in self.search.tracks((answer.variant, other))):
                words = f"whether gradients (of norms up to {norm:.3g}) are clipped does not show in these parameters; "
                words += "dump the gradients after clipping too, or more steps with other batches"
                self.found["clip"].notes += [] if wanted == 0 else [words]
                return
            if wanted and clip is not None and clip.kind is ClipKind.NORM and clip.limit > norm:
                clip = None
            reading = ClipReading(clip=clip, largest=norm)
        self.found["clip"] = clip_stage(reading, wanted, "some parameters")
