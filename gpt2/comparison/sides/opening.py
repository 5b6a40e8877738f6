"""Open a side by name: the one place where the kinds of sides are told apart."""

from __future__ import annotations

from gpt2.comparison.reference_file import TRACE_PREFIX
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.side import Side
from gpt2.comparison.sides.trace_side import TraceSide


def open_side(name: str, *, offline: bool = False, dtype: str | None = None) -> Side:
    """Open a side; ``dtype`` is for a model whose name gives none. Raises InputError: no such side, or its engine is missing."""
    if name.startswith(TRACE_PREFIX):
        return TraceSide.open(name)
    return CheckpointSide.open(name, offline=offline, dtype=dtype)
