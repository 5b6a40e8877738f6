"""Every metric against its written-out definition, and against models with a known score."""

import itertools
import math

import pytest
import torch
from support.random_models import uneven_model

from gpt2.data.bpe import chars_of, train_bpe
from gpt2.errors import InputError
from gpt2.measure.metrics import (
    PART,
    LanguageScore,
    differing_bits,
    language_scores,
    max_abs,
    relative_error,
    token_losses,
    worst_relative_error,
)
from gpt2.measure.windows import Windows
from gpt2.model import GPT2

NAN, INF = math.nan, math.inf
TEXT = "Now is the winter of our discontent\nMade glorious summer by this sun of York;\n" * 3 + "– café 😀\n"


def uniform(vocab: int) -> GPT2:
    """A model without preferences: every logit is zero."""
    model = uneven_model(vocab)
    model.ln_f.weight.data.zero_()
    model.ln_f.bias.data.zero_()
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(13, (61,), generator=torch.Generator().manual_seed(4))


def test_errors_by_hand():
    a, b = torch.tensor([3.0, 4.0, 1.0]), torch.tensor([3.0, 4.0, 0.0])
    assert max_abs(a, b) == 1.0
    assert relative_error(a, b) == pytest.approx(1 / 5)
    assert worst_relative_error(a, b) == pytest.approx(1 / math.sqrt(25 / 3))
    assert max_abs(-a, b) == 8.0  # the size of a difference, not the difference of sizes


def test_errors_are_computed_in_float64():
    """Differences of half-precision tensors, computed in half precision, round to zero or overflow."""
    a, b = torch.full((4,), 60000.0, dtype=torch.float16), torch.full((4,), -60000.0, dtype=torch.float16)
    assert max_abs(a, b) == 120000.0
    assert relative_error(a, b) == 2.0
    assert worst_relative_error(a, b) == 2.0
    big = torch.full((4,), 1e30)
    assert relative_error(big * 2, big) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("measure", [relative_error, worst_relative_error])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_is_infinitely_wrong(measure, bad):
    """NaN compares as neither larger nor smaller than a bound, so a metric must not return NaN."""
    good = torch.tensor([1.0, 2.0])
    assert measure(torch.tensor([1.0, bad]), good) == INF
    assert measure(good, torch.tensor([1.0, bad])) == INF


def test_a_reference_of_zeros_and_tensors_without_entries():
    zero, empty = torch.zeros(3), torch.zeros(0)
    for measure in (relative_error, worst_relative_error):
        assert measure(zero, zero) == 0.0
        assert measure(torch.ones(3), zero) > 1e300
        assert measure(empty, empty) == 0.0
    assert max_abs(empty, empty) == 0.0


@pytest.mark.parametrize("at", [0, PART - 1, PART, -1])
@pytest.mark.parametrize("turned", [False, True])
def test_a_tensor_of_several_parts_is_measured_whole(at, turned):
    """Possible bugs: a missing part, a part compared with another one, a NaN of the first part that the next hides."""
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(5, PART // 2 + 3, dtype=torch.float64, generator=generator)
    b = b.t() if turned else b  # not contiguous
    a = b.clone(memory_format=torch.contiguous_format)
    a.view(-1)[at] += 3
    assert max_abs(a, b) == pytest.approx(3)
    assert relative_error(a, b) == pytest.approx(3 / float(b.square().sum().sqrt()))
    assert worst_relative_error(a, b) == pytest.approx(3 / float(b.square().mean().sqrt()))
    a.view(-1)[at] = NAN
    assert math.isnan(max_abs(a, b))
    assert relative_error(a, b) == worst_relative_error(a, b) == INF


@pytest.mark.parametrize("measure", [max_abs, relative_error, worst_relative_error])
def test_tensors_of_different_shapes_are_infinitely_far_apart(measure):
    """Broadcasting would call a row equal to a matrix of such rows; raising would hide where a model is broken."""
    assert measure(torch.ones(3), torch.ones(2, 3)) == measure(torch.tensor(1.0), torch.ones(2, 3)) == INF


@pytest.mark.parametrize("measure", [relative_error, worst_relative_error])
def test_equal_infinities_are_no_difference(measure):
    """A mask of -inf in both models made every error infinite, or its root mean square zero."""
    a, b = torch.tensor([1.0, -INF, 3.0]), torch.tensor([1.0, -INF, 3.5])
    assert measure(a, a) == 0.0
    assert measure(b, a) == measure(b.nan_to_num(neginf=0.0), a.nan_to_num(neginf=0.0)) > 0
    assert measure(torch.tensor([1.0, INF, 3.0]), a) == INF
    assert measure(torch.tensor([NAN, -INF, 3.0]), a) == INF


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_differing_bits_counts_entries_and_sees_what_equality_does_not(dtype):
    """(3, 1) against (3,) would count nine comparisons, or one of three."""
    a = torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype)
    b = a.clone()
    assert differing_bits(a, b) == 0
    b[0, 1], b[1, 2] = 1, 0
    assert differing_bits(a, b) == differing_bits(a.T, b.T) == 2
    if dtype.is_floating_point:
        zero, one = torch.tensor([0.0, NAN], dtype=dtype), torch.tensor(1.0, dtype=dtype)
        assert differing_bits(zero, zero.clone()) == 0  # equal NaN have equal bits
        assert differing_bits(zero, torch.tensor([-0.0, NAN], dtype=dtype)) == 1
        assert differing_bits(one, one + torch.finfo(dtype).eps) == 1
    for other in (torch.zeros(3), torch.zeros(1, 3), torch.zeros(3, 1, dtype=torch.bfloat16), torch.zeros(3, 1).int()):
        with pytest.raises(ValueError, match="cannot be compared bit by bit"):
            differing_bits(torch.zeros(3, 1), other)


