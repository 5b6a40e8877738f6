"""Measure what `gpt2 diagnose` costs at gpt2's shape, of dumps and modules: CPU seconds and peak memory, on one thread.

    python tools/shape_dump_table.py                   # every row, about 20 minutes of CPU
    python tools/shape_dump_table.py 'every value*'    # rows by name

Each dump is what our own model computes in float32 from `random:gpt2` with the row's fault in it, 1 x 64 random tokens, under
names that say nothing. A module is our own model with its attention replaced. A line of JSON for each row on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import gpt2
from gpt2.measure.tracing import trace
from gpt2.model import GPT2, eager_attention

BLOCK = 5  # where one block is faulty
CLI = [sys.executable, "-c", "import sys; from gpt2.cli.main import main; sys.exit(main())"]


def right(model: GPT2) -> None:
    pass


def reshaped(model: GPT2) -> None:
    """The file's [in, out] is read as if it were [out, in]."""
    weight = model.h[BLOCK].mlp.c_fc.weight
    weight.copy_(weight.flatten().view(weight.size(1), weight.size(0)).t())


def erf(model: GPT2) -> None:
    for block in model.h:
        block.mlp.activation = torch.nn.functional.gelu


def rounded(model: GPT2) -> None:
    weight = model.h[BLOCK].mlp.c_fc.weight
    weight.copy_(weight.bfloat16().float())


def strange(model: GPT2) -> None:
    """Scores with a term that no formula of a GPT-2 has."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
        near = torch.arange(q.size(-2)).to(q)
        return eager_attention(q + 0.3 * near.sin()[:, None], k, v * (1 + 0.1 * near.cos()[:, None]), mask, scale, dropout)

    model.h[BLOCK].attn.attend = attend


def unsplit(model: GPT2) -> None:
    """One head, as wide as the stream, in each block."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
        heads = q.size(1)
        q, k, v = (part.transpose(1, 2).flatten(2)[:, None] for part in (q, k, v))
        return eager_attention(q, k, v, mask, scale / heads**0.5, dropout)[:, 0].unflatten(-1, (heads, -1)).transpose(1, 2)

    for block in model.h:
        block.attn.attend = attend


def shared(model: GPT2) -> None:
    """Every head has the keys and values of the first one."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
        k, v = (part[:, :1].expand_as(part) for part in (k, v))
        return eager_attention(q, k, v, mask, scale, dropout)

    for block in model.h:
        block.attn.attend = attend


def build(name: str) -> GPT2:
    """Return the module of a row."""
    model = gpt2.load("random:gpt2")
    with torch.no_grad():
        ROWS[name][0](model)
    return model


ROWS: dict[str, tuple[Callable[[GPT2], None], str]] = {
    "every value, right": (right, "full"),
    "every value, exact GELU": (erf, "full"),
    "every value, a weight in bfloat16": (rounded, "full"),
    "every value, a fault that nothing names": (strange, "full"),
    "one tensor a block, right": (right, "block"),
    "one tensor a block, a reshaped weight": (reshaped, "block"),
    "one tensor a block, a fault that nothing names": (strange, "block"),
    "logits alone, right": (right, "logits"),
    "logits alone, a reshaped weight": (reshaped, "logits"),
    "module, right": (right, "module"),
    "module, an attention in one block that nothing names": (strange, "module"),
    "module, no split into heads": (unsplit, "module"),
    "module, keys and values of one head": (shared, "module"),
}


@torch.no_grad()
def write(path: Path, fault: Callable[[GPT2], None], level: str) -> None:
    model = gpt2.load("random:gpt2")
    fault(model)
    ids = torch.randint(model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))
    found = trace(model, ids)
    if level != "full":
        blocks = {f"h.{n}" for n in range(model.config.n_layer)} if level == "block" else set()
        found = {name: value for name, value in found.items() if name in blocks | {"logits"}}
    order = np.random.default_rng(0).permutation(len(found))
    values = list(found.values())
    np.savez(path, ids=ids.numpy(), **{f"t{number:03d}": values[place].numpy() for number, place in enumerate(order)})


def measure(path: str) -> dict[str, object]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [*CLI, "diagnose", path, "--model", "random:gpt2", "--json", "-"]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert child.stdout is not None
    said = json.loads(child.stdout.read())
    _, _, used = os.wait4(child.pid, 0)
    return {
        "verdict": said["verdict"],
        "first": (said["first_divergence"] or {}).get("point"),
        "causes": [f"{cause['id']} at {cause['where']}" for cause in said["causes"]],
        "notes": said["notes"],
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_gb": round(used.ru_maxrss * 1024 / 1e9, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", default=["*"], help="names of rows (* for anything)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, (fault, level) in ROWS.items():
            if any(fnmatchcase(name, pattern) for pattern in options.rows):
                path = Path(folder) / ("port.py" if level == "module" else "dump.npz")
                if level == "module":
                    tools = str(Path(__file__).parent.resolve())
                    words = f"import sys; sys.path.insert(0, {tools!r}); import shape_dump_table as table"
                    path.write_text(f"{words}\ndef build(): return table.build({name!r})\n")
                else:
                    write(path, fault, level)
                what = f"{path}:build" if level == "module" else str(path)
                print(json.dumps({"row": name, **measure(what)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
