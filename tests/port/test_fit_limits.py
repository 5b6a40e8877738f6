"""What the fits of a dump's operators must not conclude from too few tokens, and what must not end a diagnosis."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from port.test_walk import checkpoint

from gpt2.port.dump.fits.attention import Weights
from gpt2.port.dump.fits.bank import Bank
from gpt2.port.dump.fits.elsewhere import read_elsewhere, rescaled
from gpt2.port.dump.fits.library import Library, place_of
from gpt2.port.dump.fits.linear import Linear
from gpt2.port.dump.fits.mixtures import Mixed, each_token
from gpt2.port.dump.fits.normalising import Norm
from gpt2.port.dump.fits.observed import Fit, Observed, distinct, laid
from gpt2.port.dump.fits.partial import clipped
from gpt2.port.dump.fits.slots import Slots
from gpt2.port.dump.fits.softmaxes import Softmaxes
from gpt2.port.dump.fits.wiring import activation_fit, embedding_fit

MODEL = checkpoint()
STATE = {name: tensor.detach().double() for name, tensor in MODEL.state_dict().items()}
EPS = MODEL.config.layer_norm_epsilon


def observed(value: torch.Tensor, right: torch.Tensor | None = None) -> Observed:
    return Observed(value, torch.zeros_like(value), 1e-6, torch.zeros_like(value) if right is None else right, 0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def every(rows: int, tokens: int) -> torch.Tensor:
    return torch.ones(rows, tokens, dtype=torch.bool)


def in_time() -> None:
    """There is no limit of time."""


def c_fc() -> tuple[Linear, torch.Tensor, torch.Tensor]:
    name = "h.0.mlp.c_fc"
    weight, bias = STATE[f"{name}.weight"], STATE[f"{name}.bias"]
    return Linear(Library(STATE, MODEL.config), f"{name}.weight", "mlp.c_fc", weight, bias, {}), weight, bias


def test_equal_rows_of_a_batch_are_one_token_for_a_regression() -> None:
    """Two prompts that are the same: two equal tokens fit any bias; four tokens, two of which differ, any weight of a norm."""
    layer, weight, bias = c_fc()
    x = random(1, 2, len(weight)).expand(2, -1, -1)
    wrong = random(1, 2, len(bias), seed=1).expand(2, -1, -1)
    last = torch.tensor([[False, True], [False, True]])
    assert next(layer._bias(observed(wrong), x, last), None) is None
    assert next(read_elsewhere(layer, observed(wrong), x, last), None) is None
    own = STATE["h.0.ln_1.weight"], STATE["h.0.ln_1.bias"]
    norm = Norm("ln_1", *own, EPS, {"h.0.ln_1.weight": own[0]}, {})
    assert next(norm._affine(observed(wrong[..., : len(weight)]), x, every(2, 2)), None) is None
    assert distinct(torch.cat([x[0], x[0]])) == 2
    # Controls: another bias, and another weight, of tokens that differ
    x = random(1, 6, len(weight))
    assert next(layer._bias(observed(x @ weight + 3 * bias + 1), x, every(1, 6)), None) is not None
    normed = torch.nn.functional.layer_norm(x, (len(weight),), 2 * own[0], own[1], EPS)
    assert next(norm._affine(observed(normed), x, every(1, 6)), None) is not None


def test_one_token_shows_no_factor_for_each_feature_of_its_position() -> None:
    """Any array of a stream's size was the embedding, for each feature had a factor of its own: the search was lost at once."""
    ids, wte, wpe = torch.tensor([[3]]), STATE["wte.weight"], STATE["wpe.weight"]
    right = wte[ids] + wpe[:1]
    assert embedding_fit(observed(random(*right.shape), right), ids, wte, wpe, every(1, 1)) is None
    ids = torch.tensor([[3, 1, 4, 1]])
    places = wpe[:4] * torch.linspace(0, 1, wpe.shape[1], dtype=torch.float64)
    assert embedding_fit(observed(wte[ids] + places), ids, wte, wpe, every(1, 4)) is not None  # control


