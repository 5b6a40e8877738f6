"""GPT from first principles, a module for each attention head. Biases in the heads, so that GPT-2's weights have a place."""

import torch
import torch.nn as nn
from torch.nn import functional as F


class OneHead(nn.Module):
    """Looks back over the sequence once."""

    def __init__(self, width, head_width, context):
        super().__init__()
        self.key = nn.Linear(width, head_width)
        self.query = nn.Linear(width, head_width)
        self.value = nn.Linear(width, head_width)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("tril", torch.ones(context, context).tril())

    def forward(self, x):
        steps = x.size(1)
        affinity = self.query(x) @ self.key(x).mT / self.key.out_features**0.5
        affinity[:, self.tril[:steps, :steps] == 0] = -torch.inf
        return self.dropout(affinity.softmax(dim=-1)) @ self.value(x)


class ManyHeads(nn.Module):
    """The heads side by side, then mixed."""

    def __init__(self, width, count, context):
        super().__init__()
        self.heads = nn.ModuleList(OneHead(width, width // count, context) for _ in range(count))
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        outputs = [head(x) for head in self.heads]
        return self.dropout(self.proj(torch.cat(outputs, dim=2)))


class Thinking(nn.Module):
    """What each token does with what it has seen."""

    def __init__(self, width, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width), nn.Dropout(0.2))

    def forward(self, x):
        return self.net(x)


class Layer(nn.Module):
    def __init__(self, width, heads, hidden, context):
        super().__init__()
        self.looking = ManyHeads(width, heads, context)
        self.thinking = Thinking(width, hidden)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x):
        x = self.looking(self.ln1(x)) + x
        return self.thinking(self.ln2(x)) + x


class CharModel(nn.Module):
    def __init__(self, vocabulary, context, width, heads, layers, hidden):
        super().__init__()
        self.token_table = nn.Embedding(vocabulary, width)
        self.position_table = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads, hidden, context) for _ in range(layers)))
        self.ln_last = nn.LayerNorm(width)
        self.to_vocabulary = nn.Linear(width, vocabulary)

    def forward(self, ids, targets=None):
        here = torch.arange(ids.size(1), device=ids.device)
        x = self.layers(self.token_table(ids) + self.position_table(here))
        logits = self.to_vocabulary(self.ln_last(x))
        if targets is not None:
            return logits, F.cross_entropy(logits.transpose(1, 2), targets)
        return logits


def build(config):
    return CharModel(config.vocab_size, config.n_positions, config.n_embd, config.n_head, config.n_layer, config.inner)


@torch.no_grad()
def fill(module, state):
    module.token_table.weight.copy_(state["wte.weight"])
    module.position_table.weight.copy_(state["wpe.weight"])
    module.to_vocabulary.weight.copy_(state["wte.weight"])
    module.to_vocabulary.bias.zero_()
    module.ln_last.load_state_dict({"weight": state["ln_f.weight"], "bias": state["ln_f.bias"]})
    for i, layer in enumerate(module.layers):
        p = {key.removeprefix(f"h.{i}."): value for key, value in state.items() if key.startswith(f"h.{i}.")}
        heads = layer.looking.heads
        weights, biases = p["attn.c_attn.weight"].chunk(3, dim=1), p["attn.c_attn.bias"].chunk(3)
        for which, w, b in zip(("query", "key", "value"), weights, biases, strict=True):
            for head, w_h, b_h in zip(heads, w.chunk(len(heads), dim=1), b.chunk(len(heads)), strict=True):
                getattr(head, which).weight.copy_(w_h.T)
                getattr(head, which).bias.copy_(b_h)
        for target, name in (
            (layer.looking.proj, "attn.c_proj"),
            (layer.thinking.net[0], "mlp.c_fc"),
            (layer.thinking.net[2], "mlp.c_proj"),
            (layer.ln1, "ln_1"),
            (layer.ln2, "ln_2"),
        ):
            target.weight.copy_(p[f"{name}.weight"].t())
            target.bias.copy_(p[f"{name}.bias"])
