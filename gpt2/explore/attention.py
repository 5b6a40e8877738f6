"""Compute attention weights on a short text, for one model or for two and their difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gpt2.comparison.results import Model
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.side import environment_of, text_tokenizers
from gpt2.errors import InputError
from gpt2.measure.tracing import trace_blocks
from gpt2.pages.rendering import write
from gpt2.pages.reports import Environment, Printed, as_json, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_WEIGHTS = 750_000  # of all heads, in a page of less than 3 MB: 72 tokens of gpt2, 25 of gpt2-xl


@dataclass(frozen=True)
class Head:
    """Where one head attends, as a mean over all tokens but the first.

    ``distance`` is in tokens, ``entropy`` in nats; ``previous``, ``first`` and ``itself`` are the shares of attention on the
    token before, the first token and the token itself. ``moved`` is the total variation distance of a's and b's rows, 0 to 1,
    or None.
    """

    layer: int
    head: int
    distance: float
    entropy: float
    previous: float
    first: float
    itself: float
    moved: float | None = None


@dataclass(frozen=True)
class AttentionReport(Printed):
    """``heads`` are a's, layer by layer, ``heads_b`` b's. ``maps`` (layers, heads, T, T) are a's weights, ``maps_b`` b's."""

    a: str
    b: str | None
    tokens: tuple[str, ...]
    heads: tuple[Head, ...]
    heads_b: tuple[Head, ...]
    maps: Tensor = field(repr=False, compare=False)
    maps_b: Tensor | None = field(default=None, repr=False, compare=False)
    models: tuple[Model, ...] = ()
    environment: Environment | None = None

    def to_json(self, *, maps: bool = False) -> str:
        """Return all figures as JSON; with ``maps`` also all weights, which are many."""
        weights = {"maps": self.maps.tolist(), "maps_b": None if self.maps_b is None else self.maps_b.tolist()}
        figures = {name: value for name, value in vars(self).items() if name not in weights}
        return as_json(figures | weights if maps else figures)

    def parts(self) -> Iterator[RenderableType]:
        """Yield a table with a row for each notable head, and the reason."""
        from rich.text import Text

        yield Text(f"\nattention of {self.a}" + (f" → {self.b}" if self.b else ""))
        total = f"{len(self.heads)} heads, {len(self.tokens)} tokens; shares of attention, on average over the tokens"
        yield Text(total, style="dim")
        moved = ["moved"] if self.b else []
        titles = ["head", "looks back", "entropy", "previous", "first", "itself", *moved, ""]
        table = data_table(*titles, right=range(1, len(titles) - 1))
        for head, why in self.notable():
            cells = [f"h.{head.layer} head {head.head}", f"{head.distance:.1f}", f"{head.entropy:.2f}"]
            cells += [f"{share:.0%}" for share in (head.previous, head.first, head.itself)]
            cells += [f"{head.moved:.1%}"] if self.b else []
            table.add_row(*cells, Text(why, style="dim"))
        yield table

    def notable(self) -> list[tuple[Head, str]]:
        """Return the heads with extreme values and the reason, in the order of the layers."""
        rules: list[tuple[str, Callable[[Head], float]]] = [
            ("looks at the token before", lambda head: head.previous),
            ("rests on the first token", lambda head: head.first),
            ("looks at the token itself", lambda head: head.itself),
            ("looks farthest back beyond the first", lambda head: head.distance * (1 - head.first)),
            ("spreads widest", lambda head: head.entropy),
            ("looks most narrowly", lambda head: -head.entropy),
        ]
        chosen = [(max(self.heads, key=key), why) for why, key in rules]
        if self.b:
            chosen += [(head, "moved most") for head in sorted(self.heads, key=lambda head: -(head.moved or 0.0))[:5]]
        reasons = [(head, [why for other, why in chosen if other is head]) for head in self.heads]
        return [(head, ", ".join(why)) for head, why in reasons if why]

    def save_html(self, path: str | Path) -> None:
        """Write the pictures and every head's figures as one self-contained page."""
        from gpt2.explore.attention_page import page

        self._require_room("a page")
        write(path, page(self))

    def save_png(self, path: str | Path) -> None:
        """Write the attention maps as a picture; of two models, their difference."""
        from gpt2.explore.attention_page import attention_png

        self._require_room("a picture")
        write(path, attention_png(self.difference if self.b else self.maps, self.tokens, signed=bool(self.b)))

    def _require_room(self, what: str) -> None:
        """Raise an InputError if the text has too many tokens for weights to be visible."""
        most = math.isqrt(MAX_WEIGHTS // len(self.heads))
        if len(self.tokens) > most:
            raise InputError(
                f"the text makes {len(self.tokens)} tokens, and {what} of {len(self.heads)} heads has room for {most}: "
                "give a shorter text, or take the weights as --json"
            )

    @property
    def difference(self) -> Tensor:
        """b's weights minus a's; zero for one model."""
        return torch.zeros_like(self.maps) if self.maps_b is None else self.maps_b - self.maps


def attention_maps(model: nn.Module, ids: Tensor) -> Tensor:
    """Return attention weights (layers, heads, T, T), float32, of a model over (1, T) ``ids``; row i is query i."""
    blocks = trace_blocks(model, ids)
    return torch.stack([block[name][0].float() for block in blocks for name in block if name.endswith(".attn.weights")])


def compare_attention(a: str, b: str | None, text: str, *, device: str = "cpu", offline: bool = False) -> AttentionReport:
    """Compute attention weights of one model or two on ``text``; names as in :func:`~gpt2.comparison.pair.compare`."""
    sides = [CheckpointSide.open(name, offline=offline, device=device) for name in (a, b) if name is not None]
    tokenizers = text_tokenizers(sides)
    ids = tokenizers[0].encode(text)
    most = min(side.config.n_positions for side in sides)
    if not 2 <= len(ids) <= most:
        raise InputError(f"the text makes {len(ids)} tokens; the model looks at 2 to {most} at a time: give another")
    for part in ("n_layer", "n_head"):
        values = [getattr(side.config, part) for side in sides]
        if values[0] != values[-1]:
            raise InputError(f"{a} and {b} differ in {part}, {values[0]} and {values[1]}; look at one at a time")
    if any(tokenizer.encode(text) != ids for tokenizer in tokenizers):
        raise InputError(f"{a} and {b} read the text as other tokens; look at one at a time")
    maps = []
    for side in sides:
        with side.model() as model:
            maps.append(attention_maps(model, torch.tensor([ids])))
    report = summarise_attention(a, b, tuple(tokenizers[0].shown(index) for index in ids), *maps)
    env = environment_of(sides)
    return replace(report, models=tuple(side.describe(env.versions) for side in sides), environment=env)


def summarise_attention(
    a: str, b: str | None, tokens: tuple[str, ...], maps: Tensor, maps_b: Tensor | None = None
) -> AttentionReport:
    """Compute the figures of (layers, heads, T, T) weights."""
    moved = None if maps_b is None else (maps_b.double() - maps.double()).abs()[:, :, 1:].sum(-1).mean(-1) / 2
    heads_b = () if maps_b is None else _heads(maps_b, moved)
    return AttentionReport(a, b, tokens, _heads(maps, moved), heads_b, maps, maps_b)


def _heads(maps: Tensor, moved: Tensor | None) -> tuple[Head, ...]:
    rows = maps[:, :, 1:].double()  # (L, H, T - 1, T)
    n = maps.size(-1)
    back = (torch.arange(1, n)[:, None] - torch.arange(n)).clamp(min=0).double()
    figures = {
        "distance": (rows * back).sum(-1).mean(-1),
        "entropy": torch.special.entr(rows).sum(-1).mean(-1),
        "previous": maps.diagonal(-1, -2, -1).double().mean(-1),
        "first": rows[..., 0].mean(-1),
        "itself": maps.diagonal(0, -2, -1)[..., 1:].double().mean(-1),
    }
    if moved is not None:
        figures["moved"] = moved
    return tuple(
        Head(layer, head, **{name: float(values[layer, head]) for name, values in figures.items()})
        for layer in range(maps.size(0))
        for head in range(maps.size(1))
    )
