"""``gpt2 explore``: show a forward pass as a page, served on loopback or written to a file."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gpt2.checkpoint.names import DEFAULT
from gpt2.cli.common import finish, set_option
from gpt2.errors import InputError
from gpt2.explore.serving import Answer, PageServer
from gpt2.options import Command, argument, device_option, offline_option, option
from gpt2.pages.streams import Status

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


@dataclass(frozen=True, kw_only=True)
class ExploreSettings(Command):
    model: str = argument("which model", "MODEL", DEFAULT)
    other: str | None = argument("a second model, shown beside it", "OTHER", None)
    set: tuple[str, ...] = set_option()
    prompt: str | None = option("the first text to show", "TEXT")
    port: int = option("port to serve at; 0 takes a free one", "N", 8642)
    html: str | None = option("write the page to FILE instead of serving it", "FILE", writes=True)
    offline: bool = offline_option()
    device: str = device_option()
    WITHOUT_EFFECT: ClassVar = dict.fromkeys(("html", "json"), ("port",))  # they serve nothing


def run(args: ExploreSettings) -> int:
    with nullcontext() if args.html or args.json else PageServer(args.port) as server:
        from gpt2.explore.lens import PROMPT, explorer

        status = Status("loading")
        names = [name for name in (args.model, args.other) if name is not None]
        with explorer(*names, device=args.device, offline=args.offline) as opened:
            status.clear()
            prompt = PROMPT if args.prompt is None else args.prompt
            lens = opened.look(prompt)  # reports a bad prompt before a browser asks
            if server is not None:
                server.serve(answers(opened, prompt))
    return finish(args, lens, "")


def answers(opened: "Explorer", prompt: str) -> Answer:
    """Return what answers a query: the page of its prompt, of ``prompt`` without one."""
    from gpt2.explore.lens import error_page

    def answer(query: Mapping[str, str]) -> tuple[str, int]:
        typed = query.get("prompt", prompt).replace("\r\n", "\n")  # forms send line breaks as CRLF
        try:
            return opened.look(typed).html(served=True), 200
        except InputError as error:
            return error_page(tuple(side.name for side in opened.sides), typed, error), 400

    return answer
