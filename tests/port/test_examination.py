"""`gpt2.diagnose` of a module: dropouts made by hand, rows that change one another, masks from the ids, limits of time, fixes."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from types import MethodType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from port.test_diagnosis import port as nano
from port.test_walk import CONFIG as SMALL, IDS, checkpoint
from support.checks import mostly_slow
from support.faulty import ONE as CONFIG
from support.ports import PORTS
from torch import Tensor, nn
from torch.nn.utils import prune

import gpt2
from gpt2.measure.rounding import explained_errors
from gpt2.measure.tracing import trace
from gpt2.model import eager_attention
from gpt2.port.diagnosis import diagnose
from gpt2.port.diagnosis.runner import PROGRESS, watch
from gpt2.port.module.seen import seen
from gpt2.port.recording.pool import collect
from gpt2.port.terms import budget
from gpt2.port.terms.causes import CAUSES

GELU, SOFTMAX = partial(F.gelu, approximate="tanh"), partial(torch.softmax, dim=-1)
P = 0.3
DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.rand": lambda x: x * (torch.rand(x.shape) > P) / (1 - P),
    "numpy, scaled first": lambda x: x * torch.from_numpy((np.random.rand(*x.shape) > P) / (1 - P)).to(x),
    "filled": lambda x: (x / (1 - P)).masked_fill(torch.rand(x.shape) < P, 0.0),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 1 - P)) * x / (1 - P),
}


def port(model: gpt2.GPT2, layer: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """nanoGPT's structure with the checkpoint in it, and its blocks' forward replaced."""
    module = nano(model)
    for block in module.transformer["h"]:
        block.forward = MethodType(layer, block)
    return module.eval()


def attend(block: nn.Module, x: Tensor, weigh: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    b, t, d = x.shape
    q, k, v = (y.view(b, t, CONFIG.n_head, -1).transpose(1, 2) for y in block.attn.c_attn(x).split(d, 2))
    return block.attn.c_proj((weigh(q, k) @ v).transpose(1, 2).reshape(b, t, d))


def causal(q: Tensor, k: Tensor, soft: Callable = SOFTMAX, scale: Tensor | float = CONFIG.head_dim**-0.5) -> Tensor:
    return soft((q @ k.mT * scale).masked_fill(torch.ones(2 * q.shape[-2:-1]).triu(1).bool(), -math.inf))


def written(block: nn.Module, x: Tensor, act: Callable = GELU, weigh: Callable = causal) -> Tensor:
    """A block's forward written out."""
    x = x + attend(block, block.ln_1(x), weigh)
    return x + block.mlp.c_proj(act(block.mlp.c_fc(block.ln_2(x))))


@pytest.mark.parametrize("name", mostly_slow(DROPOUTS, len(DROPOUTS)))
def test_a_dropout_made_by_hand_is_named_and_hides_no_other_cause(name: str, model: gpt2.GPT2) -> None:
    """It is no operator of torch, so it was called random numbers, and what else is wrong was not looked for."""
    drop = DROPOUTS[name]

    def layer(block: nn.Module, x: Tensor) -> Tensor:
        x = x + drop(block.attn(block.ln_1(x)))
        return x + drop(block.mlp.c_proj(F.relu(block.mlp.c_fc(block.ln_2(x)))))

    found = diagnose(port(model, layer), model)
    assert {cause.id for cause in found.causes} == {"dropout-active", "gelu-variant"}, found.table()


def test_a_feed_forward_as_wide_as_the_stream_does_not_hold_every_dropout() -> None:
    """A dropout behind no product, of a value that is not GPT-2's, was one inside the feed-forward."""
    config = replace(SMALL, n_inner=SMALL.n_embd)
    model = checkpoint(config).float()
    module = PORTS["nano"].build(config)
    PORTS["nano"].fill(module, model.state_dict())
    module.transformer["drop"].forward = lambda x: F.dropout(x * math.sqrt(config.n_embd), 0.1)
    found = diagnose(module.eval(), model)
    assert {cause.id for cause in found.causes} == {"dropout-active", "embedding-scaled"}, found.table()


