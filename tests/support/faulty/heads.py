"""As tutorials build it: one module per head, the heads in a ModuleList, the feed-forward an nn.Sequential."""

import torch
from torch import nn
from torch.nn import functional as F

from support.faulty.loading import put


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
        v = q if "value-from-query" in wrong else k if "value-from-key" in wrong else self.value(x)
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
        if "batch-statistics" in self.wrong:
            variance, mean = torch.var_mean(x, dim=(0, 2), keepdim=True, unbiased=False)
            return self.gamma * (x - mean) / torch.sqrt(variance + 1e-5) + self.beta
        if "rmsnorm" in self.wrong:
            return self.gamma * (x / x.square().mean(-1, keepdim=True).add(1e-5).sqrt()) + self.beta
        if "not-normalising" in self.wrong:
            return self.gamma * x + self.beta
        variance, mean = torch.var_mean(x, dim=-1, keepdim=True, unbiased="unbiased" in self.wrong)
        y = (x - mean) / torch.sqrt(variance + (1e-3 if "eps-1e-3" in self.wrong else 1e-5))
        return y if "no-affine" in self.wrong else self.gamma * y + self.beta


class Mixing(nn.Module):
    def __init__(self, config, layer, faults):
        super().__init__()
        self.wrong = wrong = faults.at(layer)
        self.sa = Heads(config, wrong)
        kinds = {"gelu-relu": nn.ReLU(), "gelu-erf": nn.GELU(), "gelu-silu": nn.SiLU(), "gelu-none": nn.Identity()}
        bend = next((kinds[word] for word in kinds if word in wrong), nn.GELU("tanh"))
        self.ffwd = nn.Sequential(nn.Linear(config.n_embd, config.inner), bend, nn.Linear(config.inner, config.n_embd))
        if "ffn-dropout" in wrong:
            self.ffwd.insert(2, Always(0.1))
        self.ln1, self.ln2 = Norm(config.n_embd, faults.at(f"{layer}.ln_1")), Norm(config.n_embd, faults.at(f"{layer}.ln_2"))

    def forward(self, x, padding=None):
        wrong = self.wrong
        if "norms-swapped" in wrong:
            x = x + self.sa(self.ln2(x), padding)
            return x + self.ffwd(self.ln1(x))
        if "post-norm" in wrong:
            x = self.ln1(x + self.sa(x, padding))
            return self.ln2(x + self.ffwd(x))
        if "residual-from-normed" in wrong:
            x = self.ln1(x)
            x = x + self.sa(x, padding)
            x = self.ln2(x)
            return x + self.ffwd(x)
        if "parallel" in wrong:
            a, b = self.sa(self.ln1(x), padding), self.ffwd(self.ln2(x))
            return x + (a + b)
        branch = self.sa(x if "ln_1-missing" in wrong else self.ln1(x), padding)
        x = branch if wrong & {"residual-missing", "residual-missing-attn"} else x + branch
        branch = self.ffwd(x) if "ln_2-missing" in wrong else self.ffwd(self.ln2(x))
        return branch if wrong & {"residual-missing", "residual-missing-mlp"} else x + branch


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
        run = [layer for layer in range(config.n_layer) if layer not in faults.layers("layer-missing", config.n_layer)]
        run = sorted(run + faults.layers("layer-repeated", config.n_layer)) if "layer-repeated" in faults else run
        run = run[::-1] if "layer-reversed" in faults else run
        self.all_blocks = nn.ModuleList(blocks)
        self.run = run
        self.ln = Norm(config.n_embd, faults.at("f"))
        self.to_words = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        waves = 10000.0 ** (-torch.arange(config.n_embd // 2) * 2 / config.n_embd)
        self.register_buffer("waves", torch.arange(config.n_positions)[:, None] * waves, persistent=False)

    def forward(self, ids, key_padding_mask=None):
        x = self.tokens(ids)
        if "position-sinusoidal" in self.faults:
            angles = self.waves[: ids.size(1)]
            x = x + torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1)
        elif "position-missing" not in self.faults:
            start = 1 if "position-offset" in self.faults else 0
            x = x + self.positions(torch.arange(start, start + ids.size(1)))
        if "noise" in self.faults:
            x = x + torch.empty_like(x).normal_(std=0.01)
        if "extra-norm-embed" in self.faults:
            x = F.layer_norm(x, x.shape[-1:])
        for layer in self.run:
            x = self.all_blocks[layer](x, key_padding_mask)
        if "final-norm-missing" not in self.faults:
            x = self.ln(x)
        logits = self.to_words(x)
        return F.softmax(logits, dim=-1) if "logits-softmaxed" in self.faults else logits


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
