"""What programs do to their logits (..., V) before they give them, where GPT-2 does nothing: one list for all who look for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.port.graph import Function as Formula
from gpt2.port.terms.causes import Cause


class Step(NamedTuple):
    """A cause and a formula of a token's logits."""

    id: str
    formula: Formula


def _centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


STEPS: dict[str, Step] = {
    "each token's largest logit is taken off": Step("logits-softmaxed", lambda x: x - x.amax(-1, keepdim=True)),
    "each token's mean logit is taken off": Step("logits-softmaxed", _centred),
    "each token's smallest logit is taken off": Step("logits-softmaxed", lambda x: x - x.amin(-1, keepdim=True)),
    "each token's logits are the exponentials of a softmax, not divided by their sum": Step(
        "logits-softmaxed", lambda x: (x - x.amax(-1, keepdim=True)).exp()
    ),
    "the exponential of each logit is given": Step("logits-softmaxed", torch.exp),
    "each logit goes through a sigmoid": Step("logits-softmaxed", torch.sigmoid),
    "each logit goes through a tanh": Step("logits-scaled", torch.tanh),
    "each logit goes through a ReLU": Step("logits-scaled", torch.relu),
    "each token's logits are divided by their norm": Step("logits-scaled", lambda x: x / x.norm(dim=-1, keepdim=True)),
    "each token's logits are divided by the largest size of them": Step(
        "logits-scaled", lambda x: x / x.abs().amax(-1, keepdim=True)
    ),
    "each token's logits are divided by their standard deviation": Step("logits-scaled", lambda x: x / x.std(-1, keepdim=True)),
    "each token's logits are normed: their mean is taken off, and they are divided by their standard deviation": Step(
        "logits-scaled", lambda x: _centred(x) / x.std(-1, correction=0, keepdim=True)
    ),
    "each token's logits are normed, with D - 1 in the variance": Step(
        "logits-scaled", lambda x: _centred(x) / x.std(-1, keepdim=True)
    ),
    "each token's logits are moved to the range from 0 to 1": Step(
        "logits-scaled", lambda x: (x - x.amin(-1, keepdim=True)) / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True))
    ),
}


def last_steps() -> Iterator[tuple[Cause, Formula]]:
    """Yield the faults, with what each does to the logits."""
    for words, (id, formula) in STEPS.items():
        yield Cause.at(id, "logits", words, words), formula
