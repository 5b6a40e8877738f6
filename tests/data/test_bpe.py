"""GPT-2's BPE: the same ids as transformers for any text, from all kinds of files, and a clear error for wrong files."""

import itertools
import json
import random
from pathlib import Path

import pytest
from support.tokenizers import openai_vocabulary

from gpt2 import data
from gpt2.data import from_directory
from gpt2.data.bpe import ends, made_bpe, train_bpe
from gpt2.data.byte_level import _CORES, KEPT, byte_alphabet, openai_byte_order
from gpt2.data.files import END_OF_TEXT, warn_once
from gpt2.data.library import LibraryTokenizer
from gpt2.errors import InputError

PLAY = """the and I to of a my you that in is not thou with it be his your for this but he have as thy him so will what her no by
do shall me if are we our O good now lord king love Richard Warwick Clarence Menenius night sweet death heart o'er ne'er 'tis
'twas don't we'll they've I'm she'd you're it's Brutus' father's wherefore honour'd fall'n"""
WORDS = PLAY.split()
SPACES = [*" \t\n\r\v\f\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff\u180e"]
# Pieces of text on which two tokenizers have differed.
POOLS = [
    ["'", "’", " '", "a'", "''", "s", "S", "ll", "LL", "ve", "re", "d", "x"],
    [*SPACES, "   ", " " * 9, "a", "1", "!", "é"],
    ["0", "12", " 345", "6,789.0", "½", "٣", "Ⅻ", "९९", "10" * 9, " "],
    ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪", "❤️", "1️⃣", "🧑‍🚀", "😀", "\u200d", "\ufe0f", " ", "x"],
    ["def f(x):", "\t", "x[1:]", "{'k':", "0x1F}", " ", "    ", "(i=0;i<n;++i)", "b->c;", "//", "#include", "<a.h>", "=="],
    ["\r\n", "\n", "\r", "\n\n", " \n", "\n ", "line", "\u2028", *map(chr, range(32)), "\x7f"],
    ["<|endoftext|>", "<|endoftext|", "|>", "<", " "],
    [f"{word}{end}" for word in WORDS for end in (" ", ", ", ":\n")],
]
BLOCKS = [(0, 0x250), (0x300, 0x370), (0x3000, 0xA000), *((plane << 16, plane + 1 << 16) for plane in (0, 0, 0, *range(17)))]


def varied(seed: int, n: int) -> list[str]:
    """n strings of those pieces, and of random characters of a block."""
    rng, found = random.Random(seed), []
    for _ in range(n):
        start, end = rng.choice(BLOCKS)
        points = [chr(code) for code in rng.choices(range(start, end), k=12) if not 0xD800 <= code < 0xE000]
        found.append("".join(rng.choices(rng.choice([*POOLS, [*points, "é"]]), k=rng.randint(1, 12))))
    return found


def different(bpe: LibraryTokenizer, strings: list[str], expected: list[list[int]]) -> list[str]:
    """The strings to which `bpe` gives other ids than expected."""
    return [text for text, ids in zip(strings, expected, strict=True) if bpe.encode(text) != ids]


def spoil(bpe: LibraryTokenizer) -> LibraryTokenizer:
    """The same vocabulary without its last merge, as OpenAI's and tiktoken's readers see a file without final newline."""
    return made_bpe(bpe.vocab, bpe.merges[:-1])


