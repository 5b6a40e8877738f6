"""What is compared of a program: a part of the forward pass, seen on some of its tokens, and how near a value is to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gpt2.port.graph import LAST, NODES, ORDER, ROWS, TEXT, Entrance, Model, Program, State, run_block, stage_of

COLUMNS = 256  # vocabulary entries that are compared
TOKENS = 4  # of a large model, where a token's values depend on earlier tokens alone
MIN_ROWS = 4  # positions from which a bias of the head can be fitted


@dataclass(frozen=True)
class Span:
    """The part of the forward pass that is compared: blocks ``first`` to ``last`` (excluded), up to the point ``end``.

    ``entrance``: where it begins, None for the embeddings; ``wanted``: the program's value at ``end``; ``softmaxed``: what the
    program made of its logits.
    """

    first: int
    last: int
    end: str
    entrance: Entrance | None
    wanted: Tensor
    softmaxed: str = ""

    @property
    def until(self) -> int:
        """The number of the last node in the last block."""
        return ORDER[stage_of(self.end) or ""]

    @property
    def is_whole(self) -> bool:
        """Whether it begins and ends between two blocks."""
        return self.until == LAST and (self.entrance is None or self.entrance.after < 0)

    def cut(self, rows: int, tokens: int) -> Span:
        """Return the first tokens of the first rows."""
        entrance = None if self.entrance is None else self.entrance.cut(rows, tokens)
        return replace(self, entrance=entrance, wanted=self.wanted[:rows, :tokens])

    def computes(self, layer: int, node: str) -> bool:
        """Return whether a node of a block is in this part."""
        begin = (self.first, -1 if self.entrance is None else self.entrance.after)
        return begin < (layer, ORDER[node]) <= (self.last - 1, self.until)

    def reaches(self, program: Program) -> bool:
        """Return whether a program replaces something in this part."""
        inside = (self.computes(layer, node) for layer, edits in program.blocks.items() for node in edits)
        return bool(program.outside or program.order or program.run) or any(inside)


@dataclass(frozen=True)
class Nearness:
    """How far a program is from the values it is compared with: ``fit`` is the largest relative error, the head's changes fitted.

    Those are a factor and a number added to all logits of a token, or a bias.

    The others rank programs that do not fit: ``log`` is the mean logarithm of each position's error, ``angle`` of each
    position's angle, ``first`` the error at the first position, which sees no other token.
    """

    fit: float
    log: float
    angle: float
    first: float


class Lens:
    """A model on some of the tokens, and a program's values there in a part of the forward pass."""

    def __init__(self, model: Model, span: Span) -> None:
        self.model, self.span = model, span
        vocabulary = span.wanted.shape[-1]
        self.columns = torch.arange(vocabulary)
        if span.end == "logits" and vocabulary > COLUMNS:
            self.columns = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))[:COLUMNS]
        wanted = span.wanted[..., self.columns].to(model.dtype)
        if span.softmaxed == "softmax":
            wanted = wanted.clamp(min=1e-12).log()
        self.wanted = wanted - wanted.mean(-1, keepdim=True) if span.softmaxed else wanted

    @cached_property
    def right(self) -> Shared:
        """GPT-2's own values."""
        entrance = self.span.entrance or Entrance(self.span.first, {"x": self.model.embed()})
        return Shared(self.model, entrance.to(self.model.dtype), self.span)

    def nearness(self, values: Tensor) -> list[Nearness]:
        """Return the nearness of values (N, B, T, X)."""
        wanted = self.wanted
        size = wanted.square().mean().sqrt().clamp(min=1e-30)
        difference = wanted - values
        fit = difference.abs().amax((1, 2, 3))
        middle = values - values.mean(-1, keepdim=True)
        goal = wanted - wanted.mean(-1, keepdim=True)
        if self.span.end == "logits" and not self.span.softmaxed:
            factor = (middle * goal).sum(-1, keepdim=True) / middle.square().sum(-1, keepdim=True).clamp(min=1e-30)
            fit = torch.minimum(fit, (goal - factor * middle).abs().amax((1, 2, 3)))
            if wanted.shape[:2].numel() >= MIN_ROWS:
                fit = torch.minimum(fit, (difference - difference.mean((1, 2), keepdim=True)).abs().amax((1, 2, 3)))
        errors = difference.square().mean(-1).sqrt() / size  # (N, B, T)
        cosine = (middle * goal).sum(-1) / (middle.norm(dim=-1) * goal.norm(dim=-1)).clamp(min=1e-30)
        log = errors.clamp(min=1e-9).log().mean((1, 2))
        angle = (1 - cosine).clamp(min=1e-12).log().mean((1, 2))
        columns = torch.stack([fit / size, log, angle, errors[..., 0].amax(1)], 1)
        return [Nearness(*row) for row in columns.nan_to_num(math.inf, math.inf, math.inf).tolist()]


class Shared:
    """What all rows have before their first fault: GPT-2's nodes in the blocks of ``span`` from ``entrance`` on."""

    def __init__(self, model: Model, entrance: Entrance, span: Span) -> None:
        self.model, self.entrance, self.span = model, entrance, span
        self._blocks: dict[int, State] = {}

    def block(self, layer: int) -> State:
        """Return the nodes of a block."""
        if layer not in self._blocks:
            first = layer == self.entrance.layer
            state, after = (self.entrance.state, self.entrance.after) if first else ({"x": self.entering(layer)}, -1)
            until = self.span.until if layer == self.span.last - 1 else LAST
            self._blocks[layer] = run_block(self.model.site(layer, state), state, {}, after, until)
        return self._blocks[layer]

    def entering(self, layer: int) -> Tensor:
        """Return the stream that enters a block; what ends the last one, for the number of blocks."""
        if layer == self.entrance.layer:
            return self.entrance.state["x"]
        return self.block(layer - 1)[NODES[self.span.until if layer == self.span.last else LAST]]


class Lenses:
    """The views of a ``span``: the nearest are found on the first tokens of a large model, in float32. ``exact``: in float64."""

    def __init__(self, exact: Model, span: Span) -> None:
        self.exact, self.span = exact, span
        self.small, self.tokens = exact.small, exact.ids.shape[1]

    @cached_property
    def _narrow(self) -> Model:
        return Model(self.exact.state, self.exact.config, self.exact.ids, torch.float32)

    @cached_property
    def whole(self) -> Lens:
        """All tokens: for faults that mix the rows of a batch, and for small models."""
        return Lens(self.exact if self.small else self._narrow, self.span)

    def first(self, tokens: int, rows: int | None = 1) -> Lens:
        """The first ``tokens`` of the first ``rows``, of all rows if None, in float32."""
        ids = self.exact.ids[:rows, :tokens]
        return Lens(self._narrow.on_ids(ids), self.span.cut(len(ids), tokens))

    @cached_property
    def row(self) -> Lens:
        """All tokens of the first row."""
        return self.first(self.tokens)

    @cached_property
    def few(self) -> Lens:
        """The first tokens of the first row; all of them, if only the last position's logits are shown."""
        return self.row if self.span.wanted.shape[1] < self.tokens else self.first(min(TOKENS, self.tokens))

    @property
    def shows_all(self) -> bool:
        """Whether whole blocks lie between what is known and what is compared, of which every token is shown."""
        return self.span.is_whole and not self.span.softmaxed and self.span.wanted.shape[1] == self.tokens

    def of(self, sees: set[str]) -> Lens:
        """Return the view for faults by which a token sees TEXT or ROWS."""
        return self.whole if self.small or ROWS in sees else self.row if TEXT in sees else self.few
