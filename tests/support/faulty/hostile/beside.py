"""Imports the file beside it, as ports of several files do."""

from sound import build

__all__ = ["build"]
