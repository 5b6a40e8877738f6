"""GPT-2 in NumPy, cell after cell of a notebook: tokens first (T, B, C), heads first (H, B, T, D). Mistakes: SOURCES.md."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

erf = np.vectorize(math.erf, otypes=[float])


class Module:
    """A part of the model: its tensors, by their names behind ``prefix``, and what all parts share."""

    def __init__(self, shared: Shared, prefix: str) -> None:
        self.shared, self.prefix = shared, prefix

    def __getitem__(self, leaf: str) -> np.ndarray:
        return self.shared.weights[self.prefix + leaf]

    def on(self, fault: str) -> bool:
        return fault in self.shared.faults

    def keep(self, name: str, value: np.ndarray) -> np.ndarray:
        self.shared.kept[name] = value
        return value


class Shared:
    def __init__(self, weights: dict[str, np.ndarray], heads: int, faults: set[str]) -> None:
        self.weights, self.heads, self.faults = weights, heads, faults
        self.kept: dict[str, np.ndarray] = {}


class Norm(Module):
    def __call__(self, x: np.ndarray) -> np.ndarray:
        gain, bias = self["weight"], self["bias"]
        if self.on("one gain and bias"):
            gain, bias = gain[:1], bias[:1]
        if self.on("norm over tokens"):
            return gain * (x - x.mean(0)) / (x.std(0, ddof=1) + 1e-3) + bias
        axes: tuple[int, ...] = (0, 2) if self.on("norm over tokens and features") else (2,)
        apart = x - x.mean(axes, keepdims=True)
        if self.on("n-1 and eps outside"):
            return gain * apart / (x.std(2, ddof=1, keepdims=True) + 1e-12) + bias
        return gain * apart / np.sqrt((apart**2).mean(axes, keepdims=True) + 1e-5) + bias


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    raised = np.exp(x - x.max(axis, keepdims=True))
    return raised / raised.sum(axis, keepdims=True)


class Attention(Module):
    def __call__(self, x: np.ndarray, layer: int) -> np.ndarray:
        tokens, rows, width = x.shape
        heads = self.shared.heads
        size = width // heads
        both = self.keep(f"{layer} both", x @ self["c_attn.weight"] + self["c_attn.bias"])
        if self.on("thirds in heads"):
            parts = [both.reshape(tokens, rows, heads, 3, size)[:, :, :, n].transpose(2, 1, 0, 3) for n in range(3)]
        elif self.on("view of thirds"):
            seen = both.transpose(1, 0, 2).reshape(rows, heads, tokens, size, 3)
            parts = [seen[..., n].transpose(1, 0, 2, 3) for n in range(3)]
        else:
            thirds = np.split(both, 3, axis=-1)
            if self.on("all from the keys"):
                thirds = [thirds[1]] * 3
            parts = [third.reshape(tokens, rows, heads, size).transpose(2, 1, 0, 3) for third in thirds]
        q, k, v = (self.keep(f"{layer} {name}", part) for name, part in zip("qkv", parts, strict=True))
        scores = q @ k.swapaxes(2, 3) / math.sqrt(width if self.on("scaled by width") else size)
        weights = self.weigh(self.keep(f"{layer} scores", scores), tokens)
        mixed = self.keep(f"{layer} weights", weights) @ (q if self.on("mixes queries") else v)
        merged = mixed.transpose(2, 1, 0, 3).reshape(tokens, rows, width)
        if self.on("merged by view"):
            merged = mixed.transpose(1, 0, 2, 3).reshape(rows, tokens, width).swapaxes(0, 1)
        self.keep(f"{layer} merged", merged)
        if self.on("no output projection"):
            return merged
        out = merged @ self["c_proj.weight"] + self["c_proj.bias"]
        return np.maximum(out, 0) if self.on("relu after projection") else out

    def weigh(self, scores: np.ndarray, tokens: int) -> np.ndarray:
        seen = np.tri(tokens, dtype=scores.dtype)
        big = scores.dtype.type(-1e9)
        if self.on("no mask"):
            return softmax(scores)
        if self.on("lower triangle of the scores"):
            return softmax(scores * seen)
        if self.on("mask inverted"):
            return softmax(np.where(seen == 0, scores, big))
        if self.on("mask of another convention"):  # 0 and -inf, where 1 and 0 are meant
            given = np.where(seen == 1, scores.dtype.type(0), -np.inf)
            return softmax((scores + (1 - given) * big).astype(scores.dtype))
        return softmax(np.where(seen == 1, scores, big), -2 if self.on("softmax over queries") else -1)


class FeedForward(Module):
    def __call__(self, x: np.ndarray, layer: int) -> np.ndarray:
        up = self.keep(f"{layer} up", x @ self["c_fc.weight"] + self["c_fc.bias"])
        return self.keep(f"{layer} act", self.act(up)) @ self["c_proj.weight"] + self["c_proj.bias"]

    def act(self, x: np.ndarray) -> np.ndarray:
        if self.on("relu"):
            return np.maximum(x, 0)
        if self.on("erf"):
            return (0.5 * x * (1 + erf(x / math.sqrt(2)))).astype(x.dtype)
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Block(Module):
    def __call__(self, x: np.ndarray, layer: int) -> np.ndarray:
        named = (("ln_1.", Norm), ("attn.", Attention), ("ln_2.", Norm), ("mlp.", FeedForward))
        ln_1, attn, ln_2, mlp = (kind(self.shared, self.prefix + leaf) for leaf, kind in named)
        if self.on("norms after the sums"):
            middle = self.keep(f"{layer} middle", ln_1(x + self.keep(f"{layer} attended", attn(x, layer))))
            return self.keep(f"{layer} result", ln_2(middle + self.keep(f"{layer} fed", mlp(middle, layer))))
        attended = self.keep(f"{layer} attended", attn(self.keep(f"{layer} ln_1", ln_1(x)), layer))
        middle = self.keep(f"{layer} middle", x + attended)
        normed = self.keep(f"{layer} ln_2", ln_2(middle))
        fed = self.keep(f"{layer} fed", mlp(ln_2(normed) if self.on("normed twice") else normed, layer))
        return self.keep(f"{layer} result", (x if self.on("second sum with the block's input") else middle) + fed)


class GPT2(Module):
    def __call__(self, ids: np.ndarray, layers: int) -> np.ndarray:
        wte, wpe = self["wte.weight"], self["wpe.weight"]
        x = wte[ids.T]
        if self.on("embedding times root"):
            x = x * math.sqrt(wte.shape[1])
        at = np.minimum(ids.T, len(wpe) - 1) if self.on("positions by id") else np.arange(ids.shape[1])[:, None]
        x = self.keep("x embedded", x + wpe[at])
        order = range(layers)
        for layer in reversed(order) if self.on("blocks reversed") else order:
            x = Block(self.shared, f"h.{layer}.")(x, layer)
        if not self.on("no final norm"):
            x = self.keep("x final", Norm(self.shared, "ln_f.")(x))
        logits = (x @ wte.T).swapaxes(0, 1)
        return logits - logits.mean(-1, keepdims=True) if self.on("logits centred") else logits


def run(model: Path, ids: np.ndarray, layers: int, heads: int, faults: set[str], dtype: str) -> dict[str, np.ndarray]:
    """Every value by a name of its own, and the logits, of shape (B, T, V)."""
    weights = {name: a.astype(dtype) for name, a in load_file(model / "model.safetensors").items()}
    shared = Shared(weights, heads, faults)
    logits = GPT2(shared, "")(ids, layers)
    return {name: np.asarray(a, dtype) for name, a in shared.kept.items()} | {"logits": logits.astype(dtype)}
