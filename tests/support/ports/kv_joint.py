"""bfloat16 GPT-2 for serving: to_q and to_kv apart (k^T is what the cache holds), a cache that grows, norms all in one list."""

import torch
from torch import nn


class CachedAttention(nn.Module):
    def __init__(self, dim, heads, **kw):
        super().__init__()
        self.heads = heads
        self.to_kv = nn.Linear(dim, 2 * dim, **kw)
        self.to_q = nn.Linear(dim, dim, **kw)
        self.to_out = nn.Linear(dim, dim, **kw)

    def forward(self, x, cache=None):
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).movedim(2, 1)
        k, v = self.to_kv(x).chunk(2, dim=-1)
        k_t = k.unflatten(-1, (self.heads, -1)).permute(0, 2, 3, 1)  # (b, h, d, n)
        v = v.unflatten(-1, (self.heads, -1)).movedim(2, 1)
        if cache is not None:
            if "v" in cache:
                k_t, v = torch.cat((cache["k_t"], k_t), dim=-1), torch.cat((cache["v"], v), dim=-2)
            cache.update(k_t=k_t, v=v)
        n, m = q.shape[-2], v.shape[-2]
        seen = torch.ones(n, m, dtype=torch.bool, device=x.device).tril(m - n)
        weights = torch.where(seen, q @ k_t / q.shape[-1] ** 0.5, float("-inf")).softmax(-1)
        return self.to_out((weights @ v).movedim(1, 2).flatten(2))


class Server(nn.Module):
    def __init__(self, vocab, context, dim, depth, heads, inner, dtype=torch.bfloat16):
        super().__init__()
        kw = {"dtype": dtype}
        self.norms = nn.ModuleList(nn.LayerNorm(dim, **kw) for _ in range(2 * depth + 1))
        self.attentions = nn.ModuleList(CachedAttention(dim, heads, **kw) for _ in range(depth))
        self.feed_forwards = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, inner, **kw), nn.GELU("tanh"), nn.Linear(inner, dim, **kw)) for _ in range(depth)
        )
        self.embedding = nn.Embedding(vocab, dim, **kw)
        self.places = nn.Embedding(context, dim, **kw)

    def forward(self, ids, caches=None):
        start = 0 if not caches or "v" not in caches[0] else caches[0]["v"].shape[-2]
        x = self.embedding(ids) + self.places.weight[start : start + ids.shape[1]]
        for i, (attention, feed_forward) in enumerate(zip(self.attentions, self.feed_forwards, strict=True)):
            x = x + attention(self.norms[2 * i](x), None if caches is None else caches[i])
            x = x + feed_forward(self.norms[2 * i + 1](x))
        return nn.functional.linear(self.norms[-1](x), self.embedding.weight)


def build(config):
    return Server(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


@torch.no_grad()
def fill(module, state):
    def put(target, weight, bias):
        target.weight.copy_(weight.t())
        target.bias.copy_(bias)

    module.embedding.weight.copy_(state["wte.weight"])
    module.places.weight.copy_(state["wpe.weight"])
    put(module.norms[-1], state["ln_f.weight"], state["ln_f.bias"])
    for i, (attention, feed_forward) in enumerate(zip(module.attentions, module.feed_forwards, strict=True)):
        p = {key.removeprefix(f"h.{i}."): value for key, value in state.items() if key.startswith(f"h.{i}.")}
        dim = len(p["ln_1.bias"])
        put(module.norms[2 * i], p["ln_1.weight"], p["ln_1.bias"])
        put(module.norms[2 * i + 1], p["ln_2.weight"], p["ln_2.bias"])
        put(attention.to_q, p["attn.c_attn.weight"][:, :dim], p["attn.c_attn.bias"][:dim])
        put(attention.to_kv, p["attn.c_attn.weight"][:, dim:], p["attn.c_attn.bias"][dim:])
        put(attention.to_out, p["attn.c_proj.weight"], p["attn.c_proj.bias"])
        put(feed_forward[0], p["mlp.c_fc.weight"], p["mlp.c_fc.bias"])
        put(feed_forward[2], p["mlp.c_proj.weight"], p["mlp.c_proj.bias"])
