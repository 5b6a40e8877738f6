"""GPT-2 in NumPy: all rows of ids at once, attention as matrix products over batch times heads.

B rows, T tokens, D width, H heads, d the size of a head, V vocabulary.
"""

import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def softmax(S: Array) -> Array:
    e = np.exp(S - S.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def run(folder: Path, ids: Array, n_layer: int, n_head: int, dtype: str) -> dict[str, Array]:
    """Every value for the rows ``ids`` (B, T), by the program's own names."""
    p = {name: tensor.astype(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    B, T = ids.shape
    D = p["wte.weight"].shape[1]
    H, d = n_head, D // n_head
    seen: dict[str, Array] = {}

    def keep(name: str, value: Array) -> Array:
        seen[name] = np.array(value)
        return value

    def linear(name: str, x: Array) -> Array:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    def norm(name: str, x: Array) -> Array:
        x = x - x.mean(-1, keepdims=True)
        var = (x * x).mean(-1, keepdims=True)
        return x / np.sqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def part(x: Array) -> Array:  # (B, T, D) -> (B H, T, d)
        return x.reshape(B, T, H, d).transpose(0, 2, 1, 3).reshape(B * H, T, d)

    def keep_heads(name: str, x: Array) -> Array:  # (B H, T, ...)
        keep(name, x.reshape(B, H, T, -1))
        return x

    def add(x: Array, branch: Array) -> Array:
        return x + branch

    future = np.triu(np.ones((T, T), bool), 1)
    x = keep("x h0", p["wte.weight"][ids] + p["wpe.weight"][:T])
    for n in range(n_layer):
        normed = keep(f"{n} N1", norm(f"h.{n}.ln_1", x))
        q, k, v = np.split(linear(f"h.{n}.attn.c_attn", normed), 3, axis=-1)
        Q, K, U = keep_heads(f"{n} Q", part(q)), keep_heads(f"{n} K", part(k)), keep_heads(f"{n} U", part(v))
        S = Q @ K.transpose(0, 2, 1) / math.sqrt(d)
        S = keep_heads(f"{n} S", np.where(future, -np.inf, S))
        Y = keep_heads(f"{n} P", softmax(S)) @ U  # (B H, T, d)
        y = keep(f"{n} Y", Y.reshape(B, H, T, d).transpose(0, 2, 1, 3).reshape(B, T, D))
        mid = keep(f"{n} mid", add(x, keep(f"{n} A", linear(f"h.{n}.attn.c_proj", y))))
        normed = keep(f"{n} N2", norm(f"h.{n}.ln_2", mid))
        act = keep(f"{n} G", gelu(keep(f"{n} F", linear(f"h.{n}.mlp.c_fc", normed))))
        x = keep(f"{n} h", add(mid, keep(f"{n} M", linear(f"h.{n}.mlp.c_proj", act))))
    x = keep("x hf", norm("ln_f", x))
    head = p["wte.weight"].T  # (D, V)
    keep("logits", x @ head)
    return seen
