"""GPT-2 in NumPy with features first, (C, T), and a list of small matrices for each head."""

from __future__ import annotations

import math

import numpy as np

FAULTS = {
    "erf": ("gelu-variant",),
    "relu": ("gelu-variant",),
    "eps 1e-3": ("layernorm-eps",),
    "variance n-1": ("layernorm-unbiased-variance",),
    "no mean": ("rmsnorm",),
    "no gain": ("layernorm-without-affine",),
    "unscaled": ("scale-missing",),
    "scaled by width": ("scale-by-width",),
    "scaled twice": ("scale-twice",),
    "no mask": ("mask-missing",),
    "mask by product": ("mask-multiplied",),
    "sees next": ("mask-off-by-one",),
    "softmax over queries": ("softmax-axis",),
    "no projection": ("output-projection-missing",),
    "no positions": ("position-missing",),
    "positions from 1": ("position-offset",),
    "norm after": ("post-norm",),
    "attention replaces": ("residual-missing",),
    "normed stream": ("residual-from-normed",),
    "parallel": ("parallel-block",),
    "blocks reversed": ("layer-order",),
    "no last norm": ("final-norm-missing",),
    "norms exchanged": ("norms-swapped",),
    "q and k exchanged": ("qkv-order",),
    "projection transposed": ("transposed",),
    "no bias in mlp": ("missing-bias",),
    "embedding by root": ("embedding-scaled",),
    "heads reversed": ("head-layout",),
    "norm after embedding": ("extra-norm",),
}


def run(weights: dict[str, np.ndarray], n_head: int, ids: np.ndarray, faults: set[str], dtype: str) -> dict[str, np.ndarray]:
    """Return every value by name; ``ids`` is (T,), each value (C, T), (K, T) or (T, T), the logits (T, V)."""
    w = {name: array.astype(dtype) for name, array in weights.items()}
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("h."))
    kept: dict[str, np.ndarray] = {}
    width, tokens = w["wte.weight"].shape[1], len(ids)
    size = width // n_head

    def normed(x, name):
        eps = 1e-3 if "eps 1e-3" in faults else 1e-5
        centred = x if "no mean" in faults else x - x.mean(0)
        spread = (centred**2).sum(0) / (width - 1 if "variance n-1" in faults else width)
        y = centred / np.sqrt(spread + np.asarray(eps, dtype))
        return y if "no gain" in faults else y * w[f"{name}.weight"][:, None] + w[f"{name}.bias"][:, None]

    def activation(x):
        if "relu" in faults:
            return np.maximum(x, 0)
        if "erf" in faults:
            return (x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))).astype(dtype)
        return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def attended(x, n):
        matrix, bias = w[f"h.{n}.attn.c_attn.weight"], w[f"h.{n}.attn.c_attn.bias"]
        factor = 1 / math.sqrt(width if "scaled by width" in faults else size)
        factor = 1.0 if "unscaled" in faults else factor**2 if "scaled twice" in faults else factor
        reach = 1 if "sees next" in faults else 0
        seen = np.ones((tokens, tokens), bool) if "no mask" in faults else np.tri(tokens, k=reach, dtype=bool)
        found = []
        for head in range(n_head):
            parts = []
            for third in range(3):
                columns = slice(third * width + head * size, third * width + (head + 1) * size)
                parts.append(matrix[:, columns].T @ x + bias[columns, None])
            q, k, v = parts
            if "q and k exchanged" in faults:
                q, k = k, q
            raw = q.T @ k * np.asarray(factor, dtype)
            masked = raw * seen if "mask by product" in faults else np.where(seen, raw, -np.inf).astype(dtype)
            axis = 0 if "softmax over queries" in faults else 1
            powers = np.exp(masked - masked.max(axis, keepdims=True))
            chance = powers / powers.sum(axis, keepdims=True)
            out = v @ chance.T
            found.append(out)
            for name, value in (("q", q), ("k", k), ("v", v), ("raw", raw), ("chance", chance), ("out", out)):
                kept[f"{n} {head} {name}"] = value
        y = np.concatenate(found[::-1] if "heads reversed" in faults else found)
        kept[f"{n} joined"] = y
        if "no projection" in faults:
            return y
        matrix = w[f"h.{n}.attn.c_proj.weight"]
        return (matrix if "projection transposed" in faults else matrix.T) @ y + w[f"h.{n}.attn.c_proj.bias"][:, None]

    def fed(x, n):
        inner = w[f"h.{n}.mlp.c_fc.weight"].T @ x
        if "no bias in mlp" not in faults:
            inner = inner + w[f"h.{n}.mlp.c_fc.bias"][:, None]
        active = activation(inner)
        kept[f"{n} inner"], kept[f"{n} active"] = inner, active
        return w[f"h.{n}.mlp.c_proj.weight"].T @ active + w[f"h.{n}.mlp.c_proj.bias"][:, None]

    x = w["wte.weight"][ids].T.copy()
    if "embedding by root" in faults:
        x = x * np.asarray(math.sqrt(width), dtype)
    if "no positions" not in faults:
        first = 1 if "positions from 1" in faults else 0
        x = x + w["wpe.weight"][first : first + tokens].T
    kept["embedded"] = x
    if "norm after embedding" in faults:
        x = normed(x, "ln_f")
    for n in reversed(range(layers)) if "blocks reversed" in faults else range(layers):
        one, two = f"h.{n}.ln_1", f"h.{n}.ln_2"
        if "norms exchanged" in faults:
            one, two = two, one
        if "norm after" in faults:
            x = normed(x + attended(x, n), one)
            x = normed(x + fed(x, n), two)
        else:
            a = normed(x, one)
            attention = attended(a, n)
            stream = a if "normed stream" in faults else x
            middle = attention if "attention replaces" in faults else stream + attention
            b = normed(x if "parallel" in faults else middle, two)
            forward = fed(b, n)
            x = middle + forward
            for name, value in (("a", a), ("attention", attention), ("middle", middle), ("b", b), ("forward", forward)):
                kept[f"{n} {name}"] = value
        kept[f"{n} block"] = x
    last = x if "no last norm" in faults else normed(x, "ln_f")
    kept["last"] = last
    kept["logits"] = last.T @ w["wte.weight"].T
    return kept
