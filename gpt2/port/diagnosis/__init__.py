"""``diagnose``: where somebody's GPT-2 departs from the checkpoint's, what is wrong, how we know, and how to fix it.

There are three questions. What do its parameters hold? Its own weights are read in the checkpoint's layout and compared
(:mod:`.own`, :mod:`.weights`). What does it compute with them? Every tensor of a forward pass in float64 is recorded, and the
walk compares them with GPT-2's forward pass, computed from the port's own weights, each stage by the right formula and by every
known wrong one (:mod:`.walk`). How does it behave from call to call (:mod:`.behaviour`)?
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
    """Say why ``module``, any torch implementation of GPT-2, does not compute what ``model`` does; or that it does.

    Args:
        module: maps ids (B, T) to logits, or to a tuple, dict or object that holds them, with the weights in it that its
            author loaded. It is unchanged afterwards.
        model: a model's name, as for :func:`gpt2.load`, or a model.
        revision, offline: as for :func:`gpt2.load`.
        fill: diagnose the module with the weights that :func:`gpt2.load_into` puts in, for one that has none yet.

    The verdict is "equal" if its logits agree with our model's to 1e-10 in float64, at several lengths, and it behaves the same
    in every call.

    Raises:
        InputError: not a module; one that does not run, or returns NaN or no logits of the right shape; a model that is not a
            GPT-2, or of another size; no such model.
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
        diagnosis = Examination(module, ours, fill).diagnosis()
    return replace(diagnosis, checkpoint=model if isinstance(model, str) else "a model")
