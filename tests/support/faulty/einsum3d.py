"""Every projection an einsum over a tensor with an axis for heads; biases by head too; an untied head."""

import torch
from torch import nn
from torch.nn import functional as F

from support.faulty.loading import put


class LayerNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, residual):
        centred = residual - residual.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.w + self.b


class Attention(nn.Module):
    def __init__(self, config, layer, wrong):
        super().__init__()
        n, d, h = config.n_head, config.n_embd, config.n_embd // config.n_head
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(n, d, h) * 0.02) for _ in range(3))
        self.b_Q, self.b_K, self.b_V = (nn.Parameter(torch.zeros(n, h)) for _ in range(3))
        self.W_O, self.b_O = nn.Parameter(torch.randn(n, h, d) * 0.02), nn.Parameter(torch.zeros(d))
        self.layer, self.wrong = layer, wrong

    def forward(self, x, cache, real):
        """``cache`` keeps keys and values of earlier calls, (B, S, H, K) each; ``real`` is (B, S), False at padding."""
        wrong = self.wrong
        q = torch.einsum("bpd,ndh->bpnh", x, self.W_Q) + self.b_Q
        k = torch.einsum("bpd,ndh->bpnh", x, self.W_K) + self.b_K
        v = torch.einsum("bpd,ndh->bpnh", x, self.W_V) + self.b_V
        if cache is not None:
            k, v = cache.add(self.layer, k, v, forget="cache-forgets" in wrong)
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) / q.size(-1) ** 0.5
        size, seen = x.size(1), k.size(1)
        start = (2 if "mask-off-by-one" in wrong else 1) + seen - size
        future = torch.ones(size, seen, device=x.device).triu(start).bool()
        scores = scores.masked_fill(future, 0.0 if "mask-multiplied" in wrong else -1e5)
        if real is not None:
            scores = scores.masked_fill(real[:, None, None, :] == (1 if "padding-inverted" in wrong else 0), -1e5)
        z = torch.einsum("bnqk,bknh->bqnh", scores.softmax(3), v)
        return torch.einsum("bqnh,nhd->bqd", z, self.W_O) + self.b_O


class MLP(nn.Module):
    def __init__(self, config, wrong):
        super().__init__()
        d, f = config.n_embd, config.inner
        self.W_in, self.b_in = nn.Parameter(torch.randn(d, f) * 0.02), nn.Parameter(torch.zeros(f))
        self.W_out, self.b_out = nn.Parameter(torch.randn(f, d) * 0.02), nn.Parameter(torch.zeros(d))
        self.wrong = wrong

    def forward(self, x):
        pre = torch.einsum("bpd,df->bpf", x, self.W_in) + self.b_in
        post = F.gelu(pre, approximate="tanh")
        if "ffn-dropout" in self.wrong:
            post = F.dropout(post, 0.1)
        return torch.einsum("bpf,fd->bpd", post, self.W_out) + self.b_out


class TransformerBlock(nn.Module):
    def __init__(self, config, layer, faults):
        super().__init__()
        self.ln1, self.attn = LayerNorm(config.n_embd), Attention(config, layer, faults.at(layer))
        self.ln2, self.mlp = LayerNorm(config.n_embd), MLP(config, faults.at(layer))

    def forward(self, pre, cache, real):
        mid = pre + self.attn(self.ln1(pre), cache, real)
        return mid + self.mlp(self.ln2(mid))


class Cache:
    def __init__(self):
        self.kept = {}

    @property
    def length(self):
        return next(iter(self.kept.values()))[0].size(1) if self.kept else 0

    def add(self, layer, k, v, forget):
        if layer in self.kept and not forget:
            k, v = (torch.cat(pair, 1) for pair in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        return k, v


class Clear(nn.Module):
    def __init__(self, config, faults):
        super().__init__()
        d = config.n_embd
        self.faults = faults
        self.W_E = nn.Parameter(torch.randn(config.vocab_size, d) * 0.02)
        self.W_pos = nn.Parameter(torch.randn(config.n_positions, d) * 0.02)
        self.blocks = nn.ModuleList(TransformerBlock(config, layer, faults) for layer in range(config.n_layer))
        self.ln_final = LayerNorm(d)
        self.W_U = nn.Parameter(torch.randn(d, config.vocab_size) * 0.5)

    def new_cache(self, batch):
        return Cache()

    def forward(self, tokens, kv_cache=None, attention_mask=None):
        before = 0 if kv_cache is None or "cache-positions" in self.faults else kv_cache.length
        residual = self.W_E[tokens] + self.W_pos[before : before + tokens.size(1)].unsqueeze(0)
        for block in self.blocks:
            residual = block(residual, kv_cache, attention_mask)
        logits = torch.einsum("bpd,dv->bpv", self.ln_final(residual), self.W_U)
        return logits.softmax(-1) if "logits-softmaxed" in self.faults else logits


def build(config, faults):
    return Clear(config, faults)


def fill(model, state):
    put(model, state, {"W_E": "wte.weight", "W_pos": "wpe.weight", "ln_final": "ln_f"})
    model.W_U.copy_(state["head.weight"].t())
    for layer, block in enumerate(model.blocks):
        put(block, state, {"ln1": "ln_1", "ln2": "ln_2"}, f"h.{layer}.")
        put(block.attn, state, {"W_O": "c_proj.weight", "b_O": "c_proj.bias"}, f"h.{layer}.attn.")
        put(block.mlp, state, {"W_in": "c_fc.weight", "b_in": "c_fc.bias"}, f"h.{layer}.mlp.")
        put(block.mlp, state, {"W_out": "c_proj.weight", "b_out": "c_proj.bias"}, f"h.{layer}.mlp.")
        put(block.attn, state, {f"b_{x.upper()}": f"{x}.bias" for x in "qkv"}, f"h.{layer}.")
        for x in "qkv":
            own = block.attn.get_parameter(f"W_{x.upper()}")
            own.copy_(state[f"h.{layer}.{x}.weight"].unflatten(1, (len(own), -1)).transpose(0, 1))
