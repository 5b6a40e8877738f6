"""Examine one training step: run it from the checkpoint's weights in a few sessions, and compare it stage by stage."""

import itertools
import math
from collections.abc import Collection, Sequence
from contextlib import suppress

import torch

from gpt2.errors import InputError
from gpt2.measure.metrics import relative_error
from gpt2.model import GPT2
from gpt2.port.mapping.roles import Roles
from gpt2.port.step.causes import StepFindings
from gpt2.port.step.clipping import judge_clipping, read_clipping
from gpt2.port.step.gradients import DEAD, EQUAL, expected_gradients, judge_accumulation, judge_gradients
from gpt2.port.step.loss import PADDED, StepBatch, judge_dropout, judge_loss, read_loss
from gpt2.port.step.rules import FITS, steady
from gpt2.port.step.sessions import StepError, StepSubject, random_batch
from gpt2.port.step.settings import StepSettings
from gpt2.port.step.updates import StepMoves
from gpt2.port.step.watching import Watched
from gpt2.port.terms.places import Place, shortened
from gpt2.port.terms.report import Diagnosis

CALLS, CALLS_LARGE = 6, 4  # of the first session; of a large module's
HUGE, TINY = 100.0, 1e-10  # factors of the last norm (and, for TINY, of the token embedding) that change the gradients' size
BACKWARD = 16.0  # times the error of the logits, as of a constant in float32: how far off gradients may be
ROUNDINGS = 4.0  # how many roundings of what a step computes in its gradients may be off
OTHER = 1e-6  # error of logits of another function
LOST = 0.01  # share of the changes of entries that rounding loses, which is a cause
OPERATORS = "seen in its operators"


