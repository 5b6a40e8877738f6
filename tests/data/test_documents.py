"""Documents from files and tables: where one ends, which text is a prompt, and what is refused."""

import json
import os
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from support.commands import refusal

from gpt2.data.batches import FILLER, READ, SCORED, held_out, lay_out
from gpt2.data.documents import Document, documents, files, size


def read(path: Path, field: str = "text", prompt: str = "") -> list[tuple[str, str, str]]:
    """Prompt, text and line of each document."""
    found = documents(files(str(path)), field, prompt, tally=Counter())
    return [(each.prompt, each.text, each.where.removeprefix(str(path))) for each in found]


def test_end_of_text_is_the_boundary_and_other_special_tokens_are_text(tmp_path):
    """It was trained on as thirteen ordinary characters. On a line of its own, its line belongs to no document."""
    (tmp_path / "a.md").write_text("one\n<|endoftext|>\ntwo <|pad|><|endoftext|> three\n<|endoftext|>\r\n \n", encoding="utf-8")
    tally = Counter()
    found = [document.text for document in documents(files(str(tmp_path)), tally=tally)]
    assert found == ["one\n", "two <|pad|>", " three\n"]
    assert tally["boundaries"] == 3


def test_empty_files_and_documents_are_left_out_and_line_ends_are_those_of_python(tmp_path):
    """One empty file among a thousand stopped the whole run; a file of Windows taught a model "\\r"."""
    contents = {"a.txt": b"", "b.txt": b"\xef\xbb\xbf", "c.txt": b" \r\n", "d.txt": b"\xef\xbb\xbfone\r\n<|endoftext|>\r\n\ttwo"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    tally = Counter()
    assert [each.text for each in documents(files(str(tmp_path)), tally=tally)] == ["one\n", "\ttwo"]
    assert tally == Counter(empty=3, boundaries=1, line_ends=2)


def test_a_table_gives_the_same_documents_in_every_format(tmp_path):
    """A line end or quote in a field splits a table that is read by lines; a byte-order mark renames the first field."""
    rows = [{"q": 'Why "so"?', "a": "Be,\ncause."}, {"q": "", "a": "é"}]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "a.csv").write_text('\ufeffq,a\n"Why ""so""?","Be,\ncause."\n,é\n', encoding="utf-8")
    template = "Q: {q}\n{{A}}: "
    expected = [('Q: Why "so"?\n{A}: ', "Be,\ncause."), ("Q: \n{A}: ", "é")]
    assert read(tmp_path / "a.jsonl", "a", template) == [(*expected[0], ":1"), (*expected[1], ":3")]
    assert read(tmp_path / "a.csv", "a", template) == [(*expected[0], ":3"), (*expected[1], ":4")]
    assert [row[:2] for row in read(tmp_path / "a.jsonl", "a", "q")] == [(row["q"], row["a"]) for row in rows]
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [row[:2] for row in read(tmp_path / "a.parquet", "a", template)] == expected


def test_files_come_in_the_order_of_their_names_and_nothing_hidden(tmp_path):
    """Another order on another machine is another stream of tokens."""
    for name in ("b/z.txt", "b/a.txt", "c.jsonl", "B.md", ".git/x.txt", "b/.y.txt", "paper.pdf", "LICENSE"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [str(path.relative_to(tmp_path)) for path in files(str(tmp_path))] == ["B.md", "b/a.txt", "b/z.txt", "c.jsonl"]
    assert files(str(tmp_path / "**/*.txt")) == [tmp_path / "b/a.txt", tmp_path / "b/z.txt"]


@pytest.mark.parametrize("mode", [0, 0o444])
def test_a_folder_within_that_cannot_be_read_is_refused(tmp_path, monkeypatch, mode):
    """Its texts were left out in silence. Nothing can be listed; or names can, and no file be opened."""
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "a.txt").write_text("x")
    (tmp_path / "closed").chmod(mode)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    try:
        os.seteuid(65534 if user == 0 else user)  # nobody: root may read everything
        assert "closed: this folder cannot be read: Permission denied" in refusal(files, ".")
    finally:
        os.seteuid(user)
        (tmp_path / "closed").chmod(0o755)


