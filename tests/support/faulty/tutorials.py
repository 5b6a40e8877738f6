"""Implementations as tutorials teach them, each with its typical faults.

`lecture`: a ModuleList of heads without biases, exact GELU, a block that adds to the normalised stream. `translation`: norms
after each residual, ReLU, scores divided by the square root of the width. `notation`: einsum projections, a norm that applies
its affine to its input, scores scaled twice, the logarithm of a triangle as mask.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from support.faulty.loading import put


class LectureHead(nn.Module):
    def __init__(self, config):
        super().__init__()
        size = config.n_embd // config.n_head
        self.key = nn.Linear(config.n_embd, size, bias=False)
        self.query = nn.Linear(config.n_embd, size, bias=False)
        self.value = nn.Linear(config.n_embd, size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(config.n_positions, config.n_positions)))

    def forward(self, x):
        t, k = x.shape[1], self.key(x)
        wei = self.query(x) @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:t, :t] == 0, float("-inf")).softmax(-1)
        return wei @ self.value(x)


class LectureBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = nn.ModuleList(LectureHead(config) for _ in range(config.n_head))
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.net = nn.Sequential(nn.Linear(config.n_embd, config.inner), nn.GELU(), nn.Linear(config.inner, config.n_embd))
        self.ln1, self.ln2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)

    def forward(self, x):
        x = self.ln1(x)
        x = x + self.proj(torch.cat([head(x) for head in self.heads], -1))
        x = self.ln2(x)
        return x + self.net(x)


class TranslationBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        self.h = config.n_head
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d, d) for _ in range(4))
        self.inner, self.outer = nn.Linear(d, config.inner), nn.Linear(config.inner, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def attention(self, x):
        b, t, d = x.shape
        q, k, v = (w(x).view(b, t, self.h, -1).transpose(1, 2) for w in (self.w_q, self.w_k, self.w_v))
        energy = torch.einsum("bhqd,bhkd->bhqk", q, k)
        energy = energy.masked_fill(torch.tril(torch.ones(t, t)) == 0, -1e20)
        return self.w_o((torch.softmax(energy / d**0.5, dim=3) @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x):
        x = self.norm1(self.attention(x) + x)
        return self.norm2(self.outer(torch.relu(self.inner(x))) + x)


class NotationNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        del normed  # computed and not used
        return torch.einsum("btd,d->btd", x, self.scale) + self.offset


class NotationBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, f, self.h = config.n_embd, config.inner, config.n_head
        self.qkv, self.qkv_bias = nn.Parameter(torch.randn(3, d, d) * 0.02), nn.Parameter(torch.zeros(3, d))
        self.o, self.o_bias = nn.Parameter(torch.randn(d, d) * 0.02), nn.Parameter(torch.zeros(d))
        self.up, self.up_bias = nn.Parameter(torch.randn(d, f) * 0.02), nn.Parameter(torch.zeros(f))
        self.down, self.down_bias = nn.Parameter(torch.randn(f, d) * 0.02), nn.Parameter(torch.zeros(d))
        self.n1, self.n2 = NotationNorm(d), NotationNorm(d)

    def attention(self, x):
        q, k, v = torch.einsum("btd,sde->sbte", x, self.qkv) + self.qkv_bias[:, None, None]
        q, k, v = (part.unflatten(-1, (self.h, -1)) for part in (q, k, v))
        root = math.sqrt(q.size(-1))
        scores = torch.einsum("bthk,bshk->bhts", q / root, k) / root
        scores = scores + torch.log(torch.tril(torch.ones(x.size(1), x.size(1), dtype=x.dtype)))
        y = torch.einsum("bhts,bshk->bthk", scores.softmax(-1), v).flatten(2)
        return torch.einsum("btd,de->bte", y, self.o) + self.o_bias

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        y = torch.einsum("btd,df->btf", self.n2(x), self.up) + self.up_bias
        return x + torch.einsum("btf,fd->btd", F.gelu(y, approximate="tanh"), self.down) + self.down_bias


class Around(nn.Module):
    """Embeddings, blocks of the given kind, norm and head."""

    def __init__(self, config, block, last):
        super().__init__()
        self.tok, self.pos = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.Sequential(*(block(config) for _ in range(config.n_layer)))
        self.last = last(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.shape[1]))
        return self.lm_head(self.last(self.blocks(x)))


KINDS = {
    "lecture": lambda config: Around(config, LectureBlock, nn.LayerNorm),
    "translation": lambda config: Around(config, TranslationBlock, nn.LayerNorm),
    "notation": lambda config: Around(config, NotationBlock, NotationNorm),
}


def fill(model, state):
    """Fill by the names of each kind; tensors without a place are left out."""
    put(model, state, {"tok": "wte", "pos": "wpe", "lm_head": "head", "last": "ln_f"})
    for layer, block in enumerate(model.blocks):
        at = f"h.{layer}."
        if isinstance(block, LectureBlock):
            put(block, state, {"ln1": "ln_1", "ln2": "ln_2", "proj": "attn.c_proj.T"}, at)
            put(block.net, state, {"0": "mlp.c_fc.T", "2": "mlp.c_proj.T"}, at)
            for name in ("query", "key", "value"):
                columns = state[f"{at}{name[0]}.weight"].chunk(len(block.heads), 1)
                for head, part in zip(block.heads, columns, strict=True):
                    getattr(head, name).weight.copy_(part.t())
        elif isinstance(block, TranslationBlock):
            put(block, state, {"norm1": "ln_1", "w_q": "q.T", "w_k": "k.T", "w_v": "v.T", "w_o": "attn.c_proj.T"}, at)
            put(block, state, {"norm2": "ln_2", "inner": "mlp.c_fc.T", "outer": "mlp.c_proj.T"}, at)
        else:
            block.qkv.copy_(torch.stack([state[f"{at}{x}.weight"] for x in "qkv"]))
            put(block, state, {"n1": "ln_1", "n2": "ln_2", "qkv_bias": "attn.c_attn.bias"}, at)
            for own, name in {"o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}.items():
                put(block, state, {own: f"{name}.weight", f"{own}_bias": f"{name}.bias"}, at)
