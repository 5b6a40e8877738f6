"""Read a recipe's text as training and validation token ids, with their tokenizer; say what its owner should know of it."""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from gpt2.checkpoint.loading import load_tokenizer
from gpt2.data import Tokenizer, from_directory, holds_tokenizer, shakespeare, token_files
from gpt2.data.batches import FILLER, HASHED, SCORED, held_out, lay_out, slices
from gpt2.data.bpe import chars_of, train_bpe, words_of
from gpt2.data.documents import LINE_ENDS, Document, documents, files, size, skipped
from gpt2.data.files import END_OF_TEXT
from gpt2.errors import InputError
from gpt2.train.classify import classes_of
from gpt2.train.recipe import PLAYS, Data, Recipe

MARK = re.compile(r"<\|\w{1,40}\|>|\[(?:PAD|SEP|CLS|MASK|BOS|EOS)\]|</?s>")  # how special tokens are written
FAR = 2.0  # times the share asked for
SEEDS = 20  # values of split_seed that are tried
LINES, MOST = 20, 0.8  # lines of a text that may hold a sample each, and the share of them that looks so


@dataclass(frozen=True)
class Corpus:
    """Training and validation ids (1-d integers), their tokenizer, and ``sha256`` (hex), which a resumed run must match.

    The marks (uint8, of each id) say which tokens are scored (:mod:`gpt2.data.batches`); None: all. ``notes`` are for the log.
    """

    tokenizer: Tokenizer
    train_ids: np.ndarray
    val_ids: np.ndarray
    sha256: str = ""
    train_marks: np.ndarray | None = None
    val_marks: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    end: int | None = None  # the id at which attention and positions end with a document; None: they do not
    tally: Counter[str] = field(default_factory=Counter)  # of documents (:func:`gpt2.data.batches.lay_out`)
    mapped: bool = False  # from token files; else in memory
    held_out: str = ""  # in words, what of the text is validation
    held: tuple[Document, ...] = ()  # those documents, where they are in memory
    classes: tuple[str, ...] = ()  # of ``data.label``; the scored token behind a text is the number of its class

    def beginning(self) -> np.ndarray:
        """Return the first validation tokens, which a sample continues: a document's prompt, or eight."""
        prompt = 0 if self.val_marks is None else int((self.val_marks == SCORED).argmax())
        return self.val_ids[: prompt if prompt > 1 else 8]


