"""One class per concept, a fused Linear for query, key and value, explicit attention, tied head; returns (logits, loss)."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from support.faulty.loading import put
from support.faulty.shared import activation, divisor, normalise, order, sines, turned, wired

HAND = {"rmsnorm", "not-normalising", "unbiased", "annotated", "norm-upcast"}


class HandNorm(nn.Module):
    def __init__(self, width, wrong):
        super().__init__()
        self.weight, self.bias, self.wrong = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), wrong

    def forward(self, x):
        if "norm-upcast" in self.wrong:
            return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), self.bias.float()).type_as(x)
        return normalise(x, self.weight, self.bias, self.wrong)


def norm(width, wrong):
    if wrong & HAND:
        return HandNorm(width, wrong)
    return nn.LayerNorm(width, eps=1e-6 if "eps-1e-6" in wrong else 1e-5, elementwise_affine="no-affine" not in wrong)


class SelfAttention(nn.Module):
    def __init__(self, config, layer, wrong):
        super().__init__()
        self.n_head, self.layer, self.wrong = config.n_head, layer, wrong
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias="no-out-bias" not in wrong)
        full = torch.ones(config.n_positions, config.n_positions)
        past = full if "mask-missing" in wrong else full.tril(-1 if "mask-strict" in wrong else 0)
        self.register_buffer("mask", past, persistent=False)

    def forward(self, x):
        (b, t, c), wrong = x.shape, self.wrong
        q, k, v = self.qkv(x).split(c, dim=2)
        if "value-from-key" in wrong:
            v = k
        if "heads-split-wrongly" in wrong:
            q, k, v = (part.reshape(b, self.n_head, t, c // self.n_head) for part in (q, k, v))
        else:
            q, k, v = (part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in (q, k, v))
        if "rotary" in wrong:
            q, k = turned(q), turned(k)
        if "scale-split" in wrong:
            q, k = q / k.size(-1) ** 0.25, k / k.size(-1) ** 0.25
        att = q @ k.transpose(-2, -1)
        if "masked-first" in wrong:
            att = att.masked_fill(self.mask[:t, :t] == 0, -1e20)
        if "scale-split" not in wrong:
            att = att * (1.0 / divisor(wrong, c, self.n_head, self.layer))
        if "mask-multiplied" in wrong:
            att = att * self.mask[:t, :t]
        else:
            nothing = -1e9 if "mask-strict" in wrong else -math.inf
            att = att.masked_fill(self.mask[:t, :t] == 0, -1e4 if "mask-1e4" in wrong else nothing)
        if "softmax-upcast" in wrong:
            att = att.float()
        if "softmax-missing" in wrong:
            att = att.masked_fill(self.mask[:t, :t] == 0, 0.0)
        else:
            att = F.softmax(att, dim=-2 if "softmax-queries" in wrong else -1)
        if "dropout-in-training" in wrong:
            att = F.dropout(att, 0.1, self.training)
        self.weights = att
        y = att.type_as(v) @ v
        y = y.reshape(b, t, c) if "heads-merged-wrongly" in wrong else y.transpose(1, 2).contiguous().view(b, t, c)
        return y if "output-projection-missing" in wrong else self.proj(y)


class FeedForward(nn.Module):
    def __init__(self, config, wrong):
        super().__init__()
        self.up = nn.Linear(config.n_embd, config.inner)
        self.down = nn.Linear(config.inner, config.n_embd)
        self.wrong = wrong

    def forward(self, x):
        return self.down(activation(self.up(x), self.wrong))


class Block(nn.Module):
    def __init__(self, config, layer, faults):
        super().__init__()
        self.wrong = wrong = faults.at(layer)
        self.ln_1 = norm(config.n_embd, faults.at(f"{layer}.ln_1"))
        self.attn = SelfAttention(config, layer, wrong)
        self.ln_2 = norm(config.n_embd, faults.at(f"{layer}.ln_2"))
        self.mlp = FeedForward(config, wrong)

    def forward(self, x):
        return wired(x, self.ln_1, self.attn, self.ln_2, self.mlp, self.wrong)


class GPT(nn.Module):
    def __init__(self, config, faults):
        super().__init__()
        self.faults = faults
        rows = config.vocab_size + (5 if "padded-vocab" in faults or "vocabulary-cut" in faults else 0)
        self.words = config.vocab_size
        if "idle-norm" in faults:
            self.ln_0 = nn.LayerNorm(config.n_embd)
        self.wte = nn.Embedding(rows, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer, faults) for layer in range(config.n_layer))
        self.ln_f = norm(config.n_embd, faults.at("f"))
        self.head = nn.Linear(config.n_embd, rows, bias="head-bias" in faults)
        if "untied-head" not in faults:
            self.head.weight = self.wte.weight
        self.order = order(config.n_layer, faults)

    def positions(self, t, width):
        if "position-sinusoidal" in self.faults:
            return sines(len(t), width).to(self.wte.weight.dtype)
        return self.wpe(t)

    def forward(self, ids, targets=None):
        faults = self.faults
        x = self.wte(ids)
        if "position-missing" not in faults:
            x = x + self.positions(torch.arange(ids.size(1), device=ids.device), x.size(-1))
        if "noise" in faults:
            x = x + 0.01 * torch.randn_like(x)
        for layer in self.order:
            x = self.blocks[layer](x)
        hidden = x if "final-norm-missing" in faults else self.ln_f(x)
        logits = self.head(hidden)
        if "vocabulary-cut" in faults:
            logits = logits[..., : self.words]
        if "logits-upcast" in faults:
            logits = logits.float()
        if "logits-scaled" in faults:
            logits = logits / x.size(-1) ** 0.5
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if "hidden-first" in faults:
            return hidden, logits
        if "logits-flattened" in faults:
            maps = [block.attn.weights for block in self.blocks]
            return logits.view(-1, logits.size(-1)), maps
        return logits, loss


def build(config, faults):
    return GPT(config, faults)


def fill(model, state):
    model.wte.weight[: len(state["wte.weight"])] = state["wte.weight"]
    if model.head.weight is not model.wte.weight:
        model.head.weight.copy_(state["head.weight"])
    put(model, state, {"wpe": "wpe", "ln_f": "ln_f"})
    for layer, block in enumerate(model.blocks):
        put(block, state, {"ln_1": "ln_1", "attn.qkv": "attn.c_attn.T", "attn.proj": "attn.c_proj.T"}, f"h.{layer}.")
        put(block, state, {"ln_2": "ln_2", "mlp.up": "mlp.c_fc.T", "mlp.down": "mlp.c_proj.T"}, f"h.{layer}.")