def test_token_losses_are_negative_log_likelihoods():
    """A loss in bfloat16 has two digits, and a mean of a million of them none: half precision is converted to float32."""
    logits, targets = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)), torch.tensor([[0, 4, 2], [1, 1, 3]])
    expected = -logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(token_losses(logits, targets).double(), expected, rtol=0, atol=1e-6)
    half = logits.bfloat16()
    assert torch.equal(token_losses(half, targets), token_losses(half.float(), targets))
    assert (token_losses(half, targets).dtype, token_losses(logits.double(), targets).dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("stride", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("context", [1, 2, 7, 8])
def test_windows_score_every_token_but_the_first_once(context, stride):
    """All statistics of a text use this definition; the last window is as long as the others."""
    for n in range(2, 40):
        if (stride or context) > context:
            continue
        windows = Windows(context, stride)
        found = list(windows.of(n))
        assert [target for window in found for target in range(window.first + 1, window.end + 1)] == list(range(1, n))
        assert {window.end - window.start for window in found} == {min(context, n - 1)}
        assert all(0 <= window.start <= window.first < window.end < n for window in found)
        assert all(second.first - first.first <= (stride or context) for first, second in itertools.pairwise(found[1:]))
        for batch_size in (1, 3, None):
            run = list(windows.batches(torch.arange(n), batch_size))
            assert [window for _, group in run for window in group] == found
            assert all(len(inputs) == len(group) <= (batch_size or 1024) for inputs, group in run)
            rows = [row for inputs, _ in run for row in inputs.tolist()]
            assert rows == [list(range(window.start, window.end)) for window in found]


def test_bits_per_byte_of_characters_and_bpe_compare():
    """Without preferences, a model needs log2(V) bits per token, over the bytes of the tokens: the cost of an encoder."""
    for tokenizer in (chars_of(TEXT), train_bpe(TEXT, 300)):
        tokens = torch.tensor(tokenizer.encode(TEXT))
        lengths = torch.tensor([len(tokenizer.token_bytes(i)) for i in range(tokenizer.n_vocab)])
        score = language_scores(uniform(tokenizer.n_vocab), tokens, lengths, Windows(8))[0]
        first = len(tokenizer.token_bytes(int(tokens[0])))
        assert score.bytes == len(TEXT.encode()) - first  # not characters: the dash alone has three
        whole = math.log2(tokenizer.n_vocab) * (len(tokens) - 1)
        assert score.perplexity == pytest.approx(tokenizer.n_vocab, rel=1e-12)
        assert score.bits_per_byte == pytest.approx(whole / (len(TEXT.encode()) - first), rel=1e-12)


def test_dropout_is_off_while_scoring_and_the_mode_is_put_back(ids):
    model = uneven_model(13)
    expected = language_scores(model, ids, torch.ones(13).long(), Windows(8))[0].loss
    for block in model.h:
        block.mlp.resid_dropout.p = 0.5
    model.train()
    assert language_scores(model, ids, torch.ones(13).long(), Windows(8))[0].loss == expected
    assert model.training
    with pytest.raises(IndexError):
        language_scores(model, ids + 13, torch.ones(13).long(), Windows(8))[0]
    assert model.training
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("length", "context", "stride", "says"),
    [
        (1, 8, None, "a text of 1 tokens has none to predict"),
        (9, 9, None, "context 9 is not within the model's 1 .. 8 positions"),
        (9, 0, None, "context 0 is not within"),
        (9, 8, 9, "stride 9 is not within 1 .. 8"),
    ],
)
def test_protocols_that_skip_tokens_are_refused(ids, length, context, stride, says):
    """With a stride larger than the context, losses were read from the wrong end of a window."""
    with pytest.raises(InputError, match=says):
        language_scores(uneven_model(13), ids[:length], torch.ones(13).long(), Windows(context, stride))[0]
    if context == 0:
        with pytest.raises(InputError, match="context 0: a token is predicted from at least 1"):
            language_scores(lambda inputs: uneven_model(13)(inputs), ids, torch.ones(13).long(), Windows(0))[0]


def test_a_hopeless_loss_is_an_infinite_perplexity_not_an_error():
    assert LanguageScore(1e4, 1, 1, 8, 8).perplexity == INF
    assert LanguageScore(INF, 1, 1, 8, 8).perplexity == INF
    assert math.isnan(LanguageScore(NAN, 1, 1, 8, 8).perplexity)
    assert LanguageScore(math.log(29.41), 1, 1, 8, 8).perplexity == pytest.approx(29.41)