def corpus(recipe: Recipe, tokenizer: Tokenizer | None = None, *, scratch: bool = False, check: bool = True) -> Corpus:
    """Read the recipe's corpus as ids of ``tokenizer``, or of a new tokenizer made from the text as the recipe says.

    ``scratch``: ``tokenizer`` was made from this text, which is then read in the same way. Without ``check``, token files are
    only mapped, and ``sha256`` is "".
    """
    data = recipe.data
    reads_files = data.tokenizer == "gpt2" or (tokenizer and not scratch)  # other tokenizers are made from a text in memory
    if data.tokens:
        text = _of_token_files(recipe, tokenizer, check)
    elif reads_files and data.path and not data.label and size(files(data.path)) > token_files.LARGE:
        text = _of_large_text(recipe, tokenizer or load_tokenizer("gpt2").with_tokens(data.add_tokens), check)
    else:
        text = _in_memory(recipe, tokenizer)
    total, tally = len(text.train_ids) + len(text.val_ids), text.tally
    share = "never trained on" if data.padded else f"{len(text.val_ids) / max(1, total):.1%} of the tokens, never trained on"
    if tally["documents"] > 1:
        held = f"{tally['held_out']:,}" if tally["held_out"] else "some"
        share = f"{held} of {tally['documents']:,} documents, {share}"
    first = recipe.eval_tokens or None
    if first and data.padded:  # whole rows
        first = -(-first // recipe.context) * recipe.context + 1
    marks = None if text.val_marks is None else text.val_marks[:first]
    end = text.tokenizer.eot if data.reset else None
    text = replace(text, val_ids=text.val_ids[:first], val_marks=marks, end=end, held_out=share)
    if data.reset and end is None:
        raise InputError("data.reset: this tokenizer has no end-of-text token to tell documents apart; --set data.reset=false")
    _require_enough(recipe, text)
    sha256 = text.sha256 if text.mapped else _sha256(text)
    return replace(text, sha256=sha256, notes=(*text.notes, *_about(recipe, tally)))


def _of_token_files(recipe: Recipe, tokenizer: Tokenizer | None, check: bool) -> Corpus:
    """Map the user's token files, with the tokenizer beside them, or GPT-2's if the recipe says so."""
    folder, kind = Path(recipe.data.tokens), recipe.data.tokenizer
    if not (tokenizer or holds_tokenizer(folder) or kind == "gpt2"):
        remedy = "put the tokenizer's files there, or --set data.tokenizer=gpt2 if it is GPT-2's"
        raise InputError(f"{folder}: no tokenizer in it, and {kind!r} is made from a text; {remedy}")
    tokenizer = tokenizer or (from_directory(folder) if holds_tokenizer(folder) else load_tokenizer("gpt2"))
    ids = token_files.read(folder, tokenizer.n_vocab, check=check)
    return Corpus(tokenizer, *ids, token_files.fingerprint(*ids) if check else "", mapped=True)


def _of_large_text(recipe: Recipe, tokenizer: Tokenizer, check: bool) -> Corpus:
    """Map the token files of a text too large for memory, which are made once."""
    data, notes = recipe.data, list[str]()
    end = _end(tokenizer, notes)
    context = recipe.context if data.padded else 0
    how = data.field, data.prompt, data.held_out, data.split_seed, data.padded, context
    task = token_files.Task(tokenizer, end, *how)
    say = partial(print, file=sys.stderr, flush=True)
    arrays, tally = token_files.prepared(data.path, files(data.path), task, say, check=check)
    many = tally["documents"] > 1
    held = "some, chosen by their text" if many else "the last part"
    notes.append(f"token files of {tally['documents']:,} document{'s' * many}; held out: {held}")
    sha256 = token_files.fingerprint(*arrays) if check else ""
    train, val, *marks = arrays
    train_marks, val_marks = marks or (None, None)
    return Corpus(tokenizer, train, val, sha256, train_marks, val_marks, tuple(notes), tally=tally, mapped=True)


def _in_memory(recipe: Recipe, tokenizer: Tokenizer | None) -> Corpus:
    """Read a text as one stream, or as documents."""
    data, tally = recipe.data, Counter[str]()
    found = _documents(recipe, tally) if data.path else []
    if len(found) > 1 or data.prompt or data.padded:
        return _of_documents(recipe, tokenizer, found, tally)
    train_text, val_text = shakespeare.split(found[0].text, 1 - data.held_out) if found else texts(recipe)
    tokenizer = tokenizer or _new_tokenizer(recipe, train_text, val_text)
    train, val = (np.array(tokenizer.encode(text), dtype=np.int32) for text in (train_text, val_text))
    notes = tuple(remarks(data, tokenizer, found, None)) if found else ()
    return Corpus(tokenizer, train, val, notes=notes, tally=tally, held=(Document(val_text, "", data.path),))


def _end(tokenizer: Tokenizer, notes: list[str]) -> int:
    """Return the id that is put behind each document."""
    if tokenizer.eot is None:
        notes.append("this tokenizer has no end-of-text token: a line end is put behind each document instead")
    return tokenizer.parting


def _documents(recipe: Recipe, tally: Counter[str]) -> list[Document]:
    """Read all documents of ``data.path``."""
    paths = files(recipe.data.path)
    data = recipe.data
    if data.label:  # the class is the text, and the text is read before it
        found = list(documents(paths, data.label, data.prompt or data.field, tally=tally, key="label"))
        texts = [document for document in found if document.prompt.strip()]
        tally["unlabelled"], tally["empty"] = tally["empty"], len(found) - len(texts)
        return texts
    found = list(documents(paths, data.field, data.prompt, tally=tally))
    if not found:
        empty = f"no document with text in {len(paths)} file{'s' * (len(paths) > 1)}, {tally['empty']:,} without"
        raise InputError(f"{data.path}: {empty}; give texts, or a table whose {data.field} has some")
    return found


def _of_documents(recipe: Recipe, tokenizer: Tokenizer | None, found: Sequence[Document], tally: Counter[str]) -> Corpus:
    """Split documents and lay out their tokens."""
    data = recipe.data
    chosen = held_out(found, data.held_out, data.split_seed)
    parts = [[document for document, out in zip(found, chosen, strict=True) if out == held] for held in (False, True)]
    if not all(parts):
        same = f"{data.path}: documents are split into training and validation by their first {HASHED:,} characters"
        raise InputError(f"{same}, and there is only one, or all are the same there; give another")
    if tokenizer is None:
        joined = ("".join(f"{each.prompt}{each.text}\n" for each in part) for part in parts)  # a line end may part documents
        tokenizer = _new_tokenizer(recipe, *joined)
    tally["held_out"] = len(parts[1])
    notes = [f"{len(found):,} documents: {len(parts[0]):,} to train on, {len(parts[1]):,} held out (split by their text)"]
    notes += remarks(data, tokenizer, found, chosen)
    end = _end(tokenizer, notes)
    classes = classes_of([each.text.strip() for each in found], tokenizer.n_vocab) if data.label else ()
    notes += [f"{len(classes)} classes in the field {data.label}: {', '.join(classes[:9])}"] if classes else []
    streams: list[tuple[np.ndarray, np.ndarray | None]] = []
    for part in parts:
        laid = []
        for each in part:
            before = token_files.encoded(tokenizer, each.prompt, each)
            if classes:
                own, before = [classes.index(each.text.strip())], before[: recipe.context - 1]
            else:
                own = token_files.encoded(tokenizer, each.text, each)
            laid.append(lay_out(before, own, end, recipe.context, padded=data.padded, tally=tally))
            if classes:  # the end behind the class is not scored
                laid[-1][1][len(before) + 1 :] = FILLER
        ids, marks = (np.concatenate(arrays) for arrays in zip(*laid, strict=True))
        if data.padded:  # the target of the last row's last token
            ids, marks = np.append(ids, np.int32(end)), np.append(marks, np.uint8(FILLER))
        streams.append((ids, marks if data.prompt or data.padded else None))
    (train, train_marks), (val, val_marks) = streams
    held = tuple(parts[1])
    return Corpus(tokenizer, train, val, "", train_marks, val_marks, tuple(notes), tally=tally, held=held, classes=classes)


def _sha256(text: Corpus) -> str:
    digest = hashlib.sha256(text.train_ids.tobytes() + b"|" + text.val_ids.tobytes())
    for marks in (text.train_marks, text.val_marks):
        digest.update(b"" if marks is None else marks.tobytes())
    return digest.hexdigest()


def _require_enough(recipe: Recipe, text: Corpus) -> None:
    """Raise an InputError for streams that hold no window, or nothing to score."""
    count = len(text.train_ids)
    if count < recipe.context + 1:
        remedy = f" or --set context={count - 1}" if count > 1 else ""
        few = f"the training text has {count} tokens, too few for a context of {recipe.context} and the next token"
        raise InputError(f"{few}; give a longer text{remedy}")
    if (count := len(text.val_ids)) < 2:
        raise InputError(f"the validation text has {count} tokens, too few to score; give a longer text or data.held_out")
    for name, marks in (("training", text.train_marks), ("validation", text.val_marks)):
        if marks is not None and not any((marks[1:][part] == SCORED).any() for part in slices(marks[1:])):
            why = "all are prompts or cut off; raise context, or eval_tokens"
            raise InputError(f"no token of the {name} documents is scored: {why}")


def _new_tokenizer(recipe: Recipe, train_text: str, val_text: str) -> Tokenizer:
    """Make a tokenizer from the training text; characters also come from the validation text, which must be encodable."""
    data = recipe.data
    made: dict[str, Callable[[], Tokenizer]] = {
        "chars": lambda: chars_of(train_text + val_text),
        "words": lambda: words_of(train_text, data.vocab_size),
        "bpe": lambda: train_bpe(train_text, data.vocab_size),
        "gpt2": lambda: load_tokenizer("gpt2"),
    }
    return made[data.tokenizer]().with_tokens(data.add_tokens)


def texts(recipe: Recipe) -> tuple[str, str]:
    """Return the training and validation text of a recipe without ``data.path``."""
    data = recipe.data
    if data.source == "plays":
        return shakespeare.training_text(), shakespeare.held_out_text()
    elif data.source == "all-plays":
        text = "\n".join(shakespeare.plays().values())
    elif data.source.startswith("play:"):
        text = shakespeare.play(data.source.removeprefix("play:"))
    elif data.source == "tinyshakespeare":
        try:
            text = shakespeare.tiny_shakespeare()
        except InputError as error:
            raise InputError(f"{error}, or {PLAYS}") from None
    else:
        known = "plays, all-plays, play:NAME or tinyshakespeare, or set data.path to a text file"
        raise InputError(f"recipe: data.source is {data.source!r}; give {known}")
    return shakespeare.split(text, 1 - data.held_out)


def _about(recipe: Recipe, tally: Counter[str]) -> list[str]:
    """Return lines for the log about boundaries, empty documents, and those that are cut off."""
    notes = []
    if left := skipped(recipe.data.path) if recipe.data.path else []:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        notes.append(f"left out for their suffix: {', '.join(left[:5])}{more}; convert them to .txt or .jsonl")
    if tally["unlabelled"]:
        notes.append(f"{tally['unlabelled']:,} rows are left out: their {recipe.data.label} is empty")
    if tally["boundaries"]:
        notes.append(f"{END_OF_TEXT} in the text is the boundary between documents, {tally['boundaries']:,} of them")
    if tally["line_ends"]:
        notes.append(f"{LINE_ENDS}, in {tally['line_ends']:,} file{'s' * (tally['line_ends'] > 1)}")
    if tally["empty"]:
        notes.append(f"{tally['empty']:,} documents without text are left out")
    if recipe.data.padded and tally["long"]:
        lost = f", {tally['lost']:,} of them before their text begins" if tally["lost"] else ""
        notes.append(f"{tally['long']:,} documents are cut off at {recipe.context} tokens{lost}")
    return notes


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
