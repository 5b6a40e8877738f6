"""Translated from a JAX code base: all layers live in one array per kind of weight, and the forward scans over them."""

import torch
from torch import nn
from torch.nn import functional as F


class Transformer(nn.Module):
    def __init__(self, vocab, seq, d, layers, heads, ff):
        super().__init__()
        k = d // heads

        def w(*shape):
            return nn.Parameter(torch.randn(*shape) * 0.02)

        self.embedding = w(vocab, d)
        self.position_embedding = w(seq, d)
        self.blocks = nn.ParameterDict(
            {
                "attn_norm_scale": nn.Parameter(torch.ones(layers, d)),
                "attn_norm_bias": nn.Parameter(torch.zeros(layers, d)),
                "qkv_kernel": w(layers, d, 3, heads, k),
                "qkv_bias": w(layers, 3, heads, k),
                "out_kernel": w(layers, heads, k, d),
                "out_bias": w(layers, d),
                "mlp_norm_scale": nn.Parameter(torch.ones(layers, d)),
                "mlp_norm_bias": nn.Parameter(torch.zeros(layers, d)),
                "up_kernel": w(layers, d, ff),
                "up_bias": w(layers, ff),
                "down_kernel": w(layers, ff, d),
                "down_bias": w(layers, d),
            }
        )
        self.final_norm = nn.ParameterDict({"scale": torch.ones(d), "bias": torch.zeros(d)})

    def norm(self, x, scale, bias):
        return F.layer_norm(x, (x.shape[-1],), eps=1e-5) * scale + bias

    def block(self, x, p):
        y = self.norm(x, p["attn_norm_scale"], p["attn_norm_bias"])
        q, k, v = (torch.einsum("btd,dchk->cbthk", y, p["qkv_kernel"]) + p["qkv_bias"][:, None, None]).unbind()
        causal = torch.ones(x.shape[1], x.shape[1], device=x.device).tril() > 0
        scores = torch.einsum("bqhk,bshk->bhqs", q, k) * k.shape[-1] ** -0.5
        weights = torch.where(causal, scores, torch.finfo(x.dtype).min).softmax(-1)
        y = torch.einsum("bhqs,bshk->bqhk", weights, v)
        x = x + torch.einsum("bqhk,hkd->bqd", y, p["out_kernel"]) + p["out_bias"]
        y = self.norm(x, p["mlp_norm_scale"], p["mlp_norm_bias"])
        y = F.gelu(y @ p["up_kernel"] + p["up_bias"], approximate="tanh")
        return x + y @ p["down_kernel"] + p["down_bias"]

    def forward(self, tokens):
        x = self.embedding[tokens] + self.position_embedding[: tokens.shape[1]]
        for i in range(self.blocks["up_bias"].shape[0]):
            x = self.block(x, {name: stacked[i] for name, stacked in self.blocks.items()})
        return self.norm(x, self.final_norm["scale"], self.final_norm["bias"]) @ self.embedding.T


def build(config):
    return Transformer(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


@torch.no_grad()
def fill(module, state):
    sources = {
        "attn_norm": "ln_1",
        "qkv": "attn.c_attn",
        "out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    }
    for name, stacked in module.blocks.items():
        part, kind = name.rsplit("_", 1)
        kind = "bias" if kind == "bias" else "weight"
        layers = [state[f"h.{i}.{sources[part]}.{kind}"] for i in range(len(stacked))]
        stacked.copy_(torch.stack(layers).reshape(stacked.shape))
    module.final_norm["scale"].copy_(state["ln_f.weight"])
    module.final_norm["bias"].copy_(state["ln_f.bias"])
    module.embedding.copy_(state["wte.weight"])
    module.position_embedding.copy_(state["wpe.weight"])
