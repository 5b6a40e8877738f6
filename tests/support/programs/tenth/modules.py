"""GPT-2 in NumPy classes, for one row (T, D) at a time: layers own their arrays, work is done in place, heads are a loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray


class Trace:
    """What the model shows: the values of each name, one for each row."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Array]] = {}

    def __call__(self, name: str, value: Array) -> Array:
        self.rows.setdefault(name, []).append(np.array(value))
        return value

    def stacked(self) -> dict[str, Array]:
        return {name: np.stack(rows) for name, rows in self.rows.items()}


class Linear:
    def __init__(self, rows: int, columns: int, dtype: str) -> None:
        self.weight, self.bias = np.zeros((rows, columns), dtype), np.zeros(columns, dtype)

    def __call__(self, x: Array) -> Array:
        y = x @ self.weight
        y += self.bias
        return y


class LayerNorm:
    def __init__(self, width: int, dtype: str, faults: set[str]) -> None:
        self.weight, self.bias, self.eps, self.faults = np.ones(width, dtype), np.zeros(width, dtype), 1e-5, faults

    def __call__(self, x: Array) -> Array:
        axis: int | None = -1
        if "mean over tokens" in self.faults:
            axis = 0
        if "mean over everything" in self.faults:
            axis = None
        y = x if "norm in place" in self.faults else x.copy()
        y -= y.mean(axis=axis, keepdims=True)
        y /= np.sqrt((y * y).mean(axis=axis, keepdims=True) + self.eps)
        if "no gamma and beta" not in self.faults:
            y *= self.weight
            y += self.bias
        return y


class Dropout:
    def __init__(self, rate: float, training: bool) -> None:
        self.rate, self.training, self.draw = rate, training, np.random.default_rng(10)

    def __call__(self, x: Array) -> Array:
        if not self.training:
            return x
        return x * (self.draw.random(x.shape) >= self.rate).astype(x.dtype) / x.dtype.type(1 - self.rate)


def softmax(x: Array, axis: int | None = -1) -> Array:
    x = np.exp(x - x.max(axis=axis, keepdims=True))
    x /= x.sum(axis=axis, keepdims=True)
    return x


class Attention:
    def __init__(self, width: int, heads: int, dtype: str, faults: set[str]) -> None:
        self.heads, self.size, self.faults = heads, width // heads, faults
        self.c_attn, self.c_proj = Linear(width, 3 * width, dtype), Linear(width, width, dtype)
        self.factor = 1 / np.sqrt(self.size)
        if "no scale" in faults:
            self.factor = 1.0
        elif "scale from n_embd" in faults:
            self.factor = 1 / np.sqrt(width)
        elif "head size without its root" in faults:
            self.factor = 1 / self.size

    def thirds(self, qkv: Array) -> list[Array]:
        if "heads first, then q k v" in self.faults:
            parts = qkv.reshape(len(qkv), self.heads, 3, self.size)
            return [parts[:, :, n].reshape(len(qkv), -1) for n in range(3)]
        q, k, v = np.split(qkv, 3, axis=-1)
        return [k, q, v] if "k q v" in self.faults else [q, k, v]

    def head(self, x: Array, h: int) -> Array:
        if "reshape to heads" in self.faults:
            return x.reshape(self.heads, len(x), self.size)[h]
        return x[:, h * self.size : (h + 1) * self.size]

    def weigh(self, scores: Array) -> Array:
        future = np.triu(np.ones(scores.shape, bool), k=0 if "triu k=0" in self.faults else 1)
        if "scores times tril" in self.faults:
            scores = scores * ~future
        elif "no mask" not in self.faults:
            scores = np.where(future, scores.dtype.type(-1e10), scores)
        if "softmax over the matrix" in self.faults:
            return softmax(scores, axis=None)
        return softmax(scores, axis=0 if "softmax axis 0" in self.faults else -1)

    def __call__(self, x: Array, trace: Trace, n: int) -> Array:
        qkv = x @ self.c_attn.weight if "c_attn without bias" in self.faults else self.c_attn(x)
        q, k, v = self.thirds(trace(f"{n} qkv", qkv))
        seen: dict[str, list[Array]] = {name: [] for name in ("q", "k", "v", "scores", "weights")}
        outputs = []
        for h in range(self.heads):
            query, key, value = self.head(q, h), self.head(k, h), self.head(v, h)
            scores = query @ key.T
            scores *= scores.dtype.type(self.factor)
            weights = self.weigh(scores)
            outputs.append(weights @ (key if "weights times k" in self.faults else value))
            for name, part in zip(seen, (query, key, value, scores, weights), strict=True):
                seen[name].append(part)
        for name, parts in seen.items():
            trace(f"{n} {name}", np.array(parts))
        if "heads joined by a reshape" in self.faults:
            mixed = np.array(outputs).reshape(len(x), -1)
        else:
            mixed = np.concatenate(outputs, axis=-1)
        trace(f"{n} mixed", mixed)
        if "c_proj turned" in self.faults:
            return mixed @ self.c_proj.weight.T + self.c_proj.bias
        return self.c_proj(mixed)


