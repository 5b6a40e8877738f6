"""The chat format: kept with a model, read by transformers as by us, and used by ``gpt2 generate --chat``."""

import io
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jinja2 import TemplateError
from support.commands import ASSET, as_json, mistake, printed, refusal

import gpt2
from gpt2.checkpoint.export import export
from gpt2.checkpoint.saving import save
from gpt2.data import from_directory
from gpt2.data.adapter import auto_tokenizer
from gpt2.data.chat import ChatFormat

FORMAT = ChatFormat("Question:\n", '\n\nAnswer "é\\":\n')
TURNS = [("Who is there?", "BERNARDO"), ("And who\nthen?", "FRANCISCO"), ("Is it cold?", "Tis bitter cold")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a chat format."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = gpt2.load_tokenizer()
    tokenizer.chat = FORMAT
    return save(gpt2.load(), tokenizer, folder)


def test_the_format_of_a_template() -> None:
    """A prompt of two fields is no chat, and doubled braces are text."""
    assert ChatFormat.of_template("Q: {question}\nA:") == ChatFormat("Q: ", "\nA:")
    assert ChatFormat.of_template("{{{q}}} ->") == ChatFormat("{", "} ->")
    assert ChatFormat.of_template("article") == ChatFormat("", "")
    assert ChatFormat.of_template("") is ChatFormat.of_template("{a} {b}") is ChatFormat.of_template("{{}}") is None


def test_it_is_kept_by_saving_and_exporting(model: Path, tmp_path: Path) -> None:
    """Lost once, a model's format cannot be found again; left behind, another model would answer in it."""
    assert from_directory(model).chat == FORMAT
    done = export(str(model), tmp_path / "hf")
    assert "chat.json" in [file.name for file in done.files]
    assert from_directory(tmp_path / "hf").chat == from_directory(model).with_tokens(["<|x|>"]).chat == FORMAT
    export(str(model), tmp_path / "gguf", format="gguf")
    assert FORMAT.jinja().encode() in (tmp_path / "gguf" / "model.gguf").read_bytes()
    assert any("chat format" in note for note in export(str(model), tmp_path / "llmc", format="llmc").notes)
    assert "chat.json of another tokenizer" in refusal(export, "shakespeare-mini", tmp_path / "hf")
    save(gpt2.load(), gpt2.load_tokenizer(), tmp_path / "hf")
    assert from_directory(tmp_path / "hf").chat is None


def test_transformers_writes_the_same_conversation(model: Path) -> None:
    """The template for other programs must give the ids that we read, escapes and line ends included."""
    tokenizer = from_directory(model)
    messages = [{"role": "user", "content": TURNS[0][0]}]
    for (_, answer), (question, _) in pairwise(TURNS):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    theirs = auto_tokenizer(model).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    turns = [(question, tokenizer.encode(answer)) for question, answer in TURNS[:-1]]
    assert FORMAT.conversation(tokenizer, turns, TURNS[-1][0], 256) == theirs
    assert FORMAT.conversation(tokenizer, turns, TURNS[0][0], 256) != theirs
    system = [{"role": "system", "content": "Be kind."}, *messages]  # was written as an answer
    with pytest.raises(TemplateError, match="knows no system"):
        auto_tokenizer(model).apply_chat_template(system, return_dict=False)


def test_turns_that_do_not_fit_are_left_out_whole() -> None:
    """Half a turn would begin in the middle of a question; the last question must always be whole."""
    tokenizer = gpt2.load_tokenizer()
    turns = [(question, tokenizer.encode(answer)) for question, answer in TURNS]
    whole = FORMAT.conversation(tokenizer, turns, "So?", 1000)
    assert whole.count(tokenizer.eot) == 3
    last = FORMAT.question(tokenizer, "So?")
    fewer = FORMAT.conversation(tokenizer, turns, "So?", len(whole) - 1)
    assert fewer == whole[len(whole) - len(fewer) :]
    assert fewer.count(tokenizer.eot) == 2
    assert FORMAT.conversation(tokenizer, turns, "So?", 1) == last
    hostile = FORMAT.conversation(tokenizer, [], "<|endoftext|>", 1000)
    assert tokenizer.eot not in hostile


def test_chat_keeps_the_turns_and_answers_in_the_format(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Possible bugs: a turn without its answer, an answer without its end, the question echoed into the answers."""
    argv = ["generate", str(model), "--chat", "--temperature", "0", "--max-new-tokens", "9"]
    turns = as_json(capsys, *argv, "--prompt", TURNS[0][0], "--prompt", TURNS[1][0])["turns"]
    tokenizer, brain = from_directory(model), gpt2.load(str(model))
    ids = tokenizer.encode('Question:\nWho is there?\n\nAnswer "é\\":\n')
    assert turns[0]["prompt_ids"] == ids
    assert ids + turns[0]["ids"] == gpt2.generate(brain, ids, 9, temperature=0, stop=tokenizer.eot)
    ids += [*turns[0]["ids"], tokenizer.eot, *tokenizer.encode('Question:\nAnd who\nthen?\n\nAnswer "é\\":\n')]
    assert turns[1]["prompt_ids"] == ids
    texts = [turn["text"] for turn in turns]
    assert all(texts)

    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"Who is there?\n\nSo?\n"), isatty=lambda: False))
    answers = printed(capsys, *argv)
    assert answers.startswith(texts[0] + "\n")
    assert "Who is there?" not in answers


def test_an_answer_ends_with_the_end_of_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it a model that has answered goes on to ask itself the next question. Control: the same model, no end."""
    tokenizer, brain = gpt2.load_tokenizer(), gpt2.load(dtype="float32")
    tokenizer.chat = FORMAT
    for end, shown in ((tokenizer.eot, "\n"), (tokenizer.encode("O")[0], "OOOO\n")):
        rows = brain.wte.weight.detach().clone()
        rows[end] *= 100  # always the likeliest
        brain.wte.weight.data, brain.ln_f.weight.data, brain.ln_f.bias.data = rows, torch.zeros(160), rows[end].clone()
        save(brain, tokenizer, tmp_path)
        assert printed(capsys, "generate", str(tmp_path), "--chat", "--prompt", "Who?", "--max-new-tokens", "4") == shown


def test_what_chat_refuses(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that was not trained on a format would answer nonsense in it."""
    assert "knows no chat format" in mistake(capsys, "generate", "--chat", "--prompt", "Who?")
    assert "--samples" in mistake(capsys, "generate", str(model), "--chat", "--samples", "2")
    assert "given twice" in mistake(capsys, "generate", "--prompt", "a", "--prompt", "b")
    shutil.copytree(ASSET, tmp_path / "damaged")
    (tmp_path / "damaged" / "chat.json").write_text('{"before": 1}')
    assert "chat.json holds no" in mistake(capsys, "generate", str(tmp_path / "damaged"), "--chat")
