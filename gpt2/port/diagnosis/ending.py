"""From the last block's stream to the logits that a port returns."""

from __future__ import annotations

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.port.diagnosis.hypotheses import Finding
from gpt2.port.diagnosis.search import Choice, Chooser, Option
from gpt2.port.diagnosis.wiring import Norms

SAMPLE = 64  # tokens of the vocabulary that a candidate is tried on first
ROWS = 1e-6  # how near to one a row's probabilities sum up to, whatever dtype they were made in


class Ending:
    """The port's logits, and what a last stream would have to be for them."""

    def __init__(self, chooser: Chooser, norms: Norms, head: Tensor, axes: tuple[int, ...]) -> None:
        self.chooser, self.norms, self.head, self.axes = chooser, norms, head, axes
        self.bound = chooser.pool.bound
        self.given = chooser.pool.logits
        generator = torch.Generator().manual_seed(0)
        self.shared = min(self.given.shape[-1], len(head))
        self.sample = torch.randperm(self.shared, generator=generator)[:SAMPLE]
        total = self.given.exp().sum(-1)
        self.log_probabilities = bool(((total - 1).abs() < ROWS).all())
        self.probabilities = bool(((self.given.sum(-1) - 1).abs() < ROWS).all() and (self.given >= 0).all())

    def reach(self, streams: list[Option], quick: bool = False) -> tuple[Choice, tuple[Finding, ...], Tensor, float] | None:
        """The stream and the norm that lead to the logits, what is wrong after the norm, the logits (B, T', V), and the error.

        ``quick``: from likely streams only.
        """
        missing = Finding("final-norm-missing", "ln_f", "the head takes the stream as it is, without the last norm")
        choice = None
        for some in (self.chooser.likely("out", streams), *([] if quick else [streams])):
            options: list[Option] = []
            for stream in self.chooser.seen(some, self.axes):
                options += self.norms.before("ln_f", stream, missing)
            choice = self.chooser.choose("ln_f", options, self._lead, self.axes)
            if choice is not None:
                break
        if choice is None:
            return None
        findings, error = choice.result
        return choice, findings, self._laid(choice.value), error

    def _laid(self, x: Tensor) -> Tensor:
        """The logits as (B, T', V): T' is one where only the last position is returned."""
        return self.given.reshape(len(x), -1, self.given.shape[-1])

    def _lead(self, option: Option, x: Tensor) -> tuple[tuple[Finding, ...], float] | None:
        """Whether a normed stream leads to the logits: findings, error."""
        width = self.given.shape[-1]
        if self.given.numel() % (len(x) * width) or self.given.numel() > x.shape[0] * x.shape[1] * width:
            return None
        given = self._laid(x)
        x = x[:, -given.shape[1] :]
        wanted = given[..., self.sample]
        mine = x @ self.head[self.sample].T
        if (error := worst_relative_error(mine, wanted)) <= self.bound:
            return (), error

        def found(id: str, detail: str, part: str = "logits") -> tuple[Finding, ...]:
            return (Finding(id, part, detail),)

        ratio = float((mine * wanted).sum() / mine.square().sum().clamp(min=1e-300))
        if ratio and (error := worst_relative_error(mine * ratio, wanted)) <= self.bound:
            return found("logits-scaled", f"the logits are multiplied by {ratio:.6g}"), error
        shift = (wanted - mine).mean((0, 1), keepdim=True)
        if wanted.shape[:2].numel() > 1 and (error := worst_relative_error(mine + shift, wanted)) <= self.bound:
            return found("extra-bias", "the head adds a bias, which GPT-2's has not"), error
        if self.log_probabilities or self.probabilities:
            whole = x @ self.head.T
            made = whole.log_softmax(-1) if self.log_probabilities else whole.softmax(-1)
            if given.shape[-1] == made.shape[-1] and (error := worst_relative_error(made, given)) <= self.bound:
                words = "log_softmax" if self.log_probabilities else "softmax"
                return found("logits-softmaxed", f"the model returns {words} of the logits"), error
        return None
