"""Decide whether a diagnosis is right: one rule for the tests and for tools/diagnose_table.py."""

import re
from dataclasses import dataclass

from support.faulty import Faulty

# Ports of tests/support/ports with GPT-2's logits and still a fault: the logits of columns beyond the vocabulary are zero and
# not minus infinity; an attention mask moves the positions and masks nothing.
FAULTY_AFTER_ALL = {"interleaved": "padded-vocab"}


@dataclass(frozen=True)
class Row:
    """The result of one port: the place where it first differs and the causes ("id place"), as said and as they are."""

    port: Faulty
    verdict: str
    said: tuple[str, ...]  # the point, then the causes
    seconds: float = 0.0  # wall-clock time
    cpu: float = 0.0  # CPU time of all threads, for a machine with other load

    @property
    def outcome(self) -> str:
        """The column of the confusion table."""
        if self.verdict == "equal":
            return "called equal"
        if self.first:
            return "first"
        return "undetermined" if self.verdict == "undetermined" else "wrong"

    @property
    def first(self) -> bool:
        """Whether the first cause is one of the faults."""
        return bool(_ids(self.said)[:1]) and _ids(self.said)[0] in _ids(self.port.truth)

    @property
    def missed(self) -> tuple[str, ...]:
        return tuple(id for id in _ids(self.port.truth) if id not in _ids(self.said))

    @property
    def perfect(self) -> bool:
        """Whether each fault is named at its place, the worst first, and nothing else."""
        return self.verdict == "mismatch" and self.said == self.port.truth


def _ids(said: tuple[str, ...]) -> list[str]:
    return [cause.partition(" ")[0] for cause in said[1:]]


def score(port: Faulty, diagnosis, seconds: float = 0.0, cpu: float = 0.0) -> Row:
    """Compare a diagnosis with the port's faults."""
    point = diagnosis.first_divergence.point if diagnosis.first_divergence else ""
    said = point, *(f"{cause.id} {cause.where}" for cause in diagnosis.causes)
    return Row(port, diagnosis.verdict, said, seconds, cpu)


def blocks(places: list[str], n_layer: int) -> set[int | str]:
    """The numbers of the blocks in some places, and the names outside of blocks."""
    found: set[int | str] = set()
    for place in places:
        for one in place.split(", "):
            if number := re.match(r"=?h\.(\d+|\*)", one):
                found |= set(range(n_layer)) if number[1] == "*" else {int(number[1])}
    return found
