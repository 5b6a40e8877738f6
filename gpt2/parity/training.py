"""The checks of a short training run: loss, gradients and five AdamW steps, ours against transformers'."""

from __future__ import annotations

import gc
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gpt2.checkpoint.keys import PREFIX
from gpt2.measure.allocator import machine_memory
from gpt2.measure.metrics import relative_error, token_losses, worst_relative_error
from gpt2.measure.tracing import layer_of
from gpt2.pages.reports import dtype_label
from gpt2.parity.checks import Subject
from gpt2.parity.report import MAPPING, ROUNDING, Check

STEPS = 5

TITLES = {"loss": "every token", "gradients": "every parameter", "adamw": f"change by {STEPS} steps"}


def training(subject: Subject) -> list[Check]:
    """Compare the loss, every gradient and five AdamW steps: directly in float64, and in ``dtype`` each against float64."""
    # 48 bytes a parameter: a float64 model, gradients, AdamW's moments, expected changes; the rest is fragmentation, as measured
    # at the peak of gpt2-medium.
    needed = 56 * subject.config.num_parameters()
    memory = machine_memory()
    if needed > 0.9 * memory:
        why = f"needs {needed / 1e9:.0f} GB of memory, this machine has {memory / 1e9:.0f}"
        return [Check(id, MAPPING, title, "float64", skipped=why) for id, title in TITLES.items()]
    checks = [check for measured in (_gradients, _steps) for check in measured(subject)]
    return sorted(checks, key=lambda check: check.kind == ROUNDING)


Errors = dict[str, float]  # by point


def _checks(id: str, dtype: torch.dtype, exact: Errors, ours: Errors, reference: Errors) -> list[Check]:
    rows = [(name, ours[name], error) for name, error in reference.items()]
    return [Check.mapping(id, TITLES[id], exact.items()), Check.rounding(f"{id}-rounding", TITLES[id], dtype, rows)]


@dataclass
class _Side:
    """A model, and for each parameter its errors against the float64 run, one per sequence."""

    model: nn.Module
    measure: Callable[[Tensor, Tensor], float]
    summary: Callable[[list[float]], float]
    losses: list[Tensor] = field(default_factory=list)
    errors: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add_gradients(self, expected: dict[str, Tensor]) -> None:
        for name, gradient in _named_gradients(self.model).items():
            self.errors[name].append(self.measure(gradient, expected[name]))


def _gradients(subject: Subject) -> list[Check]:
    """Compare the losses and gradients of all four models, one sequence after another.

    In float64 the worst sequence counts, and one long sequence is added. Rounding is judged by the root mean square over the
    sequences, because one near-tie in a softmax of a trained model may decide a sequence's gradient error.
    """
    reference = subject.reference(torch.float64)
    exact = _Side(subject.ours(torch.float64), worst_relative_error, max)
    ours = _Side(subject.ours(subject.dtype), relative_error, _root_mean_square)
    rounded = _Side(subject.reference(subject.dtype), relative_error, _root_mean_square)
    expected_losses = []
    for index, sequence in enumerate(subject.probe.sequences):
        subject.progress(f"gradients: sequence {index + 1} of {len(subject.probe.sequences)}")
        expected_losses.append(_backward(reference, sequence[None]))
        expected = _named_gradients(reference)
        for side in (exact, ours, rounded):
            side.losses.append(_backward(side.model, sequence[None]))
            side.add_gradients(expected)
            side.model.zero_grad(set_to_none=True)  # keeps the gradients of one model at a time, and the reference's
    long = torch.cat((subject.probe.traced, subject.probe.traced[:, :1]), dim=1)
    for model in (reference, exact.model):
        _backward(model, long)
    exact.add_gradients(_named_gradients(reference))
    sides = (exact, ours, rounded)
    losses = [{"loss": side.measure(torch.cat(side.losses), torch.cat(expected_losses))} for side in sides]
    gradients = [{name: side.summary(errors) for name, errors in side.errors.items()} for side in sides]
    return _checks("loss", subject.dtype, *losses) + _checks("gradients", subject.dtype, *gradients)


def _root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def _steps(subject: Subject) -> list[Check]:
    """Compare how far five AdamW steps moved every parameter, one model at a time."""
    batch = subject.probe.sequences[:2]
    start = subject.checkpoint.load().state_dict()  # memory-mapped: takes no extra memory
    gc.collect()  # transformers' models are in reference cycles; the next one needs their memory
    subject.progress("float64: AdamW steps, transformers'")

    def moved(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's name and change in float64; a float64 parameter is overwritten."""
        end = _train(model, batch)
        for name, before in start.items():
            yield name, end[name].double().sub_(before)

    expected = dict(moved(subject.reference(torch.float64)))

    def by_block(model: nn.Module) -> Errors:
        """Return the relative error of each block's whole change; a bias alone has too few entries for a stable figure."""
        squares: dict[str, list[float]] = {}
        for name, change in moved(model):
            block = "wte, wpe, ln_f" if layer_of(name) is None else f"h.{layer_of(name)}"
            total = squares.setdefault(f"{block} (all parameters)", [0.0, 0.0])
            total[0] += float(torch.linalg.vector_norm(change.sub_(expected[name]))) ** 2
            total[1] += float(torch.linalg.vector_norm(expected[name])) ** 2
        return {block: math.sqrt(difference / size) for block, (difference, size) in squares.items()}

    subject.progress("float64: AdamW steps, ours")
    exact = {name: worst_relative_error(change, expected[name]) for name, change in moved(subject.ours(torch.float64))}
    subject.progress(f"{dtype_label(subject.dtype)}: AdamW steps, both")
    ours, rounded = by_block(subject.ours(subject.dtype)), by_block(subject.reference(subject.dtype))
    return _checks("adamw", subject.dtype, exact, ours, rounded)


def _train(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Return the parameters of ``model`` after five AdamW steps, which change the model.

    AdamW divides each gradient by its own size. With the usual eps of 1e-8 a gradient of pure rounding error (that of every key
    bias, which is zero in exact arithmetic) takes a full step, and a few such entries decide the figure: over eight seeds our
    error was 0.1 to 4 times that of transformers. With an eps as large as the gradients, a step's error is in proportion to its
    gradient's. A small learning rate keeps five steps from amplifying it.
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
    """Compute new gradients of the mean loss over a batch (B, T + 1); return the loss of every token (B T)."""
    model.zero_grad(set_to_none=True)
    out = model(batch[:, :-1])
    losses = token_losses(out if isinstance(out, Tensor) else out.logits, batch[:, 1:])
    losses.mean().backward()
    return losses.detach().flatten()


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name.removeprefix(PREFIX): p for name, p in model.named_parameters()}


def _named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter's gradient; zero if the loss does not depend on it."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in _named_parameters(model).items()}
