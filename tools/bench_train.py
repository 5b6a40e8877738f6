"""How fast is a training step? Ours beside nanoGPT's and transformers' Trainer's, each in a process of its own, in turn.

    python tools/bench_train.py [--run gpt2:4x64 --run gpt2:4x256 --run char:64x256 ...] [--nanogpt nanoGPT/model.py]

A run is SIZE:BxT, or SIZE:BxT:DROPOUT; sizes are gpt2 (12 layers, 768 wide, 50,257 ids), mini (shakespeare-mini), char and
char-cpu (nanoGPT's character models, 6 layers 384 wide and 4 layers 128 wide, 65 ids). Same threads, same optimizer (fused
AdamW, gradients clipped to a norm of 1), float32 weights. Ours is the step of `gpt2 train`, and once more with checkpointing,
for its memory; nanoGPT's that of its train.py around its unchanged model.py, once with the optimizer it picks on a CPU;
transformers' Trainer is timed by a callback, from the beginning of a step to its end, and left out where accelerate is not
installed. Peak memory is what the system counts for each process, from its start. Beside it: how much of the GEMM speed that
torch.mm reaches here the operations of a step make, by the time it took. With --gpu all of them run on the GPU as they are used
there: bfloat16 by autocast, compiled, memory as CUDA counts it; then say

    python tools/bench_train.py --gpu --run gpt2:16x1024 --run char:64x256 --nanogpt nanoGPT/model.py

Ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

SIZES = {  # layers, width, heads, positions, vocabulary
    "gpt2": (12, 768, 12, 1024, 50257),
    "char": (6, 384, 6, 256, 65),
    "char-cpu": (4, 128, 4, 64, 65),
    "mini": (5, 160, 5, 256, 2048),  # shakespeare-mini
}
RUNS = ("gpt2:4x64", "gpt2:4x256", "gpt2:1x1024", "char:64x256", "char-cpu:12x64")


@dataclass(frozen=True)
class Run:
    """One shape of model and batch."""

    size: str
    rows: int
    tokens: int
    dropout: float = 0.0

    @classmethod
    def of(cls, text: str) -> Run:
        size, shape, *dropout = text.split(":")
        rows, tokens = map(int, shape.split("x"))
        return cls(size, rows, tokens, *map(float, dropout))

    @property
    def config(self) -> Any:
        from gpt2.config import GPT2Config

        layers, d, heads, positions, vocab = SIZES[self.size]
        rates = {f"{name}_pdrop": self.dropout for name in ("resid", "embd", "attn")}
        bend = "gelu_new" if self.size == "gpt2" else "gelu"  # as the recipes have it
        return GPT2Config(vocab, positions, d, layers, heads, activation_function=bend, **rates, bos_token_id=0, eos_token_id=0)

    def recipe(self, gpu: bool, **settings: Any) -> Any:
        from gpt2.train.recipe import Recipe

        rates = {"dropout": self.dropout, "attn_dropout": self.dropout, "precision": "bf16" if gpu else "float32"}
        return Recipe(batch_size=self.rows, context=self.tokens, **rates, **settings)


# In the worker: a function that takes one step


def ours(run: Run, args: argparse.Namespace, checkpointing: bool = False) -> Any:
    import numpy as np
    import torch

    from gpt2.measure.allocator import keep_freed_memory
    from gpt2.model import GPT2
    from gpt2.train.feed import Feed
    from gpt2.train.loss import Scored
    from gpt2.train.models import prepare
    from gpt2.train.optim import adamw
    from gpt2.train.parallel import Ranks
    from gpt2.train.step import optimizer_step

    keep_freed_memory()
    model, recipe = GPT2(run.config), run.recipe(args.gpu, compile=args.gpu, checkpointing=checkpointing)
    prepare(model.to(device(args)), recipe)
    ids = np.random.default_rng(0).integers(0, run.config.vocab_size, 100_000).astype(np.int32)
    scored, optimizer, steps = Scored(model), adamw(model, recipe.optim), iter(range(1 << 30))
    feed = Feed(ids, Ranks(device=torch.device(device(args))))
    return lambda: optimizer_step(scored, optimizer, feed, recipe, next(steps), 1e-5)


def nanogpt(run: Run, args: argparse.Namespace, optimizer_for: str = "cuda") -> Any:
    """``optimizer_for`` "cuda" makes nanoGPT's own configure_optimizers choose the fused AdamW, which runs on a CPU as well."""
    import torch

    spec = importlib.util.spec_from_file_location("nanogpt_model", args.nanogpt)
    code = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = code
    spec.loader.exec_module(code)
    layers, d, heads, positions, vocab = SIZES[run.size]
    sizes = {"n_layer": layers, "n_embd": d, "n_head": heads, "block_size": positions, "vocab_size": vocab}
    model = code.GPT(code.GPTConfig(**sizes, dropout=run.dropout, bias=True)).train()
    model.to(device(args))
    optimizer = model.configure_optimizers(0.1, 1e-5, (0.9, 0.95), optimizer_for)
    scored = torch.compile(model) if args.gpu else model
    ids = torch.randint(vocab, (100_000,))

    def step() -> None:
        at = torch.randint(len(ids) - run.tokens, (run.rows,))
        x, y = (torch.stack([ids[i + shift : i + shift + run.tokens] for i in at]) for shift in (0, 1))
        if args.gpu:
            x, y = (each.pin_memory().to("cuda", non_blocking=True) for each in (x, y))
        with torch.autocast(device(args), torch.bfloat16, enabled=args.gpu):
            _, loss = scored(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def trainer(run: Run, args: argparse.Namespace) -> Any:
    """The Trainer keeps its own loop: what :func:`worker` does for the others happens here between its steps."""
    import tempfile

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    layers, d, heads, positions, vocab = SIZES[run.size]
    rates = {f"{name}_pdrop": run.dropout for name in ("resid", "embd", "attn")}
    sizes = {"n_layer": layers, "n_embd": d, "n_head": heads, "n_positions": positions, "vocab_size": vocab}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0, use_cache=False))

    class Windows(torch.utils.data.Dataset):
        ids = torch.randint(vocab, (100_000,))

        def __len__(self) -> int:
            return 1 << 20

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            at = index * 7919 % (len(self.ids) - run.tokens)
            window = self.ids[at : at + run.tokens]
            return {"input_ids": window, "labels": window}

    class Stops(TrainerCallback):
        def __init__(self) -> None:
            self.answers, self.left, self.begin = None, 0, None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if self.left == 0:
                self.left = next_order()
                self.begin = clock()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.left -= 1
            if self.left == 0:
                answer(self.begin)

    with tempfile.TemporaryDirectory() as folder:
        settings = {"max_grad_norm": 1.0, "optim": "adamw_torch_fused", "learning_rate": 1e-5, "weight_decay": 0.1}
        silent = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        on = {"bf16": True, "torch_compile": True} if args.gpu else {"use_cpu": True, "dataloader_pin_memory": False}
        arguments = TrainingArguments(folder, per_device_train_batch_size=run.rows, max_steps=1 << 20, **settings, **silent, **on)
        Trainer(model, arguments, train_dataset=Windows(), callbacks=[Stops()]).train()


