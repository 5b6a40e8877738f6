"""Attention maps and their summary, compared with brute-force loops."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from support.commands import refusal
from support.random_models import random_model

import gpt2
from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.explore import attention
from gpt2.explore.attention import attention_maps, compare_attention, summarise_attention

CONFIG = GPT2Config(61, n_positions=16, n_embd=24, n_layer=2, n_head=3, bos_token_id=None, eos_token_id=None)
TEXT = "But soft, what light <b>"


def maps_of(seed: int, n: int = 9) -> torch.Tensor:
    return attention_maps(random_model(CONFIG, dtype=torch.float32, seed=seed), torch.arange(n)[None] * 5)


def test_figures_of_a_head_are_those_of_a_loop() -> None:
    """Scores in place of weights, an average with the first token, or a diagonal off by one cannot be seen in a picture."""
    maps, other = maps_of(0), maps_of(1)
    assert maps.shape == (2, 3, 9, 9)
    torch.testing.assert_close(maps.tril().sum(-1), torch.ones(2, 3, 9))
    report = summarise_attention("a", "b", tuple("abcdefghi"), maps, other)
    head = report.heads[4]
    assert (head.layer, head.head) == (1, 1)
    w, v = maps[1, 1].double(), other[1, 1].double()
    rows = range(1, 9)
    mean = lambda what: sum(float(what(i)) for i in rows) / 8  # noqa: E731
    assert head.distance == pytest.approx(mean(lambda i: sum(w[i, j] * (i - j) for j in range(i + 1))))
    assert head.entropy == pytest.approx(mean(lambda i: -sum(x * math.log(x) for x in w[i, : i + 1].tolist())))
    assert head.previous == pytest.approx(mean(lambda i: w[i, i - 1]))
    assert head.first == pytest.approx(mean(lambda i: w[i, 0]))
    assert head.itself == pytest.approx(mean(lambda i: w[i, i]))
    assert head.moved == pytest.approx(mean(lambda i: (w[i] - v[i]).abs().sum() / 2))
    assert report.heads_b[4].distance == pytest.approx(summarise_attention("b", None, (), other).heads[4].distance)


def test_heads_made_by_hand_are_told_apart() -> None:
    """A head of each kind must get the right name."""
    n = 6
    before = torch.zeros(n, n)
    before[0, 0] = 1
    before[torch.arange(1, n), torch.arange(n - 1)] = 1
    first, itself = torch.zeros(n, n), torch.eye(n)
    first[:, 0] = 1
    even = torch.ones(n, n).tril() / torch.arange(1, n + 1)[:, None]
    report = summarise_attention("a", None, tuple("abcdef"), torch.stack((before, first, itself, even))[None])
    kinds = {head.head: why for head, why in report.notable()}
    assert "token before" in kinds[0]
    assert "first token" in kinds[1]
    assert "itself" in kinds[2]
    assert "widest" in kinds[3]
    assert (report.heads[0].distance, report.heads[0].entropy, report.heads[2].distance) == (1, 0, 0)


def test_a_model_against_itself_has_not_moved(tmp_path: Path, in_a_notebook: None) -> None:
    """From a model's name to the result, in every output format."""
    report = compare_attention("shakespeare-mini", "shakespeare-mini", TEXT)
    assert "".join(report.tokens) == TEXT
    ids = torch.tensor([gpt2.load_tokenizer("shakespeare-mini").encode(TEXT)])
    assert torch.equal(report.maps, attention_maps(gpt2.load("shakespeare-mini"), ids))
    assert all(head.moved == 0 for head in report.heads)
    assert torch.equal(report.maps, report.maps_b)
    body = json.loads(report.to_json())
    assert body["maps"] == body["maps_b"]
    assert len(body["heads"]) == 25
    assert "moved" in report.table()
    report.save_html(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert page.count("<svg") == 3
    assert "<b>" not in page


@pytest.mark.parametrize(
    ("models", "text", "says"),
    [
        (("shakespeare-mini", None), "a", "2 to 256"),
        (("shakespeare-mini", None), "light " * 300, "2 to 256"),
        (("shakespeare-mini", "random:distilgpt2"), TEXT, "n_layer"),
        (("random:distilgpt2", None), TEXT, "no tokenizer"),
    ],
)
def test_what_cannot_be_shown_is_said_in_a_line(models: tuple[str, str | None], text: str, says: str) -> None:
    """A text that is too short or too long for the picture must give an error line."""
    assert re.search(says, refusal(compare_attention, *models, text))


def test_a_text_too_long_to_be_seen_can_still_be_had_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token too many for the page; the JSON holds them all."""
    monkeypatch.setattr(attention, "VISIBLE", 25 * 30**2)
    found = compare_attention("shakespeare-mini", None, "light " * 29)
    assert len(found.tokens) == 31
    with pytest.raises(InputError, match="25 heads has room for 30: give a shorter text, or take the weights as --json"):
        found.save_html(tmp_path / "page")
    body = json.loads(found.to_json())
    assert torch.tensor(body["maps"]).shape == (5, 5, 31, 31)
    assert body["models"][0]["files"]["model.safetensors"]
    assert torch.__version__.startswith(body["environment"]["versions"]["torch"])  # without a local suffix +cu130
