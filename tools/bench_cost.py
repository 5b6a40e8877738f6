"""How does cost grow with the size of the model, the length of the text and the number of rows? Numbers, and a plot of them.

    python tools/bench_cost.py [--plot cost.png] [--size gpt2 --size gpt2-xl] [--pairs 3]

Ours in float32 and in eight bits beside transformers, in turn: reading a prompt, then adding tokens one at a time. Sizes at one
row after 64 tokens; contexts and batches at gpt2's own shape. gpt2-xl needs 15 GB of memory and 7 of disk. Ends stdout with
one JSON line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from beside import Room, finish, measured, room

from gpt2.pages.drawing import matplotlib_of_our_own

SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
CONTEXTS, BATCHES = (64, 128, 256, 512, 960), (1, 2, 4, 8, 16)
STEPS = 12  # that are timed at each point
SIDES = {"ours": ("#1f5fbf", "o"), "ours int8": ("#12805c", "s"), "transformers": ("#b4531a", "^")}
WAYS = {"prefill": "reading a prompt, tokens/s", "decode": "adding tokens, tokens/s"}


def timed(here: Room, points: list[tuple[int, int]], pairs: int) -> Iterator[dict[str, Any]]:
    """Each point is (rows, tokens of each)."""
    sides = [here.ours(), here.ours("int8"), here.transformers()]
    generator = torch.Generator().manual_seed(0)
    for rows, tokens in points:
        ids = torch.randint(here.model.config.vocab_size, (rows, tokens), generator=generator)
        model = here.name.removeprefix("random:")
        where = {"model": model, "parameters": here.model.config.num_parameters(), "rows": rows, "context": tokens}
        read = lambda side, ids=ids: side.prefill_seconds(ids)  # noqa: E731
        add = lambda side, ids=ids: side.decode(ids, STEPS)  # noqa: E731
        for way, run, count in (("prefill", read, rows * tokens), ("decode", add, rows * STEPS)):
            yield {**where, "way": way, **measured(f"{way}, {model}, {rows} x {tokens}", count, sides, run, pairs)}


def draw(found: list[dict[str, Any]], file: Path) -> None:
    """Two rows, reading and adding; three columns, by size, by context and by batch."""
    with matplotlib_of_our_own():
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullFormatter, ScalarFormatter

        matplotlib.rcParams.update(matplotlib.rcParamsDefault | {"axes.spines.top": False, "axes.spines.right": False})
        figure = Figure(figsize=(11, 5.6), dpi=110, layout="constrained", facecolor="white")
        grid = figure.subplots(2, 3, sharey="row")
        # By size, one row after 64 tokens; by context, one row; by batch, 64 tokens: the points that two share are measured once.
        columns = (
            ("parameters, millions", lambda f: f["parameters"] / 1e6, lambda f: f["rows"] == 1 and f["context"] == 64),
            ("tokens before (gpt2, one row)", lambda f: f["context"], lambda f: f["model"] == "gpt2" and f["rows"] == 1),
            ("rows (gpt2, after 64 tokens)", lambda f: f["rows"], lambda f: f["model"] == "gpt2" and f["context"] == 64),
        )
        for axes_row, (way, label) in zip(grid, WAYS.items(), strict=True):
            for axes, (along, place, belongs) in zip(axes_row, columns, strict=True):
                points = sorted((f for f in found if f["way"] == way and belongs(f)), key=place)
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
                if way == "decode":
                    axes.set_xlabel(along)
            axes_row[0].set_ylabel(label)
        grid[0, 0].legend(frameon=False)
        figure.savefig(file)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--size", action="append", choices=SIZES, help="(default: all four)")
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="a picture of it, PNG or SVG")
    arguments.add_argument("--pairs", type=int, default=3, help="measurements of each side (default: %(default)s)")
    args = arguments.parse_args()
    found: list[dict[str, Any]] = []
    for size in args.size or SIZES:
        points = [(1, 64)]
        if size == "gpt2":
            points += [(1, tokens) for tokens in CONTEXTS[1:]] + [(rows, 64) for rows in BATCHES[1:]]
        with room(f"random:{size}") as here:
            found += timed(here, points, args.pairs)
    if args.plot:
        draw(found, args.plot)
    return finish("cost", "random", [], {"results": found})


if __name__ == "__main__":
    raise SystemExit(main())
