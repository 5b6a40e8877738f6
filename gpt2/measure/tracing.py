"""Record every intermediate of a forward pass, of our model or transformers', under the same names.

Both have the checkpoint's module names, so the same hooks fit. No module outputs the attention scores and weights; they are
recorded where eager attention calls softmax. In the order of computation:

    wte, wpe, embed                                   token and position vectors, their sum (after dropout)
    h.N.ln_1
    h.N.attn.q, .k, .v                                the three thirds of c_attn
    h.N.attn.scores, .weights                         before softmax (masked scores as 0), after softmax
    h.N.attn.heads, h.N.attn.c_proj                   heads concatenated, and projected
    h.N.mid                                           the residual stream between the two branches
    h.N.ln_2, h.N.mlp.c_fc, .mlp.act, .mlp.c_proj
    h.N                                               the residual stream after the block
    ln_f, logits
"""

import itertools
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpt2.checkpoint.containers import require_whole_files
from gpt2.config import GPT2Config
from gpt2.model import GPT2, eager_attention, sdpa_attention

SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}
OUTSIDE = ("wte", "wpe", "embed", "ln_f", "logits")  # the points outside the blocks
# A block's modules -> points at their input and output; "" is the block itself.
TAPS: dict[str, tuple[str | None, str]] = {
    "ln_1": (None, "ln_1"),
    "attn.c_attn": (None, "attn.qkv"),
    "attn.c_proj": ("attn.heads", "attn.c_proj"),
    "ln_2": ("mid", "ln_2"),
    "mlp.c_fc": (None, "mlp.c_fc"),
    "mlp.c_proj": ("mlp.act", "mlp.c_proj"),
    "": (None, ""),
}

Recorded = dict[str, Tensor]
T = TypeVar("T")


def points(n_layer: int) -> list[str]:
    """Return every traced point of a model with ``n_layer`` blocks, in the order of computation."""
    parts = "ln_1 attn.q attn.k attn.v attn.scores attn.weights attn.heads attn.c_proj mid ln_2 mlp.c_fc mlp.act mlp.c_proj"
    blocks = [point_at(n, part) for n in range(n_layer) for part in (*parts.split(), "")]
    return [*OUTSIDE[:3], *blocks, *OUTSIDE[3:]]


def points_size(config: GPT2Config, rows: int, tokens: int) -> int:
    """Return how many numbers all traced points of (rows, tokens) ids have."""
    block = 10 * config.n_embd + 2 * config.inner + 2 * config.n_head * tokens
    return rows * tokens * (config.n_layer * block + 3 * config.n_embd + config.vocab_size)


def point_at(layer: int | None, part: str) -> str:
    """Return a point's name: of ``part`` ("attn.q", "" for the block's output) in a block, or outside the blocks."""
    if layer is None or part in OUTSIDE:
        return part
    return f"h.{layer}.{part}" if part else f"h.{layer}"


def layer_of(name: str) -> int | None:
    """Return the block of a point or parameter, such as 3 for ``h.3.attn.k``; None outside the blocks."""
    block = re.match(r"h\.(\d+)\b", name)
    return int(block[1]) if block else None


def block_of(name: str) -> str:
    """Return the table row of a point or parameter: "embed", "h.0" and so on, or "head"."""
    layer = layer_of(name)
    if layer is not None:
        return f"h.{layer}"
    return "embed" if re.match(r"(wte|wpe|embed)\b", name) else "head"


def part_of(name: str) -> str:
    """Return a point's name within its block: ``"h.3.attn.k"`` -> ``"attn.k"``."""
    return name.split(".", 2)[2] if name.count(".") > 1 else name


@torch.no_grad()
def trace(model: nn.Module, ids: Tensor) -> Recorded:
    """Run our model or transformers' on (B, T) ``ids`` with eager attention; return the tensor at each point."""
    recorded: Recorded = {}
    trace_steps(model, ids, recorded.update)
    return recorded


def trace_blocks(model: nn.Module, ids: Tensor) -> Iterator[Recorded]:
    """Yield :func:`trace` one block at a time, so two models can be traced side by side."""
    return stepwise(partial(trace_steps, model, ids))


@torch.no_grad()
def trace_steps(model: nn.Module, ids: Tensor, emit: Callable[[Recorded], None]) -> None:
    """Run :func:`trace` and give ``emit`` the points of the embeddings, of each block, and of the head, as they are computed."""
    root, recorded = root_of(model), Recorded()

    def take() -> Recorded:
        step = _in_order(recorded, len(root.h))
        recorded.clear()
        return step

    require_whole_files()
    with ExitStack() as stack:
        _use_eager_attention(model, stack)
        softmax = stack.enter_context(_SoftmaxTap(recorded))
        for module, name in ((root.wte, "wte"), (root.wpe, "wpe"), (root.ln_f, "ln_f")):
            _record(stack, recorded, module, after=name)
        _record(stack, recorded, root.h[0], before="embed")
        stack.callback(root.h[0].register_forward_pre_hook(lambda *_: emit(take())).remove)
        for layer, block in enumerate(root.h):
            stack.callback(block.register_forward_pre_hook(partial(softmax.enter, layer)).remove)
            for path, (before, after) in TAPS.items():
                _record(stack, recorded, block.get_submodule(path), before and point_at(layer, before), point_at(layer, after))
            stack.callback(block.register_forward_hook(lambda *_: emit(take())).remove)
        out = model(ids)
    recorded["logits"] = (out if isinstance(out, Tensor) else out.logits).detach()
    del out  # whoever has the step may let the logits go
    emit(take())


