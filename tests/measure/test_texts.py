"""Texts by name: which are opened or refused, and that the named protocol is the one used."""

import hashlib
import io
import json
import math
import re
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from support import forks
from support.commands import refusal
from support.hub_standin import HubStandIn
from support.oracle import as_the_guide_does
from support.random_models import uneven_model

from gpt2.data import shakespeare
from gpt2.data.bpe import chars_of, train_bpe
from gpt2.data.documents import documents
from gpt2.errors import InputError
from gpt2.measure import texts
from gpt2.measure.metrics import language_scores
from gpt2.measure.texts import LAMBADA, WIKITEXT2, open_text
from gpt2.measure.windows import Windows
from gpt2.train.recipe import read

WIKI = " \n = Robert = \n \n Robert is a film , television 8 @,@ 600 actor . \n She said : é \n"
JOINED = "\n\n = Robert = \n\n\n\n\n Robert is a film , television 8 @,@ 600 actor . \n\n\n She said : é \n"
BPE = train_bpe(WIKI, 259)
PASSAGES = ("the cat sat on the mat", "he opened the old door", "naïve, she said to the king")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Names are looked up in the working folder first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPT2_TOOLKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def stdin(monkeypatch):
    def feed(data: bytes | io.RawIOBase) -> None:
        stream = io.BytesIO(data) if isinstance(data, bytes) else data
        monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"buffer": stream}))

    return feed


def test_the_default_needs_no_network():
    """`gpt2 compare A B` must not start with a download, and the text must be held out from the embedded model's training."""
    text = open_text(offline=True)
    assert text == open_text("twelfth-night")
    assert (text.name, len(text.text), text.passages) == ("twelfth-night", 110_828, ())
    assert text.text == shakespeare.play("twelfth-night") == open_text("plays:play=twelfth-night").text
    assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest()
    assert (text.protocol.context, text.protocol.stride, text.protocol.guide) == (None, None, False)
    assert text.protocol.told == "every token but the first; the text as it stands"
    assert "twelfth-night" in shakespeare.HELD_OUT
    assert "twelfth-night" not in read("finetune-shakespeare").data.source


@pytest.mark.parametrize("name", ["my.txt", "sub/my.txt", "{}/my.txt"])
def test_a_file_is_read_as_it_is(tmp_path, name):
    """Its source, name and hash say what was measured."""
    (tmp_path / "sub").mkdir()
    path = name.format(tmp_path)
    Path(path).write_bytes("one\ntwo – é\n\n".encode())
    text = open_text(f"{path}:stride=12,context=24")
    assert (text.text, text.protocol.stride, text.protocol.context) == ("one\ntwo – é\n\n", 12, 24)
    assert text.reading(BPE) == ""
    assert text.sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert Path(text.source).samefile(path)
    assert text.name == f"{path}:stride=12,context=24"


def test_line_ends_are_those_of_python(stdin):
    """The same text with CRLF had twelve times the perplexity, and nothing said so."""
    stdin(b"one\r\ntwo\rthree\n")
    text = open_text("-")
    assert text.text == "one\ntwo\nthree\n"
    assert text.sha256 == hashlib.sha256(b"one\ntwo\nthree\n").hexdigest()
    assert text.reading(BPE) == r"line ends \r\n and \r are read as \n"


def test_documents_are_read_as_training_reads_them(tmp_path):
    """The mark between documents was thirteen letters: perplexity 46,508 for 345. Its token stands for no byte of the text."""
    Path("docs.txt").write_text("one\n<|endoftext|>\ntwo<|endoftext|>\n \n<|endoftext|>\nthree")
    Path("docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one\n", "two", " ", "three")))
    text, end = open_text("docs.txt"), BPE.eot
    trained = [document.text for document in documents([Path("docs.txt")], tally=Counter())]
    Path("docs.json").write_text(json.dumps([{"text": text} for text in trained]))
    for name in ("docs.jsonl", "docs.json"):
        assert text.documents == trained == open_text(name).documents == ["one\n", "two", "three"]
    ids = [i for part in trained for i in (*BPE.encode(part), end)]  # a table's last document ends too, as in training
    assert [*text.encode(BPE), end] == open_text("docs.jsonl").encode(BPE) == ids
    assert text.reading(BPE) == "3 documents, parted by '<|endoftext|>'"
    assert sum(text.lengths(BPE)) == len("one\ntwothree")
    assert [n for i, n in zip(ids[:-1], text.lengths(BPE), strict=True) if i == end] == [0, 0]
    chars = chars_of("one\ntwthr")  # has no end of text: a line end parts documents, as in training
    assert text.encode(chars) == chars.encode("one\n\ntwo\nthree")
    assert all(text.beginning(BPE, count).encode(BPE) == ids[:count] for count in range(1, len(ids)))
    Path("one.txt").write_text("one\n<|endoftext|>\n")
    assert open_text("one.txt").encode(BPE) == BPE.encode("one\n")
    Path("bare.txt").write_text("one")
    assert open_text("bare.txt").encode(chars_of("eno")) == [2, 1, 0]  # a token that parts documents is not asked for
    Path("odd.jsonl").write_text('{"body": "one"}')
    assert "no field 'text', only 'body'; name it text" in refusal(open_text, "odd.jsonl")
    Path("odd.jsonl").write_text('{"text": 5}')
    assert refusal(open_text, "odd.jsonl").endswith("is not text: 5; correct it")  # it named another: --set data.field=NAME


