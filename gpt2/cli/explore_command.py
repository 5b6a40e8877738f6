"""``gpt2 explore``: show a forward pass as a page, served on loopback or written to a file."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gpt2.cli.common import Status, add_device, add_offline, add_set, save_page, write_result
from gpt2.cli.serving import Answer, listen, serve
from gpt2.errors import InputError

if TYPE_CHECKING:
    from gpt2.explore.lens import Explorer

HELP = "look inside a forward pass: predictions by layer, attention by head"
EXAMPLES = """\
  gpt2 explore                                        the embedded model: open the address it prints
  gpt2 explore gpt2 --prompt "The capital of France is"
  gpt2 explore shakespeare-mini out/macbeth/best      two models, side by side
  gpt2 explore shakespeare-mini --html page.html      one self-contained file instead of a server
  gpt2 explore shakespeare-mini --prompt "To be, or" --json -

The page shows the prompt's tokens, the predictions at every position and after every layer, and the attention of each head. It
is served to this machine only, at a secret address, until Ctrl-C."""

PORT = 8642


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "which model (default: %(default)s)"
    parser.add_argument("model", nargs="?", default="shakespeare-mini", metavar="MODEL", help=help)
    parser.add_argument("other", nargs="?", metavar="OTHER", help="a second model, shown beside it")
    add_set(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="the first text to show")
    parser.add_argument("--port", type=int, metavar="N", help=f"port to serve at; 0 takes a free one (default: {PORT})")
    parser.add_argument("--html", metavar="FILE", help="write the page to FILE instead of serving it")
    add_offline(parser)
    add_device(parser)


def run(args: argparse.Namespace) -> int:
    writes = bool(args.html or args.json)
    if writes and args.port is not None:
        raise InputError("--port has no effect with --html or --json, which write files and serve nothing; leave it out")
    with listen(PORT if args.port is None else args.port) if not writes else socket.socket() as listening:
        from gpt2.explore.lens import PROMPT, explorer

        status = Status("loading")
        names = [name for name in (args.model, args.other) if name is not None]
        with explorer(*names, device=args.device, offline=args.offline) as opened:
            status.clear()
            prompt = PROMPT if args.prompt is None else args.prompt
            lens = opened.look(prompt)  # reports a bad prompt before a browser asks
            if not writes:
                serve("gpt2 explore", answers(opened, prompt), listening)
    save_page(args.html, lens.save_html)
    if args.json:
        write_result(args.json, lens.to_json, lambda: None)
    return 0


def answers(opened: Explorer, prompt: str) -> Answer:
    """Return what answers a query: the page of its prompt, of ``prompt`` without one."""
    from gpt2.explore.lens_page import error_page, page

    def answer(query: Mapping[str, str]) -> tuple[str, int]:
        typed = query.get("prompt", prompt).replace("\r\n", "\n")  # forms send line breaks as CRLF
        try:
            return page(opened.look(typed), served=True), 200
        except InputError as error:
            return error_page(tuple(side.name for side in opened.sides), typed, error), 400

    return answer
