"""``gpt2 compare``: measure how two models differ, from weights to generated text."""

import argparse

from gpt2.cli.common import Status, add_offline, save_page, say, seed, write_result
from gpt2.errors import InputError

HELP = "measure how two models differ, from weights to words"
EXAMPLES = """\
  gpt2 compare shakespeare-mini out/macbeth/best             a base and its fine-tune, on a play that neither has seen
  gpt2 compare shakespeare-mini out/macbeth/best --html report.html    the same as one HTML page
  gpt2 compare gpt2 hf/gpt2                                  our implementation and transformers', the same weights
  gpt2 compare gpt2 gpt2:bf16                                two dtypes, both also compared with float64
  gpt2 compare gpt2 gpt2-medium --on wikitext2:stride=512    two sizes, on a text with its protocol
  gpt2 compare shakespeare-mini --attention "To be, or not to be" --html heads.html
  gpt2 compare out/step-1000 out/step-2000 --on my.txt --json -

The exit code is 0 whatever the result. gpt2 verify checks equality, and exits with 1 where the models differ."""
DEFAULTS = {"on": None, "tokens": None, "threshold": 1e-3, "seed": 0}  # options that --attention does not use


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "a", metavar="A", help="a model; the prefix hf/ selects transformers' implementation, a suffix such as :bf16 the dtype"
    )
    parser.add_argument("b", metavar="B", nargs="?", help="the second model; optional with --attention")
    parser.add_argument(
        "--on", metavar="TEXT", help="a text file, - for stdin, or a name (default: Twelfth Night, new to shakespeare-mini)"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="tokens of the text to use, 0 for all (default: 8192; all of wikitext2)"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        default=DEFAULTS["threshold"],
        metavar="E",
        help="report the first activation with a larger relative error (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed, default=DEFAULTS["seed"], metavar="N", help="seeds intervals and samples (default: %(default)s)"
    )
    add_offline(parser)
    parser.add_argument("--attention", metavar="TEXT", help="compare only the attention of each head on TEXT")
    parser.add_argument("--html", metavar="FILE", help="write the report as one self-contained page (with --attention also .png)")


def run(args: argparse.Namespace) -> int:
    if not args.threshold >= 0:
        raise InputError(f"--threshold {args.threshold}: give a number from 0 up, such as 1e-3")
    if args.b is None and args.attention is None:
        raise InputError(f"compare needs a second model, such as hf/{args.a}, or --attention TEXT")
    if args.attention is not None:
        if unused := [name for name in DEFAULTS if getattr(args, name) != DEFAULTS[name]]:
            raise InputError(f"--{unused[0]} has no effect with --attention, which has a text of its own; leave it out")
        return _attention(args)
    from gpt2.cli.terminal import Terminal
    from gpt2.comparison.pair import compare
    from gpt2.measure.allocator import keep_freed_memory

    keep_freed_memory()
    with Status() as status:
        options = {name: getattr(args, name) for name in (*DEFAULTS, "offline")}
        result = compare(args.a, args.b, **options, progress=status)
    save_page(args.html, result.save_html)
    write_result(args.json, result.to_json, lambda: result.print(Terminal()))
    return 0


def _attention(args: argparse.Namespace) -> int:
    from gpt2.explore.attention import compare_attention

    heads = compare_attention(args.a, args.b, args.attention, offline=args.offline)
    save_page(args.html, heads.save_png if str(args.html).endswith(".png") else heads.save_html)
    write_result(args.json, lambda: heads.to_json(maps=True), lambda: say(heads.table()))
    return 0
