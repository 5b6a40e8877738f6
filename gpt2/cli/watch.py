"""``gpt2 train watch``: runs while they train, as a page on loopback or in a file."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2.cli.common import save_page
from gpt2.cli.serving import HEADERS, listen, refusal, routed, serve
from gpt2.errors import InputError, printable

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse

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
    import asyncio

    from starlette.concurrency import run_in_threadpool
    from starlette.responses import HTMLResponse

    from gpt2.train.runs import ALIVE, METRICS
    from gpt2.train.watch import page

    one_at_a_time = asyncio.Lock()
    drawn: dict[tuple[object, ...], bytes] = {}  # the newest page, by the state of the files

    def stamps() -> tuple[object, ...]:
        paths = [Path(folder) / METRICS for folder in folders]
        found = [path.stat() if path.exists() else None for path in paths]
        return tuple(stat and (stat.st_size, stat.st_mtime_ns, time.time() - stat.st_mtime < ALIVE) for stat in found)

    async def answer(request: Request) -> HTMLResponse:
        if refused := refusal(request, token, "gpt2 train watch"):
            return refused
        async with one_at_a_time:
            try:
                if (now := stamps()) not in drawn:
                    text = await run_in_threadpool(page, folders, REFRESH)
                    drawn.clear()
                    drawn[now] = text.encode(errors="backslashreplace")
            except (InputError, OSError) as error:
                return HTMLResponse(str(error).encode(errors="backslashreplace"), 404, HEADERS | {"Content-Type": "text/plain"})
        return HTMLResponse(drawn[now], 200, HEADERS)

    return routed(answer)
