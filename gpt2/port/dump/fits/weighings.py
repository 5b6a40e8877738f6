"""Attention weights by the masks, softmaxes and factors that the walk knows: their names are better than those of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.hypotheses import likely_scales, scale_faults, weighings
from gpt2.port.dump.fits.observed import Fit, Observed


def weighed(
    seen: Observed, rows: Tensor, scores: Tensor, config: GPT2Config, layer: int, in_time: Callable[[], None]
) -> Iterator[Fit]:
    """Yield the known wrong weights (B, H, T, S) that are recorded at ``rows`` (B, T); ``scores``: products, not scaled.

    If no token of these rows sees one beyond a prompt, they are also the weights of a prompt alone, computed in one piece.
    """
    used = seen.value.transpose(1, 2)[rows].flatten(0, -2).any(0)
    prompt = 1 + int(used.nonzero().max()) if bool(used.any()) else len(used)
    for factor in likely_scales(config, layer):
        in_time()
        wrong, scaled = scale_faults(config, layer, factor), scores * factor
        for one in weighings():
            if (one.faults or wrong) and (one.axis < 0 or scores.shape[one.axis] > 1):
                yield from seen.fits(one.formula(scaled), rows, *wrong, *one.faults)
                if 1 < prompt < len(used) == scores.shape[-2] and one.faults:
                    value = torch.zeros_like(scaled)
                    value[..., :prompt, :prompt] = one.formula(scaled[..., :prompt, :prompt])
                    yield from seen.fits(value, rows, *wrong, *one.faults)
