"""Call a user's module: borrow it in eval mode and in float64, find the logits, and disable fused operators."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from gpt2.errors import InputError

INNER = ("_parameters", "_buffers", "_modules")  # torch's dictionaries, which change in place


def logits_of(output: Any, ids: Tensor, vocabulary: int | None = None) -> Tensor:
    """Return the logits (B, T', V) in what a module returned for ``ids`` (B, T); raise ValueError if there are none.

    They are ``output.logits``, else the tensor that has a row for each token or for each sequence, and as many columns as the
    ``vocabulary``, or more where it is padded; if no tensor has, the first of three axes, or of two. Logits that are flattened
    for the loss, (B * T, V), get their axes back.
    """
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    inside = dict(output) if isinstance(output, dict) else getattr(output, "__dict__", None) or output
    parts = tree_leaves(inside) if named is None else [named]
    candidates = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point() and part.ndim >= 2]
    if not candidates:
        raise ValueError(f"its forward returns {type(output).__name__} with no logits in it")

    def unlikeness(part: Tensor) -> tuple[bool, float, bool]:
        rows, columns = part.shape[:-1].numel(), part.shape[-1]
        columns_apart = 0.0 if vocabulary is None else columns - vocabulary if columns >= vocabulary else math.inf
        return rows not in (ids.numel(), len(ids)) or columns_apart == math.inf, columns_apart, part.ndim == 2

    logits = min(candidates, key=unlikeness)
    if logits.ndim == 2 and len(logits) in (ids.numel(), len(ids)):
        return logits.unflatten(0, (len(ids), -1))
    return logits


@contextmanager
def plain_attention() -> Iterator[None]:
    """Make torch compute attention by single operators: no fused kernel, no compiled graph."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if "torch._dynamo" in sys.modules:  # importing it takes seconds; without it nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class ForwardError(InputError):
    """Raised when a module's forward pass fails."""


def error_line(error: Exception) -> str:
    """Return an exception of the user's code in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


class Borrowed:
    """A module in eval mode that may be changed; leaving the context restores all except what :meth:`keep` names.

    Modes, attributes and buffers are restored; objects that the module refers to (a growing list, for example) are not. This is
    the module itself, not a copy: many modules cannot be copied, and a lambda in a copy still calls the original's layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.tensors: dict[str, Tensor] = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        self._kept: set[int] = set()
        self._swapped: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor, and its original data

    def __enter__(self) -> Borrowed:
        self._modes = [(part, part.training) for part in self.module.modules()]
        plain = [part for part in self.module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        self._attributes = [(part, dict(vars(part)), {name: dict(getattr(part, name)) for name in INNER}) for part in plain]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()]
        for part, _ in self._modes:  # some modules override eval()
            part.training = False
        return self

    def to_float64(self) -> None:
        """Replace parameters and floating-point buffers by float64 copies; keep the originals."""
        self._buffers = [(buffer, before) for buffer, before in self._buffers if not torch.equal(buffer, before)]
        for tensor in self.tensors.values():
            if tensor.is_floating_point() and id(tensor) not in self._swapped:
                self._swapped[id(tensor)] = tensor, tensor.data
                tensor.data = tensor.data.double()

    def to_own_dtype(self) -> None:
        """Round the float64 values to each tensor's own dtype."""
        for tensor, before in self._swapped.values():
            tensor.data = tensor.data.to(before.dtype)

    def keep(self, names: Iterable[str]) -> None:
        """Let these tensors keep their final values after the context ends."""
        self._kept |= {id(self.tensors[name]) for name in names}

    @torch.no_grad()
    def __exit__(self, *error: object) -> None:
        for tensor, before in self._swapped.values():
            if id(tensor) in self._kept:
                before.copy_(tensor.data)
            tensor.data = before
        for buffer, before in self._buffers:
            if id(buffer) not in self._kept:
                buffer.copy_(before)
        for part, attributes, inner in self._attributes:
            vars(part).clear()
            vars(part).update(attributes)
            for name, content in inner.items():
                getattr(part, name).clear()
                getattr(part, name).update(content)
        for part, training in self._modes:
            part.training = training
