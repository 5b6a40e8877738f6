"""Compute next-token logits fast: prefill and decode with weights that are looked up once.

Reading one token is memory-bandwidth-bound, so only the cost of calls can be saved: about a dozen operators per block, the widest
tensors written in place, and only a prompt's last token in the last block. Which of several equal products is fastest depends on
the machine and the count of rows, so it is measured, once in a process.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from timeit import timeit
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.errors import InputError
from gpt2.int8 import Int8Conv1D, Int8Embedding, Int8GPT2, product
from gpt2.kv_cache import KVCache
from gpt2.model import ACTIVATIONS, GPT2, MLP, Attention, AttentionFunction, Block, Conv1D, causal_mask

OWN_CLASSES = {GPT2, Block, Attention, MLP, Conv1D, nn.Embedding, nn.LayerNorm, nn.Dropout, nn.ModuleList}
OWN_CLASSES |= {Int8GPT2, Int8Conv1D, Int8Embedding}
FORWARD_HOOKS = [name for name in vars(nn.Module()) if "forward" in name and "hooks" in name]  # torch's tables in each module
HALF_DTYPES = (torch.bfloat16, torch.float16)
TRIALS = 5  # of each product that is measured; the shortest time counts
MEASURED = 1 << 22  # entries of a weight that a trial reads: milliseconds
FEW_ROWS, MANY_ROWS = 16, 64  # counts up to the first are measured by themselves; beyond the second nothing changes
SPEEDUP_THRESHOLD = 1.1  # below which the more precise product is taken
WEIGHT_CHUNK = 256  # rows of a weight that are converted at a time, so that they stay in the CPU's cache
ROW_CHUNK = 64  # rows of activations per GELU call, for the same reason; from this number on, buffers are shared
GELU_FACTOR = 2 * math.sqrt(2 / math.pi)


class Decoder:
    """Read tokens with a model of fixed weights and return the logits of the next token, without gradients or dropout.

    **Build another decoder after training, merging or replacing weights**: they are looked up once. The model's own forward pass
    runs where the fast one might differ: with a forward hook, a replaced method, a module of another class (an adapter),
    autocast, or a padded prompt. Hooks that torch registers for all modules at once are not called.
    """

    def __init__(self, model: GPT2) -> None:
        if model.wte.weight.is_meta:
            raise InputError("the model is on the meta device and holds no weights; load it on the cpu")
        self.model = model
        same = not torch.is_autocast_enabled(model.wte.weight.device.type) and all(map(_runs_own_code, model.modules()))
        self.forward_pass = ForwardPass(model) if same else None

    @torch.inference_mode()
    def prefill(self, ids: Tensor, cache: KVCache | None = None, attention_mask: Tensor | None = None) -> Tensor:
        """Read (B, T) ids, as :meth:`GPT2.hidden` does; return the logits (B, V) of the token after the last."""
        forward_pass = self._forward_pass(ids, cache) if attention_mask is None else None
        if forward_pass is not None:
            return forward_pass(ids, cache)
        with evaluating(self.model):
            return self.model.head(self.model.hidden(ids, attention_mask=attention_mask, cache=cache)[:, -1])

    @torch.inference_mode()
    def decode(self, ids: Tensor, cache: KVCache, attention_mask: Tensor | None = None) -> Tensor:
        """Read (B, T) more ids; return the logits (B, T, V) after each. ``attention_mask`` (B, S) covers cached tokens too.

        A 16-bit cache on a CPU is converted to float32.
        """
        one_each = attention_mask is None or (ids.size(1) == 1 and attention_mask.shape == (len(ids), cache.length + 1))
        forward_pass = self._forward_pass(ids, cache) if one_each else None
        if forward_pass is not None:
            if cache.keys.is_cpu and cache.keys.dtype in HALF_DTYPES:  # attention over a long 16-bit cache is five times slower
                cache.convert(torch.float32)
            return forward_pass(ids, cache, attention_mask, decoding=True).view(*ids.shape, -1)
        with evaluating(self.model):
            return self.model(ids, attention_mask=attention_mask, cache=cache)

    def _forward_pass(self, ids: Tensor, cache: KVCache | None) -> "ForwardPass | None":
        """Return None if the model must run itself; raise its error for too many tokens."""
        seen = ids.size(1) + (0 if cache is None else cache.length)
        return self.forward_pass if seen <= self.model.config.n_positions else None


Linear = Callable[[Tensor, Tensor | None], Tensor]  # (rows, out): the product and the bias, in out's memory if it is given
Norm = tuple[Tensor, Tensor, float]  # weight, bias, epsilon


class BlockWeights(NamedTuple):
    """The weights and functions of one block."""

    ln_1: Norm
    c_attn: Linear
    attend: AttentionFunction
    scale: float
    attn_c_proj: Linear
    ln_2: Norm
    c_fc: Linear
    activation: Callable[[Tensor], Tensor]
    mlp_c_proj: Linear


class ForwardPass:
    """GPT-2's forward pass over weights that were looked up once; shapes as in :mod:`gpt2.model`."""

    def __init__(self, model: GPT2) -> None:
        self.n_head, self.shape = model.config.n_head, (model.config.n_embd,)
        self.qkv_width, self.inner_width = 3 * model.config.n_embd, model.config.inner
        self.embed, self.positions = model.wte.forward, model.wpe.weight
        self.head = model.head_table.weight
        self.head_scale = model.head_table.get_buffer("scale") if isinstance(model, Int8GPT2) else None
        self.prepared_head: dict[Product, Tensor] = {}
        self.ln_f = _norm(model.ln_f)
        self.blocks = [
            BlockWeights(
                *(_norm(block.ln_1), _linear(block.attn.c_attn), block.attn.attend, block.attn.scale),
                *(_linear(block.attn.c_proj), _norm(block.ln_2), _linear(block.mlp.c_fc)),
                *(_in_place(block.mlp.activation), _linear(block.mlp.c_proj)),
            )
            for block in model.h
        ]

    def __call__(
        self, ids: Tensor, cache: KVCache | None = None, attention_mask: Tensor | None = None, decoding: bool = False
    ) -> Tensor:
        """Read (B, T) ids behind those in the cache; return the logits (B, V) after the last.

        ``attention_mask`` (B, S) needs T = 1. ``decoding`` returns the logits (B T, V) after every id and may copy the head.
        """
        rows, tokens = ids.shape
        past, mask = 0 if cache is None else cache.length, None
        if attention_mask is None:
            x = self.embed(ids) + self.positions[past : past + tokens]  # (B, T, D)
            if past > 0 and tokens > 1:
                mask = causal_mask(tokens, past + tokens, ids.device)
        else:
            real = attention_mask.bool()  # (B, S)
            x = self.embed(ids) + F.embedding((real.sum(-1, keepdim=True) - 1).clamp_(min=0), self.positions)
            mask = real[:, None, None, :].clone()  # (B, 1, 1, S)
            mask[..., -1] = True
        x = x.view(rows * tokens, -1)  # (B T, D)
        computed = x.dtype
        stored = computed if cache is None else cache.keys.dtype
        last = len(self.blocks) - 1
        qkv_out = inner_out = None
        if len(x) >= ROW_CHUNK:  # all blocks share one buffer: new memory would be zeroed first
            buffer = x.new_empty(len(x) * max(self.qkv_width, self.inner_width))
            qkv_out = buffer[: len(x) * self.qkv_width].view(len(x), -1)
            inner_out = buffer[: len(x) * self.inner_width].view(len(x), -1)
        for layer, block in enumerate(self.blocks):
            qkv = block.c_attn(torch.layer_norm(x, self.shape, *block.ln_1), qkv_out).to(stored)
            q, k, v = qkv.view(rows, tokens, 3, self.n_head, -1).permute(2, 0, 3, 1, 4).unbind()  # each (B, H, T, K)
            if cache is not None:
                k, v = cache.append(layer, k, v)  # (B, H, S, K)
            if layer == last and tokens > 1 and not decoding:
                q, x = q[:, :, -1:], x.view(rows, tokens, -1)[:, -1].clone()  # (B, H, 1, K), (B, D)
                mask = inner_out = None  # the last token attends to all
            y = block.attend(q, k, v, mask, block.scale, 0.0)
            x.add_(block.attn_c_proj(y.transpose(1, 2).reshape(len(x), -1).to(computed), None))
            inner = block.activation(block.c_fc(torch.layer_norm(x, self.shape, *block.ln_2), inner_out))  # (B T, F)
            x.add_(block.mlp_c_proj(inner, None))
        if cache is not None:
            cache.advance(tokens)
        return self._head(torch.layer_norm(x, self.shape, *self.ln_f), decoding)

    def _head(self, hidden: Tensor, decoding: bool) -> Tensor:
        """Compute :meth:`GPT2.head` for a few rows, by the product that reads the weight fastest; decoding may copy it."""
        rows, weight = len(hidden), self.head
        if self.head_scale is not None:
            return product(hidden, weight, self.head_scale)
        ways = HEADS.get(weight.dtype, HEADS[torch.float32][:1])
        way = fastest(ways if decoding and rows == 1 else ways[:2], weight, rows)
        if way not in self.prepared_head:
            self.prepared_head[way] = way.prepare(weight)
        return way.multiply(hidden, self.prepared_head[way])


