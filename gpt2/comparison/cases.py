"""Compare two models on the user's own questions, or labelled texts: which turned from right to wrong, and back (``--cases``).

README.md says which answer is right. A prompt is encoded apart from the answer, as in training, in the model's chat format where
it has one; elsewhere a space is put between two words, as in "The capital is", "Paris".
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpt2.comparison.settings import CaseTable
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.side import Side
from gpt2.comparison.words import continued
from gpt2.data import Tokenizer
from gpt2.data.documents import HELD_OUT
from gpt2.data.tables import READERS, records
from gpt2.errors import InputError, user_path
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.last_words import LastWord, batches, last_words_change, score_pairs, score_targets, scored
from gpt2.measure.metrics import Progress
from gpt2.measure.texts import of_run
from gpt2.pages.rendering import visible
from gpt2.pages.reports import Column, Section

Asked = Sequence[tuple[str, tuple[str, ...]]]  # prompts or texts, each with the texts that are right, or the label
# By one model: what is right, the answers, how many hold the expected text.
Said = tuple[LastWord, Sequence[str], Estimate | None]
FIELDS = ("prompt", "expected"), ("question", "answer")  # the second as training on questions reads them
LABELLED = ("text", "label")  # as training a classifier reads them
SHOWN = 10  # cases of a kind that a table lists
ROOM = 32  # tokens of an answer beyond twice those of the expected text


@dataclass(frozen=True)
class Case:
    """One question, or a labelled text; ``expected`` joins several right texts by " | ".

    The probabilities are those of the whole first expected text, or of the label.
    """

    prompt: str
    expected: str
    right_a: bool
    right_b: bool
    probability_a: float
    probability_b: float
    answer_a: str  # the whole answer without spaces around it, or the class; "..." behind one that did not end
    answer_b: str

    @property
    def kind(self) -> str:
        """What became of it from A to B."""
        return ("right" if self.right_b else "lost") if self.right_a else "gained" if self.right_b else "wrong"


@dataclass(frozen=True)
class Cases:
    """Two models on the same cases, with 95 % intervals, paired by case: the fraction that each has right and B's gain.

    ``likelier`` is B's probability of an expected text over A's, the geometric mean. ``contains_a`` and ``contains_b`` are the
    fractions of answers that hold the expected text, whatever else; None of labelled texts.
    """

    file: str
    cases: tuple[Case, ...]
    right_a: Estimate
    right_b: Estimate
    gain: Estimate
    likelier: Estimate
    contains_a: Estimate | None
    contains_b: Estimate | None

    lost = property(lambda self: len(self.by_kind["lost"]))  # how many A has right and B wrong

    @property
    def by_kind(self) -> dict[str, list[Case]]:
        """What A has right and B wrong ("lost"), the reverse ("gained"), what both have "wrong", and what both have "right"."""
        return {kind: [case for case in self.cases if case.kind == kind] for kind in ("lost", "gained", "wrong", "right")}

    def sections(self) -> Iterator[Section]:
        """Yield the cases that are not right in both, some of each kind, and on pages the others."""
        shown = [case for kind, cases in self.by_kind.items() if kind != "right" for case in cases[:SHOWN]]
        others = [case for kind, cases in self.by_kind.items() for case in (cases if kind == "right" else cases[SHOWN:])]
        if shown:
            whole = "" if self.contains_a is None else "right is the whole answer, up to the end that the model writes; "
            what = f"{whole}those that turned, and the wrong ones; --html and --json have every answer"
            yield self._section("Cases", what, shown)
        if others:
            yield self._section("Other cases", "right in both, or more of a kind", others)

    def _section(self, title: str, note: str, cases: Sequence[Case]) -> Section:
        rows = []
        for case in cases:
            texts = case.kind, case.prompt, case.expected, case.answer_a, case.answer_b
            rows.append((*map(visible, texts), f"{case.probability_a:.1%} → {case.probability_b:.1%}"))
        asked = LABELLED if self.contains_a is None else FIELDS[0]
        columns = Column(wrap=True), *asked, "a answers", "b answers", f"probability of {asked[1]}"
        return Section(title, note, columns, rows, for_pages=title != "Cases")


def read_cases(table: str | Path | CaseTable) -> tuple[Asked, bool]:
    """Read (prompt, expected) or (text, label) from a table; return them, and whether they are labelled texts.

    Numbers are text; a list of expected texts are several that are right. Raises InputError: no such file, another kind of file,
    a field that is missing, empty, or neither text nor number.
    """
    path, fields = (table.path, table.fields) if isinstance(table, CaseTable) else (str(table), None)
    place = user_path(path)
    file, known = place / HELD_OUT if place.is_dir() else place, [fields] if fields else [*FIELDS, LABELLED]
    wanted = ", or ".join(" and ".join(each) for each in known)
    if file.suffix.lower() not in READERS or not file.exists():
        path = path if place.exists() else f"{path}: no such file"
        raise InputError(f"--cases {path}: give a .jsonl, .csv or .parquet file with the fields {wanted}; or a training run")
    cases, own = list[tuple[str, tuple[str, ...]]](), known[0]
    for where, record in records(file):
        own = own if cases else next((each for each in known if {*each} <= {*record}), own)
        prompt, expected = (record.get(field) for field in own)
        asked, right = _texts(prompt), _texts(expected)
        if len(asked) != 1 or not asked[0] or not right or not all(map(str.strip, right)):
            key = own[bool(asked and asked[0])]
            why = f"its {key} is empty, or neither text nor number" if key in record else f"it has {', '.join(map(str, record))}"
            names = "" if fields else "; --set data.prompt=NAME and --set data.field=NAME name others"
            needed = f"{' and '.join(own)}, as the first one has" if cases else wanted
            raise InputError(f"{where}: a case needs {needed}; {why}{names}")
        cases.append((asked[0], tuple(right)))
    if not cases:
        raise InputError(f'--cases {path}: holds no case; write one a line, as in {{"prompt": "2+2=", "expected": "4"}}')
    return cases, own == LABELLED


def _texts(value: object) -> list[str]:
    """Return a field's texts: one, or those of a list; numbers are text, and what is neither is left out."""
    known = (each for each in (value if isinstance(value, list) else [value]) if isinstance(each, str | int | float))
    return [str(each) for each in known if not isinstance(each, float) or math.isfinite(each)]


