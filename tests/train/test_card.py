"""The card of a run and of an export: every figure is the run's, the command is the run's, a person's text is kept."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from support.commands import refusal
from support.ranks import toml

import gpt2
from gpt2.checkpoint.card import Base, render
from gpt2.checkpoint.publish import plan
from gpt2.checkpoint.saving import CARD, unlike_manifest
from gpt2.cli.main import main
from gpt2.data import from_directory
from gpt2.data.chat import ChatFormat
from gpt2.train import state
from gpt2.train.card import record_of, settings, write_card
from gpt2.train.corpus import corpus
from gpt2.train.loop import train
from gpt2.train.recipe import read
from gpt2.train.state import Progress


@pytest.fixture(scope="module")
def with_card(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of twelve steps, with its card; read only."""
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("card") / "run"))
    assert write_card(folder) == ""
    return folder


@pytest.fixture
def run(with_card: Path, tmp_path: Path) -> Path:
    """The same; a test may change it."""
    return Path(shutil.copytree(with_card, tmp_path / "run"))


def test_the_figures_of_the_card_are_the_run_s(with_card: Path, run: Path) -> None:
    """A figure that the run did not measure, or of another step, would be believed."""
    text = (run / "best" / CARD).read_text()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = min((row for row in rows if "val_loss" in row), key=lambda row: row["val_loss"])
    assert f"| loss | {best['val_loss']:.4f} |" in text
    assert f"| bits per byte | {best['val_bits_per_byte']:.4f} |" in text
    assert f"measured on {best['val_tokens']:,} tokens: windows of 16 tokens without overlap" in text
    assert best["sample"] in text
    assert "the base model" not in text  # from scratch
    assert (run / "best" / "curves.png").stat().st_size > 10_000
    assert 'data.path = "text.txt"' in text
    assert str(with_card.parent) not in text  # the folders above a text are private


def test_names_and_samples_are_shown_and_not_obeyed(run: Path, tmp_path: Path) -> None:
    """A line break in a folder's name, or a fence in a sample, began a part of the card."""
    folder = run.rename(tmp_path / "run\n# Free\udcff $\\frac$")
    record = record_of(folder)
    sample = "````\n# Free\n"
    text = render(replace(record, training=replace(record.training, command="x '\n```\n# Free'", sample=sample)))
    assert ModelCard(text).data.pipeline_tag == "text-generation"
    outside = re.sub(r"(?s)\n(```+)\w+\n.*?\n\1(?=\n)", "", text.split("\n---\n", 1)[1])
    assert "\n# Free" not in outside
    assert outside.strip().startswith("# run␊# Free\\udcff $\\frac$\n")
    (folder / "best" / CARD).write_text(text)
    assert plan(folder / "best", "me/x").content[CARD].count(b"me/x") == text.count("OWNER/NAME")  # not taken for edited


def test_what_is_no_run_is_named_as_none(run: Path) -> None:
    """A recipe that is no object was a traceback."""
    for held in ("[]", "{}", "3"):
        (run / "recipe.json").write_text(held)
        assert "not the folder of a run" in refusal(record_of, run)


@pytest.mark.parametrize("init", [None, "gpt2"])
def test_the_settings_of_the_card_train_the_same_recipe(init: str | None, tmp_path: Path) -> None:
    """A card that leaves out one setting, or writes it as no TOML, trains another model."""
    changes = ["optim.lr=2e-5", "dropout=0.0", 'data.path=mein "Öl" 😀.txt', "model.n_layer=2", "tensorboard=true", "seed=7"]
    changes += ["lora.r=4", "lora.targets=c_attn,c_fc"] if init else ['data.add_tokens=["a,b"]', "needs_init=false"]
    recipe = replace(read("finetune-shakespeare", changes).resolved(init), description="", expect=0.0, takes="")
    file = tmp_path / "finetune-shakespeare.toml"
    file.write_text(settings(recipe))
    assert read(str(file)).resolved(init) == recipe
    file.write_text(settings(replace(recipe, seed=8)))
    assert read(str(file)).resolved(init) != recipe


def test_what_a_person_wrote_is_left(run: Path) -> None:
    """A resumed run wrote over the user's own text. It is sent as it is, and both are said."""
    path = run / "best" / CARD
    mine = path.read_text().replace("## Limits", "My own words.\n\n## Limits")
    path.write_text(mine)
    assert "left as it is" in write_card(run)
    planned = plan(run / "best", "me/macbeth")
    assert (planned.content[CARD], path.read_text()) == (path, mine)
    assert any("is sent as it is" in note for note in planned.notes)
    path.write_text("Mine alone.\n")
    model = gpt2.load(str(run / "best"))
    state.save_best(run, model, gpt2.load_tokenizer(str(run / "best")), Progress(step=9))  # as a resumed run does
    assert path.read_text() == "Mine alone.\n"
    path.write_text("Mine, again.\n")
    assert unlike_manifest(run / "best") == ""
    path.unlink()
    assert write_card(run) == ""
    state.save_best(run, model, gpt2.load_tokenizer(str(run / "best")), Progress(step=9))
    assert not path.exists()  # a card with the figures of other weights