SIDES = {
    "ours": ours,
    "ours, checkpointing": partial(ours, checkpointing=True),
    "nanoGPT, fused AdamW": nanogpt,
    "nanoGPT, as shipped": partial(nanogpt, optimizer_for="cpu"),
    "transformers' Trainer": trainer,
}

out = None  # the worker's real stdout; whatever a library prints goes to stderr


def device(args: argparse.Namespace) -> str:
    return "cuda" if args.gpu else "cpu"


def clock() -> tuple[float, float]:
    """Wall and processor seconds, when all that was asked for is done."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def next_order() -> int:
    """Wait for how many steps to take; the end of the input ends the process."""
    line = sys.stdin.readline()
    if not line:
        out.flush()
        os._exit(0)
    return int(line)


def answer(begin: tuple[float, float]) -> None:
    wall, cpu = (now - then for now, then in zip(clock(), begin, strict=True))
    import torch

    on_gpu = torch.cuda.is_initialized()
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": wall, "cpu seconds": cpu, "peak": peak}), file=out, flush=True)


def worker(side: str, run: Run, args: argparse.Namespace) -> None:
    """Take as many steps as each line of stdin says, and answer with the time they took."""
    global out
    out, sys.stdout = sys.stdout, sys.stderr
    step = SIDES[side](run, args)
    while True:
        count = next_order()
        begin = clock()
        for _ in range(count):
            step()
        answer(begin)


# In the bench itself


class Side:
    """One worker, started once for a run; it waits while the others are at it."""

    def __init__(self, name: str, run: str, args: argparse.Namespace) -> None:
        self.name, self.peak, self.cpu = name, 0, []
        command = [sys.executable, __file__, "--worker", name, "--run", run]
        command += ["--nanogpt", str(args.nanogpt)] if args.nanogpt else []
        command += ["--gpu"] if args.gpu else []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def steps(self, count: int) -> float:
        """Seconds of each of ``count`` steps in a row."""
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self.process.wait()}; run it alone: --worker {self.name!r}")
        reply = json.loads(line)
        self.peak = reply["peak"]
        self.cpu.append(reply["cpu seconds"] / count)
        return reply["seconds"] / count

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measured(text: str, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One run of all sides in turn, printed as a table."""
    import torch

    from gpt2.bench import Spread, interleaved, ratio
    from gpt2.train.speed import gemm_rate, operations

    run, where = Run.of(text), torch.device(device(args))
    recipe = run.recipe(args.gpu)
    with contextlib.ExitStack() as stack:
        sides = []
        for name in names:
            sides.append(Side(name, text, args))
            stack.callback(sides[-1].close)
        for side in sides:  # their first steps make the optimizer's state and the allocator's pools
            side.steps(2)
        count = max(1, round(args.seconds / min(side.steps(1) for side in sides)))
        for side in sides:
            side.cpu.clear()
        limits: list[float] = []
        runs = {side.name: lambda side=side: side.steps(count) for side in sides}
        runs["GEMM"] = lambda: limits.append(gemm_rate(run.config, recipe, where, recipe.precision)) or 0.0
        times = interleaved(runs, args.pairs)
        rates = Spread.of(limits[1:])
    print(f"\n{text}, tokens/s: median (min .. max) of {args.pairs} turns of {count} steps; ratio: ours to it")
    rows = {}
    for side in sides:
        speed = Spread.of(run.rows * run.tokens / value for value in times[side.name])
        rows[side.name] = {
            "tokens/s": vars(speed),
            "ours to it": vars(ratio(times[side.name], times["ours"])),
            "ours to it, cpu": vars(ratio(side.cpu[1:], sides[0].cpu[1:])),
            "share of GEMM": operations(run.config, run.tokens) * speed.median / rates.median,
            "peak bytes": side.peak,
            "memory, ours to it": sides[0].peak / side.peak,
        }
        shown = f"{speed.median:,.0f} ({speed.min:,.0f} .. {speed.max:,.0f})", f"× {ratio(times[side.name], times['ours'])}"
        memory = f"{side.peak / 1e9:.2f} GB  × {rows[side.name]['memory, ours to it']:.2f}"
        cpu = rows[side.name]["ours to it, cpu"]["median"]
        share = f"{rows[side.name]['share of GEMM']:.0%} of GEMM"
        print(f"  {side.name:24}{shown[0]:32}{shown[1]:26}{share:14}{memory:20}cpu × {cpu:.2f}", flush=True)
    print(f"  torch.mm: {rates.median / 1e9:.0f} GFLOP/s ({rates.min / 1e9:.0f} .. {rates.max / 1e9:.0f})")
    return {"run": text, "pairs": args.pairs, "steps a turn": count, "gemm flops": vars(rates), "sides": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="append", metavar="SIZE:BxT", help=f"(default: {', '.join(RUNS)})")
    parser.add_argument("--nanogpt", type=Path, metavar="FILE", help="nanoGPT's model.py; left out without")
    parser.add_argument("--only", action="append", metavar="WORD", help="only sides whose name holds WORD, and ours")
    parser.add_argument("--pairs", type=int, default=5, help="turns of each side (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="least time of a turn (default: %(default)s)")
    parser.add_argument("--gpu", action="store_true", help="on the GPU, in bfloat16 and compiled")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, Run.of(args.run[0]), args)
    absent = [] if args.nanogpt else ["nanoGPT (no --nanogpt)"]
    if importlib.util.find_spec("accelerate") is None:
        absent.append("transformers' Trainer (accelerate is not installed)")
    left_out = tuple(each.partition(" (")[0] for each in absent)
    names = [name for name in SIDES if not name.startswith(left_out)] if left_out else list(SIDES)
    names = [name for name in names if name == "ours" or not args.only or any(word in name for word in args.only)]
    results = [measured(run, names, args) for run in args.run or RUNS]

    from gpt2.bench import machine

    here = machine("accelerate")
    print(f"\n{here['processor']}, {here['threads']} threads, load {here['load']}; {here['versions']}")
    if absent:
        print(f"left out: {', '.join(absent)}")
    print(json.dumps({"benchmark": "train", "machine": here, "left out": absent, "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
