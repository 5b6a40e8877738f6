"""What comes next, with as few operators as that takes: the same arithmetic as :mod:`gpt2.model`, and nothing around it.

Reading one token is bound by how fast the weights come out of memory, and then by what every operator and every module costs
to call. Here the weights are looked up once, and a step is a dozen operators a block. A prompt is read the same way, with its
widest tensors written in place and without what nobody asked for. It stands in for the model only while nobody could tell:
:func:`step_of` gives None as soon as a module has a hook, is not GPT-2's own (LoRA's, somebody's), or drops out; and it looks
again before every step, so weights that are trained, replaced or merged between two tokens are the ones that are used.

Measured (AVX-512 without AMX or bfloat16 instructions): a matrix stored [in, out] is read by one row at full bandwidth, one
stored [out, in] in bfloat16 at half; and the head takes 3 to 16 rows 15 to 50 percent longer from [out, in], in float32. What is
read again and again from such a head is a copy that lies the other way, made at the second step. Without bfloat16 instructions,
4 rows and more are faster by way of float32, and in float16 any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from gpt2.int8 import Int8Conv1D, Int8Embedding, Int8GPT2, product
from gpt2.kv_cache import KVCache
from gpt2.model import ACTIVATIONS, GPT2, MLP, Attention, Block, Conv1D, causal_mask

OWN = {GPT2, Block, Attention, MLP, Conv1D, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.ModuleList}
OWN |= {Int8GPT2, Int8Conv1D, Int8Embedding}
# What a module computes with beside its parameters and children.
SETTINGS = {Attention: ("attend", "scale", "training"), MLP: ("activation",), nn.LayerNorm: ("eps",), nn.Dropout: ("training",)}
HALVES = (torch.bfloat16, torch.float16)
# Rows from which on a processor without instructions for such products is faster if it converts the weights to float32 each time.
WORTH = {torch.bfloat16: 4, torch.float16: 1}
TWICE = 2 * math.sqrt(2 / math.pi)
SOME = 64  # rows that are many; and so many, of the feed-forward's width, are bent at a time
PIECE = 256  # rows of a weight that are converted at a time, to be multiplied while they are in the cache


class Step:
    """A model's weights where a step finds them at once."""

    def __init__(self, model: GPT2) -> None:
        self.n_head, self.shape = model.config.n_head, (model.config.n_embd,)
        self.widths = 3 * model.config.n_embd, model.config.inner
        self.embed, self.positions = model.wte.forward, model.wpe.weight
        self.tokens = model.wte.weight
        self.scale = model.wte.scale if isinstance(model, Int8GPT2) else None  # of each token's row of eight bits
        self.last_norm = _norm(model.ln_f)
        self.blocks = [
            (
                *(_norm(block.ln_1), _affine(block.attn.c_attn), block.attn.attend, block.attn.scale, _affine(block.attn.c_proj)),
                *(_norm(block.ln_2), _affine(block.mlp.c_fc), _in_place(block.mlp.activation), _affine(block.mlp.c_proj)),
            )
            for block in model.h
        ]
        self.turned: Tensor | None = None  # the head's weight as [in, out], with the version it was made of
        self.version = -1
        modules = list(model.modules())
        self.parts = modules[1:]  # all but the model, which would never be freed if this held it
        self.types = [type(part) for part in self.parts]
        self.found = [watched for module in modules for watched in _watched(module)]
        self.hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]

    def stands(self) -> bool:
        """Whether the model is still what it was when this was made."""
        for where, key, value in self.found:  # a loop, for it runs before every token: twice as fast as all()
            if where.get(key) is not value:
                return False
        return not any(self.hooks) and list(map(type, self.parts)) == self.types

    def __call__(
        self, ids: Tensor, cache: KVCache | None = None, attention_mask: Tensor | None = None, every: bool = False
    ) -> Tensor:
        """Read (B, T) ids, behind what the cache holds; the logits (B, V) of what comes next. See :meth:`GPT2.hidden`.

        Of the last block, whatever only the earlier tokens' logits would need is left out, unless ``every`` token's are asked
        for: (B T, V). An ``attention_mask`` is for one token.
        """
        rows, tokens = ids.shape
        past, mask = 0 if cache is None else cache.length, None
        if attention_mask is None:
            x = self.embed(ids) + self.positions[past : past + tokens]  # (B, T, D)
            if past > 0 and tokens > 1:
                mask = causal_mask(tokens, past + tokens, ids.device)
        else:
            real = attention_mask.bool()  # (B, S), and T is 1
            x = self.embed(ids) + F.embedding((real.sum(-1, keepdim=True) - 1).clamp_(min=0), self.positions)
            mask = real[:, None, None, :].clone()  # (B, 1, 1, S)
            mask[..., -1] = True
        x = x.view(rows * tokens, -1)  # (B T, D)
        computed = x.dtype
        stored = computed if cache is None else cache.keys.dtype
        last = len(self.blocks) - 1
        heads = inner = None
        if len(x) >= SOME:  # every block's two widest tensors take turns in one piece of memory: a new one is filled with zeros
            wide = x.new_empty(len(x) * max(self.widths))
            heads, inner = (wide[: len(x) * width].view(len(x), width) for width in self.widths)
        for i, (norm_1, c_attn, attend, scale, out, norm_2, c_fc, activation, narrow) in enumerate(self.blocks):
            qkv = c_attn(torch.layer_norm(x, self.shape, *norm_1), heads).to(stored)
            q, k, v = qkv.view(rows, tokens, 3, self.n_head, -1).permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, K)
            if cache is not None:
                k, v = cache.append(i, k, v)  # (B, H, S, K)
            if i == last and tokens > 1 and not every:
                q, x = q[:, :, -1:], x.view(rows, tokens, -1)[:, -1].clone()  # the last token alone goes on,
                mask = inner = None  # which sees all
            y = attend(q, k, v, mask, scale, 0.0)
            x.add_(out(y.transpose(1, 2).reshape(len(x), -1).to(computed)))
            x.add_(narrow(activation(c_fc(torch.layer_norm(x, self.shape, *norm_2), inner))))
        if cache is not None:
            cache.advance(tokens)
        return self.head(torch.layer_norm(x, self.shape, *self.last_norm), again=past > 0)

    def head(self, hidden: Tensor, again: bool) -> Tensor:
        """:meth:`GPT2.head` for few rows (B, D); the fastest way where it will be read ``again`` and again."""
        rows, weight = hidden.size(0), self.tokens
        if self.scale is not None:
            return product(hidden, weight, self.scale)
        if _converts(weight, rows):
            x = hidden.float()
            return torch.cat([F.linear(x, part.float()) for part in weight.split(4 * PIECE)], dim=1).to(hidden.dtype)
        if not again or not weight.is_cpu or weight.is_inference():  # what is written to those leaves no trace
            return F.linear(hidden, weight)
        if (rows == 1 and weight.dtype in HALVES) or (2 < rows <= 16 and weight.dtype == torch.float32):
            return torch.mm(hidden, self._turned_head())
        return F.linear(hidden, weight)

    def _turned_head(self) -> Tensor:
        """A copy, which must never outlive what it was made of: a write through ``.data`` counts no version, but is seen."""
        weight, sample = self.tokens, slice(None, None, 4001)
        if self.turned is None or self.version != weight._version or not torch.equal(self.turned[:, sample], weight[sample].t()):
            self.turned, self.version = weight.t().contiguous(), weight._version
        return self.turned


