"""Imports the file beside it, as ports of more than one file do."""

from sound import build

__all__ = ["build"]
