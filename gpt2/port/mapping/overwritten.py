"""Report a table of sines that filling a module replaces, although its author did not mean it to be loaded."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from gpt2.port.mapping.mapping import WeightMap
from gpt2.port.recording.forward import Borrowed


def overwritten(borrowed: Borrowed, mapping: WeightMap) -> Iterator[str]:
    """Yield a sentence for each such parameter; call it before the module is filled."""
    for source in mapping.sources:
        if any(part.part == "wpe" for part in mapping.parts(source)) and _are_sines(borrowed.tensors[source.name].detach()):
            yield f"your {source.name} holds sines and cosines: without load_into your module has no learned positions"


def _are_sines(table: Tensor) -> bool:
    """Return whether a table (..., positions, width) can be sinusoidal: sin 0 and cos 0 first, then nothing beyond one."""
    first, *_ = rows = table.reshape(-1, table.shape[-1])
    zeros, ones = first == 0, first == 1
    return bool((zeros | ones).all() and zeros.any() and ones.any() and (rows.abs() <= 1).all() and (rows[1:] != first).any())
