"""Classification: the head on the last token learns, resumes, is transformers' own model, and its card says what was measured."""

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from support.commands import refusal
from support.training import outcome, stop_at

import gpt2
from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.publish import plan
from gpt2.checkpoint.saving import CARD
from gpt2.cli.main import main
from gpt2.data import from_directory
from gpt2.train.card import write_card
from gpt2.train.corpus import corpus
from gpt2.train.listing import list_data
from gpt2.train.loop import Evaluated, train
from gpt2.train.recipe import Data, Recipe

CLASSES = ["art", "king"]


@pytest.fixture(scope="module")
def labelled(recipe: Recipe, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe for texts of one of two words, at any place, some of them cut off by the context; the class says which."""
    rng, file = random.Random(3), tmp_path_factory.mktemp("labelled") / "texts.jsonl"
    pairs = [(rng.choices(["no", "so", "night"], k=4), CLASSES[n % 2]) for n in range(160)]
    rows = [{"text": " ".join([*words[: n % 3], word, *words[n % 3 :]]), "label": word} for n, (words, word) in enumerate(pairs)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(path=str(file), label="label", padded=True, held_out=0.3)
    return replace(recipe, data=data, steps=30, eval_every=10, save_every=15, patience=0)


@pytest.fixture(scope="module")
def run(labelled: Recipe, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its card; read only."""
    folder = tmp_path_factory.mktemp("classified") / "run"
    train(labelled, folder, init=str(whole / "best"))
    write_card(folder)
    return folder


def test_it_learns_and_is_transformers_own_model(run: Path, labelled: Recipe) -> None:
    """The class of another token than the last, or a head written under another name, is another model."""
    from transformers import GPT2ForSequenceClassification

    theirs = GPT2ForSequenceClassification.from_pretrained(run / "best", dtype=torch.float64).eval()
    ours, tokenizer = gpt2.load(str(run / "best"), dtype="float64"), from_directory(run / "best")
    head = open_path(run / "best").extra["score.weight"].double()
    text = corpus(labelled, tokenizer)
    assert list(theirs.config.id2label.values()) == CLASSES == list(text.classes)
    shown = [part.text for window in list_data(labelled, str(run / "best")).windows for part in window if part.scored]
    assert {*shown} <= {*CLASSES}  # and not the token with the number of the class
    confusion = [[0, 0], [0, 0]]
    for row, marks in zip(text.val_ids[:-1].reshape(-1, 16), text.val_marks[:-1].reshape(-1, 16), strict=True):
        at = int((marks == 2).argmax())
        ids = torch.tensor(row[None, :at], dtype=torch.long)
        with torch.inference_mode():
            mine, logits = ours.hidden(ids)[0, -1] @ head.T, theirs(ids).logits[0]
        torch.testing.assert_close(mine, logits, rtol=1e-10, atol=1e-12)
        confusion[row[at]][int(logits.argmax())] += 1
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = min((row for row in rows if "val_loss" in row), key=lambda row: row["val_loss"])
    assert best["confusion"] == confusion
    assert sum(confusion[i][i] for i in (0, 1)) > 0.8 * sum(map(sum, confusion))


def test_its_card_claims_what_was_measured(run: Path, tmp_path: Path) -> None:
    """It had the perplexity of a language model. An export, which has no head, claims nothing."""
    text = (run / "best" / CARD).read_text()
    data = ModelCard(text).data
    assert data.pipeline_tag == "text-classification"
    assert [result.metric_type for result in data.eval_results] == ["accuracy", "loss"]
    assert re.search(r"- art: \d+ of \d+ right\n- king: ", text)
    assert float(re.search(r"\| accuracy \| ([01]\.\d{4}) \|", text)[1]) == data.eval_results[0].metric_value
    cases = gpt2.compare(*[str(run / "best")] * 2, on=str(run), tokens=2, cases=str(run)).cases  # texts cut as in the run
    losses = [-math.log(case.probability_a) for case in cases.cases]
    assert sum(losses) / len(losses) == pytest.approx(data.eval_results[1].metric_value, abs=1e-4)
    assert "perplexity" not in text
    assert 'pipeline("text-classification", "OWNER/NAME")' in text
    assert "of 160 documents, never trained on" in text
    plan(run / "best", "me/classes")
    assert main(["export", str(run / "best"), str(tmp_path / "out")]) == 0
    assert "accuracy" not in (tmp_path / "out" / CARD).read_text()
    assert main(["verify", str(run / "best"), "--quick"]) == 0


def test_it_resumes_to_the_bit_and_another_run_begins_with_its_head(
    run: Path, labelled: Recipe, whole: Path, tmp_path: Path
) -> None:
    """A head that is drawn again forgets the classes."""
    train(labelled, tmp_path / "run", init=str(whole / "best"), report=stop_at(12))
    train(labelled, tmp_path / "run", init=str(whole / "best"))
    assert outcome(tmp_path / "run") == outcome(run)
    events: list[object] = []
    other = replace(labelled, steps=1, optim=replace(labelled.optim, lr=2e-3))
    train(other, tmp_path / "other", init=str(run / "step-30"), report=events.append)
    first = next(event for event in events if isinstance(event, Evaluated))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert first.val.loss == pytest.approx(rows[-1]["val_loss"], abs=1e-6)
    assert first.confusion == rows[-1]["confusion"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"label": "text"}, "different values of data.label"),
        ({"label": "none"}, "no field 'none'"),
        ({"padded": False}, "data.label is learnt with data.padded"),
        ({"reset": True}, "without data.reset"),
    ],
)
def test_what_holds_no_classes_is_refused(labelled: Recipe, whole: Path, changes: dict, says: str) -> None:
    """A field of texts makes a class of each; the others would train something else in silence."""
    tokenizer = from_directory(whole / "best")
    assert says in refusal(lambda: corpus(replace(labelled, data=replace(labelled.data, **changes)), tokenizer))
