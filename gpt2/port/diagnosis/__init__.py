"""``diagnose``: where somebody's GPT-2 departs from the checkpoint's, what is wrong, how we know, and what mends it.

Two questions are put apart. What do its parameters hold? Its own weights are read in the checkpoint's layout and compared
(:mod:`.own`, :mod:`.weights`). What does it compute with them? Every tensor of a forward pass in float64 is kept (:mod:`.pool`),
and GPT-2's forward pass is walked through with the port's own weights, each stage by the right formula and by every wrong one
that is known (:mod:`.walk`): the one whose result is found is what the port does. How it behaves from call to call is tried
beside that (:mod:`.behaviour`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gpt2.checkpoint.names import DEFAULT
from gpt2.errors import InputError
from gpt2.port.diagnosis.report import Cause, Diagnosis, Divergence

if TYPE_CHECKING:
    from torch import nn

    from gpt2.model import GPT2

__all__ = ["Cause", "Diagnosis", "Divergence", "diagnose"]


def diagnose(
    module: nn.Module, model: str | GPT2 = DEFAULT, *, revision: str | None = None, offline: bool = False, fill: bool = False
) -> Diagnosis:
    """Why ``module``, any torch implementation of GPT-2, does not compute what ``model`` does; or that it does.

    Args:
        module: maps ids (B, T) to logits, or to a tuple, dict or object that holds them, with the weights in it that its
            author loaded. It is given back as it was.
        model: a model's name, as for :func:`gpt2.load`, or a model.
        revision, offline: as for :func:`gpt2.load`.
        fill: judge the module as it would be with the weights that :func:`gpt2.load_into` puts in, for one that has none yet.

    It is equal if its logits agree with our model's to 1e-10 in float64, at several lengths, and it behaves.

    Raises:
        InputError: no module; one that does not run, returns no logits of the right shape, or NaN; one that is no GPT-2 at all,
            or of another size; no such model.
    """
    import torch

    from gpt2.checkpoint.loading import load
    from gpt2.int8 import require_float
    from gpt2.port.diagnosis.examination import Examination

    if not isinstance(module, torch.nn.Module):
        raise InputError(f"diagnose takes a torch.nn.Module, and was given {type(module).__name__}; build the module first")
    ours = load(model, revision=revision, offline=offline) if isinstance(model, str) else model
    require_float(ours, "diagnose")
    with torch.no_grad():
        found = Examination(module, ours, fill).diagnosis()
    return replace(found, checkpoint=model if isinstance(model, str) else "a model")
