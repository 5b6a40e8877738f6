"""Load a checkpoint's weights into any module that computes GPT-2, whatever its names and layouts: ``load_into``.

The module runs once on a few tokens while every operator is taken down (:mod:`.dataflow`); GPT-2's parts are found in that by
what they do (:mod:`.anatomy`); from them follows which entry of the checkpoint belongs in every single place (:mod:`.mapping`).
Names are not asked. Then the module's logits are held against our model's, in float64 (:mod:`.check`), on a bench that it
leaves as it was, but for the weights (:mod:`.bench`).
"""

from __future__ import annotations

import torch
from torch import nn

from gpt2.checkpoint.loading import load
from gpt2.checkpoint.names import DEFAULT
from gpt2.errors import InputError
from gpt2.int8 import require_float
from gpt2.model import GPT2
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.stream import NotGPT2
from gpt2.port.mapping.check import Check
from gpt2.port.mapping.explain import Explanation
from gpt2.port.mapping.filling import fill
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.mapping.report import MappingReport
from gpt2.port.recording.borrowed import Borrowed
from gpt2.port.recording.probe import give_shapes, record_probe

__all__ = ["MappingReport", "load_into"]


@torch.no_grad()
def load_into(
    module: nn.Module, model: str | GPT2 = DEFAULT, *, revision: str | None = None, offline: bool = False
) -> MappingReport:
    """Fill ``module``, any torch implementation of GPT-2, with the weights of ``model``, in place, and say how.

    Args:
        module: maps ids (B, T) to logits, or to a tuple, dict or object that holds them. Its parameters keep their dtype,
            device and identity; buffers, modes, and what of it is no part of GPT-2, stay as they are.
        model: a model's name, as for :func:`gpt2.load`, or a model.
        revision, offline: as for :func:`gpt2.load`.

    The report is ``ok`` when every parameter is filled, or is seen to be without effect, and the logits agree with our model's
    to 1e-10 in float64. What can be placed is placed, even where the module turns out to compute something else. Beside the
    module, its parameters are held once in float64, and before that, for a moment, our model in float64.

    Raises:
        InputError: no module, or none that GPT-2's weights could go into; no such model. The module is then as it was.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"load_into fills a torch.nn.Module, and was given {type(module).__name__}; build the module first")
    ours = load(model, revision=revision, offline=offline) if isinstance(model, str) else model
    require_float(ours, "load_into")
    who, config, state = type(module).__name__, ours.config, ours.state_dict()
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        raise InputError(f"{who}: its parameters are on the meta device and hold nothing; call to_empty() first")
    give_shapes(module, config, who)
    if not any(tensor.is_floating_point() for tensor in [*module.parameters(), *module.buffers()]):
        raise InputError(f"{who}: it has no parameters to fill; register its weights as torch.nn.Parameter")
    with torch.random.fork_rng(devices=[]), Borrowed(module) as bench:
        try:
            anatomy = Anatomy(record_probe(module, config, who))
        except NotGPT2 as reason:
            raise InputError(f"{who}: {reason}; load_into needs a GPT-2") from None
        mapping = Mapping(anatomy, config)
        explanation = Explanation(anatomy, mapping, state)
        check = Check(anatomy, mapping, state, explanation.found.neutral)
        bench.to_float64()
        rows = fill(bench, mapping, state, explanation)
        verdict = check.judge(bench, explanation.found)
        explanation.settle(verdict.agrees)
        bench.keep(row.name for row in rows)
    found = explanation.found
    return MappingReport(
        module=who,
        checkpoint=model if isinstance(model, str) else "a model",
        rows=tuple(rows),
        unfilled=found.unfilled,
        idle=found.idle,
        unused=found.unused,
        ambiguous=tuple(found.ambiguous),
        problems=tuple(found.problems),
        notes=tuple(found.notes),
        logits_error=verdict.error,
        logits_note=verdict.words,
        agrees=verdict.agrees,
    )
