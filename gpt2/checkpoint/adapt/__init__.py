"""``load_into``: the weights of a checkpoint into somebody else's GPT-2, whatever its parameters are called and however they lie.

The module runs once on a few tokens while every operator is taken down (:mod:`.dataflow`); GPT-2's parts are found in that by
what they do (:mod:`.anatomy`); from them follows which entry of the checkpoint belongs in every single place (:mod:`.mapping`).
Names are not asked. Then the module's logits are held against our model's, in float64 (:mod:`.check`), on a bench that it
leaves as it was, but for the weights (:mod:`.bench`).
"""

from __future__ import annotations

from collections.abc import Mapping as MappingType

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...config import GPT2Config
from ...errors import InputError
from ...int8 import require_float
from ...model import GPT2
from ..load import load
from ..names import DEFAULT
from .anatomy import Anatomy
from .bench import Bench
from .check import Check, told
from .dataflow import Recording, Use, record
from .explain import Explanation
from .mapping import KEEP, PIECE, ZERO, Mapping
from .parts import evidence
from .report import MappingReport, Row
from .stream import NotGPT2
from .wording import describe

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
    _give_shapes(module, config, who)
    if not any(tensor.is_floating_point() for tensor in [*module.parameters(), *module.buffers()]):
        raise InputError(f"{who}: it has no parameters to fill; register its weights as torch.nn.Parameter")
    with torch.random.fork_rng(devices=[]), Bench(module) as bench:
        try:
            anatomy = Anatomy(_record(module, config, who))
        except NotGPT2 as reason:
            raise InputError(f"{who}: {reason}; load_into needs a GPT-2") from None
        mapping = Mapping(anatomy, config)
        explanation = Explanation(anatomy, mapping, state)
        check = Check(anatomy, mapping, state, explanation.found.neutral)
        bench.to_float64()
        rows = _fill(bench, mapping, state, explanation)
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


def _give_shapes(module: nn.Module, config: GPT2Config, who: str) -> None:
    """Have a module register its parameters (keras does so when asked), and give them shapes (lazy ones get them when called)."""
    for part in list(module.modules()):
        part.named_parameters()
    if any(is_lazy(tensor) for tensor in [*module.parameters(), *module.buffers()]):
        try:
            module(_probe(config.vocab_size, 2, min(5, config.n_positions)))
        except Exception as error:
            raise InputError(f"{who}: its parameters have no shapes yet, and its forward fails ({told(error)})") from None


def _record(module: nn.Module, config: GPT2Config, who: str) -> Recording:
    """A forward pass on a few tokens; on early ones, if the module knows fewer; on as many as the checkpoint has positions, if
    it takes no fewer."""
    device = next(module.parameters(), torch.empty(0)).device
    failures = []
    short = min(5, config.n_positions)
    few = min(6 * short, config.vocab_size)  # ids that every vocabulary has
    tries = [(2, short, config.vocab_size), (2, short, few), (1, config.n_positions, config.vocab_size)]
    for batch, length, vocabulary in dict.fromkeys(tries):
        try:
            return record(module, _probe(vocabulary, batch, length).to(device))
        except Exception as error:
            failures.append(told(error))
    raise InputError(f"{who}: its forward fails on ids of shape (2, {short}): {failures[0]}")


def _probe(vocabulary: int, batch: int, length: int) -> Tensor:
    """(B, T) ids, distinct where the vocabulary allows, and none of them the number of a position."""
    low = length if vocabulary >= length * (batch + 1) else 0
    order = torch.randperm(vocabulary - low, generator=torch.Generator().manual_seed(0)) + low
    return order.repeat(length * batch // len(order) + 1)[: length * batch].view(batch, length)


def _fill(bench: Bench, mapping: Mapping, state: MappingType[str, Tensor], explanation: Explanation) -> list[Row]:
    """Fill the module as it lies on the bench; a row for each parameter that something went into."""
    rows, seen = [], set()
    for source in mapping.anatomy.recording.sources:
        if not (source.is_parameter or mapping.fills_buffers) or source.region in seen:
            continue
        seen.add(source.region)
        entries = mapping.entries(source)
        low, high = (int(end) for end in entries.aminmax()) if entries.numel() else (ZERO, ZERO)
        names, words = describe(entries, mapping)
        use = explanation.judge(source, low, high, words)
        if high != KEEP or low != KEEP:
            _put(bench.tensors[source.name], entries, mapping, state, use)
            words += f", less {use.shift:.4g}" if use.shift else ""
            words += f", divided by {use.scale:.4g}" if use.scale != 1 else ""
            reasons = dict.fromkeys(evidence(part) for part in mapping.parts(source))
            rows.append(Row(source.name, source.region.shape, names, words, "; ".join(reasons)))
    explanation.conflicts()
    return rows


def _put(target: Tensor, entries: Tensor, mapping: Mapping, state: MappingType[str, Tensor], use: Use) -> None:
    """The checkpoint's entries into a parameter, whose value is used scaled and shifted."""
    if target.numel() > PIECE and len(target) > 1:
        for part, some in zip(target.chunk(2), entries.chunk(2), strict=True):
            _put(part, some, mapping, state, use)
        return
    low, high = (int(end) for end in entries.aminmax())
    if low >= 0 and (name := mapping.owner(low)) == mapping.owner(high):  # all of one tensor: no masks needed
        values = state[name].flatten().index_select(0, (entries - mapping.starts[name]).flatten())
        target.copy_(values.view(target.shape)).sub_(use.shift).div_(use.scale)
        return
    target.masked_fill_(entries == ZERO, -use.shift / use.scale)
    for name, start in mapping.starts.items():
        stop = start + state[name].numel()
        if low < stop and high >= start and bool((mine := (entries >= start) & (entries < stop)).any()):
            target[mine] = (state[name].flatten()[entries[mine] - start].to(target) - use.shift) / use.scale