def weights_of(q: torch.Tensor, k: torch.Tensor, heads: int) -> Weights:
    by_heads = [y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in (q, k)]
    slots = Slots(by_heads[0], Bank(by_heads[1:], by_heads[1:], [0], [0.0]), 0.7, in_time)
    return Weights(q, k, {}, slots)


def weighed(q: torch.Tensor, k: torch.Tensor, heads: int, seen: Observed) -> Fit | None:
    """Return what attention's weights are, as the operators ask for it."""
    rows, weights = seen.wrong_rows(), weights_of(q, k, heads)
    softmaxes = Softmaxes(weights.slots.q, weights.slots.bank.keys[:-1].transpose(0, 1)[None], 0.7, in_time)
    return softmaxes.fit(seen, rows) or weights.fit(seen, rows) or softmaxes.tabulated(seen, rows)


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_weights_of_few_tokens_are_not_explained_by_as_many_numbers(tokens: int, heads: int) -> None:
    """Any weights of two tokens are GPT-2's with a factor for each head, or with a bias for each distance."""
    q, k = random(1, tokens, 6), random(1, tokens, 6, seed=1)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = random(1, heads, tokens, tokens, seed=2).masked_fill(future, -torch.inf).softmax(-1)
    weights = weights * 0.9 if tokens == 1 else weights
    seen = observed(weights, torch.ones(tokens, tokens).double().tril().expand_as(weights) / torch.arange(1, tokens + 1)[:, None])
    assert weighed(q, k, heads, seen) is None


def test_a_factor_of_the_scores_is_read_off_a_few_more() -> None:
    """Control of the test above."""
    q, k = random(1, 4, 6), random(1, 4, 6, seed=1)
    scores = (q[:, None] @ k[:, None].mT).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf)
    seen = observed((0.31 * scores).softmax(-1), (0.7 * scores).softmax(-1))
    fit = weights_of(q, k, 1).fit(seen, seen.wrong_rows())
    assert fit is not None
    assert "multiplied by 0.31" in fit.faults[0].detail


