"""W_q, W_k, W_v with biases, W_o without: a common slip."""

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, embed_size, heads):
        super().__init__()
        self.heads = heads
        self.head_dim = embed_size // heads
        self.W_q = nn.Linear(embed_size, embed_size)
        self.W_k = nn.Linear(embed_size, embed_size)
        self.W_v = nn.Linear(embed_size, embed_size)
        self.W_o = nn.Linear(embed_size, embed_size, bias=False)

    def forward(self, x, mask):
        N, T, E = x.shape
        queries = self.W_q(x).reshape(N, T, self.heads, self.head_dim)
        keys = self.W_k(x).reshape(N, T, self.heads, self.head_dim)
        values = self.W_v(x).reshape(N, T, self.heads, self.head_dim)
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        energy = energy.masked_fill(mask == 0, float("-1e20"))
        attention = torch.softmax(energy / self.head_dim**0.5, dim=3)
        return self.W_o(torch.einsum("nhql,nlhd->nqhd", [attention, values]).reshape(N, T, E))


class TransformerBlock(nn.Module):
    def __init__(self, embed_size, heads, hidden_size, dropout=0.1):
        super().__init__()
        self.attention = SelfAttention(embed_size, heads)
        self.norm1 = nn.LayerNorm(embed_size)
        self.norm2 = nn.LayerNorm(embed_size)
        self.feed_forward = nn.Sequential(
            nn.Linear(embed_size, hidden_size), nn.GELU(approximate="tanh"), nn.Linear(hidden_size, embed_size)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class Decoder(nn.Module):
    def __init__(self, vocab_size, max_length, embed_size, num_layers, heads, hidden_size):
        super().__init__()
        self.word_embedding = nn.Embedding(vocab_size, embed_size)
        self.position_embedding = nn.Embedding(max_length, embed_size)
        self.layers = nn.ModuleList([TransformerBlock(embed_size, heads, hidden_size) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(embed_size)
        self.fc_out = nn.Linear(embed_size, vocab_size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        N, T = x.shape
        positions = torch.arange(0, T, device=x.device).expand(N, T)
        mask = torch.tril(torch.ones((T, T), device=x.device)).expand(N, 1, T, T)
        x = self.dropout(self.word_embedding(x) + self.position_embedding(positions))
        for layer in self.layers:
            x = layer(x, mask)
        return self.fc_out(self.norm(x))


def build(config):
    return Decoder(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


@torch.no_grad()
def fill(module, state):
    module.word_embedding.weight.copy_(state["wte.weight"])
    module.position_embedding.weight.copy_(state["wpe.weight"])
    module.fc_out.weight.copy_(state["wte.weight"])
    module.fc_out.bias.zero_()
    module.norm.load_state_dict({"weight": state["ln_f.weight"], "bias": state["ln_f.bias"]})
    for i, layer in enumerate(module.layers):
        p = {key.removeprefix(f"h.{i}."): value for key, value in state.items() if key.startswith(f"h.{i}.")}
        attention = layer.attention
        weights, biases = p["attn.c_attn.weight"].T.chunk(3), p["attn.c_attn.bias"].chunk(3)
        for target, weight, bias in zip((attention.W_q, attention.W_k, attention.W_v), weights, biases, strict=True):
            target.load_state_dict({"weight": weight, "bias": bias})
        attention.W_o.weight.copy_(p["attn.c_proj.weight"].T)
        layer.norm1.load_state_dict({"weight": p["ln_1.weight"], "bias": p["ln_1.bias"]})
        layer.norm2.load_state_dict({"weight": p["ln_2.weight"], "bias": p["ln_2.bias"]})
        layer.feed_forward[0].load_state_dict({"weight": p["mlp.c_fc.weight"].T, "bias": p["mlp.c_fc.bias"]})
        layer.feed_forward[2].load_state_dict({"weight": p["mlp.c_proj.weight"].T, "bias": p["mlp.c_proj.bias"]})
