"""Mistakes that no list has are read off an operator's recorded inputs and result; and what must not be read off too few."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from port.test_walk import checkpoint
from support.programs.fourteenth import FourteenthBed, Shape

import gpt2
from gpt2.config import GPT2Config
from gpt2.port.alternatives import alternative
from gpt2.port.fits.affine import Linear, Norm, other_weights
from gpt2.port.fits.nodes import activation_fit, embedding_fit, scores_fit
from gpt2.port.fits.observed import Fit, Observed, distinct, dropped
from gpt2.port.graph import Formula, Model, Program, split
from gpt2.port.search.observe import laid

Change = Callable[[Model, int], dict[str, Formula]]
SHAPE = Shape(1, 24, 3, 41, 16, 9, 11)
MODEL = checkpoint()
STATE = {name: tensor.detach().double() for name, tensor in MODEL.state_dict().items()}
EPS = MODEL.config.layer_norm_epsilon


def kept(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.rand(x.shape, generator=torch.Generator().manual_seed(3)) < 0.9, x / 0.9, 0.0)


def backwards(simulation: Model, layer: int) -> dict[str, Formula]:
    w = simulation.site(layer)
    return {"mlp.c_fc": lambda c, s: s["ln_2"] @ w["mlp.c_fc.weight"].flip(1) + w["mlp.c_fc.bias"]}


def slower_steps(simulation: Model, layer: int) -> dict[str, Formula]:
    factors = torch.where(torch.arange(9) < 5, 1.0, 0.6).double()[:, None]
    return {"attn.scores": lambda c, s: c.right("attn.scores", s) * factors}


# What has a number, or a table, that no list has: the cause, words of it, where it is first seen, and the stages.
FAULTS: dict[str, tuple[str, str, str, Change]] = {
    "columns backwards": ("not-loaded", "not the checkpoint's in any known way", "h.0.mlp.c_fc", backwards),
    "dropout in three places": (
        *("dropout-active", "p = 0.1", "h.0.attn.weights"),
        lambda m, n: alternative.changed(kept, "attn.weights", "mid", "mlp.c_proj"),
    ),
    "sums of two scales": (
        *("residual-scaled", "0.7 times the block's input", "h.0.mid"),
        lambda m, n: {"mid": lambda c, s: 0.7 * s["x"] + 0.3 * s["attn.c_proj"]},
    ),
    "temperature in steps": ("scale-wrong", "from token 5 on", "h.0.attn.weights", slower_steps),
}
QUICK = (None, "columns backwards")


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> FourteenthBed:
    return FourteenthBed(Path(tmp_path_factory.mktemp("fits")) / "one", SHAPE)


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.slow] * (f not in QUICK)) for f in (None, *FAULTS)])
def test_a_mistake_that_no_list_has_is_read_off_its_operator(bed: FourteenthBed, fault: str | None) -> None:
    """Bug: each unseen set of programs fell with causes that nobody had listed. Control: without a fault, the dump is equal."""
    model = gpt2.load(str(bed.model), dtype="float64")
    simulation = Model(model.state_dict(), model.config, torch.from_numpy(bed.ids))
    values = simulation.trace(Program({0: FAULTS[fault][3](simulation, 0)} if fault else {}))
    arrays = {
        f"a{n}": value.float().numpy() for n, (name, value) in enumerate(values.items()) if name not in ("x", "end", "logits")
    }
    said = gpt2.diagnose({"ids": bed.ids, "logits": values["logits"].float().numpy(), **arrays}, model)
    assert [cause.id for cause in said.causes[:1]] == ([FAULTS[fault][0]] if fault else [])
    assert said.ok == (fault is None)
    if fault:
        assert said.first_divergence is not None
        assert said.first_divergence.point == FAULTS[fault][2]
        assert FAULTS[fault][1] in said.causes[0].detail


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def observed(value: torch.Tensor, right: torch.Tensor | None = None) -> Observed:
    return Observed(value, torch.zeros_like(value), 1e-6, torch.zeros_like(value) if right is None else right, 0)


def every(rows: int, tokens: int) -> torch.Tensor:
    return torch.ones(rows, tokens, dtype=torch.bool)


def said(fits: object) -> list[str]:
    fit = next(iter(fits), None)  # type: ignore[call-overload]
    return [] if fit is None else [fault.id for fault in fit.faults]


def c_fc() -> tuple[Linear, torch.Tensor, torch.Tensor]:
    weight, bias = STATE["h.0.mlp.c_fc.weight"], STATE["h.0.mlp.c_fc.bias"]
    return Linear("mlp.c_fc", weight, bias), weight, bias


@pytest.mark.parametrize("bent", [0.0, 0.01])
def test_a_result_that_is_not_linear_in_its_input_is_not_called_other_weights(bent: float) -> None:
    """Control of `not-loaded`: with more tokens than inputs, only what is linear in them may be another weight's product."""
    _, weight, bias = c_fc()
    x, other = random(2, len(weight), len(weight)), random(*weight.shape, seed=1)
    value = x @ other + bias + bent * (x @ other).square()
    assert other_weights(observed(value, x @ weight + bias), x, every(*x.shape[:2])) == (bent == 0)


