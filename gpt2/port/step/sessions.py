"""Run an author's training step from given weights, a few calls at a time, and put the module back as it was."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.measure.allocator import give_back_freed_memory
from gpt2.measure.user_code import error_line
from gpt2.port.recording.forward import plain_attention
from gpt2.port.step.labels import Batch
from gpt2.port.step.records import Sampler, Watched
from gpt2.port.step.settings import Settings
from gpt2.port.step.watching import Casts, Watch

Step = Callable[[Tensor, Tensor], Any]
MakeStep = Callable[[nn.Module], Step]
Change = Callable[[dict[str, nn.Parameter]], None]  # changes the weights before a session
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
ATTRIBUTES = ("_parameters", "_buffers", "_modules")
MAX_TOKENS = 512  # of one batch, where nothing is said of its size
MAX_WORK = 4e10  # parameters times tokens of one batch
MANY = 30e6  # parameters; above it memory is given back after each call


class Batches:
    """Batches of random token ids, of the size that the settings say; distinct within a row where the vocabulary allows."""

    def __init__(self, config: GPT2Config, settings: Settings) -> None:
        vocabulary = self.vocabulary = config.vocab_size
        parts = settings.grad_accum or 1
        rows = settings.batch_size or max(4, 2 * parts)
        length = min(settings.context or 16, config.n_positions)
        budget = max(2 * rows, int(MAX_WORK / config.num_parameters()))
        if rows * length > budget:
            length = max(2, budget // rows)
        self.rows, self.length = rows, length
        self.special = [0, config.eos_token_id or 0, vocabulary - 1]

    def batch(self, seed: int, *, ignored: bool = False) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        width = self.length + 1
        if self.vocabulary >= width:
            rows = [torch.randperm(self.vocabulary, generator=generator)[:width] for _ in range(self.rows)]
        else:
            start = torch.randint(self.vocabulary, (self.rows, 1), generator=generator)
            steps = torch.randint(1, max(2, self.vocabulary), (self.rows, width), generator=generator)
            rows = list((start + steps.cumsum(1)) % self.vocabulary)
        ids = torch.stack(rows)
        for number, id in enumerate(dict.fromkeys(i for i in self.special if 0 <= i < self.vocabulary)):
            row, place = number % self.rows, 1 + (number * 2) % max(1, width - 2)
            if not bool((ids[row] == id).any()):
                ids[row, place] = id
        if not ignored:
            return Batch(ids)
        mask = torch.zeros_like(ids[:, 1:], dtype=torch.bool)
        for row in range(self.rows):  # another number in each row
            count = (row * (width - 2)) // (2 * self.rows) + (row == 0)
            if count:
                mask[row, -count:] = True
        return Batch(ids, mask)


class Subject:
    """A module with its weights, and ``make_step``; each :meth:`session` starts from these weights."""

    def __init__(self, module: nn.Module, make_step: MakeStep, vocabulary: int, watch: Callable[[str], None]) -> None:
        self.module, self.make_step, self.vocabulary = module, make_step, vocabulary
        self.maker = getattr(make_step, "__name__", "make_step")
        self.casts = Casts.NONE
        self.note_stage = watch
        self.large = sum(parameter.numel() for parameter in module.parameters()) > MANY

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Put back weights, gradients, hooks, attributes and modes of the module afterwards."""
        parts = list(self.module.modules())
        tensors = [*self.module.parameters(), *self.module.buffers()]
        kept = [(t, t.data, t.requires_grad, t.grad, [getattr(t, hooks) for hooks in HOOKS]) for t in tensors]
        attributes = [(part, dict(vars(part)), _inner(part)) for part in parts if not isinstance(part, torch.jit.ScriptModule)]
        try:
            for tensor in tensors:
                tensor.data, tensor.grad = tensor.data.clone(), None
            yield
        finally:
            for tensor, data, required, gradient, hooks in kept:
                tensor.data = data
                tensor.requires_grad_(required) if tensor.is_leaf else None
                tensor.grad = gradient
                for name, value in zip(HOOKS, hooks, strict=True):
                    setattr(tensor, name, value)
            for part, values, inner in attributes:
                vars(part).clear()
                vars(part).update(values)
                for name, content in inner.items():
                    getattr(part, name).clear()
                    getattr(part, name).update(content)

    def session(
        self, batches: Sequence[Batch], change: Change | None = None, *, as_written: bool = False
    ) -> tuple[list[Watched], Sampler]:
        """Call a new step on each batch, in float64 and without dropout, or ``as_written``; return what was seen.

        Raises:
            InputError: the step fails, returns no number, returns NaN, or trains another module.
        """
        while True:
            try:
                return self._session(batches, change, as_written)
            except _CastsNeeded:
                self.casts = Casts.SCALARS if self.casts is Casts.NONE else Casts.ALL
            finally:
                if self.large:
                    gc.collect()  # an optimizer holds itself in cycles, and with it two tensors of each parameter
                    give_back_freed_memory()

    def _session(self, batches: Sequence[Batch], change: Change | None, as_written: bool) -> tuple[list[Watched], Sampler]:
        with torch.random.fork_rng(devices=[]), plain_attention(), self._restored():
            torch.manual_seed(0)
            before = dict(self.module.named_parameters())
            if not as_written:
                self._widen()
            if change is not None:
                with torch.no_grad():
                    change(before)
            step = self._made()
            parameters = dict(self.module.named_parameters())
            if not as_written:  # make_step may have added some
                self._widen()
            sampler = Sampler(parameters)
            device = next(iter(parameters.values())).device
            seen = [self._call(step, batch, sampler, device, as_written) for batch in batches]
            return seen, sampler

    def _widen(self) -> None:
        """Bring parameters and buffers into float64."""
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            if tensor.is_floating_point() and tensor.dtype != torch.float64:
                tensor.data = tensor.data.double()

    def _made(self) -> Step:
        with torch.enable_grad():
            try:
                step = self.make_step(self.module)
            except InputError:
                raise
            except Exception as error:
                raise StepError(f"{self.maker}(model) fails: {error_line(error)}") from error
        if not callable(step):
            raise InputError(
                f"{self.maker}(model) returned {type(step).__name__}; return a function step(x, y) that returns the loss"
            )
        return step

    def _call(self, step: Step, batch: Batch, sampler: Sampler, device: torch.device, as_written: bool) -> Watched:
        x, y = batch.ids.to(device), batch.targets.to(device)
        casts = Casts.ALL if as_written else self.casts
        watch = Watch(self.module, sampler, Watched(), casts, self.vocabulary, keep_random=as_written)
        try:
            self.note_stage("step")
            with watch, torch.enable_grad():
                loss = step(x.clone(), y.clone())
            self.note_stage("diagnosis")
        except InputError:
            raise
        except Exception as error:
            if casts is not Casts.ALL and watch.casts:
                raise _CastsNeeded from error
            raise StepError(
                f"its step fails on x and y of shape {tuple(x.shape)}: {error_line(error)}{_advice(error)}"
            ) from error
        if self.large:
            give_back_freed_memory()
        seen = watch.seen
        seen.loss = _number(loss, self.maker)
        widths = {one.logits.shape[-1] for one in seen.forwards}
        seen.half = seen.half or (not as_written and any(shape and shape[-1] in widths for shape in watch.halved))
        return seen


