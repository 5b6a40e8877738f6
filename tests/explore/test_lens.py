"""The logit lens: the page shows the model's own figures, and text is escaped."""

import base64
import json
import math
import re
from pathlib import Path

import pytest
import torch
from support.pages import assert_whole_by_itself

import gpt2
from gpt2.data.bpe import chars_of
from gpt2.errors import InputError
from gpt2.explore.attention import attention_maps
from gpt2.explore.lens import Exploration, explorer
from gpt2.measure.per_token import measure_pair
from gpt2.measure.windows import Windows
from gpt2.model import eager_attention

TEXT = "JULIET:\nO Romeo, Romeo! wherefore art"


@pytest.fixture(scope="module")
def found() -> Exploration:
    with explorer("shakespeare-mini", "shakespeare-mini:bf16") as opened:
        return opened.look(TEXT)


@pytest.fixture(scope="module")
def chars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character model with two layers and a padded vocabulary."""
    folder = tmp_path_factory.mktemp("models") / "chars"
    tokenizer = chars_of(TEXT)
    torch.manual_seed(0)
    gpt2.save(gpt2.GPT2(gpt2.GPT2Config(tokenizer.n_vocab + 3, 64, 12, 2, 3)), tokenizer, folder)
    return folder


def test_the_last_reading_is_the_model_s_own_prediction(found: Exploration) -> None:
    """The page must show the model's own numbers."""
    model, tok = gpt2.load("shakespeare-mini"), gpt2.load_tokenizer("shakespeare-mini")
    ids = torch.tensor([tok.encode(TEXT)])
    with torch.no_grad():
        chances = model(ids)[0].double().softmax(-1)
    lens = found.lenses[0]
    assert "".join(lens.tokens) == TEXT
    for at, reading in enumerate(lens.readings[-1]):
        best = chances[at].sort(descending=True)
        assert [choice.text for choice in reading.top] == [tok.decode([i]) for i in best.indices[:8].tolist()]
        assert [choice.probability for choice in reading.top] == pytest.approx(best.values[:8].tolist(), rel=1e-4)
        assert reading.entropy == pytest.approx(-sum(p * math.log(p) for p in chances[at].tolist()), rel=1e-4)
        if at + 1 < ids.size(1):
            right = chances[at, ids[0, at + 1]]
            assert reading.probability == pytest.approx(right.item(), rel=1e-4)
            assert reading.rank == 1 + int((chances[at] > right).sum())
    assert (lens.readings[-1][-1].probability, lens.readings[-1][-1].rank) == (None, None)
    assert torch.equal(lens.attention, attention_maps(model, ids))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_layer_s_reading_is_what_a_model_cut_off_there_would_say(found: Exploration, depth: int) -> None:
    """Without the final norm, or one block too late, the words would still look plausible."""
    model, tok = gpt2.load("shakespeare-mini"), gpt2.load_tokenizer("shakespeare-mini")
    model.h = model.h[:depth]
    model.use_attention(eager_attention)
    with torch.no_grad():
        chances = model(torch.tensor([tok.encode(TEXT)]))[0].double().softmax(-1)
    lens = found.lenses[0]
    assert lens.points == ("embed", "h.0", "h.1", "h.2", "h.3", "h.4")
    for row, reading in zip(chances, lens.readings[depth], strict=True):
        assert reading.top[0].text == tok.decode([int(row.argmax())])
        assert reading.top[0].probability == pytest.approx(row.max().item(), rel=1e-9)


def test_how_far_two_models_part_is_what_compare_says(found: Exploration) -> None:
    """explore and compare must use the same definition of a metric; transformers goes through the same hooks and names."""
    models = [gpt2.load(name).use_attention(eager_attention) for name in ("shakespeare-mini", "shakespeare-mini:bf16")]
    tok = gpt2.load_tokenizer("shakespeare-mini")
    ids = torch.tensor(tok.encode(TEXT))
    measured = measure_pair(*models, ids, Windows(len(ids) - 1))
    assert found.js[:-1] == pytest.approx(measured.js.tolist(), rel=1e-3, abs=1e-9)
    assert len(found.js) == len(ids)
    with explorer("shakespeare-mini", "shakespeare-mini") as opened:
        assert set(opened.look("O").js) == {0.0}
    with explorer("shakespeare-mini", "hf/shakespeare-mini") as opened:
        ours, theirs = opened.look("O Romeo").lenses
    for one, other in zip(ours.readings, theirs.readings, strict=True):
        assert [r.top[0].text for r in one] == [r.top[0].text for r in other]
        assert [r.entropy for r in one] == pytest.approx([r.entropy for r in other], rel=1e-4)


