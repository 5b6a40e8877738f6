"""``gpt2 train watch``: runs while they train, as a page on loopback or in a file."""

from __future__ import annotations

import argparse
import html
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2.cli.common import save_page
from gpt2.cli.serving import listen, one_page, serve
from gpt2.errors import InputError, printable

if TYPE_CHECKING:
    from starlette.applications import Starlette

PORT, REFRESH = 8643, 5  # seconds


def watch(args: argparse.Namespace) -> int:
    """Serve or write the page of the runs ``args.runs``."""
    from gpt2.data.files import write_output
    from gpt2.train.runs import METRICS
    from gpt2.train.watch import page

    if args.html:
        if args.port is not None:
            raise InputError("--port has no effect with --html, which writes a file and serves nothing; leave it out")
        text = page(args.runs)
        save_page(args.html, lambda target: write_output(target, text))
        return 0
    page(args.runs, REFRESH)  # reports what is wrong before a browser asks
    for folder in args.runs:
        if not (Path(folder) / METRICS).exists():
            print(f"{printable(folder, one_line=True)}: no run there yet; waiting for gpt2 train to begin it", file=sys.stderr)
    with listen(PORT if args.port is None else args.port) as listening:
        serve(partial(application, args.runs), listening)
    return 0


def application(folders: Sequence[str], token: str) -> Starlette:
    """Return an application that serves the page at ``/TOKEN/``, drawn again only where a run has logged or stopped."""
    from gpt2.train.runs import ALIVE, METRICS
    from gpt2.train.watch import page

    @lru_cache(maxsize=1)
    def drawn(stamps: tuple[object, ...]) -> str:
        return page(folders, REFRESH)

    def answer(query: Mapping[str, str]) -> tuple[str, int]:
        files = [path.stat() if path.exists() else None for path in (Path(folder) / METRICS for folder in folders)]
        stamps = [stat and (stat.st_size, stat.st_mtime_ns, time.time() - stat.st_mtime < ALIVE) for stat in files]
        try:
            return drawn(tuple(stamps)), 200
        except (InputError, OSError) as error:
            return html.escape(str(error)), 404

    return one_page("gpt2 train watch", answer, token)
