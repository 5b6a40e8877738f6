"""Read documents from text files (.txt, .md) and tables (:mod:`gpt2.data.tables`): one file, a folder, or a glob."""

import glob
import json
import os
import re
import shlex
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpt2.config import quoted
from gpt2.data.files import END_OF_TEXT
from gpt2.data.tables import Record, records, text_file
from gpt2.errors import InputError, require_memory, user_path

TEXTS, TABLES = (".txt", ".md", ""), (".jsonl", ".csv", ".tsv", ".parquet")
NAMED = (*TEXTS, *TABLES, ".json")  # a folder's .json files are settings more often than texts
# The mark between documents: a line of its own, which is dropped with its line end, or within a line.
BOUNDARY = re.compile(rf"(?m:^){re.escape(END_OF_TEXT)}\r?\n|{re.escape(END_OF_TEXT)}")
HELD_OUT = "held_out.jsonl"  # in a run's folder: the documents that it never trains on
LINE_ENDS = r"line ends \r\n and \r are read as \n"
WHOLE = 8  # bytes of memory for a character of a text that is read whole: its pieces and ids too
PIECE = 1 << 20  # characters of a text that is read in pieces


def parted(text: str) -> list[str]:
    """Return the documents of a text, or the text itself if it is nothing but whitespace."""
    return [part for part in BOUNDARY.split(text) if part.strip()] or [text]


def closed(text: str) -> bool:
    """Return whether a mark stands behind the last of a text's documents, as :func:`joined` writes it."""
    return not BOUNDARY.split(text)[-1].strip()


def joined(texts: Iterable[str]) -> str:
    """Return the text whose documents these are: the reverse of :func:`parted`."""
    return "".join(f"{text}{END_OF_TEXT}\n" if text.endswith("\n") else f"{text}{END_OF_TEXT}" for text in texts)


class Document(NamedTuple):
    """One document: ``text`` is trained on, ``prompt`` is read before it and not scored; ``where`` is FILE or FILE:LINE.

    With ``more`` it is a piece of a document, which goes on in the next. Answers of one ``conversation`` are held out together.
    """

    text: str
    prompt: str
    where: str
    more: bool = False
    conversation: str = ""


def files(path: str, option: str = "--set data.path=TEXTS") -> list[Path]:
    """Return the files of a file's, folder's or glob's name, in the order of their names; a folder's are found at any depth.

    In a folder, hidden files, links to folders, and other suffixes are ignored. Raises InputError: nothing there, a folder in it
    that cannot be read, or a suffix that is none of ours; ``option`` gives another name.
    """
    path = str(user_path(path))  # a shell expands no ~ behind the = of --set
    place = Path(path)
    try:
        folder, there = place.is_dir(), place.exists()
    except OSError as error:  # such as a name that is too long
        raise InputError(f"{quoted(path)}: {error.strerror}; check data.path") from None
    if folder:
        if not (found := [file for file in _inside(place) if file.suffix and file.suffix.lower() in TEXTS + TABLES]):
            raise InputError(f"{path}: no .txt, .md, .jsonl, .csv, .tsv or .parquet in it; give another with {option}")
    else:
        found = [place] if there else [Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file()]
        if not found:
            missing = "no file has such a name" if glob.has_magic(path) else "no such file or folder"
            raise InputError(f"{path}: {missing}; give another with {option}")
    for file in found:
        if file.suffix.lower() not in NAMED:
            known = "none of .txt, .md, .jsonl, .json, .csv, .tsv and .parquet"
            raise InputError(f"{file}: {file.suffix} is {known}; convert or rename it")
    return sorted(found, key=lambda file: file.as_posix())


def skipped(path: str) -> list[str]:
    """Return the names of a folder's files that :func:`files` leaves out for their suffix; those of other paths are none."""
    found = _inside(Path(path)) if Path(path).is_dir() else []
    return sorted(file.name for file in found if not file.suffix or file.suffix.lower() not in TEXTS + TABLES)


