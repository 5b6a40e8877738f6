"""Render HTML pages from templates; format numbers, percentages and tokens.

Security: a page is one self-contained file. Its content security policy allows no request, and only its own script, by hash.
"""

import base64
import hashlib
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2.pages.drawing import LEVELS, power_of_ten

if TYPE_CHECKING:
    from torch import Tensor

MAX_LEGEND = 40  # maximum characters of a model's name in a legend
SIGNS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


def render(script: str, data: object, **values: Any) -> str:
    """Render a page of the one template, with the ``script`` that reads ``data``, if it has one.

    Every value is escaped, except pictures of this package (the filter ``svg``). A page may have a ``body`` between its head and
    its sections, a template with a style sheet, and a field for a ``prompt`` where it is ``served``.
    """
    from markupsafe import Markup

    environment = _environment()
    code = "".join(environment.loader.get_source(environment, part)[0] for part in (script and ("shared.js", f"{script}.js")))
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    values = {"body": "", "kind": "", "served": False, "error": None, "sections": (), **values}
    return str(environment.get_template("report.html").render(data=data, script=Markup(code), script_hash=digest, **values))


@cache
def _environment() -> Any:
    """Return what compiles the templates, once a process: half of the time of a page."""
    import jinja2
    from markupsafe import Markup

    loader = jinja2.PackageLoader("gpt2.pages", "templates")
    strict: dict[str, Any] = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    environment = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, **strict)
    environment.filters |= {"pct": percent, "svg": Markup}
    environment.globals |= {"levels": LEVELS, "zip": zip}
    return environment


def number(value: float | None, form: str = "#.3g") -> str:
    """Format a number: ∞ for infinity, a dash for NaN and None."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = format(value, form) if value else "0"
    digits, _, exponent = text.partition("e")
    digits = digits.removesuffix(".")
    return (f"{digits} × {power_of_ten(int(exponent))}" if exponent else digits).replace("-", "−")


def percent(value: float | None) -> str:
    """Format a fraction as a percentage; only exactly 0 and 1 become 0 % and 100 %."""
    if value is None or not math.isfinite(value):
        return number(value)
    text = f"{value:.1%}"
    if value < 1 and text == "100.0%":
        text = "> 99.9%"
    elif value != 0 and float(text[:-1]) == 0:
        text = number(100 * value, ".2g") + "%"
    return text.replace("-", "−").replace("%", " %")


def visible(text: str) -> str:
    """Format a token for a table cell: line breaks, tabs and spaces alone as symbols, other control characters as U+FFFD."""
    return "".join(SIGNS.get(c, c if c.isprintable() else "�") for c in text) if text.strip(" ") else "␣" * len(text)


def readable(text: str) -> str:
    """Format a token for running text: keep line breaks and tabs, other control characters as U+FFFD."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def short_names(a: str, b: str) -> tuple[str, str]:
    """Shorten two models' names for a legend: a long path's end; A and B if the ends are equal."""
    names = [name if len(name) <= 24 else "/".join(Path(name).parts[-2:])[-MAX_LEGEND:] for name in (visible(a), visible(b))]
    return ("A", "B") if names[0] == names[1] else (names[0], names[1])


def pack_lower(maps: "Tensor") -> str:
    """Encode attention weights (..., T, T) in base64: the lower triangle, row by row, one byte each, 255 for 1."""
    low = maps.nan_to_num().clamp(0, 1).mul(255).round().byte()
    rows, columns = low.new_ones(low.shape[-2:]).tril().nonzero(as_tuple=True)
    return base64.b64encode(low[..., rows, columns].contiguous().numpy().tobytes()).decode()
