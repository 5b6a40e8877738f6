"""What the fits of a dump's operators must not conclude from too few tokens, and what must not end a diagnosis."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from port.test_walk import checkpoint

from gpt2.config import GPT2Config
from gpt2.port.fits.attention import weights_fit
from gpt2.port.fits.lacking import clipped
from gpt2.port.fits.linear import Library, Linear
from gpt2.port.fits.norm import Norm
from gpt2.port.fits.observed import Fit, Observed, distinct, laid
from gpt2.port.fits.wiring import activation_fit, embedding_fit
from gpt2.port.graph import split

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
    return Linear(Library(STATE), f"{name}.weight", "mlp.c_fc", weight, bias, MODEL.config, in_time), weight, bias


def test_equal_rows_of_a_batch_are_one_token_for_a_regression() -> None:
    """Two prompts that are the same: two equal tokens fit any bias; four tokens, two of which differ, any weight of a norm."""
    layer, weight, bias = c_fc()
    x = random(1, 2, len(weight)).expand(2, -1, -1)
    wrong = random(1, 2, len(bias), seed=1).expand(2, -1, -1)
    last = torch.tensor([[False, True], [False, True]])
    assert next(layer._bias(observed(wrong), x, last), None) is None
    own = STATE["h.0.ln_1.weight"], STATE["h.0.ln_1.bias"]
    norm = Norm("ln_1", *own, EPS, {"h.0.ln_1.weight": own[0]})
    assert next(norm._affine(observed(wrong[..., : len(weight)]), x, every(2, 2)), None) is None
    assert distinct(torch.cat([x[0], x[0]])) == 2
    # Controls: another bias, and another weight, of tokens that differ
    x = random(1, 6, len(weight))
    assert next(layer._bias(observed(x @ weight + 3 * bias + 1), x, every(1, 6)), None) is not None
    normed = torch.nn.functional.layer_norm(x, (len(weight),), 2 * own[0], own[1], EPS)
    assert next(norm._affine(observed(normed), x, every(1, 6)), None) is not None


def test_one_token_shows_no_other_position() -> None:
    """Any array of a stream's size was the embedding, with numbers fitted to it: the search was lost at once."""
    ids, wte, wpe = torch.tensor([[3]]), STATE["wte.weight"], STATE["wpe.weight"]
    right = wte[ids] + wpe[:1]
    assert embedding_fit(observed(random(*right.shape), right), ids, wte, wpe, every(1, 1)) is None
    ids = torch.tensor([[3, 1, 4, 1]])
    assert embedding_fit(observed(wte[ids] + wpe[1:5]), ids, wte, wpe, every(1, 4)) is not None  # control


def weighed(q: torch.Tensor, k: torch.Tensor, heads: int, seen: Observed) -> Fit | None:
    """Return what attention's weights are, of q and k (B, T, D); GPT-2's factor of the scores is 0.5."""
    config = GPT2Config(n_embd=4 * heads, n_head=heads)
    return next(weights_fit(seen, *(split(y, heads) for y in (q, k)), config, 0, seen.wrong_rows()), None)


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("heads", [1, 3])
def test_attention_weights_of_few_tokens_are_not_explained_by_as_many_numbers(tokens: int, heads: int) -> None:
    """Any weights of two tokens are GPT-2's with a factor for each head, or with a bias for each distance."""
    q, k = random(1, tokens, 12), random(1, tokens, 12, seed=1)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    weights = random(1, heads, tokens, tokens, seed=2).masked_fill(future, -torch.inf).softmax(-1)
    weights = weights * 0.9 if tokens == 1 else weights
    seen = observed(weights, torch.ones(tokens, tokens).double().tril().expand_as(weights) / torch.arange(1, tokens + 1)[:, None])
    assert weighed(q, k, heads, seen) is None


def test_a_factor_of_the_scores_is_read_off_a_few_more() -> None:
    """Control of the test above."""
    q, k = random(1, 4, 6), random(1, 4, 6, seed=1)
    scores = (q[:, None] @ k[:, None].mT).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -torch.inf)
    fit = weighed(q, k, 1, observed((0.31 * scores).softmax(-1), (0.5 * scores).softmax(-1)))
    assert fit is not None
    assert "multiplied by 0.31" in fit.faults[0].detail


