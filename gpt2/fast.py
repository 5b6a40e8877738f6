"""One more token per row, with as few operators as that takes: the same arithmetic as :mod:`gpt2.model`, and nothing around it.

Reading one token is bound by how fast the weights come out of memory, and then by what every operator and every module costs
to call. Here the weights are looked up once, and a step is a dozen operators a block. Results are those of the model, to the
bit in float32 and float64 on the CPU. It stands in for the model only while nobody could tell: :func:`step_of` gives None as
soon as a module has a hook, is not GPT-2's own (LoRA's, somebody's), or drops out; and it looks again before every step, so
weights that are trained, replaced or merged between two tokens are the ones that are used.

Measured (AVX-512 without AMX or bfloat16 instructions): a matrix stored [in, out] is read by one row at full bandwidth, one
stored [out, in] in bfloat16 at half; and 3 to 15 rows times [out, in] in float32 take longer than 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from .kv_cache import KVCache
from .model import GPT2, MLP, Attention, Block, Conv1D

OWN = {GPT2, Block, Attention, MLP, Conv1D, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.ModuleList}
# What a module computes with beside its parameters and children; None where it must not have one of its own.
ATTRIBUTES = ("attend", "scale", "activation", "eps", "n_head", "layer", "forward", "hidden", "head")
HALVES = (torch.bfloat16, torch.float16)


class Step:
    """A model's weights where a step finds them at once."""

    def __init__(self, model: GPT2) -> None:
        self.n_head, self.shape = model.config.n_head, (model.config.n_embd,)
        self.tokens, self.positions = model.wte.weight, model.wpe.weight
        self.last_norm = _norm(model.ln_f)
        self.blocks = [
            (
                *(_norm(block.ln_1), block.attn.c_attn.weight, block.attn.c_attn.bias, block.attn.attend, block.attn.scale),
                *(block.attn.c_proj.weight, block.attn.c_proj.bias),
                *(_norm(block.ln_2), block.mlp.c_fc.weight, block.mlp.c_fc.bias, block.mlp.activation),
                *(block.mlp.c_proj.weight, block.mlp.c_proj.bias),
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
        same = all(where.get(key) is value for where, key, value in self.found)
        return same and not any(self.hooks) and [type(part) for part in self.parts] == self.types

    def __call__(self, last: Tensor, cache: KVCache, attention_mask: Tensor | None = None) -> Tensor:
        """Read ids (B,) behind what the cache holds; the logits (B, V) of what comes next. See :meth:`GPT2.hidden`."""
        rows, mask = last.size(0), None
        if attention_mask is None:
            x = F.embedding(last, self.tokens) + self.positions[cache.length]  # (B, D)
        else:
            real = attention_mask.bool()  # (B, S)
            x = F.embedding(last, self.tokens) + F.embedding((real.sum(-1) - 1).clamp_(min=0), self.positions)
            mask = real[:, None, None, :].clone()  # (B, 1, 1, S)
            mask[..., -1] = True
        stored, computed = cache.keys.dtype, x.dtype
        layers = enumerate(self.blocks)
        for i, (norm_1, qkv_w, qkv_b, attend, scale, out_w, out_b, norm_2, fc_w, fc_b, bend, proj_w, proj_b) in layers:
            heads = torch.addmm(qkv_b, torch.layer_norm(x, self.shape, *norm_1), qkv_w).to(stored)
            q, k, v = heads.view(rows, 3, self.n_head, 1, -1).unbind(1)  # each (B, H, 1, K)
            k, v = cache.append(i, k, v)  # (B, H, S, K)
            y = attend(q, k, v, mask, scale, 0.0)
            x.add_(torch.addmm(out_b, y.reshape(rows, -1).to(computed), out_w))
            wide = bend(torch.addmm(fc_b, torch.layer_norm(x, self.shape, *norm_2), fc_w))
            x.add_(torch.addmm(proj_b, wide, proj_w))
        cache.advance(1)
        return self.head(torch.layer_norm(x, self.shape, *self.last_norm))

    def head(self, hidden: Tensor) -> Tensor:
        """:meth:`GPT2.head` for few rows (B, D), in whichever way reads the embedding fastest."""
        rows, weight = hidden.size(0), self.tokens
        if not weight.is_cpu or weight.is_inference():  # what is written to those leaves no trace
            return F.linear(hidden, weight)
        if rows == 1 and weight.dtype in HALVES:
            return torch.mm(hidden, self._turned_head())
        if 2 < rows < 16 and weight.dtype == torch.float32:
            return F.linear(F.pad(hidden, (0, 0, 0, 16 - rows)), weight)[:rows]
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
    parts = [(where, key, value) for where in (module._parameters, module._modules) for key, value in where.items()]
    mode = [(module.__dict__, "training", False)] if isinstance(module, (nn.Dropout, Attention)) else []
    return parts + mode + [(module.__dict__, key, module.__dict__.get(key)) for key in ATTRIBUTES]


def _norm(module: nn.LayerNorm) -> tuple[Tensor, Tensor, float]:
    return module.weight, module.bias, module.eps