@pytest.mark.slow
def test_what_else_is_wrong_is_found_where_rows_change_one_another(model: gpt2.GPT2) -> None:
    """The walk was lost at attention(x)[0], one row's result for all. Logits of one position were those of rows of zeros."""

    def layer(block: nn.Module, x: Tensor) -> Tensor:
        normed = block.ln_1(x)
        x = normed + block.attn(normed)[0]
        return x + block.mlp(block.ln_2(x))

    module = port(model, layer)
    module.register_forward_hook(lambda module, inputs, output: output[0][:, -1:])
    found = diagnose(module, model)
    assert {cause.id for cause in found.causes} == {"batch-dependent", "residual-from-normed"}, found.table()


PADDING = CONFIG.vocab_size - 1
HIDDEN: dict[str, Callable[[Tensor], Tensor]] = {  # from ids (B, T) to the keys that a token sees (B, T, T); "": none is hidden
    "": lambda ids: (x := (ids == CONFIG.vocab_size).cumsum(1))[:, :, None] == x[:, None],
    "a token sees the last 11 tokens alone": lambda ids: torch.ones(len(ids), *2 * ids.shape[1:]).triu(-10).bool(),
    f"tokens of id {PADDING} are hidden": lambda ids: (ids != PADDING)[:, None].repeat(1, len(ids[0]), 1),
}


