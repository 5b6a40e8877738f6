"""``gpt2 explore``: show a forward pass as a page, served on loopback or written to a file."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpt2.checkpoint.names import DEFAULT
from gpt2.cli.common import Status, save_page, set_option, write_result
from gpt2.cli.serving import Answer, PageServer
from gpt2.errors import InputError
from gpt2.options import argument, device_option, json_option, offline_option, option

if TYPE_CHECKING:
    from gpt2.explore.lens import Explorer

EXAMPLES = """\
  gpt2 explore                                        the embedded model: open the address it prints
  gpt2 explore gpt2 --prompt "The capital of France is"
  gpt2 explore shakespeare-mini out/macbeth/best      two models, side by side
  gpt2 explore shakespeare-mini --html page.html      one self-contained file instead of a server
  gpt2 explore shakespeare-mini --prompt "To be, or" --json -

The page shows the prompt's tokens, the predictions at every position and after every layer, and the attention of each head. It
is served to this machine only, at a secret address, until Ctrl-C."""


PORT = 8642


@dataclass(frozen=True, kw_only=True)
class ExploreSettings:
    model: str = argument("which model", "MODEL", DEFAULT)
    other: str | None = argument("a second model, shown beside it", "OTHER", None)
    set: tuple[str, ...] = set_option()
    prompt: str | None = option("the first text to show", "TEXT")
    port: int | None = option(f"port to serve at; 0 takes a free one (default: {PORT})", "N")
    html: str | None = option("write the page to FILE instead of serving it", "FILE")
    offline: bool = offline_option()
    device: str = device_option()
    json: str | None = json_option()


def run(args: ExploreSettings) -> int:
    writes = bool(args.html or args.json)
    if writes and args.port is not None:
        raise InputError("--port has no effect with --html or --json, which write files and serve nothing; leave it out")
    with nullcontext() if writes else PageServer(PORT if args.port is None else args.port) as server:
        from gpt2.explore.lens import PROMPT, explorer

        status = Status("loading")
        names = [name for name in (args.model, args.other) if name is not None]
        with explorer(*names, device=args.device, offline=args.offline) as opened:
            status.clear()
            prompt = PROMPT if args.prompt is None else args.prompt
            lens = opened.look(prompt)  # reports a bad prompt before a browser asks
            if server is not None:
                server.serve(answers(opened, prompt))
    save_page(args.html, lens.save_html)
    if args.json:
        write_result(args.json, lens.to_json, lambda: None)
    return 0


def answers(opened: "Explorer", prompt: str) -> Answer:
    """Return what answers a query: the page of its prompt, of ``prompt`` without one."""
    from gpt2.explore.lens_page import error_page, page

    def answer(query: Mapping[str, str]) -> tuple[str, int]:
        typed = query.get("prompt", prompt).replace("\r\n", "\n")  # forms send line breaks as CRLF
        try:
            return page(opened.look(typed), served=True), 200
        except InputError as error:
            return error_page(tuple(side.name for side in opened.sides), typed, error), 400

    return answer
