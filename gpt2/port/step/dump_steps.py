"""Examine a dump of training steps: recognise its arrays, compare each stage, and say what it shows and what it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.checkpoint.containers import shown
from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.measure.dumps import Dump
from gpt2.port.deadline import Deadline
from gpt2.port.diagnosis.places import Place, listed
from gpt2.port.diagnosis.report import Diagnosis
from gpt2.port.step.causes import STAGES
from gpt2.port.step.gradient_comparison import Compared
from gpt2.port.step.gradient_formulas import GradientReading
from gpt2.port.step.gradient_stage import GradientExamination
from gpt2.port.step.gradients import IGNORED, TABLE
from gpt2.port.step.layouts import Layouts, Weights, units_of
from gpt2.port.step.loss_stage import Losses, loss_stage, losses_of, mean_loss, right_losses
from gpt2.port.step.predictions import Batch, Predictor, rounding
from gpt2.port.step.recognition import Recogniser, Recorded
from gpt2.port.step.settings import Settings
from gpt2.port.step.trained import Stage, concluded
from gpt2.port.step.update_stage import UpdateExamination

SAVE = "save the loss, every gradient, and every parameter before and after each step, in the checkpoint's shapes or transposed"
HIDDEN = (
    "no parameter changes by more than its rounding in half precision, so the update is undetermined; "
    "dump the parameters in float32"
)


@dataclass(frozen=True)
class StepArrays:
    """A dump, sorted: what was recorded of training steps, its losses, and the names of all these arrays."""

    recorded: Recorded
    losses: list[Losses]
    names: set[str]

    @property
    def changes(self) -> bool:
        """Whether gradients or updates were recorded, and not numbers alone that may be losses."""
        return any(self.recorded.raw) or self.recorded.steps > 0


def batches_of(dump: Dump) -> list[Batch]:
    """Return the batch of each step: ids (B, T) or (K, B, T), with the targets of the same shape if the dump has them.

    Raises InputError: rows of one token, without targets.
    """
    ids = dump.batches
    targets = next((one for one in dump.integers.values() if one.shape == ids.shape and not torch.equal(one, ids)), None)
    same = any(one.shape == ids.shape and torch.equal(one, ids) for one in dump.integers.values())
    found = []
    for number, rows in enumerate(ids):
        right = torch.full_like(rows, IGNORED)
        right[:, :-1] = rows[:, 1:]
        given = None if targets is None else targets[number]
        if given is not None and not same:
            alike = rows.shape[-1] == 1 or float((given[:, :-1] == right[:, :-1]).double().mean()) > 0.5
            if alike or bool((given < 0).any()):
                right[:, -1] = given[:, -1]
            right = right.masked_fill(given < 0, IGNORED)
        if not bool((right >= 0).any()):
            raise InputError(f"{dump.source}: its rows have one token each, so nothing is learnt; dump the next ids as targets")
        found.append(Batch(rows, right))
    return found


class StepExamination:
    """The diagnosis of the training steps in one dump; ``state`` holds the right weights, in float64 on the CPU."""

    def __init__(
        self, dump: Dump, config: GPT2Config, state: Mapping[str, Tensor], settings: Settings | None, deadline: Deadline
    ) -> None:
        self.dump, self.settings, self.asked = dump, settings or Settings(), settings is not None
        self.config, self.state, self.deadline = config, state, deadline
        self.stages: dict[str, Stage] = {name: Stage() for name in STAGES}
        self.notes: list[str] = []
        self.judged = False  # whether some loss is explained, as right or by a cause
        self.formula = 0.0, 1.0  # the smoothing of the labels and the factor of the logits, by the loss

    def sorted(self) -> StepArrays | None:
        """Return what the dump holds of training steps; None if it holds nothing. Raises InputError: NaN, nothing changes."""
        layouts = Layouts(units_of(self.state), self.config)
        fitting = {name: array for name, array in self.dump.arrays.items() if next(layouts.views(array), None) is not None}
        losses = losses_of({name: array for name, array in self.dump.arrays.items() if name not in fitting})
        if not fitting and not losses:
            self._require_steps()
            return None
        try:
            batches = batches_of(self.dump)
        except InputError:
            if self.asked:
                raise
            return None  # a forward pass of one token, whose values have the sizes of parameters
        self.predictor = Predictor(self.config, batches, self.settings.grad_accum, self.deadline)
        batch = self.predictor.batch(0)
        covered = {name.partition(":")[0] for array in fitting.values() for view in layouts.views(array) for name in view}
        # few arrays have the sizes of parameters in a dump of a forward pass: no gradients of wrong labels are needed there
        labelled = 2 * len(covered) >= len(self.state) or self.asked or bool(self.dump.integers)
        self.exact = self.predictor.gradients(self.state, batch.ids, batch.targets)
        recogniser = Recogniser(layouts, self.state, self._predicted(labelled) if fitting else ())
        pieces, rest = recogniser.pieces(fitting)
        for name, array in rest.items():
            if not bool(array.isfinite().all()) and (self.asked or pieces):
                raise InputError(
                    f"{self.dump.source}: {shown(name)} holds NaN or infinity; look which step of the program makes it"
                )
        recorded = recogniser.recorded(pieces, fitting, self._options, len(self.predictor.batches))
        self._zeros(recorded, rest, layouts)
        self._require_change(recorded, [piece.units for piece in pieces if piece.kind == "parameter"], any(recorded.raw))
        for loss in losses:
            wrong = loss.values[~loss.values.isfinite()]
            if len(wrong) and (self.asked or pieces or bool(wrong.isnan().any())):
                raise InputError(f"{self.dump.source}: {shown(loss.name)} is {float(wrong[0])}; look where it comes from")
        losses = [loss for loss in losses if bool(loss.values.isfinite().all())]  # a mask's infinity is no loss
        names = {*recorded.names, *(loss.name for loss in losses)}
        found = StepArrays(recorded, losses, names)
        if not found.changes and (not losses or not (self.asked or self.dump.integers)):
            self._require_steps()
            return None
        return found

    def _predicted(self, labelled: bool) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """Yield the gradients of each batch at the checkpoint, with their labels; a later step's are near those of its batch."""
        for number, batch in enumerate(self.predictor.batches):
            known = self.predictor.labelings(number) if labelled and self.predictor.can_try else {"": batch.targets}
            for label, labels in known.items():
                exact = number == 0 and not label
                made = self.exact if exact else self.predictor.gradients(self.state, batch.ids, labels)
                yield f"{number} {label}", made.whole
                if not label:
                    yield f"{number} head", {**made.whole, TABLE: made.head}
                    yield f"{number} table", {**made.whole, TABLE: made.table}

    def seen(self, found: StepArrays) -> bool:
        """Return whether the dump is one of a step, after :meth:`diagnosis`.

        Some number that fits no loss is no sign of one, nor are a few arrays of a gradient's shape that no gradient explains.
        """
        gradients = max((len(one) for one in found.recorded.raw), default=0)
        known = 2 * gradients >= len(self.state) or (gradients > 0 and self.stages["gradient"].explained)
        known = known or any(stage.causes for stage in self.stages.values())
        return self.asked or known or found.recorded.steps > 0 or (bool(found.losses) and self.stages["loss"].explained)

    def _require_steps(self) -> None:
        """Raise InputError for a dump that holds nothing of a step, if one is asked for."""
        if self.asked:
            sizes = ", ".join(f"{shown(n)} {tuple(a.shape)}" for n, a in list(self.dump.arrays.items())[:3])
            raise InputError(f"{self.dump.source}: holds no loss, gradient or parameter of this model ({sizes}); {SAVE}")

    def _options(self, weights: Weights, step: int, label: str) -> list[Weights]:
        """Return the gradients that step ``step`` from some weights may have, with right labels and with those of ``label``."""
        batch = self.predictor.batch(step)
        known = self.predictor.labelings(step)
        ways = [batch.targets, *([known[label]] if label and label in known else [])]
        return [self.predictor.gradients(weights, batch.ids, labels).whole for labels in ways]

    def _zeros(self, recorded: Recorded, rest: Mapping[str, Tensor], layouts: Layouts) -> None:
        """Take arrays of zeros for the gradients that were not recognised."""
        zeros = [name for name, array in rest.items() if not bool(array.any())]
        for step, one in enumerate(recorded.raw):
            if not one or not zeros:
                continue
            for name, tensor in self.state.items():
                if name not in one and any(name in view for zero in zeros for view in layouts.views(rest[zero])):
                    recorded.raw[step][name] = torch.zeros_like(tensor)
        recorded.names |= set(zeros) if any(recorded.raw) else set()

    def _require_change(self, recorded: Recorded, units: Sequence[tuple[str, ...]], gradients: bool) -> None:
        if recorded.steps or not units:
            return
        twice = len(units) - len(set(units)) > len(set(units)) / 2
        if recorded.narrow:  # half precision may hide every change
            if twice:
                self.stages["update"].leave_open(HIDDEN)
            return
        if twice or (not gradients and self.asked):
            raise InputError(f"{self.dump.source}: no parameter changes; dump copies of the parameters after the step too")

    # Stages

    def diagnosis(self, found: StepArrays, forward: Diagnosis | None) -> Diagnosis:
        """Compare each stage of what the dump holds; ``forward`` is the diagnosis of its forward pass, if it has one."""
        recorded = found.recorded
        reading: GradientReading | None = None
        good = forward is None or forward.verdict != "mismatch"
        if any(recorded.raw) or recorded.steps:
            start, batch = recorded.parameters[0], self.predictor.batch(0)
            known = all(torch.equal(start[name], tensor) for name, tensor in self.state.items())
            exact = self.exact if known else self.predictor.gradients(start, batch.ids, batch.targets)
            allowed = rounding(self.predictor, start, batch, exact, torch.float64 if recorded.float64 else torch.float32)
            compared = Compared(recorded, self.predictor, self.settings, self._places, allowed)
        if any(recorded.raw) and good:
            reading = GradientExamination(compared, exact).reading()
            self.stages["gradient"] = reading.stage
            self.stages["clip"].causes += reading.clip_causes
        self._losses(found, reading, good)
        if recorded.steps:
            for name, more in UpdateExamination(compared, reading, self.formula).stages().items():
                self.stages[name].absorb(more)
        self._describe(found)
        said = concluded(self.stages, forward, self.notes, self.dump.source)
        return replace(said, seen="dump", logits_error=None if forward is None else forward.logits_error)

    def _losses(self, found: StepArrays, reading: GradientReading | None, good: bool) -> None:
        """Compare the losses with those of the dump's own parameters."""
        recorded, losses = found.recorded, found.losses
        if not losses or not good:
            return
        exact = any(one.dtype == torch.float64 for one in losses) and recorded.float64
        expected: list[float] = []
        first: Tensor | None = None
        for step, weights in enumerate(recorded.parameters):
            if weights.keys() != self.state.keys():
                break
            batch = self.predictor.batch(step)
            logits = self.predictor.logits(weights, batch.ids)
            first = logits if first is None else first
            expected.append(mean_loss(logits, batch.targets))
        right = right_losses(losses, expected, exact)
        stage = self.stages["loss"]
        self.judged = bool(right)
        if right or first is None:
            return
        for one in losses:
            made = loss_stage(one, first, self.predictor, self.settings, exact, reading)
            if made is not None:
                known = {c.id for each in self.stages.values() for c in each.causes}
                if (
                    reading is not None
                    and not known & {c.id for c in made.causes}
                    and reading.explained
                    and reading.clipped is None
                ):
                    said = ", ".join(c.detail for c in made.causes)
                    stage.notes.append(
                        f"the loss that is dumped is not the one that is trained ({said}); the gradients are of the mean"
                    )
                else:
                    stage.causes += [c for c in made.causes if c.id not in known]
                    stage.error = made.error
                self.judged = True
                self.formula = made.smoothing, made.factor
                return
        if any(c.id in ("label-smoothing", "logits-scaled") for each in self.stages.values() for c in each.causes):
            return
        if len(losses) == 1 or self.asked:
            values = ", ".join(f"{float(one.values[0]):.6g}" for one in losses[:3])
            stage.leave_open(f"the loss {values} is of no known mistake; the mean cross-entropy is {expected[0]:.6g}")

    def _places(self, names: Sequence[str]) -> str:
        return listed(map(Place.of, names), self.config.n_layer)

    def _describe(self, found: StepArrays) -> None:
        """Note what the dump holds, and what it lacks."""
        recorded = found.recorded
        holds = ["the loss"] if self.judged else []
        sets = sum(bool(one) for one in recorded.raw)
        if sets:
            more = " before and after clipping" if any(recorded.used) else ""
            holds.append(f"gradients of {_steps(sets)}{more}")
        if recorded.steps:
            holds.append(f"parameters after {_steps(recorded.steps)}")
        if holds or self.asked:
            self.notes.append(f"the dump holds {', '.join(holds) or 'nothing of a step that was recognised'}")
        if recorded.steps and not sets:
            self.notes.append(
                "gradients are not dumped: they were computed at its own parameters; Adam hides a factor of them, so dump them "
                "to see a summed loss"
            )
        if not recorded.steps and (sets or self.judged) and self.stages["update"].explained:
            lacking = "the update was" if sets else "gradients, clipping and update were"
            self.notes.append(f"{lacking} not judged: dump the parameters after each step{'' if sets else ', and the gradients'}")
        left = [name for name in self.dump.arrays if name not in found.names]
        if left and not recorded.steps and not sets and self.asked:
            self.notes.append(f"not recognised: {', '.join(shown(name) for name in left[:4])}")


def _steps(count: int) -> str:
    return "a step" if count == 1 else f"{count} steps"
