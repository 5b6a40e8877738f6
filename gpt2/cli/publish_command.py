"""``gpt2 publish``: send a model and its card to the Hub."""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gpt2.cli.common import finish, listed
from gpt2.errors import InputError, printable, size
from gpt2.options import Command, argument, option
from gpt2.pages.streams import Status

if TYPE_CHECKING:
    from gpt2.checkpoint.publish import Plan, Repository

EXAMPLES = """\
  gpt2 publish model me/mini --dry-run                   what would be sent; sends nothing
  gpt2 publish out/macbeth/best me/macbeth               a private repository; asks before it sends
  gpt2 publish out/macbeth/best me/macbeth --public --yes --json -

DIR is what gpt2 train wrote (out/RUN/best) or gpt2 export. Only a model's own files are sent: weights, config, tokenizer,
card. The token is HF_TOKEN's or the one of `hf auth login`. Run the command again after a broken upload: what the Hub has is
not sent again.

exit code: 0 published (or --dry-run), 1 the Hub stored other bytes, 2 bad input or refused"""


@dataclass(frozen=True, kw_only=True)
class PublishSettings(Command):
    directory: str = argument("the model's folder", "DIR")
    repo: str = argument("OWNER/NAME on the Hub; created if it does not exist", "REPO")
    private: bool = option("only you can see it (the default)", default=False)
    public: bool = option("everybody can see it", default=False)
    dry_run: bool = option("show what would be sent; change nothing, make no request", default=False)
    yes: bool = option("do not ask", default=False)
    WITHOUT_EFFECT: ClassVar = {"private": ("public",)}


def run(args: PublishSettings) -> int:
    from huggingface_hub.utils import disable_progress_bars

    from gpt2.checkpoint.publish import look, plan, send

    with Status(f"checking {args.directory}"):
        planned = plan(args.directory, args.repo)
    body: dict[str, Any] = {"repo": args.repo, "files": [asdict(file) for file in planned.files], "not_sent": planned.left_out}
    body |= {"notes": planned.notes, "commit": None}
    if args.dry_run:
        return finish(args, body, f"{_plan(args, planned, None)}\nnothing was sent (--dry-run)")
    with Status(f"asking the Hub for {args.repo}"):
        target = look(planned, public=args.public)
    print(printable(_plan(args, planned, target)), file=sys.stderr)
    if not args.yes:
        if not sys.stdin.isatty():
            raise InputError("nobody to ask here: add --yes, or --dry-run to send nothing")
        what = f"{len(planned.files)} files, {size(sum(file.size for file in planned.files))}"
        print(f"send these {what}, to {target.url}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise InputError("nothing was sent; answer y to send")
    if not sys.stderr.isatty():  # the library's progress bars are for a terminal
        disable_progress_bars()
    commit, wrong = send(planned, target)
    url = f"{target.url}/commit/{commit}"
    body |= {"commit": commit, "url": url, "private": target.private, "wrong": wrong}
    text = f"{'nothing has changed since' if commit == target.commit else 'published'} {url}\n"
    text += f"every hash on the Hub is the one shown; gpt2 verify {args.repo}@{commit[:12]} checks what comes back"
    if wrong:
        text = f"{url}: the Hub stored other bytes of {', '.join(wrong)}; the folder changed meanwhile? publish again"
    return finish(args, body, text, code=1 if wrong else 0)


def _plan(args: PublishSettings, planned: "Plan", target: "Repository | None") -> str:
    state = "private" if (target.private if target else not args.public) else "public"
    where = "" if target is None else ", new" if target.commit is None else f", now at {target.commit[:12]}"
    not_sent = [f"  not sent: {', '.join(planned.left_out)}"] if planned.left_out else []
    files = listed(planned.files, (), digits=16)
    return "\n".join([f"{args.directory} -> {args.repo}  ({state}{where})", *files, *not_sent, *listed((), planned.notes)])
