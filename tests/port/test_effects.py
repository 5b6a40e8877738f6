"""`gpt2.diagnose` of a module: what is rounding, what each cause does to the logits, and what is kept from call to call."""

import copy
import math
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from port.test_diagnosis import port as right
from port.test_examination import GELU, causal, port as replaced, written
from support.checks import mostly_slow
from support.faulty import ONE as CONFIG
from torch import Tensor, nn

import gpt2
from gpt2.port.diagnosis import diagnose

WIDTH, HEADS, SIZE = CONFIG.n_embd, CONFIG.n_head, CONFIG.head_dim


def port(model: gpt2.GPT2, final: bool = True, act: Callable[[Tensor], Tensor] = GELU, **wrong: Callable | Tensor) -> nn.Module:
    """nanoGPT's structure with the checkpoint in it, its blocks written out; ``final``: whether it has the last norm."""
    module = replaced(model, partial(written, act=act, weigh=partial(causal, **wrong)))
    if not final:
        module.transformer["ln_f"] = nn.Identity()
    return module


def in_buffer(x: Tensor) -> Tensor:
    """Return the softmax of scores that went through a buffer of torch's default dtype."""
    kept = torch.empty(x.shape)
    kept.copy_(x)
    return kept.softmax(-1).to(x.dtype)


CONSTANT = torch.tensor(2 / math.pi).sqrt()
ROUNDED: dict[str, Callable[[Tensor], Tensor] | Tensor] = {
    "act": lambda x: 0.5 * x * (1 + torch.tanh(CONSTANT * (x + 0.044715 * x**3))),
    "scale": 1 / torch.tensor(float(SIZE)).sqrt(),
    "soft": in_buffer,
}


@pytest.mark.parametrize("part", mostly_slow(ROUNDED))
def test_what_float32_rounds_in_a_module_is_a_note(part: str, model: gpt2.GPT2) -> None:
    """A right GELU whose sqrt(2/pi) is a float32 tensor was called wrong by 1e-8, and named before a missing last norm."""
    found = diagnose(port(model, **{part: ROUNDED[part]}), model)
    assert (found.verdict, found.causes) == ("equal", ()), found.table()
    assert 1e-10 < found.logits_error < 1e-5
    assert any("float32's rounding explains" in note for note in found.notes)
    found = diagnose(port(model, final=False, **{part: ROUNDED[part]}), model)
    assert [cause.id for cause in found.causes] == ["final-norm-missing"], found.table()
    assert found.table().splitlines()[0].startswith("MISMATCH  first at ln_f ")


def test_a_small_mistake_is_no_rounding(model: gpt2.GPT2) -> None:
    """Four digits of a constant, or another epsilon, are a fault however little they do."""
    few = diagnose(port(model, act=lambda x: 0.5 * x * (1 + torch.tanh(0.7979 * (x + 0.044715 * x**3)))), model)
    assert [cause.id for cause in few.causes] == ["gelu-variant"], few.table()
    other, norm = port(model), nn.LayerNorm(WIDTH, eps=2e-5)
    norm.load_state_dict(model.ln_f.state_dict())
    other.transformer["ln_f"] = norm
    found = diagnose(other, model)
    assert [cause.id for cause in found.causes] == ["layernorm-eps"], found.table()
    assert found.causes[0].effect < 1e-4


SHORT: dict[str, Callable[[Tensor], Tensor]] = {
    "act": lambda x: GELU(x.bfloat16()).to(x.dtype),
    "soft": lambda x: x.half().softmax(-1).to(x.dtype),
}
PLACES = {"act": "h.0.mlp.act", "soft": "h.0.attn.weights"}


@pytest.mark.parametrize("part", SHORT)
def test_fewer_digits_than_float32_are_a_cause(part: str, model: gpt2.GPT2) -> None:
    """Casts were removed and their effect never measured: a float32 module that computes in bfloat16 was called equal."""
    (cause,) = diagnose(port(model, **{part: SHORT[part]}), model).causes
    assert (cause.id, cause.where) == ("reduced-precision", PLACES[part])
    assert 1e-4 < cause.effect < 0.5


def test_autocast_is_a_cause(model: gpt2.GPT2) -> None:
    """In float64 autocast does nothing, so only a run in the module's own dtype shows it."""
    module = port(model)
    linear = module.transformer["h"][0].mlp.c_proj

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, self.weight, self.bias).to(x.dtype)

    linear.forward = MethodType(forward, linear)
    (cause,) = diagnose(module, model).causes
    assert (cause.id, cause.where) == ("reduced-precision", "h.0.mlp.c_proj")


