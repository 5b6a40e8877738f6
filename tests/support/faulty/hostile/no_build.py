"""Has a `make`, and no `build`."""

from sound import build as make

__all__ = ["make"]
