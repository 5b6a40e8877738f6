"""Attention weights of one model or two, with their table, their page and its pictures: a row per layer, a column per head."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpt2.comparison.sides.side import Model
from gpt2.errors import InputError
from gpt2.pages.drawing import matplotlib_of_our_own
from gpt2.pages.rendering import pack_lower, readable, render, visible
from gpt2.pages.reports import Environment, Printed, as_json, data_table

if TYPE_CHECKING:
    from rich.console import RenderableType

POSITIVE, NEGATIVE = (0xD8, 0x62, 0x28), (0x3F, 0x7F, 0xC4)  # visible on light and dark pages
LABELLED = 24  # most tokens that are named along the edges
VISIBLE = 750_000  # weights of all heads, in a page of less than 3 MB: 72 tokens of gpt2, 25 of gpt2-xl


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

    def html(self) -> str:
        """Return the pictures and every head's figures as one page. Raises InputError: too many tokens for weights to be seen."""
        most = math.isqrt(VISIBLE // len(self.heads))
        if len(self.tokens) > most:
            room = f"a page of {len(self.heads)} heads has room for {most}: give a shorter text, or take the weights as --json"
            raise InputError(f"the text makes {len(self.tokens)} tokens, and {room}")
        maps = {"A": self.maps} if self.maps_b is None else {"A": self.maps, "B": self.maps_b}
        pictures = {} if self.maps_b is None else {"B − A": picture(self.difference, self.tokens, signed=True)}
        return render(
            "attention",
            report=self,
            names={"A": self.a, "B": self.b},
            pictures=pictures | {side: picture(weights, self.tokens, signed=False) for side, weights in maps.items()},
            tokens=[readable(token) for token in self.tokens],
            data={
                "layers": self.maps.size(0),
                "heads": self.maps.size(1),
                "tokens": [visible(token) for token in self.tokens],
                "maps": {side: pack_lower(weights) for side, weights in maps.items()},
            },
            rows=list(zip(self.heads, self.heads_b or [None] * len(self.heads), strict=True)),
            notable=self.notable(),
        )

    @property
    def difference(self) -> Tensor:
        """b's weights minus a's; zero for one model."""
        return torch.zeros_like(self.maps) if self.maps_b is None else self.maps_b - self.maps


def picture(maps: Tensor, tokens: Sequence[str], *, signed: bool) -> dict[str, Any]:
    """Return an image of all heads of (layers, heads, T, T) maps, and the pixels of its parts.

    Opacity follows the root of a weight, which keeps small ones visible; a difference is ``signed``.
    """
    import numpy as np

    layers, heads, n, _ = maps.shape
    cell = 9 if n <= LABELLED else max(1, 150 // n)
    while cell > 3 and heads * n * cell > 2400:
        cell -= 1
    step = n + max(1, round(10 / cell))  # from one head to the next
    panels = np.zeros((layers, step, heads, step))  # zero is transparent, for the gaps
    panels[:, :n, :, :n] = maps.double().nan_to_num().transpose(1, 2).numpy()
    values = panels.reshape(layers * step, heads * step)
    share = np.sqrt(np.clip(np.abs(values) / ((np.abs(values).max() or 1.0) if signed else 1.0), 0, 1))
    image = np.empty((*values.shape, 4), dtype=np.uint8)
    image[..., :3] = np.where(values[..., None] < 0, NEGATIVE, POSITIVE)
    image[..., 3] = 5 * np.rint(51 * share)  # 52 shades look the same in half the bytes
    written = io.BytesIO()
    with matplotlib_of_our_own():
        from matplotlib.image import imsave

        imsave(written, image, format="png")
    labels = [_label(token) for token in tokens] if n <= LABELLED and cell >= 7 else []
    longest = 6 * max(map(len, labels), default=0)
    sizes = {"cell": cell, "side": n * cell, "step": step * cell, "left": 34 + longest, "top": 24, "bottom": 8 + longest}
    return {"png": base64.b64encode(written.getvalue()).decode(), "layers": layers, "heads": heads, "labels": labels, **sizes}


def _label(token: str) -> str:
    text = visible(token)
    return text if len(text) <= 10 else text[:9] + "…"
