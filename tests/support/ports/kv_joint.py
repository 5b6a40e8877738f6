"""bfloat16 GPT-2 for serving: to_q and to_kv apart (k^T is what the cache holds), a cache that grows, norms all in one list."""

import torch
from torch import nn

from support.ports.parts import put


class CachedAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_kv, self.to_q, self.to_out = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, cache):
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).movedim(2, 1)
        k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.to_kv(x).chunk(2, dim=-1))
        k_t, v = k.permute(0, 2, 3, 1), v.movedim(2, 1)  # (b, h, d, n), (b, h, n, d)
        if "v" in cache:
            k_t, v = torch.cat((cache["k_t"], k_t), dim=-1), torch.cat((cache["v"], v), dim=-2)
        cache.update(k_t=k_t, v=v)
        n, m = q.shape[-2], v.shape[-2]
        seen = torch.ones(n, m, dtype=torch.bool, device=x.device).tril(m - n)
        weights = torch.where(seen, q @ k_t / q.shape[-1] ** 0.5, float("-inf")).softmax(-1)
        return self.to_out((weights @ v).movedim(1, 2).flatten(2))


class Server(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, depth = config.n_embd, config.n_layer
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * depth + 1))
        self.attentions = nn.ModuleList(CachedAttention(d, config.n_head) for _ in range(depth))
        self.feed_forwards = nn.ModuleList(
            nn.Sequential(nn.Linear(d, config.inner), nn.GELU("tanh"), nn.Linear(config.inner, d)) for _ in range(depth)
        )
        self.embedding, self.places = nn.Embedding(config.vocab_size, d), nn.Embedding(config.n_positions, d)

    def forward(self, ids, caches=None):
        caches = [{} for _ in self.attentions] if caches is None else caches
        start = caches[0]["v"].shape[-2] if caches[0] else 0
        x = self.embedding(ids) + self.places.weight[start : start + ids.shape[1]]
        for i, (attention, feed_forward) in enumerate(zip(self.attentions, self.feed_forwards, strict=True)):
            x = x + attention(self.norms[2 * i](x), caches[i])
            x = x + feed_forward(self.norms[2 * i + 1](x))
        return nn.functional.linear(self.norms[-1](x), self.embedding.weight)


def build(config):
    return Server(config).bfloat16()


def fill(module, state):
    put(module, state, {"embedding": "wte", "places": "wpe", f"norms.{len(module.norms) - 1}": "ln_f"})
    for i, attention in enumerate(module.attentions):
        put(module.norms, state, {str(2 * i): "ln_1", str(2 * i + 1): "ln_2"}, f"h.{i}.")
        put(attention, state, {"to_q": "q.T", "to_out": "attn.c_proj.T"}, f"h.{i}.")
        put(module.feed_forwards[i], state, {"0": "mlp.c_fc.T", "2": "mlp.c_proj.T"}, f"h.{i}.")
        for leaf in ("weight", "bias"):
            getattr(attention.to_kv, leaf).copy_(torch.cat([state[f"h.{i}.{x}.{leaf}"].t() for x in "kv"]))
