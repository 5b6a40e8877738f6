"""From logits to the next id. Pure functions over (..., V); nothing here knows a model or a tokenizer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.errors import InputError


def check_settings(temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> None:
    """Refuse, before any work is done, a temperature below 0, a k below 1 and a p outside (0, 1], with an :class:`InputError`."""
    if not 0 <= temperature < math.inf:
        raise InputError(f"temperature is {temperature}; give a number above 0, or 0 for greedy")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k is {top_k}; give 1 or more, or leave it out")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"top_p is {top_p}; give a number above 0 and at most 1")


def restrict(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """Logits (..., V), sharpened or flattened by ``temperature``, shifted to a maximum of 0, and -inf outside the candidates.

    ``top_k`` keeps the k most likely ids (Fan et al. 2018) and whatever ties with the last of them. ``top_p`` keeps the
    smallest set whose probability reaches p (Holtzman et al. 2020), always at least one, lower ids before higher ones of the
    same probability. Both may be given: k first, then p of what is left.

    Raises:
        InputError: temperature not above 0, k below 1, or p outside (0, 1].
    """
    check_settings(temperature, top_k, top_p)
    if temperature == 0:
        raise InputError("temperature is 0, which leaves no distribution; give a number above 0, or choose greedily by next_ids")
    logits = logits.float()
    # The shift and the floor keep the quotient from overflowing to inf, whose softmax is nan, however cold it gets.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # probability of everything likelier
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(outside, -math.inf)
    return logits


def next_ids(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Choose one id per row of (B, V) logits: (B,), int64. Temperature 0 is greedy, the lowest id among equals."""
    check_settings(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial(chances(logits, temperature, top_k, top_p), 1, generator=generator).squeeze(-1)


def chances(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None) -> Tensor:
    """The probabilities (..., V) that an id is drawn with; greedily, all of it on one."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.size(-1)).float()
    if bool(logits.isnan().any()):
        raise InputError("the model's logits are not numbers (NaN): its weights are damaged, or its dtype is too small for them")
    return restrict(logits, temperature, top_k, top_p).softmax(-1)


def agree(guesses: Tensor, guessed: Tensor, wanted: Tensor, generator: torch.Generator | None = None) -> tuple[int, Tensor]:
    """How many of a draft's ids stand, and the id (1,) that follows those, so that all are distributed as ``wanted``.

    ``guesses`` (N,) were drawn from ``guessed`` (N, V), probabilities; ``wanted`` (N + 1, V) are the model's own at the same
    places and after the last. A guess stands with probability wanted / guessed; where one falls, what the draft gave too
    little of is drawn from (Leviathan et al., arXiv:2211.17192, algorithm 1). Greedily: the guesses that the model would make.
    """
    places = torch.arange(len(guesses), device=guesses.device)
    odds = wanted[places, guesses] / guessed[places, guesses]
    falls = torch.rand(len(guesses), generator=generator, device=guesses.device) >= odds
    stand = int(falls.nonzero()[0]) if bool(falls.any()) else len(guesses)
    left = wanted[stand]
    if stand < len(guesses):
        missing = (left - guessed[stand]).clamp_(min=0)
        left = missing if bool(missing.any()) else left  # equal but for rounding
    return stand, torch.multinomial(left, 1, generator=generator)
