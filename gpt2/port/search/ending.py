"""Read off how the logits follow from the last stream: by which norm, head and last step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.checkpoint.keys import head_name
from gpt2.port.alternatives.outside import LAST_STEPS
from gpt2.port.fits.linear import Library, Linear
from gpt2.port.fits.norm import Norm
from gpt2.port.fits.observed import Fit, Observed
from gpt2.port.graph import Function, Model
from gpt2.port.search.observe import Observation
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.tolerance import UNITS


class Ended(NamedTuple):
    """How the logits follow: a fit of ``stage``."""

    fit: Fit
    stage: str


class Ending:
    """The last norm and the head."""

    def __init__(self, observation: Observation, model: Model, library: Library) -> None:
        self.observation, self.model, self.library = observation, model, library
        self.pool, self.table = observation.pool, model.table
        self.logits = self.pool.logits[..., : len(self.table)]

    def read(self, x: Tensor) -> Ended | None:
        """Return how the logits follow from the last stream ``x`` (B, T, D); None if nothing known gives them."""
        right = self.model.norm("ln_f", x)
        seen = self.observation.find("ln_f", right)
        normed = right if seen is None else seen.own
        if (found := self._changed(x, normed)) is not None:
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
                return Ended(Fit((fault,), x), "logits")
        return None

    def _changes(self, made: Tensor) -> Iterator[tuple[Cause, Function]]:
        ratio = float((made * self.logits).sum() / made.square().sum().clamp(min=1e-300))
        if ratio:
            yield Cause.at("logits-scaled", "logits", f"the logits are multiplied by {ratio:.6g}"), lambda made: ratio * made
        if made.shape[:2].numel() > 1:
            shift = (self.logits - made).mean((0, 1), keepdim=True)
            yield Cause.at("extra-bias", "logits", "the head adds a bias; GPT-2's head has none"), lambda made: made + shift
        yield from LAST_STEPS
        for name, formula in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
            fault = Cause.at("logits-softmaxed", "logits", f"the model returns {name} of the logits")
            yield fault, partial(formula, dim=-1)

    def _normed(self, x: Tensor, right: Tensor) -> Ended | None:
        """Return a fit of the last norm to its recorded result."""
        vectors = self.library.vectors
        norm = Norm("ln_f", vectors["ln_f.weight"], vectors["ln_f.bias"], self.model.config.layer_norm_epsilon, vectors)
        for seen in self.observation.unexplained("ln_f", right, ()):
            self.observation.check()
            fit = next(norm.fits(seen, x, seen.wrong_rows()), None)
            if fit is not None and self._are_logits(fit.value @ self.table.T):
                return Ended(fit, "ln_f")
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
        head = Linear(self.library, name, "logits", self.table.T, none, self.model.config)
        fit = next(head.fits(seen, x, rows), None)
        return None if fit is None else Ended(fit, "logits")
