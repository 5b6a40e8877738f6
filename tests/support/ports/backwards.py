"""Everything is declared in the reverse of the order in which it runs, and whole groups sit outside the blocks."""

from torch import nn

from support.ports import put


class Block(nn.Module):
    def __init__(self, dim, n_heads, hidden):
        super().__init__()
        self.n_heads = n_heads
        self.mlp_down = nn.Linear(hidden, dim)
        self.mlp_up = nn.Linear(dim, hidden)
        self.ln_2 = nn.LayerNorm(dim)
        self.o = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.q = nn.Linear(dim, dim)
        self.ln_1 = nn.LayerNorm(dim)

    def attention(self, x):
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp_down(nn.functional.gelu(self.mlp_up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, n_tokens, n_positions, dim, n_layers, n_heads, hidden):
        super().__init__()
        self.head = nn.Linear(dim, n_tokens)
        nn.init.zeros_(self.head.bias)
        self.ln_f = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList(Block(dim, n_heads, hidden) for _ in range(n_layers))
        self.pos = nn.Embedding(n_positions, dim)
        self.tok = nn.Embedding(n_tokens, dim)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.size(1)]
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.ln_f(x))


def build(config):
    return GPT2(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"tok": "wte", "pos": "wpe", "ln_f": "ln_f"})
    for i, block in enumerate(reversed(module.blocks)):
        put(block, state, {"ln_1": "ln_1", "q": "q.T", "k": "k.T", "v": "v.T", "o": "attn.c_proj.T"}, f"h.{i}.")
        put(block, state, {"ln_2": "ln_2", "mlp_up": "mlp.c_fc.T", "mlp_down": "mlp.c_proj.T"}, f"h.{i}.")
