"""`compare --noise`: a model against itself gives rounding and nothing else; a way that computes something else is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.browser import Browser, in_a_browser
from support.commands import mistake, refusal
from support.pages import ATTACK, Parts, assert_whole_by_itself
from support.random_models import TEXT, write_checkpoint

import gpt2
from gpt2.checkpoint.loading import load
from gpt2.cli.main import main
from gpt2.comparison import noise, ways
from gpt2.comparison.noise import measure_noise
from gpt2.comparison.noise_result import Noise
from gpt2.config import GPT2Config
from gpt2.measure.per_token import likeliest
from gpt2.model import GPT2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("noise")
    (path / "text.txt").write_text(TEXT)
    return write_checkpoint(path / "model").parent


@pytest.fixture(scope="module")
def found(folder: Path) -> Noise:
    return measure_noise(str(folder / "model"), on=str(folder / "text.txt"), tokens=200)


def test_every_way_rounds_and_does_no_more(found: Noise) -> None:
    """A way that computes another function, such as padding with wrong positions, would be taken for noise."""
    assert {way.group for way in found.ways} >= {"batch", "padding", "cache", "kernel", "threads", "dtype"}
    ours = [way for way in found.ways if way.dtype == "float32"]
    assert len(ours) > 6
    for way in ours:
        assert way.logit < 1e-4, way
        assert way.kl.value < 1e-10, way
    by_dtype = {way.dtype: way for way in found.ways if way.group == "dtype"}
    assert 1e-8 < by_dtype["float64"].error < 1e-5  # the model's own error
    assert 1e-4 < by_dtype["float16"].error < by_dtype["bfloat16"].error < 0.1
    limits = {limit.dtype: limit for limit in found.limits}
    assert list(limits) == ["float32", "float16", "bfloat16"]
    assert limits["float32"].kl == max(way.kl.high for way in ours)
    assert limits["float32"].kl < limits["float16"].kl < limits["bfloat16"].kl


def test_flips_hang_and_close_calls_are_what_they_say(found: Noise, folder: Path) -> None:
    """Every choice that flipped must be among those that could; close calls are recomputed from the logits."""
    assert all(way.flipped <= way.hanging for way in found.ways)
    bfloat16 = next(way for way in found.ways if way.dtype == "bfloat16")
    assert bfloat16.hanging > 0
    model, tokenizer = load(str(folder / "model")), gpt2.load_tokenizer(str(folder / "model"))
    rows = torch.tensor(tokenizer.encode(TEXT)[: found.text.tokens]).view(found.rows, -1)
    with torch.no_grad():
        ids, values = likeliest(model(rows).flatten(0, 1)[:, : tokenizer.n_vocab], 2)
    assert found.close_calls
    for call in found.close_calls:
        margin = (values[call.at, 0] - values[call.at, 1]).item()
        assert call.margin == pytest.approx(margin, abs=1e-5)
        assert [call.first, call.second] == [tokenizer.decode([token]) for token in ids[call.at].tolist()]
        assert call.ways == tuple(way.name for way in found.ways if 2 * way.logit >= call.margin and way.logit > 0)


def test_greedy_texts_part_where_generation_parts(found: Noise, folder: Path) -> None:
    """The place is found in one pass over the baseline's text; generating again must part at the same token."""
    bfloat16 = next(way for way in found.ways if way.dtype == "bfloat16")
    model, tokenizer = load(str(folder / "model")), gpt2.load_tokenizer(str(folder / "model"))
    texts, prompt = noise._texts(model, torch.tensor(tokenizer.encode(TEXT)[:200]), found.text.context)
    coarse = load(str(folder / "model"), dtype="bf16")
    text = texts[:, :prompt]
    with torch.no_grad():
        for _ in range(texts.size(1) - prompt):  # without a cache, each row alone, as the way does
            logits = torch.cat([coarse(row[None])[:, -1] for row in text])
            text = torch.cat((text, likeliest(logits[:, : tokenizer.n_vocab], 1)[0]), 1)
    parted = []
    for one, other in zip(texts, text, strict=True):
        differing = (one != other).nonzero()
        parted.append(int(differing[0]) - prompt if len(differing) else None)
    assert bfloat16.parts_at == tuple(parted)


def test_a_broken_way_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: padding without its mask moves every position by seven."""

    def wrong(model: gpt2.GPT2) -> ways.Run:
        return lambda rows: model(torch.cat((rows.new_zeros(len(rows), 7), rows), 1))[:, 7:]

    monkeypatch.setattr(noise, "padded", wrong)
    broken = measure_noise(str(folder / "model"), on=str(folder / "text.txt"), tokens=60)
    assert next(way for way in broken.ways if way.group == "padding").kl.value > 1e-3
    assert broken.limits[0].kl > 1e-3


def test_the_models_state_is_as_before(folder: Path) -> None:
    """Threads, attention functions and oneDNN are the caller's."""

    def state() -> tuple[object, ...]:
        return torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.backends.cuda.math_sdp_enabled()

    before = state()
    measure_noise(str(folder / "model"), on=str(folder / "text.txt"), tokens=40)
    assert state() == before


