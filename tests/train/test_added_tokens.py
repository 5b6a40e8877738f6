"""New tokens of a fine-tune: how they begin, and that every way of storing the model keeps them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.commands import refusal
from support.training import outcome, stop_at

import gpt2
from gpt2.checkpoint.export import export
from gpt2.data import Tokenizer
from gpt2.data.bpe import chars_of
from gpt2.data.library import LibraryTokenizer
from gpt2.train import models
from gpt2.train.loop import train
from gpt2.train.recipe import Data, Lora, Recipe, build

SIZE = 300
NEW = ("<|scene|>", "OPHELIA:", " so sleep")
TEXT = "A<|scene|>OPHELIA:\nNo more, so sleepy; so sleep.<|endoftext|> <|scene|>OPHELIA:"


@pytest.fixture(scope="module")
def base(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a BPE, to fine-tune; read only."""
    folder = tmp_path_factory.mktemp("base") / "run"
    train(replace(recipe, data=replace(recipe.data, tokenizer="bpe", vocab_size=SIZE)), folder)
    return str(folder / "best")


@pytest.fixture(scope="module")
def tuned(recipe: Recipe) -> Recipe:
    return replace(recipe, name="added", steps=6, eval_every=3, data=Data(path=recipe.data.path, add_tokens=NEW))


