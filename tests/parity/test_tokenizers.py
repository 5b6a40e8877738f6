"""Every kind of tokenizer: ids, prompts and texts equal those of AutoTokenizer, and a checkpoint with it works throughout."""

import importlib.util
import json
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.checks import content, mostly_slow
from support.commands import refusal
from support.random_models import random_model
from support.tokenizers import END, KINDS, SAMPLES, SW3, byte_level_bpe, lowercase_words, pieces, resaved
from tokenizers import normalizers, pre_tokenizers

import gpt2
from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.export import export
from gpt2.cli.main import main
from gpt2.config import GPT2Config
from gpt2.data import auto, from_directory
from gpt2.data.adapter import auto_ids, quiet
from gpt2.data.library import LibraryTokenizer
from gpt2.errors import InputError
from gpt2.explore.lens import explorer
from gpt2.generation import StopText
from gpt2.parity import checks
from gpt2.parity.checks import Probe, Subject
from gpt2.parity.findings import Findings

TRAINED: dict[str, dict[str, bytes]] = {}  # the files of each kind


def made(kind: str, folder: Path) -> Path:
    """A folder with that kind of tokenizer and GPT-2's config, as on the Hub."""
    if kind in ("T5", "GPT-SW3") and importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("the extra sentencepiece is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    if kind not in TRAINED:
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        KINDS[kind](folder)
        TRAINED[kind] = content(folder)
    for name, data in TRAINED[kind].items():
        (folder / name).write_bytes(data)
    return folder


def model_of(kind: str, folder: Path) -> Path:
    """A tiny model with that tokenizer; its config ends a text where the tokenizer does."""
    from transformers import AutoTokenizer

    made(kind, folder)
    tokenizer, named = AutoTokenizer.from_pretrained(folder), json.loads((folder / "config.json").read_text())
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    gpt2.save(random_model(GPT2Config(len(tokenizer), 64, 16, 1, 2, **ends), 0.1, dtype=torch.float32), None, folder)
    (folder / "config.json").write_text(json.dumps(named | json.loads((folder / "config.json").read_text())))
    (folder / "generation_config.json").unlink()
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_those_of_auto_tokenizer(kind: str, tmp_path: Path) -> None:
    """A normaliser, a template, the flags of an added token or a class that rebuilds its own pipeline were lost in silence."""
    from transformers import AutoTokenizer

    ours, theirs = from_directory(made(kind, tmp_path / "a")), AutoTokenizer.from_pretrained(tmp_path / "a")
    plain = AutoTokenizer.from_pretrained(tmp_path / "a")
    for text in SAMPLES:
        whole = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, special=True) == whole, text
        assert ours.encode_prompt(text, special=True) == theirs(text)["input_ids"], text
        assert ours.decode(whole) == theirs.decode(whole, clean_up_tokenization_spaces=False), text
        assert ours.encode(text) == auto_ids(plain, text), text
        if whole:
            assert sum(ours.lengths(text)) == len(text.encode()), text
    assert (ours.n_vocab, ours.eos) == (len(theirs), theirs.eos_token_id)
    one, other = quiet(), quiet()  # in two threads: the one that left last set back the other one's silence
    one.__enter__(), other.__enter__(), one.__exit__(None, None, None), other.__exit__(None, None, None)
    assert logging.getLogger("transformers").level != logging.ERROR


DECLARED = {"content": END, "lstrip": True, "normalized": False, "rstrip": False, "single_word": False, "special": True}
WHOLES = {  # tokenizer.json, and whether the files of its model are GPT-2's own two
    "own": (lambda: byte_level_bpe([END]), True),
    "lowercase": (lambda: byte_level_bpe([END], normalizer=normalizers.Lowercase()), True),
    "no end": (lambda: byte_level_bpe(["<s>"]), True),
    "a space in front": (lambda: byte_level_bpe([END], pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), True),
    "no pattern": (lambda: byte_level_bpe([END], pre_tokenizer=pre_tokenizers.ByteLevel(False, use_regex=False)), True),
    "words": (lowercase_words, False),
}
MODELS = [None, {"n_layer": 1}, {"model_type": "gpt2"}, {"model_type": "gpt2", "tokenizer_class": "PreTrainedTokenizerFast"}]
MODELS += [{"model_type": "gpt2", "tokenizer_class": "GPT2TokenizerFast"}, {"model_type": "bert"}]
SETTINGS = [None, {"model_max_length": 64}, {"tokenizer_class": "TokenizersBackend", "bos_token": END}, {"pad_token": "[PAD]"}]
SETTINGS += [
    {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True},
    {"tokenizer_class": "Elsewhere"},
    {"add_bos_token": True},
]
SETTINGS += [{"added_tokens_decoder": {"0": DECLARED}}, {"eos_token": {**DECLARED, "__type": "AddedToken"}}]
SETTINGS += [{"additional_special_tokens": ["the"]}, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "the"}]


