"""The model against a slow oracle written from the papers' formulas; initialisation, dropout and masks."""

import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support import forks
from support.oracle import assert_same, oracle
from support.random_models import random_model
from torch import Tensor

from gpt2 import model as module
from gpt2.config import ACTIVATIONS, GPT2Config
from gpt2.model import GPT2, Conv1D, eager_attention, eager_attention_upcast, sdpa_attention

TINY = GPT2Config(vocab_size=23, n_positions=7, n_embd=15, n_layer=2, n_head=3, n_inner=19, bos_token_id=None, eos_token_id=None)


@pytest.mark.parametrize(
    "changes",
    [
        *({"activation_function": name} for name in ACTIVATIONS),
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True, "scale_attn_by_inverse_layer_idx": True},
        {"n_inner": None},
        {"n_inner": 1},
        {"n_layer": 1},
        {"n_layer": 3},
        {"n_head": 1},
        {"n_head": 15},
        {"vocab_size": 1},
        {"layer_norm_epsilon": 0.3},
        {"n_embd": 1, "n_head": 1},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()),
)
def test_logits_are_the_papers(changes: dict) -> None:
    """A config switch must take effect on each attention path: the oracle computes every logit again."""
    config = replace(TINY, **changes)
    model = random_model(config)
    ids = torch.randint(config.vocab_size, (2, config.n_positions), generator=torch.Generator().manual_seed(1))
    expected = torch.stack([oracle(model.state_dict(), config, row.tolist()) for row in ids])
    for attend in (sdpa_attention, eager_attention, eager_attention_upcast):
        with torch.no_grad():
            assert_same(model.use_attention(attend)(ids), expected)


