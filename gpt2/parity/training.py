"""The checks of a short training: the loss, every gradient and five AdamW steps, ours against transformers'."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from gpt2.checkpoint.keys import PREFIX
from gpt2.measure.metrics import FLOAT64_BOUND, relative_error, token_losses, worst_relative_error
from gpt2.measure.tracing import layer_of
from gpt2.parity import reference
from gpt2.parity.checks import ROUNDING_RATIO, Subject
from gpt2.parity.report import MAPPING, ROUNDING, Check, Point, points_of

STEPS = 5

TRAINING = {
    "loss": "every token",
    "gradients": "every parameter",
    "adamw": f"change by {STEPS} steps",
}


def training(subject: Subject) -> list[Check]:
    """Loss, every gradient, and five AdamW steps: in float64 against each other, in ``dtype`` each against float64."""
    # At its widest: a float64 model, its gradients, AdamW's moments, the ruler (48 bytes), and freed memory that lies between
    # them: gpt2-medium's measured peak.
    needed = 56 * subject.config.num_parameters()
    memory = _memory()
    if needed > 0.9 * memory:
        why = f"needs {needed / 1e9:.0f} GB of memory, this machine has {memory / 1e9:.0f}"
        return [Check(id, MAPPING, title, "float64", skipped=why) for id, title in TRAINING.items()]
    exact, ours, theirs = (a | b for a, b in zip(_gradients(subject), _steps(subject), strict=True))
    label = str(subject.dtype).removeprefix("torch.")
    checks = [Check(id, MAPPING, title, "float64", points_of(exact[id].items(), FLOAT64_BOUND)) for id, title in TRAINING.items()]
    for id, title in TRAINING.items():
        rows = ((name, ours[id][name], error) for name, error in theirs[id].items())
        points = tuple(
            Point(name, error, ROUNDING_RATIO * reference_error, reference_error) for name, error, reference_error in rows
        )
        checks.append(Check(f"{id}-rounding", ROUNDING, title, label, points))
    return checks


def _memory() -> float:
    """Bytes of memory this process may count on: the machine's, or its container's where that is less."""
    counted = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ())  # Windows has no such call
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if counted else math.inf
    limit = Path("/sys/fs/cgroup/memory.max")
    told = limit.read_text().strip() if limit.is_file() else "max"
    return min(machine, int(told)) if told.isdigit() else machine


Errors = dict[str, dict[str, float]]  # check -> point -> error


def _gradients(subject: Subject) -> tuple[Errors, Errors, Errors]:
    """Losses and gradients of one sequence after another, all four models in step: exact, ours, theirs.

    In float64 the worst sequence counts, and a long one comes on top. Rounding is judged by the root mean square over the
    sequences: on a trained model a single near-tie in one softmax may decide a whole sequence's gradient error, on either side,
    and with it any ratio of two of them.
    """
    path, dtype, build = subject.path, subject.dtype, subject.build
    ruler = reference.load_reference(subject.theirs, torch.float64)
    exact, ours, theirs = build(path, torch.float64), build(path, dtype), reference.load_reference(subject.theirs, dtype)
    measures = ((exact, worst_relative_error), (ours, relative_error), (theirs, relative_error))
    losses: list[list[Tensor]] = [[], [], []]
    errors: list[dict[str, list[float]]] = [{}, {}, {}]
    expected_losses = []
    for index, sequence in enumerate(subject.probe.sequences):
        subject.progress(f"gradients: sequence {index + 1} of {len(subject.probe.sequences)}")
        expected_losses.append(_backward(ruler, sequence[None]))
        expected = _named_gradients(ruler)
        for (model, measure), found, side in zip(measures, losses, errors, strict=True):
            found.append(_backward(model, sequence[None]))
            for name, gradient in _named_gradients(model).items():
                side.setdefault(name, []).append(measure(gradient, expected[name]))
            model.zero_grad(set_to_none=True)  # gradients of one model at a time beside the ruler's
    loss = [measure(torch.cat(found), torch.cat(expected_losses)) for (_, measure), found in zip(measures, losses, strict=True)]
    long = torch.cat((subject.probe.traced, subject.probe.traced[:, :1]), dim=1)
    for model in (ruler, exact):
        _backward(model, long)
    expected = _named_gradients(ruler)
    for name, gradient in _named_gradients(exact).items():
        errors[0][name].append(worst_relative_error(gradient, expected[name]))
    summaries: tuple[Callable[[list[float]], float], ...] = (max, _root_mean_square, _root_mean_square)
    sides = [
        {"loss": {"loss": one}, "gradients": {name: summary(each) for name, each in side.items()}}
        for one, summary, side in zip(loss, summaries, errors, strict=True)
    ]
    return sides[0], sides[1], sides[2]


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _steps(subject: Subject) -> tuple[Errors, Errors, Errors]:
    """How far five AdamW steps moved every parameter, one model at a time: exact, ours, theirs."""
    path, dtype, build, progress = subject.path, subject.dtype, subject.build, subject.progress
    batch = subject.probe.sequences[:2]
    start = subject.checkpoint.load().state_dict()  # mapped: costs no memory of its own
    gc.collect()  # transformers' models hang in reference cycles; the next one needs their room
    progress("float64: AdamW steps, transformers'")

    def moved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and change, in float64; in place of the parameter where that is float64 already."""
        end = _train(model, batch)
        for name, before in start.items():
            yield name, end[name].double().sub_(before)

    expected = dict(moved(reference.load_reference(subject.theirs, torch.float64)))

    def by_block(model: nn.Module) -> dict[str, float]:
        """Relative error of a block's whole change: a bias alone has too few entries to average luck out."""
        squares: dict[str, list[float]] = {}
        for name, change in moved(model):
            block = "wte, wpe, ln_f" if layer_of(name) is None else f"h.{layer_of(name)}"
            total = squares.setdefault(f"{block} (all parameters)", [0.0, 0.0])
            total[0] += _square(change.sub_(expected[name]))
            total[1] += _square(expected[name])
        return {block: math.sqrt(difference / size) for block, (difference, size) in squares.items()}

    progress("float64: AdamW steps, ours")
    exact = {name: worst_relative_error(change, expected[name]) for name, change in moved(build(path, torch.float64))}
    progress(f"{str(dtype).removeprefix('torch.')}: AdamW steps, both")
    ours, theirs = by_block(build(path, dtype)), by_block(reference.load_reference(subject.theirs, dtype))
    return {"adamw": exact}, {"adamw": ours}, {"adamw": theirs}