@contextmanager
def evaluating(model: GPT2) -> Iterator[None]:
    """Switch dropout off; restore the mode of every module afterwards. A model in eval mode stays untouched."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _runs_own_code(module: nn.Module) -> bool:
    """Return whether calling the module runs the forward of its class, a class known here, and no hook."""
    own = vars(module)
    replaced = own.keys() & {"forward", "hidden", "head"}
    return type(module) in OWN_CLASSES and not replaced and not any(own[name] for name in FORWARD_HOOKS)


def _norm(module: nn.LayerNorm) -> Norm:
    return module.weight, module.bias, module.eps


def _linear(module: Conv1D | Int8Conv1D) -> Linear:
    weight, bias = module.weight, module.bias
    if isinstance(module, Int8Conv1D):
        scale = module.scale
        return lambda x, out: product(x, weight, scale, bias, out)
    if weight.dtype in HALF_DTYPES:
        return lambda x, out: fastest(LINEAR_16_BIT, weight, len(x), bias).multiply(x, weight, bias)
    return lambda x, out: torch.addmm(bias, x, weight, out=out)


class Product(NamedTuple):
    """A way to multiply rows by a weight that was prepared for it, and add the bias if there is one."""

    multiply: Callable[..., Tensor]
    prepare: Callable[[Tensor], Tensor] = lambda weight: weight


_fastest: dict[tuple[object, ...], Product] = {}


def fastest(ways: Sequence[Product], weight: Tensor, rows: int, bias: Tensor | None = None) -> Product:
    """Return the fastest of several products of ``rows`` rows with ``weight`` on this CPU; the first one on other devices.

    It is measured once in a process for each count of rows, in turn, and the first, PyTorch's own, is taken unless another is
    clearly faster: adding one term after another, as others may, is less precise. With a ``bias`` the weight is (in, out).
    """
    if not weight.is_cpu or len(ways) == 1:
        return ways[0]
    count = rows if rows <= FEW_ROWS else min(MANY_ROWS, 1 << (rows - 1).bit_length())
    key = (*ways, weight.dtype, weight.shape, count, torch.get_num_threads())
    if key not in _fastest:
        part = weight[: max(1, MEASURED // weight.size(1))] if bias is None else weight
        x = part.new_ones(count, part.size(1) if bias is None else part.size(0))
        calls = [partial(way.multiply, x, way.prepare(part), *(() if bias is None else (bias,))) for way in ways]
        trials = [[timeit(call, number=1) for call in calls] for _ in range(TRIALS)]
        first, *others = (min(times) for times in zip(*trials, strict=True))
        best = min(range(len(others)), key=others.__getitem__)
        _fastest[key] = ways[1 + best] if others[best] * SPEEDUP_THRESHOLD < first else ways[0]
    return _fastest[key]


def _head_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return torch.cat([F.linear(wide, part.float()) for part in weight.split(4 * WEIGHT_CHUNK)], dim=1).to(x.dtype)


def _linear_in_float32(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Multiply 16-bit numbers in float32 and round the result once."""
    wide, y = x.float(), bias.float().repeat(len(x), 1)
    chunk = WEIGHT_CHUNK if len(x) < WEIGHT_CHUNK else weight.size(0)  # with many rows, the results alone fill the cache
    for inputs, part in zip(wide.split(chunk, 1), weight.split(chunk), strict=True):
        y.addmm_(inputs, part.float())
    return y.to(x.dtype)


