"""How fast is it here? Two implementations in one process, in turn, so that what the machine does to one it does to the other.

A time by itself says little: it is another tomorrow. What is stated is a ratio, pair by pair, its median and how far it spread.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.loading import load_path
from gpt2.comparison.sides import Side
from gpt2.decoder import Decoder
from gpt2.errors import InputError
from gpt2.generation import stream
from gpt2.model import GPT2
from gpt2.parity import reference
from gpt2.train.loss import Scored


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.min:.2f} .. {self.max:.2f})"


def interleaved(runs: Mapping[str, Callable[[], float]], pairs: int) -> dict[str, list[float]]:
    """What each of ``runs`` measures, in turn, A B A B ...; a first round warms caches and is thrown away."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(pairs + 1):
        for name, run in runs.items():
            measured = run()
            if index:
                found[name].append(measured)
    return found


def ratio(numerators: Iterable[float], denominators: Iterable[float]) -> Spread:
    """Pair by pair, so that a slow minute of the machine slows both."""
    return Spread.of(a / b for a, b in zip(numerators, denominators, strict=True))


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def machine(*packages: str) -> dict[str, Any]:
    """What a figure depends on beside the code: processor, threads, versions, and how busy the machine was."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    versions = {}
    for package in ("torch", "transformers", *packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "processor": model,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": versions,
    }


# One implementation: what is asked of it while a clock runs


class Ours:
    """Our model through its public functions, decoding with weights as they are at the first prompt."""

    name = "ours"

    def __init__(self, model: GPT2) -> None:
        self.model = model
        self.decoder = Decoder(model)

    def prefill(self, ids: Tensor) -> Tensor:
        """Logits (B, V) of what follows (B, T) ids."""
        return self.decoder.prefill(ids)

    def decode(self, ids: Tensor, tokens: int) -> float:
        """Seconds of ``tokens`` greedy steps after (B, T) ids have been read."""
        steps = stream(self.decoder, ids, tokens + 1, temperature=0)
        next(steps)
        return seconds(lambda: [next(steps) for _ in range(tokens)])

    def train_step(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        _step(optimizer, Scored(self.model)(x, y))  # as gpt2 train does


class Transformers:
    """transformers' model, each pass called bare: its own ``generate`` would add to it."""

    name = "transformers"

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> Tensor:
        return self.model(ids, logits_to_keep=1).logits[:, -1]

    @torch.inference_mode()
    def decode(self, ids: Tensor, tokens: int) -> float:
        out = self.model(ids, use_cache=True, logits_to_keep=1)
        last, cache = out.logits[:, -1].argmax(-1), out.past_key_values

        def steps() -> None:
            nonlocal last
            for _ in range(tokens):
                last = self.model(last[:, None], past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)

        return seconds(steps)

    def train_step(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        _step(optimizer, F.cross_entropy(self.model(x).logits.flatten(0, 1), y.flatten()))


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


# gpt2 bench


@dataclass(frozen=True)
class Row:
    """One thing both do. ``unit`` is "s" (less is better) or "tokens/s"; ``ratio`` is above 1 where ours is faster."""

    what: str
    unit: str
    ours: Spread
    theirs: Spread
    ratio: Spread


@dataclass(frozen=True)
class Bench:
    model: str
    parameters: int
    dtype: str
    pairs: int
    rows: tuple[Row, ...]
    machine: dict[str, Any]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def table(self) -> str:
        here, versions = self.machine, self.machine["versions"]
        lines = [
            f"{self.model}  beside  transformers {versions['transformers']}",
            f"{self.parameters:,} parameters · {self.dtype} · torch {versions['torch']}",
            f"{here['processor']}, {here['threads']} threads",
            "",
            f"{'':24}{'ours':>20}{'transformers':>20}{'faster':>16}",
        ]
        for row in self.rows:
            form = ".2f" if row.unit == "s" else ",.0f"
            cells = [(row.ours, form, 20), (row.theirs, form, 20), (row.ratio, ".2f", 16)]
            middle = [f"{value.median:{form}}" for value, form, _ in cells]
            middle[2] = f"× {middle[2]}"
            ranges = [f"({value.min:{form}} .. {value.max:{form}})" for value, form, _ in cells]
            for head, texts in ((row.what, middle), (f"  {row.unit}", ranges)):
                lines.append(f"{head:24}" + "".join(f"{text:>{width}}" for text, (*_, width) in zip(texts, cells, strict=True)))
        return "\n".join([*lines, "", f"Median (min .. max) of {self.pairs} pairs, ours and theirs in turn."])


def bench(
    name: str,
    *,
    pairs: int = 5,
    batch: int = 1,
    context: int = 128,
    tokens: int = 32,
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Bench:
    """Load, prefill, decode and a training step of a model, ours beside transformers', on the CPU.

    Of a model in eight bits nothing is trained, and transformers runs it in float32.

    Args:
        name: as :func:`gpt2.load` takes it, with an optional dtype; ``random:gpt2`` has the official shape without a download.
        batch, context: rows and tokens of a prompt and of a training batch; shortened to what the model has positions for.
        tokens: greedy steps after such a prompt.

    Raises:
        InputError: no such model, or sizes that make no sense.
    """
    for flag, value in (("pairs", pairs), ("batch", batch), ("context", context), ("tokens", tokens)):
        if value < 1:
            raise InputError(f"{flag} is {value}; give 1 or more")
    side = Side.open(name, revision=revision, offline=offline)
    if side.theirs:
        raise InputError(f"{name}: transformers' model is measured beside ours anyway; leave hf/ out")
    quantised, positions = side.dtype == torch.int8, side.config.n_positions
    tokens = min(tokens, max(1, positions // 2))
    context = min(context, max(1, positions - tokens - 1))
    ids = torch.randint(side.config.vocab_size, (batch, context + 1), generator=torch.Generator().manual_seed(0))
    x, y, rows = ids[:, :-1], ids[:, 1:], []

    def row(what: str, work: float, runs: Mapping[str, Callable[[], float]]) -> None:
        """``work`` tokens, or 0 where seconds themselves are the figure."""
        progress(what)
        found = interleaved(runs, pairs)
        ours, theirs = found.values()
        shown = [Spread.of(work / value if work else value for value in values) for values in (ours, theirs)]
        rows.append(Row(what, "tokens/s" if work else "s", *shown, ratio(theirs, ours)))

    with reference.directory(side.checkpoint, progress) as folder:
        loads = {
            "ours": lambda: Ours(load_path(folder, dtype=side.dtype, offline=True)),
            "theirs": lambda: Transformers(reference.load_reference(folder, torch.float32 if quantised else side.dtype)),
        }
        first = {k: lambda make=make: seconds(lambda: make().prefill(x[:, :1])) for k, make in loads.items()}
        row("load to first logits", 0, first)
        models = {key: make() for key, make in loads.items()}
        at = f"{batch} x {context}"
        row(f"prefill {at}", batch * context, {k: lambda m=m: seconds(lambda: m.prefill(x)) for k, m in models.items()})
        row(f"decode after {at}", batch * tokens, {k: lambda m=m: m.decode(x, tokens) for k, m in models.items()})
        with _training({} if quantised else models) as steps:
            if steps:
                row(f"train step {at}", batch * context, {k: lambda s=s: seconds(lambda: s(x, y)) for k, s in steps.items()})
    told = str(side.dtype).removeprefix("torch.")
    return Bench(name, side.config.num_parameters(), told, pairs, tuple(rows), machine())


@contextmanager
def _training(models: Mapping[str, Ours | Transformers]) -> Iterator[dict[str, Callable[[Tensor, Tensor], None]]]:
    """A training step of each with the same optimizer, PyTorch's fused AdamW, and the weights as fast to step as any."""
    steps: dict[str, Callable[[Tensor, Tensor], None]] = {}
    for key, side in models.items():
        side.model.train()
        optimizer = torch.optim.AdamW([p for p in side.model.parameters() if p.requires_grad], lr=1e-5, fused=True)
        steps[key] = lambda x, y, side=side, optimizer=optimizer: side.train_step(optimizer, x, y)
    yield steps
    for side in models.values():
        side.model.eval()
