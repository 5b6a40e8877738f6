"""Measure speed: our model and transformers', alternating in one process. Results are ratios of pairs: median and range."""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.loading import require_device
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.decoder import Decoder
from gpt2.errors import InputError, require_memory
from gpt2.generation import stream
from gpt2.measure.environment import environment
from gpt2.measure.placement import device_name
from gpt2.model import GPT2
from gpt2.options import pick
from gpt2.parity import reference
from gpt2.sampling import Sampling
from gpt2.train.cost import passing
from gpt2.train.loss import WithLoss
from gpt2.train.recipe import Recipe


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

    def __format__(self, spec: str) -> str:
        spec = spec or ".2f"
        return f"{self.median:{spec}} ({self.min:{spec}} .. {self.max:{spec}})"


def interleaved(runs: Mapping[str, Callable[[], float]], pairs: int) -> dict[str, list[float]]:
    """Call the ``runs`` in turn, A B A B ...; return all measurements, without the first round, which warms caches."""
    rounds = [{name: run() for name, run in runs.items()} for _ in range(pairs + 1)]
    return {name: [measured[name] for measured in rounds[1:]] for name in runs}


def ratio(numerators: Iterable[float], denominators: Iterable[float]) -> Spread:
    """Divide pair by pair, so that a slow minute of the machine affects both."""
    return Spread.of(a / b for a, b in zip(numerators, denominators, strict=True))


def seconds(work: Callable[[], object]) -> float:
    """Return the seconds of ``work``, with what it leaves an accelerator to do."""
    wait: Callable[[], object] = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    wait()
    begin = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begin


def machine() -> dict[str, Any]:
    """Return what a measurement depends on besides the code: processor, threads, versions, and load averages."""
    here = environment([])
    return pick(here, "processor", "capability", "blas", "threads", "versions") | {
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": here.versions["python"],
    }


class Ours:
    """Our model through its public functions; after training steps, call only ``prefill``."""

    def __init__(self, model: GPT2) -> None:
        self.model, self.decoder = model, Decoder(model)

    def prefill(self, ids: Tensor) -> Tensor:
        """Return the logits (B, V) of the token after (B, T) ids."""
        return self.decoder.prefill(ids)

    def decode(self, ids: Tensor, tokens: int) -> float:
        """Return the seconds of ``tokens`` greedy steps after (B, T) ids, without the time of the prompt."""
        steps = stream(self.decoder, ids, tokens + 1, Sampling(0))
        next(steps)
        return seconds(lambda: [next(steps) for _ in range(tokens)])

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return WithLoss(self.model)(x, y)  # as in a training step of gpt2 train


class Transformers:
    """transformers' model, called directly: its own ``generate`` would take longer."""

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

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x).logits.flatten(0, 1), y.flatten())


Measured = Ours | Transformers


def train_step(side: Measured, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    side.loss(x, y).backward()
    optimizer.step()


def training(side: Measured, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return a training step with PyTorch's fused AdamW, at a rate that hardly changes the weights."""
    weights = [each for each in side.model.train().parameters() if each.requires_grad]
    return partial(train_step, side, torch.optim.AdamW(weights, lr=1e-5, fused=True), x, y)


@dataclass(frozen=True)
class Row:
    """One measured task. ``unit`` is "s" (less is better) or "tokens/s"; ``ratio`` is above 1 if ours is faster."""

    what: str
    unit: str
    ours: Spread
    theirs: Spread
    ratio: Spread


@dataclass(frozen=True)
class Bench:
    """The result of ``gpt2 bench``; ``device`` is where both ran."""

    model: str
    parameters: int
    dtype: str
    pairs: int
    rows: tuple[Row, ...]
    machine: dict[str, Any]
    device: str = "cpu"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def table(self) -> str:
        here, versions = self.machine, self.machine["versions"]
        on = f"{here['processor']}, {here['threads']} threads" if self.device == "cpu" else self.device
        lines = [f"{self.model}: {self.parameters:,} parameters, {self.dtype}; torch {versions['torch']}", on, ""]
        for row in self.rows:
            form = ".2f" if row.unit == "s" else ",.0f"
            lines.append(f"{row.what}: × {row.ratio:.2f} as fast")
            lines += [f"  {who:13}{value:{form}} {row.unit}" for who, value in (("ours", row.ours), ("transformers", row.theirs))]
        lines += ["", f"Median (min .. max) of {self.pairs} pairs, in turn with transformers {versions['transformers']}."]
        return "\n".join(lines)


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

    An int8 model is not trained, and transformers runs it in float32. The prompt and the training batch have ``batch`` rows of
    ``context`` tokens, limited to the model's positions; ``tokens`` greedy steps follow the prompt; ``device`` as for
    :func:`gpt2.load`. Raises InputError: no such model or device, or a size below 1.
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
    needed = passing(side.config, Recipe(batch_size=batch, context=context))
    require_memory(needed, f"a training step on {batch:,} x {context:,} tokens", "lower the batch or context")
    ids = torch.randint(side.config.vocab_size, (batch, context + 1), generator=torch.Generator().manual_seed(0)).to(where)
    x, y, rows, shape = ids[:, :-1], ids[:, 1:], list[Row](), f"{batch} x {context}"

    def measure(what: str, work: int, each: Mapping[str, Any], run: Callable[[Any], float]) -> None:
        """Add a row; ``work`` is a number of tokens, or 0 to report seconds."""
        progress(what)
        times = interleaved({who: partial(run, one) for who, one in each.items()}, pairs)
        ours, theirs = (Spread.of(work / t if work else t for t in times[who]) for who in ("ours", "transformers"))
        rows.append(Row(what, "tokens/s" if work else "s", ours, theirs, ratio(times["transformers"], times["ours"])))

    current = torch.accelerator.device_index(where.index or None)  # what ``seconds`` waits for
    with current, reference.directory(side.checkpoint, progress) as folder:
        loads: dict[str, Callable[[], Measured]] = {
            "ours": lambda: Ours(open_path(folder, offline=True).load(side.dtype, where)),
            "transformers": lambda: Transformers(reference.load_reference(folder, theirs).to(where)),
        }
        measure("load to first logits", 0, loads, lambda load: seconds(lambda: load().prefill(x[:, :1])))
        sides = {who: load() for who, load in loads.items()}
        measure(f"prefill {shape}", batch * context, sides, lambda each: seconds(lambda: each.prefill(x)))
        measure(f"decode after {shape}", batch * tokens, sides, lambda each: each.decode(x, tokens))
        if not quantised:
            measure(f"train step {shape}", batch * context, {who: training(each, x, y) for who, each in sides.items()}, seconds)
    dtype = str(side.dtype).removeprefix("torch.")
    return Bench(name, side.config.num_parameters(), dtype, pairs, tuple(rows), machine(), device_name(where))