_HEAD_16_BIT = (Product(F.linear), Product(_head_in_float32), Product(torch.mm, lambda weight: weight.t().contiguous()))
HEADS: dict[torch.dtype, tuple[Product, ...]] = {
    torch.float32: (Product(F.linear), Product(lambda x, weight: torch.mm(weight, x.t()).t().contiguous())),
    **dict.fromkeys(HALF_DTYPES, _HEAD_16_BIT),
}
LINEAR_16_BIT = Product(lambda x, weight, bias: torch.addmm(bias, x, weight)), Product(_linear_in_float32)


def _in_place(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Replace tanh-GELU by a version that overwrites its input: allocating (B T, F) takes longer than filling it."""
    tanh_gelu = [ACTIVATIONS[name] for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")]
    return _tanh_gelu_ if activation in tanh_gelu else activation


def _tanh_gelu_(h: Tensor) -> Tensor:
    """Compute tanh-GELU in place. For many rows use 0.5 x (1 + tanh(u)) = x sigmoid(2 u): as precise, in 2/3 of the time."""
    if len(h) < ROW_CHUNK or h.dtype != torch.float32 or not h.is_cpu:
        return torch._C._nn.gelu_(h, approximate="tanh")  # type: ignore[attr-defined]
    for x in h.split(ROW_CHUNK):
        x.mul_(torch.square(x).mul_(0.044715 * GELU_FACTOR).add_(GELU_FACTOR).mul_(x).sigmoid_())
    return h
