"""Mistakes as patches: texts that a right program has once, and what stands there instead."""

from collections.abc import Iterable


def patched(source: str, patches: Iterable[tuple[str, str]]) -> str:
    """Return ``source`` with each old text, which must be there exactly once, replaced by its new one; else ValueError."""
    for old, new in patches:
        if source.count(old) != 1:
            raise ValueError(f"{old!r} is there {source.count(old)} times, not once")
        source = source.replace(old, new)
    return source
