"""``gpt2 train``: from scratch, or fine-tuning with --init; the same loop."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .common import add_command, add_json, write_json

if TYPE_CHECKING:
    from ..train.loop import Evaluated, Logged, Started

EXAMPLES = """\
  gpt2 train --list                                                     what there is
  gpt2 train shakespeare-mini --out out/mini                            the embedded model, from scratch
  gpt2 train finetune-shakespeare --init shakespeare-mini               fine-tune it on a play it has never seen
  gpt2 train finetune-shakespeare --init gpt2 --set data.path=my.txt    fine-tune GPT-2 on your text
  gpt2 train shakespeare-mini --set data.tokenizer=chars --set optim.lr=1e-3 --out out/chars

The same command again goes on from the newest intact checkpoint. Ctrl-C finishes the step and saves."""


def add(commands: Any) -> None:
    parser = add_command(commands, "train", "train from scratch or fine-tune, by a recipe", EXAMPLES)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a recipe's name, or the path of a TOML file")
    parser.add_argument("--list", action="store_true", help="describe the recipes and exit")
    parser.add_argument("--init", metavar="MODEL", help="fine-tune this model instead of training from scratch")
    parser.add_argument("--out", metavar="DIR", help="folder of the run (default: out/RECIPE)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe; may be repeated"
    )
    parser.add_argument("--fresh", action="store_true", help="start anew in a folder that holds a run")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..train.recipe import names, read

    if args.list:
        described = {name: read(name).description for name in names()}
        if args.json:
            write_json(args.json, json.dumps(described, indent=2))
        if args.json != "-":
            print("\n".join(f"{name:24} {description}" for name, description in described.items()))
        return 0
    if args.recipe is None:
        raise InputError(f"which recipe? one of {', '.join(names())}, or the path of a TOML file")
    recipe = read(args.recipe, args.set)

    from ..train.loop import train

    result = train(recipe, args.out or f"out/{recipe.name}", init=args.init, fresh=args.fresh, report=show)
    best = Path(result.folder) / "best"
    if args.json:
        write_json(args.json, json.dumps({**asdict(result), "folder": str(result.folder), "best": str(best)}, indent=2))
    if args.json != "-":
        print(f"{_ENDS[result.stopped]} at step {result.step}")
        print(f"best validation loss {result.best_loss:.4f} at step {result.best_step}: {best}")
    return 130 if result.stopped == "interrupted" else 0


_ENDS = {"finished": "finished", "early": "stopped early, no longer improving", "interrupted": "interrupted and saved"}


def show(event: Started | Logged | Evaluated) -> None:
    """One event of the loop as lines on stderr."""
    print(_LINES[type(event).__name__](event), file=sys.stderr, flush=True)


def _started(event: Started) -> str:
    recipe, config = event.recipe, event.config
    lines = [*event.notes, f"{recipe.name}: {recipe.description}"]
    lines.append(
        f"{config.num_parameters():,} parameters · {event.train_tokens:,} training and {event.val_tokens:,} validation tokens · "
        f"{recipe.steps} steps of {recipe.batch_size} x {recipe.context}"
    )
    if event.step:
        lines.append(f"going on after step {event.step}")
    return "\n".join(lines)


def _logged(event: Logged) -> str:
    return (
        f"step {event.step:6}  loss {event.loss:.4f}  lr {event.lr:.1e}  |g| {event.grad_norm:5.2f}  "
        f"{event.tokens_per_second:7,.0f} tok/s  {_duration(event.seconds_left)} left"
    )


def _evaluated(event: Evaluated) -> str:
    val, best = event.val, "  best so far" if event.best else ""
    scores = f"validation loss {val.loss:.4f}  perplexity {val.perplexity:.2f}  {val.bits_per_byte:.4f} bits/byte{best}"
    sample = "".join(f"\n  | {line}" for line in event.sample.strip().splitlines())
    return f"step {event.step:6}  {scores}{sample}"


_LINES = {"Started": _started, "Logged": _logged, "Evaluated": _evaluated}


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
