"""``gpt2 verify``: check that our model and transformers compute the same from the same files."""

import argparse

from gpt2.cli.common import Status, add_model, seed, write_result

HELP = "check that our model equals transformers' on the same weights"
EXAMPLES = """\
  gpt2 verify                        the embedded checkpoint, in about ten seconds
  gpt2 verify gpt2                   the official weights
  gpt2 verify gpt2 --record          and every number that others recorded of them
  gpt2 verify ./my-model:bf16        a local directory; rounding is checked in bfloat16
  gpt2 verify random:gpt2-medium     official shapes, random weights, no download
  gpt2 verify --json report.json --html report.html

exit code: 0 equal, 1 different, 2 bad input"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--seed", type=seed, default=0, help="seeds the random token ids (default: %(default)s)")
    parser.add_argument(
        "--record", action="store_true", help="compute every number that others recorded of the official weights, in a table"
    )
    parser.add_argument("--html", metavar="FILE", help="also write the report as one HTML file")


def run(args: argparse.Namespace) -> int:
    from gpt2.cli.terminal import Terminal
    from gpt2.measure.allocator import keep_freed_memory
    from gpt2.parity.run import verify

    keep_freed_memory()
    with Status("importing torch and transformers") as status:
        options = {name: getattr(args, name) for name in ("seed", "revision", "offline", "record")}
        report = verify(args.model, **options, progress=status)
    if args.html:
        report.save_html(args.html)
    write_result(args.json, report.to_json, lambda: report.print(Terminal(highlight=False)))
    return 0 if report.ok else 1
