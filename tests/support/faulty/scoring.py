"""Decide whether a diagnosis is right: one rule for the tests and for tools/diagnose_table.py."""

import re
from dataclasses import dataclass

from gpt2.config import GPT2Config
from support.faulty import Faulty, matches
from support.faulty.faults import NORM

# Ids of faults of the whole model or of the order of blocks: a cause may name any block for them.
WHOLE = re.compile(
    r"layer-|position-|embedding-|logits-|untied|padded|reduced|final-|extra-norm|not-det|cache|batch|padding|dropout"
)

# Ports of tests/support/ports with GPT-2's logits and still a fault: the logits of columns beyond the vocabulary are zero and
# not minus infinity; an attention mask moves the positions and masks nothing.
FAULTY_AFTER_ALL = {"interleaved": "padded-vocab", "shifted": "padding-wrong"}


@dataclass(frozen=True)
class Row:
    """The result of one port. ``missed`` are its faults without a cause; ``beside`` the causes without a fault."""

    name: str
    architecture: str
    faults: int
    verdict: str
    first: bool  # the first cause is one of its faults
    top_three: bool  # all of its faults are among the first three causes (or as many as there are faults)
    located: bool  # the first divergence is at the right point, and the causes name the right blocks
    point: str | None
    causes: tuple[str, ...]
    missed: tuple[str, ...]
    beside: tuple[str, ...]
    seconds: float  # wall-clock time
    cpu: float  # CPU time of all threads, for a machine with other load

    @property
    def outcome(self) -> str:
        """The column of the confusion table."""
        if self.verdict == "equal":
            return "called equal"
        if self.first:
            return "first"
        if self.top_three:
            return "top three"
        return "undetermined" if self.verdict == "undetermined" else "wrong"

    @property
    def perfect(self) -> bool:
        return self.verdict == "mismatch" and self.first and self.top_three and self.located and not self.beside


def score(port: Faulty, diagnosis, config: GPT2Config, seconds: float, cpu: float) -> Row:
    """Compare a diagnosis with the port's faults."""
    said, wanted = [cause.id for cause in diagnosis.causes], port.causes
    most = max(3, len(wanted))
    missed = tuple(word for word, ids in wanted.items() if not set(ids) & set(said))
    point = diagnosis.first_divergence.point if diagnosis.first_divergence else None
    at_point = not port.points or (point is not None and matches(point, port.points))
    return Row(
        name=port.name,
        architecture=port.architecture,
        faults=len(wanted),
        verdict=diagnosis.verdict,
        first=bool(said) and any(said[0] in ids for ids in wanted.values()),
        top_three=all(set(ids) & set(said[:most]) for ids in wanted.values()),
        located=at_point and all(_placed(port, word, diagnosis.causes, config.n_layer) for word in wanted),
        point=point,
        causes=tuple(f"{cause.id} {cause.where}" for cause in diagnosis.causes),
        missed=missed,
        beside=tuple(one for one in dict.fromkeys(said) if not any(one in ids for ids in wanted.values())),
        seconds=seconds,
        cpu=cpu,
    )


def _placed(port: Faulty, word: str, causes, n_layer: int) -> bool:
    """Whether the causes of this fault name all of its blocks and no others."""
    places = [cause.where for cause in causes if cause.id in port.causes[word]]
    if not places:
        return False
    if WHOLE.match(port.causes[word][0]):
        return True
    others = {one for other, ids in port.causes.items() if other != word for one in ids}
    said = blocks(places, n_layer)
    right = blocks(_places(port, word, n_layer), n_layer)
    return right <= said and (said <= right or bool(others & set(port.causes[word])))


def blocks(places: list[str], n_layer: int) -> set[int | str]:
    """The numbers of the blocks in some places, and the names outside of blocks."""
    found: set[int | str] = set()
    for place in places:
        for one in place.split(", "):
            if number := re.match(r"=?h\.(\d+|\*)", one):
                found |= set(range(n_layer)) if number[1] == "*" else {int(number[1])}
    return found


def _places(port: Faulty, word: str, n_layer: int) -> list[str]:
    faults = port.faults
    shown = faults.points(word)
    if not any(point.lstrip("=").startswith("h.") for point in shown):
        return []
    meaning = port.meaning(word)
    start = 0 if faults.sites[word] else meaning.first_layer
    return [f"h.{layer}.{NORM}" for layer in faults.layers(word, n_layer) if layer >= start]
