"""What :func:`gpt2.diagnose` found, as frozen dataclasses; terminal text and JSON are made of them afterwards."""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

SURE, LIKELY, GUESS = 1.0, 0.8, 0.4  # what a confidence means: reproduced to the end; reproduced at its place; fits what is seen
LABEL, FIX = "how we know", "fix"
NARROW = 60  # below this many columns nothing can be laid out


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong with a port.

    ``id`` is a key of :data:`.causes.CAUSES`; ``where`` a traced point or a part of one, with a star for "in every block"
    (``h.*.mlp.act``, ``h.3.attn``, ``wte``); ``detail`` what the port does, in words to its author; ``evidence`` how we know;
    ``confidence`` from 0 to 1; ``fix`` what the corrected line computes.
    """

    id: str
    where: str
    detail: str
    evidence: str
    confidence: float
    fix: str


@dataclass(frozen=True)
class Divergence:
    """The first traced point at which a port departs from the reference; ``layer`` is None outside the blocks.

    ``error`` is the largest difference over the root mean square of the reference; infinite where shapes differ.
    """

    point: str
    layer: int | None
    error: float


@dataclass(frozen=True)
class Diagnosis:
    """``verdict`` is "equal", "mismatch" or "undetermined" (they differ, and no cause that is known here explains it all).

    ``causes`` come with the most likely first. ``notes`` are worth knowing and keep nobody from being equal. ``logits_error`` is
    the worst difference of a logit over the root mean square of the reference's; None where they cannot be compared.
    """

    verdict: str
    first_divergence: Divergence | None
    causes: tuple[Cause, ...]
    notes: tuple[str, ...] = ()
    module: str = "your module"
    checkpoint: str = "the checkpoint"
    logits_error: float | None = None

    @property
    def ok(self) -> bool:
        """The verdict is "equal"."""
        return self.verdict == "equal"

    def to_json(self) -> str:
        """As JSON; a number that is not finite is null."""
        return json.dumps(_finite(asdict(self)), indent=2, ensure_ascii=False)

    def table(self, width: int = 110) -> str:
        """For a terminal of ``width`` columns: the verdict, where, then each cause with how we know and what mends it."""
        width = max(width, NARROW)
        lines = [self._headline(), f"{self.module}  against  {self.checkpoint}"]
        for number, cause in enumerate(self.causes, 1):
            lines += ["", *_hung(f"{number:<3}{cause.id}  ", f"at {cause.where}", width), *_hung("   ", cause.detail, width)]
            for label, text in ((LABEL, cause.evidence), (FIX, cause.fix)):
                lines += _hung(f"   {label:<{len(LABEL)}}  ", text, width) if text else []
        if self.notes:
            lines.append("")
        for note in self.notes:
            lines += _hung("·  ", note, width)
        return "\n".join(lines)

    def _headline(self) -> str:
        at = self.first_divergence
        error = "" if self.logits_error is None else f"logits within {self.logits_error:.1e}"
        if self.ok:
            return f"EQUAL  {error}".rstrip()
        where = "" if at is None else f"  first at {at.point} (error {at.error:.1e})"
        return f"{self.verdict.upper()}{where}"


def merged(causes: Iterable[Cause], layers: int) -> list[Cause]:
    """Causes that differ in the block's number only as one: ``h.*`` where all ``layers`` blocks have it, else ``h.0, h.2``.

    The first one's words stand for all; the least confident one's confidence. The order of first appearance is kept.
    """
    groups: dict[tuple[str, str, str], list[Cause]] = {}
    for cause in causes:
        key = (cause.id, re.sub(r"\bh\.\d+", "h.#", cause.where), re.sub(r"\d+", "#", cause.detail))
        groups.setdefault(key, []).append(cause)
    found = []
    for same in groups.values():
        confidence = min(cause.confidence for cause in same)
        numbers = sorted({int(n) for cause in same for n in re.findall(r"\bh\.(\d+)", cause.where)})
        where = same[0].where
        if len(numbers) > 1 and len(numbers) == layers:
            where = re.sub(r"\bh\.\d+", "h.*", where, count=1)
        elif len(same) > 1:
            where = ", ".join(dict.fromkeys(cause.where for cause in same))
        found.append(replace(same[0], where=where, confidence=confidence))
    return found


def _hung(lead: str, text: str, width: int) -> list[str]:
    """``text`` wrapped beside ``lead``; what follows the first line stands under its first word."""
    lines: list[str] = []
    for line in text.splitlines() or [""]:
        indent = " " * len(lead)
        lines += textwrap.wrap(
            (lead if not lines else indent) + line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
