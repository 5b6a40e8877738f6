"""What is won by letting a smaller model guess ahead (gpt2.generate's `draft`)? The same beginnings continued with and without.

    python tools/bench_draft.py MODEL DRAFT [--tokens 128] [--pairs 5] [--temperature 0.8]

Continues lines of a play that the embedded model never saw, greedily and at a temperature, in turn. How many guesses stand
depends on what both have learned, so random weights tell nothing. Ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch
from beside import finish

import gpt2
from gpt2.bench import Spread, interleaved, ratio, seconds
from gpt2.data.shakespeare import play
from gpt2.fast import Step, step_of
from gpt2.generation import generate

PROMPT = 64  # tokens


def tokens_a_pass(model: gpt2.GPT2, draft: gpt2.GPT2, prompt: torch.Tensor, tokens: int, **settings: float) -> float:
    """How many tokens each pass through ``model`` gave, the prompt's own aside."""
    with torch.inference_mode(), mock.patch.object(Step, "__call__", autospec=True, side_effect=Step.__call__) as calls:
        step = step_of(model)
        generate(model, prompt, tokens, draft=draft, **settings)
    return (tokens - 1) / (sum(call.args[0] is step for call in calls.call_args_list) - 1)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("model", metavar="MODEL")
    arguments.add_argument("draft", metavar="DRAFT")
    arguments.add_argument("--tokens", type=int, default=128, metavar="N", help="each time (default: %(default)s)")
    arguments.add_argument("--pairs", type=int, default=5, help="beginnings, each continued by both (default: %(default)s)")
    arguments.add_argument("--temperature", type=float, default=0.8, metavar="T", help="beside 0 (default: %(default)s)")
    args = arguments.parse_args()
    model, draft = gpt2.load(args.model), gpt2.load(args.draft)
    ids = torch.tensor(gpt2.load_tokenizer(args.model).encode(play("twelfth-night")))
    beginnings = ids[: PROMPT * (args.pairs + 1)].view(-1, 1, PROMPT)  # the first of them warms up
    results = {}
    for temperature in (0.0, args.temperature):
        settings = {"temperature": temperature, "seed": 0}
        left = {name: iter(beginnings) for name in ("alone", "drafted")}

        def timed(name: str, left: dict = left, settings: dict = settings) -> float:
            prompt, guessing = next(left[name]), draft if name == "drafted" else None
            return seconds(lambda: generate(model, prompt, args.tokens, draft=guessing, **settings))

        found = interleaved({name: lambda name=name: timed(name) for name in left}, args.pairs)
        gain, passes = (
            ratio(found["alone"], found["drafted"]),
            tokens_a_pass(model, draft, beginnings[1], args.tokens, **settings),
        )
        speeds = {name: Spread.of(args.tokens / value for value in values) for name, values in found.items()}
        told = ", ".join(f"{name} {speed.median:.1f} tokens/s" for name, speed in speeds.items())
        print(f"temperature {temperature:g}: × {gain}; {passes:.2f} tokens a pass; {told}", flush=True)
        speeds = {name: vars(speed) for name, speed in speeds.items()}
        results[f"{temperature:g}"] = {"ratio": vars(gain), "tokens a pass": passes, "tokens/s": speeds}
    return finish("draft", args.model, [], {"draft": args.draft, "results": results})


if __name__ == "__main__":
    raise SystemExit(main())
