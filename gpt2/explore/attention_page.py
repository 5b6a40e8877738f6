"""The HTML page of attention weights: what each head looks at, of one model or of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpt2.explore.attention_plots import attention_svg
from gpt2.pages.rendering import pack_lower, readable, render, visible

if TYPE_CHECKING:
    from gpt2.explore.attention import AttentionReport

MAX_WEIGHTS = 500_000  # above this the page holds pictures only, and no weights to look up one by one


def page(report: AttentionReport) -> str:
    """The page as text."""
    maps = {"A": report.maps} if report.maps_b is None else {"A": report.maps, "B": report.maps_b}
    pictures = [(side, attention_svg(weights, report.tokens, signed=False)) for side, weights in maps.items()]
    if report.b is not None:
        pictures.insert(0, ("B − A", attention_svg(report.difference, report.tokens, signed=True)))
    layers, heads, n, _ = report.maps.shape
    has_weights = len(maps) * layers * heads * n * (n + 1) // 2 <= MAX_WEIGHTS
    return render(
        "attention",
        report=report,
        names={"A": report.a, "B": report.b},
        pictures=pictures,
        tokens=[readable(token) for token in report.tokens],
        data={
            "layers": layers,
            "heads": heads,
            "tokens": [visible(token) for token in report.tokens],
            "maps": {side: pack_lower(weights) for side, weights in maps.items()} if has_weights else {},
        },
        rows=list(zip(report.heads, report.heads_b or [None] * len(report.heads), strict=True)),
        notable=report.notable(),
    )
