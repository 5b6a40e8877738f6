"""All metrics: errors between tensors, language scores. Reductions run in float64."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.decoder import evaluating
from gpt2.errors import InputError
from gpt2.measure.windows import Windows
from gpt2.model import GPT2

Logits = Callable[[Tensor], Tensor]  # ids (B, T), int64, on the CPU -> logits (B, T, V), any float dtype and device
Progress = Callable[[str], None]  # called with a short text at each stage
MAX_JS = math.log(2)  # maximum Jensen-Shannon divergence, in nats: distributions without a common token

# Entries per part: temporaries stay in the processor's cache, and one thread computes it; two would wait for each other.
PART = 1 << 15
FLOAT64_BOUND = 1e-10  # relative error of equal models in float64: rounding is about 1e-15, any bug is larger


def silent(what: str) -> None:
    """Show no progress."""


def split(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """Return what ``tensor.split(size)`` does, and a small tensor itself: torch's function takes as long as a small product."""
    return (tensor,) if tensor.size(0) <= size else tensor.split(size)


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the entries of tensors of one shape in flat parts, on a CPU of PART at most, without a copy of long rows."""
    if tensors[0].ndim > 1 and tensors[0][0].numel() >= PART and not all(x.is_contiguous() for x in tensors):
        for rows in zip(*tensors, strict=True):
            yield from _pieces(*rows)
    else:
        yield from zip(*(split(x.flatten(), PART if x.is_cpu else max(1, x.numel())) for x in tensors), strict=True)


def _parts(a: Tensor, reference: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the difference of two tensors and the reference, in float64, in parts."""
    for part, expected in _pieces(a, reference):
        exact = expected.double()
        yield part.double() - exact, exact


