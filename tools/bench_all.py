"""Every speed of this project beside its peers', as one Markdown table: what the README shows.

    python tools/bench_all.py [--pairs 5] [--nanogpt nanoGPT/model.py] [--only load --only decode] [--model random:gpt2]

Runs the other benches one after the other, each in a process of its own, and takes the JSON line that each ends with. Everything
in a row was measured in one run, in turn; a cell is tokens a second and the ratio to transformers in float32, pair by pair.
Ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent


def run(name: str, *args: str) -> dict[str, Any]:
    """One bench; its own lines go to stderr as they come, its last line is what it found."""
    print(f"\n{name} {' '.join(args)}", file=sys.stderr)
    command = [sys.executable, str(TOOLS / f"bench_{name}.py"), *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        lines = []
        for line in child.stdout:
            lines.append(line)
            if not line.startswith("{"):
                sys.stderr.write(line)
    if not lines or not lines[-1].startswith("{"):
        raise SystemExit(f"bench_{name}.py found nothing (exit code {child.returncode})")
    return json.loads(lines[-1])


def ratio(found: dict[str, float]) -> str:
    return f"**{found['median']:.2f}** ({found['min']:.2f} .. {found['max']:.2f})"


def loading(found: dict[str, Any]) -> list[str]:
    rows = ["| to first logits | ours | transformers | ours faster by |", "| --- | --- | --- | --- |"]
    for result in found["results"]:
        for figure, what in (("start", "from the start of the process"), ("call", "from the call")):
            ours, theirs = (result[f"{side} {figure}"]["median"] for side in ("ours", "transformers"))
            name = result["model"].removeprefix("random:")
            rows.append(f"| {name}, {what} | {ours:.2f} s | {theirs:.2f} s | {ratio(result[f'ratio {figure}'])} |")
    return rows


def speeds(found: list[dict[str, Any]]) -> list[str]:
    """A row for each side that any of the benches had, a column for each thing that was timed."""
    results = [result for bench in found for result in bench["results"]]
    names = dict.fromkeys(name for result in results for name in result["sides"])
    rows = [f"| tokens/s | {' | '.join(result['what'] for result in results)} | largest error of a logit |"]
    rows.append("| --- |" + " --- |" * (len(results) + 1))
    for name in names:
        cells = []
        for side in (result["sides"].get(name) for result in results):
            cells.append("" if side is None else f"{side['tokens/s']['median']:,.0f}, × {ratio(side['ratio'])}")
        error = next((bench["largest logit error"][name] for bench in found if name in bench["largest logit error"]), None)
        rows.append(f"| {name} | {' | '.join(cells)} | {'' if error is None else f'{error:.1e}'} |")
    limits = [
        f"{r['what']}: {r['share']:.0%} of {'the GEMM peak' if 'gemm flops' in r else 'the bandwidth'}"
        for r in results
        if "share" in r
    ]
    return [*rows, "", f"Ours in float32 against this machine's own limits: {'; '.join(limits)}."]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:gpt2", metavar="random:SIZE")
    parser.add_argument("--pairs", default="5")
    parser.add_argument("--nanogpt", metavar="FILE", help="nanoGPT's model.py")
    parser.add_argument("--only", action="append", choices=("load", "prefill", "decode"), help="(default: all)")
    args = parser.parse_args()
    wanted = args.only or ["load", "prefill", "decode"]
    found: dict[str, dict[str, Any]] = {}
    if "load" in wanted:
        found["load"] = run("load", args.model, "--pairs", args.pairs)
    if "prefill" in wanted:
        found["prefill"] = run(
            "prefill", args.model, "--pairs", args.pairs, *(["--nanogpt", args.nanogpt] if args.nanogpt else [])
        )
    if "decode" in wanted:
        found["decode"] = run("decode", args.model, "--pairs", args.pairs)
    print("\n".join(loading(found["load"]) if "load" in found else []))
    both = [found[name] for name in ("prefill", "decode") if name in found]
    print("\n" + "\n".join(speeds(both) if both else []))
    print(json.dumps({"benchmark": "all", "found": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
