"""Examine a dump of training steps: recognise its arrays, compare each stage, and say what it shows and what it lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
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
from gpt2.port.step.causes import Findings
from gpt2.port.step.dump_updates import HALF, UpdateExamination
from gpt2.port.step.expected import Predictor, Weights
from gpt2.port.step.gradients import GradientExamination
from gpt2.port.step.labels import IGNORED, Batch
from gpt2.port.step.layouts import Layouts, units_of
from gpt2.port.step.losses import judge_dumped_loss, losses_of
from gpt2.port.step.recognition import Recogniser, Recorded
from gpt2.port.step.settings import Settings

SAVE = "save the loss, every gradient, and every parameter before and after each step, in the checkpoint's shapes or transposed"


def batches_of(dump: Dump) -> list[Batch]:
    """Return the batch of each step: ids (B, T) or (K, B, T), with the targets of the same shape if the dump has them.

    Raises InputError: rows of one token, without targets.
    """
    ids = dump.batches
    alike = [one for one in dump.integers.values() if one.shape == ids.shape]
    targets = None if any(torch.equal(one, ids) for one in alike) else next(iter(alike), None)
    found = []
    for number, rows in enumerate(ids):
        last, ignored = torch.full_like(rows[:, :1], IGNORED), None
        if targets is not None:
            given, ignored = targets[number], targets[number] < 0
            shifted = rows.shape[-1] == 1 or float((given[:, :-1] == rows[:, 1:]).double().mean()) > 0.5
            last = given[:, -1:] if shifted or bool(ignored.any()) else last
        found.append(Batch(torch.cat([rows, last], 1), ignored))
        if not found[-1].count:
            raise InputError(f"{dump.source}: its rows have one token each, so nothing is learnt; dump the next ids as targets")
    return found


class StepExamination:
    """The diagnosis of the training steps in one dump; ``state`` holds the right weights, in float64 on the CPU."""

    def __init__(
        self, dump: Dump, config: GPT2Config, state: Mapping[str, Tensor], settings: Settings | None, deadline: Deadline
    ) -> None:
        self.dump, self.settings, self.asked = dump, settings or Settings(), settings is not None
        self.config, self.state, self.deadline = config, state, deadline
        self.findings = Findings(self._places)

    # What the dump holds

    def sorted(self) -> Recorded | None:
        """Return what the dump holds of training steps; None if it holds nothing. Raises InputError: NaN, nothing changes."""
        layouts, source = Layouts(units_of(self.state), self.config), self.dump.source
        fitting = {name: array for name, array in self.dump.arrays.items() if next(layouts.views(array), None) is not None}
        losses = losses_of({name: array for name, array in self.dump.arrays.items() if name not in fitting})
        if not fitting and not losses:
            return self._nothing()
        try:
            batches = batches_of(self.dump)
        except InputError:
            if self.asked:
                raise
            return None  # a forward pass of one token, whose values have the sizes of parameters
        self.predictor = Predictor(self.config, batches, self.settings.grad_accum, self.deadline)
        covered = {n: {unit.partition(":")[0] for view in layouts.views(a) for unit in view} for n, a in fitting.items()}
        # few arrays have the sizes of parameters in a dump of a forward pass: no gradients of wrong labels are needed there
        labelled = 2 * len(set().union(*covered.values())) >= len(self.state) or self.asked or bool(self.dump.integers)
        self.exact = self.predictor.gradients(self.state, 0, self.predictor.right)
        rows = [len(loss.values) for loss in losses]
        counts = [len(batches), *([max(rows, default=1), rows.count(1)] if len(batches) == 1 else [])]
        recogniser = Recogniser(layouts, self.state, self._predicted(labelled) if fitting else ())
        found = recogniser.recorded(fitting, self._options, counts)
        sure = self.asked or bool(found.names)
        for name, array in {**fitting, **{loss.name: loss.values for loss in losses}}.items():
            wrong = array[~array.isfinite()]
            if len(wrong) and (sure or (name not in fitting and bool(wrong.isnan().any()))):
                raise InputError(f"{source}: {shown(name)} holds NaN or infinity; look where it comes from")
        zeros = {name for name in fitting if name not in found.names and not bool(fitting[name].any())}
        still = set().union(*(covered[name] for name in zeros))
        for one in filter(None, found.raw):  # zeros are the gradients that were not recognised
            one |= {name: torch.zeros_like(p) for name, p in self.state.items() if name in still - one.keys()}
            found.names |= zeros
        self._require_change(found)
        found.losses = [loss for loss in losses if bool(loss.values.isfinite().all())]  # infinity: of a mask
        found.names |= {loss.name for loss in found.losses}
        return found if found.changes or (found.losses and (self.asked or self.dump.integers)) else self._nothing()

    def _nothing(self) -> Recorded | None:
        """Return None, for a dump that holds nothing of a step; raise InputError if one is asked for."""
        sizes = ", ".join(f"{shown(n)} {tuple(a.shape)}" for n, a in list(self.dump.arrays.items())[:3])
        if self.asked:
            raise InputError(f"{self.dump.source}: holds no loss, gradient or parameter of this model ({sizes}); {SAVE}")
        return None

    def _predicted(self, labelled: bool) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
        """Yield the gradients of each batch at the checkpoint, with their labels; a later step's are near those of its batch."""
        for step in range(len(self.predictor.batches)):
            for key, formula in self.predictor.formulas(step).items():
                if not key or (labelled and self.predictor.can_try):
                    made = self.predictor.gradients(self.state, step, formula) if step or key else self.exact
                    yield f"{step} {key}", made.whole
                if not key:
                    yield from ((f"{step} share", made.whole | share) for share in (made.head, made.table))

    def _options(self, weights: Weights, step: int, label: str) -> list[Weights]:
        """Return the gradients that step ``step`` from some weights may have, with right labels and with those of ``label``."""
        known = self.predictor.formulas(step)
        return [self.predictor.gradients(weights, step, known[key]).whole for key in dict.fromkeys(("", label)) if key in known]

    def _require_change(self, found: Recorded) -> None:
        """Raise InputError for copies of parameters that are all equal; half precision may hide every change."""
        twice = len(found.copies) - len(set(found.copies)) > len(set(found.copies)) / 2
        if found.steps or not found.copies:
            return
        if found.narrow and twice:
            self.findings.leave_open("update", HALF)
        elif not found.narrow and (twice or (not any(found.raw) and self.asked)):
            what = "copies of the parameters after the step too, and a step whose rate is not 0"
            raise InputError(f"{self.dump.source}: no parameter changes; dump {what}")

    # The stages

    def diagnosis(self, found: Recorded, forward: Diagnosis | None) -> Diagnosis:
        """Compare each stage of what the dump holds; ``forward`` is the diagnosis of its forward pass, if it has one."""
        predictor, start, good = self.predictor, found.parameters[0], forward is None or forward.verdict != "mismatch"
        reading, formula, judged, findings = None, predictor.right, False, self.findings
        if found.changes:
            known = all(torch.equal(start[name], tensor) for name, tensor in self.state.items())
            exact = self.exact if known else predictor.gradients(start, 0, formula)
            allowed = predictor.rounding(start, exact, torch.float64 if found.float64 else torch.float32)
            evidence = findings, found, predictor, self.settings, exact, allowed
        if any(found.raw) and good:
            reading = GradientExamination(*evidence).read()
            formula = reading.formula
        if found.losses and good:
            whole = list(takewhile(lambda weights: weights.keys() == start.keys(), found.parameters))
            sure = reading is not None and "gradient" not in findings.unknown and reading.clipped is None
            exactly = found.float64 and any(one.dtype == torch.float64 for one in found.losses)
            trained = formula if sure else None
            dumped = judge_dumped_loss(findings, found.losses, whole, predictor, trained, exactly, self.asked)
            judged = dumped is not None
            formula = dumped if dumped is not None and reading is None else formula
        if found.steps:
            UpdateExamination(*evidence, reading, formula).judge()
        diagnosis = findings.diagnosis(forward, list(self._holds(found, judged)), self.dump.source)
        return replace(diagnosis, seen="dump", logits_error=None if forward is None else forward.logits_error)

    def seen(self, found: Recorded) -> bool:
        """Return whether the dump is one of a step, after :meth:`diagnosis`.

        Some number that fits no loss is no sign of one, nor are a few arrays of a gradient's shape that no gradient explains.
        """
        gradients = max((len(one) for one in found.raw), default=0)
        unknown, known = self.findings.unknown, self.asked or bool(self.findings.causes) or found.steps > 0
        known = known or 2 * gradients >= len(self.state) or (gradients > 0 and "gradient" not in unknown)
        return known or (bool(found.losses) and "loss" not in unknown)

    def _places(self, names: Collection[str]) -> str:
        return listed(map(Place.of, names), self.config.n_layer)

    def _holds(self, found: Recorded, judged: bool) -> Iterator[str]:
        """Yield notes of what the dump holds, and what it lacks; ``judged``: whether a loss was."""
        sets, steps = sum(bool(one) for one in found.raw), found.steps
        both = " before and after clipping" if any(found.used) else ""
        holds = ["the loss"] * judged + [f"gradients of {_counted(sets)}{both}"] * (sets > 0)
        holds += [f"parameters after {_counted(steps)}"] * (steps > 0)
        if holds or self.asked:
            yield f"the dump holds {', '.join(holds) or 'nothing of a step that was recognised'}"
        if steps and not sets:
            words = "gradients are not dumped: they were computed at its own parameters; Adam hides a factor of them"
            yield f"{words}, so dump them to see a summed loss"
        if not steps and holds and "update" not in self.findings.unknown:
            lacking, too = ("the update was", "") if sets else ("gradients, clipping and update were", ", and the gradients")
            yield f"{lacking} not judged: dump the parameters after each step{too}"
        left = [shown(name) for name in self.dump.arrays if name not in found.names]
        if left and not steps and not sets and self.asked:
            yield f"not recognised: {', '.join(left[:4])}"


def _counted(count: int) -> str:
    return "a step" if count == 1 else f"{count} steps"
