"""Measure speed: our model and transformers', alternating in one process. Results are ratios of pairs: median and range."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.loading import load_path, require_device, require_intact
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.decoder import Decoder
from gpt2.errors import InputError
from gpt2.generation import stream
from gpt2.measure.placement import device_name
from gpt2.model import GPT2
from gpt2.pages.reports import blas, processor
from gpt2.parity import reference
from gpt2.train.loss import Scored


@dataclass(frozen=True)
class Spread:
    """The median and range of several measurements."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        values = list(values)
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.min:.2f} .. {self.max:.2f})"


def interleaved(runs: Mapping[str, Callable[[], float]], pairs: int) -> dict[str, list[float]]:
    """Call the ``runs`` in turn, A B A B ...; return all measurements, without the first round, which warms caches."""
    rounds = [{name: run() for name, run in runs.items()} for _ in range(pairs + 1)]
    return {name: [measured[name] for measured in rounds[1:]] for name in runs}


def ratio(numerators: Iterable[float], denominators: Iterable[float]) -> Spread:
    """Divide pair by pair, so that a slow minute of the machine affects both."""
    return Spread.of(a / b for a, b in zip(numerators, denominators, strict=True))


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of ``work``, with what it leaves an accelerator to do."""
    _finish()
    begin = time.perf_counter()
    work()
    _finish()
    return time.perf_counter() - begin


def _finish() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def machine(*packages: str) -> dict[str, Any]:
    """Return what a measurement depends on besides the code: processor, threads, versions, and load averages."""
    versions = {}
    for package in ("torch", "transformers", *packages):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "processor": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "blas": blas(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": versions,
    }


class Ours:
    """Our model through its public functions; after training steps, call only ``prefill``."""

    name = "ours"

    def __init__(self, model: GPT2) -> None:
        self.model = model
        self.decoder = Decoder(model)

    def prefill(self, ids: Tensor) -> Tensor:
        """Return the logits (B, V) of the token after (B, T) ids."""
        return self.decoder.prefill(ids)

    def decode(self, ids: Tensor, tokens: int) -> float:
        """Return the seconds of ``tokens`` greedy steps after (B, T) ids, without the time of the prompt."""
        steps = stream(self.decoder, ids, tokens + 1, temperature=0)
        next(steps)
        return seconds(lambda: [next(steps) for _ in range(tokens)])

    def train_step(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        _step(optimizer, Scored(self.model)(x, y))  # the training step of gpt2 train


class Transformers:
    """transformers' model, called directly: its own ``generate`` would take longer."""

    name = "transformers"

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.inference_mode()
    def prefill(self, ids: Tensor) -> Tensor:
        return self.model(ids, logits_to_keep=1).logits[:, -1]

    @torch.inference_mode()
    def decode(self, ids: Tensor, tokens: int) -> float:
        cache = reference.reference_cache(self.model)
        last = self.model(ids, cache, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)

        def steps() -> None:
            nonlocal last
            for _ in range(tokens):
                last = self.model(last[:, None], cache, use_cache=True).logits[:, -1].argmax(-1)

        return seconds(steps)

    def train_step(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
        _step(optimizer, F.cross_entropy(self.model(x).logits.flatten(0, 1), y.flatten()))


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@dataclass(frozen=True)
class Row:
    """One measured task. ``unit`` is "s" (less is better) or "tokens/s"; ``ratio`` is above 1 if ours is faster."""

    what: str
    unit: str
    ours: Spread
    theirs: Spread
    ratio: Spread

    def lines(self) -> Iterator[str]:
        """Yield two lines of a table: medians, then ranges."""
        form = ".2f" if self.unit == "s" else ",.0f"
        cells = [(self.ours, form, "", 20), (self.theirs, form, "", 20), (self.ratio, ".2f", "× ", 16)]
        yield f"{self.what:24}" + "".join(f"{f'{sign}{v.median:{form}}':>{width}}" for v, form, sign, width in cells)
        ranges = [(f"({v.min:{form}} .. {v.max:{form}})", width) for v, form, _, width in cells]
        yield f"{'  ' + self.unit:24}" + "".join(f"{text:>{width}}" for text, width in ranges)


@dataclass(frozen=True)
class Bench:
    """The result of ``gpt2 bench``."""

    model: str
    parameters: int
    dtype: str
    pairs: int
    rows: tuple[Row, ...]
    machine: dict[str, Any]
    device: str = "cpu"  # where both ran

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def table(self) -> str:
        here, versions = self.machine, self.machine["versions"]
        return "\n".join(
            [
                f"{self.model}  beside  transformers {versions['transformers']}",
                f"{self.parameters:,} parameters · {self.dtype} · torch {versions['torch']}",
                f"{here['processor']}, {here['threads']} threads" if self.device == "cpu" else self.device,
                "",
                f"{'':24}{'ours':>20}{'transformers':>20}{'faster':>16}",
                *(line for row in self.rows for line in row.lines()),
                "",
                f"Median (min .. max) of {self.pairs} pairs, ours and theirs in turn.",
            ]
        )


def bench(
    name: str,
    *,
    pairs: int = 5,
    batch: int = 1,
    context: int = 128,
    tokens: int = 32,
    device: str = "cpu",
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> Bench:
    """Measure load, prefill, decode and a training step of a model, ours and transformers'.

    An int8 model is not trained, and transformers runs it in float32.

    Args:
        name: as for :func:`gpt2.load`, with an optional dtype; ``random:gpt2`` has the official shape without a download.
        batch, context: rows and tokens of the prompt and the training batch; limited to the model's positions.
        tokens: greedy steps after the prompt.
        device: where both run, as for :func:`gpt2.load`.

    Raises:
        InputError: no such model or device, or a size below 1.
    """
    for flag, value in (("pairs", pairs), ("batch", batch), ("context", context), ("tokens", tokens)):
        if value < 1:
            raise InputError(f"{flag} is {value}; give 1 or more")
    where = require_device(device)
    side = CheckpointSide.open(name, revision=revision, offline=offline)
    if side.by_transformers:
        raise InputError(f"{name}: transformers' model is measured in any case; leave hf/ out")
    quantised, positions = side.dtype == torch.int8, side.config.n_positions
    theirs = torch.float32 if quantised else side.dtype
    tokens = min(tokens, max(1, positions // 2))
    context = min(context, max(1, positions - tokens - 1))
    ids = torch.randint(side.config.vocab_size, (batch, context + 1), generator=torch.Generator().manual_seed(0)).to(where)
    x, y, rows = ids[:, :-1], ids[:, 1:], []

    def measure(what: str, work: int, runs: Mapping[str, Callable[[], float]]) -> None:
        """Add a row; ``work`` is a number of tokens, or 0 to report seconds."""
        progress(what)
        times = interleaved(runs, pairs)
        ours, theirs = (Spread.of(work / t if work else t for t in times[key]) for key in ("ours", "theirs"))
        rows.append(Row(what, "tokens/s" if work else "s", ours, theirs, ratio(times["theirs"], times["ours"])))

    current = torch.accelerator.device_index(where.index or None)  # what ``seconds`` waits for
    with current, reference.directory(side.checkpoint, progress) as folder:
        loads: dict[str, Callable[[], Ours | Transformers]] = {
            "ours": lambda: Ours(load_path(folder, dtype=side.dtype, device=where, offline=True)),
            "theirs": lambda: Transformers(reference.load_reference(folder, theirs).to(where)),
        }
        first = {key: partial(seconds, partial(_first_logits, load, x[:, :1])) for key, load in loads.items()}
        measure("load to first logits", 0, first)
        models, shape = [(key, load()) for key, load in loads.items()], f"{batch} x {context}"
        for _, model in models:
            require_intact(model.model, name)  # NaN takes another time than numbers
        prompts = {key: partial(seconds, partial(model.prefill, x)) for key, model in models}
        measure(f"prefill {shape}", batch * context, prompts)
        measure(f"decode after {shape}", batch * tokens, {key: partial(model.decode, x, tokens) for key, model in models})
        if not quantised:
            steps = [(key, partial(model.train_step, _optimizer(model.model), x, y)) for key, model in models]
            measure(f"train step {shape}", batch * context, {key: partial(seconds, step) for key, step in steps})
    dtype = str(side.dtype).removeprefix("torch.")
    return Bench(name, side.config.num_parameters(), dtype, pairs, tuple(rows), machine(), device_name(where))


def _first_logits(load: Callable[[], Ours | Transformers], ids: Tensor) -> None:
    load().prefill(ids)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Switch to training mode and return PyTorch's fused AdamW, with a learning rate that hardly changes the weights."""
    model.train()
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