_STEPS: WeakKeyDictionary[GPT2, Step] = WeakKeyDictionary()


def step_of(model: GPT2) -> Step | None:
    """The step that computes what ``model`` would; None where only the model itself can.

    None while autograd records, under autocast, with a hook on any module, with a module of another type than GPT-2's own,
    with dropout on, or with a method replaced. What was prepared is kept for the next call, and dropped with the model.
    """
    if torch.is_grad_enabled() or torch.is_autocast_enabled(model.wte.weight.device.type):
        return None
    if hooks_of_all._global_forward_hooks or hooks_of_all._global_forward_pre_hooks:
        return None
    step = _STEPS.get(model)
    if step is None or type(model) not in OWN or not step.stands():
        _STEPS.pop(model, None)
        step = Step(model) if all(map(_plain, model.modules())) else None
        if step is not None:
            _STEPS[model] = step
    return step


def for_attention(cache: KVCache) -> KVCache:
    """What a step reads fastest. A CPU without instructions for 16 bits converts them as it goes: five times slower at 900."""
    return cache.to(torch.float32) if cache.keys.is_cpu and cache.keys.dtype in HALVES else cache


def _plain(module: nn.Module) -> bool:
    """Whether a module does what its class says and no more."""
    own = type(module) in OWN and not {"forward", "hidden", "head"} & module.__dict__.keys()
    drops = module.training and isinstance(module, (nn.Dropout, Attention))
    return own and not drops and not module._forward_hooks and not module._forward_pre_hooks


