"""Cut a text into windows, so that every token is predicted once and from a stated amount of context."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.checkpoint.containers import require_whole_files
from gpt2.errors import InputError


class Window(NamedTuple):
    """Inputs ``ids[start:end]`` of a text; the tokens after inputs ``first`` .. ``end - 1`` are scored."""

    start: int
    end: int
    first: int


@dataclass(frozen=True)
class Windows:
    """How a text is cut: windows of ``context`` inputs that move by ``stride`` (default: ``context``, no overlap).

    Every token but the first is scored exactly once: in the first window that reaches it. All windows have the same length; the
    last one starts earlier if needed. ``guide`` cuts as Hugging Face's guide "Perplexity of fixed-length models": ``context``
    counts the scored token too, the first token of a window without overlap is not scored, and the last window may be shorter.
    """

    context: int
    stride: int | None = None
    guide: bool = False

    @property
    def step(self) -> int:
        """The distance between windows, in tokens."""
        return self.context if self.stride is None else self.stride

    def of(self, n: int) -> Iterator[Window]:
        """Yield the windows of ``n`` tokens. Raises InputError: nothing to predict, no context, or a stride that skips tokens."""
        context, step = self.context, self.step
        if n < 2:
            raise InputError(f"a text of {n} tokens has none to predict; give a longer one")
        if context < 1 + self.guide:
            raise InputError(f"context {context}: a token is predicted from at least 1; give {1 + self.guide} or more")
        if not 1 <= step <= context:
            raise InputError(f"stride {step} is not within 1 .. {context}, the context: tokens would be skipped, or none reached")
        if self.guide:
            yield from self._of_guide(n)
            return
        end = min(context, n - 1)
        yield Window(0, end, 0)
        while end < n - 1:
            first, end = end, min(end + step, n - 1)
            yield Window(max(0, end - context), end, first)

    def _of_guide(self, n: int) -> Iterator[Window]:
        end = 0  # of the window's tokens, including its last target
        for start in range(0, n, self.step):
            before, end = end, min(start + self.context, n)
            if end - start > 1:
                yield Window(start, end - 1, max(start, before - 1))
            if end == n:
                return

    def batches(self, ids: Tensor, batch_size: int | None = None) -> Iterator[tuple[Tensor, list[Window]]]:
        """Yield a text's (N,) windows as inputs (B, T), B at most ``batch_size`` (default: 1024 tokens)."""
        batch_size = max(1, 1024 // max(1, self.context)) if batch_size is None else batch_size
        for _, equally_long in itertools.groupby(self.of(len(ids)), lambda window: window.end - window.start):
            while group := list(itertools.islice(equally_long, batch_size)):
                require_whole_files()
                yield torch.stack([ids[window.start : window.end] for window in group]), group


@dataclass(frozen=True)
class RowWindows(Windows):
    """A text of rows that were run separately, each of ``context`` inputs and the token after them."""

    @property
    def step(self) -> int:
        return self.context + 1

    def of(self, n: int) -> Iterator[Window]:
        if self.context < 1 or n < 2:
            raise InputError(f"rows of {min(n, self.step)} tokens leave none to predict; give longer ones")
        for start in range(0, n, self.step):
            if (end := min(start + self.context, n - 1)) > start:
                yield Window(start, end, start)
