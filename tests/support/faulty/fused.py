"""One class per concept, a fused Linear for query, key and value, explicit attention, tied head; returns (logits, loss)."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from support.faulty.loading import put


class HandNorm(nn.Module):
    def __init__(self, width, kind):
        super().__init__()
        self.weight, self.bias, self.kind = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), kind

    def forward(self, x):
        if self.kind == "norm-upcast":
            return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), self.bias.float()).type_as(x)
        if self.kind == "rmsnorm":
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias
        if self.kind == "not-normalising":
            return x * self.weight + self.bias
        if self.kind == "norm-over-tokens":
            return (x - x.mean(1, keepdim=True)) / (
                x.var(1, unbiased=False, keepdim=True) + 1e-5
            ).sqrt() * self.weight + self.bias
        if self.kind == "batch-statistics":
            return (x - x.mean((0, 1))) / (x.var((0, 1), unbiased=False) + 1e-5).sqrt() * self.weight + self.bias
        x = x - x.mean(-1, keepdim=True)
        if self.kind == "annotated":
            return self.weight * x / (x.std(-1, keepdim=True) + 1e-6) + self.bias
        if self.kind == "eps-outside":
            return self.weight * x / (x.std(-1, keepdim=True, unbiased=False) + 1e-5) + self.bias
        variance = x.var(-1, keepdim=True, unbiased=self.kind == "unbiased")
        return self.weight * (x / torch.sqrt(variance + 1e-5)) + self.bias


def norm(width, wrong):
    for kind in (
        "rmsnorm",
        "not-normalising",
        "unbiased",
        "annotated",
        "eps-outside",
        "batch-statistics",
        "norm-upcast",
        "norm-over-tokens",
    ):
        if kind in wrong:
            return HandNorm(width, kind)
    if "rmsnorm-no-bias" in wrong:
        return nn.RMSNorm(width, eps=1e-5)
    eps = next((float(word[4:]) for word in wrong if word.startswith("eps-1e")), 1e-5)
    return nn.LayerNorm(width, eps=eps, elementwise_affine="no-affine" not in wrong, bias="no-norm-bias" not in wrong)


def turned(x, halves):
    """(B, H, T, K), each pair of a head's first numbers turned by the position times its own frequency."""
    size = x.size(-1) // 4 * 4
    angle = torch.arange(x.size(-2))[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    x, rest = x[..., :size], x[..., size:]
    if halves:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
    a, b = x[..., ::2], x[..., 1::2]
    x = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([x, rest], -1)


class SelfAttention(nn.Module):
    def __init__(self, config, layer, wrong):
        super().__init__()
        self.n_head, self.layer, self.wrong = config.n_head, layer, wrong
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias="no-qkv-bias" not in wrong)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias="no-out-bias" not in wrong)
        shift = {"mask-strict": -1, "mask-off-by-one": 1}
        k = next((shift[word] for word in shift if word in wrong), 0)
        full = torch.ones(config.n_positions, config.n_positions)
        self.register_buffer("mask", full if "mask-missing" in wrong else full.tril(k), persistent=False)

    def forward(self, x):
        (b, t, c), wrong = x.shape, self.wrong
        q, k, v = self.qkv(x).split(c, dim=2)
        if "value-from-key" in wrong:
            v = k
        if "value-from-query" in wrong:
            v = q
        if "value-identity" in wrong:
            v = x
        if "heads-split-wrongly" in wrong:
            q, k, v = (part.reshape(b, self.n_head, t, c // self.n_head) for part in (q, k, v))
        else:
            q, k, v = (part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in (q, k, v))
        if wrong & {"rotary", "rotary-halves"}:
            q, k = (turned(part, "rotary-halves" in wrong) for part in (q, k))
        if "scale-split" in wrong:
            q, k = q / k.size(-1) ** 0.25, k / k.size(-1) ** 0.25
        att = q @ k.transpose(-2, -1)
        if "masked-first" in wrong:
            att = att.masked_fill(self.mask[:t, :t] == 0, -1e20)
        if "scale-by-width" in wrong:
            att = att / math.sqrt(c)
        elif "scale-by-heads" in wrong:
            att = att / math.sqrt(self.n_head)
        elif "scale-by-8" in wrong:
            att = att / 8
        elif not wrong & {"scale-missing", "scale-split"}:
            att = att * (1.0 / math.sqrt(k.size(-1)))
        if "scale-twice" in wrong:
            att = att / math.sqrt(k.size(-1))
        if "scale-inverse-layer" in wrong:
            att = att / (self.layer + 1)
        if "mask-multiplied" in wrong:
            att = att * self.mask[:t, :t]
        else:
            nothing = -1e9 if wrong & {"mask-strict", "softmax-heads", "softmax-batch"} else -math.inf
            att = att.masked_fill(self.mask[:t, :t] == 0, -1e4 if "mask-1e4" in wrong else nothing)
        if "softmax-upcast" in wrong:
            att = att.float()
        axis = {"softmax-queries": -2, "softmax-heads": 1, "softmax-batch": 0}
        if "softmax-missing" in wrong:
            att = att.masked_fill(self.mask[:t, :t] == 0, 0.0)
        else:
            att = F.softmax(att, dim=next((axis[word] for word in axis if word in wrong), -1))
        if "dropout-attention" in wrong:
            att = F.dropout(att, 0.1)
        if "dropout-in-training" in wrong:
            att = F.dropout(att, 0.1, self.training)
        self.weights = att
        y = att.type_as(v) @ v
        y = y.reshape(b, t, c) if "heads-merged-wrongly" in wrong else y.transpose(1, 2).contiguous().view(b, t, c)
        return y if "output-projection-missing" in wrong else self.proj(y)


ACTIVATIONS = {"gelu-erf": nn.GELU, "gelu-relu": nn.ReLU, "gelu-silu": nn.SiLU, "gelu-none": nn.Identity}


class FeedForward(nn.Module):
    def __init__(self, config, wrong):
        super().__init__()
        self.up = nn.Linear(config.n_embd, config.inner, bias="no-fc-bias" not in wrong)
        self.act = next((ACTIVATIONS[word]() for word in ACTIVATIONS if word in wrong), nn.GELU(approximate="tanh"))
        self.down = nn.Linear(config.inner, config.n_embd)
        self.wrong = wrong

    def forward(self, x):
        x = self.up(x)
        x = x * torch.sigmoid(1.702 * x) if "gelu-quick" in self.wrong else self.act(x)
        if "ffn-dropout" in self.wrong:
            x = F.dropout(x, p=0.1)
        return self.down(x)


class Block(nn.Module):
    def __init__(self, config, layer, faults):
        super().__init__()
        self.wrong = wrong = faults.at(layer)
        self.ln_1 = norm(config.n_embd, faults.at(f"{layer}.ln_1"))
        self.attn = SelfAttention(config, layer, wrong)
        self.ln_2 = norm(config.n_embd, faults.at(f"{layer}.ln_2"))
        self.mlp = FeedForward(config, wrong)

    def forward(self, x):
        wrong, attn, mlp, ln_1, ln_2 = self.wrong, self.attn, self.mlp, self.ln_1, self.ln_2
        if "norms-swapped" in wrong:
            ln_1, ln_2 = ln_2, ln_1
        if "post-norm" in wrong:
            x = ln_1(x + attn(x))
            return ln_2(x + mlp(x))
        if "parallel" in wrong:
            return x + attn(ln_1(x)) + mlp(ln_2(x))
        if "residual-from-normed" in wrong:
            x = ln_1(x)
            x = x + attn(x)
            x = ln_2(x)
            return x + mlp(x)
        branch = attn(x if "ln_1-missing" in wrong else ln_1(x))
        if "extra-norm-branch" in wrong:
            branch = F.layer_norm(branch, branch.shape[-1:])
        x = branch if wrong & {"residual-missing", "residual-missing-attn"} else x + branch
        if "residual-from-normed-mlp" in wrong:
            x = ln_2(x)
            return x + mlp(x)
        branch = mlp(x if "ln_2-missing" in wrong else ln_2(x))
        if "residual-halved" in wrong:
            branch = branch * 0.5
        x = branch if wrong & {"residual-missing", "residual-missing-mlp"} else x + branch
        return F.layer_norm(x, x.shape[-1:]) if "extra-norm-end" in wrong else x


class GPT(nn.Module):
    def __init__(self, config, faults):
        super().__init__()
        self.faults = faults
        rows = config.vocab_size + (5 if "padded-vocab" in faults or "vocabulary-cut" in faults else 0)
        self.words = config.vocab_size
        if "idle-norm" in faults:
            self.ln_0 = nn.LayerNorm(config.n_embd)
        self.wte = nn.Embedding(rows, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions + ("position-offset" in faults), config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer, faults) for layer in range(config.n_layer))
        self.ln_f = norm(config.n_embd, faults.at("f"))
        self.head = nn.Linear(config.n_embd, rows, bias="head-bias" in faults)
        if "untied-head" not in faults:
            self.head.weight = self.wte.weight
        n = config.n_layer
        self.order = list(range(n))
        if "layer-reversed" in faults:
            self.order.reverse()
        if "layer-swapped" in faults:
            self.order[-2:] = [n - 1, n - 2]
        for layer in reversed(faults.layers("layer-missing", n)):
            self.order.remove(layer)
        for layer in faults.layers("layer-repeated", n):
            self.order.insert(self.order.index(layer), layer)
        self.calls = 0

    def positions(self, t, width):
        if "position-sinusoidal" in self.faults:
            angle = t[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
            return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1).to(self.wte.weight.dtype)
        return self.wpe(t + 1 if "position-offset" in self.faults else t)

    def forward(self, ids, targets=None):
        faults = self.faults
        x = self.wte(ids)
        if "embedding-scaled" in faults:
            x = x * math.sqrt(x.size(-1))
        if "position-missing" not in faults:
            x = x + self.positions(torch.arange(ids.size(1), device=ids.device), x.size(-1))
        if "dropout-active" in faults:
            x = F.dropout(x, 0.1)
        if "noise" in faults:
            x = x + 0.01 * torch.randn_like(x)
        if "batch-centred" in faults:
            x = x - x.mean(0)
        if "counts-calls" in faults:
            self.calls += 1
            x = x * (1 + 0.01 * self.calls)
        if "extra-norm-embed" in faults:
            x = F.layer_norm(x, x.shape[-1:])
        for layer in self.order:
            x = self.blocks[layer](x)
        hidden = x if "final-norm-missing" in faults else self.ln_f(x)
        logits = self.head(hidden)
        if "vocabulary-cut" in faults:
            logits = logits[..., : self.words]
        if "logits-upcast" in faults:
            logits = logits.float()
        if "logits-scaled" in faults:
            logits = logits / math.sqrt(x.size(-1))
        if "logits-softmaxed" in faults:
            logits = logits.softmax(-1)
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
    model.wpe.weight[: len(state["wpe.weight"])] = state["wpe.weight"]
    if model.head.weight is not model.wte.weight:
        model.head.weight.copy_(state["head.weight"])
    put(model, state, {"ln_f": "ln_f"})
    for layer, block in enumerate(model.blocks):
        put(block, state, {"ln_1": "ln_1", "attn.qkv": "attn.c_attn.T", "attn.proj": "attn.c_proj.T"}, f"h.{layer}.")
        put(block, state, {"ln_2": "ln_2", "mlp.up": "mlp.c_fc.T", "mlp.down": "mlp.c_proj.T"}, f"h.{layer}.")
