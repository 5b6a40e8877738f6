"""Speed of prompts and of decoding beside other implementations, each in a process of its own, in turn (A B A B).

    python tools/bench.py [MODEL] [--prompt 1x128 8x512] [--rows 1 8] [--nanogpt nanoGPT/model.py] [--only ours llama]

Ratios are to transformers in float32, asked for the last logits only; medians with their spread. Prompts are timed to the logits
of the next token; decoding is greedy steps after 64 tokens, with a cache. Ends with a table in Markdown and a line of JSON. `gpt2
bench` is the short form, with loading; `bench_train.py` measures training.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from beside import SharedWeights, Side, largest_errors, measure_sides

from gpt2.bench import machine

CONTEXT, STEPS = 64, 48  # tokens before decoding, and steps of it


def last_json(script: str, *args: str) -> dict[str, Any]:
    """Run one benchmark in a process of its own; its lines go to stderr as they come, its last line is the result."""
    print(f"\n{script} {' '.join(args)}", file=sys.stderr)
    line, command = "", [sys.executable, str(Path(__file__).with_name(script)), *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if not line.startswith("{"):
                sys.stderr.write(line)
    if not line.startswith("{"):
        raise SystemExit(f"{script} {args[0]} printed no result (exit code {child.returncode})")
    return json.loads(line)


def table(results: list[dict[str, Any]], errors: dict[str, float]) -> str:
    """Return a row for each implementation, a column for each workload, and its largest error of a logit."""
    rows = [f"| × transformers | {' | '.join(result['what'] for result in results)} | largest error of a logit |"]
    rows.append("| --- |" + " --- |" * (len(results) + 1))
    for name in dict.fromkeys(name for result in results for name in result["sides"]):
        ratios = [result["sides"][name]["ratio"] if name in result["sides"] else None for result in results]
        cells = ["" if r is None else f"**{r['median']:.2f}** ({r['min']:.2f} .. {r['max']:.2f})" for r in ratios]
        rows.append(
            f"| {name} | {' | '.join(cells)} | {errors[name]:.1e} |" if name in errors else f"| {name} | {' | '.join(cells)} | |"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="random:gpt2", metavar="MODEL", help="(default: %(default)s)")
    parser.add_argument("--prompt", nargs="*", default=["1x128", "1x1024", "8x512"], metavar="BxT", help="(default: %(default)s)")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8], metavar="B", help="of decoding (default: 1 8)")
    parser.add_argument("--nanogpt", type=Path, metavar="FILE", help="nanoGPT's model.py")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only sides whose name holds WORD, and transformers")
    parser.add_argument("--pairs", type=int, default=5, help="turns of each side (default: %(default)s)")
    args = parser.parse_args()
    shapes = [tuple(map(int, text.split("x"))) for text in args.prompt]
    rows, positions = max([*args.rows, *(rows for rows, _ in shapes)]), CONTEXT + STEPS + 16
    results, errors = [], {}

    def wanted(*sides: Side | None) -> list[Side]:
        there = [side for side in sides if side is not None]
        return [side for side in there if not args.only or side.name == "transformers" or any(w in side.name for w in args.only)]

    with tempfile.TemporaryDirectory(prefix="gpt2-bench-") as folder:
        weights = SharedWeights(args.model, Path(folder))
        config, generator = weights.model.config, torch.Generator().manual_seed(0)
        base = wanted(weights.transformers(), weights.ours())
        readers = base + wanted(weights.nanogpt(args.nanogpt), weights.ctranslate2("float32"))
        readers += wanted(weights.llama("f32", rows, config.n_positions))
        for count, length in shapes:
            ids = torch.randint(config.vocab_size, (count, length), generator=generator)
            read = lambda side, ids=ids: side.prefill_seconds(ids)  # noqa: E731
            results.append(measure_sides(f"prompt {count} x {length}", ids.numel(), readers, read, args.pairs))
        adders = base + wanted(weights.ours("bf16"), weights.ours("int8"), weights.transformers("bfloat16"))
        adders += wanted(*(weights.llama(stored, rows, positions) for stored in ("f32", "bf16", "q8_0")))
        adders += wanted(weights.ctranslate2("float32"), weights.ctranslate2("int8"))
        for count in args.rows:
            ids = torch.randint(config.vocab_size, (count, CONTEXT), generator=generator)
            add = lambda side, ids=ids: side.decode(ids, STEPS)  # noqa: E731
            results.append(measure_sides(f"a token, {count} rows", count * STEPS, adders, add, args.pairs))
        ids = torch.randint(config.vocab_size, (1, min(256, positions, config.n_positions)), generator=generator)
        sides = {side.name: side for side in (*readers, *adders)}
        errors = largest_errors(weights.model, list(sides.values()), ids)
        here, absent = machine(), weights.absent
        engines = {"llama-cpp-python": "llama_cpp", "ctranslate2": "ctranslate2"}
        here["versions"] |= {package: version(package) for package, module in engines.items() if find_spec(module)}
    print(
        f"\n{table(results, errors)}\n\n{here['processor']}, {here['threads']} threads, load {here['load']}; {here['versions']}"
    )
    print(f"left out: {', '.join(absent)}" if absent else "")
    body = {"model": args.model, "machine": here, "left out": absent, "results": results, "largest logit error": errors}
    print(json.dumps({"benchmark": "speed", **body}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
