"""How a port's logits follow from the last normed stream: scaled, shifted, behind a softmax, rounded to decimals."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2.port.diagnosis.last_step import by_token, last_steps
from gpt2.port.diagnosis.search import Fault, Recorded
from gpt2.port.recording.pool import Pool

FEW_VALUES = 8  # an output with no more than these shows no rounding
ROUNDING_SLACK = 1e-6
SAMPLE = 64  # vocabulary entries on which a candidate for the last stream is tested first


class Ending:
    """How the port's logits follow from the last normed stream; ``weight`` (V, D) is the head's."""

    def __init__(self, pool: Pool, weight: Tensor) -> None:
        self.pool, self.bound, self.given, self.weight = pool, pool.bound, pool.logits, weight
        shared = min(self.given.shape[-1], len(weight))
        self.sample = torch.randperm(shared, generator=torch.Generator().manual_seed(0))[:SAMPLE]
        self.decimals = decimals_of(self.given[0, :1] if self.given.ndim == 3 else self.given)
        probabilities = {"softmax": self.given.clamp(min=0.0), "log_softmax": self.given.exp()}
        self.softmaxed = [name for name, p in probabilities.items() if bool(((p.sum(-1) - 1).abs() < pool.sum_bound).all())]

    def right_logits(self, x: Tensor) -> Recorded | None:
        """Do :meth:`logits`, without a fault of the head: a recorded norm that is wrong explains more than a scale behind it."""
        found = self.logits(x)
        return None if found is None or found.faults else found

    def logits(self, x: Tensor) -> Recorded | None:
        """Return the port's logits (B, T', V), T' being 1 or T, if they follow from a normed stream (B, T, D)."""
        width = self.given.shape[-1]
        if self.given.numel() % (len(x) * width) or self.given.numel() > x.shape[0] * x.shape[1] * width:
            return None
        given = self.given.reshape(len(x), -1, width)
        x = x[:, -given.shape[1] :]
        wanted = given[..., self.sample]
        mine = x @ self.weight[self.sample].T
        ratio = float((mine * wanted).sum() / mine.square().sum().clamp(min=1e-300))
        candidates = {"": (mine, "")}
        if ratio:
            candidates["logits-scaled"] = mine * ratio, f"the logits are multiplied by {ratio:.6g}"
        if wanted.shape[:2].numel() > 1:
            shift = (wanted - mine).mean((0, 1), keepdim=True)
            candidates["extra-bias"] = mine + shift, "the head adds a bias; GPT-2's head has none"
        for id, (value, words) in candidates.items():
            if (error := self.pool.logits_error(value, wanted)) <= self.bound:
                return Recorded(given, error, (Fault(id, "logits", words),) if id else ())
        for name in self.softmaxed if width == len(self.weight) else ():
            whole = x @ self.weight.T
            made = whole.softmax(-1) if name == "softmax" else whole.log_softmax(-1)
            if (error := self.pool.logits_error(made, given)) <= self.bound:
                words = f"the model returns {name} of the logits"
                return Recorded(given, error, (Fault("logits-softmaxed", "logits", words),))
        if width == len(self.weight) and self.pool.logits_error(by_token(mine, wanted), wanted) <= self.bound:
            whole = x @ self.weight.T
            for fault, formula in last_steps(linear=True):
                if (error := self.pool.logits_error(formula(whole), given)) <= self.bound:
                    return Recorded(given, error, (fault,))
        return self._rounded(x, given) if self.decimals is not None and width == len(self.weight) else None

    def _rounded(self, x: Tensor, given: Tensor) -> Recorded | None:
        """Return the port's output if it is the logits, or their softmax, rounded to so many decimals."""
        unit = 10.0 ** -(self.decimals or 0)
        logits = x @ self.weight.T
        made = {
            "the logits": logits,
            "softmax of the logits": logits.softmax(-1),
            "log_softmax of the logits": logits.log_softmax(-1),
        }
        for words, value in made.items():
            if float((value - given).abs().max()) <= 0.5 * unit * (1 + ROUNDING_SLACK):
                id = "reduced-precision" if words == "the logits" else "logits-softmaxed"
                fix = "return logits  # not rounded"
                detail = f"the model returns {words}, rounded to {self.decimals} decimals"
                return Recorded(given, 0.0, (Fault(id, "logits", detail, fix=fix),))
        return None


def decimals_of(values: Tensor) -> int | None:
    """Return to how many decimals all ``values`` are rounded, if they are, and take more than a few values."""
    for decimals in range(9):
        scaled = values * 10.0**decimals
        if bool(((scaled - scaled.round()).abs() <= 1e-6 * scaled.abs().clamp(min=1.0)).all()):
            return decimals if len(values.unique()) > FEW_VALUES else None
    return None