def stepwise(walk: Callable[[Callable[[T], None]], object]) -> Generator[T]:
    """Yield what ``walk`` gives to its argument. It runs in a thread that waits in between: so several advance side by side."""
    steps: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()
    onwards: SimpleQueue[bool] = SimpleQueue()

    def emit(step: T) -> None:
        steps.put((step,))
        del step  # the caller may let it go while this thread waits
        if not onwards.get():
            raise _Stopped

    def run() -> None:
        try:
            walk(emit)
            steps.put(None)
        except _Stopped:
            pass
        except BaseException as error:  # raised again in the caller's thread
            steps.put(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        while (step := steps.get()) is not None:
            if isinstance(step, BaseException):
                raise step
            yield step[0]
            del step
            onwards.put(True)
    finally:
        onwards.put(False)
        thread.join()


@torch.no_grad()
def trace_by_name(module: nn.Module, ids: Tensor, config: GPT2Config) -> Recorded:
    """Run somebody's module on (1, T) ``ids``; return the points that its modules' names and shapes tell.

    Its blocks are the outermost list of ``n_layer`` modules; modules with the checkpoint's names are recorded.
    Empty where the stream after each block is not found; without the logits, attention scores and weights in any case.
    """
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) == config.n_layer]
    blocks: list[nn.Module] = next((list(m) for m in lists if all(any(True for _ in each.parameters()) for each in m)), [])
    recorded: Recorded = {}
    with ExitStack() as stack:
        for path, each in module.named_modules():
            if (name := path.rpartition(".")[2]) in ("wte", "wpe", "ln_f"):
                _record(stack, recorded, each, after=name)
        for layer, block in enumerate(blocks):
            inside = dict(block.named_modules())
            for path, (before, after) in {**TAPS, "": ("embed" if layer == 0 else None, "")}.items():
                if path in inside:
                    _record(stack, recorded, inside[path], before and point_at(layer, before), point_at(layer, after))
        module(ids)
    wide = {"attn.qkv": 3 * config.n_embd, "mlp.c_fc": config.inner, "mlp.act": config.inner}
    shapes = {name: (1, ids.size(1), wide.get(part_of(name), config.n_embd)) for name in recorded}
    found = _in_order({name: x.cpu() for name, x in recorded.items() if x.shape == shapes[name]}, config.n_layer)
    stream = {"embed", *(point_at(layer, "") for layer in range(config.n_layer))}
    return found if stream <= found.keys() else {}


def grouped(recorded: Recorded) -> Iterator[Recorded]:
    """Yield what a whole forward pass recorded one block at a time, as :func:`trace_blocks` does."""
    for _, block in itertools.groupby(recorded.items(), lambda item: block_of(item[0])):
        yield dict(block)


class _Stopped(Exception):
    """The caller wants no further steps."""


def root_of(model: nn.Module) -> GPT2:
    """Return the module that holds the blocks; in both models it has our names."""
    return cast(GPT2, model if isinstance(model, GPT2) else model.transformer)


def _use_eager_attention(model: nn.Module, stack: ExitStack) -> None:
    """Use eager attention, which calls softmax, until ``stack`` closes; a custom attention stays in place."""
    if isinstance(model, GPT2):
        for block in model.h:
            if block.attn.attend is sdpa_attention:
                stack.callback(setattr, block.attn, "attend", sdpa_attention)
                block.attn.attend = eager_attention
    else:
        reference: Any = model
        stack.callback(reference.set_attn_implementation, reference.config._attn_implementation)
        reference.set_attn_implementation("eager")


def _in_order(recorded: Recorded, n_layer: int) -> Recorded:
    for name in [name for name in recorded if name.endswith("attn.qkv")]:
        for part, tensor in zip("qkv", recorded.pop(name).chunk(3, dim=-1), strict=True):
            recorded[f"{name.removesuffix('qkv')}{part}"] = tensor
    return {name: recorded[name].cpu() for name in points(n_layer) if name in recorded}


def _record(stack: ExitStack, recorded: Recorded, module: nn.Module, before: str | None = None, after: str | None = None) -> None:
    """Record the input of ``module`` at the point ``before`` and its output at ``after``, until ``stack`` closes."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorded[str(before)] = _copy(args[0] if args else next(iter(kwargs.values())))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recorded[str(after)] = _copy(output[0] if isinstance(output, tuple) else output)

    if before is not None:
        stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
    if after is not None:
        stack.callback(module.register_forward_hook(leave).remove)


def _copy(tensor: Any) -> Tensor:
    """Copy a tensor, since later operations may write in place; add a batch axis to positions (T, D)."""
    tensor = tensor.detach().clone() if isinstance(tensor, Tensor) else torch.empty(0)
    return tensor if tensor.ndim > 2 else tensor[None]


class _SoftmaxTap(TorchFunctionMode):
    """Record the input and output of each block's softmax."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self.recorded, self.layer = recorded, -1

    def enter(self, layer: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in SOFTMAX and self.layer >= 0:
            scores = args[0].detach()
            # Masked scores are -inf in one implementation, the lowest float in another; record 0.
            self.recorded[point_at(self.layer, "attn.scores")] = scores.tril(scores.size(-1) - scores.size(-2))
            self.recorded[point_at(self.layer, "attn.weights")] = result.detach().clone()
        return result
