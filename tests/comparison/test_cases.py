"""`compare --cases`: which of the user's own questions turned from right to wrong, and back."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from support.commands import mistake, refusal

import gpt2
from gpt2.cli.main import main
from gpt2.comparison.cases import ROOM, read_cases
from gpt2.comparison.run import compare
from gpt2.comparison.settings import CaseTable
from gpt2.data.library import LibraryTokenizer
from gpt2.testing import assert_same

PROMPTS = ("To be, or not to", "I pray", "O, my good", "DUKE ORSINO:\n", "The", "What is", "My lord, I", "Good")
BEGINNING = "The"  # of what the first model says after this prompt, the beginning alone is expected


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The embedded model, whose texts end with a line, and one far enough from it to say other things."""
    model, tokenizer, generator = gpt2.load("shakespeare-mini"), gpt2.load_tokenizer("shakespeare-mini"), torch.Generator()
    names = []
    for name, scale in (("plain", 0.0), ("tuned", 0.4)):
        generator.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * scale)
        folder = gpt2.save(model, tokenizer, tmp_path_factory.mktemp(name))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.encode("\n")}))
        names.append(str(folder))
    return names[0], names[1]


@cache
def opened(side: str) -> tuple[gpt2.GPT2, LibraryTokenizer]:
    return gpt2.load(side, dtype="float64"), gpt2.load_tokenizer(side)


@torch.inference_mode()
def next_logits(side: str, ids: list[int], begin: int) -> torch.Tensor:
    """What a model says before each id from ``begin`` on, in float64, without a cache."""
    model, _ = opened(side)
    return model.head(model.hidden(torch.tensor([ids]))[0, begin - 1 : -1])


@cache
def spoken(side: str, prompt: str) -> list[int]:
    """The ids that greedy decoding gives up to the end of a line: each is what one pass over all of them finds the likeliest."""
    tokenizer = opened(side)[1]
    begin, (end,) = tokenizer.encode(prompt), tokenizer.encode("\n")
    ids = gpt2.generate(gpt2.load(side), begin, 92, temperature=0, stop=end)
    assert next_logits(side, ids, len(begin)).argmax(-1).tolist() == ids[len(begin) :]
    return ids[len(begin) :]


def said(side: str, prompt: str, room: int) -> str:
    """The text of so many ids at most; "..." behind it where it goes on."""
    new, tokenizer = spoken(side, prompt), opened(side)[1]
    text = tokenizer.decode(new[:room]).strip()
    return text if tokenizer.decode(new[:room][-1:]) == "\n" else f"{text} ..."


