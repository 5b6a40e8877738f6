"""Read the records of tables: .jsonl, .json, .csv, .tsv and .parquet; a conversation becomes a record for each answer."""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gpt2.config import quoted
from gpt2.data.files import not_utf8, opened, reading
from gpt2.errors import InputError, require_memory

PARSED = 12  # bytes of memory for a byte of a .json file
SPEAKERS = {"user": "question", "human": "question", "assistant": "answer", "gpt": "answer", "system": "system"}

Record = Mapping[str, Any]  # one line of a table: field to value
Reader = Callable[[Path], Iterator[tuple[str, Record]]]


def records(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a table, each with its place, FILE:LINE. Raises InputError: what cannot be read, with its place.

    A record with ``messages`` (``role``, ``content``) or ShareGPT's ``conversations`` (``from``, ``value``) becomes one with
    ``question`` and ``answer`` for each answer in it, in order; ``conversation`` tells which belong together.
    """
    for where, record in READERS[path.suffix.lower()](path):
        turns = record.get("messages", record.get("conversations"))
        if isinstance(turns, list):
            yield from ((where, each) for each in _answers(turns, where))
        else:
            yield where, record


def _answers(turns: list[Any], where: str) -> Iterator[Record]:
    """Yield question and answer of each answer; a system message is read before the first question."""
    asked, answered = list[str](), False
    for number, turn in enumerate(turns, 1):
        said = turn if isinstance(turn, dict) else {}
        role, text = said.get("role", said.get("from")), said.get("content", said.get("value"))
        if role not in SPEAKERS:
            known = ", ".join(SPEAKERS)
            raise InputError(f"{where}: message {number} has role {quoted(role)}; give text by one of {known}, or leave it out")
        if not isinstance(text, str):
            raise InputError(f"{where}: message {number}, by {role}, is {quoted(text)}; give text, or leave it out")
        if SPEAKERS[role] != "answer":
            asked.append(text)
            continue
        yield {"question": "\n".join(asked), "answer": text, "conversation": where}
        answered, asked = True, []
    if not answered:  # left out as a document without text, and told
        yield {"question": "\n".join(asked), "answer": "", "conversation": where}


def _lines(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a .jsonl file, each with its place; empty lines are skipped."""
    with text_file(path, newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = _parsed(line)
            except (ValueError, RecursionError) as error:
                what = getattr(error, "reason", "too deep or too long")
                what = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else what
                raise InputError(f"{where}: not JSON ({what}); write one object on each line") from None
            if not isinstance(record, dict):
                raise InputError(f"{where}: {quoted(record)} is not an object with fields; write one object on each line")
            yield where, record


def _parsed(text: str) -> Any:
    """Return what JSON says. Raises ValueError: also for a lone surrogate, half of a character, which no text has."""
    body = json.loads(text)
    json.dumps(body if "\\u" in text else None, ensure_ascii=False).encode()
    return body


def _array(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a .json file, which holds one array of objects."""
    with text_file(path, newline="") as file:
        require_memory(PARSED * path.stat().st_size, f"{path}: its objects", "write it as .jsonl, one object on each line")
        try:
            body = _parsed(file.read())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not JSON ({str(error)[:80]}); correct it") from None
    if not isinstance(body, list) or not all(isinstance(each, dict) for each in body):
        raise InputError(f"{path}: must hold a list of objects; write [{{...}}, ...], or a .jsonl file, an object a line")
    yield from ((f"{path}, object {number}", each) for number, each in enumerate(body, 1))


def _rows(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a .csv or .tsv file, each with its last line; the first line shows fields and separator."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the module's own limit is 128 KB a field
    with text_file(path, newline="") as lines:
        try:
            separator = csv.Sniffer().sniff(lines.readline(1 << 16), delimiters=",;\t").delimiter
        except csv.Error:  # one field
            separator = ","
        lines.seek(0)
        reader, before = csv.DictReader(lines, delimiter=separator, strict=True), 1
        try:
            for record in reader:
                before, where = reader.line_num, f"{path}:{reader.line_num}"
                if None in record:
                    raise InputError(f"{where}: more values than the {len(reader.fieldnames or ())} fields of the first line")
                yield where, record
        except csv.Error as error:
            at = f"{path}:{before + 1}" if "end of data" in str(error) else f"{path}:{reader.reader.line_num}"
            raise InputError(f"{at}: not CSV ({error}: is a quote left open?); save the table again") from None


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield the records of a .parquet file, each with its row."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise InputError(f"{path}: reading .parquet needs pyarrow: pip install 'gpt2-toolkit[parquet]', or give .jsonl") from None
    try:
        row = 0
        with opened(path) as stream, parquet.ParquetFile(stream) as file:
            for batch in file.iter_batches(batch_size=64):
                for record in batch.to_pylist():
                    row += 1
                    yield f"{path}, row {row}", record
    except (OSError, ArrowException, ValueError, OverflowError) as error:  # dates and texts that Python cannot hold
        raise InputError(f"{path}: cannot be read ({error}); save the table again") from None


@contextmanager
def text_file(path: Path, newline: str | None) -> Iterator[IO[str]]:
    """Open a UTF-8 file for reading, without a byte-order mark; what goes wrong meanwhile becomes an InputError."""
    try:
        with reading(path, "check the path"), opened(path, mode="r", encoding="utf-8-sig", newline=newline) as lines:
            yield lines
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None


READERS: dict[str, Reader] = {".jsonl": _lines, ".json": _array, ".csv": _rows, ".tsv": _rows, ".parquet": _parquet}
