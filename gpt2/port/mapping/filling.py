"""A checkpoint's entries into a module's parameters, as the mapping has them."""

from __future__ import annotations

from collections.abc import Mapping as MappingType

from torch import Tensor

from gpt2.port.anatomy.parts import evidence
from gpt2.port.mapping.explain import Explanation
from gpt2.port.mapping.mapping import KEEP, PIECE, ZERO, Mapping
from gpt2.port.mapping.report import Row
from gpt2.port.mapping.wording import describe
from gpt2.port.recording.borrowed import Borrowed
from gpt2.port.recording.dataflow import Use


def fill(bench: Borrowed, mapping: Mapping, state: MappingType[str, Tensor], explanation: Explanation) -> list[Row]:
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
            put(bench.tensors[source.name], entries, mapping, state, use)
            words += f", less {use.shift:.4g}" if use.shift else ""
            words += f", divided by {use.scale:.4g}" if use.scale != 1 else ""
            reasons = dict.fromkeys(evidence(part) for part in mapping.parts(source))
            rows.append(Row(source.name, source.region.shape, names, words, "; ".join(reasons)))
    explanation.conflicts()
    return rows


def put(target: Tensor, entries: Tensor, mapping: Mapping, state: MappingType[str, Tensor], use: Use) -> None:
    """The checkpoint's entries into a parameter, whose value is used scaled and shifted."""
    if target.numel() > PIECE and len(target) > 1:
        for part, some in zip(target.chunk(2), entries.chunk(2), strict=True):
            put(part, some, mapping, state, use)
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
