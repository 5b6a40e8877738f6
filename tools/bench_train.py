"""How fast is a training step? Ours beside nanoGPT's, each in a process of its own, in turn (A B A B).

    python tools/bench_train.py [--run gpt2:4x64 --run char:64x256 ...] [--nanogpt nanoGPT/model.py] [--gpu]

A run is SIZE:BxT; sizes are gpt2, mini (shakespeare-mini), char and char-cpu (nanoGPT's character models). Same threads, fused
AdamW, gradients clipped to a norm of 1. Ours is the step of `gpt2 train`, and once more with checkpointing, for its memory;
nanoGPT's that of its train.py around its unchanged model.py. Beside it, the share of the GEMM rate. Ends with one line of JSON.
"""

import argparse
import importlib.util
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from beside import Side
from torch import Tensor

from gpt2.bench import Spread, interleaved, machine, ratio
from gpt2.config import GPT2Config
from gpt2.measure.allocator import keep_freed_memory
from gpt2.model import GPT2
from gpt2.optim import adamw
from gpt2.train.cost import gemm_rate, operations
from gpt2.train.loss import WithLoss
from gpt2.train.models import prepare
from gpt2.train.parallel import Ranks
from gpt2.train.recipe import Recipe
from gpt2.train.step import Feed, optimizer_step

SIZES = {  # layers, width, heads, positions, vocabulary
    "gpt2": (12, 768, 12, 1024, 50257),
    **{"char": (6, 384, 6, 256, 65), "char-cpu": (4, 128, 4, 64, 65), "mini": (5, 160, 5, 256, 2048)},
}
RUNS = ("gpt2:4x64", "gpt2:4x256", "gpt2:1x1024", "char:64x256", "char-cpu:12x64")


def parsed(text: str, gpu: bool, **settings: Any) -> tuple[GPT2Config, Recipe]:
    """Return the shape and the recipe of ``SIZE:BxT``."""
    size, shape = text.split(":")
    (layers, d, heads, positions, vocab), (rows, tokens) = SIZES[size], map(int, shape.split("x"))
    bend = "gelu_new" if size == "gpt2" else "gelu"  # as the recipes have it
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab, positions, d, layers, heads, activation_function=bend, **rates, bos_token_id=0, eos_token_id=0)
    precision = "bf16" if gpu else "float32"
    return config, Recipe(batch_size=rows, context=tokens, dropout=0.0, attn_dropout=0.0, precision=precision, **settings)


class Worker:
    """Takes steps in a process of its own."""

    def __init__(self, make: Callable[..., Callable[[], object]], *args: Any) -> None:
        self.step = make(*args)

    def steps(self, _: Tensor, count: int) -> dict[str, float]:
        """Return the seconds and CPU seconds of a step, of ``count`` in a row, and the most memory so far."""
        began = _clock()
        for _ in range(count):
            self.step()
        wall, cpu = ((now - then) / count for now, then in zip(_clock(), began, strict=True))
        on_gpu, system = torch.cuda.is_initialized(), resource.getrusage(resource.RUSAGE_SELF)
        return {"seconds": wall, "cpu": cpu, "peak": torch.cuda.max_memory_allocated() if on_gpu else system.ru_maxrss * 1024}


def _clock() -> tuple[float, float]:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def ours(text: str, gpu: bool, checkpointing: bool) -> Callable[[], object]:
    keep_freed_memory()
    config, recipe = parsed(text, gpu, compile=gpu, checkpointing=checkpointing)
    model, device = GPT2(config), "cuda" if gpu else "cpu"
    prepare(model.to(device), recipe)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, 100_000).astype(np.int32)
    scored, optimizer, steps = WithLoss(model), adamw(model, recipe.optim), iter(range(1 << 30))
    feed = Feed(ids, Ranks(device=torch.device(device)))
    return lambda: optimizer_step(scored, optimizer, feed, recipe, next(steps), 1e-5)


