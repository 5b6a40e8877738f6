"""Every intermediate of a forward pass, under shared names.

Our modules and transformers' bear the checkpoint's names, so one set of hooks serves both. No module emits the attention scores
and weights; they are recorded where the eager paths call softmax. In the order of computation:

    wte, wpe, embed                                   token and position vectors, their sum (after dropout)
    h.N.ln_1
    h.N.attn.q, .k, .v                                the three thirds of c_attn
    h.N.attn.scores, .weights                         before softmax (what the mask spares), after softmax
    h.N.attn.heads, h.N.attn.c_proj                   heads side by side, and projected
    h.N.mid                                           the stream between the two branches
    h.N.ln_2, h.N.mlp.c_fc, .mlp.act, .mlp.c_proj
    h.N                                               the stream after the block
    ln_f, logits
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from queue import Queue
from threading import Event, Semaphore, Thread
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpt2.checkpoint.containers.mapped_file import require_whole_files
from gpt2.model import GPT2, eager_attention, sdpa_attention


class Attention(Protocol):
    """The parts of an attention module that are traced."""

    c_attn: nn.Module
    c_proj: nn.Module


class MLP(Protocol):
    """The parts of an MLP that are traced."""

    c_fc: nn.Module
    c_proj: nn.Module


class Block(nn.Module):
    """The names in a block, for the type checker; never instantiated."""

    ln_1: nn.Module
    attn: Attention
    ln_2: nn.Module
    mlp: MLP


class Root(Protocol):
    """The module that holds the blocks: our model itself, ``transformer`` in transformers'."""

    wte: nn.Embedding
    wpe: nn.Embedding
    h: Sequence[Block]
    ln_f: nn.Module


SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax}


def points(n_layer: int) -> list[str]:
    """Every traced point of a model with ``n_layer`` blocks, in the order of computation."""
    parts = "ln_1 attn.q attn.k attn.v attn.scores attn.weights attn.heads attn.c_proj mid ln_2 mlp.c_fc mlp.act mlp.c_proj"
    blocks = [f"h.{n}.{part}" if part else f"h.{n}" for n in range(n_layer) for part in (*parts.split(), "")]
    return ["wte", "wpe", "embed", *blocks, "ln_f", "logits"]


def point_at(layer: int | None, part: str) -> str:
    """The name of a traced point: of ``part`` ("attn.q", "" for the block's end) in a block, or outside of them all."""
    if layer is None or part in ("wte", "wpe", "embed", "ln_f", "logits"):
        return part
    return f"h.{layer}.{part}" if part else f"h.{layer}"


def layer_of(name: str) -> int | None:
    """The block that a traced point or a parameter lies in, such as 3 for ``h.3.attn.k``; None outside the blocks."""
    block = re.match(r"h\.(\d+)\b", name)
    return int(block[1]) if block else None


