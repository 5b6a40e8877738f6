"""One definition of every metric. Reductions run in float64, whatever the dtype of what is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
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


def worst_relative_error(a: Tensor, reference: Tensor) -> float:
    """Largest absolute difference of any entry over the root mean square of the reference: at least :func:`relative_error`."""
    reference = reference.double()
    difference = max_abs(a, reference)
    if difference == 0:
        return 0.0
    error = difference / max(reference.square().mean().sqrt().item(), torch.finfo(torch.float64).tiny)
    return error if math.isfinite(error) else math.inf


def differing_bits(a: Tensor, b: Tensor) -> int:
    """How many entries of two tensors are not the same bits; -0.0 and 0.0 are not.

    Raises:
        ValueError: they differ in dtype or shape; broadcasting would count something else.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)} cannot be compared bit by bit")
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.contiguous().view(integer) != b.contiguous().view(integer)).sum())


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

    Raises:
        InputError: nothing to predict, a context the model does not have, or a stride that would skip tokens.
    """
    stride = context if stride is None else stride
    if len(ids) < 2:
        raise InputError(f"a text of {len(ids)} tokens has none to predict; give a longer one")
    if not 1 <= context <= model.config.n_positions:
        raise InputError(f"context {context} is not within the model's 1 .. {model.config.n_positions} positions")
    if not 1 <= stride <= context:
        raise InputError(f"stride {stride} is not within 1 .. {context}, the context: tokens would be skipped, or none reached")
    device = model.wte.weight.device
    was_training = model.training
    model.eval()
    spans, scored = [], 0  # (first input, end of targets, targets already scored)
    while scored < len(ids) - 1:
        end = min(scored + (stride if spans else context), len(ids) - 1)
        spans.append((max(0, end - context), end, scored))
        scored = end
    total, n_bytes = 0.0, 0
    try:
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
    finally:
        model.train(was_training)
    return LanguageScore(total / scored, scored, n_bytes, context, stride)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood, nats, of each target: (B, T, V) and (B, T) to (B, T), computed in at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