def reference_from(directory: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def reference_ids(reference, strings: list[str]) -> list[list[int]]:
    return reference(strings, split_special_tokens=True, return_attention_mask=False)["input_ids"]


@pytest.fixture(scope="module")
def official() -> LibraryTokenizer:
    return from_directory(openai_vocabulary()[0].parent)


@pytest.fixture(scope="module")
def play() -> str:
    return " ".join(random.Random(1).choices(WORDS, k=40_000)) + "".join(varied(2, 3000))


@pytest.fixture(scope="module")
def trained(play) -> LibraryTokenizer:
    return train_bpe(play, 1000)


@pytest.fixture(scope="module")
def shuffled(trained) -> LibraryTokenizer:
    """The trained vocabulary under ids unrelated to merge ranks, with the special token in the middle."""
    ids = list(range(trained.n_vocab))
    random.Random(3).shuffle(ids)
    return made_bpe(dict(zip(trained.vocab, ids, strict=True)), trained.merges, [END_OF_TEXT], roles=ends(END_OF_TEXT))


def test_official_ids_equal_transformers(official, tmp_path):
    """Text of every kind, a 32nd of the tokens, every code point of planes 0 and 1, and a 16th of those above, and back to the
    text; transformers reads OpenAI's files, without our code. Other tokens: the fingerprint below."""
    points = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    starts = [i for i in range(0, len(points), 32) if i < 0x20000 or i % (16 * 32) == 0]
    tokens = [official.token_bytes(i).decode(errors="replace") for i in range(7, official.n_vocab, 32)]
    strings = varied(0, 3_000) + ["".join(points[i : i + 32]) for i in starts] + tokens
    assert len(strings) > 9_000
    for file, name in zip(openai_vocabulary(), ("vocab.json", "merges.txt"), strict=True):
        (tmp_path / name).write_bytes(file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    expected = reference_ids(reference_from(tmp_path), strings)
    assert different(official, strings, expected) == []
    for text, ids in zip(strings[:1000], expected, strict=False):
        assert official.decode_bytes(ids) == b"".join(map(official.token_bytes, ids)) == text.encode()


def test_official_vocabulary(official):
    assert official.encode("Hello world") == [15496, 995]
    assert (official.n_vocab, official.eot) == (50257, 50256)
    assert official.special_tokens == {END_OF_TEXT: 50256}
    merges = official.merges
    assert len(merges) == 50_000
    joined = [bytes(map(byte_alphabet().index, a + b)) for a, b in merges]
    assert [official.token_bytes(256 + i) for i in range(50_000)] == joined
    assert [official.token_bytes(i)[0] for i in range(256)] == [byte_alphabet().index(char) for char in openai_byte_order()]
    assert official.fingerprint == "079e3707f346dc2dcc3d48ebe5e3d65f38335797c8b368b1e9aa488b9cea3e36"


def test_ids_need_not_follow_the_ranks(trained, shuffled, tmp_path):
    """tiktoken uses ranks as ids: files of other tools would give other ids without an error. Control: one dropped merge."""
    strings = [*varied(4, 3000), trained.decode([trained.vocab["".join(trained.merges[-1])]])]
    assert shuffled.encode("the king") != trained.encode("the king")
    shuffled.save(tmp_path)
    expected = reference_ids(reference_from(tmp_path), strings)
    assert different(shuffled, strings, expected) == []
    assert different(trained, strings, expected)
    assert different(spoil(shuffled), strings, expected) == strings[-1:]
    assert all(shuffled.decode(ids) == text for text, ids in zip(strings, expected, strict=True))
    pieces = [[each.token_bytes(i) for i in each.encode("O lord")] for each in (shuffled, trained)]
    assert pieces[0] == pieces[1]


def test_long_runs_of_whitespace(official):
    """tiktoken panics on them: a BaseException that kills the process, for a text file with a hole in it."""
    for text in ("a" + "\n" * 150_000 + "b" + " " * 120_000, "\u3000" * 120_000 + "!", "x" * 300_000):
        assert official.decode(official.encode(text)) == text


def test_text_is_data(official, tmp_path):
    """`<|endoftext|>` in a prompt is text here and a control token in transformers; an option reads it as the other does."""
    text = f"one{END_OF_TEXT} two{END_OF_TEXT}"
    plain, control = official.encode(text), official.encode(text, special=True)
    assert plain == [505, 27, 91, 437, 1659, 5239, 91, 29, 734, 27, 91, 437, 1659, 5239, 91, 29]
    assert control == [505, 50256, 734, 50256]
    assert official.decode(plain) == official.decode(control) == text

    paths = official.save(tmp_path)
    assert sorted(path.name for path in paths) == ["merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json"]
    saved = [(tmp_path / name).read_bytes() for name in ("vocab.json", "merges.txt")]
    assert saved == [file.read_bytes() for file in openai_vocabulary()]
    reference = reference_from(tmp_path)
    assert reference(text)["input_ids"] == control
    assert reference(text, split_special_tokens=True)["input_ids"] == plain
    strings = [text for text in varied(7, 6000) if "<" in text]
    assert [official.encode(text, special=True) for text in strings] == reference(strings)["input_ids"]


def test_lone_surrogate_is_refused(official):
    """tiktoken replaces it by U+FFFD without an error, so decoding would give another text."""
    with pytest.raises(InputError, match=r"U\+DC80, at character 2.*read the source as UTF-8"):
        official.encode("ab\udc80")
    replaced = "ab\udc80".encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert official.encode(replaced) == official.encode("ab\ufffd")


def test_trained_vocabulary_is_numbered_like_openais(trained, play):
    tokens = list(trained.vocab)
    assert tokens[:256] == openai_byte_order()
    assert tokens[256:999] == [a + b for a, b in trained.merges]
    assert (trained.n_vocab, trained.eot, tokens[999]) == (1000, 999, END_OF_TEXT)
    assert train_bpe(play, 1000).fingerprint == trained.fingerprint != spoil(trained).fingerprint
    assert len(trained.encode(play)) < 0.5 * len(play.encode())


@pytest.mark.parametrize(
    ("text", "size", "message"), [("to be", 256, "need 257"), ("to be", 300, "at most 2[56]"), ("\ud800", 300, r"U\+D800")]
)
def test_training_refuses(text, size, message):
    with pytest.raises(InputError, match=message):
        train_bpe(text, size)


def test_without_end_of_text(trained, tmp_path):
    """transformers' GPT2Tokenizer would add one, with an id beyond the model's embedding."""
    bpe = made_bpe({token: i for i, token in enumerate(list(trained.vocab)[:-1])}, trained.merges)
    assert bpe.eot is None
    bpe.save(tmp_path)
    reference = reference_from(tmp_path)
    assert len(reference) == bpe.n_vocab == 999
    assert reference("the king")["input_ids"] == bpe.encode("the king")


def test_few_encoders_are_kept(trained, shuffled):
    """A process that opens one tokenizer after another would keep the tables of each, of GPT-2's size, until it ends."""
    made_bpe({**trained.vocab, END_OF_TEXT: trained.n_vocab}, trained.merges)
    assert len(_CORES) == KEPT < 3


def test_same_vocabulary_from_every_container(trained, shuffled, tmp_path):
    for bpe in (trained, shuffled):
        bpe.save(tmp_path)
        vocab, merges = (tmp_path / "vocab.json").read_text(), (tmp_path / "merges.txt").read_text()
        reference_from(tmp_path).save_pretrained(tmp_path / "v5")  # no vocab.json; merges as pairs
        assert not (tmp_path / "v5" / "vocab.json").exists()
        variants = {
            "openai": {"encoder.json": vocab, "vocab.bpe": merges},
            "no final newline": {"vocab.json": vocab, "merges.txt": merges.rstrip("\n")},
            "no header": {"vocab.json": vocab, "merges.txt": merges.partition("\n")[2]},
            "windows": {"vocab.json": vocab, "merges.txt": merges.replace("\n", "\r\n")},
            "lines": {"tokenizer.json": (tmp_path / "tokenizer.json").read_text()},
            "pairs": {"tokenizer.json": (tmp_path / "v5" / "tokenizer.json").read_text()},
            "half": {"tokenizer.json": (tmp_path / "tokenizer.json").read_text(), "vocab.json": vocab},
        }
        for name, written in variants.items():
            directory = tmp_path / name
            directory.mkdir(exist_ok=True)
            for file, text in written.items():
                (directory / file).write_bytes(text.encode())
            assert from_directory(directory).fingerprint == bpe.fingerprint, name


SMALL = train_bpe("the then that there other lather", 264)


def _vocab(**changes) -> str:
    """The small vocabulary's JSON with ids changed, tokens added or, for None, removed."""
    vocab = SMALL.vocab | changes
    return json.dumps({token: i for token, i in vocab.items() if i is not None})


def _merges(change=lambda merges: merges) -> str:
    return "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in change(SMALL.merges))


LAST = "".join(SMALL.merges[-1])


@pytest.mark.parametrize(
    ("vocab", "merges", "message"),
    [
        (_vocab(), _merges(), None),
        ("{", _merges(), r"vocab\.json is not JSON \(line 1 column 2\).*fetch it again"),
        ("[" * 100_000, _merges(), "nested too deep"),
        ('{"a": ' + "1" * 5000 + "}", _merges(), "a number of thousands of digits"),
        (_vocab(), _merges() + "x" * 100_000, r"merge 7 is 'x+\.\.\.x+', not two tokens"),
        (_vocab(), _merges(lambda m: [*m, ("x" * 100_000, "a")]), r"cannot read it .'Error.*[.][.][.]x+` out of vocabulary"),
        (b"\xff\xfe", _merges(), r"vocab\.json: not UTF-8 \(byte 0xff at position 0\)"),
        (_vocab(a=1.5), _merges(), "the id of 'a' is no number of its own"),
        (_vocab(a=-1), _merges(), "tokenizers library cannot read it"),
        ("{}", _merges(), "out of vocabulary"),
        (_vocab(**{LAST: None, "<x>": 262}), _merges(), rf"`{LAST}` out of vocabulary"),
        (_vocab(), _merges() + "t h e\n", "merge 7 is 't h e', not two tokens"),
        (_vocab(), None, r"found only vocab\.json"),
        (None, None, r"looked for tokenizer\.json, vocab\.json \+ merges\.txt, .*spiece\.model and found none"),
    ],
)
def test_bad_files(tmp_path, vocab, merges, message):
    """Each error is one line that names the file and says what to do; otherwise the ids would be wrong."""
    for name, content in {"vocab.json": vocab, "merges.txt": merges}.items():
        if content is not None:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    if message is None:
        assert from_directory(tmp_path).fingerprint == SMALL.fingerprint
        return
    with pytest.raises(InputError, match=message) as error:
        data.from_directory(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500 + len(str(tmp_path))  # the message printed a damaged line of six megabytes


def test_tokens_that_no_merge_makes_are_named(tmp_path, capsys):
    """A file of merges that was cut off gives other ids, in transformers too: one line says so."""
    warn_once.cache_clear()
    (tmp_path / "vocab.json").write_text(_vocab())
    (tmp_path / "merges.txt").write_text(_merges(lambda merges: merges[:-2]))
    assert from_directory(tmp_path).n_vocab == 264
    assert "2 tokens are made by no merge" in capsys.readouterr().err


def test_a_file_too_large_for_a_tokenizer_is_not_read(tmp_path):
    """A sparse file of a terabyte, or a vocabulary that takes an hour to parse."""
    with (tmp_path / "vocab.json").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(InputError, match=r"vocab\.json: it has more than 38 MiB"):
        data.from_directory(tmp_path)


@pytest.mark.slow
def test_accepted_vocabularies_are_read_alike():
    """tiktoken is safe only with the check on merges: each accepted vocabulary has the ids of pair-wise BPE on every string."""
    from tokenizers import Tokenizer, models

    rng, outcome = random.Random(9), {"tiktoken": 0, "tokenizers": 0}
    texts = ["".join(letters) for n in range(1, 9) for letters in itertools.product("ab", repeat=n)]
    texts += ["".join(rng.choices("abc", k=rng.randint(8, 40))) for _ in range(300)]
    for _ in range(150):
        tokens, merges = [*openai_byte_order()], []
        while len(merges) < 7:
            made = tokens[256:]
            pair = tuple(rng.choice(["a", "b", "c", *made]) for _ in range(2))
            if "".join(pair) not in made:
                tokens.append("".join(pair))
                merges.append(pair)
        vocab = {token: i for i, token in enumerate(tokens)}
        bpe = made_bpe(vocab, merges)
        by_pairs = Tokenizer(models.BPE(vocab, merges))
        assert different(bpe, texts, [encoding.ids for encoding in by_pairs.encode_batch(texts)]) == []
        outcome["tokenizers" if bpe.core is None else "tiktoken"] += 1
    assert sum(outcome.values()) == 150
    assert min(outcome.values()) > 15, outcome


def test_missing_files(tmp_path):
    with pytest.raises(InputError, match="is not a directory"):
        data.from_directory(tmp_path / "nowhere")