def _inside(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder at any depth, without hidden ones and links to folders."""

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename}: this folder cannot be read: {error.strerror}; make it readable, or move it away")

    for root, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        try:
            yield from (file for name in names if not name.startswith(".") and (file := Path(root, name)).is_file())
        except PermissionError as error:  # names can be listed, and files not opened
            error.filename = root
            refuse(error)


def size(paths: Iterable[Path]) -> int:
    """Return the bytes of the texts in files: a .parquet file counts as what it holds when decompressed."""
    total = 0
    for path in paths:
        with suppress(OSError, ImportError, ValueError):  # reading it says what is wrong
            if path.suffix.lower() != ".parquet":
                total += path.stat().st_size
                continue
            from pyarrow import parquet

            groups = parquet.read_metadata(path)
            total += sum(groups.row_group(index).total_byte_size for index in range(groups.num_row_groups))
    return total


def documents(
    paths: Iterable[Path],
    field: str = "text",
    prompt: str = "",
    *,
    tally: Counter[str],
    streamed: bool = False,
    key: str = "field",
    named: bool = True,
) -> Iterator[Document]:
    """Yield the documents of files, in order. ``field`` is a table's field of text.

    ``prompt`` is the field of the text before it, or, with braces, a template over fields: ``"Q: {question}\\nA: "``.
    ``<|endoftext|>`` in a text ends a document; documents of nothing but whitespace are left out. Line ends of text files become
    line feeds, as in Python's :func:`open`. ``tally`` counts "boundaries", "empty", and files with other "line_ends".
    ``streamed`` reads text files in pieces, which tokenize as the whole does. ``key`` is the setting that names ``field``, if it
    is ``named`` by one; a number or truth value may be a "label".

    Raises InputError: what cannot be read, with its file and line.
    """
    prompted, option = _template(prompt), f"--set data.{key}=NAME" if named else ""
    for path in paths:
        if path.suffix.lower() in TEXTS:
            if prompt:
                raise InputError(f"{path}: data.prompt names a field, and a text file has none; give tables, as in DIR/*.jsonl")
            yield from _texts(path, PIECE if streamed else -1, tally)
            continue
        for where, record in records(path):
            before = prompted(record, where)
            if END_OF_TEXT in before:
                raise InputError(f"{where}: {END_OF_TEXT} within a prompt, where no document can end; remove it")
            texts = BOUNDARY.split(_text(record, field, where, option, label=key == "label"))
            tally["boundaries"] += len(texts) - 1
            for index, text in enumerate(texts):
                if text.strip():
                    yield Document(text, "" if index else before, where, conversation=record.get("conversation", ""))
                elif len(texts) == 1:
                    tally["empty"] += 1


def _texts(path: Path, piece: int, tally: Counter[str]) -> Iterator[Document]:
    """Yield the documents of a text file, whole (``piece`` -1) or in pieces of some ``piece`` characters.

    A piece ends before whitespace that follows other characters, where no word of the tokenizers' patterns goes on.
    """
    with text_file(path, newline=None) as file:
        if piece < 0:
            require_memory(WHOLE * path.stat().st_size, f"{path}: its text and ids", "cut a piece of it, e.g. with head -c")
        text, at, last, more = "", 0, False, False  # what lies before `at` is done; its last character says whether a line begins
        marks = 0
        while not last:
            block = file.read(piece)
            last = not block
            if "\0" in block:
                raise InputError(f"{path}: not a text file: it has a NUL byte; give UTF-8 text files")
            text, at = text[max(at - 1, 0) :] + block, min(at, 1)
            sure = len(text) if last else len(text) - len(END_OF_TEXT) - 2  # behind it, a mark or its line end may go on
            while (found := BOUNDARY.search(text, at)) and found.end() <= sure:
                marks += 1
                if more or text[at : found.start()].strip():
                    yield Document(text[at : found.start()], "", str(path))
                at, more = found.end(), False
            cut = 0 if last or piece < 0 or len(text) - at < 2 * piece else max(text.rfind(each, at, sure) for each in " \n")
            while cut > at and text[cut - 1].isspace():
                cut -= 1
            if cut > at:
                yield Document(text[at:cut], "", str(path), more=True)
                at, more = cut, True
        tally["boundaries"] += marks
        tally["line_ends"] += getattr(file, "newlines", None) not in (None, "\n")
        if more or text[at:].strip():
            yield Document(text[at:], "", str(path))
        elif not marks:
            tally["empty"] += 1


def _template(prompt: str) -> Callable[[Record, str], str]:
    """Return the function of a record and its place that makes the prompt."""
    if "{" not in prompt and "}" not in prompt:
        return lambda record, where: _text(record, prompt, where, "--set data.prompt=NAME") if prompt else ""
    try:
        parts = list(string.Formatter().parse(prompt))
    except ValueError as error:
        raise InputError(f"recipe: data.prompt {quoted(prompt)}: {error}; write {{{{ and }}}} for braces that are text") from None
    for _, name, form, conversion in parts:
        if name == "" or form or conversion:
            raise InputError(f"recipe: data.prompt {quoted(prompt)}: write fields as {{name}}, and {{{{ }}}} for other braces")

    def option(field: str) -> str:
        texts = [before.replace("{", "{{").replace("}", "}}") for before, *_ in parts]
        fields = ["" if name is None else "{NAME}" if name == field else f"{{{name}}}" for _, name, *_ in parts]
        other = "".join(map(str.__add__, texts, fields))
        return f"--set {shlex.quote(f'data.prompt={json.dumps(other, ensure_ascii=False)}')}"

    options = {name: option(name) for _, name, *_ in parts if name is not None}

    def filled(record: Record, where: str) -> str:
        return "".join(before + (_text(record, name, where, options[name]) if name else "") for before, name, *_ in parts)

    return filled


def _text(record: Record, field: str, where: str, option: str, *, label: bool = False) -> str:
    """Return a field's text. Raises InputError: it is missing, or not text; ``option`` names another field, "" of none."""
    value = record.get(field)
    if isinstance(value, str) or (label and isinstance(value, int)):
        return str(value)
    if field in record:
        other = f", or name another: {option}" if option else ""
        raise InputError(f"{where}: the field {quoted(field)} is not text: {quoted(value)}; correct it{other}")
    there = ", ".join(quoted(name) for name in list(record)[:8]) or "none"
    remedy = f"name one: {option}" if option else f"name it {field}"
    raise InputError(f"{where}: no field {quoted(field)}, only {there}; {remedy}")
