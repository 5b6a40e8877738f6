"""Read off a linear layer's input and result that its weight or its input is read from other places, or has other factors.

Shapes: x (B, T, I); the result y (B, T, O); weights W (I, O).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.fits.library import Library, permutation, place_of
from gpt2.port.dump.fits.observed import NICE, SHOWN, Fit, Observed, distinct
from gpt2.port.dump.fits.partial import dropped, ranges
from gpt2.port.dump.fits.rounding import in_eight_bits

LEAST_OVER = 8  # results more than inputs, from which on a result shows its input
LIKE = 0.25  # cosine of a result and GPT-2's, from which on the weight may have other scales


class Layer(Protocol):
    """A linear layer of the checkpoint, as :class:`gpt2.port.dump.fits.linear.Linear` has it."""

    library: Library
    name: str
    part: str
    weight: Tensor
    bias: Tensor

    def fault(self, id: str, words: str, leaf: str = "") -> Fault: ...

    def cut(self, whole: Tensor) -> Tensor: ...

    def likeness(self, seen: Observed, rows: Tensor) -> float: ...


def read_elsewhere(linear: Layer, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
    """Weights that are read from another place of a file that holds those of all blocks one behind the other."""
    if linear.part == "logits" or distinct(x[rows]) < 2:
        return
    inputs, wanted = x[rows][:4], seen.value[rows][:4]
    whole, into = linear.library.state[linear.name], x.shape[-1]
    own = whole.shape[1]
    shift = {"attn.k": linear.library.config.n_embd, "attn.v": 2 * linear.library.config.n_embd}.get(linear.part, 0)
    inputs, goal = inputs - inputs.mean(0), wanted[:, 0] - wanted[:, 0].mean()
    count = whole.numel()
    padded = [size for step in (4, 8, 16, 32, 64) if (size := -(-own // step) * step) != own]
    strides = dict.fromkeys([own + 1, own - 1, *padded, into, 4 * into])
    others = [(f"[in, out], with {by} entries from one row to the next, not {own}", by) for by in strides if by not in (1, own)]
    for words, by in (("[in, out]", own), ("[out, in]", 1), *others):
        nearest = []  # by block: the error and the place of the first column
        for number, pair in enumerate(linear.library.pairs(linear.name, by == 1)):
            linear.library.in_time()
            if len(pair) // by < into:  # there is no room for a column
                continue
            error, offset = (_slid(pair, inputs, by)[:, :count] - goal[:, None]).abs().amax(0).min(0)
            nearest.append((float(error), number * count + int(offset)))
        start = min(nearest)[1] - (shift * into if by == 1 else shift) if nearest else -1
        if start < 0:
            continue
        pair = next(islice(linear.library.pairs(linear.name, by == 1), start // count, None))
        read = pair[start % count : start % count + count]
        if by == 1:
            weight = read.view(own, into).T
        else:
            read = torch.cat([pair[start % count :], pair.new_zeros(into * by)])
            weight = read[: into * by].view(into, by)[:, :own] if by >= own else read.as_strided((into, own), (by, 1))
        weight = weight[:, shift : shift + seen.value.shape[-1]]
        bias = (seen.value[rows] - x[rows] @ weight).mean(0)
        layer = int(linear.name.split(".")[1])
        place = f"entry {start} of the blocks' weights, one after the other, {words}"
        place += f"; this block's begin at entry {layer * whole.numel()}"
        fault = linear.fault("wrong-tensor", f"the weight is read from {place}")
        yield from seen.fits(x @ weight + bias, rows, fault)


def rescaled(linear: Layer, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
    """A factor for each column or row of the weight, or of its integers: scales that are taken from elsewhere."""
    inputs, wanted = x[rows], (seen.value - linear.bias)[rows]
    if distinct(inputs) < 4 or linear.likeness(seen, rows) < LIKE:
        return
    whole = linear.library.state[linear.name]
    for kind, axis in (("", None), ("column", 0), ("row", 1)):
        linear.library.in_time()
        weight = linear.weight if axis is None else linear.cut(in_eight_bits((axis,), whole))
        made = inputs @ weight
        columns = (made * wanted).sum(0) / made.square().sum(0).clamp(min=1e-300)
        gram = (inputs.T @ inputs) * (weight @ weight.T)
        lines = torch.linalg.lstsq(gram, (inputs.T @ wanted * weight).sum(1, keepdim=True)).solution
        for what, factors, value in (("column", columns, weight * columns), ("row", lines[:, 0], weight * lines)):
            if what == "row" and distinct(inputs) * wanted.shape[1] < 3 * len(weight):
                continue
            shown = ", ".join(f"{float(one):.4g}" for one in factors[:SHOWN])
            text = f"each {what} of the weight is multiplied by a factor of its own ({shown}, ...)"
            lost = factors.abs() < NICE
            some = not kind and bool(lost.any() & ~lost.all())
            if some and float((factors[~lost] - 1).abs().max()) < 100 * seen.loose:
                text = f"{what}s {ranges(lost)} of {len(lost)} of the weight are not multiplied, all others are right"
                fault = linear.fault("not-loaded", text)
                kept = weight * ~lost if what == "column" else weight * ~lost[:, None]
                yield from seen.fits(x @ kept + linear.bias, rows, fault)
                continue
            if kind:
                text = f"the weight is in 8 bits, with scales by {kind}, and they are those of others: {text}"
            fault = linear.fault("reduced-precision" if kind else "wrong-tensor", text)
            yield from seen.fits(x @ value + linear.bias, rows, fault)


def other_input(linear: Layer, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
    """Another input, which the result shows where it has more features than the input: it is solved for."""
    width, results = linear.weight.shape
    if linear.part == "logits" or results < width + LEAST_OVER or not bool(rows.any()):
        return
    solved = torch.linalg.lstsq(linear.weight.T, (seen.value - linear.bias)[rows].T).solution.T
    made = x.clone()
    made[rows] = solved
    if seen.fitted(made @ linear.weight + linear.bias, rows) is None:
        return
    error = seen.slack.max() + seen.bound * seen.value.square().mean().sqrt()
    loose = 4 * float(error * torch.linalg.pinv(linear.weight).abs().sum(0).max())
    thin = dropped(Observed(made, torch.full_like(made, loose), 0.0, x, -1), rows, linear.part)
    if thin is not None:
        yield from seen.fits(seen.value, rows, *thin.faults)
    nearest = torch.cdist(solved, x.flatten(0, 1)).argmin(1)
    words = f"the tokens' inputs are those of tokens {permutation(nearest % x.shape[1])}"
    ways = [(nearest[:, None] * width + torch.arange(width), words)]
    starts = []
    for one in solved:
        linear.library.in_time()
        starts.append(place_of(one, x.flatten(), loose))
    own = rows.flatten().nonzero()[:, 0] * width
    known = torch.tensor([int(o) if s is None else s for s, o in zip(starts, own, strict=True)])
    places, wanted = (", ".join(map(str, one[:SHOWN].tolist())) for one in (known, own))
    words = f"its input is read from other places: tokens begin at entries {places}, not {wanted}"
    ways.append((known[:, None] + torch.arange(width), words))
    for entries, words in ways:
        taken = x.clone()
        taken[rows] = x.flatten()[entries.clamp(max=x.numel() - 1)]
        fault = linear.fault("wrong-tensor", words)
        yield from seen.fits(taken @ linear.weight + linear.bias, rows, fault)


def _slid(flat: Tensor, rows: Tensor, by: int) -> Tensor:
    """Return sum_i rows[r, i] flat[o + i by], in float32, for each row and every offset o that leaves room, (R, offsets)."""
    usable = len(flat) // by * by
    lanes = flat[:usable].view(-1, by).T.float()  # (by, n)
    offsets = lanes.shape[1] - rows.shape[1] + 1
    step = 1 << max(lanes.shape[1].bit_length() - 5, 0)
    length = -(-lanes.shape[1] // step) * step  # without large prime factors; sums that wrap around are at offsets without room
    spectrum, factors = torch.fft.rfft(lanes, length), torch.fft.rfft(rows.float(), length).conj()
    return torch.stack([torch.fft.irfft(spectrum * factor, length)[:, :offsets].T.flatten() for factor in factors])
