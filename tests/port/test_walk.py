"""`diagnose` recognises formulas by value in any layout, and says where it knows none; a test replaces a port's functions."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support import hf_layouts
from torch import Tensor, nn

from gpt2 import GPT2
from gpt2.config import GPT2Config
from gpt2.port.graph import Model
from gpt2.port.recording.pool import Pool, collect
from gpt2.port.search.walk import Walked, search
from gpt2.port.terms.tolerance import UNITS

# All sizes differ, and no size is the square root of another.
CONFIG = GPT2Config(vocab_size=67, n_positions=19, n_embd=21, n_layer=2, n_head=3, n_inner=52, bos_token_id=0, eos_token_id=0)
ONE = replace(CONFIG, n_layer=1)  # a search takes a half of the time
IDS = torch.randperm(67, generator=torch.Generator().manual_seed(3))[:16].view(2, 8)


def checkpoint(config: GPT2Config = CONFIG) -> GPT2:
    """Our model in float64; its weights are as large as trained ones, so that an epsilon has an effect."""
    model = GPT2(config, initialise=False).eval().double()
    weights = hf_layouts.weights(config)
    model.load_state_dict(
        {name: (w * 0.3 if w.ndim > 1 else 1 + w * 0.2 if ".weight" in name else w * 0.2) for name, w in weights.items()}
    )
    return model


class Port(nn.Module):
    """GPT-2 as methods; the functions in `wrong` replace methods, and get the port as their first argument."""

    def __init__(self, model: GPT2, layout: str = "batch", wrong: dict[str, Callable] | None = None) -> None:
        super().__init__()
        self.w = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.config, self.layout, self.wrong = model.config, layout, wrong or {}
        self.probe = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def __getattribute__(self, name: str):
        get = super().__getattribute__
        if name.startswith("do_") and name[3:] in get("wrong"):
            change = get("wrong")[name[3:]]
            return lambda *args: change(self, *args)
        return get(name)

    def affine(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def do_norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], 1e-5)

    def do_embed(self, ids: Tensor) -> Tensor:
        return self.w["wte.weight"][ids] + self.w["wpe.weight"][: ids.size(1)]

    def do_act(self, x: Tensor, n: int) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def do_scale(self, scores: Tensor, n: int) -> Tensor:
        return scores / math.sqrt(self.config.head_dim)

    def do_soft(self, scores: Tensor, n: int) -> Tensor:
        return scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf).softmax(-1)

    def do_split(self, y: Tensor, n: int) -> Tensor:
        return y.view(*y.shape[:2], self.config.n_head, -1).transpose(1, 2)

    def do_merge(self, y: Tensor, n: int) -> Tensor:
        return y.transpose(1, 2).flatten(2)

    def do_project(self, y: Tensor, n: int) -> Tensor:
        return self.affine(y, f"h.{n}.attn.c_proj")

    def do_attend(self, x: Tensor, n: int) -> Tensor:
        q, k, v = self.affine(x, f"h.{n}.attn.c_attn").chunk(3, -1)
        if self.layout == "time":  # (T, B, D) and (B H, T, K)
            heads, (b, t, d) = self.config.n_head, x.shape
            q, k, v = (y.transpose(0, 1).reshape(t, b * heads, -1).transpose(0, 1) for y in (q, k, v))
            y = torch.bmm(self.do_soft(self.do_scale(torch.bmm(q, k.mT), n), n), v)
            return self.do_project(y.transpose(0, 1).reshape(t, b, d).transpose(0, 1), n)
        q, k, v = (self.do_split(y, n) for y in (q, k, v))
        y = self.do_soft(self.do_scale(q @ k.mT, n), n) @ v
        return self.do_project(self.do_merge(y, n), n)

    def do_feed(self, x: Tensor, n: int) -> Tensor:
        return self.affine(self.do_act(self.affine(x, f"h.{n}.mlp.c_fc"), n), f"h.{n}.mlp.c_proj")

    def do_block(self, x: Tensor, n: int) -> Tensor:
        x = x + self.do_attend(self.do_norm(x, f"h.{n}.ln_1"), n)
        return x + self.do_feed(self.do_norm(x, f"h.{n}.ln_2"), n)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.do_embed(ids)
        for n in range(self.config.n_layer):
            x = self.do_block(x, n)
        return self.do_norm(x, "ln_f") @ self.w["wte.weight"].T + 0 * self.probe


def walked(layout: str = "batch", config: GPT2Config = CONFIG, model: GPT2 | None = None, **wrong: Callable) -> Walked:
    model = model or checkpoint(config)
    pool = collect(Port(model, layout, wrong), IDS, config)
    return search(pool, model.state_dict(), model, Model(model.state_dict(), config, IDS))


def causes_of(result: Walked) -> list[tuple[str, str]]:
    return [(cause.id, cause.where) for cause in result.causes]


# Formulas that replace those of the port. What a formula is called, and where, is shown by test_alternatives.py and, in realistic
# ports, by test_diagnosis_ports.py.


def act(function: Callable[[Tensor], Tensor], *blocks: int) -> Callable:
    return lambda port, x, n: function(x) if not blocks or n in blocks else Port.do_act(port, x, n)


def squared(port: Port, x: Tensor, n: int) -> Tensor:
    """A block whose feed-forward's result is squared, which is nothing that is known."""
    if n:
        return Port.do_block(port, x, n)
    x = x + port.do_attend(port.do_norm(x, "h.0.ln_1"), 0)
    return x + port.do_feed(port.do_norm(x, "h.0.ln_2"), 0) ** 2