def over_empty(powers: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return a softmax over ``count`` scores of zero more, from token ``first`` on."""
    return powers / (powers.sum(-1, keepdim=True) + count * (torch.arange(powers.shape[2]) >= first)[:, None])


SOFTMAXES = {  # from exponentials of scores (B, H, T, T): the cause, and words of it
    "two queries are not computed": (lambda e: e.tril() * (torch.arange(9) < 7)[:, None] / e.tril().sum(-1, keepdim=True), None),
    "there is no mask": (lambda e: e / e.sum(-1, keepdim=True), ("mask-missing", "")),
    "masked scores are 2 less": (
        lambda e: (e.log() - 2 * torch.ones(9, 9).triu(1)).softmax(-1),
        ("mask-multiplied", "-2 is added"),
    ),
    "an empty slot in steps": (lambda e: over_empty(e.tril(), 4, 1), ("mask-multiplied", "of zero")),
    "softmax-one": (lambda e: over_empty(e.tril(), 0, 1), ("softmax-missing", "softmax-one")),
    "each query has a factor": (
        lambda e: (e.log() * torch.linspace(0.5, 0.8, 9).roll(4)[:, None]).exp().tril(),
        None,
    ),
}


@pytest.mark.parametrize("way", SOFTMAXES)
def test_a_softmax_is_not_called_another_one(way: str) -> None:
    """Queries of zeros were a softmax over 10**300 slots, no mask was 0 added to it, and an empty slot was softmax-one."""
    q, k = random(1, 9, 16), random(1, 9, 16, seed=1)
    by_heads = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (q, k))
    scores = 0.7 * next(by_heads) @ next(by_heads).mT
    made, cause = SOFTMAXES[way]
    weights = made(scores.exp())
    weights = weights / weights.sum(-1, keepdim=True) if way == "each query has a factor" else weights
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    fit = weighed(q, k, 2, observed(weights, scores.masked_fill(future, -math.inf).softmax(-1)))
    if cause is None:
        assert fit is None, fit.faults
    else:
        assert fit is not None
        assert (fit.faults[0].id, cause[1] in fit.faults[0].detail) == (cause[0], True), fit.faults


def test_a_soft_cap_is_not_fitted_to_one_weight() -> None:
    """Two tokens and one head have one weight, which some cap gives; so has one weight just beyond its rounding."""
    q, k = random(1, 2, 6), random(1, 2, 6, seed=1)
    even = torch.tensor([[1.0, 0.0], [0.45, 0.55]], dtype=torch.float64)[None, None]
    right = (0.7 * q[:, None] @ k[:, None].mT).masked_fill(torch.ones(2, 2, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    assert weighed(q, k, 1, observed(even, right)) is None


def test_rounded_extremes_are_no_limits() -> None:
    """The largest entry of four equal tokens, just beyond its rounding, was a limit at which values are cut off."""
    right = random(1, 1, 30).expand(1, 4, -1).clone()
    value = torch.where(right == right.max(), right - 2e-6, right)
    assert clipped(observed(value, right), every(1, 4), "mlp.act", "gelu-variant") is None
    fit = clipped(observed(right.clamp(max=0.5), right), every(1, 4), "mlp.act", "gelu-variant")  # control
    assert fit is not None
    assert fit.faults[0].detail == "values above 0.5 are cut off"


def test_a_norm_of_one_row_or_token_does_not_run_over_the_batch_or_the_tokens() -> None:
    """A norm whose weight is zero gives its bias, as a norm over an axis of one entry would."""
    weight, bias = STATE["h.0.ln_1.weight"], 1 + random(len(STATE["h.0.ln_1.weight"]))
    for shape in ((1, 3), (3, 1)):
        x = random(*shape, len(weight))
        fit = Norm("ln_1", weight, bias, EPS, {}, {}).fit(observed(bias.expand_as(x), x), x, every(*shape))
        assert fit is None or fit.faults[0].id != "layernorm-axis", fit.faults


def test_one_head_does_not_attend_to_other_heads() -> None:
    """Values that were not mixed at all were those of tokens whose one head attends to its other heads."""
    q, k, v = (random(1, 1, 5, 8, seed=n) for n in range(3))
    assert not list(each_token(q, k, v, 0.35))


def test_a_weight_of_almost_zeros_has_no_factors() -> None:
    """Factors that were all lost ended in a RuntimeError: the largest of none."""
    layer, weight, bias = c_fc()
    x = 5 * random(1, 6, len(weight))
    layer.bias = 10 * random(len(bias), seed=4)
    almost = layer.bias + 1e-4 * random(1, 6, len(bias), seed=3)
    assert next(rescaled(layer, observed(almost, x @ weight + layer.bias), x, every(1, 6)), None) is None


def test_values_that_are_mixed_otherwise_need_more_features_than_tokens() -> None:
    """The last of as many tokens as features: any mixture is a sum of all values with some factors."""
    weights = torch.ones(1, 1, 6, 6, dtype=torch.float64).tril() / torch.arange(1, 7)[:, None]
    v = random(1, 1, 6, 6)
    seen, last = observed(random(1, 1, 6, 6, seed=1), weights @ v), torch.arange(6)[None] == 5
    assert next(Mixed(weights, v, {}, in_time)._left_out(seen, last), None) is None
    even = torch.full((1, 1, 6, 6), 1 / 6, dtype=torch.float64)  # as without a mask, of equal scores: no inverse
    assert Mixed(even, v, {}, in_time).fit(observed(random(1, 1, 6, 6, seed=1), even @ v), every(1, 6)) is None


def test_an_activation_is_no_function_of_one_number() -> None:
    """A layer that gives one number throughout ended in a division by zero, an array of zeros in an activation times 0."""
    x = torch.zeros(1, 2, 8, dtype=torch.float64)
    assert activation_fit(observed(random(1, 2, 8)), x, every(1, 2)) is None
    assert activation_fit(observed(x), random(1, 2, 8), every(1, 2)) is None
    x = random(1, 12, 64)
    assert activation_fit(observed(random(1, 12, 64, seed=1) + 0.9 * x), x, every(1, 12)) is None
    fit = activation_fit(observed(x.atan()), x, every(1, 12))  # control
    assert fit is not None
    assert "none of those known" in fit.faults[0].detail


def test_an_array_is_tried_once_in_each_order_of_its_axes() -> None:
    """In a batch of one, each order came four times: the two likeliest arrays were one, and the twelve tried were three."""
    entry = random(5, 6)
    orders = list(laid(entry, (1, 5, 2, 3)))
    assert torch.equal(orders[0].reshape(5, 6), entry)
    assert len({tuple(one.flatten().tolist()) for one in orders}) == len(orders)


def test_a_bias_is_looked_up_in_a_small_model_with_a_large_vocabulary() -> None:
    """A head with a bias of more entries than all vectors of the checkpoint raised a RuntimeError of torch."""
    wte = random(3000, MODEL.config.n_embd)
    layer = Linear(Library(STATE, MODEL.config), "wte.weight", "logits", wte.T, torch.zeros(3000, dtype=torch.float64), {})
    x, bias = random(1, 4, MODEL.config.n_embd, seed=1), random(3000, seed=2)
    fit = next(layer._bias(observed(x @ wte.T + bias), x, every(1, 4)), None)
    assert fit is not None
    assert fit.faults[0].detail == "the bias is not the checkpoint's"


def test_logits_in_another_order_are_not_a_transposed_head() -> None:
    """The head's columns are rows of wte, as they must be; the words were: the weight is used transposed."""
    wte = STATE["wte.weight"]
    layer = Linear(Library(STATE, MODEL.config), "wte.weight", "logits", wte.T, torch.zeros(len(wte), dtype=torch.float64), {})
    x = random(1, 9, wte.shape[1])
    fit = layer.fit(observed(x @ wte.roll(1, 0).T), x, every(1, 9))
    assert fit is not None
    assert (fit.faults[0].id, "another order" in fit.faults[0].detail) == ("wrong-tensor", True)


@pytest.mark.slow
def test_a_vector_is_found_among_others_without_a_copy_for_each_place() -> None:
    """At gpt2's shape, each place of 300,000 was compared with the 3,072 of c_fc's bias at once: 15 GB."""
    program = """
import resource, torch
from gpt2.port.dump.fits.library import place_of
flat = torch.randn(300_000, dtype=torch.float64)
wanted = flat[123_456 : 123_456 + 3072] + 1e-9
resource.setrlimit(resource.RLIMIT_DATA, (2_000_000_000,) * 2)
print(place_of(wanted, flat, 1e-7), place_of(wanted.flip(0), flat, 1e-7), place_of(torch.ones(400_000).double(), flat, 1e-7))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["123456", "None", "None"], ran.stderr[-400:]
    zeros = torch.zeros(500, dtype=torch.float64)
    assert place_of(zeros[:9], torch.cat([zeros, random(4)]), 0.0) == 0


@pytest.mark.slow
def test_tokens_that_are_scaled_alike_are_found_without_all_pairs_at_once() -> None:
    """A norm over several tokens compared each of 16 rows of 1,024 tokens with each other at once: 6 GB."""
    program = """
import resource, torch
from gpt2.port.dump.fits.normalising import _alike
factor = torch.linspace(1, 9, 2**12, dtype=torch.float64).exp().repeat(2)
resource.setrlimit(resource.RLIMIT_DATA, (1_000_000_000,) * 2)
count, mean, square = _alike(factor, -factor, factor, factor)
print(count.unique().tolist(), float((mean / factor - 1).abs().max()) < 1e-6)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "[2.0] True", ran.stdout + ran.stderr[-400:]
