"""Decide whether a diagnosis of a dump of training steps was right: one rule for the tests and for tools/step_dump_table.py."""

from __future__ import annotations

from dataclasses import dataclass

import gpt2
from support.step_programs import FAULTS, Dumped
from support.steps import our_model


@dataclass(frozen=True)
class Row:
    """The result of one dump: ``missed`` are the faults that it shows and no cause names; ``beside`` what it does not have."""

    name: str
    verdict: str
    said: tuple[str, ...]
    missed: tuple[str, ...]
    beside: tuple[str, ...]
    first: bool  # the first cause is one of its faults

    @property
    def right(self) -> bool:
        return not self.missed and not self.beside and (self.verdict == "mismatch" if self.said else self.verdict == "equal")

    def flaw(self) -> str:
        return f"{self.name}: {self.verdict}, said {' '.join(self.said) or '-'}, missed {' '.join(self.missed) or '-'}"


def score(run: Dumped) -> Row:
    """Diagnose a dump with its settings given."""
    diagnosis = gpt2.diagnose(run.arrays(), our_model(), settings=run.overrides())
    said = tuple(dict.fromkeys(cause.id for cause in diagnosis.causes))
    known = {id for word in run.words for id in FAULTS[word][0]}
    missed = tuple(word for word in run.shown if not set(FAULTS[word][0]) & set(said))
    beside = tuple(id for id in said if id not in known)
    return Row(run.name, diagnosis.verdict, said, missed, beside, bool(said) and said[0] in known)
