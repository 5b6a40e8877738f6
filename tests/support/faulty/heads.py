"""As tutorials build it: one module per head, the heads in a ModuleList, the feed-forward an nn.Sequential."""

import torch
from torch import nn
from torch.nn import functional as F

from support.faulty.loading import put
from support.faulty.shared import activation, ending, entering, normalise, order, sines, wired


class Head(nn.Module):
    def __init__(self, width, size, context, wrong):
        super().__init__()
        bias = "no-qkv-bias" not in wrong
        self.query, self.key, self.value = (nn.Linear(width, size, bias=bias) for _ in range(3))
        self.wrong = wrong
        ones = torch.ones(context, context)
        diagonal = 1 if "mask-off-by-one" in wrong else 0
        self.register_buffer("past", ones if "mask-missing" in wrong else torch.tril(ones, diagonal))

    def forward(self, x, padding):
        t, wrong = x.size(1), self.wrong
        k, q = self.key(x), self.query(x)
        scale = x.size(-1) ** -0.5 if "scale-by-width" in wrong else k.size(-1) ** -0.5
        scores = q @ k.transpose(1, 2)
        if "scale-missing" not in wrong:
            scores = scores * scale
        if "mask-multiplied" in wrong:
            scores = scores * self.past[:t, :t]
        else:
            scores[:, self.past[:t, :t] == 0] = float("-inf")
        if padding is not None and "padding-ignored" not in wrong:
            silent = padding[:, :, None] if "padding-queries" in wrong else padding[:, None, :]
            scores = scores.masked_fill(silent, -1e9)
        weights = F.softmax(scores, dim=1 if "softmax-queries" in wrong else 2)
        if "dropout-attention" in wrong:
            weights = F.dropout(weights, 0.2)
        v = q if "value-from-query" in wrong else self.value(x)
        return weights @ v


class Heads(nn.Module):
    def __init__(self, config, wrong):
        super().__init__()
        self.heads = nn.ModuleList(
            Head(config.n_embd, config.n_embd // config.n_head, config.n_positions, wrong) for _ in range(config.n_head)
        )
        self.mix = nn.Linear(config.n_embd, config.n_embd)
        self.wrong = wrong

    def forward(self, x, padding=None):
        out = torch.cat([head(x, padding) for head in self.heads], dim=-1)
        return out if "output-projection-missing" in self.wrong else self.mix(out)


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
        if "ffn-dropout" in wrong:
            self.ffwd.insert(2, Always(0.1))
        self.ln1, self.ln2 = Norm(config.n_embd, faults.at(f"{layer}.ln_1")), Norm(config.n_embd, faults.at(f"{layer}.ln_2"))

    def forward(self, x, padding=None):
        return wired(x, self.ln1, lambda y: self.sa(y, padding), self.ln2, self.ffwd, self.wrong)


class Always(nn.Module):
    """Dropout that is active in eval mode too."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return F.dropout(x, self.p, training=True)


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
        if "position-sinusoidal" in self.faults:
            x = x + sines(ids.size(1), x.size(-1)).to(x)
        elif "position-missing" not in self.faults:
            start = 1 if "position-offset" in self.faults else 0
            x = x + self.positions(torch.arange(start, start + ids.size(1)))
        x = entering(x, self.faults)
        for layer in self.run:
            x = self.all_blocks[layer](x, key_padding_mask)
        if "final-norm-missing" not in self.faults:
            x = self.ln(x)
        logits = self.to_words(x)
        return ending(logits, self.faults)


def build(config, faults):
    return Lecture(config, faults)


def fill(model, state):
    model.positions.weight[: len(state["wpe.weight"])] = state["wpe.weight"]
    put(model, state, {"tokens": "wte", "to_words": "head", "ln": "ln_f"})
    for i, block in enumerate(model.all_blocks):
        put(block, state, {"ln1": "ln_1", "ln2": "ln_2", "sa.mix": "attn.c_proj.T"}, f"h.{i}.")
        put(block.ffwd, state, {"0": "mlp.c_fc.T", str(len(block.ffwd) - 1): "mlp.c_proj.T"}, f"h.{i}.")
        for name in ("query", "key", "value"):
            for leaf in ("weight", "bias"):
                columns = state[f"h.{i}.{name[0]}.{leaf}"].chunk(len(block.sa.heads), -1)
                for head, part in zip(block.sa.heads, columns, strict=True):
                    put(head, {f"{name[0]}.{leaf}": part}, {name: f"{name[0]}.T"})
