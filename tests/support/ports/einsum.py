"""A transparent GPT-2 for interpretability exercises: every weight is a bare tensor, every product an einsum."""

import torch as t
from torch import nn


class LayerNorm(nn.Module):
    def __init__(self, d_model, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.w = nn.Parameter(t.ones(d_model))
        self.b = nn.Parameter(t.zeros(d_model))

    def forward(self, residual):
        mean = residual.mean(dim=-1, keepdim=True)
        std = (residual.var(dim=-1, keepdim=True, unbiased=False) + self.eps).sqrt()
        return (residual - mean) / std * self.w + self.b


class Embed(nn.Module):
    def __init__(self, d_vocab, d_model):
        super().__init__()
        self.W_E = nn.Parameter(t.randn(d_vocab, d_model) * 0.02)

    def forward(self, tokens):
        return self.W_E[tokens]


class PosEmbed(nn.Module):
    def __init__(self, n_ctx, d_model):
        super().__init__()
        self.W_pos = nn.Parameter(t.randn(n_ctx, d_model) * 0.02)

    def forward(self, tokens):
        return self.W_pos[: tokens.shape[1]].expand(tokens.shape[0], -1, -1)


class Attention(nn.Module):
    def __init__(self, n_heads, d_model, d_head):
        super().__init__()
        self.W_Q = nn.Parameter(t.randn(n_heads, d_model, d_head) * 0.02)
        self.W_K = nn.Parameter(t.randn(n_heads, d_model, d_head) * 0.02)
        self.W_V = nn.Parameter(t.randn(n_heads, d_model, d_head) * 0.02)
        self.W_O = nn.Parameter(t.randn(n_heads, d_head, d_model) * 0.02)
        self.b_Q = nn.Parameter(t.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(t.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(t.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(t.zeros(d_model))
        self.register_buffer("never", t.tensor(-t.inf))

    def forward(self, x):
        q = t.einsum("bpd,ndh->bpnh", x, self.W_Q) + self.b_Q
        k = t.einsum("bpd,ndh->bpnh", x, self.W_K) + self.b_K
        v = t.einsum("bpd,ndh->bpnh", x, self.W_V) + self.b_V
        scores = t.einsum("bqnh,bknh->bnqk", q, k) / q.shape[-1] ** 0.5
        future = t.triu(t.ones(scores.shape[-2:], device=x.device), diagonal=1).bool()
        pattern = scores.masked_fill(future, self.never).softmax(-1)
        z = t.einsum("bknh,bnqk->bqnh", v, pattern)
        return t.einsum("bqnh,nhd->bqd", z, self.W_O) + self.b_O


class MLP(nn.Module):
    def __init__(self, d_model, d_mlp):
        super().__init__()
        self.W_in = nn.Parameter(t.randn(d_model, d_mlp) * 0.02)
        self.b_in = nn.Parameter(t.zeros(d_mlp))
        self.W_out = nn.Parameter(t.randn(d_mlp, d_model) * 0.02)
        self.b_out = nn.Parameter(t.zeros(d_model))

    def forward(self, x):
        post = nn.functional.gelu(x @ self.W_in + self.b_in, approximate="tanh")
        return post @ self.W_out + self.b_out


class TransformerBlock(nn.Module):
    def __init__(self, d_model, n_heads, d_mlp):
        super().__init__()
        self.ln1 = LayerNorm(d_model)
        self.attn = Attention(n_heads, d_model, d_model // n_heads)
        self.ln2 = LayerNorm(d_model)
        self.mlp = MLP(d_model, d_mlp)

    def forward(self, stream):
        middle = self.attn(self.ln1(stream)) + stream
        return self.mlp(self.ln2(middle)) + middle


class Unembed(nn.Module):
    def __init__(self, d_model, d_vocab):
        super().__init__()
        self.W_U = nn.Parameter(t.randn(d_model, d_vocab) * 0.02)
        self.b_U = nn.Parameter(t.zeros(d_vocab), requires_grad=False)

    def forward(self, x):
        return x @ self.W_U + self.b_U


class Transparent(nn.Module):
    def __init__(self, d_vocab, n_ctx, d_model, n_layers, n_heads, d_mlp):
        super().__init__()
        self.embed = Embed(d_vocab, d_model)
        self.pos_embed = PosEmbed(n_ctx, d_model)
        self.blocks = nn.ModuleList([TransformerBlock(d_model, n_heads, d_mlp) for _ in range(n_layers)])
        self.ln_final = LayerNorm(d_model)
        self.unembed = Unembed(d_model, d_vocab)

    def forward(self, tokens):
        residual = self.embed(tokens) + self.pos_embed(tokens)
        for block in self.blocks:
            residual = block(residual)
        return self.unembed(self.ln_final(residual))


def build(config):
    return Transparent(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


@t.no_grad()
def fill(module, state):
    new = {"embed.W_E": state["wte.weight"], "pos_embed.W_pos": state["wpe.weight"], "unembed.W_U": state["wte.weight"].T}
    new |= {"ln_final.w": state["ln_f.weight"], "ln_final.b": state["ln_f.bias"]}
    new["unembed.b_U"] = t.zeros_like(module.unembed.b_U)
    for i, block in enumerate(module.blocks):
        n, d, h = block.attn.W_Q.shape
        to, of = f"blocks.{i}.", f"h.{i}."
        W, b = state[of + "attn.c_attn.weight"].reshape(d, 3, n, h), state[of + "attn.c_attn.bias"].reshape(3, n, h)
        for j, x in enumerate("QKV"):
            new[f"{to}attn.W_{x}"] = W[:, j].permute(1, 0, 2)
            new[f"{to}attn.b_{x}"] = b[j]
        new[to + "attn.W_O"] = state[of + "attn.c_proj.weight"].reshape(n, h, d)
        new[to + "attn.b_O"] = state[of + "attn.c_proj.bias"]
        new[to + "mlp.W_in"], new[to + "mlp.b_in"] = state[of + "mlp.c_fc.weight"], state[of + "mlp.c_fc.bias"]
        new[to + "mlp.W_out"], new[to + "mlp.b_out"] = state[of + "mlp.c_proj.weight"], state[of + "mlp.c_proj.bias"]
        for k in "12":
            new[f"{to}ln{k}.w"], new[f"{to}ln{k}.b"] = state[f"{of}ln_{k}.weight"], state[f"{of}ln_{k}.bias"]
        new[to + "attn.never"] = block.attn.never
    module.load_state_dict(new)
