"""Peak memory and time of loading a checkpoint, against the size of what is loaded.

    python tools/bench_memory.py [random:gpt2-xl ...] [--dir /var/tmp] [--layout official] [--dtype bf16]

A float32 file of an official size is written, one layout after the other, and deleted afterwards (gpt2-xl: 6.4 GB of disk):

    aligned   as this project and today's transformers write it: it can be mapped
    official  as openai-community/gpt2 lies on the Hub: mask buffers, and data on an odd byte, so that it must be read

For each, and for each dtype, a fresh process imports torch, loads the model, and then reads every page of every parameter, so
that mapped weights count in full. Figures, all above a process that has done nothing but `import torch`:

    peak       VmHWM, the most memory ever resident, mapped pages included
    anonymous  memory that is this process's own at the end (RssAnon): what a mapped file does not need
    rusage     ru_maxrss, the same peak as the kernel reports it to a parent; on Linux it starts from the parent's own

The parent of them all is this script, which stays small for that reason. Ends stdout with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt2.checkpoint.names import ModelName

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = ("aligned", "official")
DTYPES = ("float32", "bf16")
CHILD = """
import json, re, resource, sys, time
import torch
torch.set_num_threads(1)
torch.zeros(1)
figures = {}
if len(sys.argv) > 1:
    import gpt2
    gpt2.load  # imported before the clock starts
    begin = time.perf_counter()
    model = gpt2.load(sys.argv[1])
    figures["seconds"] = time.perf_counter() - begin
    with torch.inference_mode():
        figures["sum"] = sum(float(p.view(-1)[:: 4096 // p.element_size()].sum()) for p in model.parameters())
    figures["bytes"] = sum(p.nbytes for p in model.parameters())
    figures["all seconds"] = time.perf_counter() - begin
status = open("/proc/self/status").read()
for key, name in (("peak", "VmHWM"), ("anonymous", "RssAnon"), ("file", "RssFile")):
    figures[key] = int(re.search(name + r":\\s+(\\d+) kB", status)[1]) * 1024
figures["rusage"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps(figures))
"""
# In a process of its own, for the memory that it needs is not to be this script's.
WRITE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from bench_memory import write
write(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
"""


def write(size: str, layout: str, folder: Path) -> None:
    """A checkpoint of an official size: its header, and data that begins aligned or not; one block of noise over and over."""
    import torch

    from gpt2.checkpoint.keys import PREFIX, expected
    from gpt2.config import official_size

    config = official_size(size)
    prefix = "" if layout == "official" else PREFIX
    shapes = {prefix + key: shape for key, shape in expected(config).items()}
    if layout == "official":
        mask = (1, 1, config.n_positions, config.n_positions)
        shapes = dict(sorted({**shapes, **{f"h.{layer}.attn.bias": mask for layer in range(config.n_layer)}}.items()))
    header, end = {}, 0
    for key, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
    text += b" " * ((3 if layout == "official" else 0) - 8 - len(text) & 7)
    noise = memoryview((torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).numpy()).cast("B")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf("float32")))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, shape in shapes.items():
            left = 4 * math.prod(shape)
            if key.endswith(".attn.bias"):
                file.write(memoryview(torch.ones(shape).tril_().view(-1).numpy()).cast("B"))
                left = 0
            while left:
                left -= file.write(noise[:left])


def child(*args: str, code: str = CHILD) -> dict[str, float]:
    """One fresh process: what it needed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"the process died ({done.returncode}): {done.stderr[-500:]}")
    return json.loads(done.stdout)


def measure(checkpoint: Path, dtype: str, runs: int, floor: dict[str, float], code: str = CHILD) -> dict:
    """Medians over fresh processes, above `floor`, which is `child()`: one that only imports torch."""
    children = [child(f"{checkpoint}:{dtype}", code=code) for _ in range(runs)]
    result: dict = {"model": checkpoint.name, "layout": checkpoint.parent.name, "dtype": dtype, "runs": runs}
    result |= {key: statistics.median(run[key] for run in children) for key in children[0]}
    for key in ("peak", "anonymous", "rusage"):
        result[key] -= floor[key]
        result[f"{key} / size"] = result[key] / result["bytes"]
    return result


@contextmanager
def checkpoint(size: str, layout: str, where: str | None = None) -> Iterator[Path]:
    """The file of :func:`write`, while it is needed."""
    folder = Path(tempfile.mkdtemp(prefix="gpt2-memory-", dir=where))
    try:
        made = folder / layout / size
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", WRITE, str(ROOT / "tools"), size, layout, made], env=environment, check=True)
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def show(results: list[dict]) -> None:
    columns = f"{'size':>10}{'peak':>10}{'/ size':>8}{'anonymous':>11}{'/ size':>8}{'load':>9}{'+ read':>9}"
    print(f"{'model':14}{'layout':10}{'as':9}{columns}")
    for r in results:
        sizes = f"{r['bytes'] / 1e6:7,.0f} MB{r['peak'] / 1e6:7,.0f} MB{r['peak / size']:8.3f}"
        own = f"{r['anonymous'] / 1e6:8,.0f} MB{r['anonymous / size']:8.3f}"
        print(f"{r['model']:14}{r['layout']:10}{r['dtype']:9}{sizes}{own}{r['seconds']:7.2f} s{r['all seconds']:7.2f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["random:gpt2"], metavar="random:SIZE")
    parser.add_argument("--layout", choices=LAYOUTS, action="append", help="default: each")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: each")
    parser.add_argument("--dir", help="where the file is written (default: the temporary folder)")
    parser.add_argument("--runs", type=int, default=1)
    args = parser.parse_args()
    results, floor = [], child()
    for name in args.models:
        random = ModelName.parse(name).random
        if random is None:
            parser.error(f"{name}: give random:SIZE, whose files this script writes")
        for layout in args.layout or LAYOUTS:
            with checkpoint(random.size, layout, args.dir) as made:
                results += [measure(made, dtype, args.runs, floor) for dtype in args.dtype or DTYPES]
    show(results)
    print(json.dumps({"benchmark": "memory", "cpus": os.cpu_count(), "results": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