def test_an_export_s_card_claims_no_figures(run: Path, tmp_path: Path, capsys) -> None:
    """Nobody has measured what was exported, so the Hub's metadata must not say that somebody did."""
    for source, name in ((run / "best", "out"), (f"{run / 'best'}:bf16", "bf16"), ("shakespeare-mini", "mini")):
        assert main(["export", str(source), str(tmp_path / name)]) == 0
        text = (tmp_path / name / CARD).read_text()
        assert "model-index" not in text
        assert "`best`, converted" in text or name == "mini"
        assert ("license: mit" in text) == (name == "mini")
        plan(tmp_path / name, "me/x")
    (tmp_path / "out" / CARD).write_text("Mine.\n")
    capsys.readouterr()
    assert main(["export", str(run / "best"), str(tmp_path / "out")]) == 0
    assert "left as it is" in capsys.readouterr().out
    assert (tmp_path / "out" / CARD).read_text() == "Mine.\n"
    assert main(["export", "shakespeare-mini", str(tmp_path / "gguf"), "--format", "gguf"]) == 0
    assert "library_name: gguf" in (tmp_path / "gguf" / CARD).read_text()


def test_a_fine_tune_names_its_base_and_shows_both(whole: Path, recipe, tmp_path: Path) -> None:
    """The base's licence and id come from what is known, and its loss is the one before the first step."""
    train(replace(recipe, steps=3, name="finetune-shakespeare"), tmp_path / "tuned", init=str(whole / "best"))
    write_card(tmp_path / "tuned")
    text = (tmp_path / "tuned" / "best" / CARD).read_text()
    first = json.loads((tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()[0])
    assert re.search(rf"\| loss \| [\d.]+ \| {first['val_loss']:.4f} \|", text)
    assert "fine-tuned from `best`" in text
    assert Base.of("gpt2") == Base("gpt2", "openai-community/gpt2", license="mit")
    assert Base.of("distilgpt2").license == "apache-2.0"
    assert Base.of("org/name@v1") == Base("org/name@v1", "org/name", "v1")


def test_a_run_that_never_improved_says_so(init: Path, recipe, tmp_path: Path, capsys) -> None:
    """best/ held the base model's weights, and its card called them fine-tuned. Control: the same run, improving."""
    file, said = toml(recipe, tmp_path / "tiny.toml"), []
    for name, rate in (("worse", "optim.lr=0"), ("better", "optim.lr=0.001")):
        words = ["train", str(file), "--init", str(init), "--out", str(tmp_path / name), "--set", "optim.min_lr=0"]
        assert main([*words, "--set", rate, "--set", "steps=3"]) == 0
        best = tmp_path / name / "best"
        (out, err), text = capsys.readouterr(), (best / CARD).read_text()
        assert " validation tokens\n3 steps of " in err  # they were one line of up to 97 columns
        said.append(("initial weights, unchanged" in out.splitlines()[-1], "initial weights, unchanged" in text))
    assert said == [(True, True), (False, False)]


def test_the_card_of_a_chat_model_shows_how_to_ask(init: Path, recipe, tmp_path: Path, capsys) -> None:
    """It showed how to continue "The "; and it gave the share that was asked for, not the one that was held out."""
    pairs = [{"q": f"Who is {'abcdefgh'[n % 8]}?", "a": "Romeo"} for n in range(36)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    of_pairs = {"prompt": "Q: {q}\nA:", "field": "a", "held_out": 0.4, "tokenizer": "bpe", "vocab_size": 262}
    data = replace(recipe.data, path=str(tmp_path / "pairs.jsonl"), **of_pairs)
    train(replace(recipe, data=data), tmp_path / "chat")
    write_card(tmp_path / "chat")
    for name in ("best", "step-12"):  # the format is stored with every checkpoint
        assert from_directory(tmp_path / "chat" / name).chat == ChatFormat("Q: ", "\nA:")
    text = (tmp_path / "chat" / "best" / CARD).read_text()
    documents = corpus(replace(recipe, data=data))
    share = len(documents.val_ids) / (len(documents.val_ids) + len(documents.train_ids))
    held = documents.tally["held_out"]
    assert f"Held out: {held} of 36 documents, {share:.1%} of the tokens, never trained on" in text
    assert "gpt2 generate OWNER/NAME --chat" in text
    assert "```text\nQ: {question}\nA:\n```" in text
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].replace("OWNER/NAME", str(tmp_path / "chat" / "best"))
    code = code.replace("Who is there?", "Who is a?")
    exec(code, {})
    capsys.readouterr()
    for words, said in (([], True), (["--chat"], False)):
        assert main(["generate", str(tmp_path / "chat" / "best"), "--prompt", "Who is a?", "--max-new-tokens", "2", *words]) == 0
        assert ("--chat asks it in their format" in capsys.readouterr().err) == said