def max_abs(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference; infinite if the shapes differ, NaN if an entry is NaN."""
    if a.shape != b.shape:
        return math.inf
    return torch.stack([difference.abs().max() for difference, _ in _parts(a, b)]).max().item() if a.numel() else 0.0


def relative_error(a: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference over the norm of the reference, for rounding; README.md says where it is infinite."""
    return _relative(norms, a, reference)


def errors_of_both(ours: Tensor, theirs: Tensor, exact: Tensor) -> tuple[float, float, float]:
    """Return the relative errors of ours and of theirs, and how far ours is from theirs: in one pass, where all are finite."""
    norm = torch.linalg.vector_norm
    if ours.shape == theirs.shape == exact.shape and exact.numel():
        norms = []
        for one, other, part in _pieces(ours, theirs, exact):
            right = part.double()
            a, b = one - right, other - right
            norms.append(torch.stack([norm(x) for x in (a, b, a - b, right)]))
        *errors, size = norm(torch.stack(norms), dim=0).tolist()
        if size > 0 and math.isfinite(sum(errors) + size):
            return errors[0] / size, errors[1] / size, errors[2] / size
    return relative_error(ours, exact), relative_error(theirs, exact), relative_error(ours, theirs)


def worst_relative_error(a: Tensor, reference: Tensor) -> float:
    """Return the largest absolute difference over the reference's root mean square, which shows one wrong entry among many."""
    return _relative(_largest_and_rms, a, reference)


def worst_entry(a: Tensor, reference: Tensor) -> str:
    """Describe the entry with the largest difference, NaN before all others, and what was expected there."""
    if a.shape != reference.shape:
        return f"the shape is {tuple(a.shape)}, float64 gives {tuple(reference.shape)}"
    off = torch.where(a == reference, 0, (a.double() - reference).abs()).nan_to_num(float("inf"))
    worst = tuple(map(int, torch.unravel_index(off.argmax(), off.shape)))
    return f"entry {list(worst)} is {a[worst]:.5g}, float64 gives {reference[worst]:.5g}"


def _relative(measure: Callable[[Tensor, Tensor], tuple[float, float]], a: Tensor, reference: Tensor) -> float:
    if a.shape != reference.shape:
        return math.inf
    if not a.numel():
        return 0.0
    difference, size = measure(a, reference)
    if difference == 0:
        return 0.0
    error = difference / max(size, torch.finfo(torch.float64).tiny)
    if math.isfinite(error):
        return error
    same = reference.isinf() & (a == reference)
    return _relative(measure, a.masked_fill(same, 0), reference.masked_fill(same, 0)) if same.any() else math.inf


def norms(a: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return the Frobenius norms of the difference, and of the reference."""
    parts = [torch.stack([torch.linalg.vector_norm(one) for one in pair]) for pair in _parts(a, reference)]
    difference, size = torch.linalg.vector_norm(torch.stack(parts), dim=0).tolist()
    return difference, size


def _largest_and_rms(a: Tensor, reference: Tensor) -> tuple[float, float]:
    norm = torch.linalg.vector_norm
    parts = [torch.stack((norm(difference, math.inf), norm(exact))) for difference, exact in _parts(a, reference)]
    largest, norms = torch.stack(parts).unbind(1)
    return largest.max().item(), norm(norms).item() / math.sqrt(reference.numel())


def differing_bits(a: Tensor, b: Tensor) -> int:
    """Count the entries whose bits differ; -0.0 and 0.0 differ. Raises ValueError: another dtype or shape."""
    if a.dtype != b.dtype or a.shape != b.shape:
        raise ValueError(f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)} cannot be compared bit by bit")
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    parts = zip(split(a.flatten(), PART), split(b.flatten(), PART), strict=True)
    return sum(int(torch.count_nonzero(x.view(integer) != y.view(integer))) for x, y in parts)


@dataclass(frozen=True)
class LanguageScore:
    """How well a model predicts a text: nats per token over ``tokens`` tokens of ``bytes`` bytes, with the windows' protocol."""

    loss: float
    tokens: int
    bytes: int
    context: int
    stride: int

    @property
    def perplexity(self) -> float:
        return exp_or_inf(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Comparable between models with different vocabularies."""
        return self.loss * self.tokens / (math.log(2) * self.bytes) if self.bytes else math.nan


@torch.inference_mode()
def language_scores(
    model: GPT2 | Logits,
    ids: Tensor,
    token_bytes: Tensor,
    windows: Windows,
    parts: Sequence[Tensor | None] = (None,),
    *,
    batch_size: int | None = 16,
) -> list[LanguageScore]:
    """Score parts of a text's tokens (N,) in ``windows``: each a mask (N,), or None for all. An empty part has loss 0.

    ``token_bytes`` (V,) are lengths; ``batch_size`` is in windows. Raises InputError: nothing to predict, a context beyond the
    model's, or a stride that skips tokens.
    """
    device: torch.device = ids.device
    evaluation: AbstractContextManager[None] = nullcontext()
    if isinstance(model, GPT2):
        device, evaluation = model.wte.weight.device, evaluating(model)
        if not 1 <= windows.context <= model.config.n_positions:
            raise InputError(f"context {windows.context} is not within the model's 1 .. {model.config.n_positions} positions")
    totals, tokens, n_bytes = [0.0] * len(parts), [0] * len(parts), [0.0] * len(parts)
    with evaluation:
        for inputs, group in windows.batches(ids, batch_size):
            logits = model(inputs.to(device))  # (B, T, V)
            for row, window in enumerate(group):
                targets = ids[window.first + 1 : window.end + 1]
                scored = logits[row : row + 1, window.first - window.start :]
                losses = token_losses(scored, targets[None].to(logits.device))[0]
                for index, mask in enumerate(parts):
                    own = ... if mask is None else mask[window.first + 1 : window.end + 1]
                    totals[index] += losses[own].sum(dtype=torch.float64).item()
                    tokens[index] += len(targets[own])
                    n_bytes[index] += token_bytes[targets[own]].sum().item()
            del logits  # else two batches are alive while the next is computed
    scores = zip(totals, tokens, n_bytes, strict=True)
    return [LanguageScore(total / max(n, 1), n, round(size), windows.context, windows.step) for total, n, size in scores]


def cosine(product: float, squares_a: float, squares_b: float) -> float:
    """Return the cosine of two vectors from their product and sums of squares: 1 for two zeros, 0 for one."""
    if squares_a == 0 or squares_b == 0:
        return 1.0 if squares_a == squares_b else 0.0
    return max(min(product / math.sqrt(squares_a * squares_b), 1.0), -1.0)  # in this order NaN stays NaN


def exp_or_inf(x: float) -> float:
    """Return exp(x), or infinity on overflow."""
    return math.inf if x >= 700 else math.exp(x)  # NaN stays NaN


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each target's negative log-likelihood in nats: (B, T, V) and (B, T) to (B, T), in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