def nanogpt(text: str, gpu: bool, file: Path, optimizer_for: str) -> Callable[[], object]:
    """``optimizer_for`` "cuda" makes nanoGPT's own configure_optimizers choose the fused AdamW, which runs on a CPU as well."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", file)
    code = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    c, recipe = parsed(text, gpu)
    device, tokens = "cuda" if gpu else "cpu", recipe.context
    sizes = {
        "n_layer": c.n_layer,
        "n_embd": c.n_embd,
        "n_head": c.n_head,
        "block_size": c.n_positions,
        "vocab_size": c.vocab_size,
    }
    model = code.GPT(code.GPTConfig(**sizes, dropout=0.0, bias=True)).train().to(device)
    optimizer = model.configure_optimizers(0.1, 1e-5, (0.9, 0.95), optimizer_for)
    scored, ids = torch.compile(model) if gpu else model, torch.randint(c.vocab_size, (100_000,))

    def step() -> None:
        at = torch.randint(len(ids) - tokens, (recipe.batch_size,))
        x, y = (torch.stack([ids[i + shift : i + shift + tokens] for i in at]) for shift in (0, 1))
        if gpu:
            x, y = (each.pin_memory().to("cuda", non_blocking=True) for each in (x, y))
        with torch.autocast(device, torch.bfloat16, enabled=gpu):
            _, loss = scored(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def measured(text: str, sides: dict[str, tuple[Any, ...]], args: argparse.Namespace) -> dict[str, Any]:
    """Measure one run of all sides in turn, and print it as a table."""
    config, recipe = parsed(text, args.gpu)
    running = {name: Side(name, Worker, make, text, args.gpu, *more) for name, (make, *more) in sides.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}

    def take(name: str, count: int) -> float:
        found[name].append(running[name]._ask("steps", torch.zeros(1), count)[0])
        return found[name][-1]["seconds"]

    for name in sides:  # their first steps make the optimizer's state and the allocator's pools
        take(name, 2)
    count, limits = max(1, round(args.seconds / min(take(name, 1) for name in sides))), []
    runs = {name: lambda name=name: take(name, count) for name in sides}
    where = torch.device("cuda" if args.gpu else "cpu")
    runs["GEMM"] = lambda: limits.append(gemm_rate(config, recipe, where, recipe.precision)) or 0.0
    times = interleaved(runs, args.pairs)
    rates = Spread.of(limits[1:])
    print(f"\n{text}, tokens/s: median (min .. max) of {args.pairs} turns of {count} steps; ratio: ours to it")
    rows, cpu = {}, {name: [each["cpu"] for each in turns[-args.pairs :]] for name, turns in found.items()}
    for name in sides:
        speed = Spread.of(recipe.batch_size * recipe.context / value for value in times[name])
        to_it, peak = ratio(times[name], times["ours"]), found[name][-1]["peak"]
        share = operations(config, recipe.context) * speed.median / rates.median
        by_cpu = vars(ratio(cpu[name], cpu["ours"]))
        rows[name] = {"tokens/s": vars(speed), "ours to it": vars(to_it), "ours to it, cpu": by_cpu}
        rows[name] |= {"share of GEMM": share, "peak bytes": peak}
        shown = f"{speed.median:,.0f} ({speed.min:,.0f} .. {speed.max:,.0f})", f"× {to_it}", f"{share:.0%} of GEMM"
        print(f"  {name:24}{shown[0]:32}{shown[1]:26}{shown[2]:14}{peak / 1e9:.2f} GB  cpu × {by_cpu['median']:.2f}", flush=True)
    return {"run": text, "pairs": args.pairs, "steps a turn": count, "gemm flops": vars(rates), "sides": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="append", metavar="SIZE:BxT", help=f"(default: {', '.join(RUNS)})")
    parser.add_argument("--nanogpt", type=Path, metavar="FILE", help="nanoGPT's model.py; left out without")
    parser.add_argument("--only", action="append", metavar="WORD", help="only sides whose name holds WORD, and ours")
    parser.add_argument("--pairs", type=int, default=5, help="turns of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="least time of a turn (default: %(default)s)")
    parser.add_argument("--gpu", action="store_true", help="on the GPU, in bfloat16 and compiled")
    args = parser.parse_args()
    sides: dict[str, tuple[Any, ...]] = {"ours": (ours, False), "ours, checkpointing": (ours, True)}
    if args.nanogpt:
        sides["nanoGPT, fused AdamW"] = (nanogpt, args.nanogpt, "cuda")
        sides["nanoGPT, as shipped"] = (nanogpt, args.nanogpt, "cpu")
    sides = {name: each for name, each in sides.items() if name == "ours" or not args.only or any(w in name for w in args.only)}
    results = [measured(run, sides, args) for run in args.run or RUNS]
    here = machine()
    print(f"\n{here['processor']}, {here['threads']} threads, load {here['load']}; {here['versions']}")
    print(json.dumps({"benchmark": "train", "machine": here, "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