def test_a_path_that_exists_wins(tmp_path):
    """An existing file wins over a name and over options, which may be part of the file's name; a folder is not a text."""
    Path("lambada").write_text("mine")
    Path("odd:stride=3").write_text("odd")
    Path("macbeth").mkdir()
    assert open_text("lambada:stride=1").text == "mine"
    assert (open_text("odd:stride=3").text, open_text("odd:stride=3").protocol.stride) == ("odd", None)
    assert open_text("odd:stride=3:stride=5").protocol.stride == 5
    assert len(open_text("macbeth").text) == 95_856


def test_standard_input(stdin, monkeypatch):
    stdin(b"as said\n")
    text = open_text("-")
    assert (text.text, text.source, text.name) == ("as said\n", "stdin", "-")
    stdin(b"\xef\xbb\xbfmarked")
    assert open_text("-:stride=2").text == "marked"
    monkeypatch.setattr(sys, "stdin", None)
    assert "no standard input" in refusal(open_text, "-")


def test_a_text_without_end_ends(stdin, monkeypatch):
    """`yes | gpt2 compare --on -` filled the memory."""

    class Yes(io.RawIOBase):
        given = 0

        def read(self, size: int = -1) -> bytes:
            self.given += size
            assert size > 0
            assert self.given < 8 << 20
            return b"y\n" * (size // 2)

    monkeypatch.setattr(texts, "MAX_BYTES", 4 << 20)
    stdin(Yes())
    with pytest.raises(InputError, match=r"^stdin: more than 4 MiB; cut a piece of it"):
        open_text("-")
    with pytest.raises(InputError, match=r"^/dev/zero: cannot be read \(a pipe or a device"):
        open_text("/dev/zero")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("wikitex2", r"^no text 'wikitex2' \(did you mean wikitext2\?\): give a text file, - for stdin, or twelfth-night,"),
        ("mine.text", r"did you mean mine.txt\?"),
        ("no/such/folder/x.txt", r"^no text 'no/such/folder/x.txt': give"),
        ("mine.txt:strid=12", r"no option 'strid=12' \(did you mean stride\?\); write mine.txt:context=VALUE, known are context"),
        ("mine.txt:stride=1,stride=1", r"stride is given twice"),
        ("mine.txt:stride=x", r"stride is 'x'; give a whole number of 1 or more"),
        ("mine.txt:context=" + "9" * 5000, r"context is '999"),
        ("mine.txt:stride=25,context=24", r"a stride larger than the context skips tokens; give one of at most 24"),
        ("plays:play=hamlt", r"did you mean hamlet"),
        ("wikitext2:split=tst", r"^wikitext2: no split 'tst' \(did you mean test\?\); known are test, validation$"),
        ("folder", r"^folder: no .txt, .md, .jsonl, .csv, .tsv or .parquet in it; give another"),
        ("empty.txt", r"the file is empty"),
        ("latin.txt", r"not UTF-8 \(byte 0xe9 at position \d+\)"),
        ("nul.txt:stride=2", r"^nul.txt: not a text file: NUL byte"),
        ("a\nb", r"^no text 'a\\nb'"),
    ],
)
def test_what_cannot_be_opened_is_one_line(spec, says):
    Path("mine.txt").write_text("words")
    Path("empty.txt").write_bytes(b"")
    Path("latin.txt").write_bytes("café".encode("latin-1"))
    Path("nul.txt").write_bytes(b"a\0b")
    Path("folder").mkdir()
    assert re.search(says, refusal(open_text, spec, offline=True))


# The client reads its environment at import: one process for all cases. Real commits and paths, synthetic content.
SCRIPT = """
import dataclasses, json, sys
from gpt2.measure import texts
pins = json.loads(sys.argv[1])
texts.WIKITEXT2 = dataclasses.replace(texts.WIKITEXT2, **pins["wikitext2"])
texts.LAMBADA = dataclasses.replace(texts.LAMBADA, **pins["lambada"])
for case in json.loads(sys.argv[2]):
    try:
        found = dataclasses.asdict(texts.open_text(**case))
    except Exception as error:
        found = dict(error=type(error).__name__, message=str(error))
    print(json.dumps(found))
"""


