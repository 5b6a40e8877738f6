"""List what weights and numbers are after a program has stored them in fewer bits: floats, integers in groups, decimals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.port.graph import Function

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
SCHEMES = ("symmetric", "by the largest", "with a least value", "with a zero point")
GROUPS = (32, 64, 128)
SCALED = "float8_e4m3fn with scales"
CUT = "bfloat16, the other digits cut off"
PIECE = 1 << 18  # entries that are rounded at once
MANTISSAS = {7: "bfloat16", 10: "float16 or TF32", 3: "float8, e4m3", 2: "float8, e5m2"}


def mantissa(bits: int, cut: bool, x: Tensor) -> Tensor:
    """Return ``x`` with so many bits behind the first one, rounded to nearest or cut off."""
    flat = x.reshape(-1)
    out = torch.empty_like(flat)
    for some, own in zip(flat.split(PIECE), out.split(PIECE), strict=True):  # at once, a table would take five times its memory
        part, exponent = some.frexp()
        part *= 2.0 ** (bits + 1)
        torch.ldexp(part.trunc_() if cut else part.round_(), exponent.sub_(bits + 1), out=own)
    return out.view(x.shape)


def decimals(places: int, x: Tensor) -> Tensor:
    return (x * 10.0**places).round() / 10.0**places


def roundings() -> Iterator[tuple[str, Function]]:
    """Yield ways to round numbers, in words."""
    for bits in (7, 10, 3, 2, 4, 5, 6, 8, 9, 11, 12):
        for cut in (False, True):
            name = f" ({MANTISSAS[bits]})" if bits in MANTISSAS else ""
            yield f"to {bits} bits of mantissa{name}{', cut off' if cut else ''}", partial(mantissa, bits, cut)
    for places in range(1, 7):
        yield f"to {places} decimals", partial(decimals, places)


def quantised(weight: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield a weight (I, O) in fewer bits, in words: floats, decimals, and integers with a scale for each group."""
    for words, rounded in roundings():
        yield f"rounded {words}", partial(rounded, weight)
    ways = {"along rows": weight, "along columns": weight.T}
    sizes = {f"a scale for each {size} {way}": (rows, size) for size in GROUPS for way, rows in ways.items()}
    sizes |= {"a scale for each column": (weight.T, len(weight)), "a scale for each row": (weight, weight.shape[1])}
    for where, (rows, size) in {"one scale for all": (weight, weight.numel()), **sizes}.items():
        if weight.numel() % size == 0:
            for bits, scheme in itertools.product((8, 4), SCHEMES):
                yield f"in {bits} bits, {scheme}, {where}", partial(_grouped, rows, size, bits, scheme, rows is not weight)


def _grouped(rows: Tensor, size: int, bits: int, scheme: str, turned: bool) -> Tensor:
    """Return ``rows`` in integers with a scale for each ``size`` entries, in the file's order; ``turned``: transposed."""
    made = integers(rows.reshape(-1, size), bits, scheme).reshape(rows.shape)
    return made.T if turned else made


def in_eight_bits(axes: tuple[int, ...], x: Tensor) -> Tensor:
    """Return ``x`` in integers of eight bits, with one scale for all along ``axes``; for all of it if there are none."""
    step = (torch.maximum(x.amax(axes, keepdim=True), -x.amin(axes, keepdim=True)) / 127).clamp(min=1e-30)
    return (x / step).round_().mul_(step)


def narrowed(dtype: str, x: Tensor) -> Tensor:
    """Return ``x`` rounded to a narrow dtype; int8 with a scale for each column, or one for all ("int8 a tensor").

    ``SCALED``: float8 with a scale that leaves every value in its range, so that only the mantissa of four bits is seen. ``CUT``:
    the upper half of a float32's bits.
    """
    if dtype.startswith("int8"):
        return in_eight_bits((0,) if dtype == "int8" and x.ndim > 1 else (), x)
    return mantissa(7, True, x) if dtype == CUT else mantissa(3, False, x) if dtype == SCALED else x.to(NARROW[dtype]).to(x)


def integers(rows: Tensor, bits: int, scheme: str) -> Tensor:
    """Return rows (N, size) in integers of so many bits, each row with its scale."""
    top = 2**bits - 1
    most = top // 2
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    largest = torch.where(high > -low, high, low)
    if scheme == "symmetric":
        step = _nonzero(largest.abs() / most)
        return (rows / step).round().clamp(-most - 1, most) * step
    if scheme == "by the largest":
        step = _nonzero(largest / -(most + 1))
        return ((rows / step + most + 1.5).floor().clamp(0, top) - most - 1) * step
    step = _nonzero((high - low) / top)
    if scheme == "with a least value":
        return ((rows - low) / step).round().clamp(0, top) * step + low
    point = (-low / step).round().clamp(0, top)
    return (((rows / step).round() + point).clamp(0, top) - point) * step


def _nonzero(step: Tensor) -> Tensor:
    return torch.where(step == 0, 1.0, step)
