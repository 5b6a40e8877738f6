"""The floor of noise under a comparison: how far two right runs of one of its models part by rounding alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.metrics import max_abs
from gpt2.measure.per_token import measure_rows
from gpt2.measure.rounding import rounding_noise
from gpt2.model import GPT2
from gpt2.pages.reports import dtype_label
from gpt2.parity.streaming import Streamed

TOKENS = 256  # the first of the text, on which it is computed


@dataclass(frozen=True)
class Floor:
    """KL between two right runs: (name, mean KL, largest difference of a logit). A difference that is not above means nothing."""

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
    """Return what :mod:`gpt2.measure.rounding` explains of runs of ``model`` on ids (T,) in ``dtypes``, one or one for each."""
    ids, runs = ids[None, : model.config.n_positions].cpu(), []
    for seed, dtype in enumerate((dtypes[0], dtypes[-1])):

        def convert(stored: Tensor, dtype: torch.dtype = dtype) -> Tensor:
            return stored.to("cpu", dtype).double()

        with Streamed(model, convert, convert, lambda _: None), rounding_noise(dtype, seed):  # a block's weights at a time
            runs.append(model.head(model.hidden(ids))[0, :, :vocab])
    kl = measure_rows(runs[0][:-1], runs[1][:-1], ids[0, 1:], 1)[2]
    name = f"rounding to {' and '.join(map(dtype_label, dict.fromkeys(dtypes)))}"
    return Floor(((name, Bootstrap(len(kl)).mean(kl), max_abs(runs[1], runs[0])),), ids.size(1))
