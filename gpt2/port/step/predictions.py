"""The gradients and losses that a training program would have: right ones, and those of known mistakes in the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.checkpoint.checkpoint import model_with
from gpt2.checkpoint.keys import head_name
from gpt2.config import GPT2Config
from gpt2.port.deadline import Deadline
from gpt2.port.step.gradients import IGNORED, Gradients, two_shares
from gpt2.port.step.trained import SUMMED, wrong_averages

MAX_WORK = 2e10  # parameters times tokens, of one more backward pass than needed
END_OF_TEXT = 50_256  # in GPT-2's vocabulary; people take it for padding


@dataclass(frozen=True)
class Batch:
    """Token ids (B, T) and the right next ids (B, T), -100 where there is none to learn."""

    ids: Tensor
    targets: Tensor

    @property
    def count(self) -> int:
        return int((self.targets >= 0).sum())


def factors_of(batch: Batch, parts: int | None) -> list[tuple[float, str, str]]:
    """Return what a wrong average multiplies the mean by, as :func:`gpt2.port.step.trained.wrong_averages` does."""
    count, (rows, length) = batch.count, batch.targets.shape
    return [
        *wrong_averages(count, count / rows, parts or 1),
        (float(rows), SUMMED, "the mean, times the number of rows"),
        (1 / rows, "accumulation-average-wrong", "the mean, divided by the number of rows again"),
        (count / (rows * length), "padding-in-average", "the sum, divided by all targets, ignored ones too"),
    ]


def labelings(batch: Batch, special: tuple[int, ...], parts: int | None = None) -> dict[str, Tensor]:
    """Return labels (B, T) by the cause that they stand for; "" are the right ones. ``parts``: of a batch, by the settings."""
    ids, right = batch.ids, batch.targets
    found = {"": right, "labels-not-shifted": ids.where(right >= 0, IGNORED)}
    if bool((right[:, -1] < 0).all()):
        found["labels-not-shifted last"] = ids
    twice = torch.full_like(ids, IGNORED)
    twice[:, :-1] = right[:, 1:]
    twice[:, :-2] = ids[:, 2:]
    found["labels-shifted-twice"] = twice
    short = twice.clone()
    short[:, -2:] = IGNORED
    found["labels-shifted-twice short"] = short
    found["labels-shifted-twice repeated"] = torch.cat([twice[:, :-1], right[:, -1:]], 1)
    found["labels-wrong previous"] = torch.cat([ids[:, :1], ids[:, :-1]], 1).where(right >= 0, IGNORED)
    firsts = ids[:, 0]
    for word, last in {"rolled": firsts, "next": firsts.roll(-1), "zero": torch.zeros_like(firsts)}.items():
        found[f"last-token-in-loss {word}"] = torch.cat([right[:, :-1], last[:, None]], 1)
    missing = right.clone()
    missing[:, -1] = IGNORED
    if bool((right[:, -1] >= 0).any()):
        found["last-token-missing"] = missing
    first = right.clone()
    first[:, 0] = IGNORED
    found["tokens-left-out first"] = first
    for id in dict.fromkeys(special):
        if bool((right == id).any()):
            found[f"token-ignored {id}"] = right.masked_fill(right == id, IGNORED)
    if parts and parts > 1 and len(ids) % parts == 0:
        last = right.clone()
        last[: -(len(ids) // parts)] = IGNORED
        found["accumulation-last-only"] = last
    if not bool((right >= 0).all()):
        found["padding-in-average"] = right.clamp(min=0)
    return {name: labels for name, labels in found.items() if bool((labels >= 0).any())}


class Predictor:
    """Gradients of a model of this size for any weights, labels and formula of the loss, and the batch of each step.

    ``parts``: of a batch, by the settings. Behind ``deadline``, no more mistakes are tried.
    """

    def __init__(self, config: GPT2Config, batches: Sequence[Batch], parts: int | None, deadline: Deadline) -> None:
        self.config, self.batches, self.parts, self.deadline = config, batches, parts, deadline

    def batch(self, step: int) -> Batch:
        """Return the batch of a step: the last, if there are fewer."""
        return self.batches[min(step, len(self.batches) - 1)]

    def labelings(self, step: int) -> dict[str, Tensor]:
        """Return the labels (B, T) that the batch of a step may have, by their cause; "" are the right ones.

        People take for padding, so that the loss ignores it: the first id, the last, and the end of text.
        """
        special = 0, END_OF_TEXT, self.config.eos_token_id or 0, self.config.vocab_size - 1
        return labelings(self.batch(step), special, self.parts)

    @property
    def can_try(self) -> bool:
        """Whether one more backward pass costs little, and there is time for it."""
        return self.config.num_parameters() * self.batches[0].ids.numel() < MAX_WORK and not self.deadline.passed

    def gradients(
        self,
        state: Mapping[str, Tensor],
        ids: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        smoothing: float = 0.0,
        factor: float = 1.0,
    ) -> Gradients:
        """Return the gradients of the weighted sum of the losses, in the dtype of ``state``; by default of their mean.

        ``weights`` (B, T); positions with a negative label have none. ``smoothing`` of the labels; ``factor`` of the logits.
        """
        weights = (labels >= 0) / (labels >= 0).sum() if weights is None else weights * (labels >= 0)

        def backward(logits: Tensor) -> None:
            scaled = factor * logits.flatten(0, 1)
            losses = F.cross_entropy(scaled, labels.flatten(), reduction="none", ignore_index=IGNORED, label_smoothing=smoothing)
            (losses * weights.flatten().to(losses.dtype)).sum().backward()

        return two_shares(self.config, state, [(ids, backward)])

    @torch.no_grad()
    def slope_of_last_bias(self, state: Mapping[str, Tensor], batch: Batch) -> Callable[[float], Tensor]:
        """Return a function of the factor of the logits: the gradient (D,) of ``ln_f.bias``, which needs no backward pass."""
        logits, labels = self.logits(state, batch.ids)[batch.targets >= 0], batch.targets[batch.targets >= 0]
        table = state[head_name(state)]
        wanted = table[labels].mean(0)
        return lambda factor: factor * ((factor * logits).softmax(-1).mean(0) @ table - wanted)

    @torch.no_grad()
    def logits(self, state: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        model = model_with(self.config, state.items())
        logits: Tensor = model.head(model.hidden(ids))
        return logits


def rounding(
    predictor: Predictor, state: Mapping[str, Tensor], batch: Batch, exact: Gradients, dtype: torch.dtype
) -> dict[str, float]:
    """Return the absolute error (root mean square) that a program in ``dtype`` may make in each parameter's gradient.

    It may round 16 times as much as our model, as :mod:`gpt2.port.dump.tolerance` says; in float64, 1e-9 of the gradient.
    """
    norms = {name: float(g.square().mean().sqrt()) for name, g in exact.whole.items()}
    whole = max(norms.values())
    if dtype == torch.float64:
        return {name: 1e-9 * norm + 1e-13 * whole for name, norm in norms.items()}
    narrow = {name: tensor.to(torch.float32) for name, tensor in state.items()}
    rounded = predictor.gradients(narrow, batch.ids, batch.targets).whole
    errors = {name: float((rounded[name].double() - g).square().mean().sqrt()) for name, g in exact.whole.items()}
    return {name: 16 * max(errors[name], 1e-7 * norms[name]) + 1e-9 * whole for name in norms}
