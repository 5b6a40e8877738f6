"""Examine one training step: run it from the checkpoint's weights in a few sessions, and compare it stage by stage."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from gpt2.errors import InputError
from gpt2.model import GPT2
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.stream import NotGPT2
from gpt2.port.diagnosis.report import Cause, Diagnosis
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.recording.forward import Borrowed
from gpt2.port.recording.recorder import record_probe
from gpt2.port.step.backward import accumulation_stage, backward_stage, first_backwards, places, summed, untied_causes
from gpt2.port.step.causes import STAGES, cause
from gpt2.port.step.clip_causes import clip_stage
from gpt2.port.step.clipping import passages, read_clipping
from gpt2.port.step.gradients import Roles, expected_gradients
from gpt2.port.step.losses import logits_gradients, read_loss
from gpt2.port.step.optimizer import update_stage
from gpt2.port.step.records import Sampler, Update, Watched
from gpt2.port.step.sessions import Batch, Batches, Change, MakeStep, StepError, Subject, scaled
from gpt2.port.step.settings import Settings
from gpt2.port.step.stepping import Movement, read_movement, updates_of
from gpt2.port.step.trained import Stage, concluded, dropout_stage, loss_stage, padding_stage
from gpt2.port.step.tying import join_tied

CALLS, CALLS_LARGE = 6, 4  # of the first session; of a large module's
HUGE, TINY = 100.0, 1e-8  # factors of the last norm (and, for TINY, of the token embedding) that change the gradients' size


class StepExamination:
    """The checks of one step; :meth:`diagnosis` runs them. Raises InputError as :func:`gpt2.diagnose_step` does."""

    def __init__(
        self,
        module: nn.Module,
        make_step: MakeStep,
        ours: GPT2,
        settings: Settings,
        forward: Diagnosis,
        watch: Callable[[str], None] = lambda stage: None,
    ) -> None:
        self.module, self.ours, self.settings, self.forward = module, ours, settings, forward
        self.config = ours.config
        self.subject = Subject(module, make_step, ours.config.vocab_size, watch)
        self.notes: list[str] = []
        self.stages: dict[str, Stage] = {name: Stage() for name in STAGES}

    def diagnosis(self) -> Diagnosis:
        """Run the sessions, draw the conclusions of each stage, and sum them up."""
        self.roles = Roles(self.module, self._mapping())
        self.batches = Batches(self.config, self.settings)
        count = CALLS_LARGE if self.subject.large else CALLS
        self.calls, self.sampler = self._session([self.batches.batch(seed) for seed in range(count)])
        self._require_training()
        self.huge, self.tiny = self._scaled_sessions()
        join_tied([self.calls, self.huge, self.tiny], self._untied(), self.sampler)
        self._read_update()
        self._loss_and_gradients()
        self._update()
        self._as_written()
        return concluded(self.stages, self.forward, self.notes, self.forward.module)

    def _mapping(self) -> Mapping | None:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), Borrowed(self.module):
                return Mapping(Anatomy(record_probe(self.module, self.config, "your module")), self.config)
        except (NotGPT2, InputError):
            return None

    # Sessions

    def _session(self, batches: list[Batch], change: Change | None = None) -> tuple[list[Watched], Sampler]:
        calls, sampler = self.subject.session(batches, change)
        for call in calls:
            if not math.isfinite(call.loss):
                raise InputError(
                    f"the step returns a loss of {call.loss}; look where it comes from (a mask, a label, a division)"
                )
        return calls, sampler

    def _scaled_sessions(self) -> tuple[list[Watched], list[Watched]]:
        """Return two calls with huge gradients, and two with tiny ones; empty where the parts of the module are unknown."""
        last, table = self.roles.names_of("ln_f", "ln_f.weight", "ln_f.bias"), self.roles.names_of("wte", "head")
        if not last or not table:
            self.notes.append("the parts of your module were not recognised: clipping was judged with one size of gradients only")
            return [], []
        batches = [self.batches.batch(100 + seed) for seed in range(2)]
        huge, _ = self._session(batches, scaled(last, HUGE))
        for call in huge:
            call.forwards.clear()  # their gradients alone are compared
        tiny, _ = self._session(batches, scaled([*last, *table], TINY))
        for call in tiny:
            call.forwards.clear()
        return huge, tiny

    def _require_training(self) -> None:
        """Raise InputError for a step that changes nothing, or gives NaN."""
        updates = [update for call in self.calls for update in call.updates]
        if any(bool(value.isnan().any()) for update in updates for value in update.after.values()):
            raise InputError("the step sets parameters to NaN; look at its rate, and at divisions by zero")
        changed = any(not torch.equal(update.before[name], value) for update in updates for name, value in update.after.items())
        if not changed:
            why = "does it train another module than the one that make_step is given, or never call optimizer.step()?"
            raise InputError(f"no parameter of your module changes in {len(self.calls)} calls of the step: {why}")

    # The stages

    def _loss_and_gradients(self) -> None:
        first, batch = self.calls[0], self.batches.batch(0)
        factor = self.clip.factor
        reading = read_loss(first, batch.ids)
        if reading is None:
            self.notes.append("the logits of your step were not seen (does it call the module?), so its loss was not judged")
            self.stages["loss"].explained = False
        else:
            self.stages["loss"] = loss_stage(batch, reading, factor)
            self._later_losses(factor)
            self._padded(factor)
        gradient = accumulation_stage([*self.calls, *self.huge])
        gradient.causes += untied_causes(self._untied())
        if self.roles.mapping is None or not self.forward.ok:
            self.notes.append("your forward pass is not ours, so the gradients of your parameters were not compared with ours")
        if reading is not None and self.roles.mapping is not None and self.forward.ok:
            state = {name: tensor.detach().cpu().double() for name, tensor in self.ours.state_dict().items()}
            passes = logits_gradients(first)
            passes = passes[: first_backwards(first)] if len(first.updates) > 1 else passes
            expected = expected_gradients(self.config, state, self.roles, self.sampler, passes)
            layers = self.config.n_layer
            gradient.absorb(backward_stage(first, expected, self.roles, layers, self._untied()))
        for name, value in self.clip.outliers.items():
            where = places([name], self.roles, self.config.n_layer)
            doubled = self.roles.role(name, self.sampler.parameters[name]) == "embedding" and abs(value - 2) < 1e-6
            detail = f"after the backward pass its gradient is multiplied by {value:.6g}"
            gradient.causes.append(cause("tied-gradient-doubled" if doubled else "gradient-scaled", where, detail))
        self.stages["gradient"] = gradient
        if self.settings.dropout is not None or any(call.dropouts for call in self.calls):
            dropout = dropout_stage([p for call in self.calls for p in call.dropouts], self.settings.dropout)
            self.stages["loss"].causes += dropout.causes
            self.notes += dropout.notes
        if any(call.half for call in self.calls):
            detail = "the logits are rounded to half precision before the softmax"
            self.stages["loss"].causes.append(cause("logits-half-precision", "loss", detail, "seen in its operators"))

    def _later_losses(self, factor: float) -> None:
        """Add the causes that show in a later call only."""
        known = {one.id for one in self.stages["loss"].causes}
        for number, call in enumerate(self.calls[1:], 1):
            batch = self.batches.batch(number)
            reading = read_loss(call, batch.ids)
            call.forwards.clear()
            if reading is None:
                continue
            stage = loss_stage(batch, reading, factor)
            self.stages["loss"].causes += [one for one in stage.causes if one.id not in known]
            known |= {one.id for one in stage.causes}

    def _padded(self, factor: float) -> None:
        """Try a batch in which some targets are -100; a step that refuses it is not faulty."""
        if self.stages["loss"].causes and not self.settings.padded:
            return
        batch = self.batches.batch(50, ignored=True)
        try:
            (call,), _ = self.subject.session([batch])
        except InputError:
            return
        reading = read_loss(call, batch.ids)
        if reading is None or not math.isfinite(call.loss):
            return
        found = padding_stage(batch, reading, factor)
        if self.settings.padded:
            self.stages["loss"].causes += found
        else:
            self.notes += [f"where targets are -100 (yours need not be): {one.detail} ({one.id})" for one in found]

    def _untied(self) -> list[str]:
        """Return the parameters that hold the token embedding and the head, if these are two in the step."""
        names = set(self.sampler.parameters)
        own = [self.roles.names_of(part) for part in ("wte", "head") if self.config.tie_word_embeddings]
        for aliases in (*self.roles.aliases.values(), [found[0] for found in own if len(found) == 1]):
            apart = [name for name in aliases if name in names]
            if len(apart) > 1:
                return apart
        return []

    def _read_update(self) -> None:
        """Read the clipping, and how each parameter moves."""
        groups = [passages(calls) for calls in (self.calls, self.huge, self.tiny)]
        unscaled = math.prod({call.unscaled for call in self.calls}) if any(call.unscaled != 1 for call in self.calls) else 1.0
        self.clip = read_clipping([group for group in groups if group], unscaled)
        self.sessions = [found for calls in (self.calls, self.huge, self.tiny) if (found := updates_of(calls))]
        self.movement = read_movement(self.sessions, self.settings, self._role)
        self.clip.factor *= self.movement.share
        hidden = [update.gradient.total for session in self.sessions for update in session if update.summed]
        if hidden and self.movement.rules and not self.movement.odd:
            self.clip.largest = max(hidden) * self.movement.share

    def _update(self) -> None:
        movement, layers = self.movement, self.config.n_layer
        many = [call for call in self.calls if len(call.updates) > 1]
        if many:
            detail = f"the parameters are updated {len(many[0].updates)} times in a step, after each part of its batch"
            self.stages["update"].causes.append(cause("step-per-micro-batch", "optimizer", detail, "seen in its operators"))
        silent = [number for number, call in enumerate(self.calls) if not any(_moved(update) for update in call.updates)]
        numbers = [update.call for update in self.sessions[0]]
        stage = update_stage(movement, self.settings, lambda names: places(names, self.roles, layers), numbers)
        stage.causes = [*self.stages["update"].causes, *stage.causes]
        if movement.rules and not movement.odd:  # parameters that are written to, and stay, have a rate of zero
            silent = [number for number in silent if not self.calls[number].updates]
        if silent and len(silent) < len(self.calls):
            detail = f"{len(silent)} of {len(self.calls)} calls change no parameter"
            stage.causes.append(cause("update-skipped", "optimizer", detail))
        stage.causes += self._left_out(movement)
        self.stages["update"] = stage
        clip = self.clip if movement.clip is None else replace(self.clip, clip=movement.clip)
        odd = [name for name in clip.odd if name in self.sampler.parameters]
        self.stages["clip"] = clip_stage(clip, self.settings.clip, places(odd, self.roles, layers) if odd else "the gradient")

    def _role(self, name: str) -> str:
        return self.roles.role(name, self.sampler.parameters[name])

    def _left_out(self, movement: Movement) -> list[Cause]:
        """Return the cause for parameters with a gradient that never change."""
        updates = [update for call in self.calls for update in call.updates]
        arrived = summed(self.calls[0])
        still = [
            name
            for name in self.sampler.parameters
            if name in arrived
            and bool((arrived[name] != 0).any())
            and all(torch.equal(update.before[name], update.after[name]) for update in updates)
        ]
        if not still or not movement.rules:
            return []
        detail = "these have gradients, and never change"
        return [
            cause("parameter-missing", places(still, self.roles, self.config.n_layer), detail, "their values after each step")
        ]

    def _as_written(self) -> None:
        """Run the step once as it is, in its own dtypes: it may skip updates, overflow, or compute its loss in half precision."""
        narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.module.parameters())
        try:
            calls, _ = self.subject.session([self.batches.batch(seed) for seed in range(2)], as_written=True)
        except StepError as error:
            self.notes.append(f"in float64 your step runs; as written it does not: {error}")
            return
        if any(call.half for call in calls) and not narrow and not any(call.half for call in self.calls):
            detail = "as written, in your own dtypes, the softmax of the loss reads logits in half precision"
            self.stages["loss"].causes.append(cause("logits-half-precision", "loss", detail, "seen in its operators"))
        still = [not any(_moved(update) for update in call.updates) for call in calls]
        exact = [not any(_moved(update) for update in call.updates) for call in self.calls[:2]]
        if any(a and not b for a, b in zip(still, exact, strict=True)):
            detail = "as written, in your own dtypes, a step changes no parameter; in float64 it does"
            self.stages["update"].causes.append(
                cause("update-skipped", "optimizer", detail, "parameters before and after the step")
            )
        elif not all(math.isfinite(call.loss) for call in calls):
            raise InputError("the step returns NaN as written, and a number in float64; an overflow in half precision?")


def _moved(update: Update) -> bool:
    return any(not torch.equal(before, update.after[name]) for name, before in update.before.items())
