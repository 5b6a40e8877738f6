"""Compare tensors regardless of the order of their entries, and list common misreadings of a checkpoint's tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.config import GPT2Config

TO_THE_BIT = "the checkpoint's values in that order are yours to the bit"


def reading(sizes: dict[str, int], order: tuple[str, ...]) -> Tensor:
    """Return the entry read at each place of the natural order, if entries are taken to lie in ``order``."""
    read = torch.arange(torch.Size(sizes.values()).numel()).view([sizes[axis] for axis in order])
    return read.permute([order.index(axis) for axis in sizes]).flatten()


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Return the number of entries, and a sum over their mixed bits that does not depend on the order."""
    bits = tensor.contiguous().view(torch.int64)
    mixed = (bits ^ (bits >> 29)) * 0x5851F42D4C957F2D
    mixed = (mixed ^ (mixed >> 32)) * 0x14057B7EF767814F
    return tensor.numel(), int((mixed ^ (mixed >> 31)).sum())


def same_entries(a: Tensor, b: Tensor) -> bool:
    return fingerprint(a) == fingerprint(b)


def constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


def likeness(values: Tensor) -> str:
    """Describe what kind of numbers the values seem to be."""
    values = values.flatten()
    if constant(values):
        return f"they are all {float(values[0]):g}, as a fresh parameter is"
    mean, std, most = float(values.mean()), float(values.std()), float(values.abs().max())
    if abs(mean) >= 0.2 * std:
        return f"mean {mean:.2g}, std {std:.2g}"
    if most < 1.8 * std:
        return f"they look drawn evenly from ±{most:.2g}, as a fresh nn.Linear is"
    return f"they look drawn at random (std {std:.2g}), as a fresh parameter is"


def moved_rows(held: Tensor, ours: Tensor) -> int:
    """Return n if row r of ``held`` is row r + n of ``ours``; 0 if no n fits."""
    for by in (1, 2, -1, -2):
        mine, right = (held[:-by], ours[by:]) if by > 0 else (held[-by:], ours[:by])
        if len(mine) > 2 and torch.equal(mine, right):
            return by
    return 0


@dataclass(frozen=True)
class Misreading:
    """The tensor of a port that misreads the checkpoint, and the cause; ``words`` follow the parameter's name."""

    tensor: Tensor
    id: str
    words: str
    evidence: str = TO_THE_BIT


def misread_c_attn(ours: Tensor, config: GPT2Config) -> Iterator[Misreading]:
    """Yield misreadings of c_attn's whole weight (D, 3D) or bias (3D,)."""
    if ours.ndim == 2:
        yield from cut_c_attn(ours)
    for order in orders_of_c_attn(config):
        yield Misreading(ours.index_select(-1, order.index), order.id, order.words)


def cut_c_attn(weight: Tensor) -> Iterator[Misreading]:
    """Yield misreadings of c_attn's weight (D, 3D) that move entries from row to row, so that the bias has no counterpart."""
    yield _reshaped(weight)
    words = "was cut into q, k and v by rows of the file, not by columns"
    evidence = "the checkpoint's values, cut into three pieces of n_embd * n_embd numbers, are yours to the bit"
    yield Misreading(torch.cat([*weight.reshape(3, len(weight), -1)], -1), "qkv-order", words, evidence)


@dataclass(frozen=True)
class Order:
    """Another order of c_attn's columns: ``index`` (3D,) has the column that is read at each place."""

    index: Tensor
    id: str
    words: str


def orders_of_c_attn(config: GPT2Config) -> Iterator[Order]:
    """Yield the orders in which a port may take the columns of c_attn's weight or bias; GPT-2's own is among them."""
    columns = torch.arange(3 * config.n_embd)
    thirds = columns.chunk(3)
    for order in itertools.permutations(range(3)):
        got = ", ".join(f"{'qkv'[i]} from {'qkv'[j]}" for i, j in enumerate(order) if i != j)
        yield Order(torch.cat([thirds[j] for j in order]), "qkv-order", f"has its thirds in another order ({got})")
    sizes = {"q|k|v": 3, "head": config.n_head, "unit": config.head_dim}
    natural = f"({', '.join(sizes)})"
    for axes in itertools.permutations(sizes):
        read, other = reading(sizes, axes), f"({', '.join(axes)})"
        yield Order(read, "head-layout", f"has its columns read as {other}; the checkpoint has {natural}")
        if not torch.equal(read, held := read.argsort()):
            yield Order(held, "head-layout", f"holds its columns in the order {other}; GPT-2 reads them as {natural}")
    heads = columns.view(3, config.n_head, -1)
    for head in range(config.n_head):
        one = heads[:, head, None].expand_as(heads).flatten()
        yield Order(one, "qkv-order", f"has the columns of head {head} in place of every head's")


def misread(part: str, ours: Tensor, config: GPT2Config) -> Iterator[Misreading]:
    """Yield misreadings of another tensor, or of one third of c_attn; ``part`` is its name in the block."""
    if ours.ndim == 2:
        if ours.shape[0] == ours.shape[1]:
            yield Misreading(ours.t(), "transposed", "is transposed", "transposed back, it equals the checkpoint's to the bit")
        else:
            yield _reshaped(ours)
    axis = 0 if part == "attn.c_proj.weight" else -1
    if part.startswith("attn.") and ours.shape[axis] == config.n_embd:
        order = reading({"head": config.n_head, "unit": config.head_dim}, ("unit", "head"))
        for words, index in (("(unit, head)", order), ("(head, unit), as if stored (unit, head)", order.argsort())):
            yield Misreading(ours.index_select(axis, index), "head-layout", f"is read in the order {words}")


def _reshaped(ours: Tensor) -> Misreading:
    words, evidence = "was reshaped where it had to be transposed", "the checkpoint's values, reshaped, are yours to the bit"
    return Misreading(ours.reshape(ours.shape[::-1]).t(), "transposed", words, evidence)
