"""``gpt2 bench``: how fast, on this machine, beside transformers."""

from __future__ import annotations

import argparse
from typing import Any

from gpt2.cli.common import Status, add_command, add_json, add_model, say, write_json

EXAMPLES = """\
  gpt2 bench                                      the embedded model: seconds
  gpt2 bench random:gpt2                          the official shape with random weights, without a download
  gpt2 bench gpt2:bf16 --batch 8 --context 512    weights in bfloat16, eight prompts of 512 tokens
  gpt2 bench random:gpt2:int8                     matrices in eight bits, beside transformers in float32
  gpt2 bench random:gpt2-medium --pairs 9 --json -

Ours and transformers in turn, one process, same weights, same threads; the figure is the ratio, pair by pair. Threads: set
OMP_NUM_THREADS. Exits with 0 whatever it finds."""


def add(commands: Any) -> None:
    parser = add_command(commands, "bench", "time loading, prefill, decode and a training step, beside transformers", EXAMPLES)
    add_model(parser)
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="measurements of each (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="rows at a time (default: %(default)s)")
    parser.add_argument("--context", type=int, default=128, metavar="T", help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens to decode after it (default: %(default)s)")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    status = Status()
    status(f"opening {args.model}")
    try:
        from gpt2.bench import bench

        sizes = {"pairs": args.pairs, "batch": args.batch, "context": args.context, "tokens": args.tokens}
        found = bench(args.model, **sizes, revision=args.revision, offline=args.offline, progress=status)
    finally:
        status.clear()
    if args.json:
        write_json(args.json, found.to_json())
    if args.json != "-":
        say(found.table())
    return 0
