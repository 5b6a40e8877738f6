"""Causes in a dump's update: the rule that gives its parameters, the clipping before it, and each parameter's rate and decay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gpt2.port.diagnosis.report import Cause
from gpt2.port.dump.tolerance import UNITS
from gpt2.port.step.causes import STAGES, cause
from gpt2.port.step.clip_causes import clip_stage
from gpt2.port.step.clip_reading import dumped_clip, norms_of
from gpt2.port.step.clipping import BITES, Clip, ClipKind, ClipReading, Norms, clipped
from gpt2.port.step.gradient_comparison import Compared
from gpt2.port.step.gradient_formulas import GradientReading
from gpt2.port.step.gradients import TABLE, Gradients, role_of
from gpt2.port.step.optimizer import update_stage
from gpt2.port.step.rule_search import Answer, RuleSearch, fit_parameter, gauged
from gpt2.port.step.rules import Kind, Track, fit
from gpt2.port.step.stepping import Movement
from gpt2.port.step.trained import Stage
from gpt2.port.step.update_gradients import label_of_change, own_gradients, predicted_gradients
from gpt2.port.step.updates import EXPLAINED

SEEN = "the dump's parameters before and after each step"

TENSORS = 4  # that the search uses
ALLOWED = 1.25  # times EXPLAINED: for one parameter, of fewer entries than the search has


def _keep_decided(stage: Stage, answer: Answer) -> None:
    """Keep the causes that parameters in half precision can show: their rounding hides a decay, and the rate of some of them.

    Of several departures from AdamW at once, others may do the same within the rounding.
    """
    stage.causes = [one for one in stage.causes if one.id == "decay-coupled" or not one.id.startswith("decay-")]
    if len(stage.causes) > 1 or answer.error > EXPLAINED:
        stage.causes = []
    stage.causes = [one for one in stage.causes if one.id != "rate-wrong" or one.where == "optimizer"]
    stage.notes = [note for note in stage.notes if not note.startswith("read off")]
    stage.leave_open(
        "the parameters are in half precision, which hides decay, eps, betas and most clipping: whether these are right is "
        "undetermined; dump the parameters in float32"
    )


class UpdateExamination:
    """The comparison of one dump's parameters after each step with the rules of optimizers."""

    def __init__(self, given: Compared, reading: GradientReading | None, formula: tuple[float, float]) -> None:
        recorded, predictor, allowed = given.recorded, given.predictor, given.allowed
        self.recorded, self.predictor, self.allowed = recorded, predictor, allowed
        self.reading, self.settings, self.places = reading, given.settings, given.places
        self.found = {name: Stage() for name in STAGES}
        self.names = [
            n for n in recorded.parameters[0] if all(n in one for one in recorded.parameters[1:]) and n not in recorded.unchanged
        ]
        self.storage = max((UNITS[dtype][0] for dtype in recorded.parameter_dtypes), default=0.0)
        self.given = own_gradients(recorded)
        self.made: list[Gradients] = []
        if self.given is None:
            label = reading.label if reading else label_of_change(recorded, predictor, self.names, allowed)
            if reading is None and label:
                detail = "the first change goes against the gradient of these labels"
                self.found["loss"].causes.append(cause(label.partition(" ")[0], "loss", detail, SEEN))
            self.made = predicted_gradients(recorded, predictor, label, *formula)
        self.gradients = self.given or [one.whole for one in self.made]

    def stages(self) -> dict[str, Stage]:
        """Search the rule, and compare it with the settings."""
        if not self.names:
            return self.found
        if not self.gradients:
            missing = [n for n in self.recorded.parameters[0] if any(n not in one for one in self.recorded.parameters[1:])]
            self.found["update"].leave_open(
                f"the update is undetermined: without {self.places(missing)} after each step, the gradients of the later ones "
                "cannot be computed; dump these parameters, or all gradients"
            )
            return self.found
        names = [n for n in self.names if all(n in one for one in self.gradients)]
        tracks = {n: one for n in names if (one := self._track(n, self.gradients)) is not None}
        if not tracks:
            words = "no entry's gradient is known well enough; dump gradients and parameters in float32"
            self.found["update"].leave_open(words)
            return self.found
        chosen = self._chosen(tracks)
        answer = self._searched(chosen, tracks)
        answer, tracks = self._varied(answer, chosen, tracks)
        movement = self._movement(answer, tracks)
        self._tied(movement, answer)
        self._clip(answer)
        stage = update_stage(movement, self.settings, self.places, list(range(self.recorded.steps)))
        if len(movement.odd) > len(movement.rules) / 2 or (movement.odd and answer.error > EXPLAINED):
            stage.causes = []  # a rule that gives the change of few parameters is not theirs
            stage.notes = [note for note in stage.notes if not note.startswith("read off")]
        if self.recorded.narrow:
            _keep_decided(stage, answer)
        if self.recorded.steps == 1:
            stage.notes = [note for note in stage.notes if not note.startswith("read off: betas")]
            stage.notes.append("one step does not determine the betas; dump a second one")
        stage.causes += self._left_out(answer)
        if lacking := [n for n in self.names if n not in names]:
            stage.notes.append(f"the update of {self.places(lacking)} was not judged: dump the gradients of all parameters")
        if answer.cumulated:
            detail = "each step uses the sum of its gradient and those of the steps before"
            self.found["gradient"].causes.append(cause("gradient-not-zeroed", "gradient", detail, SEEN))
        self.found["update"] = stage
        return self.found

    # Gradients

    @property
    def _is_clipped(self) -> bool:
        """Whether the gradients are those after clipping."""
        clipped = self.reading is not None and (self.reading.clipped is not None or bool(self.reading.clip_causes))
        return self.given is not None and (self.given is self.recorded.used or clipped)

    def _track(self, name: str, gradients: Sequence[Mapping[str, Tensor]]) -> Track | None:
        noise, relative = self.allowed[name] / 4, 1e-9
        if self.given is not None:
            units = [UNITS[dtype] for dtype in self.recorded.gradient_dtypes]
            noise, relative = max(least for _, least in units), max(unit for unit, _ in units)
            if not self.recorded.float64:
                relative = max(relative, 3e-7)  # AdamW's own arithmetic in float32
        parts = [one[name] for one in gradients]
        return gauged(name, self.recorded.parameters, parts, self.storage, noise, relative)

    def _chosen(self, tracks: Mapping[str, Track]) -> list[Track]:
        """Return some matrices, and those whose changes are known best."""
        matrices = [one for one in tracks.values() if role_of(one.name) == "matrix"] or list(tracks.values())
        picks = [matrices[n] for n in np.unique(np.linspace(0, len(matrices) - 1, TENSORS - 2).round().astype(int))]

        def doubt(one: Track) -> float:
            assert one.noise is not None
            return float(np.median(one.noise) / max(np.median(np.abs(one.change)), 1e-300))

        known = [one for one in sorted(tracks.values(), key=doubt) if one.before.shape[1] >= 8]
        return picks + [one for one in known if all(one is not other for other in picks)][:3]

    def _searched(self, chosen: list[Track], tracks: Mapping[str, Track]) -> Answer:
        self.norms = norms_of(self.gradients, self.recorded.stacks)
        sums: list[Track] = []
        norms: Norms | None = None
        if self.given is None and self.recorded.steps > 1:
            self.total = [
                {n: sum((g[n] for g in self.gradients[: k + 1]), torch.zeros_like(self.gradients[0][n])) for n in tracks}
                for k in range(self.recorded.steps)
            ]
            sums = [one for track in chosen if (one := self._track(track.name, self.total)) is not None]
            norms = norms_of(self.total, self.recorded.stacks)
        self.search = RuleSearch(chosen, self.settings, self.norms, not self._is_clipped, sums, norms, self.predictor.deadline)
        return self.search.best()

    def _varied(self, answer: Answer, chosen: list[Track], tracks: dict[str, Track]) -> tuple[Answer, dict[str, Track]]:
        """Try other gradients of some parameters where none are dumped: they change the norm that clipping divides by."""
        if answer.error <= EXPLAINED or not self.made:
            return answer, tracks
        kept = self.gradients
        ways: list[tuple[str, list[dict[str, Tensor]]]] = [
            ("the head's", [{**one.whole, TABLE: one.head} for one in self.made]),
            ("the rows'", [{**one.whole, TABLE: one.table} for one in self.made]),
        ]
        if self.recorded.unchanged:
            frozen = [{n: g for n, g in one.whole.items() if n not in self.recorded.unchanged} for one in self.made]
            ways.insert(0, ("frozen", frozen))
        for word, gradients in ways:
            self.gradients = gradients
            found = self._searched(chosen, tracks)
            if found.error <= EXPLAINED:
                if word == "frozen":
                    detail = "no gradient reaches these parameters, and they never change"
                    self.found["gradient"].causes.append(
                        cause("parameters-frozen", self.places(self.recorded.unchanged), detail, SEEN)
                    )
                    return found, tracks
                detail = f"it moves by {word} gradient only, and by no other"
                self.found["gradient"].causes.append(cause("tied-gradient-lost", "wte", detail, SEEN))
                track = self._track(TABLE, gradients)
                return found, {**tracks, **({TABLE: track} if track is not None else {})}
        self.gradients = kept
        self._searched(chosen, tracks)
        return answer, tracks

    # Each parameter

    def _movement(self, answer: Answer, tracks: Mapping[str, Track]) -> Movement:
        movement = Movement()
        movement.roles = {name: role_of(name) for name in self.recorded.parameters[0]}
        steps = self.recorded.steps
        if answer.cumulated:
            tracks = {n: one for n in tracks if (one := self._track(n, self.total)) is not None}
        norms = self.search.cumulated_norms if answer.cumulated else None
        moved = {n: clipped(one, answer.clip, norms or self.norms) for n, one in tracks.items()}
        matrices = [n for n in moved if role_of(n) == "matrix"] or list(moved)
        fits = {n: fit(moved[n], answer.rule) for n in matrices}
        rates = np.median(np.stack([one.rates for one in fits.values()]), axis=0)
        expected = np.array([self.settings.rate(step) for step in range(steps)]) if self.settings.lr is not None else None
        self.expected = expected
        if expected is not None and answer.as_set:
            good = [fit(moved[n], answer.rule, expected).error <= ALLOWED * EXPLAINED for n in matrices]
            rates = expected if sum(good) > len(good) / 2 else rates
        decay = float(np.median([np.median(one.decays / np.where(rates == 0, 1, rates)) for one in fits.values()]))
        wanted = self.settings.weight_decay
        choices = list(dict.fromkeys(d for d in (wanted, 0.0, 0.1, 0.01, float(f"{decay:.3g}")) if d is not None and d >= 0))
        for name, one in moved.items():
            rule, found = fit_parameter(one, answer.rule, rates, choices)
            movement.rules[name], movement.fits[name] = rule, found
            movement.error = max(movement.error, found.error)
            if found.error > ALLOWED * EXPLAINED:
                movement.odd.append(name)
        self.rates, self.choices = rates, choices
        return movement

    def _tied(self, movement: Movement, answer: Answer) -> None:
        """Explain the token embedding by one of its two gradients, where the sum of both does not; gradients are not dumped."""
        if TABLE not in movement.odd or not self.made:
            return
        for detail, ways in {
            "it moves by the head's gradient only, not by that of the rows that the ids choose": [m.head for m in self.made],
            "it moves by the gradient of the rows that the ids choose only, not by the head's": [m.table for m in self.made],
        }.items():
            track = self._track(TABLE, [{TABLE: way} for way in ways])
            if track is None:
                continue
            one = clipped(track, answer.clip, self.norms)
            rule, found = fit_parameter(one, answer.rule, self.rates, self.choices)
            if found.error <= ALLOWED * EXPLAINED:
                self.found["gradient"].causes.append(cause("tied-gradient-lost", "wte", detail, SEEN))
                movement.rules[TABLE], movement.fits[TABLE] = rule, found
                movement.odd.remove(TABLE)
                return

    def _left_out(self, answer: Answer) -> list[Cause]:
        still = [n for n in self.recorded.unchanged if self._has_gradient(n) and self._would_show(n, answer)]
        if not still:
            return []
        detail = "these have gradients, and never change"
        return [cause("parameter-missing", self.places(still), detail, SEEN)]

    def _has_gradient(self, name: str) -> bool:
        return any(name in one and float(one[name].abs().max()) > 0 for one in self.gradients)

    def _would_show(self, name: str, answer: Answer) -> bool:
        """Return whether most entries would change in the dump by the rule of the others, whose steps are of the rate's size."""
        gradient = next(one[name] for one in self.gradients if name in one)
        size = float(np.abs(self.rates).max()) * (gradient.abs() if answer.rule.kind is Kind.SGD else 1.0)
        return bool((size > self.storage * self.recorded.parameters[0][name].abs()).double().mean() > 0.5)

    # Clipping

    def _clip(self, answer: Answer) -> None:
        wanted, recorded = self.settings.clip, self.recorded
        norm = float(self.norms.whole[ClipKind.NORM].max())
        if self.given is not None and self.given is recorded.used:
            self.found["clip"] = clip_stage(dumped_clip(recorded.raw, recorded.used, wanted), wanted, "some parameters")
            return
        if self._is_clipped:
            assert self.reading is not None
            if self.reading.clipped is not None:
                self.found["clip"] = clip_stage(
                    ClipReading(clip=Clip(ClipKind.NORM, self.reading.clipped), largest=norm), wanted, "some parameters"
                )
            return
        if wanted is not None and norm <= (wanted or math.inf) * BITES and answer.clip is None:
            return
        if answer.error > EXPLAINED:
            return
        other = Clip(ClipKind.NORM, wanted or 1.0) if answer.clip is None else None
        rates = self.expected if answer.as_set else None
        decided = any(fit(one, answer.rule, rates).error > EXPLAINED for one in self.search.clipped(other, answer.cumulated))
        if not decided:
            if wanted or wanted is None:
                self.found["clip"].notes.append(
                    f"whether gradients (of norms up to {norm:.3g}) are clipped does not show in these parameters; "
                    "dump the gradients after clipping too, or more steps with other batches"
                )
            return
        clip = answer.clip
        if wanted and clip is not None and clip.kind is ClipKind.NORM and clip.limit > norm:
            clip = None
        self.found["clip"] = clip_stage(ClipReading(clip=clip, largest=norm), wanted, "some parameters")
