"""Say what the owner of a text should know before training on it: what is held out, or read otherwise than meant."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from gpt2.data import Tokenizer
from gpt2.data.batches import held_out
from gpt2.data.documents import Document
from gpt2.data.files import END_OF_TEXT
from gpt2.train.recipe import Data

MARK = re.compile(r"<\|\w{1,40}\|>|\[(?:PAD|SEP|CLS|MASK|BOS|EOS)\]|</?s>")  # how special tokens are written
FAR = 2.0  # times the share asked for
SEEDS = 20  # values of split_seed that are tried
LINES, MOST = 20, 0.8  # lines of a text that may hold a sample each, and the share of them that looks so


def remarks(data: Data, tokenizer: Tokenizer, found: Sequence[Document], chosen: np.ndarray | None) -> Iterator[str]:
    """Yield a line for each thing that is unusual in the documents of a recipe; ``chosen`` are held out (None: one text)."""
    known = {END_OF_TEXT, *tokenizer.special_tokens}
    texts = (text for each in found for text in (each.prompt, each.text))
    marks = Counter(mark for text in texts for mark in MARK.findall(text) if mark not in known)
    for mark, count in marks.most_common(3):
        what = f"{mark} stands {count:,} times in the text and is no token of this tokenizer: it is read as plain characters"
        yield f"{what}; --set 'data.add_tokens=[\"{mark}\"]' makes it one token of a byte-level BPE"
    if chosen is None:
        yield from _running(found[0].text, data.path)
        return
    yield from _share(data, found, chosen)
    if data.prompt and not data.label:
        seen = {each.text.strip() for each, out in zip(found, chosen, strict=True) if not out}
        answers = [each.text.strip() for each, out in zip(found, chosen, strict=True) if out]
        if both := sum(answer in seen for answer in answers):
            what = f"{both:,} of {len(answers):,} held-out answers are answers of training rows too"
            yield f"{what}: the held-out loss then shows memory; hold questions with new answers back in a file of their own"


def _running(text: str, path: str) -> Iterator[str]:
    """Yield a line for a text whose lines look like samples of their own: all sentences or all names, and no empty line."""
    lines = text.splitlines()
    if len(lines) < LINES or not all(line.strip() for line in lines):
        return
    sentences = sum(line.rstrip()[-1] in ".!?\"'”»" for line in lines)
    names = sum(len(line.split()) <= 2 for line in lines)
    if max(sentences, names) >= MOST * len(lines):
        yield f"{path}: its {len(lines):,} lines are one running text; if each is a sample, put {END_OF_TEXT} between"


def _share(data: Data, found: Sequence[Document], chosen: np.ndarray) -> Iterator[str]:
    """Yield a line where the held-out documents are far more, or far less, of the text than was asked for."""
    lengths = np.array([len(each.prompt) + len(each.text) for each in found])

    def share(which: np.ndarray) -> float:
        return float(lengths[which].sum() / lengths.sum())

    own = share(chosen)
    if data.held_out / FAR <= own <= FAR * data.held_out:
        return
    shares = {seed: share(held_out(found, data.held_out, seed)) for seed in range(SEEDS)} if len(found) < 10_000 else {}
    best = min(shares, key=lambda seed: abs(shares[seed] - data.held_out), default=data.split_seed)
    advice = f"; --set data.split_seed={best} holds out {shares[best]:.1%}" if best != data.split_seed else ""
    yield f"held out are {own:.1%} of the text, where held_out={data.held_out:g}: they alone decide which model is best/{advice}"