class MLP:
    def __init__(self, width: int, dtype: str, faults: set[str]) -> None:
        self.c_fc, self.c_proj, self.faults = Linear(width, 4 * width, dtype), Linear(4 * width, width, dtype), faults

    def __call__(self, x: Array, trace: Trace, n: int) -> Array:
        up = trace(f"{n} up", self.c_fc(x))
        act = up**3
        act *= up.dtype.type(0.44715 if "0.44715" in self.faults else 0.044715)
        act += up
        act *= up.dtype.type(np.sqrt(2 / np.pi))
        np.tanh(act, out=act)
        act += 1
        act *= up
        act *= up.dtype.type(0.5)
        return self.c_proj(trace(f"{n} act", act))


class Block:
    def __init__(self, width: int, heads: int, layers: int, drop: Dropout, dtype: str, faults: set[str]) -> None:
        self.ln_1, self.ln_2 = LayerNorm(width, dtype, faults), LayerNorm(width, dtype, faults)
        self.attn, self.mlp = Attention(width, heads, dtype, faults), MLP(width, dtype, faults)
        self.drop, self.faults, self.layers = drop, faults, layers

    def __call__(self, x: Array, trace: Trace, n: int) -> Array:
        after = "norms after the sums" in self.faults
        share = x.dtype.type(1 / np.sqrt(2 * self.layers) if "branches over the root of layers" in self.faults else 1)
        attended = self.drop(self.attn(x if after else trace(f"{n} ln_1", self.ln_1(x)), trace, n))
        trace(f"{n} attended", attended)
        if "no attention skip" in self.faults:
            x = attended
        else:
            x += share * attended
        if after:
            x = trace(f"{n} ln_1", self.ln_1(x))
        trace(f"{n} middle", x)
        normed = x if after or "mlp without norm" in self.faults else trace(f"{n} ln_2", self.ln_2(x))
        fed = self.drop(self.mlp(normed, trace, n))
        x += share * trace(f"{n} fed", fed)
        if after:
            x = trace(f"{n} ln_2", self.ln_2(x))
        return trace(f"{n} result", x)


class GPT2:
    def __init__(self, weights: dict[str, Array], layers: int, heads: int, dtype: str, faults: set[str]) -> None:
        width = weights["wte.weight"].shape[1]
        self.wte, self.wpe = weights["wte.weight"].astype(dtype), weights["wpe.weight"].astype(dtype)
        self.drop, self.faults = Dropout(0.1, training="dropout left on" in faults), faults
        self.blocks = [Block(width, heads, layers, self.drop, dtype, faults) for _ in range(layers)]
        self.ln_f = LayerNorm(width, dtype, faults)
        self.load(weights)

    def load(self, weights: dict[str, Array]) -> None:
        for n, block in enumerate(self.blocks):
            modules = {"ln_1": block.ln_1, "attn.c_attn": block.attn.c_attn, "attn.c_proj": block.attn.c_proj}
            modules |= {"ln_2": block.ln_2, "mlp.c_fc": block.mlp.c_fc, "mlp.c_proj": block.mlp.c_proj}
            for name, module in modules.items():
                module.weight[...] = weights[f"h.{n}.{name}.weight"]
                if "last block's c_attn bias not copied" in self.faults and block is self.blocks[-1] and name == "attn.c_attn":
                    continue
                module.bias[...] = weights[f"h.{n}.{name}.bias"]
        self.ln_f.weight[...], self.ln_f.bias[...] = weights["ln_f.weight"], weights["ln_f.bias"]

    def embed(self, ids: Array, trace: Trace) -> Array:
        first = 1 if "wpe from 1" in self.faults else 0
        trace("x positions", np.arange(first, first + len(ids)))
        if "sum written into wpe" in self.faults:
            x = self.wpe[first : first + len(ids)]
            x += self.wte[ids]
            return x
        x = self.wte[ids]
        if "embedding times root of width" in self.faults:
            x *= x.dtype.type(np.sqrt(x.shape[-1]))
        x += self.wpe[first : first + len(ids)]
        return x

    def __call__(self, ids: Array, trace: Trace) -> Array:
        trace("x causal", np.tri(len(ids), dtype=bool))
        x = self.drop(trace("x embedded", self.embed(ids, trace)))
        last = len(self.blocks) - 1
        for n in range(last if "one block short" in self.faults else last + 1):
            x = self.blocks[last if "late binding" in self.faults else n](x, trace, n)
        if "no final norm" not in self.faults:
            x = self.ln_f(x)
        if "final norm twice" in self.faults:
            x = self.ln_f(x)
        return trace("logits", trace("x final", x) @ self.wte.T)


def run(folder: Path, ids: Array, layers: int, heads: int, faults: set[str], dtype: str) -> dict[str, Array]:
    """Every value of the rows ``ids`` (B, T), by the program's own names."""
    weights = load_file(folder / "model.safetensors")
    model, trace = GPT2(weights, layers, heads, "float16" if "half floats" in faults else dtype, faults), Trace()
    for row in ids:
        model(row, trace)
    return trace.stacked()