@pytest.fixture(scope="module")
def run(tuned: Recipe, base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed fine-tune with the new tokens; read only."""
    folder, events = tmp_path_factory.mktemp("added") / "run", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpt2.data.batches.BLOCK", 100)  # they are counted in blocks
        assert train(tuned, folder, init=base, report=events.append).stopped == "finished"
    assert "'<|scene|>' 0, 'OPHELIA:' 1" in events[0].notes[-1]
    return folder


def log_probabilities(model: gpt2.GPT2, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).double().log_softmax(-1)


def grown(recipe: Recipe) -> tuple[gpt2.GPT2, Tokenizer]:
    return models.with_tokens(gpt2.load(), gpt2.load_tokenizer(), recipe)


def test_a_new_token_begins_as_the_mean_of_its_parts_and_leaves_the_rest(tuned: Recipe) -> None:
    """Possible bugs: a row from other ids, a head that is not tied, old rows that changed, too much probability taken."""
    start, tokenizer = gpt2.load(), gpt2.load_tokenizer()
    model, new = grown(tuned)
    table, size = model.wte.weight.detach(), tokenizer.n_vocab
    assert (len(table), new.n_vocab, model.config.vocab_size) == (size + 3,) * 3
    assert torch.equal(table[:size], start.wte.weight)
    for row, text in enumerate(NEW, size):
        parts = table[tokenizer.encode(text)].mean(0)
        assert 0 < (table[row] - parts).norm() < 0.05 * parts.norm()
        assert new.encode(text) == [row]
    ids = torch.tensor([tokenizer.encode("OPHELIA:\nNo more, and so sleep.\n")])
    before, after = log_probabilities(start, ids), log_probabilities(model, ids)
    kl = (before.exp() * (before - after[..., :size].log_softmax(-1))).sum(-1)
    assert kl.abs().max() < 1e-12
    assert after[..., size:].exp().sum(-1).mean() < 2e-2
    with torch.no_grad():  # control: rows three times as long
        model.wte.weight[size:] = 3 * table[ids[0, 4]]
    assert log_probabilities(model, ids)[..., size:].exp().sum(-1).mean() > 2e-2


def test_a_head_of_its_own_grows_too(tuned: Recipe) -> None:
    """A new token without a row in the head has no logit; its row there follows the head's rows, not the embedding's."""
    tied = gpt2.load()
    model = gpt2.GPT2(replace(tied.config, tie_word_embeddings=False), initialise=False)
    model.load_state_dict(tied.state_dict() | {"lm_head.weight": -2 * tied.wte.weight})
    old = tied.config.vocab_size
    model, tokenizer = models.with_tokens(model, gpt2.load_tokenizer(), tuned)
    assert len(model.lm_head.weight) == len(model.wte.weight) == model.config.vocab_size >= tokenizer.n_vocab
    assert torch.equal(model.lm_head.weight[:old], -2 * tied.wte.weight)
    parts = gpt2.load_tokenizer().encode(NEW[0])
    expected = -2 * tied.wte.weight[parts].mean(0)
    row = model.lm_head.weight[tokenizer.encode(NEW[0])[0]]
    assert (row - expected).norm() < 0.1 * expected.norm()


def test_a_padded_embedding_gives_its_spare_rows(tuned: Recipe) -> None:
    """A new token of a model with 2,100 rows must take row 2,048, which the tokenizer counts as the next id."""
    model, tokenizer = gpt2.load(), gpt2.load_tokenizer()
    model.wte = torch.nn.Embedding.from_pretrained(torch.nn.functional.pad(model.wte.weight.detach(), (0, 0, 0, 52)))
    model.config = replace(model.config, vocab_size=2100)
    padded, new = models.with_tokens(model, tokenizer, tuned)
    assert torch.equal(padded.wte.weight[: new.n_vocab], grown(tuned)[0].wte.weight)
    assert padded.wte.weight.shape == (2100, 160)
    assert not padded.wte.weight[new.n_vocab :].any()


def test_an_earlier_token_without_a_row_gets_one(tuned: Recipe) -> None:
    """A [PAD] that was added and not resized: its row was whatever the memory held."""
    start, size = gpt2.load(), gpt2.load_tokenizer().n_vocab
    model, new = models.with_tokens(start, gpt2.load_tokenizer().with_tokens(["[PAD]"]), tuned)
    table = model.wte.weight.detach()
    assert len(table) == new.n_vocab == size + 4
    mean = table[:size].mean(0)
    assert 0 < (table[size] - mean).norm() < table[:size].std(0).norm() / 20


def test_saved_loaded_and_resumed(run: Path, tuned: Recipe, base: str, tmp_path: Path) -> None:
    """A resumed run must not add the tokens again, nor lose that they are matched in a text."""
    assert train(tuned, tmp_path, init=base, report=stop_at(4)).stopped == "interrupted"
    train(tuned, tmp_path, init=base)
    assert outcome(tmp_path)[0] == outcome(run)[0]
    tokenizer = gpt2.load_tokenizer(str(run / "best"))
    assert isinstance(tokenizer, LibraryTokenizer)
    assert tokenizer.matched.keys() == set(NEW)
    model = gpt2.load(str(run / "best"))
    assert models.with_tokens(model, tokenizer, tuned) == (model, tokenizer)  # a second fine-tune by the same recipe


def test_verify_holds(run: Path, base: str) -> None:
    """A table longer than the base's tokenizer must not be refused, nor differ from transformers': in logits and ids of texts."""
    assert gpt2.verify(str(run / "best"), quick=True).ok
    ours = gpt2.load_tokenizer(str(run / "best"))
    assert [ours.encode(TEXT).count(token) for token in range(SIZE, SIZE + 3)] == [2, 2, 2]
    assert ours.encode(TEXT) != gpt2.load_tokenizer(base).encode(TEXT)


@pytest.mark.parametrize("format", ["hf", "gguf", "llmc"])
def test_exports_hold_the_new_tokens(run: Path, tmp_path: Path, format: str) -> None:
    """GGUF says of every token whether it is matched in a text; llm.c's file has no encoder, but the tokens' bytes."""
    export(str(run / "best"), tmp_path, format=format)
    exported, best = gpt2.load(str(tmp_path)), gpt2.load(str(run / "best"))
    assert torch.equal(exported.wte.weight, best.wte.weight)
    if format == "llmc":
        content = (tmp_path / "tokenizer.bin").read_bytes()
        assert content.endswith(b"".join(bytes([len(token)]) + token.encode() for token in NEW))
    else:
        assert gpt2.load_tokenizer(str(tmp_path)).encode(TEXT) == gpt2.load_tokenizer(str(run / "best")).encode(TEXT)


def test_what_cannot_be_added_is_refused(tuned: Recipe, recipe: Recipe) -> None:
    """A token with two ids, or a row that nothing trains, would go unnoticed."""
    bpe = gpt2.load_tokenizer()
    assert "'the' is in the vocabulary already" in refusal(bpe.with_tokens, ["<|new|>", "the"])
    assert "'' is empty" in refusal(bpe.with_tokens, [""])
    assert "surrogate" in refusal(bpe.with_tokens, ["\ud800"])
    assert "untrained" in refusal(replace, tuned, lora=Lora(r=2))
    assert "ids already" in refusal(build, {"data": {"tokens": "x", "add_tokens": ["<|new|>"]}}, "recipe")
    assert chars_of("abc").with_tokens([]).n_vocab == 3
    assert chars_of("abc").with_tokens(["<|new|>"]).encode("ab<|new|>c") == [0, 1, 3, 2]
