"""Report the values that filling a module replaces, although its author did not mean them to be loaded."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gpt2.port.mapping.mapping import KEEP, WeightMap
from gpt2.port.recording.forward import Borrowed


def overwritten(borrowed: Borrowed, mapping: WeightMap) -> Iterator[str]:
    """Yield a sentence for each such parameter; call it before the module is filled."""
    tensors = borrowed.tensors
    some_trainable = any(tensors[source.name].requires_grad for source in mapping.sources if source.is_parameter)
    for source in mapping.sources:
        held, parts = tensors[source.name].detach(), {part.part for part in mapping.parts(source)}
        if bool((mapping.entries(source) == KEEP).all()):
            continue
        if "wpe" in parts and _are_sines(held):
            frozen = source.is_parameter and some_trainable and not tensors[source.name].requires_grad
            kind, then = (" and is frozen", "; to train it, call requires_grad_(True) on it") if frozen else ("", "")
            yield (
                f"your {source.name} holds sines and cosines{kind}; GPT-2's positions are learned, and load_into puts them in "
                f"its place: without load_into your module has sinusoidal positions{then}"
            )
        elif parts == {"head.bias"} and bool(held.any()):
            norm = float(torch.linalg.vector_norm(held.double()))
            yield (
                f"your {source.name} is not zero (norm {norm:.2g}), and load_into sets it to zero: GPT-2's head adds no bias; "
                "write bias=False there"
            )


def _are_sines(table: Tensor) -> bool:
    """Return whether a table (..., positions, width) can be sinusoidal: sin 0 and cos 0 first, then nothing beyond one."""
    rows = table.reshape(-1, table.shape[-1])
    first = rows[0]
    at_zero = bool(((first == 0) | (first == 1)).all()) and bool((first == 1).any()) and bool((first == 0).any())
    return at_zero and len(rows) > 1 and bool((rows.abs() <= 1).all()) and not bool(((rows == 0) | (rows == 1)).all())