@torch.no_grad()
def trace(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Run ``model``, ours or transformers', on (B, T) ``ids`` through its eager attention; return the tensor at each point."""
    found: dict[str, Tensor] = {}
    run(model, ids, found, lambda: None)
    return _in_order(found, len(root_of(model).h))


def trace_blocks(model: nn.Module, ids: Tensor) -> Iterator[dict[str, Tensor]]:
    """:func:`trace`, a block at a time: embeddings, each block, final norm and logits. Yielded tensors are not kept.

    The forward pass runs in a thread that waits while the caller uses a block, so two models can be traced side by side.
    """
    blocks: Queue[dict[str, Tensor] | BaseException | None] = Queue()
    onwards = Semaphore(0)
    stopped = Event()

    def emit() -> None:
        blocks.put(_in_order(found, len(root_of(model).h)))
        found.clear()
        onwards.acquire()
        if stopped.is_set():
            raise _Stopped

    @torch.no_grad()
    def walk() -> None:
        onwards.acquire()
        try:
            if not stopped.is_set():
                run(model, ids, found, emit)
                blocks.put(_in_order(found, len(root_of(model).h)))
                blocks.put(None)
        except _Stopped:
            pass
        except BaseException as error:  # raised again in the caller's thread
            blocks.put(error)

    found: dict[str, Tensor] = {}
    thread = Thread(target=walk, daemon=True)
    thread.start()
    try:
        while True:
            onwards.release()
            block = blocks.get()
            if isinstance(block, BaseException):
                raise block
            if block is None:
                return
            yield block
            del block
    finally:
        stopped.set()
        onwards.release()
        thread.join()


class _Stopped(Exception):
    """The caller does not want further blocks."""


def run(model: nn.Module, ids: Tensor, found: dict[str, Tensor], emit: Callable[[], None]) -> None:
    """One traced forward pass into ``found``; ``emit`` is called when embeddings are done, and after each block."""
    root = root_of(model)
    require_whole_files()
    with ExitStack() as stack:
        stack.enter_context(_eager(model))
        for module, point, when in _taps(root):
            hook = _output_hook if when == "output" else _input_hook
            register = module.register_forward_hook if when == "output" else module.register_forward_pre_hook
            stack.callback(register(hook(found, point), with_kwargs=True).remove)
        softmax = stack.enter_context(_SoftmaxTap(found))
        for layer, block in enumerate(root.h):
            stack.callback(block.register_forward_pre_hook(softmax.enter(layer)).remove)
        stack.callback(root.h[0].register_forward_pre_hook(lambda *_: emit()).remove)
        for block in root.h:
            stack.callback(block.register_forward_hook(lambda *_: emit()).remove)
        out = model(ids)
    found["logits"] = (out if isinstance(out, Tensor) else out.logits).detach()


def root_of(model: nn.Module) -> Root:
    """The module of our model or of transformers' that holds the blocks."""
    return cast(Root, model if isinstance(model, GPT2) else model.transformer)


def _in_order(found: dict[str, Tensor], n_layer: int) -> dict[str, Tensor]:
    for name in [name for name in found if name.endswith("attn.qkv")]:
        for part, tensor in zip("qkv", found.pop(name).chunk(3, dim=-1), strict=True):
            found[f"{name.removesuffix('qkv')}{part}"] = tensor
    return {name: found[name] for name in points(n_layer) if name in found}


def _taps(root: Root) -> Iterator[tuple[nn.Module, str, str]]:
    yield from ((root.wte, "wte", "output"), (root.wpe, "wpe", "output"), (root.h[0], "embed", "input"))
    for n, block in enumerate(root.h):
        at = f"h.{n}"
        yield block.ln_1, f"{at}.ln_1", "output"
        yield block.attn.c_attn, f"{at}.attn.qkv", "output"
        yield block.attn.c_proj, f"{at}.attn.heads", "input"
        yield block.attn.c_proj, f"{at}.attn.c_proj", "output"
        yield block.ln_2, f"{at}.mid", "input"
        yield block.ln_2, f"{at}.ln_2", "output"
        yield block.mlp.c_fc, f"{at}.mlp.c_fc", "output"
        yield block.mlp.c_proj, f"{at}.mlp.act", "input"
        yield block.mlp.c_proj, f"{at}.mlp.c_proj", "output"
        yield block, at, "output"
    yield root.ln_f, "ln_f", "output"


def _output_hook(found: dict[str, Tensor], point: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        found[point] = _keep(output[0] if isinstance(output, tuple) else output)

    return hook


def _input_hook(found: dict[str, Tensor], point: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[point] = _keep(args[0] if args else next(iter(kwargs.values())))

    return hook


def _keep(tensor: Tensor) -> Tensor:
    """A copy, with a batch axis even where positions (T, D) had none: later operations may write in place."""
    tensor = tensor.detach().clone()
    return tensor if tensor.ndim > 2 else tensor[None]


class _SoftmaxTap(TorchFunctionMode):
    """Records the input and the output of the softmax of each block."""

    def __init__(self, found: dict[str, Tensor]) -> None:
        super().__init__()
        self.found, self.layer = found, -1

    def enter(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.layer = layer

        return hook

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in SOFTMAX and self.layer >= 0:
            scores = args[0].detach()
            # Masked scores are -inf in one implementation and the lowest float in another; they are recorded as 0.
            self.found[f"h.{self.layer}.attn.scores"] = scores.tril(scores.size(-1) - scores.size(-2))
            self.found[f"h.{self.layer}.attn.weights"] = result.detach().clone()
        return result


class _TheirConfig(Protocol):
    _attn_implementation: str


class _Theirs(Protocol):
    """The part of transformers' models that switches the attention function."""

    config: _TheirConfig

    def set_attn_implementation(self, name: str) -> None: ...


@contextmanager
def _eager(model: nn.Module) -> Iterator[None]:
    """Use the model's eager attention, which calls softmax; an attention function that is not ours stays in place."""
    if not isinstance(model, GPT2):
        theirs = cast(_Theirs, model)
        before = theirs.config._attn_implementation
        theirs.set_attn_implementation("eager")
        try:
            yield
        finally:
            theirs.set_attn_implementation(before)
        return
    swapped = [block.attn for block in model.h if block.attn.attend is sdpa_attention]
    for attention in swapped:
        attention.attend = eager_attention
    try:
        yield
    finally:
        for attention in swapped:
            attention.attend = sdpa_attention
