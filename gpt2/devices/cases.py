"""All operators of a GPT-2's forward pass, in the order of computation, each from its simplest condition on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.devices import attention
from gpt2.devices.case import IN_ORDER, Case, Material, strided
from gpt2.kv_cache import KVCache
from gpt2.model import ACTIVATIONS


def forward_cases(m: Material) -> Iterator[Case]:
    """Yield every operator's cases, in the order of computation."""
    yield from _embedding(m)
    yield from _norm(m)
    yield from _products(m)
    yield from attention.steps(m)
    yield from attention.fused(m)
    yield from _elementwise(m)
    yield from _cache(m)
    yield from _head(m)


def _embedding(m: Material) -> Iterator[Case]:
    def run(wte: Tensor, wpe: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return F.embedding(ids, wte), F.embedding(torch.arange(ids.size(1), device=ids.device), wpe)

    wte, wpe = m.weight("wte.weight"), m.weight("wpe.weight")
    yield Case("embedding lookup", "one row", run, (wte, wpe, m.ids[:1]), trained=False)

    def last_only(wte: Tensor, wpe: Tensor, ids: Tensor, above: Tensor, above_positions: Tensor) -> tuple[Tensor, ...]:
        table = torch.zeros_like(wte)
        table[ids.flatten()] = above.flatten(0, 1)
        positions = torch.zeros_like(wpe)
        positions[: ids.size(1)] = above_positions
        return table, positions

    once = (("the gradients of an id that occurs twice are not added up", last_only),)
    yield Case("embedding lookup", "B > 1", run, (wte, wpe, m.ids), wrong_gradients=once)


def _norm(m: Material) -> Iterator[Case]:
    eps, x = m.config.layer_norm_epsilon, m.traced["embed"]
    affine = m.weight("h.0.ln_1.weight"), m.weight("h.0.ln_1.bias")

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return (F.layer_norm(x, weight.shape, weight, bias, eps),)

    plain = Case("layer norm", "one row", run, (x[:1], *affine))
    yield plain
    yield replace(plain, condition="B > 1", inputs=(x, *affine))
    yield strided(plain, lambda x: x.transpose(0, 1), x, "non-contiguous input")
    outlier = x.clone()
    outlier[..., 0] = 3000.0 + 300.0 * torch.tanh(x[..., 1])  # trained GPT-2s have such entries, which vary by token
    overflow = ("its variance overflows, and only the bias is left", lambda x, weight, bias: (bias.expand_as(x),))
    yield replace(plain, condition="entries of 3,000", inputs=(outlier, *affine), wrong=(overflow,))


def _products(m: Material) -> Iterator[Case]:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return (torch.addmm(bias, x.reshape(-1, x.size(-1)), weight),)

    def of(module: str) -> tuple[Tensor, Tensor]:
        return m.weight(f"h.0.{module}.weight"), m.weight(f"h.0.{module}.bias")

    x, c_attn = m.traced["h.0.ln_1"], of("attn.c_attn")
    plain = Case("matrix product", "c_attn, one token", run, (x[:1, :1], *c_attn), trained=False)
    yield plain
    yield replace(plain, condition="c_attn, one row", inputs=(x[:1], *c_attn))
    yield replace(plain, condition="c_attn, B > 1", inputs=(x, *c_attn), trained=True)
    yield replace(plain, condition="inputs of 1e-6", inputs=(x * 2.0**-18, c_attn[0], torch.zeros_like(c_attn[1])))
    yield replace(plain, condition="attn.c_proj", inputs=(m.traced["h.0.attn.heads"], *of("attn.c_proj")))
    yield replace(plain, condition="c_fc", inputs=(m.traced["h.0.ln_2"], *of("mlp.c_fc")))
    yield replace(plain, condition="mlp.c_proj", inputs=(m.traced["h.0.mlp.act"], *of("mlp.c_proj")), trained=True)
    yield strided(plain, lambda x: x.transpose(0, 1)[..., ::2], m.normal(*x.shape[:2], 2 * x.size(2)), "non-contiguous input")

    def transposed(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return run(x, weight.t(), bias)

    def in_order(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return run(x, weight.reshape(weight.t().shape), bias)

    weight = c_attn[0].t().contiguous()
    yield replace(
        plain,
        condition="non-contiguous weight",
        run=transposed,
        inputs=(x, weight, c_attn[1]),
        wrong=((IN_ORDER, in_order),),
        trained=True,
    )


def _elementwise(m: Material) -> Iterator[Case]:
    activation, name = ACTIVATIONS[m.config.activation_function], m.config.activation_function
    operator = "GELU" if "gelu" in name else name

    def act(x: Tensor) -> tuple[Tensor, ...]:
        return (activation(x),)

    x, y = m.traced["embed"], m.traced["h.0.attn.c_proj"]
    exact = ("it computes the exact GELU, not the tanh form", lambda x: (F.gelu(x),)) if name != "gelu" else None
    yield Case(operator, "c_fc's output", act, (m.traced["h.0.mlp.c_fc"],), wrong=(exact,) if exact else ())
    yield Case(operator, "inputs of -60 to 60", act, (torch.linspace(-60, 60, 242).view(11, 22),))
    yield Case("residual sum", "x + y", lambda x, y: (x + y,), (x, y))
    lost = (("the sum in place is lost", lambda x, y: (x,)),)
    yield Case("residual sum", "in place", lambda x, y: (x.add_(y),), (x, y), wrong=lost, trained=False)

    def into_view(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        x.transpose(0, 1).add_(y.transpose(0, 1))
        return (x,)

    yield Case("residual sum", "in place, non-contiguous", into_view, (x, y), wrong=lost, trained=False)
    for smallest, dtypes in ((2.0**-130, (torch.float32, torch.bfloat16)), (2.0**-20, (torch.float16,))):
        tiny = torch.full((8, 8), smallest)
        yield Case("residual sum", "subnormal numbers", lambda x: (x + x,), (tiny,), dtypes=dtypes, trained=False)


def _cache(m: Material) -> Iterator[Case]:
    """Two appends to one layer of the cache; what is read must be both."""
    q, k = (m.traced[f"h.0.attn.{part}"].unflatten(-1, (m.config.n_head, -1)).transpose(1, 2).contiguous() for part in "qk")
    config = replace(m.config, n_layer=2)

    def run(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        cache = KVCache(config, len(k), k.size(2), dtype=k.dtype, device=k.device)
        cache.keys.zero_(), cache.values.zero_()
        half = k.size(2) - 1
        cache.append(1, k[:, :, :half], v[:, :, :half])
        cache.advance(half)
        return cache.append(1, k[:, :, half:], v[:, :, half:])

    def stale(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        keys, values = run(k, v)
        keys[:, :, -1], values[:, :, -1] = 0, 0
        return keys, values

    wrong = (
        ("the cache is stale: the second append is lost", stale),
        ("the cache is stale: nothing that is appended arrives", lambda k, v: (torch.zeros_like(k), torch.zeros_like(v))),
    )
    yield Case("cache", "two appends", run, (k, q), wrong, trained=False)


def _head(m: Material) -> Iterator[Case]:
    hidden, wte = m.traced["ln_f"], m.model.head_table.weight.detach()
    targets = m.ids.roll(-1, 1)

    def logits(x: Tensor, wte: Tensor) -> tuple[Tensor, ...]:
        return (F.linear(x, wte),)

    yield Case("logits", "one token", lambda x, wte: (F.linear(x[:, -1], wte),), (hidden[:1], wte), trained=False)
    yield Case("logits", "last token, B > 1", lambda x, wte: (F.linear(x[:, -1], wte),), (hidden, wte), trained=False)
    yield Case("logits", "all tokens", logits, (hidden[:, -4:].contiguous(), wte))
    rows = F.linear(hidden, wte).flatten(0, 1)

    def loss(rows: Tensor, targets: Tensor, reduction: str = "mean") -> tuple[Tensor, ...]:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))  # as training computes it
        return (F.cross_entropy(wide, targets, reduction=reduction),)

    yield Case("loss", "mean", loss, (rows, targets.flatten()))
    yield Case("loss", "one a token", partial(loss, reduction="none"), (rows, targets.flatten()))

    def sample(rows: Tensor) -> tuple[Tensor, ...]:
        return rows.gather(-1, rows.argmax(-1, keepdim=True)), rows.topk(min(5, rows.size(-1))).values, rows.sort(-1).values

    yield Case("sampling", "argmax, topk, sort", sample, (rows,), trained=False)
