"""How often does `gpt2 verify` call a right model imprecise, and from which size on does it refuse imprecise ones?

    python tools/verify_rounding.py right      # right models: kernels' settings, threads, orders of summing; about 15 minutes
    python tools/verify_rounding.py imprecise  # models that are right in float64 and imprecise in float32, bfloat16 or float16

Right models are random ones of 30 shapes and dialects, and the embedded one. Each setting is a process of its own, as PyTorch and
MKL read it when they are loaded. Figures are our error over what rounding explains (gpt2/measure/rounding.py), the largest of all
points; more than 2, or 3 for loss, gradients and AdamW, is refused. Ends stdout with one JSON line; exits 1 if a right run is
refused, or an imprecise one accepted that should not be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.imprecise import IMPRECISE
from support.random_models import TEXT, write_checkpoint
from support.summation import ORDERS, summing

import gpt2
from gpt2.checkpoint.loading import load_path
from gpt2.data.bpe import train_bpe
from gpt2.model import GPT2

SETTINGS: dict[str, dict[str, str]] = {
    "this machine, 1 thread": {"OMP_NUM_THREADS": "1"},
    "this machine, 2 threads": {"OMP_NUM_THREADS": "2"},
    "this machine, 3 threads": {"OMP_NUM_THREADS": "3"},
    "MKL_ENABLE_INSTRUCTIONS=AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "MKL_ENABLE_INSTRUCTIONS=SSE4_2": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "MKL_CBWR=COMPATIBLE": {"MKL_CBWR": "COMPATIBLE"},
    "ATEN_CPU_CAPABILITY=default": {"ATEN_CPU_CAPABILITY": "default"},
    "ATEN_CPU_CAPABILITY=avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "ONEDNN_MAX_CPU_ISA=AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
}
WIDTHS = ((12, 1), (16, 2), (20, 5), (32, 4), (48, 6), (64, 8), (96, 3), (128, 4), (192, 6), (256, 8))  # width, heads
DIALECTS: tuple[dict[str, Any], ...] = (
    {},
    {"activation_function": "gelu", "n_inner": 50, "scale_attn_by_inverse_layer_idx": True},
    {"activation_function": "relu", "n_layer": 4, "n_positions": 100, "reorder_and_upcast_attn": True},
)


def shapes() -> Iterator[dict[str, Any]]:
    """Yield the changes to the config of each of the 30 random models."""
    for number, (width, heads) in enumerate(WIDTHS):
        for dialect in DIALECTS:
            yield {"n_embd": width, "n_head": heads, "n_layer": 1 + number % 3, "seed": number} | dialect


def worst(report: gpt2.Report) -> tuple[float, float]:
    """Return the largest ratio of a forward pass, and of training."""
    ratios = {True: [0.0], False: [0.0]}
    for check in report.checks:
        if check.kind == "rounding":
            ratios[check.id == "rounding"] += [point.ratio for point in check.points]
    return max(ratios[True]), max(ratios[False])


def run(folder: str, dtype: str, seed: int, order: str | None = None) -> dict[str, Any]:
    """Verify one right model and return the row of the table; ``order``: our model sums so, and transformers' as always."""

    def ordered(path: Path, dtype: torch.dtype | None) -> GPT2:
        model = load_path(path, dtype=dtype)
        for method in ("hidden", "head") if order else ():
            original = getattr(model, method)

            def call(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
                with summing(ORDERS[order or ""]) if model.wte.weight.dtype != torch.float64 else nullcontext():
                    return original(*args, **kwargs)

            setattr(model, method, call)
        return model

    report = gpt2.verify(folder, dtype=dtype, seed=seed, build=ordered, keep_going=True, quick=order is not None)
    forward, training = worst(report)
    failed = [f"{check.id}: {point.name}" for check in report.checks for point in check.points if not point.ok]
    imprecise = [] if report.imprecise is None else [report.imprecise.name]
    return {"model": Path(folder).name, "dtype": dtype, "seed": seed, "forward": forward, "training": training,
            "failed": failed, "imprecise": imprecise}  # fmt: skip


def right(folder: Path, seeds: int, settings: list[str]) -> bool:
    """Verify every right model in every setting; print a line for each setting and order of summing as soon as it is known."""
    print("making the models", file=sys.stderr)
    tokenizer = train_bpe(TEXT, 300)
    models = [str(write_checkpoint(folder / f"{number:02}", tokenizer, **shape)) for number, shape in enumerate(shapes())]
    total = refused = 0
    for name in settings:
        job = {"models": models, "seeds": seeds, "orders": list(ORDERS) if name.startswith("this machine, 1") else []}
        command, given = [sys.executable, __file__, "worker"], os.environ | SETTINGS[name]
        done = subprocess.run(command, env=given, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        for order in dict.fromkeys(row["order"] for row in rows):
            own = [row for row in rows if row["order"] == order]
            bad = [row for row in own if row["failed"] or row["imprecise"]]
            total, refused = total + len(own), refused + len(bad)
            forward, training = (max(row[what] for row in own) for what in ("forward", "training"))
            title, figures = name + (f", {order}" if order else ""), f"worst forward {forward:.2f}, training {training:.2f}"
            print(f"{title:50} {len(own):4} runs {len(bad):3} refused  {figures}", flush=True)
            for row in bad[:3]:
                print("   ", str(row)[:400])
    print(json.dumps({"right runs": total, "refused": refused}))
    return refused == 0


def worker() -> None:
    """Verify right models in this process's setting, as standard input tells; print a JSON line for each run."""
    job = json.load(sys.stdin)
    for path in [*job["models"], "shakespeare-mini"]:
        small = path != "shakespeare-mini"
        for seed in range(job["seeds"] if small else 1):
            for dtype in ("float32", "bfloat16", "float16") if small and seed == 0 else ("float32",):
                try:
                    print(json.dumps({"order": None, **run(path, dtype, seed)}), flush=True)
                except gpt2.InputError as error:  # PyTorch lacks a kernel of this dtype in this setting
                    print(error, file=sys.stderr)
        for order in job["orders"] if small else ():
            print(json.dumps({"order": order, **run(path, "float32", 0, order)}), flush=True)


def imprecise() -> bool:
    """Verify every imprecise model in its dtype; print the largest ratios, and whether it is refused as it should be."""
    ok = True
    for each in IMPRECISE:

        def broken(path: Path, dtype: torch.dtype | None, apply: Callable[[GPT2], None] = each.apply) -> GPT2:
            model = load_path(path, dtype=dtype)
            apply(model)
            return model

        report = gpt2.verify("shakespeare-mini", dtype=each.dtype, build=broken, keep_going=True, quick=not each.training)
        forward, training = worst(report)
        exact = [check.id for check in report.checks if check.kind != "rounding" and not check.ok]
        right = report.ok is not each.refused and not exact
        ok &= right
        verdict = ("refused" if not report.ok else "accepted") + ("" if right else ", which is wrong")
        print(f"{each.name:55} {each.dtype:9} forward {forward:9.2f}  training {training:9.2f}  {verdict}")
    print(json.dumps({"imprecise models": len(IMPRECISE), "as expected": ok}))
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["right", "imprecise", "worker"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--setting", choices=SETTINGS, action="append", help="only this one; may be given more than once")
    args = parser.parse_args()
    if args.what == "worker":
        worker()
        return 0
    if args.what == "imprecise":
        return 0 if imprecise() else 1
    with tempfile.TemporaryDirectory() as folder:
        return 0 if right(Path(folder), args.seeds, args.setting or list(SETTINGS)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
