"""The result of :func:`gpt2.diagnose`: frozen dataclasses, rendered as terminal text and as JSON."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass

SURE, LIKELY = 1.0, 0.8  # confidence: the whole run was reproduced with this cause; reproduced at its place only
LABELS = "how we know", "fix"
MIN_WIDTH = 60  # columns that a table needs


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong with a port.

    ``id`` is a key of :data:`.causes.CAUSES`. ``where`` is a traced point or a part of one, with a star for "in every block"
    (``h.*.mlp.act``, ``h.3.attn``, ``wte``). ``detail`` says what the port does, in words to its author. ``evidence`` says how
    we know. ``confidence`` goes from 0 to 1. ``fix`` is what the corrected line computes.
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
    """``verdict`` is "equal", "mismatch" or "undetermined" (they differ, and the known causes do not explain it).

    ``causes`` are sorted, the most likely first. ``notes`` are facts that do not make the verdict worse. ``logits_error`` is the
    largest difference of a logit over the root mean square of the reference's; None where they cannot be compared.
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
        values = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return json.dumps(values, indent=2, ensure_ascii=False)

    def table(self, width: int = 110) -> str:
        """For a terminal of ``width`` columns: the verdict, the place, then each cause with its evidence and its fix."""
        width = max(width, MIN_WIDTH)
        lines = [self._headline(), f"{self.module}  against  {self.checkpoint}"]
        for number, cause in enumerate(self.causes, 1):
            lines += ["", *_wrapped(f"{number:<3}{cause.id}  ", f"at {cause.where}", width)]
            lines += _wrapped("   ", cause.detail, width)
            for label, text in zip(LABELS, (cause.evidence, cause.fix), strict=True):
                lines += _wrapped(f"   {label:<{len(LABELS[0])}}  ", text, width) if text else []
        notes = [line for note in self.notes for line in _wrapped("·  ", note, width)]
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def _headline(self) -> str:
        at = self.first_divergence
        error = "" if self.logits_error is None else f"logits within {self.logits_error:.1e}"
        if self.ok:
            return f"EQUAL  {error}".rstrip()
        where = "" if at is None else f"  first at {at.point} (error {at.error:.1e})"
        return f"{self.verdict.upper()}{where}"


def _wrapped(lead: str, text: str, width: int) -> list[str]:
    """``text`` wrapped beside ``lead``; further lines are indented to the first word."""
    return textwrap.wrap(lead + text, width, subsequent_indent=" " * len(lead), break_long_words=False, break_on_hyphens=False)