def hiding(model: gpt2.GPT2, words: str, relu: bool) -> nn.Module:
    seen: list[Tensor] = []

    def weigh(q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        return scores.masked_fill(~seen[-1].tril()[:, None], -math.inf).softmax(-1).nan_to_num()

    module = port(model, partial(written, act=F.relu if relu else GELU, weigh=weigh))
    module.register_forward_pre_hook(lambda _, args: seen.append(HIDDEN[words](args[0])))
    return module


@pytest.mark.parametrize("words", [pytest.param(words, marks=pytest.mark.slow if "id" in words else []) for words in HIDDEN])
def test_what_hides_keys_is_read_off_the_weights(words: str, model: gpt2.GPT2) -> None:
    """The scores were taken for a part of a mask of documents, from cumsum over the ids. A window of 11 hid behind the ReLU that
    the first text shows, and no text held the last id, which is often that of padding."""
    module = hiding(model, words, relu=bool(words))
    found = diagnose(module, model)
    assert {cause.id for cause in found.causes} == ({"mask-strict", "gelu-variant"} if words else set()), found.table()
    assert any(words in cause.detail for cause in found.causes) if words else gpt2.load_into(module, model).ok


def test_a_large_model_is_compared_on_one_long_text(model: gpt2.GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    """At gpt2's size no text had more than 32 tokens, and a window of 200 was called equal; then rounding was measured on the
    long text, with all its values, whatever the error: minutes, and 14 GB."""
    lengths = list[int]()
    monkeypatch.setattr("gpt2.port.mapping.mapping.MAX_WORK", 0)
    monkeypatch.setattr("gpt2.port.mapping.mapping.LENGTHS", (8, 1))
    module = hiding(model, "a token sees the last 11 tokens alone", relu=False)
    measured = lambda model, ids, *others: lengths.append(ids.size(1)) or explained_errors(model, ids, *others)  # noqa: E731
    monkeypatch.setattr("gpt2.port.module.runs.explained_errors", measured)
    monkeypatch.setattr("gpt2.port.module.examination.MOST_ROUNDED", math.inf)
    found = diagnose(module, model)
    assert [cause.id for cause in found.causes] == ["mask-strict"]
    assert max(lengths) == 8
    assert found.notes[0].endswith("they part at token 11, from 0")
    module.register_forward_hook(lambda module, args, output: output[0][:, -1:])
    assert any(note.endswith(f"part at token {CONFIG.n_positions - 1}, from 0") for note in diagnose(module, model).notes)
    monkeypatch.setattr("gpt2.port.module.examination.LONG_TEXT", 0)
    assert "texts of more than 8 tokens were not compared" in diagnose(module, model).notes


def unrecognised(model: gpt2.GPT2) -> nn.Module:
    """A port whose attention weighs by the distance of queries and keys, squared: nothing that is known."""

    def weigh(q: Tensor, k: Tensor) -> Tensor:
        far = torch.cdist(q, k).masked_fill(torch.ones(q.shape[-2], q.shape[-2]).triu(1).bool(), math.inf)
        return (-far).softmax(-1).square()

    return port(model, partial(written, weigh=weigh))


@pytest.mark.slow
def test_an_attention_that_nothing_recognises_is_undetermined_at_its_place(two: gpt2.GPT2) -> None:
    """It was refused as another kind of model."""
    stages: list[str] = []
    found = diagnose(unrecognised(two), two, progress=stages.append)
    assert found.verdict == "undetermined", found.table()
    assert found.causes == ()
    assert "h.0.attn.v is the last stage that was recognised; h.0.attn.weights is the first that was not" in found.notes[0]
    assert any("in block 1" in stage for stage in stages)


@pytest.mark.parametrize(
    ("id", "change"), [("residual-scaled", lambda x: 1.5 * x), ("extra-norm", lambda x: F.layer_norm(x, x.shape[-1:]))]
)
def test_what_a_hook_does_behind_a_faulty_block_is_named(id: str, change: Callable[[Tensor], Tensor], two: gpt2.GPT2) -> None:
    """The block's own result was found, and the next norm had another epsilon, or its branch was added to the normed stream."""
    module = port(
        two, lambda block, x: (y := x + block.attn(block.ln_1(x))) + block.mlp.c_proj(F.relu(block.mlp.c_fc(block.ln_2(y))))
    )
    module.transformer["h"][0].register_forward_hook(lambda block, args, x: change(x))
    found = diagnose(module, two)
    assert {cause.id for cause in found.causes} == {id, "gelu-variant"}, found.table()


BEFORE = lambda x: torch.cat([F.pad(x[..., :7], (0, 0, 1, -1)), x[..., 7:]], -1)  # noqa: E731
RELU = lambda block, x: block.mlp.c_proj(F.relu(block.mlp.c_fc(x)))  # noqa: E731
SIDE_BY_SIDE: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], set[str]]] = {
    "stacked": (lambda b, x: torch.stack([x, b.attn(b.ln_1(x)), b.mlp(b.ln_2(x))]).sum(0), {"parallel-block"}),
    "the sum in another order": (lambda b, x: x + b.mlp(b.ln_2(x)) + b.attn(b.ln_1(x)), {"parallel-block"}),
    "a ReLU": (lambda b, x: x + RELU(b, b.ln_2(x)) + b.attn(b.ln_1(x)), {"parallel-block", "gelu-variant"}),
    "halved": (lambda b, x: x + 0.5 * (b.attn(b.ln_1(x)) + b.mlp(b.ln_2(x))), {"parallel-block", "residual-scaled"}),
    "one norm": (lambda b, x: x + b.mlp(y := b.ln_1(x)) + b.attn(y), {"parallel-block"}),
    "norms exchanged": (lambda b, x: x + b.mlp(b.ln_1(x)) + b.attn(b.ln_2(x)), {"parallel-block", "norms-swapped"}),
    "the feed-forward first": (lambda b, x: (y := x + b.mlp(b.ln_2(x))) + b.attn(b.ln_1(y)), {"layer-order"}),
    "dropped": (lambda b, x: x + b.mlp(b.ln_2(x)), {"residual-missing"}),
    "one norm, in turn": (lambda b, x: (y := x + b.attn(b.ln_1(x))) + b.mlp(b.ln_1(y)), {"norms-swapped"}),
    "the other norm": (lambda b, x: x + b.mlp(y := b.ln_2(x)) + b.attn(y), {"parallel-block", "norms-swapped"}),
    "of the token before": (lambda b, x: (y := x + b.attn(BEFORE(b.ln_1(x)))) + b.mlp(b.ln_2(y)), {"not-loaded"}),
}


