"""Write a checkpoint's entries into a module's parameters, as the mapping says."""

from __future__ import annotations

from collections.abc import Mapping as MappingType
from dataclasses import dataclass

from torch import Tensor

from gpt2.port.anatomy.parts import evidence
from gpt2.port.mapping.mapping import KEEP, MAX_ENTRIES, ZERO, Mapping
from gpt2.port.mapping.report import Row
from gpt2.port.mapping.transformations import describe
from gpt2.port.recording.borrowed import Borrowed
from gpt2.port.recording.dataflow import Source, Use


@dataclass(frozen=True)
class Filled:
    """What was written into a parameter: ``row`` for the report, None for nothing; ``complete`` if no entry was left out."""

    source: Source
    row: Row | None
    complete: bool
    words: str


def fill(borrowed: Borrowed, mapping: Mapping, state: MappingType[str, Tensor]) -> list[Filled]:
    """Fill a borrowed module; one result for each of its parameters."""
    results = []
    for source in mapping.sources:
        entries = mapping.entries(source)
        low, high = (int(end) for end in entries.aminmax()) if entries.numel() else (ZERO, ZERO)
        names, words = describe(entries, mapping)
        row = None
        if high != KEEP:
            use = mapping.uses(source)[0]
            put(borrowed.tensors[source.name], entries, mapping, state, use)
            change = f", less {use.shift:.4g}" if use.shift else ""
            change += f", divided by {use.scale:.4g}" if use.scale != 1 else ""
            reasons = dict.fromkeys(evidence(part) for part in mapping.parts(source))
            row = Row(source.name, source.region.shape, names, words + change, "; ".join(reasons))
        results.append(Filled(source, row, low != KEEP, words))
    return results


def put(target: Tensor, entries: Tensor, mapping: Mapping, state: MappingType[str, Tensor], use: Use) -> None:
    """Write the checkpoint's entries into a parameter whose value is used scaled and shifted."""
    if target.numel() > MAX_ENTRIES and len(target) > 1:
        for half, numbers in zip(target.chunk(2), entries.chunk(2), strict=True):
            put(half, numbers, mapping, state, use)
        return
    pieces = mapping.by_tensor(entries)
    if all(mine is not ... for _, mine, _ in pieces):
        target.masked_fill_(entries == ZERO, -use.shift / use.scale)
    for name, mine, numbers in pieces:
        values = state[name].flatten().index_select(0, numbers.flatten()).to(target)
        if mine is ...:
            target.copy_(values.view(target.shape)).sub_(use.shift).div_(use.scale)
        else:
            target[mine] = (values - use.shift) / use.scale
