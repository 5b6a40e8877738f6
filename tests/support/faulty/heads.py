"""As tutorials build it: one module per head, the heads in a ModuleList, the feed-forward an nn.Sequential."""

import torch
from torch import nn
from torch.nn import functional as F

from support.faulty.loading import put
from support.faulty.shared import activation, normalise, order, wired


class Head(nn.Module):
    def __init__(self, width, size, context, wrong):
        super().__init__()
        bias = "no-qkv-bias" not in wrong
        self.query, self.key, self.value = (nn.Linear(width, size, bias=bias) for _ in range(3))
        self.wrong = wrong
        self.register_buffer("past", torch.tril(torch.ones(context, context)))

    def forward(self, x, padding):
        t, wrong = x.size(1), self.wrong
        k, q = self.key(x), self.query(x)
        scores = q @ k.transpose(1, 2) * (x if "scale-by-width" in wrong else k).size(-1) ** -0.5
        scores[:, self.past[:t, :t] == 0] = float("-inf")
        if padding is not None:
            silent = padding[:, :, None] if "padding-queries" in wrong else padding[:, None, :]
            scores = scores.masked_fill(silent, -1e9)
        return F.softmax(scores, dim=2) @ self.value(x)


class Heads(nn.Module):
    def __init__(self, config, wrong):
        super().__init__()
        self.heads = nn.ModuleList(
            Head(config.n_embd, config.n_embd // config.n_head, config.n_positions, wrong) for _ in range(config.n_head)
        )
        self.mix = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, padding=None):
        return self.mix(torch.cat([head(x, padding) for head in self.heads], dim=-1))


class Norm(nn.Module):
    def __init__(self, width, wrong):
        super().__init__()
        self.gamma, self.beta, self.wrong = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), wrong

    def forward(self, x):
        return normalise(x, self.gamma, self.beta, self.wrong)


class Bend(nn.Module):
    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong

    def forward(self, x):
        return activation(x, self.wrong)


class Mixing(nn.Module):
    def __init__(self, config, layer, faults):
        super().__init__()
        self.wrong = wrong = faults.at(layer)
        self.sa = Heads(config, wrong)
        bend = Bend(wrong)
        self.ffwd = nn.Sequential(nn.Linear(config.n_embd, config.inner), bend, nn.Linear(config.inner, config.n_embd))
        self.ln1, self.ln2 = Norm(config.n_embd, faults.at(f"{layer}.ln_1")), Norm(config.n_embd, faults.at(f"{layer}.ln_2"))

    def forward(self, x, padding=None):
        return wired(x, self.ln1, lambda y: self.sa(y, padding), self.ln2, self.ffwd, self.wrong)


class Lecture(nn.Module):
    def __init__(self, config, faults):
        super().__init__()
        self.faults = faults
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.n_positions + 1, config.n_embd)
        blocks = [Mixing(config, layer, faults) for layer in range(config.n_layer)]
        self.all_blocks = nn.ModuleList(blocks)
        self.run = order(config.n_layer, faults)
        self.ln = Norm(config.n_embd, faults.at("f"))
        self.to_words = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, ids, key_padding_mask=None):
        x = self.tokens(ids)
        if "position-missing" not in self.faults:
            start = 1 if "position-offset" in self.faults else 0
            x = x + self.positions(torch.arange(start, start + ids.size(1)))
        for layer in self.run:
            x = self.all_blocks[layer](x, key_padding_mask)
        if "final-norm-missing" not in self.faults:
            x = self.ln(x)
        return self.to_words(x)


def build(config, faults):
    return Lecture(config, faults)


def fill(model, state):
    model.positions.weight[: len(state["wpe.weight"])] = state["wpe.weight"]
    put(model, state, {"tokens": "wte", "to_words": "head", "ln": "ln_f"})
    for i, block in enumerate(model.all_blocks):
        put(block, state, {"ln1": "ln_1", "ln2": "ln_2", "sa.mix": "attn.c_proj.T"}, f"h.{i}.")
        put(block.ffwd, state, {"0": "mlp.c_fc.T", "2": "mlp.c_proj.T"}, f"h.{i}.")
        for name in ("query", "key", "value"):
            for leaf in ("weight", "bias"):
                columns = state[f"h.{i}.{name[0]}.{leaf}"].chunk(len(block.sa.heads), -1)
                for head, part in zip(block.sa.heads, columns, strict=True):
                    put(head, {f"{name[0]}.{leaf}": part}, {name: f"{name[0]}.T"})
