"""``gpt2 bench``: measure the speed on this machine, of our implementation and of transformers."""

import argparse

from gpt2.cli.common import Status, add_device, add_model, say, write_result

HELP = "time loading, prefill, decode and a training step against transformers"
EXAMPLES = """\
  gpt2 bench                                      the embedded model, in seconds
  gpt2 bench random:gpt2                          the official shape with random weights; no download
  gpt2 bench gpt2:bf16 --batch 8 --context 512    weights in bfloat16, eight prompts of 512 tokens
  gpt2 bench random:gpt2:int8                     int8 inference, compared with transformers in float32
  gpt2 bench random:gpt2-medium --pairs 9 --json -

Both implementations run in turn in one process, with the same weights and threads. The figure is the ratio of each pair. Set
the number of threads with OMP_NUM_THREADS. The exit code is 0 whatever the result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_device(parser, "where both run")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="measurements of each (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows at a time (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, metavar="T", help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens to decode after it (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    with Status(f"opening {args.model}") as status:
        from gpt2.bench import bench

        sizes = {"pairs": args.pairs, "batch": args.batch, "context": args.context, "tokens": args.tokens}
        result = bench(args.model, **sizes, device=args.device, revision=args.revision, offline=args.offline, progress=status)
    write_result(args.json, result.to_json, lambda: say(result.table()))
    return 0
