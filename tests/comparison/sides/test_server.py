"""A server as a side: bounds that hold, wrong servers that are told from one that rounds, keys, limits, and retries."""

import contextlib
import dataclasses
import json
import math
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.commands import refusal
from support.completions_standin import Standin, completions
from support.random_models import TEXT, random_model

import gpt2
from gpt2.checkpoint.export import export
from gpt2.cli.main import main
from gpt2.comparison.bounds import Bounds, _places, measure_bounds
from gpt2.comparison.gates import Gate
from gpt2.comparison.loaded import Loaded
from gpt2.comparison.passage import Passage
from gpt2.comparison.run import compare
from gpt2.comparison.server_checks import shown_kl
from gpt2.comparison.sides.server import MAX_SHOWN, RunningServer, ServerSide
from gpt2.comparison.sides.server_request import TRIES, post
from gpt2.comparison.sides.side import Running, RunningFunction, Shown, Top
from gpt2.data.bpe import train_bpe
from gpt2.errors import InputError
from gpt2.int8 import Int8GPT2
from gpt2.measure.windows import Windows

MODEL = "shakespeare-mini"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = (TEXT[:90] + "The raven himself is hoarse That croaks the fatal entrance of Duncan Under my battlements. ") * 2
    path.write_text(
        words + "Come, you spirits That tend on mortal thoughts, unsex me here, And fill me from the crown to the toe"
    )
    return str(path)


def standin(**changes) -> Standin:
    return Standin(gpt2.load(MODEL), gpt2.load_tokenizer(MODEL), **changes)


def measured(server: Standin, text: str, tokens: int = 100) -> Bounds:
    with completions(server) as url:
        found = compare(MODEL, url, on=text, tokens=tokens)
    assert found.distributions is None
    assert found.bounds is not None
    return found.bounds


# What is wrong with the server: its other fields, made from the right one, and the finding.
WRONG: dict[str, tuple[Callable[[Standin], dict], str]] = {
    "only rounds": (lambda right: {}, "rounding"),
    "rounds to two digits": (lambda right: {"digits": 2}, "rounding"),
    "another model": (lambda right: {"model": random_model(right.model.config, 0.05, dtype=torch.float32)}, "other-model"),
    "int8": (lambda right: {"model": Int8GPT2.of(right.model)}, "weights-nearly-equal"),
    "the end of text in front": (lambda right: {"front": [right.tokenizer.eot]}, "text-in-front"),
    "a context of 4 tokens": (lambda right: {"context": 4}, "context-truncated"),
    "temperature 0.7": (lambda right: {"temperature": 0.7}, "temperature"),
    "another tokenizer": (lambda right: {"tokenizer": train_bpe(TEXT, 300)}, "tokens-differ"),
    "rows one late": (lambda right: {"late": True}, "rows-shifted"),
    "renormalised": (lambda right: {"renormalise": True}, "renormalised"),
}


DEFAULT = ("only rounds", "another tokenizer", "the end of text in front", "rows one late")


@pytest.mark.parametrize("wrong", [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.slow) for kind in WRONG])
def test_a_wrong_server_is_told_from_one_that_rounds(wrong: str, text: str) -> None:
    """Every one of these differs in KL; the figure alone does not say why, and a server that only rounds must not be blamed."""
    changes, finding = WRONG[wrong]
    server = dataclasses.replace(standin(), **changes(standin()))
    if wrong == "another tokenizer":
        with completions(server) as url, pytest.raises(InputError, match="token 1 is"):
            compare(MODEL, url, on=text, tokens=100)
    else:
        found = measured(server, text).findings
        assert found[0].id == finding, found


@pytest.mark.slow
def test_llama_cpp_python_s_own_server(text: str, tmp_path: Path) -> None:
    """Its echo gives each token the row after it (0.3.36); the side must say so, and find the same model behind it."""
    pytest.importorskip("llama_cpp.server.app")
    file = Path(export(MODEL, tmp_path, format="gguf").directory, "model.gguf")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = ["--model", str(file), "--port", str(port), "--logits_all", "true", "--n_ctx", "256", "--n_threads", "1"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, "-m", "llama_cpp.server", *settings], stdout=log, stderr=log)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        found = compare(MODEL, f"http://127.0.0.1:{port}/v1", on=text, tokens=60).bounds.findings[0]
    finally:
        server.terminate()
        server.wait(30)
    assert found.id in ("rows-shifted", "rounding")
    if found.id == "rows-shifted":
        assert float(re.search(r"to (\S+) nats", found.evidence)[1]) < 1e-5


@pytest.mark.parametrize("llama_server", [False, True])
def test_a_server_that_does_not_score_prompts(llama_server: bool, text: str) -> None:
    """Without echo the next token is asked for at a few places; the figures of these places must be the same.

    llama-server refuses echo with 500, which was tried five times, and lists tokens in another form.
    """
    server = standin(echo=False, llama_server=llama_server)
    found = measured(server, text)
    assert found.tokens == 16
    assert found.findings[0].id == "rounding"
    assert not any(body["echo"] for body in server.requests)