def _watched(module: nn.Module) -> list[tuple[Mapping[str, Any], str, Any]]:
    """All that a step takes for granted of one module."""
    contents = module._parameters, module._buffers, module._modules
    methods = ("hidden", "head") if isinstance(module, GPT2) else ("forward",)
    own = [(vars(module), key, vars(module).get(key)) for key in (*methods, *SETTINGS.get(type(module), ()))]
    return own + [(where, key, value) for where in contents for key, value in where.items()]


def _affine(module: Conv1D | Int8Conv1D) -> Callable[..., Tensor]:
    """The map, and where there is a second argument of the result's size, in its memory if that spares any."""
    weight, bias = module.weight, module.bias
    if isinstance(module, Int8Conv1D):
        scale = module.scale
        return lambda x, out=None: product(x, weight, scale, bias, out)
    if weight.dtype in HALVES:
        return lambda x, out=None: _by_float32(x, weight, bias) if _converts(weight, len(x)) else torch.addmm(bias, x, weight)
    return lambda x, out=None: torch.addmm(bias, x, weight, out=out)


def _converts(weight: Tensor, rows: int) -> bool:
    if rows < WORTH.get(weight.dtype, rows + 1) or not weight.is_cpu or not torch.cpu._is_avx2_supported():
        return False
    if weight.dtype == torch.float16:
        return not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _by_float32(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """An affine map in sixteen bits, multiplied in float32 and rounded once."""
    wide, y = x.float(), bias.float().repeat(len(x), 1)
    rows = PIECE if len(x) < PIECE else weight.size(0)  # of many rows, the sums themselves are what fills the cache
    for inputs, part in zip(wide.split(rows, 1), weight.split(rows), strict=True):
        y.addmm_(inputs, part.float())
    return y.to(x.dtype)


def _in_place(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """GPT-2's activation without another tensor four times as wide as the stream, which costs more to allocate than to fill."""
    tanh = [ACTIVATIONS[name] for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")]
    return _tanh_gelu_ if activation in tanh else activation


def _tanh_gelu_(h: Tensor) -> Tensor:
    """``0.5 x (1 + tanh(u))`` is ``x sigmoid(2 u)``: as precise, and in parts that stay in the cache two thirds of the time."""
    if len(h) < SOME or h.dtype != torch.float32 or not h.is_cpu:
        return torch._C._nn.gelu_(h, approximate="tanh")
    for x in h.split(SOME):
        x.mul_(torch.square(x).mul_(0.044715 * TWICE).add_(TWICE).mul_(x).sigmoid_())
    return h


def _norm(module: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return module.weight, module.bias, module.eps
