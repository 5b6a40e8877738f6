"""GPT-2 in NumPy, one token after another, with a cache of keys and values."""

from __future__ import annotations

import math

import numpy as np

FAULTS = {
    "quick gelu": ("gelu-variant",),
    "constant 0.44715": ("gelu-variant",),
    "eps 1e-2": ("layernorm-eps",),
    "variance n-1": ("layernorm-unbiased-variance",),
    "no shift": ("missing-bias",),
    "unscaled": ("scale-missing",),
    "by layer": ("scale-inverse-layer",),
    "by 2": ("scale-wrong",),
    "not itself": ("mask-strict",),
    "no softmax": ("softmax-missing",),
    "keys for values": ("value-projection-wrong", "qkv-order", "wrong-tensor"),
    "positions backwards": ("position-offset", "position-missing"),
    "position 2": ("position-offset",),
    "position always 0": ("position-offset", "position-missing"),
    "mlp replaces": ("residual-missing",),
    "half a branch": ("residual-scaled",),
    "first block twice": ("layer-repeated",),
    "last block left out": ("layer-missing",),
    "no norm before mlp": ("norm-missing",),
    "k and v exchanged": ("qkv-order",),
    "units of heads interleaved": ("head-layout",),
    "no bias of projection": ("missing-bias",),
    "block 0's mlp everywhere": ("wrong-tensor",),
    "float8 weights": ("reduced-precision",),
    "hot logits": ("logits-scaled",),
    "softmaxed": ("logits-softmaxed",),
    "head bias": ("extra-bias",),
}


def run(weights: dict[str, np.ndarray], n_head: int, ids: np.ndarray, faults: set[str], dtype: str) -> dict[str, np.ndarray]:
    """Return every value by name, all tokens stacked: (T, C), (T, H, K) or (T, H, T), the logits (T, V)."""
    w = {name: array.astype(dtype) for name, array in weights.items()}
    if "float8 weights" in faults:  # four bits of mantissa
        parts = {name: np.frexp(array) for name, array in w.items()}
        w = {name: np.ldexp(np.round(m * 16) / 16, e).astype(dtype) for name, (m, e) in parts.items()}
    layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("h."))
    width, tokens = w["wte.weight"].shape[1], len(ids)
    size = width // n_head
    kept: dict[str, list[np.ndarray]] = {}
    keys: list[list[np.ndarray]] = [[] for _ in range(layers)]
    values: list[list[np.ndarray]] = [[] for _ in range(layers)]

    def keep(name, value):
        kept.setdefault(name, []).append(value)
        return value

    def normed(x, name):
        away = x - x.mean()
        count = width - 1 if "variance n-1" in faults else width
        y = away / math.sqrt((away @ away) / count + (1e-2 if "eps 1e-2" in faults else 1e-5)) * w[f"{name}.weight"]
        return (y if "no shift" in faults else y + w[f"{name}.bias"]).astype(dtype)

    def activation(x):
        if "quick gelu" in faults:
            return x / (1 + np.exp(-1.702 * x))
        cubic = 0.44715 if "constant 0.44715" in faults else 0.044715
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + cubic * x * x * x)))

    def split(row):
        return row.reshape(size, n_head).T if "units of heads interleaved" in faults else row.reshape(n_head, size)

    def attention(x, n, again):
        row = x @ w[f"h.{n}.attn.c_attn.weight"] + w[f"h.{n}.attn.c_attn.bias"]
        keep(f"{n} qkv{again}", row)
        q, k, v = (split(part) for part in np.split(row, 3))
        if "k and v exchanged" in faults:
            k, v = v, k
        if "keys for values" in faults:
            v = k
        past_k, past_v = (keys[n], values[n]) if not again else (second_keys, second_values)
        past_k.append(k)
        past_v.append(v)
        number = len(past_k)
        reach = number - 1 if "not itself" in faults and number > 1 else number
        factor = 1.0 if "unscaled" in faults else 1 / math.sqrt(size)
        factor = factor / (n + 1) if "by layer" in faults else factor * 2 if "by 2" in faults else factor
        full = np.zeros((n_head, tokens), dtype)
        out = np.zeros((n_head, size), dtype)
        for head in range(n_head):
            scores = np.array([q[head] @ old[head] for old in past_k[:reach]]) * factor
            powers = np.exp(scores - scores.max())
            full[head, :reach] = scores if "no softmax" in faults else powers / powers.sum()
            out[head] = full[head, :reach] @ np.array([old[head] for old in past_v[:reach]])
        for name, value in (("q", q), ("k", k), ("v", v), ("chance", full), ("out", out)):
            keep(f"{n} {name}{again}", value)
        merged = out.T.reshape(-1) if "units of heads interleaved" in faults else out.reshape(-1)
        y = merged @ w[f"h.{n}.attn.c_proj.weight"]
        return y if "no bias of projection" in faults else y + w[f"h.{n}.attn.c_proj.bias"]

    def forward(x, n, again):
        source = 0 if "block 0's mlp everywhere" in faults else n
        inner = x @ w[f"h.{source}.mlp.c_fc.weight"] + w[f"h.{source}.mlp.c_fc.bias"]
        active = activation(keep(f"{n} inner{again}", inner)).astype(dtype)
        keep(f"{n} active{again}", active)
        return active @ w[f"h.{source}.mlp.c_proj.weight"] + w[f"h.{source}.mlp.c_proj.bias"]

    second_keys: list[np.ndarray] = []
    second_values: list[np.ndarray] = []
    order = [(n, "") for n in range(layers)]
    if "first block twice" in faults:
        order.insert(1, (0, " again"))
    if "last block left out" in faults:
        order.pop()
    for number, token in enumerate(ids):
        place = tokens - 1 - number if "positions backwards" in faults else number
        place = number + 2 if "position 2" in faults else 0 if "position always 0" in faults else place
        x = keep("embedded", w["wte.weight"][token] + w["wpe.weight"][place])
        for n, again in order:
            half = np.asarray(0.5 if "half a branch" in faults else 1.0, dtype)
            branch = keep(f"{n} attention{again}", attention(keep(f"{n} a{again}", normed(x, f"h.{n}.ln_1")), n, again))
            x = keep(f"{n} middle{again}", x + branch)
            b = x if "no norm before mlp" in faults else normed(x, f"h.{n}.ln_2")
            branch = keep(f"{n} forward{again}", forward(keep(f"{n} b{again}", b), n, again))
            x = keep(f"{n} block{again}", branch if "mlp replaces" in faults else x + half * branch)
        logits = w["wte.weight"] @ keep("last", normed(x, "ln_f"))
        if "hot logits" in faults:
            logits = logits / np.asarray(0.7, dtype)
        if "head bias" in faults:
            logits = logits + np.sin(np.arange(len(logits))).astype(dtype)
        if "softmaxed" in faults:
            logits = np.exp(logits - logits.max())
            logits = logits / logits.sum()
        keep("logits", logits)
    return {name: np.stack(rows) for name, rows in kept.items()}
