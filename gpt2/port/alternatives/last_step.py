"""What programs do to their logits (..., V) before they give them, where GPT-2 does nothing: one list for all who look for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from gpt2.port.graph import Function
from gpt2.port.terms.causes import Cause


class LastStep(NamedTuple):
    """A cause and a formula of a token's logits."""

    id: str
    formula: Function


STEPS: dict[str, LastStep] = {
    "each token's mean logit is taken off": LastStep("logits-softmaxed", lambda x: x - x.mean(-1, keepdim=True)),
    "each token's largest logit is taken off": LastStep("logits-softmaxed", lambda x: x - x.amax(-1, keepdim=True)),
    "the exponential of each logit is given": LastStep("logits-softmaxed", torch.exp),
    "each logit goes through a sigmoid": LastStep("logits-softmaxed", torch.sigmoid),
    "each logit goes through a tanh": LastStep("logits-scaled", torch.tanh),
    "each logit goes through a ReLU": LastStep("logits-scaled", torch.relu),
    "each token's logits are divided by their norm": LastStep("logits-scaled", lambda x: x / x.norm(dim=-1, keepdim=True)),
}


def last_steps() -> Iterator[tuple[Cause, Function]]:
    """Yield the faults, with what each does to the logits."""
    for words, (id, formula) in STEPS.items():
        yield Cause.at(id, "logits", words), formula
