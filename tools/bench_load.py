"""How fast, and in how much memory, do weights on disk become first logits? Ours beside transformers, in one run.

    python tools/bench_load.py [random:gpt2 random:gpt2:bf16 ...] [--pairs 5]

transformers writes the checkpoint; then fresh processes load it in turn, ours and theirs, A B A B, after a warm-up of each.
Three figures of each: seconds from the start of the process, seconds from the call (imports done), peak resident memory. A
bare process that imports torch and nothing else gives the floor. First logits are those of what comes next after 16 ids, on
both sides. A `:bf16` behind the name has both convert the float32 file. Then how long `import gpt2` takes, by itself, and
`gpt2 --help`, from its process to its end: these two are held, and the exit code is 1 where they take longer than 50 ms and
0.25 s. Ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import gpt2
from gpt2.bench import Spread, ratio
from gpt2.checkpoint.names import EXPORTS, ModelName
from gpt2.parity.reference import save_with_transformers

CHILD = """
import sys, time
import torch
{imports}
ids = torch.arange(16)[None]
dtype = {{"dtype": getattr(torch, sys.argv[3])}} if sys.argv[3] else {{}}
called = time.time()
with torch.inference_mode():
    model = {load}
    logits = {logits}
    float(logits[0, -1, 0])
done = time.time()
import json, resource
memory = dict(line.split(":", 1) for line in open("/proc/self/status") if line.startswith(("VmHWM", "RssAnon", "RssFile")))
kb = {{key: int(value.split()[0]) * 1024 for key, value in memory.items()}}
print(json.dumps({{"start": done - float(sys.argv[2]), "call": done - called, "peak": kb["VmHWM"], "anonymous": kb["RssAnon"]}}))
"""
SIDES = {
    "ours": {
        "imports": "import gpt2; gpt2.load; from gpt2.decoder import Decoder",
        "load": "gpt2.load(sys.argv[1], **dtype)",
        "logits": "Decoder(model).prefill(ids)[:, None]",
    },
    "transformers": {
        "imports": "from transformers import GPT2LMHeadModel",
        "load": "GPT2LMHeadModel.from_pretrained(sys.argv[1], **dtype)",
        "logits": "model(ids, logits_to_keep=1).logits",
    },
    "torch alone": {"imports": "", "load": "torch.zeros(1, 1, 1)", "logits": "model"},
}


def once(side: str, folder: str, dtype: str) -> dict[str, float]:
    code = CHILD.format(**SIDES[side])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", code, folder, str(time.time()), dtype]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def bench(name: str, pairs: int) -> dict:
    """Medians, spreads, and the ratio transformers / ours pair by pair."""
    parsed = ModelName.parse(name, EXPORTS)
    with tempfile.TemporaryDirectory(prefix="gpt2-bench-") as folder:
        model = gpt2.load(parsed.base)
        save_with_transformers(model.config, model.state_dict(), Path(folder))
        size = (Path(folder) / "model.safetensors").stat().st_size
        runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for index in range(pairs + 1):
            for side in SIDES:
                run = once(side, folder, parsed.dtype or "")
                if index:  # the first of each warms the page cache and the bytecode
                    runs[side].append(run)
    result: dict = {"model": name, "file_bytes": size, "pairs": pairs}
    for figure in ("start", "call", "peak", "anonymous"):
        for side in SIDES:
            result[f"{side} {figure}"] = vars(Spread.of(run[figure] for run in runs[side]))
        theirs, ours = ([run[figure] for run in runs[side]] for side in ("transformers", "ours"))
        result[f"ratio {figure}"] = vars(ratio(theirs, ours))
    floor = result["torch alone peak"]["median"]
    result["copies of the weights"] = {
        side: (result[f"{side} peak"]["median"] - floor) / size for side in ("ours", "transformers")
    }
    return result


IMPORT = "import time; begin = time.perf_counter(); import gpt2; print(time.perf_counter() - begin)"
HELD = {"import gpt2": 0.05, "gpt2 --help": 0.25}  # seconds


def startup(runs: int) -> dict[str, dict[str, float]]:
    """Seconds that importing gpt2 and printing its help take; the first run of each warms the bytecode."""
    times: dict[str, list[float]] = {name: [] for name in HELD}
    for index in range(runs + 1):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "gpt2", "--help"], capture_output=True, check=True)
        if index:
            times["import gpt2"].append(float(done.stdout))
            times["gpt2 --help"].append(time.perf_counter() - begin)
    return {name: vars(Spread.of(values)) for name, values in times.items()}


def show(result: dict) -> None:
    print(f"\n{result['model']}: {result['file_bytes']:,} bytes, {result['pairs']} pairs, median (min .. max)")
    print(f"{'':26} {'ours':>24} {'transformers':>24} {'theirs / ours':>22}")
    for figure, title, unit, scale in (
        ("start", "process start to logits", "s", 1),
        ("call", "call to logits", "s", 1),
        ("peak", "peak memory", "MB", 1e6),
    ):
        cells = [_spread(result[f"{side} {figure}"], scale) for side in ("ours", "transformers")]
        print(f"{title + ', ' + unit:26} {cells[0]:>24} {cells[1]:>24} {_spread(result[f'ratio {figure}'], 1):>22}")
    copies = result["copies of the weights"]
    note = "(peak above torch's own, per file size)"
    print(f"{'copies of the weights':26} {copies['ours']:>24.2f} {copies['transformers']:>24.2f}   {note}")


def _spread(figure: dict[str, float], scale: float) -> str:
    return f"{figure['median'] / scale:.2f} ({figure['min'] / scale:.2f} .. {figure['max'] / scale:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["random:gpt2"], metavar="random:SIZE")
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    for name in args.models:
        if ModelName.parse(name, EXPORTS).random is None:
            parser.error(f"{name}: give random:SIZE, whose files this script has transformers write")
    results = [bench(name, args.pairs) for name in args.models]
    for result in results:
        show(result)
    begins = startup(args.pairs)
    for name, figure in begins.items():
        print(f"{name + ', s':26} {_spread(figure, 1):>24}   held to {HELD[name]}")
    held = all(begins[name]["median"] <= limit for name, limit in HELD.items())
    machine = {"cpus": os.cpu_count(), "torch": version("torch"), "transformers": version("transformers")}
    print(json.dumps({"benchmark": "load", "machine": machine, "results": results, "startup": begins, "ok": held}))
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