@pytest.mark.slow
def test_the_page_is_whole_and_escapes_the_text(found: Noise) -> None:
    """A model's token that is parsed as markup would run in the browser of each reader."""
    text = replace(found, close_calls=(replace(found.close_calls[0], before=ATTACK, first=ATTACK),)).page()
    assert_whole_by_itself(text)
    assert "to mean anything" in text
    assert Parts(text).tags.count("script") == 2
    assert "img" not in Parts(text).tags
    assert ATTACK in Parts(text).text


def test_flags_without_effect_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that is silently ignored looks as if it had been obeyed."""
    model = str(folder / "model")
    assert "B has no effect with --noise; leave it out" in mistake(capsys, "compare", model, model, "--noise")
    assert "--blame has no effect with --noise" in mistake(capsys, "compare", model, "--noise", "--blame")
    assert "leave out hf/" in refusal(measure_noise, f"hf/{model}")
    assert "too few" in refusal(measure_noise, model, tokens=1)


def test_a_text_whose_logits_do_not_fit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--tokens 0`` of a long text held all logits, until the machine ran out of memory."""
    text = str(folder / "text.txt")
    vocab = gpt2.load_tokenizer(str(folder / "model")).n_vocab
    monkeypatch.setattr(noise, "machine_memory", lambda: 2 * noise.LOGIT_BYTES * 60 * vocab - 1)
    assert "give --tokens with a smaller number" in refusal(measure_noise, str(folder / "model"), on=text, tokens=60)
    assert measure_noise(str(folder / "model"), on=text, tokens=40)


PEAK = """
import re, sys
from pathlib import Path
from gpt2.comparison.noise import LOGIT_BYTES, measure_noise

def peak(tokens):  # ru_maxrss would begin with the size of the process that started this one
    measure_noise(sys.argv[1], tokens=tokens)
    return 1024 * int(re.search("VmHWM:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1])

before = peak(128)
print((peak(640) - before) / (LOGIT_BYTES * (640 - 128) * 5000))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_memory_that_is_estimated_is_the_memory_that_is_taken(tmp_path: Path) -> None:
    """A text was let through that took half as much again as the estimate said."""
    gpt2.save(GPT2(GPT2Config(vocab_size=5000, n_positions=136, n_embd=16, n_layer=1, n_head=2)), None, tmp_path / "wide")
    passive = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-c", PEAK, str(tmp_path / "wide")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=passive)
    assert 0.5 < float(done.stdout) < 1.1


@pytest.mark.slow
def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON of the command has the limits that it prints."""
    model = str(folder / "model")
    assert main(["compare", model, "--noise", "--on", str(folder / "text.txt"), "--tokens", "60", "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [limit["dtype"] for limit in body["limits"]] == ["float32", "float16", "bfloat16"]


@in_a_browser
def test_the_page_fits_a_phone(found: Noise, tmp_path: Path) -> None:
    """A table or chart that is wider than the screen makes the whole page scroll sideways."""
    found.save_html(tmp_path / "noise.html")
    browser = Browser(tmp_path / "profile")
    try:
        for width in (1280, 390):
            browser.open((tmp_path / "noise.html").as_uri(), width)
            assert browser.value("document.documentElement.scrollWidth") <= width
        assert all(url.startswith("file:") for url in browser.asked)
    finally:
        browser.close()


@pytest.mark.parametrize(
    ("changed", "said"), [pytest.param(0.0, "exactly 0", marks=pytest.mark.slow), (1e-9, "not above it"), (0.1, "times that")]
)
def test_every_comparison_says_whether_it_is_above_the_floor(folder: Path, tmp_path: Path, changed: float, said: str) -> None:
    """A difference that rounding alone makes must not be reported as one of the models."""
    model = load(str(folder / "model"))
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight.add_(torch.randn(model.h[0].mlp.c_fc.weight.shape), alpha=changed)
    other = gpt2.save(model, gpt2.load_tokenizer(str(folder / "model")), tmp_path)
    compared = gpt2.compare(str(folder / "model"), str(other), on=str(folder / "text.txt"), tokens=200)
    assert said in compared.above_floor
    assert compared.above_floor in " ".join(compared.table(200).split())


def test_a_coarser_dtype_raises_the_floor(folder: Path) -> None:
    """A model against itself in bfloat16 differs by the rounding to bfloat16, which is no difference of the models."""
    name, on = str(folder / "model"), str(folder / "text.txt")
    compared = gpt2.compare(name, f"{name}:bf16", on=on, tokens=200)
    assert compared.floor is not None
    assert compared.floor.way == "rounding to float32 and bfloat16"
    assert "not above it: rounding to float32 and bfloat16 alone makes as much" in compared.above_floor
