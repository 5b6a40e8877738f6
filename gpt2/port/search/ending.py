"""Read off how the logits follow from the last stream: by which norm, head and last step, or from an earlier stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpt2.checkpoint.keys import head_name
from gpt2.port.alternatives.last_step import last_steps
from gpt2.port.fits.lacking import left_out
from gpt2.port.fits.linear import Library, Linear
from gpt2.port.fits.norm import Norm
from gpt2.port.fits.observed import Fit, Observed
from gpt2.port.graph import Function, Model, State, run_block
from gpt2.port.search.observe import Observation
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.tolerance import UNITS

FEW_VALUES = 8  # an output with no more than these shows no rounding
ROUNDING_SLACK = 1e-6


@dataclass(frozen=True)
class Ended:
    """How the logits follow: a fit of ``stage``; ``right``: what it should be."""

    fit: Fit
    right: Tensor
    stage: str


class Ending:
    """The last norm and the head. ``earlier``: the nodes of the blocks, as the program computes them."""

    def __init__(self, observation: Observation, model: Model, library: Library, earlier: Sequence[State]) -> None:
        self.observation, self.model, self.library, self.earlier = observation, model, library, earlier
        self.pool, self.table = observation.pool, model.table
        self.logits = self.pool.logits[..., : len(self.table)]

    def read(self, x: Tensor) -> Ended | None:
        """Return how the logits follow from the last stream ``x`` (B, T, D); None if nothing known gives them."""
        right = self.model.norm("ln_f", x)
        seen = self.observation.find("ln_f", right)
        normed = right if seen is None else seen.own
        if (found := self._changed(x, normed)) is not None or (found := self._early(x)) is not None:
            return found
        if seen is None and (found := self._normed(x, right)) is not None:
            return found
        return self._headed(normed)

    def _are_logits(self, made: Tensor) -> bool:
        given = self.pool.logits[..., : made.shape[-1]]
        return self.pool.logits_error(made[:, -given.shape[1] :], given) <= self.pool.tolerance_at("logits")

    def _changed(self, x: Tensor, normed: Tensor) -> Ended | None:
        """Return logits that are scaled, shifted or changed token by token, behind the right head."""
        made = (normed @ self.table.T)[:, -self.logits.shape[1] :]
        if made.shape != self.logits.shape:
            return None
        for fault, change in self._changes(made):
            self.observation.check()
            if self._are_logits(change(made)):
                return Ended(Fit((fault,), x), x, "logits")
        return self._rounded(x, made)

    def _changes(self, made: Tensor) -> Iterator[tuple[Cause, Function]]:
        ratio = float((made * self.logits).sum() / made.square().sum().clamp(min=1e-300))
        if ratio:
            yield Cause.at("logits-scaled", "logits", f"the logits are multiplied by {ratio:.6g}"), lambda made: ratio * made
        if made.shape[:2].numel() > 1:
            shift = (self.logits - made).mean((0, 1), keepdim=True)
            yield Cause.at("extra-bias", "logits", "the head adds a bias; GPT-2's head has none"), lambda made: made + shift
        yield from last_steps()
        for name, formula in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
            fault = Cause.at("logits-softmaxed", "logits", f"the model returns {name} of the logits")
            yield fault, partial(formula, dim=-1)

    def _rounded(self, x: Tensor, made: Tensor) -> Ended | None:
        """Return the logits, or their softmax, rounded to so many decimals."""
        if (places := decimals_of(self.logits[0, :1])) is None:
            return None
        ways: dict[str, Callable[[], Tensor]] = {"the logits": lambda: made, "softmax of the logits": lambda: made.softmax(-1)}
        ways["log_softmax of the logits"] = lambda: made.log_softmax(-1)
        for words, make in ways.items():
            if float((make() - self.logits).abs().max()) <= 0.5 * 10.0**-places * (1 + ROUNDING_SLACK):
                id = "reduced-precision" if words == "the logits" else "logits-softmaxed"
                detail = f"the model returns {words}, rounded to {places} decimals"
                return Ended(Fit((Cause.at(id, "logits", detail, mend="return logits  # not rounded"),), x), x, "logits")
        return None

    def _normed(self, x: Tensor, right: Tensor) -> Ended | None:
        """Return a fit of the last norm to its recorded result, or to the one that the logits show."""
        vectors = self.library.vectors
        norm = Norm("ln_f", vectors["ln_f.weight"], vectors["ln_f.bias"], self.model.config.layer_norm_epsilon, vectors)
        for seen in itertools.chain(self.observation.unexplained("ln_f", right, ()), self._solved(right)):
            self.observation.check()
            fit = next(norm.fits(seen, x, seen.wrong_rows()), None)
            if fit is not None and self._are_logits(fit.value @ self.table.T):
                return Ended(fit, right, "ln_f")
        return None

    def _headed(self, x: Tensor) -> Ended | None:
        """Return a fit of the head to the logits."""
        if self.logits.shape[:2] != x.shape[:2] or not bool(self.logits.isfinite().all()):
            return None
        unit, smallest = UNITS[self.pool.logits_dtype]
        slack = unit * self.logits.abs() + smallest
        seen = Observed(self.logits, slack, self.pool.tolerance_at("logits"), x @ self.table.T, -1)
        rows = seen.wrong_rows()
        if not bool(rows.any()):
            return None
        name, none = head_name(self.model.state), torch.zeros(len(self.table), dtype=x.dtype)
        head = Linear(self.library, name, "logits", self.table.T, none, self.model.config, self.observation.check)
        few = next(left_out(seen, rows, "logits", "not-loaded"), None)
        fit = few.fit if few is not None and few.sure else next(head.fits(seen, x, rows), None) or (few.fit if few else None)
        return None if fit is None else Ended(fit, seen.right, "logits")

    def _early(self, x: Tensor) -> Ended | None:
        """Return a head that reads an earlier stream than the last block's result ``x``, or a block that runs once more."""
        last = self.model.config.n_layer - 1
        for n, state in enumerate(self.earlier):
            for stage, normed in itertools.product(("x", "mid"), (True, False)):
                self.observation.check()
                stream = self.model.norm("ln_f", state[stage]) if normed else state[stage]
                if not self.observation.are_logits(stream, self.table):
                    continue
                words = f"the head takes the stream that enters h.{n}: this block and what follows have no effect"
                later = range(n if stage == "x" else n + 1, last + 1)
                faults = [Cause.at("layer-missing", "", words, layer=layer) for layer in later]
                if stage == "mid":
                    words = f"the head takes the stream behind h.{n}'s attention: its feed-forward is not added"
                    faults.append(Cause.at("residual-missing", "", words, layer=n))
                if not normed:
                    faults.append(Cause.at("final-norm-missing", "ln_f", "the head takes it without the last norm"))
                return Ended(Fit(tuple(faults), state[stage]), state[""], "ln_f")
            again = run_block(self.model.site(n), {"x": x}, {})[""] if n <= last else x
            if self.observation.are_logits(self.model.norm("ln_f", again), self.table) and n <= last:
                fault = Cause.at("layer-repeated", "", "it runs once more behind the last block", layer=n)
                return Ended(Fit((fault,), again), x, "ln_f")
        return None

    def _solved(self, right: Tensor) -> Iterator[Observed]:
        """Yield the normed stream that the logits show: there are more tokens in the vocabulary than features."""
        logits, table = self.logits, self.table
        if len(table) < table.shape[1] or logits.shape[:2] != right.shape[:2] or not bool(logits.isfinite().all()):
            return
        inverse = torch.linalg.pinv(table.T)
        unit, smallest = UNITS[self.pool.logits_dtype]
        loose = unit * logits.abs() + smallest + self.pool.tolerance_at("logits") * logits.square().mean().sqrt()
        yield Observed(logits @ inverse, loose @ inverse.abs(), self.pool.tolerance_at("ln_f"), right, -1)


def decimals_of(values: Tensor) -> int | None:
    """Return to how many decimals all ``values`` are rounded, if they are, and take more than a few values."""
    for places in range(9):
        scaled = values * 10.0**places
        if bool(((scaled - scaled.round()).abs() <= 1e-6 * scaled.abs().clamp(min=1.0)).all()):
            return places if len(values.unique()) > FEW_VALUES else None
    return None