def _square(tensor: Tensor) -> float:
    """The sum of its entries' squares."""
    norm = float(torch.linalg.vector_norm(tensor))
    return norm * norm


def _train(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """The parameters of ``model`` after five steps; the model is used up.

    AdamW divides each gradient by its own size, so with its usual eps of 1e-8 a step goes the full way in the direction of a
    gradient that is nothing but rounding error (that of every key bias, whose true gradient is zero), and a handful of such
    entries decide the figure: over eight seeds our error came out at 0.1 to 4 times transformers'. An eps of the gradients'
    own size keeps a step's error in proportion to its gradient's, and a small rate keeps five steps from amplifying it.
    """
    parameters = _named_parameters(model)
    decayed = [p for p in parameters.values() if p.ndim >= 2]
    rest = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-2, fused=True)
    for _ in range(STEPS):
        _backward(model, batch)
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return {name: p.detach() for name, p in parameters.items()}


def _backward(model: nn.Module, batch: Tensor) -> Tensor:
    """Fresh gradients of the mean loss over a batch (B, T + 1); returns the loss of every token (B T)."""
    model.zero_grad(set_to_none=True)
    out = model(batch[:, :-1])
    losses = token_losses(out if isinstance(out, Tensor) else out.logits, batch[:, 1:])
    losses.mean().backward()
    return losses.detach().flatten()


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removeprefix(PREFIX): p for name, p in model.named_parameters()}


def _named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient; zero where the loss does not reach it."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in _named_parameters(model).items()}