def test_each_cause_says_what_it_alone_does(two: gpt2.GPT2) -> None:
    """The first cause was an activation off by 1e-3 where the head was random. Formulas, parameters and fits are measured."""
    ids = torch.randint(CONFIG.vocab_size, (2, 8), generator=torch.Generator().manual_seed(1))  # the first probe
    module = port(two, act=F.gelu)
    with torch.no_grad():
        module.lm_head.weight = nn.Parameter(torch.randn(module.lm_head.weight.shape, generator=torch.Generator().manual_seed(2)))
        module.transformer["h"][1].attn.c_proj.bias.zero_()
    found = diagnose(module, two)
    ours = copy.deepcopy(two).double().eval()
    with torch.no_grad():
        right, hidden = ours(ids), ours.hidden(ids)
        effects = {"untied-head": (hidden @ module.lm_head.weight.double().T - right).abs().max()}
        for id, wrong in (("gelu-variant", {"act": F.gelu}), ("not-loaded", {})):
            alone = port(two, **wrong).double()
            if id == "not-loaded":
                alone.transformer["h"][1].attn.c_proj.bias.zero_()
            effects[id] = (alone(ids)[0] - right).abs().max()
    assert {cause.id: cause.effect for cause in found.causes} == {
        id: pytest.approx(float(x), rel=1e-6) for id, x in effects.items()
    }
    assert [cause.id for cause in found.causes] == sorted(effects, key=effects.get, reverse=True)
    assert found.first_divergence.point == "h.0.mlp.act"
    assert found.table().splitlines()[0].endswith("most by untied-head")


class Cached(nn.Module):
    """A right GPT-2 with a cache, but for later calls: ``rows`` are their positions, ``hides`` what their tokens do not see;
    with ``keeps`` the cache stays in the module, in a list."""

    def __init__(self, model: gpt2.GPT2, rows: Callable, hides: Callable, keeps: bool = False) -> None:
        super().__init__()
        self.model, self.rows, self.hides, self.keeps = model, rows, hides, keeps
        self.kept: list = []

    def forward(self, ids: Tensor, past: list | None = None, use_cache: bool = False):
        past, new = self.kept if self.keeps else past, []
        before = past[0][0].shape[2] if past and past[0][0].shape[0] == ids.shape[0] else 0
        (b, t), m = ids.shape, self.model
        x = m.wte(ids) + m.wpe((self.rows(before, t) if before else torch.arange(t)).clamp(max=CONFIG.n_positions - 1))
        for number, block in enumerate(m.h):
            q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in block.attn.c_attn(block.ln_1(x)).split(WIDTH, -1))
            if before:
                k, v = torch.cat((past[number][0], k), 2), torch.cat((past[number][1], v), 2)
            new.append((k, v))
            hidden = self.hides(before, t) if before else torch.ones(t, t).triu(1)
            weights = (q @ k.mT * SIZE**-0.5).masked_fill(hidden.bool(), -math.inf).softmax(-1)
            x = x + block.attn.c_proj((weights @ v).transpose(1, 2).reshape(b, t, WIDTH))
            x = x + block.mlp(block.ln_2(x))
        if self.keeps:
            self.kept[:] = new
        logits = m.ln_f(x) @ m.wte.weight.T
        return (logits, new) if use_cache else logits


class Unnamed(Cached):  # such a cache was not tried, and a module was called equal whose cache was wrong
    def forward(self, ids: Tensor, H: SimpleNamespace | None = None):
        logits, new = super().forward(ids, H and H.all, True)
        return logits, SimpleNamespace(all=new)


ROWS = {
    "right": lambda n, t: torch.arange(n, n + t),
    "one": lambda n, t: torch.full((t,), n),
    "anew": lambda n, t: torch.arange(t),
}
HIDES = {"right": lambda n, t: torch.ones(t, n + t).triu(n + 1), "nothing": lambda n, t: torch.zeros(t, n + t)}
SAID = {
    ("right", "nothing"): ("in one piece, the mask is missing",),
    ("one", "right"): ("in one piece, the positions of all new tokens are one",),
    ("one", "nothing"): ("in one piece, the positions of all new tokens are one", "the mask is missing"),
    ("anew", "right"): ("in one piece, positions begin at 0 in each call",),
}


@pytest.mark.parametrize(("rows", "hides"), SAID)
def test_what_is_wrong_in_later_calls_is_measured(rows: str, hides: str, model: gpt2.GPT2) -> None:
    """Several new tokens with one position were said to lack a mask: it was guessed from single tokens, which were right."""
    (cause,) = diagnose((Unnamed if rows == "anew" else Cached)(model, ROWS[rows], HIDES[hides]), model).causes
    assert cause.id == "cache-inconsistent"
    said = cause.detail.partition(": ")[2]
    assert all(words in said for words in SAID[rows, hides]), said
    assert said.count(";") == len(SAID[rows, hides]) - 1


def test_a_state_that_is_kept_is_no_random_number(model: gpt2.GPT2) -> None:
    """A cache that is never emptied was answered 'draw no random number', spoke of dropout, and what it holds was diagnosed."""
    module = Cached(copy.deepcopy(model), ROWS["right"], HIDES["right"], keeps=True).train()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    found = diagnose(module, model)
    assert module.kept == []
    (cause,) = found.causes
    assert cause.id == "not-deterministic"
    assert "keeps a state from call to call" in cause.detail
    assert "empty it" in cause.fix
    assert "random" not in found.table()
    assert "dropout" not in found.table()
    assert all(diagnose(kind(model, ROWS["right"], HIDES["right"]), model).ok for kind in (Cached, Unnamed))


