"""Flash attention written out: tiles of keys, running maxima and sums. With a value head, for reinforcement learning."""

import torch
from torch import nn

from support.ports import put


def flash(q, k, v, tile=4):
    """(B, H, T, K) each; never holds more than a tile of scores."""
    t = q.shape[-2]
    row = torch.arange(t, device=q.device)[:, None]
    top = torch.full_like(q[..., :1], -torch.inf)
    total = torch.zeros_like(top)
    out = torch.zeros_like(v)
    for start in range(0, t, tile):
        stop = min(start + tile, t)
        scores = q @ k[..., start:stop, :].transpose(-1, -2) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.arange(start, stop, device=q.device) > row, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = new_top.masked_fill(new_top.isinf(), 0)
        weights, shrink = (scores - safe).exp(), (top - safe).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + weights @ v[..., start:stop, :]
        top = new_top
    return out / total


class Layer(nn.Module):
    def __init__(self, d, heads, f):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(d), nn.LayerNorm(d)])
        self.matrices = nn.ModuleDict(
            {"qkv": nn.Linear(d, 3 * d), "out": nn.Linear(d, d), "up": nn.Linear(d, f), "down": nn.Linear(f, d)}
        )

    def forward(self, x):
        m = self.matrices
        q, k, v = m["qkv"](self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + m["out"](flash(q, k, v).transpose(1, 2).flatten(2))
        return x + m["down"](nn.functional.gelu(m["up"](self.norms[1](x)), approximate="tanh"))


class ActorCritic(nn.Module):
    def __init__(self, vocab, context, d, depth, heads, f):
        super().__init__()
        self.value_head = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, 1))
        self.embedding = nn.ModuleList([nn.Embedding(vocab, d), nn.Embedding(context, d)])
        self.layers = nn.ModuleList(Layer(d, heads, f) for _ in range(depth))
        self.norm = nn.LayerNorm(d)

    def forward(self, ids):
        x = self.embedding[0](ids) + self.embedding[1](torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.value_head(x).squeeze(-1), x @ self.embedding[0].weight.T


def build(config):
    return ActorCritic(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"embedding.0": "wte", "embedding.1": "wpe", "norm": "ln_f"})
    for i, layer in enumerate(module.layers):
        put(layer.norms, state, {"0": "ln_1", "1": "ln_2"}, f"h.{i}.")
        put(layer.matrices, state, {"qkv": "attn.c_attn.T", "out": "attn.c_proj.T"}, f"h.{i}.")
        put(layer.matrices, state, {"up": "mlp.c_fc.T", "down": "mlp.c_proj.T"}, f"h.{i}.")