class StepError(InputError):
    """Raised when the author's code fails; its cause is the author's exception."""


class _CastsNeeded(Exception):
    """Raised when a step fails because its casts to narrower dtypes were removed."""


def _advice(error: Exception) -> str:
    text = str(error)
    if any(word in text for word in ("shape", "size", "view", "match", "dimension", "split")):
        return "; say the batch that it takes with --set batch_size=..., --set context=..., --set grad_accum=..."
    return ""


def _number(loss: Any, maker: str) -> float:
    loss = getattr(loss, "loss", loss)
    if isinstance(loss, dict):
        loss = loss.get("loss")
    if isinstance(loss, (tuple, list)) and loss:
        loss = loss[0]
    try:
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError, RuntimeError):
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"the step of {maker} returned {kind}; return the loss, a number") from None


def _inner(part: nn.Module) -> dict[str, dict[str, Any]]:
    """Return copies of a module's dictionaries that change in place: parameters, buffers, modules and hooks."""
    names = [name for name, value in vars(part).items() if name in ATTRIBUTES or name.endswith("hooks")]
    return {name: dict(value) for name in names if isinstance(value := vars(part)[name], dict)}


def takes_model(make_step: Callable[..., Any], name: str) -> None:
    """Raise InputError if ``make_step`` cannot be called with the module alone."""
    try:
        parameters = inspect.signature(make_step).parameters.values()
    except (TypeError, ValueError):
        return
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required) or not list(parameters):
        call = f"{name}({', '.join(p.name for p in parameters)})"
        raise InputError(f"{call}: is called with the model alone; give the other arguments defaults, and return step(x, y)")


def scaled(names: Iterable[str], factor: float) -> Change:
    """Return a change that multiplies these parameters."""
    chosen = set(names)

    def change(parameters: dict[str, nn.Parameter]) -> None:
        done: set[int] = set()
        for name, parameter in parameters.items():
            if name in chosen and parameter.data_ptr() not in done:
                done.add(parameter.data_ptr())
                parameter.data.mul_(factor)

    return change