def test_any_files_give_the_ids_of_auto_tokenizer(tmp_path: Path) -> None:
    """A folder with tokenizer.json (Lowercase, Whitespace) and nothing else got GPT-2's own class, other ids, and "equal"."""
    from transformers import AutoTokenizer

    ran, rng = {"adapter": 0, "here": 0, "neither": 0}, random.Random(0)
    cases = [(name, None, None, False) for name in WHOLES]
    cases += [(rng.choice([*WHOLES]), rng.choice(MODELS), rng.choice(SETTINGS), rng.random() < 0.3) for _ in range(80)]
    built = {name: (make(), own) for name, (make, own) in WHOLES.items()}
    for number, (name, model, settings, files) in enumerate(cases):
        folder, (pipeline, own) = tmp_path / str(number), built[name]
        folder.mkdir()
        pipeline.model.save(str(folder)) if own and files else pipeline.save(str(folder / "tokenizer.json"))
        for file, said in (("config.json", model), ("tokenizer_config.json", settings)):
            if said is not None:
                (folder / file).write_text(json.dumps(said))
        try:
            theirs = AutoTokenizer.from_pretrained(folder)
        except Exception:  # vocab.json of no class: ours alone reads it, or refuses it too
            ran["neither"] += 1
            continue
        ours = from_directory(folder)
        ran["adapter" if ours.by_transformers else "here"] += 1
        for text in SAMPLES[:6]:
            ids = outcome(lambda: ours.encode_prompt(text, special=True))  # noqa: B023
            assert ids == outcome(lambda: theirs(text)["input_ids"]), (name, model, settings, files, text)  # noqa: B023
        assert (ours.n_vocab, ours.eos) == (len(theirs), theirs.eos_token_id), (name, model, settings, files)
    assert min(ran.values()) > 5, ran


def outcome(encode: Callable[[], list[int]]) -> list[int] | None:
    """The ids, or None where the vocabulary lacks even an unknown token."""
    try:
        return encode()
    except Exception:
        return None


@pytest.mark.parametrize("kind", mostly_slow(KINDS, 3))
def test_files_are_written_back_as_they_were(kind: str, tmp_path: Path) -> None:
    """An export was another tokenizer: without its template, its flags, its normaliser."""
    from transformers import AutoTokenizer

    source = model_of(kind, tmp_path / "a")
    names = {path.name for path in source.iterdir()} - {"config.json", "model.safetensors"}
    export(str(source), tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in names} == {n: (source / n).read_bytes() for n in names}
    theirs, copy = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [copy(text)["input_ids"] for text in SAMPLES] == [theirs(text)["input_ids"] for text in SAMPLES]
    again = from_directory(tmp_path / "out")
    assert again.fingerprint == from_directory(source).fingerprint
    assert [again.encode_prompt(text) for text in SAMPLES] == [from_directory(source).encode_prompt(text) for text in SAMPLES]


def test_only_gpt2s_own_kind_is_encoded_by_tiktoken(tmp_path: Path) -> None:
    """By what the library built, never by a file's name: vocab.json beside a normaliser, digits apart, a space in front."""
    others = ("BERT", "Unigram", "byte-level, a space before every text")
    for kind in ("byte-level", "template", *others, "lowercase beside vocab.json"):
        tokenizer = from_directory(made(kind, tmp_path / kind))
        assert isinstance(tokenizer, LibraryTokenizer)
        assert (tokenizer.core is None) == (kind in (*others, "lowercase beside vocab.json")), kind


