"""How much longer do commands take beside one other busy process? Ours, transformers' and nanoGPT's equivalents, in turn.

    python tools/bench_busy.py [--nanogpt nanoGPT/model.py] [--rounds 2] [--minutes 7.5]

Each is a fresh process, from its start to its end, in three conditions: quiet; half (ours only: quiet, with half of the cores);
busy (all cores, and a process beside it that computes without a pause). A round is every command in every condition; a command
is measured again only if that fits into the minutes. The goal: busy takes at most 1.5 times as long as half. Run it on a
machine that does nothing else. The commands: 60 steps of the recipe finetune-shakespeare (transformers: its Trainer; nanoGPT:
its model and optimizer in the steps of its train.py), 24 sampled tokens of a model of gpt2's shape, and shakespeare-mini
compared with itself in bfloat16 on 4,096 tokens (transformers: logits of both, and their KL divergence). Ends stdout with one
JSON line.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STEPS, TOKENS, COMPARED, PROMPT = 60, 24, 4096, "ROMEO:\nWhat"
CONDITIONS = ("quiet", "half", "busy")
GOAL = 1.5  # times what half of the cores take
TOOLS = Path(__file__).resolve().parent
TRAIN = ("train", "finetune-shakespeare", "--init", "shakespeare-mini", "--fresh", "--set", f"steps={STEPS}")
COMPARE = ("compare", "shakespeare-mini", "shakespeare-mini:bf16", "--tokens", str(COMPARED))


# In the worker: what others do in the place of our commands


def transformers_generates(folder: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=True, pad_token_id=0)
    print(tokenizer.decode(out[0]))


def nanogpt_generates(folder: str, file: str) -> None:
    from beside import NanoGPT
    from transformers import AutoTokenizer

    import gpt2

    tokenizer, side = AutoTokenizer.from_pretrained(folder), NanoGPT(Path(file), gpt2.load(folder))
    print(tokenizer.decode(side.model.generate(tokenizer(PROMPT, return_tensors="pt").input_ids, TOKENS)[0]))


def transformers_compares() -> None:
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import gpt2
    from gpt2.data.shakespeare import play

    folder = Path(gpt2.__file__).parent / "assets" / "shakespeare-mini"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    ids = tokenizer(play("twelfth-night"), return_tensors="pt").input_ids[:, :COMPARED].view(-1, 256)
    total = 0.0
    with torch.inference_mode():
        for rows in ids.split(4):
            a, b = (F.log_softmax(model(rows).logits.double(), -1) for model in models)
            total += float((a.exp() * (a - b)).sum())
    print(f"KL {total / COMPARED:.3e} nats a token")


WORKERS = {each.__name__: each for each in (transformers_generates, nanogpt_generates, transformers_compares)}


# In the bench itself


@contextmanager
def condition(name: str, cores: list[int]) -> Iterator[None]:
    """Give new processes half of the cores, or keep another process busy, while the block runs."""
    spinning = None
    if name == "half":
        os.sched_setaffinity(0, cores[: max(1, len(cores) // 2)])
    if name == "busy":
        spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        if spinning is not None:
            spinning.kill()
            spinning.wait()


def seconds(command: list[str], given: str) -> tuple[float, float]:
    """Wall and processor seconds of a command; a failed one ends the benchmark with its last lines."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    with tempfile.TemporaryFile() as said:
        begin, before = time.perf_counter(), os.times()
        done = subprocess.run(command, input=given.encode(), stdout=said, stderr=said, env=environment)
        wall, after = time.perf_counter() - begin, os.times()
        if done.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command)} failed:\n{said.read().decode()[-2000:]}")
    return wall, sum(after[2:4]) - sum(before[2:4])


