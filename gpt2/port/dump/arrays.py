"""Find a dump's logits among its arrays, and what an array may be made of."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.checkpoint.containers import shown
from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.measure.dumps import Dump
from gpt2.measure.metrics import relative_error

MAX_PADDING = 128  # a vocabulary is padded to a multiple of this at most
MASKED = -1e4  # scores of this size or below hide a token


@dataclass(frozen=True)
class Output:
    """A dump's logits (B, T', V'), T' being 1 or T, in their own dtype, and the ids (B, T) that they belong to."""

    name: str
    logits: Tensor
    ids: Tensor


def find_output(dump: Dump, expected: Tensor, config: GPT2Config) -> Output:
    """Return the dump's logits; ``expected`` (B, T, V) are the right ones. Raises InputError if it has none, or NaN."""
    candidates = [
        Output(name, laid, dump.ids if rows is None else dump.ids[rows])
        for name, array in dump.arrays.items()
        for laid, rows in _as_logits(array, dump.ids, expected, config)
    ]
    if not candidates:
        raise _without_logits(dump, config)

    def rank(one: Output) -> tuple[bool, bool, float]:
        probabilities = bool((one.logits >= 0).all()) or bool((one.logits <= 0).all())
        row = [n for n in range(len(dump.ids)) if len(one.ids) != len(dump.ids) and torch.equal(dump.ids[n : n + 1], one.ids)]
        value, right = one.logits[..., : expected.shape[-1]].double(), expected[row[:1]] if row else expected
        error = relative_error(value, right[:, -value.shape[1] :])
        return one.logits.shape[-1] != config.vocab_size, probabilities, error if math.isfinite(error) else math.inf

    output = min(candidates, key=rank)
    if bool((missing := output.logits.isnan()).any()):
        where = int(missing.any(-1).any(0).nonzero()[0])
        raise InputError(
            f"{dump.source}: the logits ({shown(output.name)}) are NaN from position {where} on; look for a division by "
            "zero, or a softmax over nothing but -inf"
        )
    return output


def _without_logits(dump: Dump, config: GPT2Config) -> InputError:
    """Return the error of a dump without logits, which says what an array of this name has instead."""
    shape, arrays, width = (*dump.ids.shape, config.vocab_size), dump.arrays, config.n_embd
    name, todo = next((name for name in arrays if "logits" in name.lower()), None), "; save them as well"
    if any(array.shape[-1:] == (width,) for array in (arrays.values() if name is None else [arrays[name]])):
        what = "arrays" if name is None else shown(name)
        todo = f"; {what} of {width:,} columns are hidden states: save x @ wte.T, the head's"
    elif name is not None:
        todo = f": the array {shown(name)} has {tuple(arrays[name].shape)}; "
        todo += "save the logits of these ids, or give the checkpoint that the program has loaded (--model)"
    return InputError(f"{dump.source}: holds no logits {shape}, with a batch dimension or none{todo}")


def _as_logits(array: Tensor, ids: Tensor, expected: Tensor, config: GPT2Config) -> Iterable[tuple[Tensor, slice | None]]:
    """Yield an array as logits of all rows or of one, all positions or the last, if its shape allows this."""
    batch, tokens = ids.shape
    least = config.vocab_size
    most = math.ceil(least / MAX_PADDING) * MAX_PADDING
    array = array.squeeze() if array.ndim > 1 else array
    laid = []
    axes = [axis for axis, size in enumerate(array.shape) if least <= size <= most]
    if axes:
        laid.append(array.movedim(axes[-1], -1))
    elif array.ndim == 1:
        widths = (array.numel() // (batch * tokens), array.numel() // tokens)
        laid += [array.view(-1, width) for width in widths if least <= width <= most and array.numel() % width == 0]
    for one in laid:
        width = one.shape[-1]
        lead = one.numel() // width
        if lead == batch * tokens:
            if one.shape[:-1] == (tokens, batch) and batch != tokens:
                one = one.transpose(0, 1)
            yield one.reshape(batch, tokens, width), None
        elif lead == batch:
            yield one.reshape(batch, 1, width), None
        elif lead in (tokens, 1):
            whole = one.reshape(1, lead, width)
            right = [relative_error(whole[..., :least].double(), row[None, -lead:]) for row in expected]
            row = min(range(batch), key=lambda n: right[n])
            yield whole, slice(row, row + 1)


def parts(name: str, array: Tensor, config: GPT2Config, rows: int, tokens: int) -> list[tuple[str, Tensor]]:
    """Return an array and what it may be made of, named: blocks in a stack, q, k and v (or k and v) in one, unmasked scores."""
    array = array.squeeze()
    found = [(name, array)]
    layers, width = config.n_layer, config.n_embd
    for stack in (layers, layers + 1, 2 * layers):
        axis = next((axis for axis, size in enumerate(array.shape[:-1]) if size == stack and array.ndim > 2), None)
        if axis is not None and stack > 1:
            found += [(f"{name}[{n}]", part) for n, part in enumerate(array.unbind(axis))]
    for label, part in list(found):
        for axis, size in enumerate(part.shape):
            if size == 3 * width:
                found += [(f"{label}[{third}]", one) for third, one in zip("qkv", part.chunk(3, axis), strict=True)]
            elif (size == 3 and part.ndim > 2) or (size == 2 and part.numel() == 2 * rows * tokens * width):
                found += [(f"{label}[{n}]", one) for n, one in enumerate(part.unbind(axis))]
    for label, part in list(found):
        if part.ndim >= 2 and part.shape[-2:] == (tokens, tokens) and tokens > 1:
            future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
            hidden = part[..., future]
            if bool((hidden <= MASKED).all()) or bool((hidden == 0).all()) or bool((hidden == hidden.flatten()[0]).all()):
                found.append((f"{label} masked", part.masked_fill(future, 0.0)))
    return found
