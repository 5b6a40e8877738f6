"""``gpt2 compare``: any two models, from weights to words."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gpt2.cli.common import Status, add_command, add_json, require_writable, say, seed, write_json
from gpt2.errors import InputError

EXAMPLES = """\
  gpt2 compare shakespeare-mini out/macbeth/best             a base and its fine-tune, on a play that neither has seen
  gpt2 compare shakespeare-mini out/macbeth/best --html report.html    the same as a page to share
  gpt2 compare gpt2 hf/gpt2                                  our implementation and transformers', the same weights
  gpt2 compare gpt2 gpt2:bf16                                two dtypes, with a float64 run as the ruler
  gpt2 compare gpt2 gpt2-medium --on wikitext2:stride=512    two sizes, on a text with its protocol
  gpt2 compare shakespeare-mini --attention "To be, or not to be" --html heads.html
  gpt2 compare out/step-1000 out/step-2000 --on my.txt --json -

Exits with 0 whatever it finds: a comparison claims nothing. gpt2 verify does, and exits with 1 where it does not hold."""
APART = ("on", "tokens", "threshold", "seed")  # what --attention has no use for


DEFAULTS = {"on": None, "tokens": None, "threshold": 1e-3, "seed": 0}


def add(commands: Any) -> None:
    parser = add_command(commands, "compare", "measure how two models differ, from weights to words", EXAMPLES)
    parser.add_argument(
        "a", metavar="A", help="which model; hf/ in front picks transformers' implementation, :bf16 behind a dtype"
    )
    parser.add_argument("b", metavar="B", nargs="?", help="the other; with --attention it may be left out")
    parser.add_argument(
        "--on", metavar="TEXT", help="a text file, - for stdin, or a name (default: Twelfth Night, new to shakespeare-mini)"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="how much of the text, 0 for all (default: 8192; all of wikitext2)"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=DEFAULTS["threshold"],
        metavar="E",
        help="name the first activation past this error (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed, default=DEFAULTS["seed"], metavar="N", help="of intervals and samples (default: %(default)s)"
    )
    parser.add_argument("--offline", action="store_true", help="make no request; use what the cache holds")
    parser.add_argument("--attention", metavar="TEXT", help="compare what each head looks at in TEXT, instead of everything else")
    parser.add_argument("--html", metavar="FILE", help="write the report as one self-contained page (with --attention also .png)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    require_writable("--html", args.html)
    if not args.threshold >= 0:
        raise InputError(f"--threshold {args.threshold}: give a number from 0 up, such as 1e-3")
    if args.b is None and args.attention is None:
        raise InputError(f"compare {args.a} with what? give a second model, such as hf/{args.a}, or --attention TEXT")
    if args.attention is not None and (idle := [name for name in APART if getattr(args, name) != DEFAULTS[name]]):
        raise InputError(f"--{idle[0]} says nothing beside --attention, which looks at the text given there; leave it out")
    if args.attention is not None:
        from gpt2.explore.attention import compare_attention

        heads = compare_attention(args.a, args.b, args.attention, offline=args.offline)
        if args.html:
            (heads.save_png if args.html.endswith(".png") else heads.save_html)(args.html)
            print(f"wrote {args.html}", file=sys.stderr)
        if args.json:
            write_json(args.json, heads.to_json(maps=True))
        if args.json != "-":
            say(heads.table())
        return 0
    from gpt2.comparison.pair import compare
    from gpt2.measure.allocator import keep_freed_memory

    keep_freed_memory()
    status = Status()
    try:
        found = compare(
            args.a,
            args.b,
            on=args.on,
            tokens=args.tokens,
            threshold=args.threshold,
            seed=args.seed,
            offline=args.offline,
            progress=status,
        )
    finally:
        status.clear()
    if args.html:
        found.save_html(args.html)
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        write_json(args.json, found.to_json())
    if args.json != "-":
        from gpt2.cli.terminal import Terminal

        found.print(Terminal())
    return 0