@pytest.fixture(scope="module")
def file(sides: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cases of which each model has some right: what it says itself, whole; one is only its beginning."""
    lines = []
    for number, prompt in enumerate(PROMPTS):
        expected = said(sides[number % 2], prompt, 30).removesuffix(" ...")
        lines.append({"prompt": prompt, "expected": expected[:3] if prompt == BEGINNING else expected, "number": number})
    path = tmp_path_factory.mktemp("cases") / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + json.dumps({"prompt": "I pray", "expected": "you"}))
    return path


def probability(side: str, prompt: str, expected: str) -> float:
    """The probability of an expected text."""
    tokenizer = opened(side)[1]
    words = (prompt[-1].isalnum() or prompt[-1] in ",:") and expected[0].isalnum()
    ids, new = tokenizer.encode(prompt), tokenizer.encode(f" {expected}" if words else expected)
    return float(next_logits(side, ids + new, len(ids)).softmax(-1)[range(len(new)), new].prod())


def test_each_case_is_what_greedy_decoding_says(sides: tuple[str, str], file: Path, text: str) -> None:
    """A prefix was counted as exact: expected "book", answered "books" was right, and no answer was shown."""
    found = compare(*sides, on=text, tokens=40, cases=file).cases  # a Path was an AttributeError
    tokenizer = gpt2.load_tokenizer(sides[0])
    expected = []
    for case in found.cases:
        words = (case.prompt[-1].isalnum() or case.prompt[-1] in ",:") and case.expected[0].isalnum()
        room = ROOM + 2 * len(tokenizer.encode(" " * words + case.expected))
        answers = [said(side, case.prompt, room) for side in sides]
        assert [case.answer_a, case.answer_b] == answers
        right = [answer == case.expected.strip() for answer in answers]
        chances = [probability(side, case.prompt, case.expected) for side in sides]
        expected.append(list(zip(right, chances, strict=True)))
        assert [case.right_a, case.right_b] == right
        assert (case.probability_a, case.probability_b) == pytest.approx(chances, rel=1e-4)
    (begun,) = (case for case in found.cases if case.prompt == BEGINNING)
    assert begun.answer_a.startswith(begun.expected)
    assert not begun.right_a
    assert found.contains_a.value > found.right_a.value
    assert found.by_kind["gained"]
    lost = [case.prompt for case, (a, b) in zip(found.cases, expected, strict=True) if a[0] and not b[0]]
    assert [case.prompt for case in found.by_kind["lost"]] == lost != []
    assert found.right_b.value == sum(b[0] for _, b in expected) / len(expected)
    logs = torch.tensor([[a[1], b[1]] for a, b in expected], dtype=torch.float64).log()
    assert found.likelier.value == pytest.approx(float((logs[:, 1] - logs[:, 0]).mean().exp()), rel=1e-4)
    assert found.likelier.low < found.likelier.value < found.likelier.high  # few cases: one block would have no width
    assert found.gain.low < found.gain.high


@pytest.mark.slow
def test_the_command_lists_what_turned_and_gates_on_it(sides, file: Path, text: str, tmp_path: Path, capsys) -> None:
    page = tmp_path / "page.html"
    command = ["compare", *sides, "--on", text, "--tokens", "40", "--cases", str(file), "--html", str(page)]
    gates = "exact_match>2", "answer_ratio<0", "lost_cases>=0"
    assert main([*command, *(word for gate in gates for word in ("--fail-if", gate))]) == 1
    out, err = capsys.readouterr()
    assert "cases right" in out
    assert [line.partition(":")[0] for line in err.splitlines()[-3:]] == ["passed", "passed", "failed"]
    assert main([*command[:-4], "--fail-if", "lost_cases>0"]) == 2  # without --cases
    assert "those that turned" in page.read_text()
    assert main([*command[:2], sides[0], *command[3:]]) == 0
    same = page.read_text()
    assert all(f"<td>{side}</td>" in same for side in (said(sides[0], "I pray", 40), "you"))  # what was answered, of each case
    assert main([*command[:3], sides[0], *command[3:]]) == 2
    assert "for two models" in capsys.readouterr().err
    with pytest.raises(AssertionError, match=r"differ: exact_match<0\.9: fraction of the --cases that b has right[^;]*$"):
        assert_same(*sides, on=text, tokens=40, cases=str(file), exact_match=0.9, lost_cases=8)


TEXTS = tuple(
    f"{a} {b}" for a in ("Good morrow,", "Farewell,", "Away,", "Speak,") for b in ("my lord.", "villain.", "old man, be brief.")
)


@pytest.fixture(scope="module")
def classifiers(sides: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Two of transformers' classifiers, and the class that transformers gives each text."""
    from transformers import AutoTokenizer, GPT2ForSequenceClassification

    tokenizer, said = AutoTokenizer.from_pretrained(sides[0]), {}
    names = {"id2label": {0: "kind", 1: "harsh"}, "label2id": {"kind": 0, "harsh": 1}, "num_labels": 2}
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = GPT2ForSequenceClassification.from_pretrained(sides[0], pad_token_id=tokenizer.eos_token_id, **names).eval()
        ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in TEXTS]
        with torch.no_grad():
            middle = torch.stack([model.transformer(each).last_hidden_state[0, -1] for each in ids]).mean(0)
            weight = torch.randn(2, model.config.n_embd)
            model.score.weight.copy_(weight - torch.outer(weight @ middle, middle) / middle.dot(middle))  # so that both occur
            folder = tmp_path_factory.mktemp("classifier")
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            said[str(folder)] = [model.config.id2label[int(model(each).logits.argmax())] for each in ids]
    return said


