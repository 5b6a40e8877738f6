"""Choose the next id from logits: temperature, top-k, top-p, min-p, penalties, and the acceptance rule of a draft."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.damage import require_finite
from gpt2.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How ids are chosen: greedily with ``temperature`` 0, else drawn from the candidates of :func:`restrict`.

    ``repetition_penalty`` above 1 makes the ids of the text so far less likely, before all else (:func:`penalise`).
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature}; give a number above 0, or 0 for greedy")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top_k is {self.top_k}; give 1 or more, or leave it out")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; give a number above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise InputError(f"min_p is {self.min_p}; give a number from 0 to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise InputError(f"repetition_penalty is {self.repetition_penalty}; give a number above 0, such as 1.2")

    def next_ids(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Choose one id per row of (B, V) logits: (B,), int64. Greedy takes the lowest of equally likely ids."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probabilities (..., V) of each id; a greedy id has probability 1. Raises InputError for NaN logits."""
        if self.temperature == 0:
            return F.one_hot(logits.argmax(-1), logits.size(-1)).float()
        if bool(logits.isnan().any()):
            require_finite(logits)
        return restrict(logits, self.temperature, self.top_k, self.top_p, self.min_p).softmax(-1)


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide the positive logits (B, V) of ``seen`` ids by ``penalty``, multiply the negative ones by it.

    ``seen`` (B, V) is boolean: the ids of each row's text so far, its prompt included. Source: CTRL (Keskar et al.,
    arXiv:1909.05858, section 4.1), in the form of transformers' ``repetition_penalty``, which fits negative logits too.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def restrict(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None
) -> Tensor:
    """Divide logits (..., V) by ``temperature``, shift them to a maximum of 0, and set all but the candidates to -inf.

    ``top_k`` keeps the k most likely ids (Fan et al. 2018) and all ties with the last of them. ``top_p`` keeps the smallest set
    with a probability of at least p (Holtzman et al. 2020): at least one id, and of equally likely ids the lower ones. With both,
    p applies to the ids that k keeps. ``min_p`` then keeps the ids that are at least ``min_p`` times as likely as the likeliest
    (Nguyen et al., arXiv:2407.01082). Raises InputError: temperature not above 0, k below 1, p outside (0, 1], or min_p outside
    [0, 1].
    """
    Sampling(temperature, top_k, top_p, min_p)
    if temperature == 0:
        raise InputError("temperature is 0, which leaves no distribution; give a number above 0, or take the likeliest id")
    logits = logits.float()
    # The shift and the lower limit keep the quotient from overflowing to inf, whose softmax is NaN.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None and top_k < logits.size(-1):
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # the sum over all likelier ids
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(outside, -math.inf)
    if min_p is not None:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), -math.inf)
    return logits


def accept_draft(ids: Tensor, proposed: Tensor, wanted: Tensor, generator: torch.Generator | None = None) -> tuple[int, Tensor]:
    """Return how many of a draft's ids speculative decoding accepts, and the id (1,) that follows them.

    ``ids`` (N,) were drawn from ``proposed`` (N, V), the draft's probabilities; ``wanted`` (N + 1, V) are the model's for the
    same places and the next. An id is accepted with probability wanted / proposed. After the first rejected one, an id is drawn
    from the positive part of wanted - proposed. So all ids are distributed as ``wanted`` (Leviathan et al., arXiv:2211.17192,
    algorithm 1).
    """
    places = torch.arange(len(ids), device=ids.device)
    odds = wanted[places, ids] / proposed[places, ids]
    rejected = torch.rand(len(ids), generator=generator, device=ids.device) >= odds
    accepted = int(rejected.nonzero()[0]) if bool(rejected.any()) else len(ids)
    rest = wanted[accepted]
    if accepted < len(ids):
        missing = (rest - proposed[accepted]).clamp_(min=0)
        rest = missing if bool(missing.any()) else rest  # equal up to rounding
    return accepted, torch.multinomial(rest, 1, generator=generator)