SOFTMAXES = {  # from exponentials of scores (B, H, T, T): the cause, and words of it
    "two queries are not computed": (lambda e: e.tril() * (torch.arange(9) < 7)[:, None] / e.tril().sum(-1, keepdim=True), None),
    "masked scores are 2 less": (
        lambda e: (e.log() - 2 * torch.ones(9, 9).triu(1)).softmax(-1),
        ("mask-multiplied", "-2 is added"),
    ),
    "each query has a factor": (lambda e: (e.log() * torch.linspace(0.5, 0.8, 9).roll(4)[:, None]).exp().tril(), None),
}


@pytest.mark.parametrize("way", SOFTMAXES)
def test_a_softmax_is_not_called_another_one(way: str) -> None:
    """Queries of zeros were a softmax of other scores, and a factor of its own for each query was one for all."""
    q, k = random(1, 9, 8), random(1, 9, 8, seed=1)
    by_heads = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (q, k))
    scores = 0.5 * next(by_heads) @ next(by_heads).mT
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


def test_rounded_extremes_are_no_limits() -> None:
    """The largest entry of four equal tokens, just beyond its rounding, was a limit at which values are cut off."""
    right = random(1, 1, 30).expand(1, 4, -1).clone()
    value = torch.where(right == right.max(), right - 2e-6, right)
    assert clipped(observed(value, right), every(1, 4), "mlp.act", "gelu-variant") is None
    fit = clipped(observed(right.clamp(max=0.5), right), every(1, 4), "mlp.act", "gelu-variant")  # control
    assert fit is not None
    assert fit.faults[0].detail == "values above 0.5 are cut off"


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


@pytest.mark.parametrize(
    "mutant",
    [
        lambda x: 0.5 * x * (1 + torch.tanh(0.6 * (x + 0.06 * x**3))),
        lambda x: 0.5 * x * (1 + torch.tanh(0.044715 * (x + math.sqrt(2 / math.pi) * x**3))),
        lambda x: 0.5 * x * (1 + torch.erf(1.5 * x)),
        lambda x: x * torch.sigmoid(1.3 * x),
    ],
)
def test_other_constants_of_gelu_are_read_off_rounded_results(mutant: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The rounded results stood for the function itself, and all that followed from them seemed to be another fault."""
    x = 1.5 * random(2, 12, 96, seed=1)
    y, gelu = mutant(x), torch.nn.functional.gelu(x, approximate="tanh")
    fit = activation_fit(Observed(y.half().double(), 2.0**-11 * y.abs() + 1e-7, 1e-6, gelu, 0), x, every(2, 12))
    assert fit is not None
    assert [fault.id for fault in fit.faults] == ["gelu-variant"]
    assert float((fit.value - y).square().mean()) < 0.1 * float((y.half() - y).square().mean())


def test_an_array_is_tried_once_in_each_order_of_its_axes() -> None:
    """In a batch of one, each order came four times: the two likeliest arrays were one, and the twelve tried were three."""
    entry = random(5, 6)
    orders = list(laid(entry, (1, 5, 2, 3)))
    assert torch.equal(orders[0].reshape(5, 6), entry)
    assert len({tuple(one.flatten().tolist()) for one in orders}) == len(orders)


def head(wte: torch.Tensor) -> Linear:
    none = torch.zeros(len(wte), dtype=torch.float64)
    return Linear(Library(STATE), "wte.weight", "logits", wte.T, none, MODEL.config, in_time)


def test_a_bias_is_looked_up_in_a_small_model_with_a_large_vocabulary() -> None:
    """A head with a bias of more entries than all vectors of the checkpoint raised a RuntimeError of torch."""
    wte = random(3000, MODEL.config.n_embd)
    layer = head(wte)
    x, bias = random(1, 4, MODEL.config.n_embd, seed=1), random(3000, seed=2)
    fit = next(layer._bias(observed(x @ wte.T + bias), x, every(1, 4)), None)
    assert fit is not None
    assert fit.faults[0].detail == "the bias is not the checkpoint's"


def test_logits_in_another_order_are_not_a_transposed_head() -> None:
    """The head's columns are rows of wte, as they must be; the words were: the weight is used transposed."""
    wte = STATE["wte.weight"]
    layer = head(wte)
    x = random(1, 9, wte.shape[1])
    fit = next(layer.fits(observed(x @ wte.roll(1, 0).T), x, every(1, 9)), None)
    assert fit is not None
    assert (fit.faults[0].id, "another order" in fit.faults[0].detail) == ("wrong-tensor", True)
