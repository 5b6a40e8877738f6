"""The last word of a passage, scored with models that are right or wrong by construction, and by a plain loop."""

import math
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from support.commands import refusal
from support.random_models import uneven_model
from torch import Tensor

from gpt2.data.bpe import chars_of, ends, made_bpe, train_bpe
from gpt2.errors import InputError
from gpt2.measure import last_words
from gpt2.measure.last_words import last_words_change, score_last_words

PASSAGES = (
    "the cat sat on the mat",
    "he opened the old door, and behind it lay the sea",
    "naïve, she said",
    "a  b",
    "to be or not to be\n that is the question",
    "the cat sat on the mat",
)
BPE = train_bpe(" ".join(PASSAGES) * 3, 300)
CHARS = chars_of(" ".join(PASSAGES))


def words_of(passage: str) -> tuple[str, str]:
    """The template of lm-evaluation-harness and its rule for spaces: context and target."""
    context, target = " ".join(passage.split(" ")[:-1]), " " + passage.split(" ")[-1]
    spaces = len(context) - len(context.rstrip())
    return (context[:-spaces], context[-spaces:] + target) if spaces else (context, target)


def knows(tokenizer, passages, *, but: int | None = None, gap: float = 40.0):
    """A model of these passages: certain of the next token; ``but`` replaces the last token of some words."""
    then: dict[tuple[int, ...], int] = {}
    for passage in passages:
        ids = tokenizer.encode(passage)
        for end in range(1, len(ids)):
            then[tuple(ids[:end])] = ids[end]
        if but is not None:
            then[tuple(ids[:-1])] = (ids[-1] + but) % tokenizer.n_vocab

    def logits(ids: Tensor) -> Tensor:
        out = torch.zeros(*ids.shape, tokenizer.n_vocab, dtype=torch.float64)
        for row, line in enumerate(ids.tolist()):
            for end in range(1, len(line) + 1):
                if (following := then.get(tuple(line[:end]))) is not None:
                    out[row, end - 1, following] = gap
        return out

    return logits


@pytest.mark.parametrize("tokenizer", [BPE, CHARS], ids=["bpe", "chars"])
def test_a_model_that_knows_is_always_right(tokenizer):
    found = score_last_words(knows(tokenizer, PASSAGES), tokenizer, PASSAGES, context=64)
    assert found.right == (True,) * len(PASSAGES)
    assert (found.accuracy.value, found.accuracy.high, found.n, found.context) == (1, 1, 6, 64)
    assert 0.5 < found.accuracy.low < 1  # six passages are too few
    assert found.perplexity.value == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("tokenizer", [BPE, CHARS], ids=["bpe", "chars"])
def test_a_word_is_wrong_where_one_of_its_tokens_is(tokenizer):
    """A word counts only if all its tokens are right: counting tokens, or only the first, gives too high scores."""
    found = score_last_words(knows(tokenizer, PASSAGES, but=1, gap=3.0), tokenizer, PASSAGES, context=64)
    assert found.right == (False,) * len(PASSAGES)
    assert (found.accuracy.value, found.accuracy.low) == (0, 0)
    sure, other = (math.log(math.exp(3) + tokenizer.n_vocab - 1) - x for x in (3, 0))
    lengths = [len(tokenizer.encode(p)) - len(tokenizer.encode(words_of(p)[0])) for p in PASSAGES]
    assert max(lengths) > 1
    expected = [(length - 1) * sure + other for length in lengths]
    assert found.losses == pytest.approx(expected, rel=1e-12)
    assert found.perplexity.value == pytest.approx(math.exp(math.fsum(expected) / len(expected)), rel=1e-12)


@pytest.mark.parametrize("context", [64, 12])
@pytest.mark.parametrize("batch", [1, 40, 1024])
@pytest.mark.parametrize("tokenizer", [BPE, CHARS], ids=["bpe", "chars"])
def test_in_any_batch_and_cut_from_the_left(tokenizer, batch, context, monkeypatch):
    """Possible bugs: a row that sees its padding, a passage cut at its end, positions off by one. Compare with one at a time."""
    monkeypatch.setattr(last_words, "BATCH", batch)
    model = uneven_model(tokenizer.n_vocab, 64)
    reported, cut = [], []

    def bounded(ids: Tensor) -> Tensor:
        assert ids.numel() <= batch or len(ids) == 1
        return model(ids)

    found = score_last_words(bounded, tokenizer, PASSAGES, context=context, progress=reported.append)
    for passage, loss, right in zip(PASSAGES, found.losses, found.right, strict=True):
        before, target = words_of(passage)
        whole, length = tokenizer.encode(before + target), len(tokenizer.encode(before))
        read = whole[-(context + 1) :]
        cut.append(len(read) < len(whole))
        with torch.inference_mode():
            logits = model(torch.tensor([read[:-1]]))[0, -(len(whole) - length) :]
        targets = torch.tensor(whole[length:])
        assert loss == pytest.approx(F.cross_entropy(logits, targets, reduction="sum").item(), rel=1e-10)
        assert right == bool((logits.argmax(-1) == targets).all())
    assert any(cut) == (context < 64)
    assert reported[-1] == "last words: 6 of 6 passages"
    assert len({f"{loss:.9g}" for loss in found.losses}) == 5  # the two equal passages, which may be in two batches


def test_a_single_word_is_predicted_from_end_of_text():
    """lm-evaluation-harness's prefix token; without one there is no input for the prediction."""
    vocab = {token: i for token, i in BPE.vocab.items() if token not in BPE.special_tokens}
    ended = made_bpe(vocab | {"<|endoftext|>": len(vocab)}, BPE.merges, roles=ends("<|endoftext|>"))
    model = uneven_model(ended.n_vocab, 64)
    found = score_last_words(model, ended, ["question"], context=64)
    ids = [ended.eot, *ended.encode(" question")]
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:-1]]))[0]
    assert found.losses[0] == pytest.approx(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum").item(), rel=1e-10)
    with pytest.raises(InputError, match=r"^passage 1 is the single word 'mat'; give passages of two words or more$"):
        score_last_words(uneven_model(CHARS.n_vocab, 64), CHARS, ["the mat", "mat"], context=64)


def test_what_cannot_be_scored():
    said = refusal(score_last_words, uneven_model(CHARS.n_vocab, 64), CHARS, ["the question"], context=8)
    assert said == "passage 0: its last word 'question' is 9 tokens, not 1 .. 8; leave this passage out"


def test_two_models_are_compared_passage_by_passage():
    """For two models that differ on one passage in six, the difference has a much smaller interval than each accuracy."""
    many = PASSAGES * 50
    good = score_last_words(knows(BPE, PASSAGES), BPE, many, context=64)
    half = score_last_words(knows(BPE, PASSAGES[:1], gap=40.0), BPE, many, context=64)
    assert half.right == (True, False, False, False, False, True) * 50
    change = last_words_change(half, good)
    assert change.accuracy.value == pytest.approx(4 / 6)
    assert change.accuracy.low < 4 / 6 < change.accuracy.high
    assert change.ratio.value == pytest.approx(good.perplexity.value / half.perplexity.value, rel=1e-9)
    same = last_words_change(good, good)
    assert asdict(same) == {"accuracy": {"value": 0, "low": 0, "high": 0}, "ratio": {"value": 1, "low": 1, "high": 1}}
