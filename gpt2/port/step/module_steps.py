"""Examine one training step: run it from the checkpoint's weights in a few sessions, and compare it stage by stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from gpt2.errors import InputError
from gpt2.model import GPT2
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.stream import NotGPT2
from gpt2.port.diagnosis.places import Place, listed
from gpt2.port.diagnosis.report import Diagnosis
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.recording.forward import Borrowed
from gpt2.port.recording.recorder import record_probe
from gpt2.port.step.causes import STAGES, Stage, cause, concluded
from gpt2.port.step.clipping import Clip, ClipKind, clip_stage, read_clipping
from gpt2.port.step.expected import Roles, expected_gradients
from gpt2.port.step.gradients import Comparison, accumulation_stage, total_norm
from gpt2.port.step.labels import Batch
from gpt2.port.step.losses import PADDED, dropout_stage, loss_stage, read_loss
from gpt2.port.step.movement import Movement
from gpt2.port.step.optimizer import update_stage
from gpt2.port.step.records import Sampler, Watched, updates_of
from gpt2.port.step.search import RuleSearch, Run
from gpt2.port.step.sessions import Change, MakeStep, StepError, Subject, random_batch, scaled
from gpt2.port.step.settings import Settings
from gpt2.port.step.tying import join_tied

CALLS, CALLS_LARGE = 6, 4  # of the first session; of a large module's
HUGE, TINY = 100.0, 1e-8  # factors of the last norm (and, for TINY, of the token embedding) that change the gradients' size
EQUAL, NOISE = 1e-8, 1e-11  # error of a parameter's gradient, relative to it (constants in float32), and to the whole gradient
BACKWARD = "from your own gradient of the logits, our model in float64 gives other gradients"
OPERATORS = "seen in its operators"
FREE = (ClipKind.NORM, ClipKind.PARAMETER, ClipKind.ENTRY, ClipKind.LARGEST)  # clipping of gradients that nothing shows


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
        self.subject = Subject(module, make_step, ours.config.vocab_size, watch)
        self.notes: list[str] = []
        self.read = False  # whether gradients of the logits were seen
        self.stages: dict[str, Stage] = {name: Stage() for name in STAGES}

    def diagnosis(self) -> Diagnosis:
        """Run the sessions, draw the conclusions of each stage, and sum them up."""
        self.roles = Roles(self.module, self._mapping())
        self.calls, self.sampler = self._session(range(CALLS_LARGE if self.subject.large else CALLS))
        self._require_training()
        self.huge, self.tiny = self._scaled_sessions()
        join_tied([self.calls, self.huge, self.tiny], self._untied(), self.sampler)
        self._clip_and_update()
        self._loss()
        self._gradients()
        self._as_written()
        return concluded(self.stages, self.forward, self.notes, self.forward.module)

    def _mapping(self) -> Mapping | None:
        config = self.ours.config
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), Borrowed(self.module):
                return Mapping(Anatomy(record_probe(self.module, config, "your module")), config)
        except (NotGPT2, InputError):
            return None

    def _places(self, names: Sequence[str]) -> str:
        """Return the checkpoint's names for parameters."""
        return listed((Place.of(where) for name in names for where in self.roles.where(name)), self.ours.config.n_layer)

    def _cause(self, stage: str, id: str, where: str, detail: str, evidence: str = "") -> None:
        self.stages[stage].causes.append(cause(id, where, detail, evidence))

    # Sessions

    def _batch(self, seed: int, *, ignored: bool = False) -> Batch:
        return random_batch(self.ours.config, self.settings, seed, ignored=ignored)

    def _session(self, seeds: Sequence[int], change: Change | None = None) -> tuple[list[Watched], Sampler]:
        calls, sampler = self.subject.session([self._batch(seed) for seed in seeds], change)
        for call in calls:
            if not math.isfinite(call.loss):
                raise InputError(
                    f"the step returns a loss of {call.loss}; look where it comes from (a mask, a label, a division)"
                )
            if change is not None:
                call.forwards.clear()  # the gradients of the parameters alone are compared
        return calls, sampler

    def _scaled_sessions(self) -> tuple[list[Watched], list[Watched]]:
        """Return two calls with huge gradients, and two with tiny ones; empty where the parts of the module are unknown."""
        last, table = self.roles.names_of("ln_f", "ln_f.weight", "ln_f.bias"), self.roles.names_of("wte", "head")
        if not last or not table:
            self.notes.append("the parts of your module were not recognised: clipping was judged with one size of gradients only")
            return [], []
        huge, tiny = (self._session((100, 101), scaled(*how))[0] for how in ((last, HUGE), ([*last, *table], TINY)))
        return huge, tiny

    def _require_training(self) -> None:
        """Raise InputError for a step that changes nothing, or gives NaN."""
        updates = [update for call in self.calls for update in call.updates]
        if any(bool(value.isnan().any()) for update in updates for value in update.after.values()):
            raise InputError("the step sets parameters to NaN; look at its rate, and at divisions by zero")
        if not any(update.changes for update in updates):
            why = "does it train another module than the one that make_step is given, or never call optimizer.step()?"
            raise InputError(f"no parameter of your module changes in {len(self.calls)} calls of the step: {why}")

    def _untied(self) -> list[str]:
        """Return the parameters that hold the token embedding and the head, if these are two in the step."""
        own = [self.roles.names_of(part) for part in ("wte", "head") if self.ours.config.tie_word_embeddings]
        for aliases in (*self.roles.aliases.values(), [found[0] for found in own if len(found) == 1]):
            apart = [name for name in aliases if name in self.sampler.parameters]
            if len(apart) > 1:
                return apart
        return []

    # The stages, the last ones first: what the update multiplies the gradients by tells what the loss was meant to be

    def _clip_and_update(self) -> None:
        settings, sessions = self.settings, [found for one in (self.calls, self.huge, self.tiny) if (found := updates_of(one))]
        unscaled = math.prod({call.unscaled for call in self.calls})
        clip = self.clip = read_clipping(sessions, None if unscaled == 1 else unscaled)
        roles = {name: self.roles.role(name, parameter) for name, parameter in self.sampler.parameters.items()}
        large = [name for name, role in roles.items() if role in ("matrix", "embedding")]
        parts = max(update.summed for session in sessions for update in session)
        shares = [1 / parts, 1.0] if parts > 1 else [1.0]  # of gradients that ``.grad`` never holds: averaged, or summed
        variants = [
            [Run.of([replace(one, gradient=one.gradient.times(share)) for one in session], large) for session in sessions]
            for share in shares
        ]
        moving, known = variants[0][0].moving, False
        if moving:
            some = [name for name in moving if roles[name] == "matrix"] or moving
            chosen = [some[len(some) // 3], some[2 * len(some) // 3]] if len(some) > 2 else some
            wanted = [None, Clip(ClipKind.NORM, settings.clip)] if settings.clip and parts else [None]
            answer = RuleSearch(variants, chosen, settings, wanted, FREE if parts else ()).best()
            movement = Movement.of(answer, variants[answer.variant], settings, roles)
            self.stages["update"] = update_stage(movement, settings, self._places, [one.call for one in sessions[0]])
            clip.factor, known = clip.factor * shares[answer.variant], not movement.odd
            hidden = [update.gradient.total for session in sessions for update in session if update.summed]
            clip.largest = max(hidden) * shares[answer.variant] if hidden and known else clip.largest
            clip.clip = answer.clip or clip.clip
        odd = [name for name in clip.odd if name in self.sampler.parameters]
        self.stages["clip"] = clip_stage(clip, settings.clip, self._places(odd) if odd else "the gradient")
        many = next((call for call in self.calls if len(call.updates) > 1), None)
        if many is not None:
            detail = f"the parameters are updated {len(many.updates)} times in a step, after each part of its batch"
            self.stages["update"].causes.insert(0, cause("step-per-micro-batch", "optimizer", detail, OPERATORS))
        # where the rule is known, parameters that are written to, and stay, have a rate of zero
        silent = sum(not (call.updates if known else call.changes) for call in self.calls)
        if 0 < silent < len(self.calls):
            self._cause("update", "update-skipped", "optimizer", f"{silent} of {len(self.calls)} calls change no parameter")
        arrived, updates = self.calls[0].arrived(), [update for call in self.calls for update in call.updates]
        still = [name for name, g in arrived.items() if name in self.sampler.parameters and bool((g != 0).any())]
        still = [name for name in still if not any(update.moves(name) for update in updates)]
        if still and moving:
            detail = "these have gradients, and never change"
            self._cause("update", "parameter-missing", self._places(still), detail, "their values after each step")

    def _loss(self) -> None:
        stage, factor = self.stages["loss"], self.clip.factor
        for number, call in enumerate(self.calls):
            batch = self._batch(number)
            reading = read_loss(call.forwards, batch)
            self.read = reading is not None if number == 0 else self.read
            if reading is None or not self.read:
                continue
            found, known = loss_stage(batch, reading, factor), {one.id for one in stage.causes}
            if number == 0:
                stage.absorb(found)
            else:  # what shows in a later call only
                call.forwards.clear()
                stage.causes += [one for one in found.causes if one.id not in known]
        if not self.read:
            self.notes.append("the logits of your step were not seen (does it call the module?), so its loss was not judged")
            stage.explained = False
        elif self.settings.padded or not stage.causes:
            self._padded(factor)
        dropouts = [p for call in self.calls for p in call.dropouts]
        if self.settings.dropout is not None or dropouts:
            stage.absorb(dropout_stage(dropouts, self.settings.dropout))
        if any(call.half for call in self.calls):
            detail = "the logits are rounded to half precision before the softmax"
            self._cause("loss", "logits-half-precision", "loss", detail, OPERATORS)

    def _padded(self, factor: float) -> None:
        """Try a batch in which some targets are -100; a step that refuses it is not faulty."""
        batch = self._batch(50, ignored=True)
        try:
            (call,), _ = self.subject.session([batch])
        except InputError:
            return
        reading = read_loss(call.forwards, batch)
        causes = loss_stage(batch, reading, factor).causes if reading is not None and math.isfinite(call.loss) else []
        found = [one for one in causes if one.id in PADDED]
        if self.settings.padded:
            self.stages["loss"].causes += found
        else:
            self.notes += [f"where targets are -100 (yours need not be): {one.detail} ({one.id})" for one in found]

    def _gradients(self) -> None:
        stage = self.stages["gradient"] = accumulation_stage([*self.calls, *self.huge])
        if untied := self._untied():
            both = " and ".join(untied)
            detail = f"the head and the token embedding are two parameters ({both}); each gets its own gradient"
            self._cause("gradient", "tied-gradient-lost", "wte", detail, "their values part in the step")
        if self.roles.mapping is None or not self.forward.ok:
            self.notes.append("your forward pass is not ours, so the gradients of your parameters were not compared with ours")
        elif self.read:
            self._backward(stage, untied)
        for name, value in self.clip.outliers.items():
            doubled = self.roles.role(name, self.sampler.parameters[name]) == "embedding" and abs(value - 2) < 1e-6
            detail = f"after the backward pass its gradient is multiplied by {value:.6g}"
            self._cause("gradient", "tied-gradient-doubled" if doubled else "gradient-scaled", self._places([name]), detail)

    def _backward(self, stage: Stage, untied: Sequence[str]) -> None:
        """Compare the first call's gradients with those that our model gives from the same gradient of the logits."""
        first = self.calls[0]
        state = {name: tensor.detach().cpu().double() for name, tensor in self.ours.state_dict().items()}
        passes = [one for one in first.forwards if one.gradient is not None]
        if len(first.updates) > 1:  # then there is a backward pass for each
            passes = passes[: len(first.first_backwards)]
        made = expected_gradients(self.ours.config, state, self.roles, self.sampler, passes)
        arrived, right = first.arrived(), made.whole
        got = {name: arrived.get(name, torch.zeros_like(g)).masked_fill(g.isnan(), 0.0) for name, g in right.items()}
        for share in (made.whole, made.head, made.table):  # the checkpoint has no entry for some, as an unused bias
            share |= {name: g.nan_to_num(0.0) for name, g in share.items()}
        whole = total_norm(right)
        allowed = {name: NOISE * whole / max(g.numel(), 1) ** 0.5 for name, g in right.items()}
        frozen = [name for name in right if name not in first.trains]
        positions = [name for name in right if any(part == "wpe" for _, part in self.roles.parts.get(name, []))]
        still = "requires_grad is False for these parameters"
        comparison = Comparison(allowed, EQUAL, 0.0, 1e-6, BACKWARD, self._places, frozen, still, positions)
        wrong = comparison.wrong(got, right)
        errors = [float((got[name] - right[name]).norm()) / max(float(right[name].norm()), NOISE * whole) for name in wrong]
        stage.error = max([stage.error, *errors])
        own = [name for name in wrong if name not in untied or name in frozen]
        stage.causes += comparison.causes(got, own, 1.0, made)

    def _as_written(self) -> None:
        """Run the step once as it is, in its own dtypes: it may skip updates, overflow, or compute its loss in half precision."""
        narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in self.module.parameters())
        try:
            calls, _ = self.subject.session([self._batch(seed) for seed in range(2)], as_written=True)
        except StepError as error:
            self.notes.append(f"in float64 your step runs; as written it does not: {error}")
            return
        if any(call.half for call in calls) and not narrow and not any(call.half for call in self.calls):
            detail = "as written, in your own dtypes, the softmax of the loss reads logits in half precision"
            self._cause("loss", "logits-half-precision", "loss", detail, OPERATORS)
        if any(exact.changes and not written.changes for written, exact in zip(calls, self.calls, strict=False)):
            detail = "as written, in your own dtypes, a step changes no parameter; in float64 it does"
            self._cause("update", "update-skipped", "optimizer", detail, "parameters before and after the step")
        elif not all(math.isfinite(call.loss) for call in calls):
            raise InputError("the step returns NaN as written, and a number in float64; an overflow in half precision?")
