"""For inference: without targets, only the last position's logits are computed. Blocks are called by name, first to last."""

from torch import nn
from torch.nn import functional as F

from support.ports import put


def _attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class CausalAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.proj = nn.ModuleDict({name: nn.Linear(d, d) for name in ("v", "q", "k", "o")})

    def forward(self, x):
        q, k, v = (self.proj[name](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in "qkv")
        return self.proj["o"](_attend(q, k, v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, d, heads, f):
        super().__init__()
        self.pre = nn.ModuleDict({"attention": nn.LayerNorm(d), "mlp": nn.LayerNorm(d)})
        self.attention = CausalAttention(d, heads)
        self.mlp = nn.Sequential(nn.Linear(d, f), nn.GELU(approximate="tanh"), nn.Linear(f, d))

    def forward(self, x):
        for branch in ("attention", "mlp"):
            x = x + getattr(self, branch)(self.pre[branch](x))
        return x


class Decoder(nn.Module):
    def __init__(self, vocab, context, d, depth, heads, f):
        super().__init__()
        self.embed = nn.ModuleDict({"tokens": nn.Embedding(vocab, d), "positions": nn.Embedding(context, d)})
        self.layers = nn.ModuleDict({f"layer_{i + 1:02}": Layer(d, heads, f) for i in range(depth)})
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.embed["tokens"].weight = self.head.weight

    def forward(self, ids, targets=None):
        x = self.embed["tokens"](ids) + self.embed["positions"].weight[: ids.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(config):
    return Decoder(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"head": "wte", "embed.positions": "wpe", "norm": "ln_f"})
    for i, layer in enumerate(module.layers.values()):
        put(layer, state, {"pre.attention": "ln_1", "pre.mlp": "ln_2"}, f"h.{i}.")
        put(layer.attention.proj, state, {"q": "q.T", "k": "k.T", "v": "v.T", "o": "attn.c_proj.T"}, f"h.{i}.")
        put(layer.mlp, state, {"0": "mlp.c_fc.T", "2": "mlp.c_proj.T"}, f"h.{i}.")
