"""The result of :func:`gpt2.diagnose`: frozen dataclasses, rendered as terminal text and as JSON."""

import json
import textwrap
from dataclasses import asdict, dataclass

import torch

from gpt2.measure.environment import environment
from gpt2.measure.tracing import layer_of
from gpt2.port.terms.causes import Cause

LABELS = "how we know", "fix"
PRINTED = "id", "where", "detail", "evidence", "confidence", "fix", "effect"  # of a cause, in JSON
MIN_WIDTH = 60  # minimum columns of a table
SHOWN = 1e-9  # an error below it is zero for a reader


@dataclass(frozen=True)
class Divergence:
    """The first traced point where a port departs from the reference.

    ``error`` is the largest difference over the root mean square of the reference; infinite if shapes differ.
    """

    point: str
    error: float

    @property
    def layer(self) -> int | None:
        """The number of its block, None outside the blocks."""
        return layer_of(self.point)


@dataclass(frozen=True)
class Diagnosis:
    """The result: ``verdict`` is "equal", "mismatch" or "undetermined" (logits differ, and no known causes explain it).

    ``causes``: first what moves the logits most. ``notes``: facts that do not affect the verdict. ``logits_error``: the largest
    difference of a logit over the root mean square of the reference's, or None. ``seen``: "module", "dump" or "logits".
    """

    verdict: str
    first_divergence: Divergence | None
    causes: tuple[Cause, ...]
    notes: tuple[str, ...] = ()
    module: str = "your module"
    checkpoint: str = "the checkpoint"
    logits_error: float | None = None
    seen: str = "module"

    @property
    def ok(self) -> bool:
        """Whether the verdict is "equal"."""
        return self.verdict == "equal"

    def to_json(self) -> str:
        """Return the diagnosis as JSON; a number that is not finite is null."""
        at = self.first_divergence
        first = at and {"point": at.point, "layer": at.layer, "error": at.error}
        causes = [{name: getattr(one, name) for name in PRINTED} for one in self.causes]
        values = vars(self) | {"first_divergence": first, "causes": causes}
        values |= {"environment": asdict(environment([torch.float64]))}
        values = json.loads(json.dumps(values), parse_constant=lambda _: None)
        return json.dumps(values, indent=2, ensure_ascii=False)

    def table(self, width: int = 110) -> str:
        """Return text for a terminal of ``width`` columns: verdict, place, then each cause with evidence and fix."""
        width = max(width, MIN_WIDTH)
        lines = [self._headline(), f"{self.module}  against  {self.checkpoint}"]
        for number, cause in enumerate(self.causes, 1):
            lines += ["", *_wrapped(f"{number:<3}{cause.id}  ", f"at {cause.where}", width)]
            size = cause.effect
            moves = "" if size is None else f"; this alone moves the logits by {size:.{3 if size >= 100 else 2}g}"
            lines += _wrapped("   ", cause.detail + moves, width)
            for label, text in zip(LABELS, (cause.evidence, cause.fix), strict=True):
                lines += _wrapped(f"   {label:<{len(LABELS[0])}}  ", text, width) if text else []
        notes = [line for note in self.notes for line in _wrapped("·  ", note, width)]
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def _headline(self) -> str:
        at = self.first_divergence
        error = "" if self.logits_error is None else f"logits within {self.logits_error:.1e}"
        if self.ok:
            return f"EQUAL  {error}".rstrip()
        where = "" if at is None else f"  first at {at.point}" + (f" (error {at.error:.1e})" if at.error >= SHOWN else "")
        most = f", most by {self.causes[0].id}" if len(self.causes) > 1 and self.causes[0].effect is not None else ""
        return f"{self.verdict.upper()}{where}{most}"


def _wrapped(lead: str, text: str, width: int) -> list[str]:
    """Wrap ``text`` beside ``lead``; further lines are indented to the first word."""
    return textwrap.wrap(lead + text, width, subsequent_indent=" " * len(lead), break_long_words=False, break_on_hyphens=False)
