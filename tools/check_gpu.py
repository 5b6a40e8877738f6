"""Check a device in one command: what it computes, how fast, whether training resumes and repeats bit for bit.

    python tools/check_gpu.py                       the first accelerator, random weights of gpt2's shape
    python tools/check_gpu.py --device cpu          a rehearsal without one, with shakespeare-mini
    python tools/check_gpu.py --nanogpt nanoGPT     nanoGPT's prompts and training steps too, from a checkout of it
    python tools/check_gpu.py --out results         write results.json, and results.md, a table

Parts: `gpt2 verify --device` in every dtype, and on CUDA with TF32 turned on as a control; loading, prompts, decoding and a
training step beside transformers, and beside nanoGPT where a checkout is given; a training run that is killed twice and resumed;
generation and a training step repeated, bit by bit. A part that fails is reported, and the others still run: three minutes on an
H100. Exit code: 0 if all hold, else 1.
"""

import argparse
import json
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench import last_json
from beside import NanoGPT
from check_kills import outcome, recipe

import gpt2
from gpt2.bench import Ours, bench, interleaved, machine, ratio, seconds
from gpt2.checkpoint.loading import require_device
from gpt2.errors import require_writable
from gpt2.measure.placement import device_name
from gpt2.train.loop import train
from gpt2.train.loss import WithLoss

Rows = list[tuple[str, str, bool]]  # what was checked, what was found, whether it holds
PRECISIONS = ("", ":bf16")
STEPS, KILLED_AT = 16, (5, 11)


def verdict(model: str, device: str, kept: dict[str, Any]) -> Rows:
    """Judge the device; a control with TF32 products must be told from float32."""
    report = gpt2.verify_device(model, device, progress=say)
    kept["verdict"] = json.loads(report.to_json())
    print(report.table(), file=sys.stderr)
    rows: Rows = []
    for dtype in dict.fromkeys(each.dtype for each in report.verdicts):
        own = [each for each in report.verdicts if each.dtype == dtype]
        bad = [each.sentence for each in own if each.arithmetic is None]
        coarse = dict.fromkeys(str(each.arithmetic) for each in own if each.arithmetic != dtype)
        largest = max(each.ratio for each in own)
        found = bad[0] if bad else f"with {', '.join(coarse)}" if coarse else f"right, at most × {largest:.2f}"
        rows.append((f"verify in {dtype}", found, not bad))
    if device.startswith("cuda"):
        before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "tf32"
        try:
            control = gpt2.verify_device(model, device, dtypes=[torch.float32], progress=say)
        finally:
            torch.backends.cuda.matmul.fp32_precision = before
        kept["control"] = json.loads(control.to_json())
        found = control.first_wrong.sentence if control.first_wrong else ", ".join([control.verdict, *control.arithmetics])
        rows.append(("control: TF32 turned on", found, list(control.arithmetics) == ["TF32 products"]))
    return rows


def speed(model: str, device: str, pairs: int, kept: dict[str, Any]) -> Rows:
    rows: Rows = []
    for suffix in PRECISIONS[: 1 if device == "cpu" else 2]:
        found = bench(model + suffix, device=device, pairs=pairs, progress=say)
        kept[f"bench{suffix}"] = json.loads(found.to_json())
        for row in found.rows:
            best = f"{row.ours.median:,.4g} {row.unit}, transformers {row.theirs.median:,.4g}: × {row.ratio}"
            rows.append((f"{row.what}, {found.dtype}", best, True))
    return rows