@pytest.mark.parametrize("name", mostly_slow([*SIDE_BY_SIDE], 4))
def test_a_block_in_another_order_has_one_cause_however_its_sum_is_written(name: str, model: gpt2.GPT2) -> None:
    """A step of the sum that nothing reads was taken for the block's result: attention's was dropped, and a factor wrong. One
    norm of both branches was said to hold the other's weights; a stack ended in a traceback. A norm whose units come of two
    tokens is not filled, and was said to have no weight and no bias."""
    layer, causes = SIDE_BY_SIDE[name]
    found = diagnose(port(gpt2.GPT2(CONFIG) if "not-loaded" in causes else model, layer), model)
    assert {cause.id for cause in found.causes} == causes, found.table()


def test_one_gain_of_a_norm_and_a_factor_behind_the_activation(model: gpt2.GPT2) -> None:
    """One gain was called a weight not loaded. A branch with a parameter behind its activation, as in PEFT's IA3, was not there:
    its biases were missing."""
    module, factor = nano(model), nn.Parameter(torch.ones(CONFIG.inner))
    norm = module.transformer["h"][0].ln_2 = nn.Module()  # ScaleNorm: one number for all units
    norm.g = nn.Parameter(torch.tensor(CONFIG.n_embd**0.5))
    norm.forward = lambda x: norm.g * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)
    assert {cause.id for cause in diagnose(module.eval(), model).causes} == {"rmsnorm"}
    module = nano(model)
    module.register_parameter("ia3", factor)
    module.transformer["h"][0].mlp.c_proj.register_forward_pre_hook(lambda _, args: (args[0] * factor,))
    assert gpt2.load_into(module.eval(), model).ok


def test_stacked_terms_are_summed_and_joined_units_are_not(model: gpt2.GPT2) -> None:
    """Stacked embeddings were norms exchanged, beside zeros again; a mean hid what follows it, as a product with ones
    too, and then stacked terms; joined units ended in a traceback. Scores of heads that were stacked are no terms either."""

    def weigh(q: Tensor, k: Tensor) -> Tensor:
        of = torch.stack([(one / math.sqrt(q.shape[-1])).exp().tril() for one in (q @ k.mT).unbind(1)], 1)
        return of / of.sum(-1, keepdim=True)

    def layer(block: nn.Module, x: Tensor) -> Tensor:
        x = 2 * torch.stack([x, attend(block, block.ln_1(x), weigh)]).mean(0)
        joined = torch.stack([one * 1.0 for one in x.unbind(-1)], -1)
        far, (weight, bias) = joined - joined.sum(-1, keepdim=True) / CONFIG.n_embd, block.ln_2.parameters()
        y = block.mlp(far / (far.square() @ x.new_ones(CONFIG.n_embd, 1) / CONFIG.n_embd + 1e-5).sqrt() * weight + bias)
        return torch.einsum("k,kbtd->btd", x.new_ones(2), torch.stack([x, y]) * 1.0)

    def forward(ids: Tensor) -> Tensor:
        x = torch.stack([x := parts["wte"](ids), parts["wpe"].weight[: ids.shape[1]].expand_as(x), torch.zeros_like(x)]).sum(0)
        return module.lm_head(parts["ln_f"](parts["h"][0](x)))

    module = port(model, layer)
    module.forward, parts = forward, module.transformer
    assert gpt2.load_into(module, model).ok
    with pytest.raises(gpt2.InputError, match="a product with a constant matrix"):  # a bare StopIteration
        gpt2.load_into(port(model, lambda block, x: x @ x.new_ones(CONFIG.n_embd, CONFIG.n_embd).tril() + block.ln_1.bias), model)


