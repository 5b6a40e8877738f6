"""The lecture's model as the lecture has it: heads without biases, everything else as in GPT-2."""

import torch
import torch.nn as nn
from torch.nn import functional as F


class Head(nn.Module):
    def __init__(self, n_embd, head_size, block_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        T = x.shape[1]
        k, q, v = self.key(x), self.query(x), self.value(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = F.softmax(wei.masked_fill(self.tril[:T, :T] == 0, float("-inf")), dim=-1)
        return wei @ v


class MultiHeadAttention(nn.Module):
    def __init__(self, n_embd, num_heads, block_size):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, n_embd // num_heads, block_size) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class FeedForward(nn.Module):
    def __init__(self, n_embd, n_hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_embd, n_hidden), nn.GELU("tanh"), nn.Linear(n_hidden, n_embd))

    def forward(self, x):
        return self.net(x)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_hidden, block_size):
        super().__init__()
        self.sa_head = MultiHeadAttention(n_embd, n_head, block_size)
        self.ffwd = FeedForward(n_embd, n_hidden)
        self.ln1 = nn.LayerNorm(n_embd)
        self.ln2 = nn.LayerNorm(n_embd)

    def forward(self, x):
        x = x + self.sa_head(self.ln1(x))
        return x + self.ffwd(self.ln2(x))


class GPTLanguageModel(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd, n_head, n_layer, n_hidden):
        super().__init__()
        self.token_embedding_table = nn.Embedding(vocab_size, n_embd)
        self.position_embedding_table = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block(n_embd, n_head, n_hidden, block_size) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, targets=None):
        x = self.token_embedding_table(idx) + self.position_embedding_table(torch.arange(idx.shape[1], device=idx.device))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def build(config):
    return GPTLanguageModel(config.vocab_size, config.n_positions, config.n_embd, config.n_head, config.n_layer, config.inner)


@torch.no_grad()
def fill(module, state):
    module.token_embedding_table.weight.copy_(state["wte.weight"])
    module.position_embedding_table.weight.copy_(state["wpe.weight"])
    module.lm_head.weight.copy_(state["wte.weight"])
    module.lm_head.bias.zero_()
    module.ln_f.load_state_dict({"weight": state["ln_f.weight"], "bias": state["ln_f.bias"]})
    for i, block in enumerate(module.blocks):
        p = {key.removeprefix(f"h.{i}."): value for key, value in state.items() if key.startswith(f"h.{i}.")}
        for j, part in enumerate(("query", "key", "value")):
            rows = p["attn.c_attn.weight"].chunk(3, dim=1)[j].T.chunk(len(block.sa_head.heads))
            for head, weight in zip(block.sa_head.heads, rows, strict=True):
                getattr(head, part).weight.copy_(weight)
        block.sa_head.proj.load_state_dict({"weight": p["attn.c_proj.weight"].T, "bias": p["attn.c_proj.bias"]})
        block.ffwd.net[0].load_state_dict({"weight": p["mlp.c_fc.weight"].T, "bias": p["mlp.c_fc.bias"]})
        block.ffwd.net[2].load_state_dict({"weight": p["mlp.c_proj.weight"].T, "bias": p["mlp.c_proj.bias"]})
        block.ln1.load_state_dict({"weight": p["ln_1.weight"], "bias": p["ln_1.bias"]})
        block.ln2.load_state_dict({"weight": p["ln_2.weight"], "bias": p["ln_2.bias"]})
