"""Attention weights as small multiples: a row per layer, a column per head."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpt2.pages.drawing import INK, MUTED, PAPER, RULE, SETTINGS, matplotlib_of_our_own, svg
from gpt2.pages.rendering import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

LIGHT = {INK: "#23211d", MUTED: "#716b61", RULE: "#e6e1d8", PAPER: "#fdfcfa"}
POSITIVE, NEGATIVE = (0xD8, 0x62, 0x28), (0x3F, 0x7F, 0xC4)  # seen on a light page and on a dark one
LABELLED = 24  # tokens that are named along the edges


def attention_svg(maps: Tensor, tokens: Sequence[str], *, signed: bool) -> str:
    """Small multiples of (layers, heads, T, T): a row per layer, a column per head.

    Colour is laid on in proportion to the root of a weight, so that small ones are seen; ``signed`` differences in two colours,
    scaled by the largest.
    """
    size, draw = _attention(maps, tokens, signed)
    return svg("attention-difference" if signed else "attention", size, "Attention weights of every head", draw)


def attention_png(maps: Tensor, tokens: Sequence[str], *, signed: bool) -> bytes:
    """The same as a picture on light ground."""
    light = {name: LIGHT.get(value, value) if isinstance(value, str) else value for name, value in SETTINGS.items()}
    with matplotlib_of_our_own(**light):
        from matplotlib.figure import Figure

        size, draw = _attention(maps, tokens, signed)
        figure = Figure(figsize=size)
        draw(figure)
        file = io.BytesIO()
        pixels = size[0] * size[1] * 200**2
        dpi = 200 if pixels < 4e7 else 100
        figure.savefig(file, format="png", dpi=dpi, facecolor=LIGHT[PAPER], metadata={"Software": None})
    return file.getvalue()


def _attention(maps: Tensor, tokens: Sequence[str], signed: bool) -> tuple[tuple[float, float], Callable[[Figure], None]]:
    """Size in inches, and how to draw it: all heads are one image, for a thousand axes would take a minute."""
    import numpy as np

    layers, heads, n, _ = maps.shape
    named = n <= LABELLED
    cell = 9 if n <= LABELLED else max(1, 150 // n)  # pixels
    while cell > 3 and heads * n * cell > 2400:
        cell -= 1
    named = named and cell >= 7
    gap = max(1, round(10 / cell))
    step = n + gap
    values = maps.double().numpy()
    scale = np.abs(values[np.isfinite(values)]).max(initial=0) or 1.0
    image = np.zeros((layers * step - gap, heads * step - gap, 4), dtype=np.uint8)
    for layer in range(layers):
        for head in range(heads):
            value = np.nan_to_num(values[layer, head])
            panel = image[layer * step : layer * step + n, head * step : head * step + n]
            panel[..., :3] = np.where(value[..., None] < 0, NEGATIVE, POSITIVE)
            share = np.sqrt(np.clip(np.abs(value) / (scale if signed else 1.0), 0, 1))
            panel[..., 3] = 5 * np.rint(51 * share)  # fewer shades than the eye tells apart, in half the bytes
    texts = [_label(token) for token in tokens] if named else []
    longest = max(map(len, texts), default=0)
    left, top, bottom = 34 + 6 * longest, 24, (8 + 6 * longest if named else 8)
    width, height = image.shape[1] * cell, image.shape[0] * cell
    size = ((left + width + 4) / 100, (top + height + bottom) / 100)

    def draw(figure: Figure) -> None:
        import matplotlib
        from matplotlib.collections import PatchCollection
        from matplotlib.patches import Rectangle

        figure.set_layout_engine("none")
        across, down = size[0] * 100, size[1] * 100
        axes = figure.add_axes((left / across, bottom / down, width / across, height / down))
        axes.imshow(image, interpolation="none", aspect="auto", extent=(0, image.shape[1], image.shape[0], 0))
        frames = [Rectangle((h * step, r * step), n, n) for r in range(layers) for h in range(heads)]
        edge = matplotlib.rcParams["axes.edgecolor"]
        axes.add_collection(PatchCollection(frames, facecolor="none", edgecolor=edge, linewidth=0.6))
        axes.set(xlim=(-0.1, image.shape[1] + 0.1), ylim=(image.shape[0] + 0.1, -0.1))
        axes.grid(False)
        axes.axis("off")
        ink, muted = matplotlib.rcParams["text.color"], matplotlib.rcParams["axes.labelcolor"]
        for head in range(heads):
            name = f"head {head}" if n * cell >= 48 else str(head)
            axes.text(head * step + n / 2, -5 / cell, name, ha="center", va="bottom", fontsize=7, color=ink)
        for layer in range(layers):
            place = layer * step + n / 2
            axes.text(-(left - 2) / cell, place, f"h.{layer}", ha="left", va="center", fontsize=7, color=ink)
            for row, text in enumerate(texts):
                where = -4 / cell, layer * step + row + 0.5
                axes.text(*where, text, ha="right", va="center", fontsize=5.6, color=muted)
        for head in range(heads):
            for column, text in enumerate(texts):
                where = head * step + column + 0.5, image.shape[0] + 4 / cell
                axes.text(*where, text, ha="center", va="top", fontsize=5.6, color=muted, rotation=90)

    return size, draw


def _label(token: str) -> str:
    text = visible(token)
    return text if len(text) <= 10 else text[:9] + "…"
