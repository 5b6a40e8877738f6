"""One definition of every metric. Reductions run in float64, whatever the dtype of what is measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.checkpoint.containers.mapped_file import require_whole_files
from gpt2.errors import InputError
from gpt2.model import GPT2

Logits = Callable[[Tensor], Tensor]  # ids (B, T), int64, on the CPU, to logits (B, T, V) in any float dtype, on any device
MAX_JS = math.log(2)  # the largest Jensen-Shannon divergence, in nats: of distributions that share no token

PART = 1 << 16  # entries that are compared at a time, so that what is made of them stays in the processor's cache


def _parts(a: Tensor, reference: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The difference of two tensors, and the reference, in float64, a part at a time."""
    a, reference = torch.broadcast_tensors(a, reference)  # what a broken model gives may be a number where there was a matrix
    size = PART if a.is_cpu else max(1, a.numel())
    for some, others in zip(a.flatten().split(size), reference.flatten().split(size), strict=True):
        exact = others.double()
        yield some.double() - exact, exact


def max_abs(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference."""
    return _largest([difference.abs().max() for difference, _ in _parts(a, b)]) if a.numel() else 0.0


def _largest(values: list[Tensor]) -> float:
    return torch.stack(values).max().item()  # which keeps a NaN


def relative_error(a: Tensor, reference: Tensor) -> float:
    """Frobenius norm of the difference over that of the reference; 0 for equal tensors, NaN and infinity count as infinite."""
    squares = [torch.stack([one.dot(one) for one in pair]) for pair in _parts(a, reference)]
    difference, size = torch.stack(squares).sum(0).sqrt().tolist()
    if difference == 0:
        return 0.0
    error = difference / max(size, torch.finfo(torch.float64).tiny)
    return error if math.isfinite(error) else math.inf


def worst_relative_error(a: Tensor, reference: Tensor) -> float:
    """Largest absolute difference of any entry over the root mean square of the reference: at least :func:`relative_error`."""
    if not a.numel():
        return 0.0
    found = [(difference.abs().max(), exact.dot(exact)) for difference, exact in _parts(a, reference)]
    difference = _largest([largest for largest, _ in found])
    if difference == 0:
        return 0.0
    size = math.sqrt(sum(squares.item() for _, squares in found) / max(a.numel(), reference.numel()))
    error = difference / max(size, torch.finfo(torch.float64).tiny)
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
        return math.inf if self.loss >= 700 else math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Independent of the tokenizer, so models with different vocabularies compare."""
        return self.loss * self.tokens / (math.log(2) * self.bytes)


class Window(NamedTuple):
    """Inputs ``ids[start:end]`` of a text. What follows the inputs ``first`` .. ``end - 1`` is scored here and nowhere else."""

    start: int
    end: int
    first: int


def windows(n: int, context: int, stride: int | None = None, *, guide: bool = False) -> Iterator[Window]:
    """The windows in which every token but the first of a text of ``n`` is scored, exactly once.

    Windows of ``context`` inputs move by ``stride`` (default: ``context``, no overlap); where they overlap, only what no
    earlier window scored counts. The last window reaches back, so that all are equally long.

    ``guide`` cuts as Hugging Face's guide "Perplexity of fixed-length models" does: ``context`` counts the scored token too,
    the first token of a window that overlaps none before it is not scored, and the last window is what is left.

    Raises:
        InputError: nothing to predict, no context, or a stride that would skip tokens.
    """
    stride = context if stride is None else stride
    if n < 2:
        raise InputError(f"a text of {n} tokens has none to predict; give a longer one")
    if context < 1 + guide:
        raise InputError(f"context {context}: a token is predicted from at least 1; give {1 + guide} or more")
    if not 1 <= stride <= context:
        raise InputError(f"stride {stride} is not within 1 .. {context}, the context: tokens would be skipped, or none reached")
    if guide:
        yield from _guide_windows(n, context, stride)
        return
    end = min(context, n - 1)
    yield Window(0, end, 0)
    while end < n - 1:
        first, end = end, min(end + stride, n - 1)
        yield Window(max(0, end - context), end, first)


def _guide_windows(n: int, context: int, stride: int) -> Iterator[Window]:
    end = 0  # of the window's tokens, its last target among them
    for start in range(0, n, stride):
        before, end = end, min(start + context, n)
        if end - start > 1:
            yield Window(start, end - 1, max(start, before - 1))
        if end == n:
            return


def batches(
    ids: Tensor, *, context: int, stride: int | None = None, batch_size: int | None = None, guide: bool = False
) -> Iterator[tuple[Tensor, list[Window]]]:
    """The :func:`windows` of a text (N,) as inputs (B, T) to run together, B at most ``batch_size`` (default: 1024 tokens)."""
    batch_size = max(1, 1024 // max(1, context)) if batch_size is None else batch_size
    remaining = windows(len(ids), context, stride, guide=guide)
    for _, alike in itertools.groupby(remaining, lambda window: window.end - window.start):
        while group := list(itertools.islice(alike, batch_size)):
            require_whole_files()
            yield torch.stack([ids[window.start : window.end] for window in group]), group


@torch.inference_mode()
def language_score(
    model: GPT2 | Logits,
    ids: Tensor,
    token_bytes: Tensor,
    *,
    context: int,
    stride: int | None = None,
    batch_size: int | None = 16,
    n_positions: int | None = None,
    vocab: int | None = None,
    guide: bool = False,
) -> LanguageScore:
    """Score every token of ``ids`` (N,) but the first, exactly once, in the :func:`windows` of ``context`` and ``stride``.

    With ``guide`` in those of Hugging Face's guide, which leave some tokens out.

    ``token_bytes`` (V,) is each token's length in bytes. ``model`` is ours, which then evaluates as it does without dropout,
    or any callable that gives logits, of which ``n_positions`` says how long a context it has. ``vocab`` cuts logits to a
    tokenizer's entries (default: all of them), where a vocabulary is padded.

    Raises:
        InputError: nothing to predict, a context the model does not have, or a stride that would skip tokens.
    """
    total, tokens, n_bytes = 0.0, 0, 0
    with evaluating(model):
        for window, losses in losses_of(
            model, ids, context=context, stride=stride, batch_size=batch_size, n_positions=n_positions, vocab=vocab, guide=guide
        ):
            total += losses.sum(dtype=torch.float64).item()
            tokens += len(losses)
            n_bytes += int(token_bytes[ids[window.first + 1 : window.end + 1]].sum())
    return LanguageScore(total / tokens, tokens, n_bytes, context, context if stride is None else stride)


def losses_of(
    model: GPT2 | Logits,
    ids: Tensor,
    *,
    context: int,
    stride: int | None = None,
    batch_size: int | None = None,
    n_positions: int | None = None,
    vocab: int | None = None,
    guide: bool = False,
) -> Iterator[tuple[Window, Tensor]]:
    """Window by window, the losses of the tokens that are scored there, those of ``ids[first + 1 : end + 1]``; see above."""
    if isinstance(model, GPT2):
        n_positions = model.config.n_positions
    if n_positions is not None and not 1 <= context <= n_positions:
        raise InputError(f"context {context} is not within the model's 1 .. {n_positions} positions")
    device = model.wte.weight.device if isinstance(model, GPT2) else None
    for inputs, group in batches(ids, context=context, stride=stride, batch_size=batch_size, guide=guide):
        logits = model(inputs if device is None else inputs.to(device))  # (B, T, V)
        if vocab is not None and logits.size(-1) < vocab:
            found = f"the model knows {logits.size(-1)} tokens and the tokenizer {vocab}"
            raise InputError(f"{found}; use the model's own tokenizer")
        for row, window in enumerate(group):
            scored = logits[row : row + 1, window.first - window.start :, :vocab]
            yield window, token_losses(scored, ids[None, window.first + 1 : window.end + 1].to(logits.device))[0]
        del logits  # or two batches of it would be alive while the next is computed


@contextmanager
def evaluating(model: GPT2 | Logits) -> Iterator[None]:
    """Without dropout; the model's mode is put back afterwards."""
    was_training = isinstance(model, GPT2) and model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood, nats, of each target: (B, T, V) and (B, T) to (B, T), computed in at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def log_probabilities(logits: Tensor) -> Tensor:
    """Logits (..., V) in any dtype to natural log-probabilities, in float64; a logit of -inf is a probability of 0."""
    return logits.double().log_softmax(-1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Shannon entropy of each row (..., V) of log-probabilities, nats: 0 where one token is certain, log V where none is."""
    p = log_probabilities.exp()
    return -torch.where(p == 0, 0, p * log_probabilities).sum(-1)  # half the time of torch.special.entr, which takes logarithms