def test_two_that_read_differently_stand_beside_each_other_unlinked(chars: Path) -> None:
    """Tokens of different tokenizers cannot be compared: no difference may be shown."""
    with explorer("shakespeare-mini", str(chars)) as opened:
        found = opened.look("O Romeo")
    assert found.js is None
    assert [len(lens.tokens) for lens in found.lenses] == [3, 7]
    assert all(choice.text in TEXT for row in found.lenses[1].readings for r in row for choice in r.top)  # no padding
    assert found.html().count('role="listbox"') == 2


def test_json_holds_all_that_the_page_shows(found: Exploration) -> None:
    """Scripts read the JSON, not the page."""
    body = json.loads(found.to_json())
    assert (body["prompt"], body["js"]) == (TEXT, list(found.js))
    one = body["lenses"][0]
    assert one["readings"][2][4]["top"][0] == vars(found.lenses[0].readings[2][4].top[0])
    torch.testing.assert_close(torch.tensor(one["attention"]), found.lenses[0].attention, atol=6e-5, rtol=0)
    assert one["model"]["files"]["model.safetensors"]


def test_the_page_carries_the_same_figures(found: Exploration) -> None:
    """The page's data is packed: bytes in the wrong order would show another head."""
    data = json.loads(found.html().split('id="data">', 1)[1].split("</script>", 1)[0])
    side, lens = data["sides"][1], found.lenses[1]
    n = len(lens.tokens)
    packed = torch.frombuffer(bytearray(base64.b64decode(side["maps"])), dtype=torch.uint8).view(5, 5, n * (n + 1) // 2)
    for row in (0, 3, n - 1):
        start = row * (row + 1) // 2
        expected = lens.attention[3, 2, row, : row + 1] * 255
        torch.testing.assert_close(packed[3, 2, start : start + row + 1].float(), expected, atol=0.51, rtol=0)
    top, entropy, given, rank = side["readings"][4][6]
    reading = lens.readings[4][6]
    assert (data["texts"][top[0]], rank) == (reading.top[0].text.replace("\n", "⏎"), reading.rank)
    shown = reading.top[0].probability, reading.entropy, reading.probability
    assert (top[1], entropy, given) == pytest.approx(shown, rel=0.005)


def test_the_page_is_whole_by_itself_and_the_same_each_time(found: Exploration) -> None:
    """Users mail the page and open it offline. Which square of a head's map is which pair of tokens had to be counted."""
    text = found.html()
    for side in ("from", "to"):
        labels = text.split(f'<div class="{side}" aria-hidden="true">')[1].split("</div>")[0]
        assert labels.count("<span>") == len(found.lenses[0].tokens)
    assert text == found.html()
    assert_whole_by_itself(text)
    assert not re.search(r"url\(|https?:", text)
    assert ("<form" in text, "<form" in found.html(served=True)) == (False, True)


def test_numbers_that_are_none_leave_the_page_standing(chars: Path) -> None:
    """The page must open for a diverged model, too."""
    with explorer(str(chars)) as opened:
        opened.sides[0].program.wte.weight.data[:] = math.nan
        found = opened.look("O")
    json.loads(found.to_json(), parse_constant=pytest.fail)
    assert "–" in found.html()


def test_a_model_without_a_tokenizer_borrows_the_other_s_or_is_refused() -> None:
    """A prompt cannot be encoded without a tokenizer."""
    with pytest.raises(InputError, match="no tokenizer"), explorer("random:distilgpt2"):
        pass
