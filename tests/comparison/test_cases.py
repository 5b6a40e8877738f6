"""`compare --cases`: which of the user's own questions turned from right to wrong, and back."""

import json
from pathlib import Path

import pytest
import torch
from support.commands import refusal

import gpt2
from gpt2.cli.main import main
from gpt2.comparison.cases import read_cases
from gpt2.comparison.run import compare
from gpt2.measure.estimates import Bootstrap
from gpt2.testing import assert_same

PROMPTS = ("To be, or not to", "I pray", "O, my good", "DUKE ORSINO:\n", "The", "What is", "My lord,", "Good")


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The embedded model, and one far enough from it to say other things."""
    model, generator = gpt2.load("shakespeare-mini"), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.4)
    tuned = gpt2.save(model, gpt2.load_tokenizer("shakespeare-mini"), tmp_path_factory.mktemp("tuned"))
    return "shakespeare-mini", str(tuned)


@pytest.fixture(scope="module")
def file(sides: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cases of which each model has some right: what it says itself, two tokens long."""
    lines, tokenizer = [], gpt2.load_tokenizer(sides[0])
    for number, prompt in enumerate(PROMPTS):
        ids = tokenizer.encode(prompt)
        said = tokenizer.decode(gpt2.generate(gpt2.load(sides[number % 2]), ids, 2, temperature=0)[-2:])
        lines.append({"prompt": prompt, "expected": said, "number": number})
    path = tmp_path_factory.mktemp("cases") / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + json.dumps({"prompt": "I pray", "expected": "you"}))
    return path


def by_hand(side: str, prompt: str, expected: str) -> tuple[bool, float]:
    """Whether greedy decoding, token by token, begins with the expected text; and its probability."""
    model, tokenizer = gpt2.load(side, dtype="float64"), gpt2.load_tokenizer(side)
    expected = " you" if expected == "you" else expected  # the one that is written without its space
    ids, right, probability = tokenizer.encode(prompt), True, 1.0
    for token in tokenizer.encode(expected):
        p = model(torch.tensor([ids]))[0, -1].detach().softmax(-1)
        right, probability = right and int(p.argmax()) == token, probability * float(p[token])
        ids.append(token)
    return right, probability


def test_each_case_is_what_greedy_decoding_says(sides: tuple[str, str], file: Path, text: str) -> None:
    """Base against tuned on one's own questions was not measured; each figure beside the same one computed token by token."""
    found = compare(*sides, on=text, tokens=40, cases=str(file)).cases
    expected = [[by_hand(side, case.prompt, case.expected) for side in sides] for case in found.cases]
    for case, ((right_a, p_a), (right_b, p_b)) in zip(found.cases, expected, strict=True):
        assert (case.right_a, case.right_b) == (right_a, right_b)
        assert (case.probability_a, case.probability_b) == pytest.approx((p_a, p_b), rel=1e-4)
    assert found.lost
    assert found.gained
    lost = [case.prompt for case, (a, b) in zip(found.cases, expected, strict=True) if a[0] and not b[0]]
    assert [case.prompt for case in found.lost] == lost
    assert found.right_b.value == sum(b[0] for _, b in expected) / len(expected)
    logs = torch.tensor([[a[1], b[1]] for a, b in expected], dtype=torch.float64).log()
    assert found.likelier.value == pytest.approx(float((logs[:, 1] - logs[:, 0]).mean().exp()), rel=1e-4)
    assert found.likelier.low < found.likelier.value < found.likelier.high  # few cases: one block would have no width
    assert found.gain.low < found.gain.high


@pytest.mark.slow
def test_the_command_lists_what_turned_and_gates_on_it(
    sides: tuple[str, str], file: Path, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    command = ["compare", *sides, "--on", text, "--tokens", "40", "--cases", str(file), "--html", str(page)]
    gates = "exact_match>2", "answer_ratio<0", "lost_cases>=0"
    assert main([*command, *(word for gate in gates for word in ("--fail-if", gate))]) == 1
    out, err = capsys.readouterr()
    assert "cases right" in out
    assert [line.partition(":")[0] for line in err.splitlines()[-3:]] == ["passed", "passed", "failed"]
    assert main([*command[:-4], "--fail-if", "lost_cases>0"]) == 2  # without --cases
    assert "Your own questions" in page.read_text()
    assert main([*command[:2], sides[0], *command[3:]]) == 0
    assert " ();" not in (same := page.read_text())
    assert "No answer turned from right to wrong or back." in same  # and not an empty table
    assert main([*command[:3], sides[0], *command[3:]]) == 2
    assert "for two models" in capsys.readouterr().err
    with pytest.raises(AssertionError, match=r"differ: exact_match<0\.9: fraction of the --cases that b has right[^;]*$"):
        assert_same(*sides, on=text, tokens=40, cases=str(file), exact_match=0.9, lost_cases=8)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.jsonl", None, "give a .jsonl, .csv or .parquet file with the fields prompt and expected"),
        ("cases.txt", "a", "give a .jsonl, .csv or .parquet file"),
        ("empty.jsonl", "\n", "holds no case"),
        ("fields.jsonl", '{"question": "a", "answer": "b"}\n', "fields.jsonl:1: a case needs prompt and expected"),
        ("number.jsonl", '{"prompt": "a", "expected": 4}\n', "number.jsonl:1: a case needs prompt and expected, both text"),
        ("line.jsonl", '{"prompt": "a", "expected": "b"}\n{\n', "line.jsonl:2: not JSON"),
    ],
)
def test_a_bad_file_is_one_line(name: str, content: str | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert says in refusal(read_cases, str(tmp_path / name))


def test_few_independent_values_have_an_interval() -> None:
    """A block of 16 neighbours is right for a text; of 12 questions it gave an interval without width."""
    values = torch.arange(12.0)
    found = Bootstrap(12, independent=True).mean(values)
    assert found.low < 4 < 7 < found.high
    assert Bootstrap(12).mean(values).low == Bootstrap(12).mean(values).high
