"""Examine a dump of training steps: recognise its arrays, compare each stage, and say what it shows and what it lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from gpt2.checkpoint.containers import shown
from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.measure.dumps import Dump
from gpt2.port.deadline import Deadline
from gpt2.port.diagnosis.places import Place, listed
from gpt2.port.diagnosis.report import Diagnosis
from gpt2.port.step.causes import STAGES, Stage, concluded
from gpt2.port.step.dump_gradients import GradientExamination
from gpt2.port.step.dump_updates import UpdateExamination
from gpt2.port.step.expected import Predictor, Weights
from gpt2.port.step.labels import IGNORED, Batch, Formula
from gpt2.port.step.layouts import Layouts, Piece, units_of
from gpt2.port.step.losses import Losses, dumped_loss, losses_of
from gpt2.port.step.recognition import Recogniser, Recorded
from gpt2.port.step.settings import Settings

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

    @property
    def names(self) -> set[str]:
        return {*self.recorded.names, *(loss.name for loss in self.losses)}

    @property
    def changes(self) -> bool:
        """Whether gradients or updates were recorded, and not numbers alone that may be losses."""
        return any(self.recorded.raw) or self.recorded.steps > 0


def batches_of(dump: Dump) -> list[Batch]:
    """Return the batch of each step: ids (B, T) or (K, B, T), with the targets of the same shape if the dump has them.

    Raises InputError: rows of one token, without targets.
    """
    ids = dump.batches
    alike = [one for one in dump.integers.values() if one.shape == ids.shape]
    targets = None if any(torch.equal(one, ids) for one in alike) else next(iter(alike), None)
    found = []
    for number, rows in enumerate(ids):
        last = torch.full_like(rows[:, :1], IGNORED)
        batch = Batch(torch.cat([rows, last], 1))
        if targets is not None:
            given = targets[number]
            shifted = rows.shape[-1] == 1 or float((given[:, :-1] == rows[:, 1:]).double().mean()) > 0.5
            last = given[:, -1:] if shifted or bool((given < 0).any()) else last
            batch = Batch(torch.cat([rows, last], 1), given < 0)
        if not batch.count:
            raise InputError(f"{dump.source}: its rows have one token each, so nothing is learnt; dump the next ids as targets")
        found.append(batch)
    return found


class StepExamination:
    """The diagnosis of the training steps in one dump; ``state`` holds the right weights, in float64 on the CPU."""

    def __init__(
        self, dump: Dump, config: GPT2Config, state: Mapping[str, Tensor], settings: Settings | None, deadline: Deadline
    ) -> None:
        self.dump, self.settings, self.asked = dump, settings or Settings(), settings is not None
        self.config, self.state, self.deadline = config, state, deadline
        self.stages: dict[str, Stage] = {name: Stage() for name in STAGES}

    # What the dump holds

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
        covered = {name.partition(":")[0] for array in fitting.values() for view in layouts.views(array) for name in view}
        # few arrays have the sizes of parameters in a dump of a forward pass: no gradients of wrong labels are needed there
        labelled = 2 * len(covered) >= len(self.state) or self.asked or bool(self.dump.integers)
        self.exact = self.predictor.gradients(self.state, 0, Formula(batches[0].targets))
        recogniser = Recogniser(layouts, self.state, self._predicted(labelled) if fitting else ())
        parameters, gradients, rest = recogniser.pieces(fitting)
        sure = self.asked or bool(parameters or gradients)
        for name, array in rest.items():
            if sure and not bool(array.isfinite().all()):
                words = "holds NaN or infinity; look which step of the program makes it"
                raise InputError(f"{self.dump.source}: {shown(name)} {words}")
        rows = [len(loss.values) for loss in losses]
        counts = [len(batches), *([max(rows, default=1), rows.count(1)] if len(batches) == 1 else [])]
        recorded = recogniser.recorded(parameters, gradients, fitting, self._options, counts)
        self._zeros(recorded, rest, layouts)
        self._require_change(recorded, parameters)
        for loss in losses:
            wrong = loss.values[~loss.values.isfinite()]
            if len(wrong) and (sure or bool(wrong.isnan().any())):
                raise InputError(f"{self.dump.source}: {shown(loss.name)} is {float(wrong[0])}; look where it comes from")
        found = StepArrays(recorded, [loss for loss in losses if bool(loss.values.isfinite().all())])  # infinity: of a mask
        if not found.changes and not (found.losses and (self.asked or self.dump.integers)):
            self._require_steps()
            return None
        return found

    def _require_steps(self) -> None:
        """Raise InputError for a dump that holds nothing of a step, if one is asked for."""
        if self.asked:
            sizes = ", ".join(f"{shown(n)} {tuple(a.shape)}" for n, a in list(self.dump.arrays.items())[:3])
            raise InputError(f"{self.dump.source}: holds no loss, gradient or parameter of this model ({sizes}); {SAVE}")

    def _predicted(self, labelled: bool) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """Yield the gradients of each batch at the checkpoint, with their labels; a later step's are near those of its batch."""
        for step in range(len(self.predictor.batches)):
            for key, formula in self.predictor.formulas(step).items():
                if not key or (labelled and self.predictor.can_try):
                    made = self.predictor.gradients(self.state, step, formula) if step or key else self.exact
                    yield f"{step} {key}", made.whole
                if not key:
                    yield f"{step} head", made.use(made.head)
                    yield f"{step} table", made.use(made.table)

    def _options(self, weights: Weights, step: int, label: str) -> list[Weights]:
        """Return the gradients that step ``step`` from some weights may have, with right labels and with those of ``label``."""
        known = self.predictor.formulas(step)
        return [self.predictor.gradients(weights, step, known[key]).whole for key in dict.fromkeys(("", label)) if key in known]

    def _zeros(self, recorded: Recorded, rest: Mapping[str, Tensor], layouts: Layouts) -> None:
        """Take arrays of zeros for the gradients that were not recognised."""
        zeros = [name for name, array in rest.items() if not bool(array.any())]
        covered = {name for zero in zeros for view in layouts.views(rest[zero]) for name in view}
        for one in filter(None, recorded.raw):
            one |= {name: torch.zeros_like(self.state[name]) for name in self.state if name in covered and name not in one}
            recorded.names |= set(zeros)

    def _require_change(self, recorded: Recorded, parameters: Sequence[Piece]) -> None:
        if recorded.steps or not parameters:
            return
        units = [piece.units for piece in parameters]
        twice = len(units) - len(set(units)) > len(set(units)) / 2
        if not recorded.narrow and (twice or (not any(recorded.raw) and self.asked)):
            what = "copies of the parameters after the step too, and a step whose rate is not 0"
            raise InputError(f"{self.dump.source}: no parameter changes; dump {what}")
        if recorded.narrow and twice:  # half precision may hide every change
            self.stages["update"].leave_open(HIDDEN)

    # The stages

    def diagnosis(self, found: StepArrays, forward: Diagnosis | None) -> Diagnosis:
        """Compare each stage of what the dump holds; ``forward`` is the diagnosis of its forward pass, if it has one."""
        recorded, predictor, good = found.recorded, self.predictor, forward is None or forward.verdict != "mismatch"
        start, reading, formula, judged = recorded.parameters[0], None, predictor.formulas(0)[""], False
        if found.changes:
            known = all(torch.equal(start[name], tensor) for name, tensor in self.state.items())
            exact = self.exact if known else predictor.gradients(start, 0, formula)
            allowed = predictor.rounding(start, exact, torch.float64 if recorded.float64 else torch.float32)
        if any(recorded.raw) and good:
            reading = GradientExamination(recorded, predictor, self.settings, self._places, exact, allowed).read()
            self.stages["gradient"].absorb(reading.stage)
            self.stages["clip"].absorb(reading.clip)
            formula = reading.formula
        if found.losses and good:
            whole = list(takewhile(lambda weights: weights.keys() == start.keys(), recorded.parameters))
            trained = reading.formula if reading is not None and reading.stage.explained and reading.clipped is None else None
            said = {one.id for stage in self.stages.values() for one in stage.causes}
            exactly = any(one.dtype == torch.float64 for one in found.losses) and recorded.float64
            stage, dumped = dumped_loss(found.losses, whole, predictor, trained, said, exactly, self.asked)
            self.stages["loss"].absorb(stage)
            judged = dumped is not None
            formula = dumped if dumped is not None and reading is None else formula
        if recorded.steps:
            updates = UpdateExamination(recorded, predictor, self.settings, self._places, allowed, reading, formula)
            for name, more in updates.stages().items():
                self.stages[name].absorb(more)
        said_all = concluded(self.stages, forward, self._holds(found, judged), self.dump.source)
        return replace(said_all, seen="dump", logits_error=None if forward is None else forward.logits_error)

    def seen(self, found: StepArrays) -> bool:
        """Return whether the dump is one of a step, after :meth:`diagnosis`.

        Some number that fits no loss is no sign of one, nor are a few arrays of a gradient's shape that no gradient explains.
        """
        gradients = max((len(one) for one in found.recorded.raw), default=0)
        known = 2 * gradients >= len(self.state) or (gradients > 0 and self.stages["gradient"].explained)
        known = known or any(stage.causes for stage in self.stages.values())
        return self.asked or known or found.recorded.steps > 0 or (bool(found.losses) and self.stages["loss"].explained)

    def _places(self, names: Sequence[str]) -> str:
        return listed(map(Place.of, names), self.config.n_layer)

    def _holds(self, found: StepArrays, judged: bool) -> Iterator[str]:
        """Yield notes of what the dump holds, and what it lacks; ``judged``: whether a loss was."""
        recorded, holds = found.recorded, ["the loss"] if judged else []
        if sets := sum(bool(one) for one in recorded.raw):
            holds.append(f"gradients of {_steps(sets)}{' before and after clipping' if any(recorded.used) else ''}")
        if recorded.steps:
            holds.append(f"parameters after {_steps(recorded.steps)}")
        if holds or self.asked:
            yield f"the dump holds {', '.join(holds) or 'nothing of a step that was recognised'}"
        if recorded.steps and not sets:
            yield (
                "gradients are not dumped: they were computed at its own parameters; Adam hides a factor of them, so dump them "
                "to see a summed loss"
            )
        if not recorded.steps and (sets or judged) and self.stages["update"].explained:
            lacking = "the update was" if sets else "gradients, clipping and update were"
            yield f"{lacking} not judged: dump the parameters after each step{'' if sets else ', and the gradients'}"
        left = [name for name in self.dump.arrays if name not in found.names]
        if left and not recorded.steps and not sets and self.asked:
            yield f"not recognised: {', '.join(shown(name) for name in left[:4])}"


def _steps(count: int) -> str:
    return "a step" if count == 1 else f"{count} steps"
