"""Concise GPT-2 in wrapper style: PreNorm(fn), x = layer(x) + x, rearranges instead of views."""

import torch
from torch import einsum, nn


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden_dim, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, hidden_dim),
            nn.GELU(approximate="tanh"),
            nn.Dropout(dropout),
            nn.Linear(hidden_dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        b, n, _ = x.shape
        # 'b n (d h qkv) -> qkv b h n d'
        q, k, v = self.to_qkv(x).reshape(b, n, -1, self.heads, 3).permute(4, 0, 3, 1, 2)
        sim = einsum("b h i d, b h j d -> b h i j", q * self.scale, k)
        i, j = sim.shape[-2:]
        causal_mask = torch.ones((i, j), dtype=torch.bool, device=x.device).triu(j - i + 1)
        sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max)
        out = einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        # 'b h n d -> b n (d h)'
        return self.to_out(out.permute(0, 2, 3, 1).reshape(b, n, -1))


class GPT(nn.Module):
    def __init__(self, *, num_tokens, max_seq_len, dim, depth, heads, ff_dim):
        super().__init__()
        self.token_emb = nn.Embedding(num_tokens, dim)
        self.pos_emb = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(nn.ModuleList([PreNorm(dim, Attention(dim, heads)), PreNorm(dim, FeedForward(dim, ff_dim))]))
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_tokens, bias=False))

    def forward(self, x):
        x = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1], device=x.device))
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.to_logits(x)


def build(config):
    return GPT(
        num_tokens=config.vocab_size,
        max_seq_len=config.n_positions,
        dim=config.n_embd,
        depth=config.n_layer,
        heads=config.n_head,
        ff_dim=config.inner,
    )


@torch.no_grad()
def fill(module, state):
    def affine(target, weight, bias):
        target.weight.copy_(weight)
        target.bias.copy_(bias)

    module.token_emb.weight.copy_(state["wte.weight"])
    module.pos_emb.weight.copy_(state["wpe.weight"])
    affine(module.to_logits[0], state["ln_f.weight"], state["ln_f.bias"])
    module.to_logits[1].weight.copy_(state["wte.weight"])
    for i, (attn, ff) in enumerate(module.layers):
        get = {key.removeprefix(f"h.{i}."): value for key, value in state.items() if key.startswith(f"h.{i}.")}
        h, dim = attn.fn.heads, len(get["ln_1.bias"])
        affine(attn.norm, get["ln_1.weight"], get["ln_1.bias"])
        affine(ff.norm, get["ln_2.weight"], get["ln_2.bias"])
        affine(
            attn.fn.to_qkv,
            get["attn.c_attn.weight"].T.reshape(3, h, -1, dim).permute(2, 1, 0, 3).reshape(3 * dim, dim),
            get["attn.c_attn.bias"].reshape(3, h, -1).permute(2, 1, 0).reshape(-1),
        )
        out = get["attn.c_proj.weight"].T.reshape(dim, h, -1).transpose(1, 2).reshape(dim, dim)
        affine(attn.fn.to_out[0], out, get["attn.c_proj.bias"])
        affine(ff.fn.net[0], get["mlp.c_fc.weight"].T, get["mlp.c_fc.bias"])
        affine(ff.fn.net[3], get["mlp.c_proj.weight"].T, get["mlp.c_proj.bias"])