@pytest.mark.slow
def test_classifiers_are_compared_on_labelled_texts(classifiers: dict[str, list[str]], sides, text: str, tmp_path) -> None:
    """A classifier was compared as a language model without a word of its head, and labelled cases were refused."""
    (one, of_one), (two, of_two) = classifiers.items()
    other = {"kind": "harsh", "harsh": "kind"}
    labels = [label if number % 4 else other[label] for number, label in enumerate(of_one)]
    file = tmp_path / "labelled.jsonl"
    lines = [
        {"text": each, "label": (label, int(label == "harsh"), f"0{int(label == 'harsh')}")[number % 3]}
        for number, (each, label) in enumerate(zip(TEXTS, labels, strict=True))
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for pair in ((one, two), (f"hf/{one}", two)):
        compared = compare(*pair, on=text, tokens=40, cases=str(file))
        found = compared.cases
        assert [(case.answer_a, case.answer_b) for case in found.cases] == list(zip(of_one, of_two, strict=True))
        assert found.right_a.value == sum(map(str.__eq__, labels, of_one)) / len(labels)
        assert found.right_b.value == sum(map(str.__eq__, labels, of_two)) / len(labels)
        turned = [each for each, label, a, b in zip(TEXTS, labels, of_one, of_two, strict=True) if (a == label) != (b == label)]
        assert {case.prompt for kind in ("lost", "gained") for case in found.by_kind[kind]} == {*turned}
        assert "accuracy" in compared.table()
        assert "score.weight: no part of a language model" in " ".join(compared.table(200).split())
        assert not compared.ok  # the trunks are the same, the heads are not
    assert compare(one, one, on=text, tokens=40).ok
    plain = compare(sides[0], one, on=text, tokens=40, cases=str(file))  # a model without a head: the likelier label
    by_hand = [max(("kind", "harsh"), key=lambda name: probability(sides[0], each, name)) for each in TEXTS[:3]]
    assert [case.answer_a for case in plain.cases.cases[:3]] == by_hand
    steps = list[str]()
    for label in ("rude", "2", "9" * 5000):
        file.write_text(json.dumps({"text": "a", "label": label}))
        said = refusal(compare, one, two, on=text, tokens=40, cases=str(file), progress=lambda step: steps.append(step))
        assert f"the label '{label[:9]}" in said
        assert f"is no class of {one}: kind, harsh" in said
    assert not [step for step in steps if "distributions" in step]  # it was refused after minutes of measuring


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.jsonl", None, "none.jsonl: no such file: give a .jsonl, .csv or .parquet file with the fields prompt"),
        ("empty.jsonl", "\n", "holds no case"),
        ("labels.jsonl", '{"text": "a", "label": " "}\n', "labels.jsonl:1: a case needs prompt and expected, or"),
        ("labels.jsonl", '{"text": "a", "label": ""}\n', "its label is empty"),
        ("texts.jsonl", '{"text": "", "label": "b"}\n', "its text is empty"),
        ("", None, "--cases {path}: give a .jsonl, .csv or .parquet file"),  # a folder
        ("fields.jsonl", '{"q": "a", "a": "b"}\n', "it has q, a; --set data.prompt=NAME and --set data.field=NAME name others"),
        ("nothing.jsonl", '{"prompt": "a", "expected": null}\n', "nothing.jsonl:1: a case needs prompt and expected, or"),
        ("two.jsonl", '{"prompt": "a", "expected": "b"}\n{"question": "a", "answer": "b"}', "needs prompt and expected, as"),
        ("line.jsonl", '{"prompt": "a", "expected": "b"}\n{\n', "line.jsonl:2: not JSON"),
    ],
)
def test_a_bad_file_is_one_line(name: str, content: str | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert says.format(path=tmp_path / name) in refusal(read_cases, str(tmp_path / name))


def test_fields_of_training_numbers_and_several_right_answers(sides: tuple[str, str], tmp_path: Path, capsys) -> None:
    """A table that was trained on had to be renamed; 4 was refused where "4" was not; "four" or "4" could not both be right."""
    file, line = tmp_path / "a.jsonl", {"question": "2+2=", "answer": [4, "four"]}
    file.write_text(json.dumps(line))
    assert read_cases(str(file)) == ([("2+2=", ("4", "four"))], False)
    file.write_text(json.dumps({"q": "2+2=", "a": 4}))
    assert read_cases(CaseTable(str(file), ("q", "a"))) == ([("2+2=", ("4",))], False)
    answer = said(sides[0], PROMPTS[0], 30)
    file.write_text(json.dumps({"question": PROMPTS[0], "answer": ["nothing", answer]}))
    (case,) = compare(*sides, tokens=40, cases=file).cases.cases  # a Path was a traceback
    assert (case.right_a, case.expected) == (True, f"nothing | {answer}")
    options = "--set", "data.prompt=q", "--cases", str(file)
    assert "both or none" in mistake(capsys, "compare", "shakespeare-mini", "shakespeare-mini", *options)