@pytest.mark.parametrize("attend", [sdpa_attention, eager_attention, eager_attention_upcast])
def test_a_padded_row_computes_what_it_computes_alone(attend: module.AttentionFunction) -> None:
    """Padding must not be attended to nor shift the positions; rows of padding only must not give NaN."""
    model = random_model(TINY).use_attention(attend)
    rows = [[5], [1, 2, 3], [9, 8, 7, 6, 5, 4, 3], []]
    ids = torch.tensor([[22] * (7 - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (7 - len(row)) + [1] * len(row) for row in rows])
    with torch.no_grad():
        for given in (mask, mask.bool(), mask.double()):
            logits = model(ids, attention_mask=given)
            assert logits.isfinite().all()
            for row, found in zip(rows[:3], logits, strict=False):
                assert_same(found[-len(row) :], oracle(model.state_dict(), TINY, row))


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    """Evaluation batches are padded on the right: the padding ids must not matter."""
    model = random_model(TINY)
    ids, mask = torch.tensor([[4, 5, 6, 0, 0]]), torch.tensor([[1, 1, 1, 0, 0]])
    with torch.no_grad():
        assert_same(model(ids, attention_mask=mask)[:, :3], model(ids[:, :3]))


def test_a_mask_of_the_wrong_shape_is_refused() -> None:
    """A (B, 1) mask while decoding would broadcast to an empty result instead of failing."""
    model = random_model(TINY)
    cache = model.new_cache(2)
    with torch.no_grad():
        model(torch.zeros(2, 3, dtype=torch.long), cache=cache)
        for shape in ((2, 1), (1, 4), (2, 3), (2, 5)):
            with pytest.raises(ValueError, match="must cover cached and new tokens"):
                model(torch.zeros(2, 1, dtype=torch.long), attention_mask=torch.ones(shape), cache=cache)


@pytest.mark.parametrize("padded", [False, True])
def test_gradients_agree_between_attention_paths(padded: bool) -> None:
    """A path may be right in the forward and wrong in the backward pass; every parameter must receive a gradient."""
    ids = torch.arange(12).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]) if padded else None
    gradients = []
    for attend in (sdpa_attention, eager_attention, eager_attention_upcast):
        model = random_model(TINY).use_attention(attend)
        logits = model(ids, attention_mask=mask)[:, 2:-1]
        F.cross_entropy(logits.flatten(0, 1), ids[:, 3:].flatten()).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert expected is not None, name
        assert expected.abs().max() > 0, name
        assert_same(gradients[1][name], expected)
        assert_same(gradients[2][name], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_upcast_attention_keeps_float32_inside(dtype: torch.dtype) -> None:
    """Scores may overflow float16, also under autocast. Control: plain attention in the same dtype exceeds the same bound."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 8, generator=generator).to(dtype) for _ in range(3))
    for magnify, scale in ((1.0, 1.0), (200.0, 2.5e-5)):  # the larger scores exceed 65504, float16's maximum
        arguments = q * magnify, k * magnify, v, None
        exact = eager_attention(*(x.double() for x in arguments[:3]), None, scale, 0.0)
        found, plain = (attend(*arguments, scale, 0.0) for attend in (eager_attention_upcast, eager_attention))
        assert found.dtype == dtype
        bound = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}  # float32 inside, one rounding at the end
        torch.testing.assert_close(found.double(), exact, **bound)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(plain.double(), exact, **bound)
    q, k, v = q.float(), k.float(), v.float()
    expected = eager_attention_upcast(q, k, v, None, 0.3, 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(eager_attention_upcast(q, k, v, None, 0.3, 0.0), expected, rtol=0, atol=0)


def test_conv1d_takes_any_leading_shape() -> None:
    """A (T, D) or transposed input must work, although `view` refuses it."""
    layer = Conv1D(3, 5)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(4, 3, 2).transpose(1, 2)
    torch.testing.assert_close(layer(x), x @ layer.weight + layer.bias)
    torch.testing.assert_close(layer(x[0]), x[0] @ layer.weight + layer.bias)
    assert "3 -> 5" in repr(layer)


WIDE = GPT2Config(vocab_size=400, n_positions=64, n_embd=48, n_layer=6, n_head=4)


def ill_drawn(model: GPT2) -> list[str]:
    """Names of the parameters whose mean or deviation differs from the papers' by more than five standard errors."""
    wrong = []
    for name, p in model.named_parameters():
        p = p.detach().double()
        if ".ln_" in f".{name}" or name.endswith("bias"):
            ok = bool((p == (1.0 if name.endswith("weight") else 0.0)).all())
        else:
            std = model.config.initializer_range / (math.sqrt(2 * model.config.n_layer) if "c_proj" in name else 1.0)
            ok = abs(float(p.mean())) < 5 * std / math.sqrt(p.numel())
            ok = ok and abs(float(p.std()) / std - 1) < 5 / math.sqrt(2 * p.numel())
            # A normal distribution, not a uniform one of the same deviation: 4.55 % lie beyond two deviations.
            tail = float((p.abs() > 2 * std).double().mean())
            ok = ok and abs(tail - 0.0455) < 5 * math.sqrt(0.0455 * 0.9545 / p.numel())
        if not ok:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("deviation", [0.02, 0.1])
def test_initial_weights(deviation: float) -> None:
    """A wrong deviation trains, but worse: a residual projection without 1/sqrt(2 n_layer), a bias that is not 0."""
    torch.manual_seed(0)
    model = GPT2(replace(WIDE, initializer_range=deviation))
    assert ill_drawn(model) == []


def test_initial_weights_control() -> None:
    """Negative controls: each of four mistakes is found and named."""
    torch.manual_seed(0)
    model = GPT2(WIDE)
    projections = [name for name, _ in model.named_parameters() if name.endswith("c_proj.weight")]
    assert len(projections) == 12
    with torch.no_grad():
        for name in projections:
            model.get_parameter(name).mul_(math.sqrt(12))
        assert ill_drawn(model) == projections
        model.initialise()
        model.h[2].attn.c_attn.bias.add_(1e-3)
        model.ln_f.weight.mul_(0.02)
        model.wpe.weight.uniform_(-0.02 * math.sqrt(3), 0.02 * math.sqrt(3))
    assert ill_drawn(model) == ["wpe.weight", "h.2.attn.c_attn.bias", "ln_f.weight"]


def test_initial_weights_follow_the_seed() -> None:
    """A run must be repeatable from its seed, and a private generator must leave the global one unchanged."""

    def drawn(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return GPT2(TINY).state_dict()

    first, again, other = drawn(3), drawn(3), drawn(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["h.0.attn.c_attn.weight"], other["h.0.attn.c_attn.weight"])
    model, before = GPT2(TINY), torch.get_rng_state()
    model.initialise(torch.Generator().manual_seed(3))
    assert all(torch.equal(first[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(before, torch.get_rng_state())


BUILD_XL = """
import os, sys
import torch
from gpt2.config import official_size
from gpt2.model import GPT2

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

modules, before, state = set(sys.modules), resident(), torch.get_rng_state()
model = GPT2(official_size("gpt2-xl"), initialise=False)
print(resident() - before)
print(sum(p.numel() for p in model.parameters()))
print(torch.equal(state, torch.get_rng_state()))
print(len(set(sys.modules) - modules))
model.h[0].mlp.c_fc.weight.detach().zero_()
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_building_without_weights_costs_nothing() -> None:
    """6.2 GB of normals were drawn to be replaced. Control: a tensor that is written."""
    run = forks.run("-c", BUILD_XL, strict=True, modules=forks.TORCH)
    growth, parameters, untouched, imported, touched = run.stdout.splitlines()
    assert int(parameters) == 1_557_611_200
    assert float(growth) < 20
    assert untouched == "True"
    assert int(imported) == 0  # a layer on the meta device imports torch's compiler
    assert float(touched) > float(growth) + 35


DROPPING = replace(TINY, embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3)


def test_dropout_stands_where_the_paper_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Possible bugs: one dropout too many or too few, a wrong rate, or dropout after `eval()`, which the kernel applies."""
    calls, dropout, fused = [], F.dropout, F.scaled_dot_product_attention

    def watch(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        calls.append((tuple(x.shape), p if training else 0.0))
        return dropout(x, p, training, inplace)

    def watch_fused(*args: Tensor, **kwargs: object) -> Tensor:
        calls.append(("fused", kwargs["dropout_p"]))
        return fused(*args, **kwargs)

    monkeypatch.setattr(F, "dropout", watch)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watch_fused)
    embedded, branch = ((2, 4, 15), 0.1), ((2, 4, 15), 0.3)
    for attend, weights in ((eager_attention, (2, 3, 4, 4)), (sdpa_attention, "fused")):
        model, ids = GPT2(DROPPING).use_attention(attend), torch.arange(8).view(2, 4)
        model.train()(ids)
        assert calls == [embedded, *[(weights, 0.2), branch, branch] * 2]
        calls.clear()
        model.eval()(ids)
        assert {p for _, p in calls} == {0.0}
        calls.clear()


@pytest.mark.parametrize("attend", [sdpa_attention, eager_attention, eager_attention_upcast])
def test_dropout_acts_on_the_right_tensor(attend: module.AttentionFunction) -> None:
    """Counting calls cannot tell a branch from the residual stream: with a rate of 1, the rest can be computed exactly."""
    none = replace(TINY, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ids = torch.tensor([[3, 1, 4, 1, 5]])

    def trained(config: GPT2Config) -> GPT2:
        model = GPT2(config, initialise=False).double().use_attention(attend).train()
        model.load_state_dict(random_model(TINY).state_dict())
        return model

    with torch.no_grad():
        reference = trained(none)
        # Both branches are zero: the embeddings reach the last norm unchanged.
        stream = reference.wte(ids) + reference.wpe(torch.arange(5))
        assert_same(trained(replace(none, resid_pdrop=1.0)).hidden(ids), reference.ln_f(stream))
        # Embeddings and positions are zero: the text has no effect, the branches still run.
        silent = trained(replace(none, embd_pdrop=1.0)).hidden(ids)
        reference.wte.weight.zero_()
        reference.wpe.weight.zero_()
        assert_same(silent, reference.hidden(ids))
        # All attention weights are zero: each block's attention adds only its output bias.
        reference = trained(none)
        for block in reference.h:
            block.attn.c_proj.weight.zero_()
        assert_same(trained(replace(none, attn_pdrop=1.0)).hidden(ids), reference.hidden(ids))


@pytest.mark.parametrize("tied", [True, False])
def test_tables_change_together(tied: bool) -> None:
    """A cropped vocabulary with an untied head of the old size would give logits of tokens that have no embedding."""
    model = random_model(GPT2Config(9, 4, 6, 1, 2, bos_token_id=None, eos_token_id=None, tie_word_embeddings=tied))
    before = model.state_dict()
    assert model.with_tables(lambda rows: rows[:7]) is model
    assert model.config.vocab_size == model.wte.num_embeddings == model.head_table.num_embeddings == 7
    assert model(torch.tensor([[1, 2, 6]])).shape == (1, 3, 7)
    assert all(torch.equal(tensor, before[name][: len(tensor)]) for name, tensor in model.state_dict().items())
    assert ("lm_head.weight" in model.state_dict()) is not tied
    assert (model.head_table is model.wte) is tied
