"""Find the positions of embeddings that are not recorded, from what the first block computes of each token by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from gpt2.port.dump.fits.observed import Fit, Observed
from gpt2.port.dump.fits.recorded import Arrays
from gpt2.port.dump.fits.wiring import embedding_fit
from gpt2.port.dump.simulation import Simulation, State

ALONE = ("ln_1", "attn.q", "attn.k", "attn.v")  # stages of the first block that each token has by itself
NEAR = 2  # times the bound: a token that may stand at a position
MOST_TRIED = 2  # arrays that may be such a stage's value, the likest first


def placed(arrays: Arrays, simulation: Simulation, ids: Tensor, right: Tensor, in_time: Callable[[], None]) -> Fit | None:
    """Return embeddings, of ``ids`` (B, T) at other positions or none, that give what is recorded of the first block.

    None if the right ones (B, T, D) do, or no others. ``in_time`` raises TimeUp behind the limit of time.
    """
    wte, wpe = (simulation.state[f"{name}.weight"] for name in ("wte", "wpe"))
    words, none = wte[ids], torch.zeros_like(wpe[:1])
    table = torch.cat([wpe, none])
    for stage in ALONE:
        made = _staged(simulation, stage, right)
        if arrays.recorded(stage, made) is not None:
            return None
        for seen in itertools.islice(arrays.observed(stage, made), MOST_TRIED):
            rows, x = seen.wrong_rows(), right.clone()
            loose = NEAR * (seen.slack + seen.bound * seen.value.square().mean().sqrt())
            for row, token in rows.nonzero().tolist():
                in_time()
                tried = words[row, token] + table  # (P, D)
                errors = (_staged(simulation, stage, tried[None])[0] - seen.value[row, token]).abs()
                nearest = int(errors.square().sum(-1).argmin())
                if not bool((errors[nearest] <= loose[row, token]).all()):
                    break
                x[row, token] = tried[nearest]
            else:
                if bool(rows.any()) and seen.fitted(_staged(simulation, stage, x), rows) is not None:
                    shown = Observed(x, torch.zeros_like(x), seen.bound, right, -1)
                    if (fit := embedding_fit(shown, ids, wte, wpe, rows)) is not None:
                        return fit
    return None


def _staged(simulation: Simulation, stage: str, x: Tensor) -> Tensor:
    """Return the first block's stage as GPT-2 computes it from embeddings ``x``."""
    state: State = {"x": x}
    for name in dict.fromkeys(("ln_1", stage)):
        state[name] = simulation.stages_of(0)[name](state)
    return state[stage]
