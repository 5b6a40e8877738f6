"""``diagnose``: find where a port departs from the checkpoint's GPT-2, with the cause, the evidence and the fix.

Three kinds of checks: its weights, read in the checkpoint's layout (:mod:`.own`, :mod:`.weights`); its recorded tensors, which
the walk compares with GPT-2's stages, each by the right formula and by every known wrong one (:mod:`.walk`); and its behaviour
from call to call (:mod:`.behaviour`).
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
    """Say why ``module``, any torch implementation of GPT-2, does not compute what ``model`` computes, or that it does.

    Args:
        module: maps ids (B, T) to logits, or to a tuple, dict or object that holds them, and holds its author's weights. It is
            unchanged afterwards.
        model: a model's name, as for :func:`gpt2.load`, or a model.
        revision, offline: as for :func:`gpt2.load`.
        fill: first load the weights as :func:`gpt2.load_into` does, for a module that has none yet.

    The verdict is "equal" if the logits agree with our model's to 1e-10 in float64, at several lengths, and the module behaves
    the same in every call.

    Raises:
        InputError: ``module`` is not a torch module, does not run, or returns NaN or no logits of the right shape; or ``model``
            is not a GPT-2, has another size, or does not exist.
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
