"""Run an author's training step from given weights, a few calls at a time, and put the module back as it was."""

import gc
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.measure.allocator import give_back_freed_memory
from gpt2.measure.metrics import Progress
from gpt2.measure.user_code import error_line
from gpt2.port.recording.forward import Borrowed, plain_attention
from gpt2.port.step.loss import IGNORED, StepBatch
from gpt2.port.step.settings import StepSettings
from gpt2.port.step.watching import HALVES, Sampler, Watch, Watched

Step = Callable[[Tensor, Tensor], Any]
MakeStep = Callable[[nn.Module], Step]
Session = tuple[list[Watched], Sampler]  # its calls
OWN = ("data", "grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")  # what a step may set of a tensor
SHAPES = ("shape", "size", "view", "match", "dimension", "split")  # words of an error that another batch may avoid
SIZES = "; say the batch that it takes with --set batch_size=..., --set context=..., --set grad_accum=..."
MAX_WORK = 4e10  # parameters times tokens of one batch
DISTURBED = 1 + 2.0**-5  # a factor that half precision shows
MANY = 30e6  # parameters; above it memory is given back after each call


def random_batch(config: GPT2Config, settings: StepSettings, seed: int, *, padded: bool) -> StepBatch:
    """Return random ids, distinct within a row if possible, with all usual paddings; ``padded``: the last targets are ignored."""
    vocabulary, parts = config.vocab_size, settings.grad_accum or 1
    rows = settings.batch_size or max(4, 2 * parts)
    budget = max(2 * rows, int(MAX_WORK / config.num_parameters()))
    length = min(settings.context or 16, config.n_positions, max(2, budget // rows))
    generator = torch.Generator().manual_seed(seed)
    drawn = ((torch.randperm(vocabulary, generator=generator) for _ in range(length // vocabulary + 1)) for _ in range(rows))
    ids = torch.stack([torch.cat([*some])[: length + 1] for some in drawn])
    special = dict.fromkeys((0, config.eos_token_id or 0, vocabulary - 1))
    for number, id in enumerate(id for id in special if 0 <= id < vocabulary):
        row = number % rows
        if not bool((ids[row] == id).any()):
            ids[row, 1 + (number * 2) % max(1, length - 1)] = id
    left_out = torch.tensor([padded * (row * (length - 1) // (2 * rows) + (row == 0)) for row in range(rows)])
    return StepBatch(ids, ids[:, 1:].masked_fill(torch.arange(length) >= length - left_out[:, None], IGNORED))


class StepSubject:
    """A module with its weights, and ``make_step``; each :meth:`session` starts from these weights."""

    def __init__(self, module: nn.Module, make_step: MakeStep, vocabulary: int, watch: Progress) -> None:
        self.module, self.make_step, self.vocabulary, self.note_stage = module, make_step, vocabulary, watch
        self.maker = getattr(make_step, "__name__", "make_step")
        self.casts, self.keep_casts = set[str](), False  # those of the last call; whether they are kept, as it failed without
        self.keep_noise = False  # whether normal noise is drawn; dropout is not
        self.dtypes: dict[str, torch.dtype] = {}  # in which the step keeps each parameter
        self.large = sum(parameter.numel() for parameter in module.parameters()) > MANY

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Put back weights, gradients and hooks of the tensors afterwards, and all that a module keeps."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        kept = [(tensor, {name: getattr(tensor, name) for name in OWN}) for tensor in tensors]
        modes = [(part, part.training) for part in self.module.modules()]
        with Borrowed(self.module):
            try:
                for part, training in modes:  # a borrowed module is in eval mode
                    part.training = training
                for tensor in tensors:
                    tensor.data, tensor.grad = tensor.data.clone(), None
                yield
            finally:
                for tensor, name, value in ((tensor, *one) for tensor, own in kept for one in own.items()):
                    if tensor.is_leaf or name != "requires_grad":
                        setattr(tensor, name, value)

    def session(
        self, batches: Sequence[StepBatch], names: Collection[str] = (), factor: float = 1.0, *, as_written: bool = False
    ) -> Session:
        """Call a step on batches, in float64 without dropout or ``as_written``; ``factor`` multiplies weights of ``names``."""
        try:
            return self._session(batches, names, factor, as_written)
        except StepError:
            if as_written or self.keep_casts or not self.casts:
                raise
        finally:
            if self.large:
                gc.collect()  # an optimizer holds itself in cycles, and with it two tensors of each parameter
                give_back_freed_memory()
        self.keep_casts = True
        return self.session(batches, names, factor)

    def _session(self, batches: Sequence[StepBatch], names: Collection[str], factor: float, as_written: bool) -> Session:
        with torch.random.fork_rng(devices=[]), plain_attention(), self._restored():
            torch.manual_seed(0)
            before = dict(self.module.named_parameters())
            own = {name: p.dtype for name, p in before.items()}
            self._widen(as_written)
            for name in before.keys() & names:
                before[name].data.mul_(factor)
            step = self._made()
            sampler = Sampler(dict(self.module.named_parameters()))
            self.dtypes = {n: own.get(n, p.dtype) if p.dtype == torch.float64 else p.dtype for n, p in sampler.parameters.items()}
            self.halved = [name for name, dtype in self.dtypes.items() if dtype in HALVES]  # those in half precision
            self._widen(as_written)  # make_step may have added some
            calls = []
            for number, batch in enumerate(batches):
                if as_written and 0 < number == len(batches) - 1:  # an optimizer with its own copy of the weights undoes it
                    for parameter in sampler.parameters.values():
                        parameter.data.mul_(DISTURBED)
                calls.append(self._call(step, batch, sampler, as_written))
            return calls, sampler

    def _widen(self, as_written: bool) -> None:
        """Bring parameters and buffers into float64, unless the step is to be run as it is written."""
        for tensor in [] if as_written else [*self.module.parameters(), *self.module.buffers()]:
            if tensor.is_floating_point() and tensor.dtype != torch.float64:
                tensor.data = tensor.data.double()

    def _made(self) -> Step:
        with _theirs(f"{self.maker}(model), called with the model alone, fails"), torch.enable_grad():
            step = self.make_step(self.module)
        if not callable(step):
            words = "return a function step(x, y) that returns the loss"
            raise InputError(f"{self.maker}(model) returned {type(step).__name__}; {words}")
        return step

    def _call(self, step: Step, batch: StepBatch, sampler: Sampler, as_written: bool) -> Watched:
        device = next(iter(sampler.parameters.values())).device
        x, y = batch.ids.to(device), batch.targets.to(device)
        watch = Watch(self.module, sampler, self.vocabulary, keep_casts=as_written or self.keep_casts, as_written=as_written)
        watch.keep_noise, self.casts = self.keep_noise, watch.casts
        self.note_stage("step")
        with _theirs(f"its step fails on x and y of shape {tuple(x.shape)}", SIZES), watch, torch.enable_grad():
            loss = step(x.clone(), y.clone())
        self.note_stage("diagnosis")
        if self.large:
            give_back_freed_memory()
        watch.seen.loss = _number(loss, self.maker)
        return watch.seen


class StepError(InputError):
    """Raised when the author's code fails; its cause is the author's exception."""


@contextmanager
def _theirs(words: str, sizes: str = "") -> Iterator[None]:
    """Raise an error of the author's code as a StepError; ``sizes``: advice, if the error is of shapes."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        advice = sizes * any(word in str(error) for word in SHAPES)
        raise StepError(f"{words}: {error_line(error)}{advice}") from error


def _number(loss: Any, maker: str) -> float:
    loss = getattr(loss, "loss", loss)
    loss = loss.get("loss") if isinstance(loss, dict) else loss
    loss = loss[0] if isinstance(loss, (tuple, list)) and loss else loss
    try:
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError, RuntimeError):
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise InputError(f"the step of {maker} returned {kind}; return the loss, a number") from None