def archive(**members: str) -> bytes:
    """WikiText's zip as its authors made it: a folder with three files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in members.items():
            file.writestr(f"wikitext-2-raw/wiki.{name}.raw", text.encode())
    return buffer.getvalue()


CONTENT = {
    "wikitext2": archive(test=WIKI, valid=" \n = Another = \n"),
    "lambada": "".join(json.dumps({"text": passage}) + "\n" for passage in PASSAGES).encode(),
}


class Hub(HubStandIn):
    """A Hub with both data sets at the commits that the code names."""

    def __init__(self) -> None:
        super().__init__()
        for name, file in (("wikitext2", WIKITEXT2), ("lambada", LAMBADA)):
            self.add_repo(f"datasets/{file.repo}", {file.path: CONTENT[name]}, lfs=(file.path,), commit=file.commit)

    def open(self, home: Path, *cases: dict | str, **environ: str) -> list[dict]:
        asked = [{"spec": case} if isinstance(case, str) else case for case in cases]
        pins = {name: {"sha256": hashlib.sha256(data).hexdigest()} for name, data in CONTENT.items()}
        words = ["-c", SCRIPT, json.dumps(pins), json.dumps(asked)]
        done = forks.run(*words, environ=self.environ(home, **environ), strict=True)
        results = [json.loads(line) for line in done.stdout.splitlines()]
        for result in results:
            assert "\n" not in result.get("message", "")
        return results


@pytest.fixture
def hub():
    with Hub() as server:
        yield server


def test_wikitext_and_lambada_from_the_hub(hub, tmp_path):
    """Rows joined by one newline, blank lines kept as " ", passages stripped: any other text has another perplexity."""
    cold = {"spec": "lambada", "offline": True}
    refused, wiki, valid, lambada, two, warm = hub.open(
        tmp_path / "home", cold, "wikitext2:stride=512", "wikitext2:split=validation", "lambada", "lambada:passages=2", cold
    )
    assert refused["error"] == "InputError"
    assert refused["message"].startswith("offline, and the cache ")
    assert f"no copy of EleutherAI/lambada_openai at {LAMBADA.commit}" in refused["message"]
    assert wiki["text"] == JOINED
    assert wiki["sha256"] == hashlib.sha256(JOINED.encode()).hexdigest()
    source = "https://huggingface.co/datasets/ggml-org/ci, wikitext-2-raw/wiki.test.raw at"
    assert wiki["source"] == f"{source} {WIKITEXT2.commit[:12]}"
    assert (wiki["protocol"]["guide"], wiki["protocol"]["stride"], wiki["protocol"]["context"]) == (True, 512, None)
    assert valid["text"] == "\n\n = Another = \n"
    assert tuple(lambada["passages"]) == PASSAGES
    assert two["passages"] == list(PASSAGES[:2])
    assert lambada["text"] == "\n\n".join(PASSAGES)
    assert warm == lambada
    downloads = [request.path for request in hub.requests if request.method == "GET"]
    assert downloads == [
        f"/datasets/ggml-org/ci/resolve/{WIKITEXT2.commit}/{WIKITEXT2.path}",
        f"/datasets/EleutherAI/lambada_openai/resolve/{LAMBADA.commit}/{LAMBADA.path}",
    ]  # each once, at the commit that the code names
    before = len(hub.requests)
    assert hub.open(tmp_path / "home", "lambada", "wikitext2", HF_HUB_OFFLINE="1")[1]["text"] == JOINED
    [cold] = hub.open(tmp_path / "other", "lambada", HF_HUB_OFFLINE="1")
    assert "holds no copy" in cold["message"]
    assert len(hub.requests) == before


def test_a_damaged_download_is_never_scored(hub, tmp_path):
    """A flipped byte changes a perplexity too little to be noticed. What another program left damaged: test_hub.py."""
    hub.corrupt(f"datasets/{LAMBADA.repo}", LAMBADA.path)
    refused, mended = hub.open(tmp_path / "home", "lambada", "lambada")
    assert refused["error"] == "CheckpointError"
    assert "the Hub declares" in refused["message"]
    assert tuple(mended["passages"]) == PASSAGES


@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3), (8, 1), (2, 1), (5, 2)])
@pytest.mark.parametrize("length", [2, 8, 9, 17, 61])
def test_the_guides_windows(context, stride, length):
    """Possible bugs: a context without the scored token, a token scored twice. Only the right protocol gives 29.94."""
    ids = torch.randint(13, (length,), generator=torch.Generator().manual_seed(4))
    model = uneven_model(13)
    score = language_scores(model, ids, torch.ones(13).long(), Windows(context, stride, guide=True))[0]
    assert all(window.start <= window.first < window.end for window in Windows(context, stride, guide=True).of(length))
    assert score.loss == pytest.approx(as_the_guide_does(model, ids, context, stride), rel=1e-12)
    assert score.tokens == length - (math.ceil(length / context) if stride == context else 1)
    assert "context 1: a token is predicted from at least 1; give 2 or more" in refusal(next, Windows(1, guide=True).of(9))
