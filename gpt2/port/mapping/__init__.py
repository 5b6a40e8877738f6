"""Load a checkpoint's weights into any module that computes GPT-2, whatever its names and layouts: ``load_into``.

The module runs once on a few tokens while every operator is recorded. GPT-2's parts are recognised in the recording by what they
compute, never by names (:mod:`gpt2.port.anatomy`). From the parts follows which entry of the checkpoint belongs in each place
(:mod:`.mapping`). Then the module's logits are compared with our model's in float64 (:mod:`.check`).
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
from gpt2.port.mapping.filling import fill
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.mapping.remarks import Remarks
from gpt2.port.mapping.report import MappingReport
from gpt2.port.recording.borrowed import Borrowed
from gpt2.port.recording.recorder import give_shapes, record_probe

__all__ = ["MappingReport", "load_into"]


@torch.no_grad()
def load_into(
    module: nn.Module, model: str | GPT2 = DEFAULT, *, revision: str | None = None, offline: bool = False
) -> MappingReport:
    """Fill ``module``, any torch implementation of GPT-2, with the weights of ``model``, in place, and return a report.

    Args:
        module: maps ids (B, T) to logits, or to a tuple, dict or object that holds them. Its parameters keep their dtype,
            device and identity; buffers, modes and what does not belong to GPT-2 stay as they are.
        model: a model's name, as for :func:`gpt2.load`, or a model.
        revision, offline: as for :func:`gpt2.load`.

    The report is ``ok`` when every parameter is filled or has no effect, and the logits agree with our model's to 1e-10 in
    float64. All weights that have a place are filled in, even if the module then computes something else than GPT-2. Memory: a
    float64 copy of the module's parameters, and before that, for a moment, our model in float64.

    Raises:
        InputError: ``module`` is no module, or GPT-2's weights cannot go into it; or there is no such model. The module is then
            as it was.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"load_into fills a torch.nn.Module, and was given {type(module).__name__}; build the module first")
    ours = load(model, revision=revision, offline=offline) if isinstance(model, str) else model
    require_float(ours, "load_into")
    name, config, state = type(module).__name__, ours.config, ours.state_dict()
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        raise InputError(f"{name}: its parameters are on the meta device and hold nothing; call to_empty() first")
    give_shapes(module, config, name)
    if not any(tensor.is_floating_point() for tensor in [*module.parameters(), *module.buffers()]):
        raise InputError(f"{name}: it has no parameters to fill; register its weights as torch.nn.Parameter")
    with torch.random.fork_rng(devices=[]), Borrowed(module) as borrowed:
        try:
            mapping = Mapping(Anatomy(record_probe(module, config, name)), config)
        except NotGPT2 as reason:
            raise InputError(f"{name}: {reason}; load_into needs a GPT-2") from None
        remarks = Remarks(mapping, state)
        check = Check(mapping, state, remarks.neutral)
        borrowed.to_float64()
        filled = fill(borrowed, mapping, state)
        rows = tuple(one.row for one in filled if one.row is not None)
        remarks.left_over(filled)
        verdict = check.judge(borrowed, remarks)
        remarks.settle(verdict.agrees)
        borrowed.keep(row.name for row in rows)
    return MappingReport(
        module=name,
        checkpoint=model if isinstance(model, str) else "a model",
        rows=rows,
        unfilled=remarks.unfilled,
        idle=remarks.idle,
        unused=remarks.unused,
        ambiguous=tuple(remarks.ambiguous),
        problems=tuple(remarks.problems),
        notes=tuple(remarks.notes),
        logits_error=verdict.error,
        logits_note=verdict.words,
        agrees=verdict.agrees,
    )
