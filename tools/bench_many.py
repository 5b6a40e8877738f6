"""What `gpt2 compare A B C` and `--save` cost above the forward passes that they need, in CPU seconds of one process.

    python tools/bench_many.py [--models 3] [--tokens 8192] [--pairs 3]      several models
    python tools/bench_many.py --save [--top 100] [--tokens 8192]            a reference, written and read
    python tools/bench_many.py --profile cpu.txt                             where the rest goes (cProfile)

The models are `random:gpt2`, written to disk, so they are loaded as files are; with --save, one narrow block with GPT-2's
vocabulary. In turn, A B A B, after a warm-up: A loads each model, runs it over the text and throws the logits away; B is the
whole comparison, or the pass with its logits saved. CPU seconds are user and system time of the process, since wall time means
little on a shared machine. Where others work, turns still differ by a few percent: `whole / its passes` compares B with the
passes that it made itself. With --save, `dd` writes as many bytes to the same disk in the same turn, and the file is read as a
comparison reads it. Ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `gpt2` sets it, before torch is loaded

import torch

import gpt2
from gpt2.bench import Spread
from gpt2.checkpoint.export import export
from gpt2.comparison.many import compare_many
from gpt2.comparison.passage import open_passage
from gpt2.comparison.saving import Keep, run_over, save_reference
from gpt2.comparison.sides.checkpoint_side import RunningModule
from gpt2.comparison.sides.opening import open_side
from gpt2.config import GPT2Config
from gpt2.measure.allocator import keep_freed_memory
from gpt2.model import GPT2


class Seconds(dict[str, float]):
    """CPU and wall seconds of what is called, by its name."""

    def of(self, name: str, call: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter(), _cpu()
        call()
        self[name] = _cpu() - cpu
        self[f"{name}, wall"] = time.perf_counter() - wall


def _cpu() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@contextmanager
def passes_within(found: Seconds) -> Iterator[None]:
    """Add up the CPU seconds of forward passes over the text that are made inside; the floor of noise counts as no pass."""
    plain = RunningModule.logits

    def timed(running: RunningModule, ids: torch.Tensor) -> torch.Tensor:
        begin = _cpu()
        logits = plain(running, ids)
        found["its passes"] = found.get("its passes", 0.0) + _cpu() - begin
        return logits

    with mock.patch.object(RunningModule, "logits", timed):
        yield


def passes(names: list[str], tokens: int, found: Seconds) -> None:
    """Load each model, and run it over the text."""
    load = forward = 0.0
    for name in names:
        side = open_side(name, offline=True)
        passage = open_passage(None, tokens, [side], [side.tokenizer()], 0)
        begin = _cpu()
        with side.running() as running:
            loaded = _cpu()
            run_over(running.logits, passage, lambda done: None)
            forward += _cpu() - loaded
        load += loaded - begin
    found["forward"], found["load"] = forward, load


def read(path: Path) -> None:
    """Read a reference as a comparison does: every row, and its checksum."""
    side = open_side(f"trace:{path}", offline=True)
    assert side.recording is not None
    with side.running() as running, torch.inference_mode():
        for inputs, _ in side.recording.windows.batches(side.recording.ids):
            running.logits(inputs) if "logits" in side.shows else [running.top(torch.cat((row, row[:1]))) for row in inputs]


def save(name: str, folder: Path, args: argparse.Namespace, found: Seconds) -> None:
    kept = folder / "kept.safetensors"
    found.of("saved", lambda: save_reference(name, Keep(kept, args.top), tokens=args.tokens, offline=True))
    found["bytes"] = size = kept.stat().st_size
    dd = ["dd", "if=/dev/zero", f"of={folder / 'dd'}", "bs=1M", f"count={max(1, size >> 20)}", "conv=fsync", "status=none"]
    found.of("dd", lambda: subprocess.run(dd, check=True))
    found.of("read", lambda: read(kept))
    for path in (kept, folder / "dd"):
        path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--pairs", type=int, default=3, help="turns A B")
    parser.add_argument("--hashes", action="store_true", help="hash the files too, as for --json and --html")
    parser.add_argument("--save", action="store_true", help="save a reference instead")
    parser.add_argument("--top", type=int, default=0, help="the likeliest tokens that --save keeps; 0: all logits")
    parser.add_argument("--dir", type=Path, help="where the models, and what is saved, are written")
    parser.add_argument("--profile", type=Path, help="profile one comparison into this file instead")
    args = parser.parse_args()
    keep_freed_memory()  # as `gpt2 compare` does
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        folder = Path(scratch)
        names = [str(folder / str(index)) for index in range(1 if args.save else args.models)]
        for index, name in enumerate(names):
            if args.save:  # gpt2's vocabulary, and a pass that costs little beside what is measured
                gpt2.save(GPT2(GPT2Config(n_embd=64, n_layer=1, n_head=1)), None, name)
            else:
                export(f"random:gpt2:{index}", name)
        if args.profile:
            with cProfile.Profile() as profile:
                compare_many(names, tokens=args.tokens, offline=True, hashes=args.hashes)
            with args.profile.open("w") as file:
                pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(40)
            return 0
        passes(names[:1], 1025, Seconds())
        turns = []
        for _ in range(args.pairs):
            found = Seconds()
            passes(names, args.tokens, found)
            if args.save:
                save(names[0], folder, args, found)
            else:
                with passes_within(found):
                    found.of("whole", lambda: compare_many(names, tokens=args.tokens, offline=True, hashes=args.hashes))
            found["above the passes"] = found["saved" if args.save else "whole"] - found["forward"] - found["load"]
            turns.append(found)
            print(", ".join(f"{name} {value:,.2f}" for name, value in found.items()), flush=True)
    result = {name: vars(Spread.of(turn[name] for turn in turns)) for name in turns[0]}
    if not args.save:
        result["whole / forward"] = vars(Spread.of(turn["whole"] / turn["forward"] for turn in turns))
        result["whole / its passes"] = vars(Spread.of(turn["whole"] / turn["its passes"] for turn in turns))
        result["whole / (load and forward)"] = vars(Spread.of(turn["whole"] / (turn["forward"] + turn["load"]) for turn in turns))
    for name in ("whole / forward", "whole / its passes", "whole / (load and forward)", "above the passes"):
        if name in result:
            print(f"{name}: {result[name]['median']:.3f} ({result[name]['min']:.3f} .. {result[name]['max']:.3f})")
    about = {"benchmark": "compare --save" if args.save else "compare many", "models": args.models, "tokens": args.tokens}
    about |= {"hashes": args.hashes}
    about |= {"top": args.top, "threads": torch.get_num_threads(), "machine": platform.machine(), "torch": torch.__version__}
    about |= {"peak bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "load": os.getloadavg()}
    print(json.dumps(about | {"seconds": result}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
