"""GPT-2 in NumPy as a student writes it, a class for each module: batch first, heads split. Mistakes to switch on: SOURCES.md."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

erf = np.vectorize(math.erf, otypes=[float])


class Context:
    """What all modules share: the mistakes that are on, the dtype, the values to dump, and random numbers for dropout."""

    def __init__(self, faults: set[str], dtype: str) -> None:
        self.faults, self.dtype = faults, dtype
        self.kept: dict[str, np.ndarray] = {}
        self.random = np.random.default_rng(5)

    def on(self, fault: str) -> bool:
        return fault in self.faults


class LayerNorm:
    def __init__(self, context: Context, weight: np.ndarray, bias: np.ndarray) -> None:
        self.context, self.weight, self.bias = context, weight, bias

    def __call__(self, x: np.ndarray) -> np.ndarray:
        on = self.context.on
        axis: int | tuple[int, ...] = 1 if on("norm over tokens") else (1, 2) if on("norm over everything") else -1
        mean = x.mean(axis=axis, keepdims=True)
        var = x.var(axis=axis, keepdims=True)
        eps = 1e-6 if on("eps 1e-6") else 1e-5
        if on("std of torch"):
            below = x.std(axis=-1, keepdims=True, ddof=1) + 1e-5
        elif on("norm squared"):
            below = (var + eps) ** 2
        else:
            below = np.sqrt(var + eps)
        return self.weight * ((x - mean) / below) + self.bias


class Linear:
    def __init__(self, weight: np.ndarray, bias: np.ndarray | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: np.ndarray) -> np.ndarray:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


def gelu(x: np.ndarray, context: Context) -> np.ndarray:
    if context.on("exact gelu"):
        return (0.5 * x * (1 + erf(x / math.sqrt(2)))).astype(x.dtype)
    if context.on("relu"):
        return np.maximum(x, 0)
    cubic = 0.44715 if context.on("0.44715") else 0.044715
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + cubic * x**3)))


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


class Attention:
    def __init__(self, context: Context, w: dict[str, np.ndarray], heads: int) -> None:
        self.context, self.heads = context, heads
        bias = None if context.on("no qkv bias") else w["attn.c_attn.bias"]
        self.c_attn = Linear(w["attn.c_attn.weight"], bias)
        weight = w["attn.c_proj.weight"]
        self.c_proj = Linear(weight.T if context.on("projection not turned") else weight, w["attn.c_proj.bias"])

    def split(self, x: np.ndarray) -> np.ndarray:
        batch, tokens, width = x.shape
        if self.context.on("heads by view"):
            return x.reshape(batch, self.heads, tokens, width // self.heads)
        return x.reshape(batch, tokens, self.heads, width // self.heads).transpose(0, 2, 1, 3)

    def __call__(self, x: np.ndarray, layer: int, raw: np.ndarray) -> np.ndarray:
        on, kept = self.context.on, self.context.kept
        batch, tokens, width = x.shape
        size = width // self.heads
        qkv = self.c_attn(x)
        q, k, v = np.split(qkv, 3, axis=-1)
        if on("only queries normed"):
            _, k, v = np.split(self.c_attn(raw), 3, axis=-1)
        if on("all from the queries"):
            k = v = q
        if on("thirds in each head"):
            q, k, v = qkv.reshape(batch, tokens, self.heads, 3, size).transpose(3, 0, 2, 1, 4)
        elif on("units before heads"):
            q, k, v = qkv.reshape(batch, tokens, 3, size, self.heads).transpose(2, 0, 4, 1, 3)
        else:
            q, k, v = self.split(q), self.split(k), self.split(v)
        kept[f"{layer} q"], kept[f"{layer} k"], kept[f"{layer} v"] = q, k, v
        if on("values as keys"):
            k = v
        scores = k @ q.swapaxes(-1, -2) if on("keys times queries") else q @ k.swapaxes(-1, -2)
        if on("divided by the reciprocal"):
            scores = scores / size**-0.5
        else:
            scores = scores / math.sqrt(width if on("scaled by width") else size)
        seen = np.tril(np.ones((tokens, tokens), dtype=bool))
        weights = self.weigh(scores, seen)
        kept[f"{layer} scores"], kept[f"{layer} weights"] = scores, weights
        mixed = weights @ v
        if on("merged without transposing"):
            merged = mixed.reshape(batch, tokens, width)
        elif on("batch and heads exchanged"):
            merged = mixed.reshape(self.heads, batch, tokens, size).transpose(0, 2, 1, 3).reshape(batch, tokens, width)
        elif on("heads by view"):
            merged = mixed.reshape(batch, tokens, width)
        else:
            merged = mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, width)
        kept[f"{layer} mixed"] = merged
        out = self.c_proj(merged)
        if on("bias twice"):
            out = out + self.c_proj.bias
        if on("relu after projection"):
            out = np.maximum(out, 0)
        return out

    def weigh(self, scores: np.ndarray, seen: np.ndarray) -> np.ndarray:
        on = self.context.on
        big = self.context.kept["x mask"].dtype.type(-1e9)
        if on("mask after softmax"):
            return softmax(scores) * seen
        if on("hidden is 1e-9"):
            return softmax(np.where(seen, scores, scores.dtype.type(1e-9)))
        if on("mask added as ones"):
            return softmax(scores + seen)
        masked = np.where(~seen if on("mask inverted") else seen, scores, big)
        axis = -2 if on("softmax over queries") else 1 if on("softmax over heads") else -1
        weights = softmax(masked, axis)
        if on("attention dropout"):
            weights = weights * (self.context.random.random(weights.shape) >= 0.1) / weights.dtype.type(0.9)
        return weights


class Block:
    def __init__(self, context: Context, w: dict[str, np.ndarray], heads: int) -> None:
        self.context = context
        self.ln_1 = LayerNorm(context, w["ln_1.weight"], w["ln_1.bias"])
        self.ln_2 = self.ln_1 if context.on("one norm for both") else LayerNorm(context, w["ln_2.weight"], w["ln_2.bias"])
        self.attn = Attention(context, w, heads)
        self.c_fc = Linear(w["mlp.c_fc.weight"], w["mlp.c_fc.bias"])
        self.c_proj = Linear(w["mlp.c_proj.weight"], w["mlp.c_proj.bias"])

    def feed(self, x: np.ndarray, layer: int) -> np.ndarray:
        kept = self.context.kept
        kept[f"{layer} up"] = self.c_fc(x)
        kept[f"{layer} act"] = gelu(kept[f"{layer} up"], self.context)
        out = self.c_proj(kept[f"{layer} act"])
        return out + self.c_proj.bias if self.context.on("bias twice") else out

    def __call__(self, x: np.ndarray, layer: int) -> np.ndarray:
        on, kept = self.context.on, self.context.kept
        if on("norm after the sum"):
            attended = self.attn(x, layer, x)
            x = self.ln_1(x + attended)
            fed = self.feed(x, layer)
            kept[f"{layer} attended"], kept[f"{layer} middle"], kept[f"{layer} fed"] = attended, x, fed
            return self.ln_2(x + fed)
        normed = self.ln_1(x)
        attended = self.attn(normed, layer, x)
        kept[f"{layer} ln_1"], kept[f"{layer} attended"] = normed, attended
        x = (normed if on("residual after norm") else x) + attended
        normed = self.ln_2(x)
        fed = self.feed(normed, layer)
        kept[f"{layer} middle"], kept[f"{layer} ln_2"], kept[f"{layer} fed"] = x, normed, fed
        return (normed if on("residual after norm") else x) + fed


class GPT2:
    def __init__(self, context: Context, w: dict[str, np.ndarray], layers: int, heads: int) -> None:
        self.context, self.wte, self.wpe = context, w["wte.weight"], w["wpe.weight"]
        named = [{name[len(f"h.{n}.") :]: a for name, a in w.items() if name.startswith(f"h.{n}.")} for n in range(layers)]
        if context.on("last block again"):  # [Block()] * n
            named = [named[-1]] * layers
        self.blocks = [Block(context, own, heads) for own in named]
        self.ln_f = LayerNorm(context, w["ln_f.weight"], w["ln_f.bias"])
        self.head = self.wte
        if context.on("head not tied"):
            drawn = np.random.default_rng(9).standard_normal(self.wte.shape) * self.wte.std()
            self.head = drawn.astype(self.wte.dtype)

    def positions(self, ids: np.ndarray) -> np.ndarray:
        on = self.context.on
        batch, tokens = ids.shape
        if on("positions of the batch"):
            return self.wpe[np.arange(batch)][:, None]
        if on("positions by id"):
            return np.take(self.wpe, ids, axis=0, mode="clip")
        if on("sinusoids"):
            width = self.wpe.shape[1]
            angle = np.arange(tokens)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
            table = np.empty((tokens, width))
            table[:, 0::2], table[:, 1::2] = np.sin(angle), np.cos(angle)
            return table.astype(self.wpe.dtype)
        return self.wpe[np.arange(tokens) + (1 if on("positions from 1") else 0)]

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        on, kept = self.context.on, self.context.kept
        tokens = self.wte[ids]
        if on("embedding times root"):
            tokens = tokens * math.sqrt(tokens.shape[-1])
        x = tokens + self.positions(ids)
        kept["x embedded"] = x
        kept["x mask"] = np.tril(np.ones((1, 1, ids.shape[1], ids.shape[1]))).astype(x.dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer)
            kept[f"{layer} result"] = x
        if not on("no final norm"):
            x = self.ln_f(x)
        if on("final norm twice"):
            x = self.ln_f(x)
        kept["x final"] = x
        logits = x @ self.head.T
        if on("logits centred"):
            logits = logits - logits.mean(axis=-1, keepdims=True)
        if on("log_softmax"):
            logits = np.log(softmax(logits))
        return logits


def run(model: Path, ids: np.ndarray, layers: int, heads: int, faults: set[str], dtype: str) -> dict[str, np.ndarray]:
    """Every value by a name of its own, and the logits, of shape (B, T, V)."""
    context = Context(faults, dtype)
    weights = {name: a.astype(dtype) for name, a in load_file(model / "model.safetensors").items()}
    logits = GPT2(context, weights, layers, heads)(ids)
    return {name: np.asarray(a, dtype) for name, a in context.kept.items()} | {"logits": logits.astype(dtype)}
