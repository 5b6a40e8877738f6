"""``diagnose`` and ``diagnose_step``: find where a port, or its training step, departs from GPT-2; the cause, evidence and fix.

A module is checked in three ways (:mod:`gpt2.port.module`): its weights, read in the checkpoint's layout; its recorded tensors,
which are compared with GPT-2's, by the right formula and by every known wrong one (:mod:`gpt2.port.search`); and its behaviour
from call to call. What another program wrote: :mod:`gpt2.port.dump`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.checkpoint.names import DEFAULT
from gpt2.errors import InputError
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.report import Diagnosis, Divergence

if TYPE_CHECKING:
    from torch import nn

    from gpt2.measure.metrics import Progress
    from gpt2.model import GPT2
    from gpt2.port.mapping.mapping import WeightMap

__all__ = ["Cause", "Diagnosis", "Divergence", "diagnose", "diagnose_step"]


def diagnose(
    what: "nn.Module | str | Path | Mapping[str, Any]",
    model: "str | Path | GPT2" = DEFAULT,
    *,
    revision: str | None = None,
    offline: bool = False,
    fill: bool = False,
    progress: "Progress | None" = None,
) -> Diagnosis:
    """Say why ``what``, any implementation of GPT-2, does not compute what ``model`` computes, or that it does.

    Args:
        what: a torch module, or a dump of what any program computed. The module maps ids (B, T) to logits, or to a tuple, dict
            or object that holds them, holds its author's weights, and is unchanged afterwards. The dump is a path (``.npz``,
            ``.safetensors``, a directory of ``.npy``, llm.c's ``.bin``) or a mapping of NumPy's or torch's arrays: token ids
            under ``ids`` (also ``input_ids``, ``tokens``, ``idx``), of shape (T,) or (B, T), the logits, and any number of
            intermediate values, all in any layout and under any names. Another model's name is that model, as a module.
        model: a model's name, as for :func:`gpt2.load`, or a model.
        revision, offline: as for :func:`gpt2.load`.
        fill: first load the weights as :func:`gpt2.load_into` does, for a module that has none yet.
        progress: called with a short text at each stage.

    The verdict on a module is "equal" if the logits agree with our model's to 1e-10 in float64, at several lengths, or within the
    rounding of float32 where no known fault explains the rest (as where norms are folded into the next layers), and the module
    behaves the same in every call. The search ends after so much work, the same on every machine, with what is known by then; the
    report says what was not tried. A dump is "equal" if its logits are right up to the rounding that our model shows in
    the same precision, and none of its arrays shows a fault.

    Raises:
        InputError: the module does not run, or returns NaN or no logits of the right shape; the dump is damaged, or holds no ids
            or no logits; or ``model`` is not a GPT-2, has another size, or does not exist.
    """
    import torch

    from gpt2.checkpoint.loading import load, require_intact
    from gpt2.measure.dumps import WAYS, is_dump
    from gpt2.measure.metrics import silent
    from gpt2.model import GPT2

    if not isinstance(what, (torch.nn.Module, str, Path, Mapping)):
        hint = "a torch.nn.Module, the path of a dump, a mapping of arrays, or a model's name"
        raise InputError(f"diagnose takes {hint}, and was given {type(what).__name__}; build the module first")
    if not isinstance(model, (str, Path, GPT2)):
        given = f"was given {type(model).__name__} as the second"
        raise InputError(f"diagnose takes what is to be diagnosed, then the right model, a name or a GPT2; it {given}")
    name = ""
    if isinstance(what, str | Path) and not is_dump(what):
        name = str(what)
        try:
            what = load(name, offline=offline).float()
        except InputError as error:
            raise InputError(f"{error}; or give a module, as port.py:build, or a dump: {WAYS}") from None
    ours = model if isinstance(model, GPT2) else load(str(model), revision=revision, offline=offline)
    require_intact(ours, f"the right model{ours.name and f', {ours.name}'}")
    if isinstance(what, torch.nn.Module):
        diagnosis = examine_module(what, ours, fill, progress or silent)[0]
    else:
        from gpt2.port.dump.examination import exact_weights, examine

        config, state = ours.config, exact_weights(ours)
        del ours  # if nobody else has it, its memory is free
        diagnosis = examine(what, config, state, progress or silent)
    return replace(diagnosis, checkpoint="a model" if isinstance(model, GPT2) else str(model), module=name or diagnosis.module)


def examine_module(module: "nn.Module", ours: "GPT2", fill: bool, progress: "Progress") -> "tuple[Diagnosis, WeightMap | None]":
    """Diagnose a module; return also which entry of the checkpoint fills each of its places, None if its parts are unknown."""
    import torch

    from gpt2.int8 import require_float
    from gpt2.port.module.examination import Examination
    from gpt2.port.terms.budget import few_threads

    require_float(ours, "diagnose")
    examination = Examination(module, ours, fill, progress)
    with torch.no_grad(), few_threads(ours.config.num_parameters()):
        return examination.diagnosis(), examination.mapping


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
    from gpt2.port.mapping import load_into
    from gpt2.port.mapping.roles import Roles
    from gpt2.port.step.examination import StepExamination
    from gpt2.port.step.sessions import StepSubject
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
        subject = StepSubject(module, make_step, ours.config.vocab_size, watch)
        diagnosis = StepExamination(subject, ours, known, forward, Roles(module, mapping)).diagnosis()
    return replace(diagnosis, checkpoint="a model" if isinstance(model, GPT2) else str(model))
