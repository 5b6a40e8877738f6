"""The picture of `tools/bench.py cost`: speed by model size, context and batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpt2.pages.drawing import matplotlib_of_our_own

SIDES = {"ours": ("#1f5fbf", "o"), "ours int8": ("#12805c", "s"), "transformers": ("#b4531a", "^")}
TASKS = {"prefill": "reading a prompt, tokens/s", "decode": "adding tokens, tokens/s"}


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """Draw prefill above decode; by size, by context and by batch. ``results`` are those of `bench.py cost`."""
    with matplotlib_of_our_own():
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullFormatter, ScalarFormatter

        matplotlib.rcParams.update(matplotlib.rcParamsDefault | {"axes.spines.top": False, "axes.spines.right": False})
        figure = Figure(figsize=(11, 5.6), dpi=110, layout="constrained", facecolor="white")
        grid = figure.subplots(2, 3, sharey="row")
        # By size: one row after 64 tokens. By context: one row. By batch: 64 tokens.
        columns = (
            ("parameters, millions", lambda f: f["parameters"] / 1e6, lambda f: f["rows"] == 1 and f["context"] == 64),
            ("tokens before (gpt2, one row)", lambda f: f["context"], lambda f: f["model"] == "gpt2" and f["rows"] == 1),
            ("rows (gpt2, after 64 tokens)", lambda f: f["rows"], lambda f: f["model"] == "gpt2" and f["context"] == 64),
        )
        for axes_row, (task, label) in zip(grid, TASKS.items(), strict=True):
            for axes, (along, place, belongs) in zip(axes_row, columns, strict=True):
                points = sorted((f for f in results if f["task"] == task and belongs(f)), key=place)
                for name, (colour, marker) in SIDES.items():
                    x, speeds = [place(f) for f in points], [f["sides"][name]["tokens/s"] for f in points]
                    axes.plot(x, [s["median"] for s in speeds], marker=marker, color=colour, label=name, markersize=5)
                    axes.fill_between(x, [s["min"] for s in speeds], [s["max"] for s in speeds], color=colour, alpha=0.15, lw=0)
                axes.set(xscale="log", yscale="log", xticks=[place(f) for f in points])
                axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
                axes.xaxis.set_minor_formatter(NullFormatter())
                axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
                axes.yaxis.set_major_formatter(ScalarFormatter())
                axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
                axes.set_axisbelow(True)
                if task == "decode":
                    axes.set_xlabel(along)
            axes_row[0].set_ylabel(label)
        grid[0, 0].legend(frameon=False)
        figure.savefig(file)
