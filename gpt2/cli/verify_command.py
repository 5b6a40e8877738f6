"""``gpt2 verify``: our model against transformers on the same files."""

from __future__ import annotations

import argparse
from typing import Any

from gpt2.cli.common import Status, add_command, add_json, add_model, require_writable, seed, write_json

EXAMPLES = """\
  gpt2 verify                        the embedded checkpoint, in about ten seconds
  gpt2 verify gpt2                   the official weights
  gpt2 verify gpt2 --record          and every number that others recorded of them
  gpt2 verify ./my-model:bf16        a local directory, rounding judged in bfloat16
  gpt2 verify random:gpt2-medium     official shapes, random weights, no download
  gpt2 verify --json report.json --html report.html

exit code: 0 equal, 1 different, 2 bad input"""


def add(commands: Any) -> None:
    parser = add_command(commands, "verify", "prove our model equal to transformers' on the same weights", EXAMPLES)
    add_model(parser)
    parser.add_argument("--seed", type=seed, default=0, help="draws the token ids (default: %(default)s)")
    parser.add_argument(
        "--record", action="store_true", help="compute every number that others recorded of the official weights, in a table"
    )
    parser.add_argument("--html", metavar="FILE", help="also write the report as one HTML file")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require_writable("--html", args.html)

    from gpt2.measure.allocator import keep_freed_memory
    from gpt2.parity.run import verify

    keep_freed_memory()
    status = Status()
    status("importing torch and transformers")
    try:
        report = verify(
            args.model, seed=args.seed, revision=args.revision, offline=args.offline, record=args.record, progress=status
        )
    finally:
        status.clear()
    if args.html:
        report.save_html(args.html)
    if args.json:
        write_json(args.json, report.to_json())
    if args.json != "-":
        from gpt2.cli.terminal import Terminal

        report.print(Terminal(highlight=False))
    return 0 if report.ok else 1
