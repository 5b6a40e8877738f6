"""The floor of noise under a comparison: how far rounding alone moves one of its models, on the first tokens.

:mod:`gpt2.comparison.noise` measures every way; this is the cheap part of it, which needs no second model in memory unless the
two models run in different dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.comparison.ways import PADDING, Run, alone, attending, padded
from gpt2.measure.divergence import divergences
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.metrics import max_abs
from gpt2.model import GPT2, eager_attention


@dataclass(frozen=True)
class Floor:
    """KL between two runs of the same model that should be equal, for each of ``ways``: (name, mean KL, largest logit).

    A difference that is not above the largest of these means nothing.
    """

    ways: tuple[tuple[str, Estimate, float], ...]
    tokens: int

    @property
    def way(self) -> str:
        return max(self.ways, key=lambda way: way[1].high)[0]

    @property
    def kl(self) -> float:
        """What a mean KL must exceed: the upper end of the 95 % interval."""
        return max(kl.high for _, kl, _ in self.ways)

    @property
    def logit(self) -> float:
        return max(logit for *_, logit in self.ways)


@torch.inference_mode()
def measure_floor(
    model: GPT2,
    ids: Tensor,
    vocab: int,
    coarser: tuple[str, Callable[[], GPT2]] | None = None,
    reference: Tensor | None = None,
) -> Floor:
    """Run ``model`` on ids (T,) in other ways, and in a ``coarser`` dtype (its name, and what loads it).

    ``reference`` are its logits (T or more, V or more) where they are known, of these ids at the beginning of a longer text: one
    way is then enough, since another length is another way already.
    """
    ids = ids[: max(2, model.config.n_positions - PADDING)]

    def ways() -> Iterator[tuple[str, Run]]:
        if reference is None and len(ids) + PADDING <= model.config.n_positions:
            yield "padding on the left", padded(model)
        with attending(model, eager_attention):
            yield "attention step by step", alone(model)
        if coarser is not None:
            yield f"in {coarser[0]}", alone(coarser[1]())

    rows = ids[None]
    first = (alone(model)(rows)[0] if reference is None else reference)[: len(ids), :vocab]
    measured = []
    for name, run in ways():
        logits = run(rows)[0, :, :vocab]
        kl = divergences(first[:-1].cpu(), [logits[:-1].cpu()]).kl[:, 0]
        measured.append((name, Bootstrap(len(kl)).mean(kl), max_abs(logits, first)))
    return Floor(tuple(measured), len(ids))