@pytest.mark.parametrize("mistake", ["other weights", "tokens mixed", "weights partly lost"])
def test_few_tokens_show_other_weights_only_if_they_stay_as_like_each_other(mistake: str) -> None:
    """Bug: with fewer tokens than inputs, any value was `not-loaded`, as where heads and rows of the batch are exchanged."""
    draw = torch.Generator().manual_seed(3)
    x, bias = torch.randn(2, 9, 24, generator=draw).double(), torch.randn(64, generator=draw).double()
    weight, other = torch.randn(2, 24, 64, generator=draw).double()
    value = {
        "other weights": x @ other + bias,
        "tokens mixed": x.transpose(1, 2).reshape(x.shape) @ weight + bias,
        "weights partly lost": x @ (weight * (weight.abs() > 0.5)) + bias,
    }[mistake]
    assert other_weights(observed(value, x @ weight + bias), x, every(2, 9)) == (mistake == "other weights")


def test_equal_rows_of_a_batch_are_one_token_for_a_regression() -> None:
    """Two prompts that are the same: two equal tokens fit any bias; four tokens, two of which differ, any weight of a norm."""
    layer, weight, bias = c_fc()
    x, wrong = random(1, 2, len(weight)).expand(2, -1, -1), random(1, 2, len(bias), seed=1).expand(2, -1, -1)
    assert not said(layer._bias(observed(wrong), x, torch.tensor([[False, True], [False, True]])))
    own = STATE["h.0.ln_1.weight"], STATE["h.0.ln_1.bias"]
    norm = Norm("ln_1", *own, EPS, {"h.0.ln_1.weight": own[0]})
    assert not said(norm._affine(observed(wrong[..., : len(weight)]), x, every(2, 2)))
    assert distinct(torch.cat([x[0], x[0]])) == 2
    # Controls: another bias, and another weight, of tokens that differ
    x = random(1, 6, len(weight))
    assert said(layer._bias(observed(x @ weight + 3 * bias + 1), x, every(1, 6))) == ["wrong-tensor"]
    normed = torch.nn.functional.layer_norm(x, (len(weight),), 2 * own[0], own[1], EPS)
    assert said(norm._affine(observed(normed), x, every(1, 6))) == ["wrong-tensor"]


def test_an_epsilon_that_no_list_has_is_read_off_a_norm() -> None:
    """One constant. Control: what is divided by its median is no norm with another epsilon."""
    weight, bias = STATE["h.0.ln_1.weight"], STATE["h.0.ln_1.bias"]
    norm, x = Norm("ln_1", weight, bias, EPS, {}), random(1, 6, len(weight))
    value = torch.nn.functional.layer_norm(x, (len(weight),), weight, bias, 0.37)
    fit = next(norm._divided(observed(value), x, every(1, 6)))
    assert (fit.faults[0].id, "epsilon is 0.37;" in fit.faults[0].detail) == ("layernorm-eps", True)
    other = x / x.abs().median(-1, keepdim=True).values * weight + bias
    assert said(norm._divided(observed(other), x, every(1, 6))) == ["layernorm-not-normalising"]


def test_one_token_shows_no_other_position() -> None:
    """Any array of a stream's size was the embedding, with numbers fitted to it: the search was lost at once."""
    ids, wte, wpe = torch.tensor([[3]]), STATE["wte.weight"], STATE["wpe.weight"]
    right = wte[ids] + wpe[:1]
    assert embedding_fit(observed(random(*right.shape), right), ids, wte, wpe, every(1, 1)) is None
    ids = torch.tensor([[3, 1, 4, 1]])
    assert embedding_fit(observed(wte[ids] + wpe[1:5]), ids, wte, wpe, every(1, 4)) is not None  # control


def weighed(factor: torch.Tensor | float, tokens: int) -> Fit | None:
    """Return the fit of weights whose scores have a factor; GPT-2's is 0.5."""
    q, k = random(1, tokens, 8), random(1, tokens, 8, seed=1)
    scores = split(q, 2) @ split(k, 2).mT
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    value, right = ((one * scores).masked_fill(future, -torch.inf).softmax(-1) for one in (factor, 0.5))
    config = GPT2Config(n_embd=8, n_head=2)
    seen = observed(value, right)
    return scores_fit(seen, split(q, 2), split(k, 2), config, 0, seen.wrong_rows())


def test_a_factor_of_the_scores_is_read_off_several_of_them() -> None:
    """Any weights of two tokens are GPT-2's with a factor, and a factor of its own for each query was one for all."""
    fit = weighed(0.31, 4)
    assert fit is not None
    assert "multiplied by 0.31" in fit.faults[0].detail
    assert weighed(0.31, 2) is None
    assert weighed(torch.linspace(0.5, 0.8, 9).double().roll(4)[:, None], 9) is None


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


@pytest.mark.parametrize("p", [0.1, 0.4])
def test_dropout_is_seen_in_any_stage_by_its_share_and_its_factor(p: float) -> None:
    """Bug: dropout of embeddings, weights and branches at once was undetermined. Control: other factors are no dropout."""
    right, draw = random(2, 9, 24), torch.rand(2, 9, 24, generator=torch.Generator().manual_seed(1))
    values = (torch.where(draw >= p, right / (1 - p), 0.0), torch.where(draw >= p, right * 2.5, 0.0), right * 1.1)
    found = [dropped(observed(value, right), every(2, 9), "mlp.c_proj") for value in values]
    assert [said([one or Fit((), right)]) for one in found] == [["dropout-active"], [], []]


def test_an_array_is_tried_once_in_each_order_of_its_axes() -> None:
    """In a batch of one, each order came four times: the two likeliest arrays were one, and the twelve tried were three."""
    orders = list(laid(entry := random(5, 6), (1, 5, 2, 3)))
    assert torch.equal(orders[0].reshape(5, 6), entry)
    assert len({tuple(one.flatten().tolist()) for one in orders}) == len(orders)
