"""Read off how the logits follow from the last stream: by which norm and head, and what changes them in the end."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2.checkpoint.keys import head_name
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.fits.affine import Library, Linear, Norm
from gpt2.port.fits.observed import Fit, Observed
from gpt2.port.graph import Entrance, Model
from gpt2.port.search.matching import PartSearch
from gpt2.port.search.observe import Observation
from gpt2.port.search.part import Part
from gpt2.port.terms.tolerance import UNITS, stored


class LastPart:
    """The last norm and the head: a part behind the last block, of which the logits are shown."""

    def __init__(self, observation: Observation, model: Model, library: Library) -> None:
        self.observation, self.model, self.library = observation, model, library
        self.pool, self.table = observation.pool, model.table
        self.logits = self.pool.logits[..., : len(self.table)]

    def part(self, x: Tensor) -> Part:
        """Return the part from the last stream ``x`` (B, T, D) on."""
        allowed = {"logits": self.pool.tolerance_at("logits") + stored(self.logits, self.pool.logits_dtype)}
        return Part(self.model, "logits", Entrance(self.model.config.n_layer, {"x": x}), {"logits": self.logits}, allowed)

    def known(self, part: Part) -> list[Candidate]:
        """Return the known norms, heads and last steps that give the logits, the simplest first."""
        fits = PartSearch(part).fits() if bool(self.logits.isfinite().all()) else []
        self.observation.check()
        return [fit.candidate for fit in fits if all(one.id != "untied-head" for one in fit.candidate.head)]

    def fit(self, x: Tensor) -> Fit | None:
        """Return fitted numbers of the last norm or the head with which the logits follow from the last stream."""
        right = self.model.norm("ln_f", x)
        seen = self.observation.find("ln_f", right)
        return (self._normed(x, right) if seen is None else None) or self._headed(right if seen is None else seen.own)

    def _normed(self, x: Tensor, right: Tensor) -> Fit | None:
        """Return a fit of the last norm to its recorded result."""
        vectors = self.library.vectors
        norm = Norm("ln_f", vectors["ln_f.weight"], vectors["ln_f.bias"], self.model.config.layer_norm_epsilon, vectors)
        for seen in self.observation.unexplained("ln_f", right, ()):
            self.observation.check()
            fit = next(filter(None, norm.fits(seen, x, seen.wrong_rows())), None)
            if fit is not None and self.observation.are_logits(fit.value, self.table):
                return fit
        return None

    def _headed(self, x: Tensor) -> Fit | None:
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
        return next(filter(None, head.fits(seen, x, rows)), None)
