"""How much does a comparison of distributions cost above the forward passes that it needs?

    python tools/bench_compare.py [random:gpt2:0 random:gpt2:1] [--tokens 16384] [--context 1024] [--pairs 3]
    python tools/bench_compare.py --weights random:gpt2-xl:0 random:gpt2-xl:1 [--dir /var/tmp]

In turn, A B A B, after a warm-up of each: A runs both models over the same windows of random ids and throws their logits away;
B is measure_pair and summarise, which runs them too and then computes every divergence, the likeliest tokens, intervals and
bins. The figure is B over A, pair by pair; beside it, the share of B spent in neither model. Also the peak memory of the whole
process, and which threads it had. With --weights, both are written to disk (gpt2-xl: 6.2 GB each; deleted afterwards) and
compared weight by weight in a fresh process: seconds, and the most memory that was this process's own (RssAnon, no mapped
file pages, sampled every 2 ms), beside the size of the largest pair of tensors. Ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import gpt2
from gpt2.bench import Spread
from gpt2.checkpoint.export import export
from gpt2.comparison.distributions import summarise
from gpt2.measure.allocator import keep_freed_memory
from gpt2.measure.metrics import Logits
from gpt2.measure.per_token import measure_pair
from gpt2.measure.windows import Windows


class Timed:
    """A model that counts the seconds spent in it."""

    def __init__(self, model: Logits) -> None:
        self.model, self.seconds = model, 0.0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        logits = self.model(ids)
        self.seconds += time.perf_counter() - begin
        return logits


@torch.inference_mode()
def forward(a: Logits, b: Logits, ids: torch.Tensor, context: int) -> float:
    """Seconds of both models over every window, one batch of logits of each alive."""
    begin = time.perf_counter()
    for inputs, _ in Windows(context).batches(ids):
        pair = a(inputs), b(inputs)
        del pair
    return time.perf_counter() - begin


def compare(a: Logits, b: Logits, ids: torch.Tensor, context: int, vocab: int) -> tuple[float, float]:
    """Seconds of the comparison, and of them those spent in neither model."""
    timed = Timed(a), Timed(b)
    begin = time.perf_counter()
    summarise(measure_pair(*timed, ids, Windows(context), vocab=vocab), torch.ones(vocab))
    seconds = time.perf_counter() - begin
    return seconds, seconds - timed[0].seconds - timed[1].seconds


WEIGHTS = """
import json, re, sys, threading, time
import torch
from gpt2.comparison.pair import _weights
from gpt2.comparison.sides.checkpoint_side import CheckpointSide

def resident(kind):
    return int(re.search(kind + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def watch():
    global most
    while not done:
        most = max(most, resident("RssAnon"))
        time.sleep(0.002)

floor, most, done = resident("RssAnon"), 0, False
sides = CheckpointSide.open(sys.argv[1]), CheckpointSide.open(sys.argv[2])
thread = threading.Thread(target=watch)
thread.start()
begin = time.perf_counter()
changes = _weights(sides, lambda what: None)
assert changes is not None
seconds, done = time.perf_counter() - begin, True
thread.join()
print(json.dumps({"seconds": seconds, "own bytes": most - floor, "peak bytes": resident("VmHWM"),
                  "distance": changes.total.distance, "tensors": len(changes.tensors),
                  "largest pair bytes": 2 * 4 * max(torch.Size(t.shape).numel() for t in changes.tensors)}))
"""


def weights(names: list[str], scratch: Path) -> int:
    """Compare two models' weights from disk, in a process that does nothing else."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        paths = []
        for index, name in enumerate(names):
            paths.append(str(Path(folder, str(index))))
            export(name, paths[-1])
        done = subprocess.run([sys.executable, "-c", WEIGHTS, *paths], stdout=subprocess.PIPE, text=True, check=True)
    row = json.loads(done.stdout) | {"threads": torch.get_num_threads(), "torch": torch.__version__, "load": os.getloadavg()}
    print(f"{row['tensors']} tensors in {row['seconds']:.1f} s; own memory {row['own bytes'] / 1e6:,.0f} MB at most, ", end="")
    print(f"the largest pair is {row['largest pair bytes'] / 1e6:,.0f} MB; with mapped pages {row['peak bytes'] / 1e6:,.0f} MB")
    print(json.dumps({"benchmark": "compare weights", "models": names} | row))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["random:gpt2:0", "random:gpt2:1"], metavar="MODEL")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--weights", action="store_true", help="compare the weights, from disk")
    parser.add_argument("--dir", type=Path, help="where to write them")
    args = parser.parse_args()
    if len(args.models) != 2:
        parser.error("give two models")
    if args.weights:
        return weights(args.models, args.dir)
    keep_freed_memory()  # as `gpt2 compare` does
    a, b = (gpt2.load(name) for name in args.models)
    vocab = min(a.config.vocab_size, b.config.vocab_size)
    ids = torch.randint(vocab, (args.tokens + 1,), generator=torch.Generator().manual_seed(0))
    warm = ids[: args.context + 1]
    forward(a, b, warm, args.context)
    compare(a, b, warm, args.context, vocab)
    plain, whole, own = [], [], []
    for index in range(args.pairs):
        plain.append(forward(a, b, ids, args.context))
        seconds, above = compare(a, b, ids, args.context, vocab)
        whole.append(seconds)
        own.append(above)
        print(f"pair {index + 1}: forward {plain[-1]:.1f} s, comparison {seconds:.1f} s, of it in neither model {above:.1f} s")
    ratios = [compared / run for compared, run in zip(whole, plain, strict=True)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ratio = Spread.of(ratios)
    print(f"comparison / both forward passes: {ratio.median:.3f} ({ratio.min:.3f} .. {ratio.max:.3f})")
    print(f"peak memory {peak / 1e6:,.0f} MB, {torch.get_num_threads()} threads")
    result = {
        "benchmark": "compare",
        "models": args.models,
        "tokens": args.tokens,
        "context": args.context,
        "pairs": args.pairs,
        "ratio": vars(ratio),
        "forward seconds": vars(Spread.of(plain)),
        "comparison seconds": vars(Spread.of(whole)),
        "seconds in neither model": vars(Spread.of(own)),
        "nanoseconds per logit pair": statistics.median(own) / args.tokens / vocab * 1e9,
        "peak bytes": peak,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
