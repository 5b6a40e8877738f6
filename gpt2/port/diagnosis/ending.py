"""Follow a port from the last block's stream to the logits that it returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.port.diagnosis.hypotheses import Fault
from gpt2.port.diagnosis.search import Choice, Chooser, Option
from gpt2.port.diagnosis.wiring import STREAM, Norms

SAMPLE = 64  # tokens of the vocabulary that a candidate is tried on first
ROW_SUM_BOUND = 1e-6  # a row of probabilities sums to one within this, in any dtype


class Head(NamedTuple):
    """How the head makes the logits of a normed stream: the faults, and the error."""

    faults: tuple[Fault, ...]
    error: float


class Ending:
    """Finds the last stream and norm that give the port's logits. ``weight`` (V, D) is the head's."""

    def __init__(self, chooser: Chooser, norms: Norms, weight: Tensor) -> None:
        self.chooser, self.norms, self.weight = chooser, norms, weight
        self.bound, self.given = chooser.pool.bound, chooser.pool.logits
        shared = min(self.given.shape[-1], len(weight))
        self.sample = torch.randperm(shared, generator=torch.Generator().manual_seed(0))[:SAMPLE]
        self.log_probabilities = _is_one(self.given.exp())
        self.probabilities = _is_one(self.given) and bool((self.given >= 0).all())

    def reach(self, streams: list[Option], quick: bool = False) -> Choice[Head] | None:
        """The stream and the norm that lead to the logits. ``quick``: from likely streams only."""
        missing = Fault("final-norm-missing", "ln_f", "the head takes the stream as it is, without the last norm")
        for some in (self.chooser.likely("out", streams), *([] if quick else [streams])):
            options: list[Option] = []
            for stream in self.chooser.seen(some, STREAM):
                options += self.norms.before("ln_f", stream, missing)
            if (choice := self.chooser.choose("ln_f", options, self._head, STREAM)) is not None:
                return choice
        return None

    def logits(self, x: Tensor) -> Tensor:
        """The logits as (B, T', V) for a stream (B, T, D): T' is one where only the last position is returned."""
        return self.given.reshape(len(x), -1, self.given.shape[-1])

    def _head(self, x: Tensor) -> Head | None:
        """Whether a normed stream leads to the logits."""
        width = self.given.shape[-1]
        if self.given.numel() % (len(x) * width) or self.given.numel() > x.shape[0] * x.shape[1] * width:
            return None
        given = self.logits(x)
        x = x[:, -given.shape[1] :]
        wanted = given[..., self.sample]
        mine = x @ self.weight[self.sample].T
        candidates: list[tuple[Tensor, tuple[Fault, ...]]] = [(mine, ())]
        ratio = float((mine * wanted).sum() / mine.square().sum().clamp(min=1e-300))
        if ratio:
            scaled = Fault("logits-scaled", "logits", f"the logits are multiplied by {ratio:.6g}")
            candidates.append((mine * ratio, (scaled,)))
        if wanted.shape[:2].numel() > 1:
            shift = (wanted - mine).mean((0, 1), keepdim=True)
            biased = Fault("extra-bias", "logits", "the head adds a bias; GPT-2's head has none")
            candidates.append((mine + shift, (biased,)))
        for value, faults in candidates:
            if (error := worst_relative_error(value, wanted)) <= self.bound:
                return Head(faults, error)
        if (self.log_probabilities or self.probabilities) and width == len(self.weight):
            whole = x @ self.weight.T
            made = whole.log_softmax(-1) if self.log_probabilities else whole.softmax(-1)
            if (error := worst_relative_error(made, given)) <= self.bound:
                words = "log_softmax" if self.log_probabilities else "softmax"
                return Head((Fault("logits-softmaxed", "logits", f"the model returns {words} of the logits"),), error)
        return None


def _is_one(probabilities: Tensor) -> bool:
    return bool(((probabilities.sum(-1) - 1).abs() < ROW_SUM_BOUND).all())
