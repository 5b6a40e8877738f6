"""The HTML page of a logit lens: a file that needs nothing else, or, when served, one with a field for another prompt."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

from gpt2.errors import InputError
from gpt2.measure.metrics import MAX_JS
from gpt2.pages.rendering import pack_lower, percent, readable, render, short_names, visible

if TYPE_CHECKING:
    from gpt2.explore.lens import Exploration, Lens, Reading

MAX_TOKENS = 128  # of a prompt: what a page shows side by side
MAX_WEIGHTS = 3_000_000  # attention weights of one model, which make a page of about 4 MB
MAX_CHARACTERS = 4_000  # of a prompt, before it is cut into tokens
UNEXPECTED = 12  # bits of surprise that are coloured darkest: one in four thousand


def page(found: Exploration, *, served: bool = False) -> str:
    """The page as text; ``served`` gives it the field."""
    names = [visible(lens.model.name) for lens in found.lenses]
    together = len(found.lenses) == 1 or len({lens.tokens for lens in found.lenses}) == 1
    if len(names) == 2:
        a, b = short_names(names[0], names[1])
        legend = [name if name == letter else f"{letter} · {name}" for letter, name in zip("AB", (a, b), strict=True)]
    else:
        legend = names
    sides = [
        {
            "letter": letter,
            "name": name,
            "model": lens.model,
            "tokens": [_shown(token) for token in lens.tokens],
            "rows": _rows(lens),
            "layers": lens.attention.size(0),
        }
        for letter, name, lens in zip("ab", legend, found.lenses, strict=False)
    ]
    strips = [
        {"letter": side["letter"], "name": side["name"], "tokens": _strip(lens, found.js), "both": together and len(sides) == 2}
        for side, lens in zip(sides, found.lenses, strict=True)
    ]
    return render(
        "lens",
        names=names,
        sides=sides,
        strips=strips[:1] if together else strips,
        parted=found.js is not None,
        verdict=[_verdict(name, lens) for name, lens in zip(legend, found.lenses, strict=True)],
        prompt=found.prompt,
        served=served,
        error=None,
        characters=MAX_CHARACTERS,
        command=_command(found),
        data=_data(found),
        environment=found.environment,
    )


def error_page(names: tuple[str, ...], prompt: str, error: InputError) -> str:
    """The field again, with what was wrong with the prompt in it."""
    return render(
        "lens",
        names=[visible(name) for name in names],
        sides=[],
        strips=[],
        verdict=[],
        prompt=prompt[:MAX_CHARACTERS],
        served=True,
        error=str(error),
        characters=MAX_CHARACTERS,
        data={},
    )


def _data(found: Exploration) -> dict[str, Any]:
    """What the script draws from. Each token's text stands there once, and a reading holds its number."""
    numbers: dict[str, int] = {}

    def number(text: str) -> int:
        return numbers.setdefault(_shown(text), len(numbers))

    def reading(one: Reading) -> list[Any]:
        top = [value for choice in one.top for value in (number(choice.text), _short(choice.probability))]
        return [top, _short(one.entropy), _short(one.probability), one.rank]

    sides = [
        {
            "tokens": [number(token) for token in lens.tokens],
            "points": lens.points,
            "n_head": lens.attention.size(1),
            "readings": [[reading(one) for one in row] for row in lens.readings],
            "maps": pack_lower(lens.attention),
        }
        for lens in found.lenses
    ]
    return {"sides": sides, "js": None if found.js is None else [_short(value) for value in found.js], "texts": list(numbers)}


def _rows(lens: Lens) -> list[dict[str, Any]]:
    """The grid, a row a point: the likeliest token of every position, and how it is coloured."""
    rows = []
    for point, readings in zip(lens.points, lens.readings, strict=True):
        cells = []
        for at, one in enumerate(readings):
            best = one.top[0]
            cells.append({"text": _shown(best.text), "x": _share(best.probability), "right": one.rank == 1, "at": at})
        rows.append({"point": point, "cells": cells})
    return rows


def _strip(lens: Lens, js: tuple[float, ...] | None) -> list[dict[str, Any]]:
    """The prompt's tokens as running text, coloured by how unexpected each was, or by how far apart two models are after it."""
    given = [None, *(reading.probability for reading in lens.readings[-1][:-1])]
    shares = [_surprise(p) for p in given] if js is None else [_share(value / MAX_JS) for value in js]
    texts = [readable(token) for token in lens.tokens]
    # The spaces in front apart: a line may break after them, and a ring around the token would be in two pieces.
    bare = [text.lstrip(" ") for text in texts]
    leads = [text[: len(text) - len(rest)] for text, rest in zip(texts, bare, strict=True)]
    return [{"lead": lead, "text": rest, "x": x} for lead, rest, x in zip(leads, bare, shares, strict=True)]


def _share(share: float) -> int:
    """0 .. 1 as a colour's strength in percent, by the root, so that small ones are seen."""
    return round(100 * math.sqrt(min(max(share, 0.0), 1.0))) if math.isfinite(share) else 0


def _surprise(p: float | None) -> int:
    """0 .. 100 for nothing .. UNEXPECTED bits or more."""
    if p is None or math.isnan(p):
        return 0
    return 100 if p == 0 else round(100 * min(1.0, max(0.0, -math.log2(p) / UNEXPECTED)))


def _verdict(name: str, lens: Lens) -> dict[str, str]:
    best = lens.readings[-1][-1].top[0]
    return {"name": name, "text": _shown(best.text).strip(), "share": percent(best.probability)}


def _shown(text: str) -> str:
    """A token in a cell: controls as signs, and nothing but spaces as signs too, or the cell would look empty."""
    return visible(text).replace(" ", "␣") if text and not text.strip(" ") else visible(text) or "∅"


def _short(value: float | None) -> float | None:
    return float(f"{value:.3g}") if value is not None and math.isfinite(value) else None


def _command(found: Exploration) -> str:
    names = [lens.model.name for lens in found.lenses]
    return shlex.join(["gpt2", "explore", *names, "--prompt", found.prompt, "--html", "page.html"])
