"""Draw SVG charts for a page with matplotlib.

Placeholder colours become CSS variables, so one picture fits a light and a dark page. The same data give the same bytes.
matplotlib is imported at the first picture, without the user's settings, and writes nothing to the home folder.
"""

import io
import math
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVELS = 17  # shades from "equal" to the largest difference
WIDE, NARROW = (10.6, 3.2), (3.6, 2.9)  # inches of 100 px
INK, MUTED, RULE, B = (f"#00000{n}" for n in range(1, 5))
VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", B: "--b"}

_GROUPS: dict[str, dict[str, Any]] = {
    "axes": {"edgecolor": RULE, "facecolor": "none", "linewidth": 1.0, "axisbelow": True, "labelcolor": MUTED, "labelsize": 8.5},
    "axes.grid": {"axis": "y"},
    "axes.spines": {"left": False, "right": False, "top": False},
    "figure": {"dpi": 100, "facecolor": "none"},
    "font": {"size": 8.5},
    "grid": {"color": RULE, "linewidth": 0.8},
    "legend": {"frameon": False, "fontsize": 8.5, "labelcolor": INK},
    "svg": {"fonttype": "none"},
    "text": {"color": INK, "parse_math": False},
    **{f"{axis}tick": {"color": RULE, "labelcolor": MUTED, "labelsize": 8, "minor.size": 0} for axis in "xy"},
    "ytick.major": {"size": 0},
}
SETTINGS = {"axes.grid": True} | {f"{group}.{name}": value for group, own in _GROUPS.items() for name, value in own.items()}
# The same with colours, for a picture on a light background.
COLOURS = {INK: "#23211d", MUTED: "#716b61", RULE: "#e6e1d8"}
LIGHT = {name: COLOURS.get(value, value) if isinstance(value, str) else value for name, value in SETTINGS.items()}


def shade(share: float) -> int:
    """Map 0 .. 1 to one of the LEVELS; only 0 gets level 0."""
    if math.isnan(share):
        return LEVELS - 1
    return 0 if share <= 0 else max(1, math.ceil(min(share, 1.0) * (LEVELS - 1)))


@contextmanager
def matplotlib_of_our_own(**settings: Any) -> Iterator[None]:
    """Use matplotlib with our settings only."""
    with tempfile.TemporaryDirectory() as folder:
        before = {name: os.environ.get(name) for name in ("MPLCONFIGDIR", "MATPLOTLIBRC")}
        empty = os.path.join(folder, "matplotlibrc")
        open(empty, "w").close()
        os.environ |= {"MPLCONFIGDIR": folder, "MATPLOTLIBRC": empty}
        try:
            import matplotlib
            import matplotlib.figure
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        with matplotlib.rc_context(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the reader's font may have it
            matplotlib.rcdefaults()
            parameters: dict[Any, Any] = SETTINGS | settings
            matplotlib.rcParams.update(parameters)
            yield


def svg(name: str, size: tuple[float, float], title: str, draw: "Callable[[Figure], None]") -> str:
    """Return one picture as an inline ``<svg>``; ``name`` makes its ids unique on the page."""
    from markupsafe import escape

    with matplotlib_of_our_own(**{"svg.hashsalt": name}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()[file.getvalue().index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    box = text.partition('viewBox="')[2].partition('"')[0]
    width = float(box.split()[2]) * 100 / 72
    opening = f'<svg viewBox="{box}" style="--w:{width:.0f}px" role="img" aria-label="{escape(title)}"'
    text = opening + ' xmlns:xlink="http://www.w3.org/1999/xlink">' + text[text.index(">") + 1 :]
    text = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]+", r"font-size: \1px", text)
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var({VARIABLES[m[0]]})" if m[0] in VARIABLES else m[0], text)
    return re.sub(r"\s*\n\s*", "\n", text)


def both(name: str, title: str, draw: "Callable[[Axes, bool], None]") -> str:
    """Return the same chart for a wide screen and for a narrow one; the page's style shows one of them."""

    def one(kind: str, size: tuple[float, float]) -> str:
        return f'<div class="{kind}">{svg(name, size, title, lambda figure: draw(figure.subplots(), kind == "wide"))}</div>'

    return one("wide", WIDE) + one("narrow", NARROW)


def logarithmic(axes: "Axes") -> None:
    """Make the y axis logarithmic, once its values are drawn, with three labels or more, such as 10⁻⁴ or 0.02."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axes.set(yscale="log")
    axis = axes.yaxis
    low, high = sorted(axis.get_view_interval())
    for locator in (LogLocator(), LogLocator(subs=(1, 2, 5)), MaxNLocator(4, min_n_ticks=3)):
        if sum(low <= tick <= high for tick in locator.tick_values(low, high)) >= 3:
            break
    axis.set_major_locator(locator)
    axis.set_major_formatter(_power)
    axis.set_minor_locator(NullLocator())  # its own labels are formulas for TeX


def _power(value: float, _: object = None) -> str:
    """Format a power of ten as 10⁻⁴, for an axis."""
    exponent = round(math.log10(value)) if value > 0 else 0
    plain = value <= 0 or abs(math.log10(value) - exponent) > 1e-6 or -4 < exponent < 4
    return f"{value:g}" if plain else power_of_ten(exponent)


def power_of_ten(exponent: int) -> str:
    """Format ``-4`` as ``"10⁻⁴"``."""
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
