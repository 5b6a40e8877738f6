"""Keys as the checkpoint's, down to the buffers: [in, out] matrices, masks, a cache that is passed along, an output object."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Output(NamedTuple):
    loss: Tensor | None
    logits: Tensor
    cache: list[tuple[Tensor, Tensor]]


class Conv1D(nn.Module):
    """A Linear the other way round."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_in, width_out) * 0.02)
        self.bias = nn.Parameter(torch.zeros(width_out))

    def forward(self, x):
        return x @ self.weight + self.bias


def gelu(x):
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x * x * x)
    return x * (torch.tanh(inner) + 1) / 2


class Attention(nn.Module):
    def __init__(self, width, context, heads):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("bias", torch.ones(1, 1, context, context, dtype=torch.uint8).tril())
        self.register_buffer("masked_bias", torch.tensor(-1e4))

    def forward(self, x, past):
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=2))
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        seen, new = k.shape[2], q.shape[2]
        scores = q @ k.mT / q.shape[-1] ** 0.5
        mask = self.bias[..., seen - new : seen, :seen]
        scores = torch.where(mask > 0, scores, self.masked_bias.to(scores))
        y = self.attn_dropout(scores.softmax(-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2))), (k, v)


class MLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(width, hidden), Conv1D(hidden, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.c_proj(gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.n_embd, eps=c.layer_norm_epsilon)
        self.attn = Attention(c.n_embd, c.n_positions, c.n_head)
        self.ln_2 = nn.LayerNorm(c.n_embd, eps=c.layer_norm_epsilon)
        self.mlp = MLP(c.n_embd, c.inner)

    def forward(self, x, past):
        attended, present = self.attn(self.ln_1(x), past)
        x = x + attended
        return x + self.mlp(self.ln_2(x)), present


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.n_embd), nn.Embedding(c.n_positions, c.n_embd)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.ln_f = nn.LayerNorm(c.n_embd, eps=c.layer_norm_epsilon)

    def forward(self, ids, cache):
        start = cache[0][0].shape[2] if cache else 0
        places = torch.arange(start, start + ids.shape[1], device=ids.device)
        x, presents = self.drop(self.wte(ids) + self.wpe(places)), []
        for number, block in enumerate(self.h):
            x, present = block(x, cache[number] if cache else None)
            presents.append(present)
        return self.ln_f(x), presents


class WithHead(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = Body(c)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, ids, cache=None, labels=None):
        x, presents = self.transformer(ids, cache)
        logits = self.lm_head(x)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:])
        return Output(loss, logits, presents)


def build(config):
    return WithHead(config)


def fill(module, state):
    left = module.transformer.load_state_dict(state, strict=False)
    assert not left.unexpected_keys
    assert all(key.endswith((".attn.bias", ".masked_bias")) for key in left.missing_keys)
