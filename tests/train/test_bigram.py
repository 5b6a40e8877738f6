"""The bigram baseline: trained by the same loop, saved in its own files, and refused as a GPT-2."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import gpt2
from gpt2.data import from_directory
from gpt2.errors import InputError
from gpt2.optim import Optim
from gpt2.train.bigram import Bigram, load_model
from gpt2.train.card import write_card
from gpt2.train.corpus import corpus
from gpt2.train.loop import Evaluated, train
from gpt2.train.recipe import NewModel


@pytest.fixture
def bigram(recipe):
    optim = Optim(lr=1e-1, min_lr=1e-4, warmup=0, weight_decay=0.0, clip=0.0)
    return replace(recipe, model=NewModel(kind="bigram"), steps=200, batch_size=64, eval_every=100, save_every=100, optim=optim)


def test_it_learns_what_counting_pairs_would_tell(bigram, tmp_path):
    """The baseline must reach the loss of counted pairs: a weaker baseline makes every model look good."""
    events = []
    train(bigram, tmp_path / "run", report=events.append)
    ids = corpus(bigram)
    counts = np.zeros((ids.tokenizer.n_vocab,) * 2)
    np.add.at(counts, (ids.train_ids[:-1], ids.train_ids[1:]), 1)

    def loss(added):
        p = (counts + added) / (counts + added).sum(1, keepdims=True)
        return -np.log(p[ids.val_ids[:-1], ids.val_ids[1:]]).mean()

    counted = min(loss(added) for added in (0.001, 0.01, 0.1, 1.0))
    first, *_, last = [event.val.loss for event in events if isinstance(event, Evaluated)]
    assert first == pytest.approx(np.log(ids.tokenizer.n_vocab))  # all zeros: every character is equally likely
    assert last == pytest.approx(counted, abs=0.04)


def test_it_is_loaded_here_and_refused_as_a_gpt2(bigram, tmp_path):
    train(replace(bigram, steps=1), tmp_path / "run")
    best = tmp_path / "run" / "best"
    model = load_model(best)
    assert isinstance(model, Bigram)
    n = from_directory(best).n_vocab
    assert model(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, n)
    with pytest.raises(InputError, match="model_type is 'bigram', not 'gpt2'"):
        gpt2.load(str(best))
    assert write_card(tmp_path / "run") == ""  # no other program opens a table of bigrams
    assert not (best / "README.md").exists()
    with pytest.raises(InputError, match="a bigram is trained from scratch"):
        train(bigram, tmp_path / "other", init=str(best))