def test_keys_limits_and_retries(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A key must be sent and never printed; a full queue is waited for; too many tokens are not sent."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = standin(busy=2, key="sk-secret")
    with completions(server) as url:
        assert main(["compare", MODEL, url, "--on", text, "--tokens", "30"]) == 2
        assert "put its key into OPENAI_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
        assert main(["compare", MODEL, url, "--on", text, "--tokens", "30", "--json", "-"]) == 0
        assert server.busy == 0
        printed = capsys.readouterr()
        assert "sk-secret" not in printed.out + printed.err
        assert json.loads(printed.out)["bounds"]["sent"] == 30
        monkeypatch.setenv("GPT2_SEND_LIMIT", "20")
        requests = len(server.requests)
        assert main(["compare", MODEL, url, "--on", text, "--tokens", "30"]) == 2
        assert "GPT2_SEND_LIMIT=30" in capsys.readouterr().err
        assert len(server.requests) == requests
    monkeypatch.setattr("gpt2.comparison.sides.server_request.time.sleep", lambda seconds: None)
    assert main(["compare", MODEL, url, "--on", text, "--tokens", "30"]) == 2
    assert "GPT2_SEND_LIMIT" in capsys.readouterr().err
    monkeypatch.delenv("GPT2_SEND_LIMIT")
    assert main(["compare", MODEL, url, "--on", text, "--tokens", "30"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
    with completions(server) as url:
        elsewhere = url.replace("127.0.0.1", "0.0.0.0")  # reaches this machine, and does not name it
        assert main(["compare", MODEL, elsewhere, "--on", text, "--tokens", "30"]) == 2
        assert "OPENAI_API_KEY is sent only over https" in capsys.readouterr().err
        assert server.headers[-1] == ""
    for address in ("http://me:sk-secret@host/v1", "http://host/v1?key=sk-secret"):
        assert main(["compare", MODEL, address]) == 2
        assert "sk-secret" not in capsys.readouterr().err


def test_the_cost_is_told_before_it_arises(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """10,000 tokens cost money; the count was that of a server with echo, and one without takes eight times as many."""
    monkeypatch.setattr("gpt2.comparison.sides.server.ANNOUNCED", 200)
    server = standin(echo=False)
    with completions(server) as url:
        elsewhere = url.replace("127.0.0.1", "0.0.0.0")
        assert main(["compare", MODEL, elsewhere, "--on", text, "--tokens", "100"]) == 2
        printed = capsys.readouterr().err
        assert "this would send 942 tokens, about 0.001 times its price" in printed  # 100 with echo, and 842 at sixteen places
        assert "GPT2_SEND_LIMIT=942 to agree" in printed
        assert not server.requests
        compare(MODEL, url, on=text, tokens=100)  # this machine: told, and sent
        assert "sending 942 tokens" in capsys.readouterr().err
        monkeypatch.setenv("GPT2_SEND_LIMIT", "500")
        assert "GPT2_SEND_LIMIT=942" in refusal(compare, MODEL, url, on=text, tokens=100)


def test_a_server_that_is_wrong_later_in_the_text(text: str) -> None:
    """Only the first window was looked at: a context of 8 tokens is right there, and so is a model that is exchanged later."""
    server = standin(later=random_model(gpt2.load(MODEL).config, 0.05, dtype=torch.float32), reports="mini-q4")
    with completions(server) as url:
        found = compare(MODEL, url, on=text + ":context=32", tokens=100)
    assert found.bounds.findings[0].id == "other-model"
    assert "window 1: " in found.bounds.findings[0].evidence
    assert found.b.implementation.endswith("calls itself mini-q4")


def test_places_whose_kl_is_not_finite_are_counted() -> None:
    """They were dropped: a model that returns NaN at every second token had the KL of the other half, and passed its gate."""
    logits = torch.randn(1, 9, 12, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = torch.nan

    class Shows(Running):
        def top(self, ids: torch.Tensor) -> Top:
            logp, top = torch.randn(9, 12, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1).topk(5)
            return Top(torch.full((9,), torch.nan, dtype=torch.float64), top, logp)

    sides = (SimpleNamespace(name=str(shown), shows={shown}, recording=True, config=None) for shown in (Shown.LOGITS, Shown.TOP))
    runs = RunningFunction(lambda ids: logits), Shows()
    pair = [Loaded(side, running, None, (), 12) for side, running in zip(sides, runs, strict=True)]
    passage = Passage(torch.arange(10), Windows(9), None, None)
    found = measure_bounds(*pair, passage, 0, lambda what: None)
    assert (found.tokens, found.not_finite) == (8, 1)
    assert math.isnan(found.kl.high)
    logits[0, 3] = 0.0
    assert measure_bounds(*pair, passage, 0, lambda what: None).not_finite == 0


def test_a_right_token_that_is_not_among_the_likeliest_keeps_the_bounds() -> None:
    """Servers show the right token beside the likeliest; its small probability was taken for the largest of those left out."""
    p = torch.tensor([[0.3, 0.2, 0.2, 0.1, 0.1, 0.1 - 1e-6 - 1e-8, 1e-6, 1e-8]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.2, 0.2, 0.1, 0.1, 0.01, 1e-4, 0.19 - 1e-4]], dtype=torch.float64)
    target = 6
    shown = [0, 1, 2, target]  # three likeliest and the right token; token 7 is left out, and p gives it almost nothing
    top = Top(q[:, target].log(), torch.tensor([shown]), q[:, shown].log())
    forward, _, backward, backward_high, *_ = (column.item() for column in _places(p.log(), top, torch.tensor([target])))
    assert 0 < forward <= (p * (p / q).log()).sum().item()
    assert 0 < backward <= (q * (q / p).log()).sum().item() <= backward_high < math.inf
    assert shown_kl(p.log(), top).item() == forward


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": 3},
        {"choices": [None], "usage": [1]},
        {"choices": [{"logprobs": ["a"]}]},
        {"choices": [{"logprobs": {"tokens": 7, "top_logprobs": {"a": 1}}}]},
        {"choices": [{"logprobs": {"top_logprobs": [["a"]], "content": [{"top_logprobs": [5]}]}}]},
        {"choices": [{"logprobs": {"top_logprobs": [{"a": 10**400, "b": "c", "d": None}]}}]},
    ],
)
def test_answers_of_another_form_are_one_line(answer: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list where an object was expected, or a number beyond float64, ended in a traceback."""
    tokenizer = gpt2.load_tokenizer(MODEL)
    server = RunningServer(ServerSide.open("http://localhost/v1"), tokenizer, 10_000)
    monkeypatch.setattr("gpt2.comparison.sides.server.post", lambda *_, **__: answer)
    assert "no log-probabilities" in refusal(server.top, torch.tensor(tokenizer.encode(TEXT)[:6]))


def test_an_answer_of_a_whole_vocabulary_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of 50,000 alternatives in 64 MB made a table of all places as wide: gigabytes for a context of 1,024."""
    tokenizer = gpt2.load_tokenizer(MODEL)
    ids = tokenizer.encode(TEXT)[:9]
    texts = [tokenizer.token_bytes(index).decode("utf-8", errors="ignore") for index in range(tokenizer.n_vocab)]
    rows = [None, dict(zip(texts, range(-1, -len(texts) - 1, -1), strict=True)), *({texts[3]: -1.0} for _ in ids[2:])]
    given = {"tokens": [texts[index] for index in ids], "top_logprobs": rows}
    server = RunningServer(ServerSide.open("http://localhost/v1"), tokenizer, 10_000)
    with monkeypatch.context() as answering:
        answering.setattr("gpt2.comparison.sides.server.post", lambda *_, **__: {"choices": [{"logprobs": given}]})
        top = server.top(torch.tensor(ids))
    assert top.ids.size(1) <= MAX_SHOWN
    assert top.logp[0, 0] == max(rows[1][texts[index]] for index in top.ids[0].tolist())
    monkeypatch.setattr("gpt2.comparison.sides.server_request.MAX_ANSWER", 100)
    with completions(standin()) as url, pytest.raises(InputError, match="more than 100 bytes"):
        RunningServer(ServerSide.open(url), tokenizer, 10_000).top(torch.tensor(ids))


def test_an_answer_that_trickles_in_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then kept each read within its limit, so that the whole answer had none."""
    monkeypatch.setattr("gpt2.comparison.sides.server_request.TIMEOUT", 0.15)
    monkeypatch.setattr("gpt2.comparison.sides.server_request.time.sleep", lambda seconds: None)
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def trickle() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as client:
                while not done.wait(0.04):
                    client.send(b"H")

        threads = [threading.Thread(target=trickle, daemon=True) for _ in range(TRIES)]
        for thread in threads:
            thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1/completions"
        with pytest.raises(InputError, match=r"cannot be reached \(nothing moves in 0.15 s\), 5 times"):
            post(url, {}, "it", private=True, proxy=False, refusable=False)
        done.set()


def test_gates_judge_the_bounds(text: str) -> None:
    """``kl>`` passes only if the upper bound does; a part that no server shows cannot be measured."""
    with completions(standin()) as url:
        found = compare(MODEL, url, on=text, tokens=60)
    assert not Gate.parse("kl>0.01").judge(found).met
    assert Gate.parse("kl>1e-9").judge(found).met
    assert not Gate.parse("same_top<0.9").judge(found).met
    assert "shows only top-k" in refusal(Gate.parse("weights>0").judge, found)
    assert "found  rounding" in found.table(200)
