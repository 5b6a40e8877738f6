"""The public record: numbers that transformers computes must be reproduced, and every kind of wrong record refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.random_models import write_checkpoint
from support.tokenizers import openai_vocabulary

from gpt2.checkpoint import official
from gpt2.checkpoint.checkpoint import open_path
from gpt2.cli.main import main
from gpt2.data import from_directory
from gpt2.parity import reference, run
from gpt2.parity.findings import PLAN
from gpt2.parity.record import Record, compute, public_record

KINDS = "logits", "loss", "greedy-text"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def recorded(checkpoint: Path) -> tuple[Record, ...]:
    """A record of every kind, computed by transformers and plain loops, without our model's code."""
    model, tokenizer = reference.load_reference(checkpoint, torch.float32), open_path(checkpoint).tokenizer()
    ids, text = tokenizer.encode("First Witch:\nWhen shall we")[:6], tokenizer.encode("When shall")
    begin, columns = len(text), (0, 5, model.config.vocab_size - 1)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        for _ in range(5):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    loss = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])).item()
    of_ids, picked = {"ids": tuple(ids), "tolerance": 1e-4}, tuple(logits[3, list(columns)].tolist())
    values: dict[str, dict[str, Any]] = {
        "logits": {**of_ids, "position": 3, "columns": columns, "values": picked},
        "loss": {**of_ids, "values": (loss,)},
        "greedy-text": {"prompt": "When shall", "continuation": tokenizer.decode(text[begin:])},
    }
    return tuple(Record("gpt2", kind, {"project": f"a/{kind}", "url": "https://a"}, "", **values[kind]) for kind in KINDS)


def wrong(record: Record) -> Record:
    """The same record with its last number or letter changed."""
    if record.kind == "greedy-text":
        return replace(record, continuation=record.continuation[:-1] + "#")
    return replace(record, values=(*record.values[:-1], record.values[-1] + 3 * record.tolerance))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_reproduced_and_a_wrong_one_is_refused(checkpoint: Path, recorded: tuple[Record, ...], kind: str) -> None:
    """If our function computed something else than the recorded figure, verify would refuse the official weights."""
    stored = open_path(checkpoint)
    model, tokenizer = stored.load(torch.float32), stored.tokenizer()
    record = next(record for record in recorded if record.kind == kind)
    whole = f"{record.numbers} of {record.numbers} numbers recorded by 1 other project"
    assert compute("gpt2", [record], model, tokenizer, False).line() == whole
    report = compute("gpt2", [wrong(record)], model, tokenizer, False)
    assert not report.ok
    assert f"{record.numbers - 1} of {record.numbers} numbers" in report.line()
    assert f"first that differs: {kind}" in report.line()
    assert ("1 not computed" in compute("gpt2", [record], model, None, False).line()) == (kind == "greedy-text")
    with torch.no_grad():
        model.ln_f.weight.fill_(torch.nan)  # NaN compares as False
    if record.tolerance:
        assert f"0 of {record.numbers} numbers" in compute("gpt2", [record], model, tokenizer, False).line()


def test_verify_of_official_files(checkpoint: Path, recorded: tuple[Record, ...], monkeypatch, tmp_path: Path, capsys) -> None:
    """The line, table and JSON of the command; exit 1 if a recorded number is not reproduced."""
    hashes = {path.name: run.sha256(path) for path in checkpoint.iterdir() if path.suffix != ".md"}
    monkeypatch.setattr(official, "OFFICIAL_FILES", {**official.OFFICIAL_FILES, "gpt2": hashes})
    monkeypatch.setattr("gpt2.parity.run.public_record", lambda: recorded)
    # test_run.py checks equality.
    monkeypatch.setattr(run, "_compare", lambda subject: subject.findings.skipped.update(dict.fromkeys(PLAN, "not here")))
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["verify", str(checkpoint), "--json", str(tmp_path / "cheap.json")]) == 0
    out = capsys.readouterr().out
    assert "files: the official file of gpt2" in out
    assert "✓ 5 of 5 numbers recorded by 3 other projects" in " ".join(out.split())
    assert "greedy-text" not in out
    body = json.loads((tmp_path / "cheap.json").read_text())
    assert body["official"]["weights"] == ["model.safetensors"]
    assert (body["record"]["numbers"], body["record"]["reproduced"]) == (5, 5)
    assert body["record"]["records"][0]["source"]["url"].startswith("https://")

    assert main(["verify", str(checkpoint), "--record"]) == 0
    out = capsys.readouterr().out
    assert all(kind in out for kind in KINDS)
    assert max(map(len, out.splitlines())) <= 80

    monkeypatch.setattr("gpt2.parity.run.public_record", lambda: (wrong(recorded[0]), *recorded[1:]))
    assert main(["verify", str(checkpoint), "--json", str(tmp_path / "wrong.json")]) == 1
    assert "BUT NOT WHAT OTHERS RECORDED" in capsys.readouterr().out
    assert json.loads((tmp_path / "wrong.json").read_text())["verdict"] == "mismatch"


def test_the_record_is_of_official_weights_alone(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other weights give other numbers: the comparison would call every fine-tuned model wrong."""
    for name in (str(checkpoint), "random:gpt2"):
        assert main(["verify", name, "--record"]) == 2
        assert "--record is of the official weights" in capsys.readouterr().err


def test_the_data_file() -> None:
    """If ids did not belong to their text, a correct record would look wrong."""
    tokenizer = from_directory(openai_vocabulary()[0].parent)
    found = public_record()
    assert {record.kind for record in found} == set(KINDS)
    for record in found:
        assert record.source["url"].startswith(f"https://github.com/{record.source['project']}")
        assert all(0 <= i < 50257 for i in record.ids)
        assert (record.tolerance == 0) is (record.values == ()) is bool(record.continuation) is (record.kind == "greedy-text")
        assert len(record.columns or record.values) == len(record.values)
        quoted = re.match(r'"([^"]+)"', record.protocol)
        if quoted and "..." not in quoted[1]:
            ids = [i for i in record.ids if i != tokenizer.eot]
            assert tokenizer.decode(ids).startswith(quoted[1])
            assert ids[: len(tokenizer.encode(quoted[1]))] == tokenizer.encode(quoted[1])
