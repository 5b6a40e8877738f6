"""Compare tensors regardless of the order of their entries, and list common misreadings of a checkpoint's tensor."""

import itertools
from collections.abc import Callable, Iterator
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
    """A wrong reading of a checkpoint's tensor: the cause, and words that follow the parameter's name. ``change`` makes it."""

    id: str
    words: str
    change: Callable[[Tensor], Tensor]
    evidence: str = TO_THE_BIT


RESHAPED = Misreading(
    "transposed",
    "was reshaped where it had to be transposed",
    lambda ours: ours.reshape(ours.shape[::-1]).t(),
    "the checkpoint's values, reshaped, are yours to the bit",
)
TURNED = Misreading("transposed", "is transposed", Tensor.t, "transposed back, it equals the checkpoint's to the bit")
# Of c_attn's weight (D, 3D), what moves entries from row to row, so that the bias has no counterpart.
CUT = Misreading(
    "qkv-order",
    "was cut into q, k and v by rows of the file, not by columns",
    lambda ours: torch.cat([*ours.reshape(3, len(ours), -1)], -1),
    "the checkpoint's values, cut into three pieces of n_embd * n_embd numbers, are yours to the bit",
)


def taken(id: str, words: str, index: Tensor, axis: int = -1) -> Misreading:
    return Misreading(id, words, lambda ours: ours.index_select(axis, index))


def misread_c_attn(ours: Tensor, config: GPT2Config) -> Iterator[Misreading]:
    """Yield misreadings of c_attn's whole weight (D, 3D) or bias (3D,)."""
    yield from (RESHAPED, CUT) if ours.ndim == 2 else ()
    columns = torch.arange(3 * config.n_embd)
    thirds, heads = columns.chunk(3), columns.view(3, config.n_head, -1)
    orders: list[tuple[str, str, Tensor]] = []
    for order in itertools.permutations(range(3)):
        got = ", ".join(f"{'qkv'[i]} from {'qkv'[j]}" for i, j in enumerate(order) if i != j)
        orders.append(("qkv-order", f"has its thirds in another order ({got})", torch.cat([thirds[j] for j in order])))
    sizes = {"q|k|v": 3, "head": config.n_head, "unit": config.head_dim}
    natural = f"({', '.join(sizes)})"
    for axes in itertools.permutations(sizes):
        read, other = reading(sizes, axes), f"({', '.join(axes)})"
        orders.append(("head-layout", f"has its columns read as {other}; the checkpoint has {natural}", read))
        if not torch.equal(read, held := read.argsort()):
            orders.append(("head-layout", f"holds its columns in the order {other}; GPT-2 reads them as {natural}", held))
    for head in range(config.n_head):
        words = f"has the columns of head {head} in place of every head's"
        orders.append(("qkv-order", words, heads[:, head, None].expand_as(heads).flatten()))
    yield from (taken(*one) for one in orders if not torch.equal(one[-1], columns))


def misread(part: str, ours: Tensor, config: GPT2Config) -> Iterator[Misreading]:
    """Yield misreadings of another tensor, or of one third of c_attn; ``part`` is its name in the block."""
    if ours.ndim == 2:
        yield TURNED if ours.shape[0] == ours.shape[1] else RESHAPED
    axis = 0 if part == "attn.c_proj.weight" else -1
    if part.startswith("attn.") and ours.shape[axis] == config.n_embd:
        order = reading({"head": config.n_head, "unit": config.head_dim}, ("unit", "head"))
        for words, index in (("(unit, head)", order), ("(head, unit), as if stored (unit, head)", order.argsort())):
            yield taken("head-layout", f"is read in the order {words}", index, axis)