def test_a_fit_beside_a_known_mistake_is_kept(model: gpt2.GPT2) -> None:
    """The known mistake explained the rest of the block, and the fitted one before it was forgotten: half of a diagnosis."""
    module = port(model, act=F.gelu)
    for block in module.transformer["h"]:

        def norm(x: Tensor, own: nn.Module = block.ln_1) -> Tensor:
            middle = x - x.mean(-1, keepdim=True)
            return middle / middle.abs().pow(3).mean(-1, keepdim=True) ** (1 / 3) * own.weight + own.bias

        block.ln_1.forward = norm
    found = {cause.id: cause.where for cause in diagnose(module, model).causes}
    assert found == {"layernorm-not-normalising": "h.0.ln_1", "gelu-variant": "h.0.mlp.act"}


def lost_brackets(own: nn.Module, outer: bool = True) -> Callable[[Tensor], Tensor]:
    def norm(x: Tensor) -> Tensor:
        mean, root = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        return (x - mean / root) * own.weight + own.bias if outer else x - mean / root * own.weight + own.bias

    return norm


@pytest.mark.parametrize("outer", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_brackets_that_are_missing_in_a_norm_are_named_in_all_norms(outer: bool, model: gpt2.GPT2, two: gpt2.GPT2) -> None:
    """x - mean / sqrt(var + eps), in eleven norms, was found in two blocks where the limit was met, or not at all."""
    model = two if outer else model
    module = port(model, act=F.gelu)
    for block in module.transformer["h"]:
        block.ln_1.forward, block.ln_2.forward = lost_brackets(block.ln_1, outer), lost_brackets(block.ln_2, outer)
    module.transformer["ln_f"].forward = lost_brackets(module.transformer["ln_f"], outer)
    found = diagnose(module, model)
    assert [cause.id for cause in found.causes] == ["layernorm-not-normalising", "gelu-variant"], found.table()
    assert found.causes[0].where == ("h.*.ln_1, h.*.ln_2, ln_f" if outer else "h.0.ln_1, h.0.ln_2, ln_f")
    assert found.causes[0].detail.startswith("the mean alone is divided")


@pytest.mark.slow
def test_mistakes_beside_one_that_no_formula_gives_are_named(model: gpt2.GPT2) -> None:
    """Lost brackets, erf and a feed-forward bent once more: the last one hid the others, and not a stage was recognised."""
    module = port(model, act=F.gelu)
    for block in module.transformer["h"]:
        project, block.ln_1.forward = block.mlp.c_proj, lost_brackets(block.ln_1)
        project.forward = lambda x, own=project: F.linear(x, own.weight, own.bias).sin().cumsum(-1)
    found = diagnose(module, model)
    named = {cause.id: cause.where for cause in found.causes}
    assert named == {"layernorm-not-normalising": "h.0.ln_1", "gelu-variant": "h.0.mlp.act"}, found.table()
    assert "h.0 is the first that was not" in " ".join(found.notes)


class OverRows(nn.Module):
    """An attention by torch's module, which takes (T, B, D) if nobody says otherwise."""

    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS)
        names = {"in_proj": attn.c_attn, "out_proj": attn.c_proj}
        weights = {"in_proj_weight": names["in_proj"].weight, "in_proj_bias": names["in_proj"].bias}
        weights |= {"out_proj.weight": names["out_proj"].weight, "out_proj.bias": names["out_proj"].bias}
        self.inner.load_state_dict(weights)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(len(x), len(x)).triu(1).bool()
        return self.inner(x, x, x, attn_mask=mask, need_weights=False)[0]


def test_consequences_are_folded_into_their_cause(two: gpt2.GPT2) -> None:
    """[Block(config)] * n_layer had three false causes too; exchanged norms were four; attention over the batch was a mask."""
    one, exchanged, rows = (right(two) for _ in range(3))
    blocks = one.transformer["h"]
    one.transformer["h"] = nn.ModuleList([blocks[-1]] * len(blocks))
    found = diagnose(one, two)
    assert [(cause.id, cause.where) for cause in found.causes] == [("layer-repeated", "h.*")], found.table()
    assert "for _ in range(n_layer)" in found.causes[0].fix
    blocks[-1].attn.c_attn.register_parameter("bias", None)  # what that one block lacks was not named
    assert {cause.where for cause in diagnose(one, two).causes} == {"h.*", "h.0.attn.c_attn.bias"}
    for block in exchanged.transformer["h"]:
        for leaf in ("weight", "bias"):
            first, second = getattr(block.ln_1, leaf), getattr(block.ln_2, leaf)
            first.data, second.data = second.data, first.data
    found = diagnose(exchanged, two)
    assert [(cause.id, cause.where) for cause in found.causes] == [("norms-swapped", "h.*.ln_1, h.*.ln_2")], found.table()
    assert found.causes[0].fix.startswith("load h.N.ln_1 into")
    for block in rows.transformer["h"]:
        block.attn = OverRows(block.attn)
    found = diagnose(rows, two)
    assert [(cause.id, cause.where) for cause in found.causes] == [("batch-dependent", "h.*.attn")], found.table()
    assert "batch_first=True" in found.causes[0].fix
