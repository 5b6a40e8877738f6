"""A GPT from scratch, following the lecture: one Head module per head. Biases added so that GPT-2 fits."""

import torch
import torch.nn as nn
from torch.nn import functional as F

dropout = 0.2


class Head(nn.Module):
    """one head of self-attention"""

    def __init__(self, n_embd, head_size, block_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size)
        self.query = nn.Linear(n_embd, head_size)
        self.value = nn.Linear(n_embd, head_size)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        T = x.shape[1]
        k = self.key(x)
        q = self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = self.dropout(F.softmax(wei, dim=-1))
        return wei @ self.value(x)


class MultiHeadAttention(nn.Module):
    """multiple heads of self-attention in parallel"""

    def __init__(self, n_embd, num_heads, block_size):
        super().__init__()
        head_size = n_embd // num_heads
        self.heads = nn.ModuleList([Head(n_embd, head_size, block_size) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))


class FeedFoward(nn.Module):
    """a simple linear layer followed by a non-linearity"""

    def __init__(self, n_embd, n_hidden):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(n_embd, n_hidden),
            nn.GELU("tanh"),
            nn.Linear(n_hidden, n_embd),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class Block(nn.Module):
    """communication followed by computation"""

    def __init__(self, n_embd, n_head, n_hidden, block_size):
        super().__init__()
        self.sa = MultiHeadAttention(n_embd, n_head, block_size)
        self.ffwd = FeedFoward(n_embd, n_hidden)
        self.ln1 = nn.LayerNorm(n_embd)
        self.ln2 = nn.LayerNorm(n_embd)

    def forward(self, x):
        x = x + self.sa(self.ln1(x))
        x = x + self.ffwd(self.ln2(x))
        return x


class GPTLanguageModel(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd, n_head, n_layer, n_hidden):
        super().__init__()
        self.token_embedding_table = nn.Embedding(vocab_size, n_embd)
        self.position_embedding_table = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block(n_embd, n_head, n_hidden, block_size) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx):
        T = idx.shape[1]
        tok_emb = self.token_embedding_table(idx)
        pos_emb = self.position_embedding_table(torch.arange(T, device=idx.device))
        x = self.blocks(tok_emb + pos_emb)
        return self.lm_head(self.ln_f(x))


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
        heads = block.sa.heads
        weights, biases = p["attn.c_attn.weight"].chunk(3, dim=1), p["attn.c_attn.bias"].chunk(3)
        for which, w, b in zip(("query", "key", "value"), weights, biases, strict=True):
            for head, w_h, b_h in zip(heads, w.chunk(len(heads), dim=1), b.chunk(len(heads)), strict=True):
                getattr(head, which).weight.copy_(w_h.T)
                getattr(head, which).bias.copy_(b_h)
        for layer, name in (
            (block.sa.proj, "attn.c_proj"),
            (block.ffwd.net[0], "mlp.c_fc"),
            (block.ffwd.net[2], "mlp.c_proj"),
            (block.ln1, "ln_1"),
            (block.ln2, "ln_2"),
        ):
            layer.weight.copy_(p[f"{name}.weight"].T if name[:2] != "ln" else p[f"{name}.weight"])
            layer.bias.copy_(p[f"{name}.bias"])
