"""Call somebody else's module: find the logits in what it returns, and keep torch from fusing its operators."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from gpt2.errors import InputError


def logits_of(output: Any) -> Tensor:
    """The logits in what a forward returns: a tensor; ``logits`` of an object or dict; the first tensor of three axes, or of two.

    Raises:
        ValueError: there are none.
    """
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    parts = [output, named] if named is None else [named]
    if not isinstance(output, Tensor) and named is None:
        parts = tree_leaves(dict(output) if isinstance(output, dict) else getattr(output, "__dict__", output))
    candidates = [part for part in parts if isinstance(part, Tensor) and part.is_floating_point() and part.ndim >= 2]
    if not candidates:
        raise ValueError(f"its forward returns {type(output).__name__} with no logits in it")
    return next((part for part in candidates if part.ndim > 2), candidates[0])


@contextmanager
def plain_attention() -> Iterator[None]:
    """Have torch compute attention by single operators: no fused kernel, no compiled graph."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            if "torch._dynamo" in sys.modules:  # it takes seconds to import, and without it nothing is compiled
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class ForwardError(InputError):
    """A module's forward pass fails."""


def error_line(error: Exception) -> str:
    """An exception of somebody else's code, in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
