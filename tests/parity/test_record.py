"""The public record: numbers that transformers computes must be reproduced, and every kind of wrong record refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.official_repositories import small_files
from support.oracle import as_the_guide_does
from support.random_models import TEXT, write_checkpoint

from gpt2.checkpoint import official
from gpt2.checkpoint.checkpoint import open_path
from gpt2.checkpoint.loading import load_path
from gpt2.checkpoint.names import OFFICIAL
from gpt2.cli.main import main
from gpt2.data import Tokenizer, from_directory
from gpt2.errors import InputError
from gpt2.measure.texts import GUIDE, LAST_WORD, RUNNING, Protocol, Text
from gpt2.parity import reference, run
from gpt2.parity.checks import Subject
from gpt2.parity.findings import PLAN
from gpt2.parity.record import AdamW, Kind, Record, Setup, Source, compute, public_record

WORDS = TEXT[:300]
PASSAGES = ("when shall we three meet again", "in thunder, lightning, or in rain", "fair is foul and foul is fair")
SOURCES = [Source(f"someone/{name}", f"https://example.org/{name}") for name in "abc"]


def texts(spec: str | None, *, offline: bool = False) -> Text:
    """Our own words in place of the downloaded texts, with the same protocols."""
    forms: dict[str | None, Protocol] = {
        "tinyshakespeare:split=all": RUNNING,
        "wikitext2:stride=8": replace(GUIDE, stride=8),
        "lambada": LAST_WORD,
    }
    return Text(str(spec), "here", WORDS, "", forms[spec], PASSAGES if spec == "lambada" else ())


def continued(model: torch.nn.Module, ids: list[int], new_tokens: int) -> list[int]:
    """Return ids with their greedy continuation: the best id after all of them by transformers, again and again."""
    for _ in range(new_tokens):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    return ids


def stand_in(folder: Path, tokenizer: Tokenizer) -> tuple[Record, ...]:
    """A record of every kind, computed by transformers and plain loops, without our model's code."""
    model = reference.load_reference(folder, torch.float32)
    n_positions = model.config.n_positions
    ids = tokenizer.encode(WORDS)[:6]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
        hidden = model.transformer(torch.tensor([ids])).last_hidden_state[0]
    logp = logits.double().log_softmax(-1)
    losses = -logp[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    greedy = continued(model, ids, 8)[len(ids) :]
    added = continued(model, tokenizer.encode("When shall"), 5)
    loss = as_the_guide_does(lambda ids: model(ids).logits, torch.tensor(tokenizer.encode(WORDS)), n_positions, stride=8)
    guided = math.exp(loss)
    accuracy, of_words = last_words(model, tokenizer, n_positions)
    columns = (0, 5, model.config.vocab_size - 1)
    optimizer = AdamW(1e-3, 0.9, 0.95, 1e-8, 0.1, clip=1.0)

    def made(kind: Kind, **fields: object) -> Record:
        return Record("gpt2", kind, SOURCES[len(kind.value) % 3], "stand-in", **fields)  # type: ignore[arg-type]

    trained = adamw(folder, tokenizer.encode(WORDS)[:25], optimizer)
    training = {"text": "tinyshakespeare:split=all", "batch": 2, "length": 12, "optimizer": optimizer}
    return (
        made(Kind.LOGITS, ids=tuple(ids), position=3, columns=columns, values=taken(logits[3], columns), tolerance=1e-4),
        made(Kind.MEAN_LOGIT, ids=tuple(ids), values=(logits.double().mean().item(),), tolerance=1e-4),
        made(Kind.FINAL_HIDDEN, ids=tuple(ids), position=2, columns=(1, 4), values=taken(hidden[2], (1, 4)), tolerance=1e-4),
        made(Kind.LOG_PROBABILITIES, ids=tuple(ids), positions=(1, 4), values=taken(-losses[:, 0], (1, 4)), tolerance=1e-4),
        made(Kind.LOSS, ids=tuple(ids), values=(losses.mean().item(),), tolerance=1e-4),
        made(Kind.GREEDY_IDS, ids=tuple(ids), values=tuple(greedy)),
        made(Kind.GREEDY_TEXT, prompt="When shall", continuation=tokenizer.decode(added[len(tokenizer.encode("When shall")) :])),
        made(Kind.ADAMW_LOSSES, **training, values=trained, tolerance=1e-3),
        made(Kind.PERPLEXITY, text="wikitext2:stride=8", values=(guided,), tolerance=1e-5 * guided),
        made(Kind.LAST_WORD_ACCURACY, text="lambada", values=(accuracy,), tolerance=1e-3),
        made(Kind.LAST_WORD_PERPLEXITY, text="lambada", values=(of_words,), tolerance=1e-5 * of_words),
    )


def taken(values: torch.Tensor, which: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(values[i].item() for i in which)


def adamw(folder: Path, ids: list[int], settings: AdamW) -> tuple[float, ...]:
    model = reference.load_reference(folder, torch.float32)
    x, y = torch.tensor(ids[:-1]).view(2, 12), torch.tensor(ids[1:]).view(2, 12)
    betas = settings.beta1, settings.beta2
    optimizer = torch.optim.AdamW(model.parameters(), settings.lr, betas, settings.eps, settings.weight_decay, foreach=False)
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        losses.append(loss.item())
        model.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, settings.clip / norm)
        optimizer.step()
    return tuple(losses)


@torch.no_grad()
def last_words(model: torch.nn.Module, tokenizer: Tokenizer, n_positions: int) -> tuple[float, float]:
    right, losses = [], []
    for passage in PASSAGES:
        ids, before = tokenizer.encode(passage), tokenizer.encode(passage.rpartition(" ")[0])
        word = len(ids) - len(before)
        logits = model(torch.tensor([ids[-n_positions - 1 : -1]])).logits[0, -word:]
        targets = torch.tensor(ids[-word:])
        right.append(float((logits.argmax(-1) == targets).all()))
        losses.append(F.cross_entropy(logits.double(), targets, reduction="sum").item())
    return sum(right) / len(right), torch.tensor(sum(losses) / len(losses)).exp().item()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def recorded(checkpoint: Path) -> tuple[Record, ...]:
    tokenizer = open_path(checkpoint).own_tokenizer()
    assert tokenizer is not None
    return stand_in(checkpoint, tokenizer)


@pytest.fixture(autouse=True)
def own_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2.parity.record.open_text", texts)


@pytest.fixture(scope="module")
def setup(checkpoint: Path) -> Setup:
    load = partial(load_path, checkpoint, dtype=torch.float32)
    return Setup(load, load(), open_path(checkpoint).own_tokenizer())


def test_every_kind_is_reproduced(setup: Setup, recorded: tuple[Record, ...]) -> None:
    """If our function computed something else than the recorded figure, verify would refuse the official weights."""
    assert [record.kind for record in recorded] == list(Kind), "a kind without a stand-in is not proved"
    report = compute("gpt2", recorded, setup, everything=True)
    assert [outcome.record.kind for outcome in report.outcomes if not outcome.ok or outcome.not_computed] == []
    assert report.ok
    assert report.line() == "18 of 18 numbers recorded by 3 other projects"


def wrong(record: Record) -> Record:
    """The same record with its last number or letter changed."""
    if record.kind is Kind.GREEDY_TEXT:
        return replace(record, continuation=record.continuation[:-1] + "#")
    step = 3 * record.tolerance if record.tolerance else 1
    return replace(record, values=(*record.values[:-1], record.values[-1] + step))


@pytest.mark.parametrize("kind", Kind)
def test_a_wrong_record_is_refused(setup: Setup, recorded: tuple[Record, ...], kind: Kind) -> None:
    """Negative control: wrong numbers must be refused."""
    record = wrong(next(record for record in recorded if record.kind is kind))
    report = compute("gpt2", [record], setup, everything=True)
    assert not report.ok
    assert report.reproduced == record.numbers - 1
    assert f"first that differs: {kind.value}" in report.line()


def test_a_wrong_model_is_refused_by_every_kind(checkpoint: Path, setup: Setup, recorded: tuple[Record, ...]) -> None:
    """Negative control: a broken model, which reads every position as the next one, must fail every kind of record."""
    model = load_path(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        model.wpe.weight.copy_(model.wpe.weight.roll(1, 0))
    wrong = replace(setup, model=model, build=lambda: model)
    report = compute("gpt2", recorded, wrong, everything=True)
    # Greedy continuations and a guess of three words are coarse: a broken model may pass them. It must fail every measured
    # number.
    coarse = {Kind.GREEDY_IDS, Kind.GREEDY_TEXT, Kind.LAST_WORD_ACCURACY}
    assert {outcome.record.kind for outcome in report.outcomes if outcome.ok} <= coarse


def test_what_is_nan_is_not_reproduced(checkpoint: Path, setup: Setup, recorded: tuple[Record, ...]) -> None:
    """NaN compares as False: a wrong comparison would call it within the tolerance."""
    model = load_path(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        model.ln_f.weight.fill_(torch.nan)
    report = compute("gpt2", recorded[:5], replace(setup, model=model))
    assert report.reproduced == 0
    assert "nan" in replace(report, everything=True).table(80)


def test_what_cannot_be_computed_is_counted_as_such(setup: Setup, recorded: tuple[Record, ...], monkeypatch) -> None:
    """Numbers that cannot be computed here must neither fail the model nor count as reproduced."""

    def out_of_reach(spec: str | None, *, offline: bool = False) -> Text:
        raise InputError("offline, and the text is not here")

    monkeypatch.setattr("gpt2.parity.record.open_text", out_of_reach)
    report = compute("gpt2", recorded, setup, everything=True)
    assert report.ok
    assert report.line() == ("11 of 11 numbers recorded by 3 other projects; 7 not computed: offline, and the text is not here")
    without = compute("gpt2", recorded, replace(setup, tokenizer=None), everything=True)
    assert "8 not computed: the checkpoint comes without a tokenizer" in without.line()
    cheap = compute("gpt2", recorded, setup)
    assert cheap.line() == "11 of 11 numbers recorded by 3 other projects; 7 more with --record"


def known_here(checkpoint: Path, recorded: tuple[Record, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the tiny checkpoint as the official gpt2."""
    hashes = {path.name: run.sha256(path) for path in checkpoint.iterdir() if path.suffix != ".md"}
    monkeypatch.setattr(official, "OFFICIAL_FILES", {**official.OFFICIAL_FILES, "gpt2": hashes})
    monkeypatch.setattr("gpt2.parity.record.public_record", lambda: recorded)

    def left_out(subject: Subject) -> None:
        """test_run.py checks equality."""
        for id in PLAN:
            subject.findings.skip(id, "not here")

    monkeypatch.setattr(run, "_compare", left_out)


def test_verify_of_official_files(checkpoint: Path, recorded: tuple[Record, ...], monkeypatch, tmp_path: Path, capsys) -> None:
    """The line, table and JSON of the command; exit 1 if a recorded number is not reproduced."""
    known_here(checkpoint, recorded, monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["verify", str(checkpoint), "--json", str(tmp_path / "cheap.json")]) == 0
    out = capsys.readouterr().out
    assert "files: the official file of gpt2" in out
    assert "✓ 11 of 11 numbers recorded by 3 other projects; 7 more with --record" in " ".join(out.split())
    body = json.loads((tmp_path / "cheap.json").read_text())
    assert body["official"]["weights"] == ["model.safetensors"]
    assert (body["record"]["numbers"], body["record"]["reproduced"], body["record"]["left"]) == (11, 11, 7)
    assert body["record"]["records"][0]["source"]["url"].startswith("https://")

    assert main(["verify", str(checkpoint), "--record"]) == 0
    out = capsys.readouterr().out
    assert all(kind.value in out for kind in Kind)
    assert max(map(len, out.splitlines())) <= 80

    monkeypatch.setattr("gpt2.parity.record.public_record", lambda: (wrong(recorded[0]), *recorded[1:]))
    assert main(["verify", str(checkpoint), "--json", str(tmp_path / "wrong.json")]) == 1
    assert "BUT NOT WHAT OTHERS RECORDED" in capsys.readouterr().out
    assert json.loads((tmp_path / "wrong.json").read_text())["verdict"] == "mismatch"


def test_the_record_is_of_official_weights_alone(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other weights give other numbers: the comparison would call every fine-tuned model wrong."""
    for name in (str(checkpoint), "random:gpt2"):
        assert main(["verify", name, "--record"]) == 2
        assert "--record is of the official weights" in capsys.readouterr().err


def test_the_data_file(tmp_path: Path) -> None:
    """If ids did not belong to their text, a correct record would look wrong."""
    for name, content in small_files("gpt2").items():
        (tmp_path / name).write_bytes(content)
    tokenizer = from_directory(tmp_path)
    found = public_record()
    assert {record.model for record in found} == set(OFFICIAL)
    assert len({record.source.project for record in found}) >= 12
    for record in found:
        assert record.source.url.startswith(f"https://github.com/{record.source.project}")
        assert all(0 <= i < 50257 for i in record.ids)
        assert (record.tolerance == 0) is record.kind.exact
        assert len(record.columns or record.positions or record.values) == len(record.values)
        quoted = re.match(r'"([^"]+)"', record.protocol)
        if quoted and "..." not in quoted[1]:
            ids = [i for i in record.ids if i != tokenizer.eot]
            assert tokenizer.decode(ids).startswith(quoted[1])
            assert ids[: len(tokenizer.encode(quoted[1]))] == tokenizer.encode(quoted[1])
        if record.kind is Kind.GREEDY_IDS:
            said = re.search(r': "([^"]+)"$', record.protocol)
            assert said is None or tokenizer.encode(said[1]) == list(record.values)
