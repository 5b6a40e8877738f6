"""The entries of a tensor, apart from where they stand: a fingerprint, an order, what kind of numbers they are."""

from __future__ import annotations

import torch
from torch import Tensor


def reading(sizes: dict[str, int], order: tuple[str, ...]) -> Tensor:
    """Which entry is read at each place of the natural order, if the entries are taken to lie as ``order``."""
    read = torch.arange(torch.Size(sizes.values()).numel()).view([sizes[axis] for axis in order])
    return read.permute([order.index(axis) for axis in sizes]).flatten()


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """The number of entries, and a sum over their bits, mixed, that has no order."""
    bits = tensor.contiguous().view(torch.int64)
    mixed = (bits ^ (bits >> 29)) * 0x5851F42D4C957F2D
    mixed = (mixed ^ (mixed >> 32)) * 0x14057B7EF767814F
    return tensor.numel(), int((mixed ^ (mixed >> 31)).sum())


def constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def likeness(values: Tensor) -> str:
    """What kind of numbers they seem to be."""
    values = values.flatten()
    if constant(values):
        return f"they are all {float(values[0]):g}, as a fresh parameter is"
    std, most = float(values.std()), float(values.abs().max())
    mean = float(values.mean())
    if most < 1.8 * std and abs(mean) < 0.2 * std:
        return f"they look drawn evenly from ±{most:.2g}, as a fresh nn.Linear is"
    if abs(mean) < 0.2 * std:
        return f"they look drawn at random (std {std:.2g}), as a fresh parameter is"
    return f"mean {mean:.2g}, std {std:.2g}"