@torch.inference_mode()
def compare_cases(table: str | Path | CaseTable, models: tuple[Side, Side], *, seed: int, progress: Progress) -> Cases:
    """Ask two models the cases of a file. Raises InputError: one cannot be asked, or a case does not fit it."""
    (cases, labelled), said = read_cases(table), list[Said]()
    path = table.path if isinstance(table, CaseTable) else str(table)
    context, *_ = of_run(user_path(path))  # a row of a run ends with the class
    bootstrap = Bootstrap(len(cases), seed, groups=torch.arange(len(cases)))
    labels = tuple(dict.fromkeys(case[1][0].strip() for case in cases))
    names = next((each.classifier.classes for each in models if each.classifier), labels)
    for each in models:
        if each.recording is not None or each.text_tokenizer is None:
            raise InputError(f"{each.name}: cannot be asked --cases; give a model that runs here, with a tokenizer")
        how = each, each.text_tokenizer, cases, bootstrap, progress
        limit = min(each.context, context - 1) if context else each.context
        said.append(_classify(*how, names, limit) if labelled else _ask(*how))
    (a, answers_a, contains_a), (b, answers_b, contains_b) = said
    columns = a.right, b.right, *([math.exp(-loss) for loss in each.losses] for each in (a, b)), answers_a, answers_b
    rows = tuple(Case(asked, " | ".join(right), *rest) for (asked, right), *rest in zip(cases, *columns, strict=True))
    gain, likelier = (last_words_change(*pair, bootstrap=bootstrap) for pair in ((a, b), (b, a)))
    return Cases(path, rows, a.accuracy, b.accuracy, gain.accuracy, likelier.ratio, contains_a, contains_b)