def test_cosines_of_rounded_frequencies_are_found(model: gpt2.GPT2) -> None:
    """The steps of a norm by hand are more like GPT-2's embeddings, and no positions were said to be there."""

    def layer(block: nn.Module, x: Tensor) -> Tensor:
        far = x - x.mean(-1, keepdim=True)
        x = x + block.attn(far / (far.square().mean(-1, keepdim=True) + 1e-5).sqrt() * block.ln_1.weight + block.ln_1.bias)
        return x + block.mlp(block.ln_2(x))

    module, frequencies = port(model, layer), torch.exp(-torch.arange(CONFIG.n_embd) * torch.log(torch.tensor(10000.0)) / 20)
    module.transformer["wpe"] = nn.Module()
    module.transformer["wpe"].register_buffer("weight", (torch.arange(CONFIG.n_positions)[:, None] * frequencies).cos())
    found = diagnose(module, model)
    assert [(cause.id, cause.where) for cause in found.causes] == [("position-sinusoidal", "wpe")], found.table()


def test_one_head_for_all_is_no_missing_bias() -> None:
    """Keys and values of the other heads reach nothing, and their biases were said to be missing, before the heads."""
    module, right = checkpoint(), checkpoint()
    for block in module.h:
        block.attn.attend = lambda q, k, v, *how: eager_attention(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v), *how)
    found = diagnose(module, right)
    assert [(one.id, one.where) for one in found.causes] == [("head-layout", "h.*.attn.c_attn (k), h.*.attn.c_attn (v)")]


def test_a_search_ends_at_its_limit(model: gpt2.GPT2, monkeypatch: pytest.MonkeyPatch) -> None:
    """At gpt2's shape, an attention that nothing recognises would take half an hour."""
    monkeypatch.setattr(budget, "WORK", {True: 0.0, False: 0.0})
    found = diagnose(unrecognised(model), model)
    assert found.verdict == "undetermined"
    assert found.notes[0].startswith("no stage was recognised")
    untried = "other embeddings, the blocks from h.0 on, the last norm and the head"
    assert found.notes[1] == f"the search ended at its limit of work; not tried: {untried}"


