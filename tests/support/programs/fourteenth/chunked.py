"""GPT-2 in NumPy with a cache: a prompt in chunks of CHUNK tokens, then the last SINGLES tokens one by one; text after text.

N tokens in a call, T in a text, D width, V vocabulary.
"""

import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray
CHUNK = SINGLES = 4


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


class Program:
    """The state between calls: what the cache holds, and what was shown."""

    def __init__(self, folder: Path, ids: Array, n_layer: int, n_head: int, dtype: str) -> None:
        p = {name: tensor.astype(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
        self.p, self.n_layer, self.n_head, (self.B, self.T) = p, n_layer, n_head, ids.shape
        self.seen: dict[str, Array] = {}
        self.keys, self.values = np.zeros((2, n_layer, *p["wpe.weight"].shape), dtype)  # (layer, slot, D)
        self.n_past = 0
        for self.text, row in enumerate(ids):
            self.keys[:], self.values[:], self.n_past = 0, 0, 0
            prompt = self.T - SINGLES
            for first in range(0, prompt, CHUNK):
                self.forward(first, row[first : min(first + CHUNK, prompt)])
            for first in range(prompt, self.T):
                self.forward(first, row[first : first + 1])

    def show(self, name: str, value: Array) -> Array:
        """Keep a value (..., N, width) of this call as rows of (B, ..., T, width); what lies outside the text is not shown."""
        kept = value[..., : self.T - self.first, :]
        whole = self.seen.setdefault(name, np.zeros((self.B, *value.shape[:-2], self.T, value.shape[-1]), value.dtype))
        whole[self.text, ..., self.first : self.first + kept.shape[-2], :] = kept
        return value

    def linear(self, name: str, x: Array, biased: str = "") -> Array:
        return x @ self.p[f"{name}.weight"] + self.p[f"{biased or name}.bias"]

    def norm(self, name: str, x: Array) -> Array:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * self.p[f"{name}.weight"] + self.p[f"{name}.bias"]

    def attention(self, n: int, qkv: Array) -> Array:
        (q, k, v), N, n_past = np.split(qkv, 3, axis=-1), len(qkv), self.n_past
        keys, values, size = self.keys[n], self.values[n], q.shape[-1] // self.n_head
        for i in range(N):
            slot = n_past + i
            keys[slot], values[slot] = k[i], v[i]
        out, (dots, probs) = np.zeros_like(q), np.zeros((2, self.n_head, N, len(keys)), q.dtype)
        for i in range(N):
            count = n_past + i + 1
            for h in range(self.n_head):
                units = slice(h * size, h * size + size)
                query = q[i, units] / math.sqrt(size)
                score = keys[:count, units] @ query
                e = np.exp(score - score.max())
                dots[h, i, :count], probs[h, i, :count] = score, e / e.sum()
                out[i, units] = probs[h, i, :count] @ values[:count, units]
        self.show(f"{n} dots", dots[..., : self.T])
        self.show(f"{n} probs", probs[..., : self.T])
        return out

    def forward(self, first: int, ids: Array) -> None:
        """One call: N tokens that follow what the cache holds, from the ``first``-th of the text on."""
        show, linear, norm, N, self.first = self.show, self.linear, self.norm, len(ids), first
        position = self.n_past + np.arange(N)
        x = show("x in", self.p["wte.weight"][ids] + self.p["wpe.weight"][position])
        for n in range(self.n_layer):
            norm_a = show(f"{n} norm_a", norm(f"h.{n}.ln_1", x))
            blend = show(f"{n} blend", self.attention(n, show(f"{n} qkv", linear(f"h.{n}.attn.c_attn", norm_a))))
            attn_out = show(f"{n} attn_out", linear(f"h.{n}.attn.c_proj", blend))
            x = show(f"{n} mid", x + attn_out)
            norm_m = show(f"{n} norm_m", norm(f"h.{n}.ln_2", x))
            fc_act = show(f"{n} fc_act", gelu(show(f"{n} fc", linear(f"h.{n}.mlp.c_fc", norm_m))))
            mlp_out = show(f"{n} mlp_out", linear(f"h.{n}.mlp.c_proj", fc_act))
            x = show(f"{n} out", x + mlp_out)
        self.n_past += N
        last = norm("ln_f", x)
        show("logits", show("x last", last) @ self.p["wte.weight"].T)


def run(folder: Path, ids: Array, n_layer: int, n_head: int, dtype: str) -> dict[str, Array]:
    """Every value for the rows ``ids`` (B, T), by the program's own names."""
    return dict(sorted(Program(folder, ids, n_layer, n_head, dtype).seen.items()))
