"""The floor of noise under a comparison: how far rounding alone moves one of its models, on the first tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.measure.divergence import divergences
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.metrics import max_abs
from gpt2.measure.rounding import rounding_noise
from gpt2.model import GPT2
from gpt2.pages.reports import dtype_label
from gpt2.parity.streaming import Streamed


@dataclass(frozen=True)
class Floor:
    """KL between two right runs of the same model, for each of ``ways``: (name, mean KL, largest logit).

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


@torch.no_grad()
def measure_floor(model: GPT2, ids: Tensor, vocab: int, *dtypes: torch.dtype) -> Floor:
    """Compare two runs of ``model`` on ids (T,) that round to ``dtypes`` (one, or one for each): what rounding explains.

    Both run in float64 on the CPU with random errors (:mod:`gpt2.measure.rounding`), with the weights of one block at a time.
    """
    ids, runs = ids[None, : model.config.n_positions].cpu(), []
    for seed, dtype in enumerate((dtypes[0], dtypes[-1])):

        def convert(stored: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return stored.to("cpu", dtype).double()

        with Streamed(model, convert, convert, lambda _: None), rounding_noise(dtype, seed):
            runs.append(model.head(model.hidden(ids))[0, :, :vocab])
    kl = divergences(runs[0][:-1], [runs[1][:-1]]).kl[:, 0]
    name = f"rounding to {' and '.join(map(dtype_label, dict.fromkeys(dtypes)))}"
    return Floor(((name, Bootstrap(len(kl)).mean(kl), max_abs(runs[1], runs[0])),), ids.size(1))