@pytest.mark.parametrize("kind", ["characters", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("BERT", "Unigram"))])
def test_a_checkpoint_works_throughout(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """verify, generate, compare with bits per byte of the text itself, and explore, with tokenizers that are not byte-level."""
    source = model_of(kind, tmp_path / "a")
    text = tmp_path / "text.txt"
    text.write_text("The model of the text is the export.\nÜbung  naïve café. " * 6)
    assert gpt2.verify(str(source), quick=True).ok
    assert main(["generate", str(source), "--prompt", "the model", "--max-new-tokens", "3", "--json", str(tmp_path / "o")]) == 0
    said = json.loads((tmp_path / "o").read_text())
    assert said["prompt_ids"] == from_directory(source).encode_prompt("the model")
    found = gpt2.compare(str(source), str(source), on=str(text), tokens=0)
    assert found.distributions.a.score.bytes == pytest.approx(len(text.read_bytes()), abs=12)  # all but the first token's
    with explorer(str(source)) as opened:
        assert len(opened.look("the model").lenses[0].tokens) > 1


def tokens_of(folder: Path) -> Findings:
    """What the first check of verify finds, which needs no model."""
    checkpoint, findings = open_path(folder), Findings(torch.float32)
    probe = Probe.draw(checkpoint.config, 0)
    checks.tokens(Subject(checkpoint, folder, open_path, torch.float32, probe, findings))
    return findings


def tokens_hold(folder: Path) -> bool:
    return all(point.ok for point in tokens_of(folder).points["tokens"])


def test_another_tokenizer_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: verify's texts must show a lost added token, a lost flag, a lost normaliser and a lost template."""
    from tokenizers import AddedToken

    def without_token(tokenizer: LibraryTokenizer) -> None:
        tokenizer.encode = lambda text, special=False: byte.encode(text, special=special)  # type: ignore[method-assign]

    def without_template(tokenizer: LibraryTokenizer) -> None:
        tokenizer.encode_prompt = tokenizer.encode  # type: ignore[method-assign]

    def without_normalizer(tokenizer: LibraryTokenizer) -> None:
        tokenizer.backend.normalizer = None

    def without_flags(tokenizer: LibraryTokenizer) -> None:
        tokenizer.backend.add_tokens([AddedToken(token) for token in tokenizer.matched])

    byte = from_directory(made("byte-level", tmp_path / "byte"))
    broken = {
        "stale vocab.json": without_token,
        "template": without_template,
        "lowercase beside vocab.json": without_normalizer,
        "flags of added tokens": without_flags,
    }
    for kind, damage in broken.items():
        source = model_of(kind, tmp_path / kind)
        assert tokens_hold(source)
        with monkeypatch.context() as patch:
            opened = auto.open_folder

            def damaged(folder: Path, damage=damage, opened=opened):
                tokenizer = opened(folder)
                damage(tokenizer)
                return tokenizer

            patch.setattr(auto, "open_folder", damaged)
            assert not tokens_hold(source), kind
    findings = tokens_of(model_of("BERT", tmp_path / "BERT"))
    assert (findings.skipped["tokens"], findings.points["tokens"]) == ("run by transformers", [])


# generation_config.json, config.json, the tokenizer's own -> the ids that end a text
ENDINGS = {
    "one": ({"eos_token_id": 5}, {"eos_token_id": 6}, (5,)),
    "a list": ({"eos_token_id": [5, 7]}, {"eos_token_id": 6}, (5, 7)),
    "none": ({"eos_token_id": None}, {"eos_token_id": 6}, ()),
    "of the config": ({}, {"eos_token_id": [6, 8]}, (6, 8)),
    "of the config alone": (None, {"eos_token_id": 6}, (6,)),
    "of the tokenizer": (None, {}, (320,)),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_a_text_ends_where_its_files_say(case: str, tmp_path: Path) -> None:
    """`<|endoftext|>` was looked up by name: a text ran through </s>, and a list was refused."""
    generation, config, ends = ENDINGS[case]
    source = model_of("byte-level", tmp_path / "a")
    content = json.loads((source / "config.json").read_text())
    del content["eos_token_id"]
    (source / "config.json").write_text(json.dumps(content | config))
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    tokenizer = gpt2.load_tokenizer(str(source))
    assert tokenizer.ends == ends
    export(str(source), tmp_path / "out")
    assert gpt2.load_tokenizer(str(tmp_path / "out")).ends == ends
    model = gpt2.load(str(source))
    stop = StopText(tokenizer)
    ids = gpt2.generate(model, [1], 40, temperature=3, seed=0, stop=stop)
    assert not {*ids[1:-1]} & {*ends}


def test_rows_and_tokens_that_do_not_meet(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Padded rows ended generation in an error; a [PAD] that was added and not resized made every command refuse."""
    padded = model_of("byte-level", tmp_path / "padded")
    tokenizer = gpt2.load_tokenizer(str(padded))
    model = gpt2.GPT2(GPT2Config(tokenizer.n_vocab + 200, 64, 16, 1, 2, bos_token_id=0, eos_token_id=0))
    gpt2.save(model, tokenizer, padded)
    out = str(tmp_path / "o")
    assert main(["generate", str(padded), "--prompt", "the", "--max-new-tokens", "60", "--seed", "1", "--json", out]) == 0
    assert max(json.loads(Path(out).read_text())["ids"]) < tokenizer.n_vocab

    short = tmp_path / "short"
    short.mkdir()
    resaved(short, [], {"pad_token": "[PAD]"})
    size = from_directory(short).n_vocab - 1
    gpt2.save(gpt2.GPT2(GPT2Config(size, 64, 16, 1, 2, bos_token_id=0, eos_token_id=0)), None, short)
    capsys.readouterr()
    assert main(["generate", str(short), "--prompt", "the", "--max-new-tokens", "4"]) == 0
    assert f"'[PAD]' ({size})" in capsys.readouterr().err
    assert main(["generate", str(short), "--prompt", "[PAD]the", "--special"]) == 2
    assert "the token '[PAD]'" in capsys.readouterr().err
    assert gpt2.verify(str(short), quick=True).ok
    assert "'[PAD]'" in export(str(short), tmp_path / "kept").notes[0]


def test_the_text_of_a_special_token(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """DialoGPT is asked with <|endoftext|>: it was 13 characters, and nothing said so."""
    source, out = str(model_of("byte-level", tmp_path / "a")), str(tmp_path / "o")
    line = ("generate", source, "--prompt", f"the model{END}", "--max-new-tokens", "1", "--json", out)
    assert main([*line]) == 0
    assert f"note: {END} in the prompt is read as ordinary characters; --special" in capsys.readouterr().err
    assert 320 not in json.loads(Path(out).read_text())["prompt_ids"]
    assert main([*line, "--special"]) == 0
    assert json.loads(Path(out).read_text())["prompt_ids"][-1] == 320


def test_special_tokens_are_not_printed_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A model with an unused [PAD] wrote it into the text; pipelines of transformers leave it out. The ids keep it."""
    source, out = model_of("pad added", tmp_path / "a"), str(tmp_path / "o")
    tokenizer, model = gpt2.load_tokenizer(str(source)), gpt2.load(str(source))
    (pad,) = (i for token, i in tokenizer.special_tokens.items() if token == "[PAD]")
    model.wte.weight.data[:] = 0
    model.ln_f.bias.data[0] = model.wte.weight.data[pad, 0] = 9  # always the likeliest
    gpt2.save(model, tokenizer, source)
    line = ("generate", str(source), "--prompt", "the", "--max-new-tokens", "2", "--temperature", "0", "--json", out)
    for more, text in ((), ""), (("--special",), "[PAD][PAD]"):
        assert main([*line, *more]) == 0
        said = json.loads(Path(out).read_text())
        assert (capsys.readouterr().out, said["text"], said["ids"]) == (f"the{text}\n", text, [pad, pad])


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32 + "\nsize 1042301\n"
TOKENIZER_FILES = ("vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")


@pytest.mark.parametrize("name", [*TOKENIZER_FILES, "model.safetensors", "config.json"])
def test_what_stands_in_a_files_place_is_named(name: str, tmp_path: Path) -> None:
    """A clone without git-lfs, and a copied cache whose links lead nowhere: "no config.json there; it holds config.json"."""
    folder, open_it = tmp_path, from_directory
    if name not in TOKENIZER_FILES:
        folder, open_it = model_of("byte-level", tmp_path), lambda folder: gpt2.load(str(folder))
    elif name in ("vocab.json", "merges.txt"):
        made("byte-level", tmp_path)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(POINTER)
    with pytest.raises(InputError, match=rf"{name}.* a git-lfs pointer"):
        open_it(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("../blobs/gone")
    with pytest.raises(InputError, match=rf"{name}.* a link to \.\./blobs/gone, which is not there"):
        open_it(folder)


def test_a_class_that_transformers_lacks(tmp_path: Path) -> None:
    """AutoTokenizer runs tokenizer.json as it is then, and so do we; without that file there is nothing to run."""
    folder = made("characters", tmp_path / "a")
    before, config = from_directory(folder), folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("PreTrainedTokenizerFast", "SomethingTokenizer"))
    assert [from_directory(folder).encode(text) for text in SAMPLES] == [before.encode(text) for text in SAMPLES]
    made("byte-level", tmp_path / "b")
    (tmp_path / "b" / "tokenizer_config.json").write_text('{"tokenizer_class": "ElsewhereTokenizer"}')
    assert "transformers cannot read its tokenizer" in refusal(from_directory, tmp_path / "b")


def test_sentencepiece_is_asked_for_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError's traceback does not say which extra to install."""
    (tmp_path / "spiece.model").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(InputError, match=r"spiece.model: reading it takes sentencepiece .*gpt2-toolkit\[sentencepiece\]"):
        from_directory(tmp_path)


def test_a_damaged_piece_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    pieces(tmp_path, "GPTSw3Tokenizer", SW3)
    for length, said in ((99, "transformers cannot read its tokenizer"), (0, "spiece.model is empty; it is damaged")):
        (tmp_path / "spiece.model").write_bytes((tmp_path / "spiece.model").read_bytes()[:length])
        for name in ("GPTSw3Tokenizer", "T5Tokenizer"):
            (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
            assert said in refusal(from_directory, tmp_path)