ERF, NO_SCALE = {"act": act(F.gelu)}, {"scale": lambda port, s, n: s}


@pytest.mark.parametrize("layout", ["batch", "time"])
def test_the_right_port_has_no_causes_in_any_layout(layout: str) -> None:
    """Negative control of all tests here. One head at a time, and a fused kernel, are in test_diagnosis_ports.py."""
    result = walked(layout)
    assert (result.causes, result.first, result.lost, result.blocks) == ((), None, None, (0, 1))
    assert result.explained


def test_the_config_decides_what_is_right() -> None:
    """For a checkpoint with the exact GELU and scores divided by the layer's number, the usual port is wrong."""
    config = replace(CONFIG, activation_function="gelu", scale_attn_by_inverse_layer_idx=True)
    result = walked(config=config)
    assert set(causes_of(result)) == {("gelu-variant", "h.*.mlp.act"), ("scale-inverse-layer", "h.1.attn")}
    assert "tanh" in next(cause.detail for cause in result.causes if cause.id == "gelu-variant")
    result = walked(config=config, act=act(F.gelu), scale=lambda port, s, n: s / math.sqrt(7) / (n + 1))
    assert result.causes == ()
    assert result.explained


def test_an_unknown_wiring_is_located() -> None:
    """A squared branch has a place but no cause, and the next fault is still named."""
    result = walked(block=squared, act=act(torch.relu, 1))
    assert not result.explained
    assert result.lost == result.first.point == "h.0"
    assert causes_of(result) == [("gelu-variant", "h.1.mlp.act")]


def test_norms_with_the_same_numbers_show_no_block() -> None:
    """A stranger's norms have no numbers: one that the block itself reads was taken for the next block's, which "did not run"."""
    model = checkpoint()
    for name, parameter in model.named_parameters():
        if ".ln_" in f".{name}":
            nn.init.constant_(parameter, name.endswith("weight"))
    result = walked(model=model, block=squared, act=act(torch.relu, 1))
    assert (result.lost, result.blocks, causes_of(result)) == ("h.0", (0, 1), [("gelu-variant", "h.1.mlp.act")])


def test_embeddings_that_a_norm_does_not_read_are_seen() -> None:
    """A stranger's module had no positions, it was said, as no block was seen to read its own: its norms are behind the sums."""

    def block(port: Port, x: Tensor, n: int) -> Tensor:
        x = port.do_norm(x + port.do_attend(x, n), f"h.{n}.ln_1")
        return port.do_norm(x + port.do_feed(x, n), f"h.{n}.ln_2")

    waves = (torch.arange(8.0).double()[:, None] * torch.linspace(0.1, 1, 21).double()).sin()
    turned = lambda port, s, n: s.masked_fill(torch.ones_like(s).tril().bool(), 1e-9).softmax(-1)  # noqa: E731
    result = walked(config=ONE, embed=lambda port, ids: 2 * port.w["wte.weight"][ids] + waves, block=block, soft=turned)
    wanted = [("position-sinusoidal", "wpe"), ("embedding-scaled", "wte"), ("post-norm", "h.0"), ("mask-missing", "h.0.attn")]
    assert ({*causes_of(result)}, result.explained) == ({*wanted}, True)