def nanogpt(model: str, device: str, pairs: int, folder: Path, kept: dict[str, Any]) -> Rows:
    """Time nanoGPT's prompts on the same weights, and its training step as it is used on such a device."""
    loaded = gpt2.load(model, device=device, dtype="float32")
    side = NanoGPT(folder / "model.py", loaded)
    side.model.to(device)
    tokens = min(256, loaded.config.n_positions)
    ids = torch.randint(loaded.config.vocab_size, (4, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    runs = {"ours": Ours(loaded).prefill, "nanoGPT": side.prefill}
    times = interleaved({name: partial(seconds, partial(read, ids)) for name, read in runs.items()}, pairs)
    size = ["--run", "mini:8x128"] if device == "cpu" else ["--run", "gpt2:8x256", "--gpu"]
    trained = last_json("bench_train.py", *size, "--nanogpt", str(folder / "model.py"), "--only", "fused", "--pairs", str(pairs))
    kept |= {"prompts": times, "training": trained}
    step = trained["results"][0]["sides"]["nanoGPT, fused AdamW"]["ours to it"]
    return [
        (f"prompt 4 x {tokens}, float32, beside nanoGPT", f"× {ratio(times['nanoGPT'], times['ours'])}", True),
        (f"training step {size[1]}, beside nanoGPT", "× {median:.2f} ({min:.2f} .. {max:.2f})".format(**step), True),
    ]


def resume(device: str, work: Path, kept: dict[str, Any]) -> Rows:
    """Kill a run twice; a control run with another seed must end differently."""
    text = work / "text.txt"
    text.write_text("When shall we three meet again, in thunder, lightning, or in rain?\n" * 60)
    wanted = recipe(text, device=device.partition(":")[0], steps=STEPS)
    other = recipe(text, device=wanted.device, steps=STEPS, seed=1)
    # CUDA does not survive a fork; a server that never uses it has torch imported once for all of them.
    context = multiprocessing.get_context("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")
    multiprocessing.set_forkserver_preload(["__main__", "torch._dynamo"])  # which an optimizer imports

    def run(which: Any, folder: Path, kill_at: int | None = None) -> None:
        process = context.Process(target=train, args=(which, folder))
        process.start()
        log = folder / "metrics.jsonl"
        while kill_at is not None and process.is_alive():
            steps = log.read_text().count('"loss"') if log.is_file() else 0
            if steps >= kill_at:
                process.kill()
            time.sleep(0.01)
        process.join()
        if process.exitcode not in (0, *((-signal.SIGKILL,) if kill_at else ())):
            raise RuntimeError(f"the training run ended with {process.exitcode}")
        kept["kills"] = kept.get("kills", 0) + (process.exitcode == -signal.SIGKILL)

    run(wanted, work / "whole")
    run(other, work / "other")
    for kill_at in (*KILLED_AT, None):
        run(wanted, work / "killed", kill_at)
    expected = outcome(work / "whole")
    if outcome(work / "other") == expected:
        raise RuntimeError("control: a run of another seed ends the same; this comparison sees nothing")
    same = outcome(work / "killed") == expected
    what = f"{STEPS} training steps, {kept['kills']} SIGKILLs, resumed"
    return [(what, "bit-identical" if same else "differs from the run that was not killed", same and kept["kills"] > 0)]


def repeats(model: str, device: str, kept: dict[str, Any]) -> Rows:
    """Do the same twice in one process."""
    where = require_device(device)
    loaded = gpt2.load(model, device=where, dtype="float32")
    ids = torch.randint(loaded.config.vocab_size, (4, 65), generator=torch.Generator().manual_seed(0)).to(where)

    def text() -> tuple[torch.Tensor, ...]:
        return (gpt2.generate(loaded, ids[:, :8], 48, temperature=0.8, seed=0),)

    def step() -> tuple[torch.Tensor, ...]:
        loaded.zero_grad(set_to_none=True)
        loss = WithLoss(loaded)(ids[:, :-1], ids[:, 1:])
        loss.backward()
        return (loss.detach(), *(parameter.grad for parameter in loaded.parameters() if parameter.grad is not None))

    rows: Rows = []
    for name, work in (("48 sampled tokens, 4 rows", text), ("loss and gradients of 4 x 64 tokens", step)):
        first = [tensor.clone() for tensor in work()]
        same = all(map(torch.equal, first, work()))
        kept[name] = same
        rows.append((f"{name}, twice", "bit-identical" if same else "differs", same))
    return rows


def say(what: str) -> None:
    print(f"  {what}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps or auto (default: %(default)s)")
    parser.add_argument("--model", help="default: random:gpt2, on a CPU shakespeare-mini")
    parser.add_argument("--pairs", type=int, default=5, help="measurements of each speed (default: %(default)s)")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT; left out without")
    parser.add_argument("--out", default="check_gpu", help="write OUT.json and OUT.md (default: %(default)s)")
    args = parser.parse_args()
    started = time.perf_counter()
    try:
        where = require_device(args.device)
        require_writable("--out", f"{args.out}.json")  # before minutes of measuring
        if args.nanogpt and not (args.nanogpt / "model.py").is_file():
            raise gpt2.InputError(f"--nanogpt {args.nanogpt}: no model.py there; give the folder of nanoGPT's checkout")
    except gpt2.InputError as error:
        print(f"check_gpu: {error}", file=sys.stderr)
        return 2
    device, model = str(where), args.model or ("shakespeare-mini" if where.type == "cpu" else "random:gpt2")
    name = device_name(where)
    body: dict[str, Any] = {"device": device, "name": name, "model": model, "machine": machine()}
    work = Path(tempfile.mkdtemp(prefix="check-gpu-"))
    parts: dict[str, Callable[[dict[str, Any]], Rows]] = {
        "verdict": lambda kept: verdict(model, device, kept),
        "speed": lambda kept: speed(model, device, args.pairs, kept),
        **({"nanogpt": lambda kept: nanogpt(model, device, args.pairs, args.nanogpt, kept)} if args.nanogpt else {}),
        "resume": lambda kept: resume(device, work, kept),
        "repeats": lambda kept: repeats(model, device, kept),
    }
    rows: Rows = []
    for part, check in parts.items():
        print(part, file=sys.stderr)
        body[part], begin = {}, time.perf_counter()
        try:
            found = check(body[part])
        except (Exception, SystemExit) as error:  # one part's failure is a finding; the others still run
            found = [(part, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", False)]
        body[part]["seconds"] = round(time.perf_counter() - begin, 1)
        rows += found
    shutil.rmtree(work, ignore_errors=True)
    body |= {"rows": rows, "ok": all(ok for *_, ok in rows), "seconds": round(time.perf_counter() - started, 1)}
    lines = [
        f"{name}, {model}, torch {torch.__version__}, {body['seconds']:.0f} s",
        "",
        "| check | found | |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {what} | {found} | {'holds' if ok else '**fails**'} |" for what, found, ok in rows]
    Path(f"{args.out}.json").write_text(json.dumps(body, indent=2) + "\n")
    Path(f"{args.out}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0 if body["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