def _ask(model: Side, tokenizer: Tokenizer, cases: Asked, bootstrap: Bootstrap, progress: Progress) -> Said:
    """Let a model answer each question, a batch of prompts of one length at a time."""
    pairs, answers = list(_encoded(cases, tokenizer, model.context)), [""] * len(cases)
    found = score_pairs(model.logits, pairs, bootstrap, ("cases", "expected texts"), context=model.context, progress=progress)
    right, holds = torch.zeros(2, len(pairs), dtype=torch.bool)
    for batch in batches([len(ids) - count for ids, count in pairs]):
        prompts, room = [pairs[i][0][: -pairs[i][1]] for i in batch], ROOM + 2 * max(pairs[i][1] for i in batch)
        for i, ids in zip(batch, continued(model, torch.tensor(prompts), tokenizer, room), strict=True):
            ends = (at for at, token in enumerate(ids) if token in (*tokenizer.ends, tokenizer.eos))
            said, expected = tokenizer.decode(ids[: (end := next(ends, None))]).strip(), [each.strip() for each in cases[i][1]]
            answers[i], holds[i] = f"{said} ..." if end is None else said, any(each in said for each in expected)
            right[i] = end is not None and said in expected
        progress(f"cases: {sum(map(bool, answers)):,} of {len(cases):,} answers")
    found = replace(found, right=tuple(right.tolist()), accuracy=bootstrap.fraction(right))
    return found, answers, bootstrap.fraction(holds)


def _encoded(cases: Iterable[tuple[str, tuple[str, ...]]], tokenizer: Tokenizer, context: int) -> Iterator[tuple[list[int], int]]:
    """Yield each case's ids, at most context + 1 with the prompt's beginning left out, and the number that is expected."""
    for number, (prompt, (expected, *_)) in enumerate(cases, 1):
        if tokenizer.chat is not None:
            before = tokenizer.chat.question(tokenizer, prompt)
        else:
            before = tokenizer.encode(prompt)
            words = (prompt[-1].isalnum() or prompt[-1] in ".,:;?!") and expected[0].isalnum()
            expected = f" {expected}" if words else expected
        answer = tokenizer.encode(expected)
        if not before or not 0 < len(answer) <= context:
            what = f"its {FIELDS[0][bool(before)]} is {len(answer) if before else 0} tokens of a context of {context}"
            raise InputError(f"--cases, case {number}: {what}; leave it out")
        yield [*before, *answer][-(context + 1) :], len(answer)


def _classify(
    model: Side, tokenizer: Tokenizer, cases: Asked, bootstrap: Bootstrap, progress: Progress, names: Sequence[str], limit: int
) -> Said:
    """Ask a classifier for the class of each text; of a model without its head, take which of ``names`` is likeliest after it."""
    losses, right, answers = list[float](), list[bool](), list[str]()
    names = model.classifier.classes if model.classifier else names
    for number, (text, (label, *_)) in enumerate(cases, 1):
        ids, own = tokenizer.encode_prompt(text)[:limit], label.strip()
        index = names.index(own) if own in names else int(own) if own.isdecimal() and len(own) < 20 else len(names)
        if index >= len(names) or not ids:
            why = f"the label {label!r} is no class of {model.name}: {', '.join(names)}" if ids else "its text has no token"
            raise InputError(f"--cases, case {number}: {why}; leave it out")
        if isinstance(model, CheckpointSide) and model.classifier:
            scores = model.class_scores(torch.tensor([ids]))
        else:
            after = (_encoded([(text, (name,))], tokenizer, model.context) for name in names)
            scores = torch.tensor([-score_targets(model.logits, list(each))[0][0] for each in after])
        likeliest = int(scores.argmax())
        losses.append(-float(scores.double().log_softmax(0)[index]))
        right.append(likeliest == index)
        answers.append(names[likeliest])
        progress(f"cases: {number:,} of {len(cases):,} texts")
    return scored(torch.tensor(losses, dtype=torch.float64), torch.tensor(right), bootstrap, model.context), answers, None
