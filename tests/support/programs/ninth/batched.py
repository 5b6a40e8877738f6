"""GPT-2 in NumPy, a batch at once: small functions on arrays (B, T, D), the parameters of each block in a dict."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Arrays = dict[str, np.ndarray]


class Batched:
    def __init__(self, folder: Path, layers: int, heads: int, faults: set[str], dtype: str) -> None:
        dtype = "float16" if "half precision" in faults else dtype
        weights = {name: array.astype(dtype) for name, array in load_file(folder / "model.safetensors").items()}
        self.wte, self.wpe = weights["wte.weight"], weights["wpe.weight"]
        self.ln_f = {"weight": weights["ln_f.weight"], "bias": weights["ln_f.bias"]}
        self.blocks = [
            {name.removeprefix(f"h.{n}."): array for name, array in weights.items() if name.startswith(f"h.{n}.")}
            for n in range(layers)
        ]
        self.heads, self.faults, self.kept = heads, faults, {}

    def keep(self, name: str, value: np.ndarray) -> np.ndarray:
        self.kept[name] = value.copy()
        return value

    def norm(self, x: np.ndarray, p: Arrays, name: str = "") -> np.ndarray:
        axis = 1 if "norm over tokens" in self.faults else -1
        eps = 1e-3 if "eps 1e-3" in self.faults else 1e-5
        mean = x.mean(axis=axis, keepdims=True)
        var = x.var(axis=axis, keepdims=True, ddof=int("ddof 1" in self.faults))
        normed = (x - mean) / np.sqrt(var + eps)
        if "no gain and bias" in self.faults:
            return normed
        return normed * p[name + "weight"] + p[name + "bias"]

    def gelu(self, x: np.ndarray) -> np.ndarray:
        if "sigmoid gelu" in self.faults:
            return x / (1 + np.exp(-1.702 * x))
        if "relu" in self.faults:
            return np.maximum(x, 0)
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def split(self, qkv: np.ndarray) -> list[np.ndarray]:
        """(B, T, 3D) to q, k, v, each (B, H, T, K)."""
        rows, tokens, width = *qkv.shape[:2], qkv.shape[2] // 3
        if "thirds inside heads" in self.faults:
            parts = qkv.reshape(rows, tokens, self.heads, 3, width // self.heads)
            return [parts[:, :, :, i].transpose(0, 2, 1, 3) for i in range(3)]
        q, k, v = np.split(qkv, 3, axis=-1)
        if "k before q" in self.faults:
            q, k = k, q
        if "v before k" in self.faults:
            k, v = v, k
        if "reshape without transpose" in self.faults:
            return [part.reshape(rows, self.heads, tokens, -1) for part in (q, k, v)]
        if "heads last" in self.faults:
            return [part.reshape(rows, tokens, -1, self.heads).transpose(0, 3, 1, 2) for part in (q, k, v)]
        return [part.reshape(rows, tokens, self.heads, -1).transpose(0, 2, 1, 3) for part in (q, k, v)]

    def weights(self, scores: np.ndarray) -> np.ndarray:
        tokens = scores.shape[-1]
        if "scores times tril" in self.faults:
            scores = scores * np.tril(np.ones((tokens, tokens), scores.dtype))
        elif "no mask" not in self.faults:
            first = 0 if "diagonal masked" in self.faults else 2 if "one token ahead" in self.faults else 1
            hidden = np.triu(np.ones((tokens, tokens), bool), k=first)
            scores = np.where(hidden, np.asarray(-1e4, scores.dtype), scores)
        axis = -2 if "softmax over queries" in self.faults else -1
        raised = np.exp(scores - scores.max(axis=axis, keepdims=True))
        return raised / raised.sum(axis=axis, keepdims=True)

    def attention(self, x: np.ndarray, p: Arrays, n: int) -> np.ndarray:
        qkv = x @ p["attn.c_attn.weight"]
        if "no bias of c_attn" not in self.faults:
            qkv = qkv + p["attn.c_attn.bias"]
        q, k, v = self.split(self.keep(f"{n} qkv", qkv))
        for name, value in (("q", q), ("k", k), ("v", v)):
            self.keep(f"{n} {name}", value)
        size = q.shape[-1]
        divisor = math.sqrt(size)
        if "no scale" in self.faults:
            divisor = 1.0
        elif "root of the width" in self.faults:
            divisor = math.sqrt(x.shape[-1])
        elif "divided by the head size" in self.faults:
            divisor = float(size)
        scores = self.keep(f"{n} scores", q @ k.swapaxes(-1, -2) / divisor)
        mixed = self.keep(f"{n} weights", self.weights(scores)) @ v
        if "heads not turned back" not in self.faults:
            mixed = mixed.transpose(0, 2, 1, 3)
        mixed = self.keep(f"{n} mixed", mixed.reshape(x.shape))
        matrix = p["attn.c_proj.weight"].T if "c_proj turned" in self.faults else p["attn.c_proj.weight"]
        return self.keep(f"{n} attended", mixed @ matrix + p["attn.c_proj.bias"])

    def mlp(self, x: np.ndarray, p: Arrays, n: int) -> np.ndarray:
        up = x @ p["mlp.c_fc.weight"]
        if "no bias of c_fc, last layer" not in self.faults or n < len(self.blocks) - 1:
            up = up + p["mlp.c_fc.bias"]
        act = self.keep(f"{n} act", self.gelu(self.keep(f"{n} up", up)))
        return self.keep(f"{n} fed", act @ p["mlp.c_proj.weight"] + p["mlp.c_proj.bias"])

    def block(self, x: np.ndarray, p: Arrays, n: int) -> np.ndarray:
        if "norm after the sum" in self.faults:
            middle = self.norm(self.keep(f"{n} middle", x + self.attention(x, p, n)), p, "ln_1.")
            return self.norm(middle + self.mlp(middle, p, n), p, "ln_2.")
        normed = self.keep(f"{n} ln_1", self.norm(x, p, "ln_1."))
        skip = normed if "stream is the norm" in self.faults else 0 if "no attention residual" in self.faults else x
        middle = self.keep(f"{n} middle", skip + self.attention(normed, p, n))
        source = x if "both from one input" in self.faults else middle
        name = "ln_1." if "ln_1 twice" in self.faults else "ln_2."
        fed = self.mlp(self.keep(f"{n} ln_2", self.norm(source, p, name)), p, n)
        return fed if "no mlp residual" in self.faults else middle + fed

    def positions(self, tokens: int) -> np.ndarray:
        if "no positions" in self.faults:
            return np.zeros_like(self.wpe[:tokens])
        if "sine positions" in self.faults:
            width = self.wpe.shape[1]
            angles = np.arange(tokens)[:, None] / 10000 ** (np.arange(0, width, 2) / width)
            return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(tokens, width).astype(self.wpe.dtype)
        first = int("positions from 1" in self.faults)
        return self.wpe[first : first + tokens]

    def logits(self, ids: np.ndarray) -> np.ndarray:
        x = self.wte[ids]
        if "embedding times root of width" in self.faults:
            x = x * math.sqrt(x.shape[-1])
        x = self.keep("x embedded", x + self.positions(ids.shape[1]))
        for n, p in enumerate(self.blocks):
            x = self.keep(f"{n} result", self.block(x, p, n))
        if "no ln_f" not in self.faults:
            x = self.norm(x, self.ln_f)
        logits = self.keep("x final", x) @ self.wte.T
        if "probabilities" in self.faults:
            logits = np.exp(logits - logits.max(axis=-1, keepdims=True))
            logits /= logits.sum(axis=-1, keepdims=True)
        return self.keep("logits", logits)


def run(folder: Path, ids: np.ndarray, layers: int, heads: int, faults: set[str], dtype: str) -> Arrays:
    """Return all that the program computes for ``ids`` (B, T), by its own names."""
    program = Batched(folder, layers, heads, faults, dtype)
    program.logits(ids)
    return program.kept
