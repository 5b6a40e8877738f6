"""What every number in a forward pass is made of, down to the single element.

A recording numbers every element of every parameter, the token ids, and every element that an operator computed, and says of
each operator which elements went into which. Copies, views and slices leave no mark: an element keeps its number wherever it is
moved. Nothing depends on names or module types, so one recording sees functions, einsum, ``nn.MultiheadAttention`` and
hand-written layer norms alike. How it is taken: :mod:`.recorder`.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

NOWHERE = -1  # the id of a number that neither a parameter nor a token had a part in


class Kind(Enum):
    """What an operator does to single elements."""

    LOOKUP = "lookup"  # entries of a table, chosen by the token ids (or multiplied by their one-hot vectors)
    CONTRACTION = "contraction"  # sums of products: matrix products, convolutions of width one
    ELEMENTWISE = "elementwise"  # each result from the elements at its own place
    ROWWISE = "rowwise"  # of its input's shape, each result from its own place and its neighbours: softmax, layer norm
    REDUCTION = "reduction"  # mean, variance, maximum
    OTHER = "other"


@dataclass(frozen=True)
class Region:
    """Ids of a view into a parameter, as strides: its element at ``place`` has the id ``start + sum(place * strides)``."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def last(self) -> int:
        """The largest id in it."""
        return self.start + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def ids(self) -> Tensor:
        """All of them, int64."""
        place = torch.meshgrid(*(torch.arange(n) for n in self.shape), indexing="ij") if self.shape else ()
        return sum((index * stride for index, stride in zip(place, self.strides, strict=True)), torch.tensor(self.start))

    def __getitem__(self, place: tuple[Tensor, ...]) -> Tensor:
        """As ``tensor[place]``, where ``place`` fixes all axes but the last."""
        *leading, last = self.strides
        start = sum((index * stride for index, stride in zip(place, leading, strict=True)), torch.tensor(self.start))
        return start[..., None] + torch.arange(self.shape[-1]) * last


@dataclass(frozen=True)
class Node:
    """One computing operator; its results bear the ids ``start`` to ``stop - 1``, in the order of ``shape``.

    ``operands`` are ids broadcast to ``shape``, except those of a contraction, which have the summed axis behind it, and those
    of reductions and others, which have their own shapes; those of a lookup are what was taken, and the indices that chose it.
    What came from nowhere is left out.
    """

    kind: Kind
    op: str  # "add", "bmm", "_softmax"
    start: int
    shape: tuple[int, ...]
    operands: tuple[Tensor | Region, ...]
    live: bool  # depends on the token ids
    weight: int | None = None  # which operand of a contraction is made of parameters alone
    index: Tensor | None = field(default=None, repr=False)  # of a lookup: the row that each result was taken from

    @property
    def stop(self) -> int:
        return self.start + reduce(operator.mul, self.shape, 1)

    def place(self, ids: Tensor) -> tuple[Tensor, ...]:
        """Coordinates of results in ``shape``."""
        return torch.unravel_index(ids - self.start, self.shape)


class Use(NamedTuple):
    """How a parameter's value enters the computation: times ``scale``, plus ``shift``."""

    scale: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True)
class Source:
    """A parameter or buffer: a region of ids. ``storage`` is the first id of its storage, which other names may share."""

    name: str
    region: Region
    storage: int
    is_parameter: bool


@dataclass(frozen=True)
class Recording:
    """A forward pass on ``ids``. Sources come first in the numbering, then the token ids, then nodes as they were executed."""

    sources: tuple[Source, ...]
    ids: Tensor
    tokens: int  # the number of the first token; every smaller one is a parameter's or buffer's
    nodes: tuple[Node, ...]
    output: Tensor  # ids of the logits
    uses: dict[int, frozenset[Use]]  # the storages that took part, and how
    unfollowed: tuple[str, ...]  # operators that could not be followed: what they returned came from nowhere

    @property
    def stop(self) -> int:
        return self.nodes[-1].stop if self.nodes else self.tokens + self.ids.numel()

    @cached_property
    def _starts(self) -> Tensor:
        return torch.tensor([node.start for node in self.nodes], dtype=torch.int64)

    def owners(self, ids: Tensor) -> Tensor:
        """Index of the node that computed each element; -1 for sources, tokens and nowhere."""
        return torch.searchsorted(self._starts, ids.contiguous(), right=True) - 1

    def source(self, id: int) -> Source:
        """The parameter or buffer that an element is of: the first by that id."""
        return next(source for source in self.sources if source.region.start <= id <= source.region.last)

    def name(self, id: int) -> str:
        """That source's name; "" for an element that was computed."""
        return self.source(id).name if 0 <= id < self.tokens else ""

    @cached_property
    def _needed(self) -> set[int]:
        found, ahead = set(), set(self.owners(self.output).unique().tolist()) - {-1}
        while ahead:
            number = ahead.pop()
            found.add(number)
            for operand in self.nodes[number].operands:
                if isinstance(operand, Tensor):
                    strides = operand.stride()
                    once = operand.as_strided([n if s else 1 for n, s in zip(operand.shape, strides, strict=True)], strides)
                    ahead |= set(self.owners(once).unique().tolist()) - {-1} - found
        return found

    def needed(self) -> set[int]:
        """The nodes that the output depends on."""
        return self._needed

    def owner(self, id: Tensor | int) -> int:
        """:meth:`owners` of a single element."""
        return int(self.owners(torch.as_tensor(int(id))))


@torch.no_grad()
def record(module: nn.Module, ids: Tensor) -> Recording:
    """Run ``module`` on (B, T) ``ids``, distinct from each other, and take down what every number is made of.

    The module runs as it is, in its dtype and mode; switch dropout off. Values play no part, with one exception: a product with
    one-hot vectors is a lookup, and is seen to be one.

    Raises:
        whatever the module raises, and ValueError where its output holds no logits.
    """
    from gpt2.port.recording.recorder import Recorder

    with plain_attention():
        recorder = Recorder(module, ids)
        with recorder:
            output = logits_of(module(ids))
    found = recorder.shadows.ids_of(output)
    return Recording(
        sources=tuple(recorder.shadows.sources),
        ids=ids,
        tokens=recorder.shadows.tokens,
        nodes=tuple(recorder.nodes),
        output=torch.full(output.shape, NOWHERE) if found is None else found,
        uses={storage: frozenset(uses) for storage, uses in recorder.shadows.uses.items()},
        unfollowed=tuple(sorted(recorder.unfollowed)),
    )


def logits_of(output: Any) -> Tensor:
    """The logits in what a forward returns: a tensor; ``logits`` of an object or dict; the first tensor of three axes, or of two.

    Raises:
        ValueError: none there.
    """
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    parts = [output, named] if named is None else [named]
    if not isinstance(output, Tensor) and named is None:
        parts = tree_leaves(dict(output) if isinstance(output, dict) else getattr(output, "__dict__", output))
    found = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point() and part.ndim >= 2]
    if not found:
        raise ValueError(f"its forward returns {type(output).__name__} with no logits in it")
    return next((part for part in found if part.ndim > 2), found[0])


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention spelt out in operators: no fused kernel, no compiled graph."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if "torch._dynamo" in sys.modules:  # it takes seconds to import, and without it nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