@pytest.mark.parametrize(
    ("change", "cause"),
    [(torch.relu, ("gelu-variant", "h.0")), (lambda x: F.layer_norm(x, x.shape[-1:]), ("extra-norm", "h.0.mlp"))],
)
def test_what_changes_a_block_s_result_behind_it_is_named(change: Callable[[Tensor], Tensor], cause: tuple[str, str]) -> None:
    """A module with a hook on a block, whose own sum is right: nothing was named, or a fault of the next block."""
    result = walked(block=lambda port, x, n: change(Port.do_block(port, x, n)) if n == 0 else Port.do_block(port, x, n))
    assert (causes_of(result), result.explained, result.blocks) == ([cause], True, (0, 1))


def test_other_heads_and_another_fault_in_a_block_are_both_named() -> None:
    """Alternatives were stacked with a block of another number of heads: a RuntimeError of torch, and no report."""
    one = {"split": lambda _, y, n: y[:, None], "scale": lambda _, y, n: y / math.sqrt(CONFIG.n_embd)}
    found = walked(config=ONE, **one, act=act(F.relu))
    assert found.explained
    assert causes_of(found) == [("head-layout", "h.0.attn"), ("gelu-variant", "h.0.mlp.act")]


def test_a_cause_has_evidence_and_a_fix() -> None:
    """Users must be able to check the diagnosis."""
    (cause,) = walked(config=ONE, **NO_SCALE).causes
    assert "computed so from your own values, it is what you have there, to " in cause.evidence
    assert "the walk ends at your own logits" in cause.evidence
    assert cause.fix.startswith("scores = q @ k")
    assert cause.confidence == 1.0
    (cause,) = walked(config=ONE, **ERF).causes
    assert "GPT-2's formula is off by " in cause.evidence


def pool_of(*tensors: Tensor) -> Pool:
    pool = Pool()
    for tensor in tensors:
        pool.add(tensor)
    return pool


def test_the_pool_finds_a_value_however_it_lies() -> None:
    """A transposed, flattened or split tensor is the same value; a number that differs by a millionth is another."""
    x = torch.randn(2, 8, 21, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for laid in (x.transpose(0, 1), x.flatten(), x.view(2, 8, 3, 7).transpose(1, 2)):
        assert pool_of(torch.randn(2, 8, 21).double(), laid).find(x).entries == (1,)
    heads = x.view(2, 8, 3, 7).transpose(1, 2)
    assert pool_of(*heads.unbind(1)).find(heads, 1).axes == (1,)
    assert pool_of(*heads.unbind(1)[:2]).find(heads, 1) is None
    other = x.clone()
    other[1, 2, 3] += 1e-6
    assert pool_of(other).find(x) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_sums_of_a_value_refuse_nothing_that_is_found(dtype: torch.dtype) -> None:
    """A right array that is refused by its sums is never compared. What is off by more than the bound is not found."""
    draw = torch.Generator().manual_seed(0)
    for n, first, bound in itertools.product((7, 240), (0.0, math.inf, 1e6), (1e-9, 1e-3, 0.5)):
        x, noise = torch.randn(2, n, dtype=torch.float64, generator=draw)
        x[0] = first
        pool, size = Pool(), x.nan_to_num(0.0, 0.0, 0.0).square().mean().sqrt()
        pool.add(x, dtype=dtype)
        signs = torch.stack([torch.ones(n), noise, torch.eye(n)[1] - torch.eye(n)[2]])  # no sum shows the last
        some = torch.cat([x + off * size * signs for off in (0.1 * bound, 0.9 * bound, 30 * (bound + UNITS[dtype][0]))])
        found = [pool.find(one, bound=bound) is not None for one in some]
        assert (found[0], found[-1]) == (True, False)
        assert bool((pool.holds_like(some, bound) | ~torch.tensor(found)).all())