def commands(work: Path, nanogpt: Path | None, absent: list[str]) -> dict[tuple[str, str], tuple[list[str], str]]:
    """Return, by task and side, the command and what it reads from stdin."""
    import importlib.util

    from beside import SharedWeights

    folder = str(SharedWeights("random:gpt2", work).source)
    ours = [sys.executable, "-m", "gpt2"]
    other = [sys.executable, __file__, "--worker"]
    trained = [sys.executable, str(TOOLS / "bench_train.py"), "--run", "mini:8x128:0.1", "--worker"]
    generate = ["generate", folder, "--prompt", PROMPT, "--max-new-tokens", str(TOKENS), "--seed", "1"]
    table = {
        ("train", "ours"): ([*ours, *TRAIN, "--out", str(work / "run")], ""),
        ("train", "transformers"): ([*trained, "transformers' Trainer"], f"{STEPS}\n"),
        ("train", "nanoGPT"): ([*trained, "nanoGPT, fused AdamW", "--nanogpt", str(nanogpt)], f"{STEPS}\n"),
        ("generate", "ours"): ([*ours, *generate], ""),
        ("generate", "transformers"): ([*other, "transformers_generates", folder], ""),
        ("generate", "nanoGPT"): ([*other, "nanogpt_generates", folder, str(nanogpt)], ""),
        ("compare", "ours"): ([*ours, *COMPARE], ""),
        ("compare", "transformers"): ([*other, "transformers_compares"], ""),
    }
    if nanogpt is None:
        absent.append("nanoGPT (no --nanogpt)")
        table = {key: each for key, each in table.items() if key[1] != "nanoGPT"}
    if importlib.util.find_spec("accelerate") is None:
        absent.append("transformers' Trainer (accelerate is not installed)")
        del table["train", "transformers"]
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, metavar="FILE", help="nanoGPT's model.py; left out without")
    parser.add_argument("--rounds", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument(
        "--minutes", type=float, default=7.5, help="measure nothing again that would end later (default: %(default)s)"
    )
    parser.add_argument("--worker", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        WORKERS[args.worker[0]](*args.worker[1:])
        return 0
    started = time.perf_counter()
    from gpt2.bench import Spread, ratio

    cores, absent, longest = sorted(os.sched_getaffinity(0)), [], {}
    with tempfile.TemporaryDirectory(prefix="gpt2-busy-") as folder:
        table = commands(Path(folder), args.nanogpt, absent)
        taken = {key: {name: [] for name in CONDITIONS if name != "half" or key[1] == "ours"} for key in table}
        for task in list(dict.fromkeys(task for task, _ in table)) * args.rounds:
            begin = time.perf_counter()
            if begin - started + longest.get(task, 0.0) > 60 * args.minutes:
                continue
            for key in (key for key in table if key[0] == task):
                for name, values in taken[key].items():
                    with condition(name, cores):
                        values.append(seconds(*table[key]))
                    wall, cpu = values[-1]
                    print(f"  {', '.join(key)}, {name}: {wall:.1f} s, cpu {cpu:.1f} s", file=sys.stderr, flush=True)
            longest[task] = max(longest.get(task, 0.0), time.perf_counter() - begin)
    print(f"Seconds, median (min .. max); {len(cores)} cores. Goal: busy / half at most {GOAL}.\n")
    print("| | | turns | quiet | half of the cores | busy | busy / quiet | busy / half | goal |\n|" + " --- |" * 9)
    results = []
    for (task, side), conditions in taken.items():
        times = {name: [wall for wall, _ in values] for name, values in conditions.items()}
        cells = [str(Spread.of(times[name])) if name in times else "" for name in CONDITIONS]
        ratios = {f"busy/{name}": ratio(times["busy"], times[name]) for name in ("quiet", "half") if name in times}
        share = ratios.get("busy/half")
        goal = "" if share is None else "met" if share.median <= GOAL else "**not met**"
        shown = " | ".join([*cells, str(ratios["busy/quiet"]), str(share or ""), goal])
        print(f"| {task} | {side} | {len(times['busy'])} | {shown} |")
        results.append({"task": task, "side": side, **conditions, **{name: vars(each) for name, each in ratios.items()}})
    from beside import print_result

    return print_result("busy", {"left out": absent, "wall and cpu seconds": results})


if __name__ == "__main__":
    raise SystemExit(main())
