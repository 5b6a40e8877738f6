"""``diagnose_step``: find where a training step departs from the reference's, with the cause, the evidence and the fix."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpt2.checkpoint.names import DEFAULT
from gpt2.errors import InputError
from gpt2.port.terms.report import Diagnosis

if TYPE_CHECKING:
    from torch import nn

    from gpt2.model import GPT2

__all__ = ["diagnose_step"]


def diagnose_step(
    module: "nn.Module",
    make_step: Callable[[Any], Callable[[Any, Any], Any]],
    model: "str | GPT2" = DEFAULT,
    *,
    settings: Iterable[str] | Mapping[str, object] = (),
    revision: str | None = None,
    offline: bool = False,
    fill: bool = False,
    watch: Callable[[str], None] = lambda stage: None,
) -> Diagnosis:
    """Say why a training step is not the reference's, or that it is.

    Args:
        module: any torch implementation of GPT-2, as for :func:`gpt2.diagnose`, with the weights of ``model``. It is unchanged
            afterwards.
        make_step: ``make_step(module)`` returns ``step(x, y)``, which takes ids and next ids (B, T), int64, performs one whole
            optimizer step, and returns the loss. It is called several times, each time with the checkpoint's weights.
        model: a model's name, as for :func:`gpt2.load`, or a model.
        settings: what the step should do, as ``key=value`` lines with a recipe's keys ("optim.lr=3e-4"), or a mapping. What is
            not given is read off and reported in the notes. With ``data.prompt``, targets of -100 are judged too.
        revision, offline: as for :func:`gpt2.load`.
        fill: first load the weights as :func:`gpt2.load_into` does; they stay.
        watch: called with "step" before each call of the step, and with "diagnosis" after it, to limit its time.

    The reference is the mean cross-entropy of all tokens, clipping by the norm of the whole gradient, and AdamW with decay on
    matrices and embeddings. ``first_divergence`` names the stage: "loss", "gradient", "clip" or "update"; or a traced point, if
    the forward pass differs already.

    Raises:
        InputError: the module or model is refused as by :func:`gpt2.diagnose`; a setting is unknown; the step fails, returns no
            number or NaN, or changes no parameter of the module.
    """
    from torch import nn

    from gpt2.checkpoint.loading import load, require_intact
    from gpt2.measure.metrics import silent
    from gpt2.model import GPT2
    from gpt2.port.diagnosis import examine_module
    from gpt2.port.mapping import load_into
    from gpt2.port.step.examination import StepExamination
    from gpt2.port.step.settings import StepSettings
    from gpt2.port.terms.budget import few_threads

    known = StepSettings.of(settings)
    if not callable(make_step):
        raise InputError(f"make_step is {type(make_step).__name__}; give a function of the module that returns step(x, y)")
    if not isinstance(module, nn.Module):
        raise InputError(f"diagnose_step takes a torch.nn.Module, and was given {type(module).__name__}; build the module first")
    ours = model if isinstance(model, GPT2) else load(model, revision=revision, offline=offline)
    if fill:
        load_into(module, ours)
    require_intact(ours, f"the right model{ours.name and f', {ours.name}'}")
    forward, mapping = examine_module(module, ours, False, silent)
    with few_threads(ours.config.num_parameters()):
        diagnosis = StepExamination(module, make_step, ours, known, forward, mapping, watch).diagnosis()
    return replace(diagnosis, checkpoint="a model" if isinstance(model, GPT2) else str(model))