def test_a_table_counts_as_what_it_holds(tmp_path):
    """Judged by its compressed size, a text of many GB was read into memory."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = arrow.Table.from_pylist([{"text": f"{number} {'again ' * 500}"} for number in range(300)])
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    (tmp_path / "b.txt").write_text("ten bytes\n")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    assert 900_000 < size([tmp_path / "a.parquet"]) < 1_000_000
    assert size([tmp_path / "b.txt", tmp_path / "none.txt"]) == 10


@pytest.mark.parametrize(
    ("name", "content", "settings", "says"),
    [
        ("a.jsonl", '{"text": "x"}\n{"txt": "y"}', {}, "a.jsonl:2: no field 'text', only 'txt'; name one: --set data.field=NAME"),
        ("a.jsonl", '{"text": "x"}\n\n{"text": 3}', {}, "a.jsonl:3: the field 'text' is not text: 3"),
        ("a.jsonl", '{"text": "x"}', {"prompt": "'{{q}} {q}"}, """--set 'data.prompt="'"'"'{{q}} {NAME}"'"""),
        ("a.jsonl", '{"text": "x"}', {"prompt": "Q: {q"}, "write {{ and }} for braces"),
        ("a.jsonl", '{"text": "x"}', {"prompt": "Q: {q:>9}"}, "write fields as {name}"),
        ("a.jsonl", '{"text": "x", "q": "a<|endoftext|>"}', {"prompt": "q"}, "a.jsonl:1: <|endoftext|> within a prompt"),
        ("a.jsonl", '{"text": "x"}\n{"text": ', {}, "a.jsonl:2: not JSON (Expecting value at column 10)"),
        ("a.jsonl", "[" * 100_000, {}, "a.jsonl:1: not JSON (too deep or too long)"),
        ("a.jsonl", '{"text": "\\ud800 "}', {}, "a.jsonl:1: not JSON (surrogates not allowed)"),
        ("a.jsonl", '["text"]', {}, "a.jsonl:1: ['text'] is not an object"),
        ("a.jsonl", b'{"text": "\xff"}', {}, "not UTF-8 (byte 0xff at position"),
        ("a.json", "{}", {}, "must hold a list of objects"),
        ("a.json", "[1]", {}, "must hold a list of objects"),
        ("a.json", "[", {}, "not JSON"),
        ("a.csv", "text\nx\ny,z\n", {}, "a.csv:3: more values than the 1 fields"),
        ("a.csv", 'text\nx\n"y\nz\n', {}, "a.csv:3: not CSV (unexpected end of data: is a quote left open?)"),
        ("a.csv", "text,q\nx", {"prompt": "q"}, "a.csv:2: the field 'q' is not text: None"),
        ("a.txt", "x", {"prompt": "q"}, "a text file has none"),
        ("a.txt", b"a\0b", {}, "a.txt: not a text file: it has a NUL byte"),
        ("a" * 300, None, {}, "File name too long; check data.path"),
        ("a.docx", "{}", {}, ".docx is none of .txt, .md, .jsonl, .json, .csv, .tsv and .parquet"),
        ("a.parquet", "x", {}, "a.parquet: "),
        ("", "", {}, "no .txt, .md, .jsonl, .csv, .tsv or .parquet in it"),
        ("none.txt", None, {"prompt": "question"}, "none.txt: no such file or folder"),
        ("*.csv", None, {}, "no file has such a name"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_its_place(tmp_path, name, content, settings, says):
    path = tmp_path / name
    if name and content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert says in refusal(lambda: read(path, **settings))


def test_the_split_keeps_equal_documents_together_and_moves_none_for_a_new_one():
    """By position, a new document would move others across the split, and what was trained on would be scored."""
    texts = [Document(f"text {index}", "", "") for index in range(400)]
    out = held_out(texts, 0.1, 0)
    assert 20 < out.sum() < 60
    more = held_out([*texts[:7], Document("new", "", ""), *texts[7:], *texts], 0.1, 0)
    assert (np.delete(more, 7) == np.tile(out, 2)).all()
    assert (held_out(texts, 0.1, 1) != out).any()
    for fraction in (1e-9, 1 - 1e-9):
        assert 0 < held_out(texts[:2], fraction, 0).sum() < 2


def test_the_layout_of_a_document():
    """The end must be scored, or no answer ever ends; the filler must not, or the model learns to write it."""
    tally = Counter()
    ids, marks = lay_out([5, 6], [7], 9, 4, padded=False, tally=tally)
    assert (ids.tolist(), marks.tolist()) == ([5, 6, 7, 9], [READ, READ, SCORED, SCORED])
    rows = [lay_out([5, 6], text, 9, 4, padded=True, tally=tally) for text in ([], [7], [7, 8])]
    assert [row.tolist() for row, _ in rows] == [[5, 6, 9, 9], [5, 6, 7, 9], [5, 6, 7, 8]]
    filled = [FILLER, READ, SCORED, SCORED]
    assert [each.tolist() for _, each in rows] == [[FILLER, READ, SCORED, FILLER], filled, filled]
    lay_out([5] * 4, [7], 9, 4, padded=True, tally=tally)
    assert dict(tally) == {"documents": 5, "tokens": 22, "long": 2, "lost": 1}


CHAT = [
    [
        ("system", "Be brief."),
        ("user", "Who?"),
        ("assistant", "He."),
        ("user", "Why?"),
        ("assistant", "For love."),
        ("user", "So?"),
    ],
    [("user", "When?"), ("assistant", "Now.")],
]


@pytest.mark.parametrize(("key", "role", "content"), [("messages", "role", "content"), ("conversations", "from", "value")])
def test_a_conversation_is_a_document_for_each_answer_and_is_held_out_whole(tmp_path, key, role, content):
    """Chats as most people have them had to be rewritten by hand; a question without an answer has nothing to train on."""
    names = {"user": "human", "assistant": "gpt", "system": "system"} if key == "conversations" else {}
    chats = [{key: [{role: names.get(who, who), content: said} for who, said in chat]} for chat in CHAT]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (tmp_path / "a.json").write_text(json.dumps(chats))
    expected = [("Q: Be brief.\nWho?\n", "He."), ("Q: Why?\n", "For love."), ("Q: When?\n", "Now.")]
    for name in ("a.jsonl", "a.json"):
        assert [row[:2] for row in read(tmp_path / name, "answer", "Q: {question}\n")] == expected
    found = list(documents([tmp_path / "a.jsonl"], "answer", "question", tally=Counter()))
    for seed in range(20):
        first, second, other = held_out(found, 0.5, seed)
        assert first == second != other
    (tmp_path / "a.jsonl").write_text(json.dumps({key: chats[0][key][:2]}))
    assert not [*documents([tmp_path / "a.jsonl"], "answer", tally=(tally := Counter()))]
    assert tally["empty"] == 1, "told: a conversation without an answer"
    for part, value, says in ((role, "tool", " has role 'tool'; give text by"), (content, [1], ", by system, is [1]; give")):
        (tmp_path / "a.json").write_text(json.dumps([{key: [{**chats[0][key][0], part: value}]}]))
        assert f"a.json, object 1: message 1{says}" in refusal(read, tmp_path / "a.json", "answer")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_separator_of_a_table_is_found(tmp_path, monkeypatch, separator):
    """Spreadsheets of half of Europe write `;`: the first line was one field with a strange name. Long ones took minutes."""
    (tmp_path / "a.csv").write_text(f'q{separator}a\r\n"1;2,3"{separator}yes\r\n')
    assert [row[:2] for row in read(tmp_path / "a.csv", "a", "q")] == [("1;2,3", "yes")]
    (tmp_path / "b.csv").write_text("text\none; two, three\n".replace(", ", " ") if separator == "," else "text\none two\n")
    assert len(read(tmp_path / "b.csv")) == 1
    monkeypatch.setattr("csv.Sniffer.sniff", sniff := Mock(**{"return_value.delimiter": separator}))
    (tmp_path / "b.csv").write_text("x" * 10**5)
    assert read(tmp_path / "b.csv") == []
    assert len(sniff.call_args[0][0]) == 1 << 16