class StepExamination:
    """The checks of one step; :meth:`diagnosis` runs them. Raises InputError as :func:`gpt2.diagnose_step` does."""

    def __init__(self, subject: StepSubject, ours: GPT2, settings: StepSettings, forward: Diagnosis, roles: Roles) -> None:
        self.subject, self.ours, self.settings, self.forward, self.roles = subject, ours, settings, forward, roles
        self.findings = StepFindings(self._places)

    def diagnosis(self) -> Diagnosis:
        """Run the sessions, compare each stage with what the stage before it really gave, and sum up."""
        self.calls = self._session(range(CALLS_LARGE if self.subject.large else CALLS))
        self._require_training()
        self.gathered = next((number for number, call in enumerate(self.calls, 1) if call.updates), 1)  # calls of one update
        self.readings = [read_loss(call.forwards, self._batch(number)) for number, call in enumerate(self.calls)]
        for call in self.calls[1:]:  # the first call's gradients are compared as well
            call.forwards.clear()
        self.scaled = self._scaled_sessions()
        tables = [name for name in self.roles.names_of("wte", "head") if name in self.sampler.parameters]
        # the token embedding and the head, if these are two in the step
        self.untied = tables[:2] if len(tables) > 1 and self.ours.config.tie_word_embeddings else []
        self._clip_and_update()
        self._loss()
        self._gradients()
        self._as_written()
        return self.findings.diagnosis(self.forward)

    def _places(self, names: Collection[str]) -> tuple[Place, ...]:
        """Return the checkpoint's names for parameters."""
        return shortened((Place.of(where) for name in names for where in self.roles.where(name)), self.ours.config.n_layer)

    def _batch(self, seed: int, padded: bool | None = None) -> StepBatch:
        return random_batch(self.ours.config, self.settings, seed, padded=self.settings.padded if padded is None else padded)

    def _session(self, seeds: Sequence[int], names: Collection[str] = (), factor: float = 1.0) -> list[Watched]:
        calls, self.sampler = self.subject.session([self._batch(seed) for seed in seeds], names, factor)
        if bad := [call.loss for call in calls if not math.isfinite(call.loss)]:
            raise InputError(f"the step returns a loss of {bad[0]}; look where it comes from (a mask, a label, a division)")
        for call in calls if names else ():
            call.forwards.clear()  # the gradients of the parameters alone are compared; logits of a large vocabulary are large
        return calls

    def _scaled_sessions(self) -> list[list[Watched]]:
        """Return a few calls with huge gradients, and with tiny ones; empty where the parts of the module are unknown."""
        last, tables = self.roles.names_of("ln_f", "ln_f.weight", "ln_f.bias"), self.roles.names_of("wte", "head")
        if last and tables:
            seeds, ways = range(100, 100 + max(2, self.gathered)), ((last, HUGE), ([*last, *tables], TINY))
            return [self._session(seeds, *how) for how in ways]
        self.findings.notes.append("the parts of your module were not recognised: clipping was judged with gradients of one size")
        return [[], []]

    def _require_training(self) -> None:
        """Raise InputError for a step that changes nothing, or gives NaN."""
        if any(bool(after.isnan().any()) for call in self.calls for update in call.updates for after in update.after.values()):
            raise InputError("the step sets parameters to NaN; look at its rate, and at divisions by zero")
        if not any(call.changes for call in self.calls):
            why = "does it train another module than the one that make_step is given, or never call optimizer.step()?"
            raise InputError(f"no parameter of your module changes in {len(self.calls)} calls of the step: {why}")

    # The stages, the last ones first: what the update multiplies the gradients by tells what the loss was meant to be

    def _clip_and_update(self) -> None:
        findings = self.findings
        judge_accumulation(findings, [*self.calls, *self.scaled[0]])
        moves = self._moves()
        if (many := max(len(call.updates) for call in self.calls)) > 1 and (moves.by_optimizer or not moves.unknown):
            rows = [one.ids for one in self.calls[0].forwards if one.gradient is not None]
            detail = f"the parameters are updated {many} times in a step, "
            if any(torch.equal(*two) for two in itertools.combinations(rows, 2)):
                findings.leave_open("update", f"{detail}on the same tokens (SAM?)")
            else:
                findings.add("step-per-micro-batch", "optimizer", f"{detail}after each part of its batch", OPERATORS)
        if moves.fits:
            moves.judge(bool(self.clip.odd) and next(u for call in self.calls for u in call.updates).decayed(self.clip.odd))
        seen = any(one.error <= FITS for one in moves.known.values()) or moves.by_optimizer
        if seen or not moves.unknown or self.clip.kind or self.clip.odd:  # the gradient is used as it is seen
            judge_clipping(findings, self.clip, self.settings.clip)
        elif moves.odd and self.settings.clip:
            words = f"norms up to {self.clip.largest:.3g} are not seen to be clipped, but may be where they are used"
            findings.leave_open("clip", words)
        # where the rule is known, parameters that are written to, and stay, have a rate of zero
        silent = sum(not (call.updates if moves.fits and not moves.odd else call.changes) for call in self.calls)
        if 0 < silent < len(self.calls):
            findings.add("update-skipped", "optimizer", f"{silent} of {len(self.calls)} calls change no parameter")
        arrived, first = self.calls[0].arrived(), moves.sessions[0]
        still = [n for n, one in arrived.items() if one.two > DEAD * arrived.total and not any(u.moves(n) for u in first)]
        # half precision hides changes where a copy is rounded
        if still and moves.fits and not (moves.odd and self.subject.halved):
            findings.add("parameter-missing", still, "these have gradients, and never change", "their values after each step")

    def _moves(self) -> StepMoves:
        """Read how parameters move, and the clipping: as seen, or if the step clips or undoes a scale where nobody sees it."""
        roles = {name: self.roles.role(name, parameter) for name, parameter in self.sampler.parameters.items()}
        sessions = [self.calls, *self.scaled]
        moves = StepMoves(self.findings, sessions, self.settings, roles)
        self.clip = read_clipping(moves.sessions)
        loss = [float(one.weights.sum()) or 1.0 if one else 1.0 for one in self.readings]  # what it is multiplied by
        arrived, least = bool(self.clip.odd), math.inf
        scales = [[1.0] * len(loss)] + [loss] * (not arrived and not steady([1.0, *loss]))
        ways = [*itertools.product(scales, (self.settings.clip or 1.0, math.inf))] if moves.odd or arrived else []
        for by, limit in [*[(loss, 0.0)] * (arrived and not moves.odd), *ways]:  # first, as its gradient is seen to be used
            made = [[one.read_as(scale, limit, arrived) for one, scale in zip(calls, by, strict=False)] for calls in sessions]
            other = StepMoves(self.findings, made, self.settings, roles)
            clip = read_clipping(other.sessions)
            if not (other.odd or clip.odd) and len(other.rest) < least:
                moves, least, self.calls, self.clip = other, len(other.rest), made[0], clip
        return moves

    def _loss(self) -> None:
        findings, known = self.findings, len(self.findings.causes)
        for number, (call, reading) in enumerate(zip(self.calls, self.readings, strict=True)):
            share = self.clip.share_in(call.updates)
            judge_loss(findings, reading, self._batch(number), self.ours.config.eos_token_id, share, self.gathered * share)
            if "loss" in findings.unknown or "gradient-scaled" in [one.id for one in findings.causes[known:]]:
                break  # another factor in each call may be that of an average
        if not (self.settings.padded or findings.causes[known:] or "loss" in findings.unknown):
            self._padded()
        judge_dropout(findings, (p for call in self.calls for p in call.dropouts), self.settings.dropout)

    def _padded(self) -> None:
        """Try a batch in which some targets are -100, which the settings do not have; a step that refuses it is not faulty."""
        batch, own = self._batch(50, padded=True), StepFindings(self._places)
        with suppress(InputError):
            (call,), _ = self.subject.session([batch])
            share = self.clip.share_in(call.updates)
            judge_loss(own, read_loss(call.forwards, batch), batch, self.ours.config.eos_token_id, share)
        for cause in (cause for cause in own.causes if cause.id in PADDED):
            self.findings.notes.append(f"where targets are -100 (yours need not be): {cause.detail} ({cause.id})")

    def _gradients(self) -> None:
        findings, first = self.findings, self.calls[0]
        if any(call.noise for call in self.calls) and (moved := self._moved_by_noise()) > EQUAL:
            findings.leave_open("gradient", "your step draws normal noise, which was left out of the comparison")
            findings.differ("gradient", moved)
        detail = f"the head and the token embedding are two parameters ({' and '.join(self.untied)}); each gets its own gradient"
        if self.untied and all(torch.equal(*(update.after[name] for name in self.untied)) for update in first.updates):
            findings.leave_open("gradient", f"{detail}, and your step keeps them equal, which was not followed")
        elif self.untied:
            findings.add("tied-gradient-lost", "wte", detail, "their values part in the step")
        if self.roles.mapping is None or not self.forward.ok:
            words = "your forward pass is not ours, so the gradients of your parameters were not compared with ours"
            findings.notes.append(words)
        elif passes := [one for one in first.forwards if one.gradient is not None]:
            if len(first.updates) > 1:  # then there is a backward pass for each
                passes = passes[: first.updates[0].backwards]
            explained = max(EQUAL, ROUNDINGS * first.rounds, BACKWARD * (self.forward.logits_error or 0.0))
            made, error = expected_gradients(self._state(), self.roles, self.sampler, passes)
            if error > max(explained, OTHER):
                words = "in your step the module gives other logits than for the ids alone (a mask, position_ids?)"
                findings.leave_open("gradient", f"{words}, so the gradients of your parameters were not compared with ours")
            else:
                judge_gradients(findings, first, made, self.roles, self.untied, max(explained, BACKWARD * error))
        for name, value in self.clip.outliers.items():
            doubled = self.roles.role(name, self.sampler.parameters[name]) == "embedding" and abs(value - 2) < 1e-6
            detail = f"after the backward pass its gradient is multiplied by {value:.6g}"
            findings.add("tied-gradient-doubled" if doubled else "gradient-scaled", [name], detail)

    def _moved_by_noise(self) -> float:
        """Return how far the normal noise that a step draws moves the parameters at the end, relative to them."""
        self.subject.keep_noise, noisy = True, list[Watched]()
        with suppress(InputError):
            noisy = self._session(range(len(self.calls)))
        self.subject.keep_noise = False
        ends = [torch.cat([*one[-1].updates[-1].after.values()]) for one in (self.calls, noisy) if one and one[-1].updates]
        return relative_error(*ends) if len(ends) == 2 else 1.0

    def _state(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint in float64, rounded where the step keeps a parameter in half precision."""
        dtypes = {where: dtype for name, dtype in self.subject.dtypes.items() for where in self.roles.where(name)}
        return {name: t.cpu().to(dtypes.get(name, t.dtype)).double() for name, t in self.ours.state_dict().items()}

    def _as_written(self) -> None:
        """Run the step as it is, in its own dtypes: it may lose or skip updates, or halve the precision of its loss."""
        findings, halved = self.findings, self.subject.halved
        try:
            calls, _ = self.subject.session([self._batch(seed) for seed in range(3 if halved else 2)], as_written=True)
        except StepError as error:
            findings.notes.append(f"in float64 your step runs; as written it does not: {error}")
            calls = []
        in_float64 = any(call.half for call in self.calls)
        if in_float64 or any(call.half for call in calls * (not halved)):
            run = "" if in_float64 else "as written, in your own dtypes, "
            detail = f"{run}the softmax of the loss reads logits in half precision"
            findings.add("logits-half-precision", "loss", detail, OPERATORS)
        if any(exact.changes and not written.changes for written, exact in zip(calls, self.calls, strict=False)):
            detail = "as written, in your own dtypes, a step changes no parameter; in float64 it does"
            findings.add("update-skipped", "optimizer", detail, "parameters before and after the step")
        elif not all(math.isfinite(call.loss) for call in calls):
            raise InputError("the step returns NaN as written, and a number in float64; an overflow in half precision?")
        elif halved and calls:
            self._lost_to_rounding(calls[-1], self.calls[len(calls) - 1], halved)

    def _lost_to_rounding(self, written: Watched, exact: Watched, names: list[str]) -> None:
        """Say what share of a step's changes is lost where weights are kept in half precision, beside the step in float64."""
        both = zip(exact.updates, written.updates, strict=False)
        entries = [(one.before[n] != one.after[n], other.before[n] == other.after[n]) for one, other in both for n in names]
        due = sum(int(moves.sum()) for moves, _ in entries)
        lost = sum(int((moves & stays).sum()) for moves, stays in entries)
        kind = str(self.subject.dtypes[names[0]]).removeprefix("torch.")
        words = f"weights are kept in {kind}, and {lost / max(due, 1):.0%} of the changes of their entries are lost to rounding"
        if lost < LOST * due:
            self.findings.notes.append(words)
        else:
            self.findings.add("update-rounded", names, words, "the same step in float64 changes these entries")
