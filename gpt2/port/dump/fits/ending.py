"""Read off how the logits follow from the last stream: by which norm and head, or from an earlier stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpt2.checkpoint.keys import head_name
from gpt2.port.diagnosis.last_step import last_steps
from gpt2.port.diagnosis.search import Fault, Formula
from gpt2.port.dump.fits.library import Library
from gpt2.port.dump.fits.linear import Linear
from gpt2.port.dump.fits.normalising import Norm
from gpt2.port.dump.fits.observed import Fit, Observed
from gpt2.port.dump.fits.partial import left_out
from gpt2.port.dump.fits.recorded import Arrays
from gpt2.port.dump.simulation import Simulation, State
from gpt2.port.dump.tolerance import UNITS

FAR = 10  # times the tolerance: logits of one token, by their own size


@dataclass(frozen=True)
class Ended:
    """How the logits follow: a fit of ``stage`` of block ``layer`` (None outside); ``right``: what the stage should be.

    ``seen``: the array that the fit is of, if any.
    """

    fit: Fit
    right: Tensor
    stage: str = ""
    layer: int | None = None
    seen: Observed | None = None


class Ending:
    """The last norm and the head. ``earlier``: the stages of the blocks, as the program computes them."""

    def __init__(self, simulation: Simulation, library: Library, arrays: Arrays, earlier: Sequence[State]) -> None:
        self.simulation, self.library, self.arrays, self.earlier, self.pool = simulation, library, arrays, earlier, arrays.pool
        self.table = simulation.table
        self.logits = self.pool.logits[..., : len(self.table)]

    def read(self, x: Tensor) -> Ended | None:
        """Return how the logits follow from the last stream ``x`` (B, T, D); None if nothing known gives them."""
        right = self.simulation.norm("ln_f", x)
        normed = self.arrays.recorded("ln_f", right)
        if any(self.gives(value) for value in ((normed, right) if normed is not None else (right,))):
            return Ended(Fit((), x), x)
        if (found := self._changed(x, right if normed is None else normed)) is not None or (found := self._early(x)) is not None:
            return found
        if normed is None and (found := self._normed(x, right)) is not None:
            return found
        return self._headed(right if normed is None else normed)

    def gives(self, normed: Tensor) -> bool:
        """Return whether the head gives the logits from a normed stream; those of the last token alone are compared first."""
        self.library.in_time()
        given = self.pool.logits[:, -1:, : len(self.table)]
        near = self.pool.logits_error(normed[:, -1:] @ self.table.T, given) <= FAR * self.pool.tolerance_at("logits")
        return near and self._are_logits(normed @ self.table.T)

    def _are_logits(self, made: Tensor) -> bool:
        given = self.pool.logits[..., : made.shape[-1]]
        return self.pool.logits_error(made[:, -given.shape[1] :], given) <= self.pool.tolerance_at("logits")

    def _changed(self, x: Tensor, normed: Tensor) -> Ended | None:
        """Return logits that are multiplied by one number, or changed token by token, behind the right head."""
        made = (normed @ self.table.T)[:, -self.logits.shape[1] :]
        if made.shape != self.logits.shape:
            return None
        ratio = float((made * self.logits).sum() / made.square().sum().clamp(min=1e-300))
        scaled = Fault("logits-scaled", "logits", f"the logits are multiplied by {ratio:.6g}")
        changes: list[tuple[Fault, Formula]] = [(scaled, lambda made: ratio * made), *last_steps()]
        for name, formula in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
            changes.append(
                (Fault("logits-softmaxed", "logits", f"the model returns {name} of the logits"), partial(formula, dim=-1))
            )
        return next((Ended(Fit((fault,), x), x, "logits") for fault, change in changes if self._are_logits(change(made))), None)

    def _normed(self, x: Tensor, right: Tensor) -> Ended | None:
        """Return a fit of the last norm to its recorded result, or to the one that the logits show."""
        vectors = self.library.vectors
        eps = self.simulation.config.layer_norm_epsilon
        own = Norm("ln_f", vectors["ln_f.weight"], vectors["ln_f.bias"], eps, vectors, {})
        for seen in itertools.chain(self.arrays.observed("ln_f", right), self._solved(right)):
            self.library.in_time()
            fit = own.fit(seen, x, seen.wrong_rows())
            if fit is not None and self._are_logits(fit.value @ self.table.T):
                return Ended(fit, right, "ln_f", None, seen)
        return None

    def _headed(self, x: Tensor) -> Ended | None:
        """Return a fit of the head to the logits."""
        if self.logits.shape[:2] != x.shape[:2] or not bool(self.logits.isfinite().all()):
            return None
        unit, smallest = UNITS[self.pool.logits_dtype]
        slack = unit * self.logits.abs() + smallest
        seen = Observed(self.logits, slack, self.pool.tolerance_at("logits"), x @ self.table.T, -1)
        head = Linear(
            self.library,
            head_name(self.simulation.state),
            "logits",
            self.table.T,
            torch.zeros(len(self.table), dtype=x.dtype),
            {},
        )
        rows = seen.wrong_rows()
        if not bool(rows.any()):
            return None
        few = next(left_out(seen, rows, "logits", "not-loaded"), None)
        fit = few.fit if few is not None and few.sure else head.fit(seen, x, rows) or (few.fit if few is not None else None)
        return None if fit is None else Ended(fit, seen.right, "logits", None, seen)

    def _early(self, x: Tensor) -> Ended | None:
        """Return a head that reads an earlier stream than the last block's result ``x``, or a block that runs once more."""
        last = self.simulation.config.n_layer - 1
        for n, state in enumerate(self.earlier):
            for stage, normed in itertools.product(("x", "mid"), (True, False)):
                if not self.gives(self.simulation.norm("ln_f", state[stage]) if normed else state[stage]):
                    continue
                words = f"the head takes the stream that enters h.{n}: this block and what follows have no effect"
                later = range(n if stage == "x" else n + 1, last + 1)
                faults = [Fault("layer-missing", "", words, layer=layer) for layer in later]
                if stage == "mid":
                    words = f"the head takes the stream behind h.{n}'s attention: its feed-forward is not added"
                    faults.append(Fault("residual-missing", "", words, layer=n))
                if not normed:
                    faults.append(Fault("final-norm-missing", "ln_f", "the head takes it without the last norm"))
                return Ended(Fit(tuple(faults), state[stage]), state[""], "", n)
            again = self.simulation.run_block(n, {"x": x}, {})[""]
            if self.gives(self.simulation.norm("ln_f", again)):
                fault = Fault("layer-repeated", "", "it runs once more behind the last block", layer=n)
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
