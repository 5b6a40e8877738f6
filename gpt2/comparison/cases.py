"""Compare two models on the user's own questions: which cases turned from right to wrong, and back (``--cases``).

A case is a prompt and the text that is expected after it. It is right if greedy decoding begins with that text, which one forward
pass shows: each of its tokens is the likeliest one. The prompt is encoded apart from the answer, as in training, in the model's
chat format where it has one; elsewhere a space is put between two words, as in "The capital is", "Paris".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt2.data import Tokenizer
from gpt2.data.tables import READERS, records
from gpt2.errors import InputError
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.last_words import last_words_change, score_pairs
from gpt2.measure.metrics import Logits, Progress
from gpt2.pages.rendering import visible
from gpt2.pages.reports import data_table

if TYPE_CHECKING:
    from rich.table import Table

FIELDS = ("prompt", "expected")
SHOWN = 10  # cases that a table lists


@dataclass(frozen=True)
class Case:
    """One question; the probabilities are those of the whole expected text."""

    prompt: str
    expected: str
    right_a: bool
    right_b: bool
    probability_a: float
    probability_b: float


@dataclass(frozen=True)
class Cases:
    """Two models on the same cases, with 95 % intervals, paired by case: the fraction that each has right and B's gain.

    ``likelier`` is B's probability of an expected text over A's, the geometric mean.
    """

    file: str
    cases: tuple[Case, ...]
    right_a: Estimate
    right_b: Estimate
    gain: Estimate
    likelier: Estimate

    @property
    def lost(self) -> tuple[Case, ...]:
        """What A has right and B wrong."""
        return tuple(case for case in self.cases if case.right_a and not case.right_b)

    @property
    def gained(self) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if case.right_b and not case.right_a)

    def table(self) -> Table:
        """Return the cases that changed, those that were lost first."""
        turned = [("lost", case) for case in self.lost[:SHOWN]] + [("gained", case) for case in self.gained[:SHOWN]]
        rows = (
            (kind, visible(case.prompt), visible(case.expected), f"{case.probability_a:.1%}", f"{case.probability_b:.1%}")
            for kind, case in turned
        )
        return data_table("", "prompt", "expected", "a", "b", wrap=True, rows=rows)


def read_cases(path: str) -> list[tuple[str, str]]:
    """Read (prompt, expected) from a table. Raises InputError: no such file, another kind of file, a field that is not text."""
    file = Path(path).expanduser()
    if file.suffix.lower() not in READERS or not file.exists():
        raise InputError(f"--cases {path}: give a .jsonl, .csv or .parquet file with the fields {' and '.join(FIELDS)}")
    cases = []
    for where, record in records(file):
        prompt, expected = (record.get(field) for field in FIELDS)
        if not isinstance(prompt, str) or not isinstance(expected, str) or not prompt or not expected.strip():
            raise InputError(f"{where}: a case needs {' and '.join(FIELDS)}, both text; it has {', '.join(map(str, record))}")
        cases.append((prompt, expected))
    if not cases:
        raise InputError(f'--cases {path}: holds no case; write one a line, as in {{"prompt": "2+2=", "expected": "4"}}')
    return cases


def compare_cases(path: str, models: Sequence[tuple[Logits, Tokenizer, int]], *, seed: int, progress: Progress) -> Cases:
    """Score two models, each given as (logits, tokenizer, context), on the cases of a file."""
    cases = read_cases(path)
    bootstrap = Bootstrap(len(cases), seed, independent=True)
    scored = []
    for logits, tokenizer, context in models:
        pairs = list(_encoded(cases, tokenizer, context))
        scored.append(score_pairs(logits, pairs, bootstrap, context=context, what=("cases", "answers"), progress=progress))
    a, b = scored
    said = zip(cases, zip(a.right, b.right, strict=True), zip(a.losses, b.losses, strict=True), strict=True)
    rows = tuple(Case(*case, *right, *(math.exp(-loss) for loss in losses)) for case, right, losses in said)
    gain, likelier = (last_words_change(*pair, bootstrap=bootstrap) for pair in ((a, b), (b, a)))
    return Cases(path, rows, a.accuracy, b.accuracy, gain.accuracy, likelier.ratio)


def _encoded(cases: Sequence[tuple[str, str]], tokenizer: Tokenizer, context: int) -> Iterator[tuple[list[int], int]]:
    """Yield each case's ids, at most context + 1 with the prompt's beginning left out, and the number that is expected."""
    for number, (prompt, expected) in enumerate(cases, 1):
        if tokenizer.chat is not None:
            before = tokenizer.chat.question(tokenizer, prompt)
        else:
            before = tokenizer.encode(prompt)
            words = (prompt[-1].isalnum() or prompt[-1] in ".,:;?!") and expected[0].isalnum()
            expected = f" {expected}" if words else expected
        answer = tokenizer.encode(expected)
        if not before or not 0 < len(answer) <= context:
            what = f"its {FIELDS[bool(before)]} is {len(answer) if before else 0} tokens of a context of {context}"
            raise InputError(f"--cases, case {number}: {what}; leave it out")
        yield [*before, *answer][-(context + 1) :], len(answer)
