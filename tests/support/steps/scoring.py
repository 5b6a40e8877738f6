"""Decide whether a diagnosis of a training step was right: one rule for the tests and for tools/step_table.py."""

import warnings
from dataclasses import dataclass

import gpt2
from gpt2.port.terms.report import Diagnosis
from support.steps import Step, right_model


@dataclass(frozen=True)
class StepRow:
    """The result of one step. ``missed`` are its faults that no cause names; ``beside`` the causes that it does not have."""

    name: str
    faulty: bool
    verdict: str
    first: bool  # the first cause is one of its faults
    causes: tuple[str, ...]
    missed: tuple[str, ...]
    beside: tuple[str, ...]
    seconds: float

    @property
    def perfect(self) -> bool:
        wanted = self.verdict == "mismatch" and self.first and not self.missed and not self.beside
        return wanted if self.faulty else self.verdict == "equal"

    def flaws(self) -> str:
        parts = [f"verdict {self.verdict}", *(f"missed {word}" for word in self.missed)]
        parts += [f"beside: {', '.join(self.beside)}"] if self.beside else []
        return "; ".join((*parts, f"said {' | '.join(self.causes) or '-'}"))


def diagnosis_of(step: Step) -> Diagnosis:
    """What `diagnose_step` says of a step whose settings are all given."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the authors' own
        return gpt2.diagnose_step(step.module(), step.make_step, right_model(), settings=step.given)


def score_step(name: str, step: Step, diagnosis: Diagnosis, seconds: float = 0.0) -> StepRow:
    """Compare a diagnosis with the meanings of the faults of a step."""
    said = [cause.id for cause in diagnosis.causes]
    known = {one for meaning in step.meanings.values() for one in (*meaning.ids, *meaning.implied)}
    return StepRow(
        name,
        bool(step.meanings),
        diagnosis.verdict,
        first=bool(said) and said[0] in known,
        causes=tuple(f"{cause.id} {cause.where}" for cause in diagnosis.causes),
        missed=tuple(word for word, meaning in step.meanings.items() if not set(meaning.ids) & set(said)),
        beside=tuple(one for one in dict.fromkeys(said) if one not in known),
        seconds=seconds,
    )
