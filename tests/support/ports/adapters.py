"""GPT-2 made ready for low-rank fine-tuning: every Linear and Embedding carries A and B, and B starts at zero."""

import torch
from torch import nn

from support.ports.parts import GPT, Block, fill

__all__ = ["build", "fill"]


class LoRALinear(nn.Module):
    def __init__(self, n_in, n_out, rank=2, bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * 0.02, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(n_out), requires_grad=False) if bias else None
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(rank, n_in)), nn.Parameter(torch.zeros(n_out, rank))

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) + x @ self.lora_a.T @ self.lora_b.T


class LoRAEmbedding(nn.Module):
    def __init__(self, n, d, rank=2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, d) * 0.02, requires_grad=False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(rank, n)), nn.Parameter(torch.zeros(d, rank))

    def forward(self, ids):
        after_a = nn.functional.embedding(ids, self.lora_a.T)
        return nn.functional.embedding(ids, self.weight) + after_a @ self.lora_b.T


class Layer(Block):
    LINEAR = LoRALinear
    NAMES = "norm_1 attn_norm qkv qkv_projection out output_projection norm_2 ffn_norm up linear_in down linear_out"


class GPTModel(GPT):
    BLOCK, HEAD = Layer, LoRALinear
    NAMES = "words token_embedding places position_embedding last final_norm head lm_head"

    def __init__(self, config):
        super().__init__(config)
        self.token_embedding = LoRAEmbedding(config.vocab_size, config.n_embd)
        self.position_embedding = LoRAEmbedding(config.n_positions, config.n_embd)


build = GPTModel