def test_a_tensor_that_is_written_in_parts_is_recorded_whole() -> None:
    """Rotary positions are often written as out[..., ::2] = a; out[..., 1::2] = b: only the halves were recorded."""

    class Halves(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            out = torch.empty(2, 8, 6, dtype=torch.float64)
            out[..., ::2], out[..., 1::2] = ids[..., None].double(), ids[..., None].double().sqrt()
            return out.transpose(0, 1).transpose(0, 1) @ torch.ones(6, SMALL.vocab_size, dtype=torch.float64)

    pool = collect(Halves(), IDS, SMALL)
    assert pool.find(torch.stack((IDS.double(), IDS.double().sqrt()), -1).repeat(1, 1, 3)) is not None


def test_what_filling_overwrites_is_said_by_both_tools(model: gpt2.GPT2) -> None:
    """A table of sines was replaced without a word, and all was called equal."""
    angles = torch.arange(CONFIG.n_positions)[:, None] / 10 ** torch.arange(CONFIG.n_embd // 2)
    for kept in (False, True):
        module = PORTS["nano"].build(CONFIG)
        if not kept:
            module.transformer["wpe"].weight = nn.Parameter(torch.stack((angles.sin(), angles.cos()), -1).flatten(1))
        said = " ".join((*diagnose(module, model, fill=True).notes, *gpt2.load_into(module, model).notes))
        assert said.count("holds sines and cosines") == (0 if kept else 2), said


def test_the_process_of_a_diagnosis_shows_its_progress(tmp_path) -> None:
    """A module is diagnosed in a process of its own; the terminal showed nothing for minutes."""
    script = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text('at h.0.attn'); time.sleep(0.5)"
    shown: list[str] = []
    assert watch([sys.executable, "-c", script, str(tmp_path / PROGRESS)], tmp_path, 20.0, shown.append) == 0
    assert "at h.0.attn" in shown


# Of each cause whose fix is a formula: what its line computes, and the traced point that this is.
FORMULAS = {
    "layernorm-not-normalising": ("_", "h.0.ln_1"),
    "post-norm": ("x", "h.0"),
    "gelu-variant": ("_(up)", "h.0.mlp.act"),
    "scale-missing": ("scores.tril()", "h.0.attn.scores"),
    "mask-missing": ("_", "h.0.attn.weights"),
    "value-projection-wrong": ("y", "h.0.attn.heads"),
    "output-projection-missing": ("_", "h.0.attn.c_proj"),
    "position-missing": ("x", "embed"),
    "final-norm-missing": ("logits", "logits"),
}


@pytest.mark.parametrize("id", FORMULAS)
def test_the_line_that_is_shown_as_a_fix_computes_what_gpt2_computes(id: str) -> None:
    """The fix is what the reader copies: each formula runs here on GPT-2's own inputs and must give its value."""
    ours = checkpoint()
    block, t = ours.h[0], trace(ours, IDS)
    q, k, v = (t[f"h.0.attn.{name}"] for name in "qkv")
    q, k, v = (y if y.ndim == 4 else y.unflatten(-1, (SMALL.n_head, -1)).transpose(1, 2) for y in (q, k, v))
    x, scores = t["embed"], q @ k.mT / math.sqrt(SMALL.head_dim)
    names = {
        "torch": torch, "nn": nn, "inf": math.inf, "sqrt": lambda y: math.sqrt(y) if isinstance(y, int) else y.sqrt(),
        "T": IDS.shape[1], "ids": IDS, "n_embd": SMALL.n_embd, "head_size": SMALL.head_dim, "wte": ours.wte, "wpe": ours.wpe,
        "x": x if id != "final-norm-missing" else t[f"h.{SMALL.n_layer - 1}"], "ln_1": block.ln_1, "ln_2": block.ln_2,
        "ln_f": ours.ln_f, "mlp": block.mlp, "attn": lambda y: t["h.0.attn.c_proj"], "q": q, "k": k, "v": v, "scores": scores,
        "weights": t["h.0.attn.weights"], "up": t["h.0.mlp.c_fc"], "mean": x.mean(-1, keepdim=True),
        "var": x.var(-1, keepdim=True, unbiased=False), "eps": SMALL.layer_norm_epsilon, "bias": block.ln_1.bias,
        "weight": block.ln_1.weight, "c_proj": block.attn.c_proj, "y": t["h.0.attn.heads"],
        "future": torch.ones(8, 8).triu(1).bool(),
    }  # fmt: skip
    fix = CAUSES[id].partition("#")[0].replace("return ", "").strip()
    if "=" not in fix.partition("(")[0]:
        fix = f"_ = {fix}"
    exec(fix, names)
    value, point = eval(FORMULAS[id][0], names), t[FORMULAS[id][1]]
    if value.ndim == 4 and point.ndim == 3:
        value = value.transpose(1, 2).flatten(2)
    assert torch.allclose(value.to(point).view(point.shape), point, atol=1e-6)


def odd(block: nn.Module, x: Tensor, wrong: Callable[[Tensor], Tensor]) -> Tensor:
    """A block that no formula explains: its feed-forward's result is bent, and goes through ``wrong``."""
    x = x + attend(block, block.ln_1(x), causal)
    y = block.mlp(block.ln_2(x))
    return x + wrong(y * y.abs().sqrt().mean(-1, keepdim=True) / (1 + y.square().mean(1, keepdim=True)))


def unused(y: Tensor) -> Tensor:
    y.masked_fill(torch.ones_like(y).bool(), 0.0)  # masked_fill_ was meant
    return y


SEEN = {
    "nothing": (lambda y: y, ""),
    "mask": (unused, "a mask is made and never applied"),
    "erf": (lambda y: y * torch.erf(y), "an error function (erf)"),
    "relu": (lambda y: y - 0.3 * torch.relu(y), "a ReLU"),
    "sines": (lambda y: y + 0.1 * torch.sin(y), "sines and cosines"),
}


def test_what_the_operators_show_is_said_where_no_cause_explains_it(model: gpt2.GPT2) -> None:
    """A student's module had a mask that is built and never applied, erf, a second GELU: none of four was named."""
    for what, (change, words) in SEEN.items():
        module = port(model, lambda block, x, change=change: odd(block, x, change))
        assert [words in note for note in seen(module, IDS, [])] == [True] * bool(words), what
    every = port(model, lambda block, x: odd(block, x, lambda y: reduce(lambda y, one: one[0](y), SEEN.values(), y)))
    noted = [note for note in diagnose(every, model).notes if note.startswith("seen in your operators, not proved")]
    assert [words in note for (_, words), note in zip([*SEEN.values()][1:], noted, strict=True)] == [True] * 4


def test_a_block_that_runs_more_than_once_is_said_where_no_cause_says_it(model: gpt2.GPT2) -> None:
    """`[Block(config)] * n_layer` is one block, which parts that are not recognised do not show. Control: a right module."""
    right = PORTS["nano"].build(CONFIG)
    ids = torch.arange(8)[None]
    assert list(seen(right, ids, [])) == []
    right.transformer["h"] = nn.ModuleList([right.transformer["h"][0]] * 2)
    assert [note.endswith("a block runs more than once (transformer.h.0)") for note in seen(right, ids, [])] == [True]
    assert list(seen(right, ids, ["layer-repeated"])) == []


def test_a_module_that_gives_the_last_position_alone_is_told_so(model: gpt2.GPT2) -> None:
    """Nothing said that all other positions were not compared. Control: a module that gives all of them."""
    for name, is_last in (("last_only", True), ("nano", False)):
        module = PORTS[name].build(CONFIG).float()
        PORTS[name].fill(module, model.state_dict())
        assert ["the last position alone" in note for note in diagnose(module, model).notes] == [True] * is_last


def test_what_is_said_of_a_fresh_parameter_is_said_of_it_alone(two: gpt2.GPT2) -> None:
    """Bug: "not the checkpoint's values in 16 places: they are all 1", where one was all 1, and the others were drawn."""
    module = nano(two)
    block, draw = module.transformer["h"][0], torch.manual_seed(0)
    with torch.no_grad():
        block.ln_1.weight.fill_(1.0)
        for layer in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
            layer.weight.normal_(0.0, 0.02, generator=draw)
            layer.bias.normal_(0.0, 0.02, generator=draw)
    (cause,) = (cause for cause in diagnose(module, two).causes if cause.id == "not-loaded")
    assert "places (" in cause.detail
    assert "; of h.0." in cause.detail


def pruned(model: gpt2.GPT2, approximate: str = "tanh", share: int = 0) -> nn.Module:
    """A port whose forward multiplies c_fc's weights by a mask of ones, which hides each ``share``-th row."""

    module = port(model, partial(written, act=partial(F.gelu, approximate=approximate)))
    for block in module.transformer["h"]:
        prune.identity(block.mlp.c_fc, "weight").weight_mask[:: share or 1] = not share
    return module


def test_weights_that_a_forward_computes_are_no_known_parts(model: gpt2.GPT2, two: gpt2.GPT2) -> None:
    """Of a right module under torch's prune other tensors were said to be wrong, or to hold the next block's."""
    cases: list[tuple[gpt2.GPT2, tuple]] = [(two, ()), (model, ("none",)), (model, ("tanh", 3))]
    found = [[one.id for one in diagnose(pruned(of, *how), of).causes] for of, how in cases]
    assert found == [[], ["gelu-variant"], []]
    with pytest.raises(gpt2.InputError, match=r"computes the weights of a projection, from .*c_fc\.weight_"):
        gpt2.load_into(pruned(model), model)


class Odd(nn.Module):
    """Takes one row of ids, (T,) if ``flat``, and has no ``eval``; else (B, T). Ids are its cache, which its caller appends,
    or, given ``axes``, it keeps them itself and returns an array of so many axes. ``times`` 0: what is remembered is wrong."""

    def __init__(self, inner: nn.Module, flat: bool | None = None, times: int = 1, axes: int | None = None) -> None:
        super().__init__()
        self.inner, self.flat, self.times, self.axes, self.kept = inner, flat, times, axes, {}
        self.fixed = type("Fixed", (dict,), {"clear": None})()  # an empty one that nobody may change

    def __init_subclass__(cls) -> None:
        assert cls.__name__ != "Odd", "a registry of names has it"

    def eval(self) -> nn.Module:
        raise NotImplementedError  # as of torch.export

    def forward(self, ids: Tensor, past: Tensor | None = None) -> dict[str, Tensor]:
        if self.flat is not None and (ids.ndim != 2 - self.flat or (not self.flat and len(ids) > 1)):
            raise ValueError(ids.shape)
        if self.axes == 3 and self.kept:  # it reads them without being told
            ids, past = ids[..., -1:], self.kept["ids"]
        given = ids.view(1, -1) if self.flat else ids
        whole = given if past is None else torch.cat([past[..., 0].long() if self.axes is None else self.kept["ids"], given], 1)
        self.kept["ids"] = self.times * whole
        new = self.times * given[..., None].double() if self.axes is None else torch.ones([max(2, given.size(1))] * self.axes)
        return {"logits": self.inner(whole)[0][:, -given.size(1) :], "present": new}


class Masked(Odd):
    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(ids)["logits"] * (1 if attention_mask is None else attention_mask.view(ids.shape)[..., None] + 1)


@pytest.mark.parametrize("flat", [True, False])
def test_a_module_that_takes_one_row_is_run_row_by_row(flat: bool, model: gpt2.GPT2) -> None:
    """Ports of picoGPT take ids (T,), and were refused; and so were those of one row that read the cache which they keep."""
    module = Odd(nano(model), flat)
    found = diagnose(module, model)
    assert (found.ok, type(module)) == (True, Odd)
    assert any("test_examination.py, line " in note and "rows of a text were run" in note for note in found.notes)
    read, filled = gpt2.checkpoint_of(module), gpt2.load_into(module, model)
    assert filled.ok
    assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in read.weights.items())
    assert all("rows of a text were run" in one.notes[0] for one in (read, filled))
    keeps = Odd(nano(model), flat, axes=3)
    assert (gpt2.load_into(keeps, model).ok, gpt2.checkpoint_of(keeps).config) == (True, read.config)
    for wrong, id in ((Odd(nano(model), flat, 0), "cache-inconsistent"), (Masked(nano(model), flat), "padding-wrong")):
        assert [cause.id for cause in diagnose(wrong, model).causes] == [id]
    module.inner.transformer["wte"].register_forward_pre_hook(lambda _, given: given[0] ^ 1)
    with pytest.raises(gpt2.InputError, match="by other numbers than the ids"):  # it said that nothing looks up a table
        gpt2.load_into(module, model)


@pytest.mark.parametrize("axes", [None, 0, *(pytest.param(axes, marks=pytest.mark.slow) for axes in (1, 2))])
def test_a_cache_that_the_caller_appends_to_may_be_right(axes: int | None, model: gpt2.GPT2) -> None:
    """OpenAI's own code returns the keys of new tokens, to be appended: it had a wrong cache; with the last logits alone, too."""
    for times, ids in ((1, []), (0, ["cache-inconsistent"])):
        module = Odd(nano(model), times=times, axes=axes)
        found = diagnose(module, model)
        assert [cause.id for cause in found.causes] == ids
        assert ["put them behind the earlier ones" in note for note in found.notes] == [True] * (axes is None)
        module.register_forward_hook(lambda _, given, output: output | {"logits": output["logits"][:, -1:]})
        assert [cause.id for cause in diagnose(module, model).causes] == ids


def test_a_context_of_one_token_has_a_position() -> None:
    """A table of one row was left as it was, and named as not loaded."""
    one = gpt2.GPT2(replace(CONFIG, n_positions=1))
    assert gpt2.load_into(PORTS["nano"].build(one.config), one).ok
