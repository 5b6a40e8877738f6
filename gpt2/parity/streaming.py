"""Run a whole model, ours or transformers', in another dtype with the weights of one block at a time.

The model's own ``forward`` and ``backward`` run; only the memory of its parameters changes, so code that keeps a copy of a weight
would fail. README.md says how (gradient checkpointing: Chen et al., arXiv:1604.06174).
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial
from threading import local
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from gpt2.checkpoint.keys import PREFIX
from gpt2.measure.tracing import layer_of, root_of, stepwise

T = TypeVar("T")
Walk = Callable[[Callable[[T], None]], object]
Weights = dict[str, nn.Parameter]
Convert = Callable[[Tensor], Tensor]  # a stored parameter -> its values in the run
Receive = Callable[[int, int, dict[str, Tensor], Weights], None]  # (layer, sequence, its gradients, the block's parameters)
TURN = local()  # ``wait``: what a thread calls before a block, to let others compute the same one: it is converted once


def lockstep(*walks: Walk[T]) -> Generator[Iterator[T | None]]:
    """Advance several computations side by side; yield, for each step, what each gives in turn, None from one that has ended.

    A computation takes its step when it is asked, so what the one before gave can be let go first. All have to be asked.
    """
    with ExitStack() as stack:
        running, ended = [stack.enter_context(closing(stepwise(walk))) for walk in walks], False

        def row() -> Iterator[T | None]:
            nonlocal ended
            for walk in running:
                step = next(walk, None)
                ended &= step is None
                yield step

        while not ended:
            ended = True
            yield row()


@contextmanager
def taking_turns(wait: Callable[[], object]) -> Iterator[None]:
    """Call ``wait`` before each block of a forward pass in this thread."""
    TURN.wait = wait
    try:
        yield
    finally:
        del TURN.wait


def side_by_side(*runs: Callable[[], Tensor]) -> list[Tensor]:
    """Return what each gives, without gradients; they take turns, a block at a time: it is converted once for all."""
    results: dict[int, Tensor] = {}

    @torch.no_grad()
    def walk(number: int, emit: Callable[[int], None]) -> None:
        with taking_turns(partial(emit, number)):
            results[number] = runs[number]()

    with closing(lockstep(*(partial(walk, number) for number in range(len(runs))))) as steps:
        for row in steps:
            list(row)
    return [results[number] for number in range(len(runs))]


class Converted:
    """Parameters in one dtype, converted once for all models that share a stored tensor; keep ``limit`` bytes."""

    def __init__(self, dtype: torch.dtype, limit: float = math.inf) -> None:
        self.dtype, self.limit = dtype, limit
        self._kept: OrderedDict[Any, tuple[Tensor, Tensor]] = OrderedDict()  # the source too, so that its address stays its own
        self._bytes = 0

    def __call__(self, stored: Tensor) -> Tensor:
        """Return ``stored`` in the dtype, from the cache if it was converted lately; the tensor itself if nothing changes."""
        if stored.dtype == self.dtype:
            return stored
        key = (stored.data_ptr(), stored.shape, stored.stride())
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        converted = stored.to(self.dtype)
        self._kept[key] = (stored, converted)
        self._bytes += converted.nbytes
        while self._bytes > self.limit and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1][1].nbytes
        return converted


class Streamed:
    """A context in which ``model`` computes with the converted ``weights``, forward and backward, a block at a time.

    ``weights`` converts the blocks' parameters and the final norm's, which counts as one more block; ``outside`` those of the
    embeddings and an untied head, for the whole context. ``pulse`` is called with the layer when a block begins, and may raise to
    stop. ``receive`` is called in the backward pass with each block's gradients of each sequence.
    """

    def __init__(
        self, model: nn.Module, weights: Convert, outside: Convert, pulse: Callable[[int], None], receive: Receive | None = None
    ) -> None:
        self.model, self.weights, self.convert_outside, self.pulse, self.receive = model, weights, outside, pulse, receive
        self.again: AbstractContextManager[object] = nullcontext()  # entered where a block is computed again
        self.anchor = torch.zeros((), requires_grad=True)  # makes a block differentiable even if its input is not
        named = {name.removeprefix(PREFIX): p for name, p in model.named_parameters()}
        self.outside = {name: p for name, p in named.items() if name.startswith(("wte", "wpe", "lm_head"))}
        self.final = len(root_of(model).h)
        self.blocks: list[Weights] = [{} for _ in range(self.final + 1)]
        for name, parameter in named.items():
            if name not in self.outside:
                layer = layer_of(name)
                self.blocks[self.final if layer is None else layer][name] = parameter

    def __enter__(self) -> "Streamed":
        self.stack = ExitStack()
        self.stack.enter_context(self._placed(self.outside, self.convert_outside))
        root = root_of(self.model)
        units = {int(name): block for name, block in cast(nn.ModuleList, root.h).named_children()} | {self.final: root.ln_f}
        for layer, block in units.items():
            own = vars(block).get("forward")
            undo = partial(setattr, block, "forward", own) if own else partial(delattr, block, "forward")
            block.forward = partial(self._forward, layer, block.forward)
            self.stack.callback(undo)
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    @contextmanager
    def _placed(self, parameters: Weights, convert: Convert) -> Iterator[None]:
        """Give parameters their converted values; afterwards the stored ones, without gradients."""
        stored = {name: p.data for name, p in parameters.items()}
        try:
            for name, p in parameters.items():
                p.data = convert(stored[name])
            yield
        finally:
            for name, p in parameters.items():
                p.grad = None
                p.data = stored[name]

    def _forward(self, layer: int, run: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_grad_enabled():
            return _Block.apply(x, self.anchor, self, layer, run, args, kwargs)  # type: ignore[no-untyped-call]
        return self.compute(layer, run, x, args, kwargs)

    def compute(self, layer: int, run: Callable[..., Tensor], x: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Run one block with its weights in place."""
        if hasattr(TURN, "wait"):
            TURN.wait()
        self.pulse(layer)
        with self._placed(self.blocks[layer], self.weights):
            return run(x, *args, **kwargs)

    def gradient(self, layer: int, run: Callable[..., Tensor], x: Tensor, upstream: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Return the gradient of the block's input (B, T, D), and hand out those of its parameters, one sequence at a time."""
        self.pulse(layer)
        rows = len(x)

        def own(value: Any, row: int) -> Any:
            return value[row : row + 1] if isinstance(value, Tensor) and value.ndim and len(value) == rows > 1 else value

        gradients = []
        with self._placed(self.blocks[layer], self.weights):
            for row in range(rows):
                one = x[row : row + 1].detach().requires_grad_()
                with torch.enable_grad(), self.again:
                    y = run(one, *(own(a, row) for a in args), **{key: own(a, row) for key, a in kwargs.items()})
                if y.requires_grad:
                    y.backward(upstream[row : row + 1])
                gradients.append(torch.zeros_like(one) if one.grad is None else one.grad)
                del y
                if self.receive is not None:
                    self.receive(layer, row, take_gradients(self.blocks[layer]), self.blocks[layer])
        return torch.cat(gradients)


def take_gradients(parameters: Weights) -> dict[str, Tensor]:
    """Return and clear every parameter's gradient; zero if the loss does not depend on it."""
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    return gradients


class _Block(torch.autograd.Function):
    """One block of a :class:`Streamed` model, which keeps its input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, streamed: Streamed, layer: int, run: Any, args: Any, kwargs: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.again = partial(streamed.gradient, layer, run), args, kwargs
        return streamed.compute(layer, run, x, args, kwargs)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradient, args, kwargs = ctx.again
        (x,) = ctx.saved_tensors
        return gradient(x, upstream, args, kwargs), None, None, None, None, None, None
