"""GPT-2 made ready for low-rank fine-tuning: every Linear and Embedding carries A and B, and B starts at zero."""

import torch
from torch import nn

from support.ports import put


class LoRALinear(nn.Module):
    def __init__(self, n_in, n_out, rank=2, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(n_out), requires_grad=False) if bias else None
        self.lora_a = nn.Parameter(torch.empty(rank, n_in))
        self.lora_b = nn.Parameter(torch.zeros(n_out, rank))
        nn.init.normal_(self.weight, std=0.02)
        nn.init.normal_(self.lora_a)
        if bias:
            nn.init.zeros_(self.bias)

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) + x @ self.lora_a.T @ self.lora_b.T


class LoRAEmbedding(nn.Module):
    def __init__(self, n, d, rank=2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, d) * 0.02, requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(rank, n))
        self.lora_b = nn.Parameter(torch.zeros(d, rank))

    def forward(self, ids):
        after_a = nn.functional.embedding(ids, self.lora_a.T)
        return nn.functional.embedding(ids, self.weight) + after_a @ self.lora_b.T


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv_projection = LoRALinear(d, 3 * d)
        self.output_projection = LoRALinear(d, d)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv_projection(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_projection(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d, heads, f):
        super().__init__()
        self.attn_norm = nn.LayerNorm(d)
        self.attn = Attention(d, heads)
        self.ffn_norm = nn.LayerNorm(d)
        self.ffn = nn.ModuleDict({"linear_in": LoRALinear(d, f), "linear_out": LoRALinear(f, d)})

    def forward(self, x):
        x = x + self.attn(self.attn_norm(x))
        y = nn.functional.gelu(self.ffn["linear_in"](self.ffn_norm(x)), approximate="tanh")
        return x + self.ffn["linear_out"](y)


class GPTModel(nn.Module):
    def __init__(self, vocab, positions, d, layers, heads, f):
        super().__init__()
        self.token_embedding = LoRAEmbedding(vocab, d)
        self.position_embedding = LoRAEmbedding(positions, d)
        self.blocks = nn.ModuleList(Block(d, heads, f) for _ in range(layers))
        self.final_norm = nn.LayerNorm(d)
        self.lm_head = LoRALinear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.token_embedding(ids) + self.position_embedding(torch.arange(ids.shape[1], device=ids.device)[None])
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.final_norm(x))


def build(config):
    return GPTModel(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"token_embedding": "wte", "position_embedding": "wpe", "final_norm": "ln_f", "lm_head": "wte"})
    for i, block in enumerate(module.blocks):
        put(block, state, {"attn_norm": "ln_1", "ffn_norm": "ln_2"}, f"h.{i}.")
        put(block.attn, state, {"qkv_projection": "c_attn.T", "output_projection": "c_proj.T"}, f"h.{i}.attn.")
        put(block.ffn, state, {"linear_in": "c_fc.T", "linear_out": "c_proj.T"}, f"h.{i}.mlp.")
