"""Show what a recipe would train on: documents, tokens, what the context cuts off, and the first windows as text."""

import re
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from gpt2.checkpoint.loading import load_tokenizer
from gpt2.data.batches import SCORED, UNSCORED, slices
from gpt2.data.files import END_OF_TEXT
from gpt2.errors import printable
from gpt2.train.corpus import Corpus, corpus
from gpt2.train.recipe import Recipe
from gpt2.train.step import Feed

WINDOWS = 3
FILL = re.compile(rf"({re.escape(END_OF_TEXT)}){{3,}}")
SHOWN = 400  # characters of a part of a window


@dataclass(frozen=True)
class Stretch:
    """Neighbouring tokens of a window that are all scored, or all read only, as text."""

    scored: bool
    text: str


@dataclass(frozen=True)
class Listing:
    """What a recipe would train on; ``windows`` are the first of step 1, as parts in order."""

    documents: int
    train_tokens: int
    train_scored: int
    val_tokens: int
    val_scored: int
    context: int
    padded: bool
    longer: int | None  # documents with more than ``context`` tokens; None: not counted
    lost: int  # of these, those with prompts that long
    notes: tuple[str, ...]
    windows: tuple[tuple[Stretch, ...], ...]

    def table(self) -> str:
        rows = [*self.notes]
        training, validation = (self.train_tokens, self.train_scored), (self.val_tokens, self.val_scored)
        for name, (tokens, scored) in (("training", training), ("validation", validation)):
            rows.append(f"{name:12}{tokens:>14,} tokens" + ("" if scored >= tokens - 1 else f", of which {scored:,} are scored"))
        if self.documents > 1 and self.longer is not None and not self.padded:  # the notes say what padding cuts off
            long = f"{self.longer:,} of {self.documents:,} documents are longer than the context of {self.context} tokens"
            rows.append(f"{long}, and read in several windows" + (f"; of {self.lost:,} the prompt alone is" if self.lost else ""))
        for number, window in enumerate(self.windows, 1):
            rows.append(f"window {number} of step 1")
            for part in window:
                text = FILL.sub(lambda found: f" ({len(found[0]) // len(END_OF_TEXT)} x {END_OF_TEXT})", part.text)
                text = printable(text, one_line=True)
                rows.append(f"  {'scored' if part.scored else 'read':8}{text[:SHOWN]}" + ("..." if len(text) > SHOWN else ""))
        return "\n".join(rows)


def list_data(recipe: Recipe, init: str | None = None) -> Listing:
    """Read the data of ``recipe``, with the tokenizer of the model named ``init`` if given, and train nothing."""
    recipe.check(init)
    tokenizer = load_tokenizer(init).with_tokens(recipe.data.add_tokens) if init is not None else None
    text = corpus(recipe, tokenizer)
    batch = Feed(text.train_ids, marks=text.train_marks, end=text.end)(recipe, 0)
    windows = zip(batch.x[:WINDOWS].tolist(), batch.y[:WINDOWS].tolist(), strict=True)
    train = _scored(text.train_ids, text.train_marks, text.end)
    val = _scored(text.val_ids, text.val_marks, text.end)
    counts = text.tally.get("documents", 1), len(text.train_ids), train, len(text.val_ids), val
    cut = recipe.context, recipe.data.padded, text.tally.get("long"), text.tally.get("lost", 0)
    return Listing(*counts, *cut, text.notes, tuple(_parts(x, y, text) for x, y in windows))


def _scored(ids: np.ndarray, marks: np.ndarray | None, end: int | None) -> int:
    """Count the scored tokens: not the first, before which nothing stands; where documents are kept apart, of each."""
    unscored = 0
    for part in slices(ids):
        out = np.zeros(len(ids[part]), bool) if marks is None else marks[part] != SCORED
        first = int(part.start == 0)
        out[:first] = True
        if end is not None:
            out[first:] |= ids[part.start - 1 + first : part.stop - 1][: len(out) - first] == end
        unscored += int(out.sum())
    return len(ids) - unscored


def _parts(x: list[int], y: list[int], text: Corpus) -> tuple[Stretch, ...]:
    """Return a window's tokens as parts; its first token is never scored, and a class is shown by its name."""
    last = [y[-1]] if y[-1] != UNSCORED else []  # else it is not in the batch
    scored = [False, *(each != UNSCORED for each in y)]
    groups = groupby(zip(scored, [*x, *last], strict=False), key=lambda each: each[0])
    parts = ((scored, [token for _, token in group]) for scored, group in groups)
    return tuple(Stretch(s, text.classes[ids[0]] if s and text.classes else text.tokenizer.decode(ids)) for s, ids in parts)
