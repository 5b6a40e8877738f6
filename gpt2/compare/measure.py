"""One definition of every metric. Reductions run in float64, whatever the dtype of what is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import GPT2


def max_abs(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference."""
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


def relative_error(a: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference over that of the reference; 0 for equal tensors, NaN and infinity count as infinite."""
    reference = reference.double()
    difference = torch.linalg.vector_norm(a.double() - reference).item()
    if difference == 0:
        return 0.0
    error = difference / max(torch.linalg.vector_norm(reference).item(), torch.finfo(torch.float64).tiny)
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class LanguageScore:
    """How well a model predicts a text, with the protocol without which the number means nothing.

    ``loss`` is nats per token over ``tokens`` scored tokens, which decode to ``bytes`` bytes. Each was predicted from at most
    ``context`` tokens, in windows that move by ``stride``.
    """

    loss: float
    tokens: int
    bytes: int
    context: int
    stride: int

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Independent of the tokenizer, so models with different vocabularies compare."""
        return self.loss * self.tokens / (math.log(2) * self.bytes)


@torch.inference_mode()
def language_score(
    model: GPT2, ids: Tensor, token_bytes: Tensor, *, context: int, stride: int | None = None, batch_size: int = 16
) -> LanguageScore:
    """Score every token of ``ids`` (N,) but the first, exactly once.

    Windows of ``context`` inputs move by ``stride`` (default: ``context``, no overlap); where they overlap, only what no
    earlier window scored counts. ``token_bytes`` (V,) is each token's length in bytes.
    """
    stride = stride or context
    device = model.wte.weight.device
    was_training = model.training
    model.eval()
    spans, scored = [], 0  # (first input, end of targets, targets already scored)
    while scored < len(ids) - 1:
        end = min(scored + (stride if spans else context), len(ids) - 1)
        spans.append((max(0, end - context), end, scored))
        scored = end
    total, n_bytes = 0.0, 0
    for i in range(0, len(spans), batch_size):
        by_length: dict[int, list[tuple[int, int, int]]] = {}
        for span in spans[i : i + batch_size]:
            by_length.setdefault(span[1] - span[0], []).append(span)
        for group in by_length.values():
            inputs = torch.stack([ids[start:end] for start, end, _ in group]).to(device)
            targets = torch.stack([ids[start + 1 : end + 1] for start, end, _ in group]).to(device)
            losses = token_losses(model(inputs), targets)  # (B, T)
            for row, (start, _, done) in enumerate(group):
                total += losses[row, done - start :].sum(dtype=torch.float64).item()
                n_bytes += int(token_bytes[targets[row, done - start :].cpu()].sum())
    model.train(was_training)
    return LanguageScore(total / scored, scored, n_bytes, context, stride)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood, nats, of each target: (B, T, V) and (B, T) to (B, T), computed in at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
