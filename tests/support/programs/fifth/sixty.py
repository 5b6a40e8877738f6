"""GPT-2 in NumPy as short functions over nested parameters: einsum by head, a prompt in one pass, then a token at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

FAULTS = {
    "half times one": ("gelu-variant",),
    "pi over two": ("gelu-variant",),
    "ddof 1": ("layernorm-unbiased-variance",),
    "eps of Keras": ("layernorm-eps",),
    "deviation plus eps": ("layernorm-eps",),
    "mean of everything": ("layernorm-axis", "batch-dependent"),
    "first norm twice": ("extra-norm",),
    "fourth root once": ("scale-wrong",),
    "root of all features": ("scale-by-width",),
    "mask times 1e-10": ("mask-missing", "cache-inconsistent"),
    "steps forget themselves": ("mask-strict", "cache-inconsistent"),
    "steps unscaled": ("scale-missing", "cache-inconsistent"),
    "positions begin again": ("position-offset", "position-missing", "cache-inconsistent"),
    "steps without positions": ("position-missing", "position-offset", "cache-inconsistent"),
    "prompt counted twice": ("position-offset", "cache-inconsistent"),
    "softmax over queries": ("softmax-axis",),
    "powers not divided": ("softmax-missing",),
    "v k q": ("qkv-order",),
    "twice the heads": ("head-layout",),
    "units outside heads": ("head-layout",),
    "bias once a head": ("extra-bias", "wrong-tensor"),
    "values without bias": ("missing-bias",),
    "norm after adding": ("post-norm",),
    "block added again": ("residual-scaled",),
    "feed reads the first norm": ("parallel-block", "norms-swapped"),
    "tokens one late": ("wrong-tensor",),
    "head of its own": ("untied-head", "not-loaded"),
    "int8 matrices": ("reduced-precision",),
    "float16 scores": ("reduced-precision",),
    "column-major": ("transposed", "wrong-tensor"),
    "blocks sorted as text": ("layer-order", "wrong-tensor"),
    "late binding": ("layer-repeated", "wrong-tensor"),
    "no last norm": ("final-norm-missing",),
}
HARMLESS = ("powers as they are", "mask -1e9", "queries scaled")
Keep = Callable[[str, np.ndarray], None]


def load(weights: dict[str, np.ndarray], n_head: int, bad: set[str], dtype: str) -> dict:
    """Parameters as nested dictionaries and pairs (weight, bias), those of attention by head."""
    w = {name: array.astype(dtype) for name, array in weights.items()}
    n_head *= 2 if "twice the heads" in bad else 1
    n_layer = sum(name.endswith("ln_1.bias") for name in w)
    width = w["wte.weight"].shape[1]

    def pair(name):
        matrix = w[f"{name}.weight"]
        if "int8 matrices" in bad and matrix.ndim == 2:
            step = np.abs(matrix).max() / 127
            matrix = np.round(matrix / step).astype(np.int8).astype(dtype) * step
        if "column-major" in bad and ".mlp." in name:
            matrix = matrix.ravel().reshape(matrix.shape, order="F")
        return matrix, w[f"{name}.bias"]

    def block(n):
        matrix, bias = pair(f"h.{n}.attn.c_attn")
        thirds = zip(np.split(matrix, 3, axis=1), np.split(bias, 3), strict=True)
        if "units outside heads" in bad:
            parts = [(m.reshape(width, -1, n_head).swapaxes(1, 2), b.reshape(-1, n_head).T) for m, b in thirds]
        else:
            parts = [(m.reshape(width, n_head, -1), b.reshape(n_head, -1)) for m, b in thirds]
        if "values without bias" in bad:
            parts[2] = parts[2][0], 0 * parts[2][1]
        matrix, bias = pair(f"h.{n}.attn.c_proj")
        found = {name: pair(f"h.{n}.{name}") for name in ("ln_1", "ln_2", "mlp.c_fc", "mlp.c_proj")}
        return found | {"qkv": parts[::-1] if "v k q" in bad else parts, "out": (matrix.reshape(n_head, -1, width), bias)}

    order = sorted(range(n_layer), key=str if "blocks sorted as text" in bad else int)
    order = [n_layer - 1] * n_layer if "late binding" in bad else order
    head = np.sin(np.arange(w["wte.weight"].size)).reshape(w["wte.weight"].shape).astype(dtype)
    head = head if "head of its own" in bad else w["wte.weight"]
    blocks = [block(n) for n in order]
    return {"wte": w["wte.weight"], "wpe": w["wpe.weight"], "blocks": blocks, "ln_f": pair("ln_f"), "head": head}


def gelu(x, bad):
    root = math.sqrt(math.pi / 2 if "pi over two" in bad else 2 / math.pi)
    bend = np.tanh(root * (x + 0.044715 * x**3))
    return 0.5 * x * 1 + bend if "half times one" in bad else 0.5 * x * (1 + bend)


def layer_norm(x, gain, shift, bad):
    axis = None if "mean of everything" in bad else -1
    mean = x.mean(axis, keepdims=True)
    var = x.var(axis, ddof=1 if "ddof 1" in bad else 0, keepdims=True)
    if "deviation plus eps" in bad:
        return (x - mean) / (np.sqrt(var) + 1e-5) * gain + shift
    return (x - mean) / np.sqrt(var + (1e-3 if "eps of Keras" in bad else 1e-5)) * gain + shift


def softmax(x, bad):
    axis = -2 if "softmax over queries" in bad else -1
    powers = np.exp(x if "powers as they are" in bad else x - x.max(axis, keepdims=True))
    return powers if "powers not divided" in bad else powers / powers.sum(axis, keepdims=True)


def attention(x, p, past, bad, keep: Keep):
    """``past`` is a list of the keys and values (B, H, T, K) so far, and grows by those of ``x`` (B, t, C)."""
    q, k, v = (np.einsum("btc,chk->bhtk", x, w) + b[:, None] for w, b in p["qkv"])
    keep("present", np.stack([k, v]))
    step = bool(past)
    old = past[:]
    past[:] = [np.concatenate([before, now], axis=2) for before, now in zip(past, (k, v), strict=True)] if step else [k, v]
    keys, values = old if step and "steps forget themselves" in bad else past
    size = q.shape[-1]
    scale = size**-0.25 if "fourth root once" in bad else x.shape[-1] ** -0.5 if "root of all features" in bad else size**-0.5
    scale = 1.0 if step and "steps unscaled" in bad else scale
    q, scale = (q * scale, 1.0) if "queries scaled" in bad else (q, scale)
    scores = np.einsum("bhqk,bhsk->bhqs", q, keys) * scale
    if not step:  # the only pass in which a token could see a later one
        low = -1e-10 if "mask times 1e-10" in bad else -1e9 if "mask -1e9" in bad else -1e10
        scores = scores + (1 - np.tri(x.shape[1], dtype=x.dtype)) * low
    if "float16 scores" in bad:
        scores = np.maximum(scores, -6e4).astype(np.float16).astype(x.dtype)
    weights = softmax(scores, bad)
    keep("weights", weights)
    mixed = np.einsum("bhqs,bhsk->bhqk", weights, values)
    keep("mixed", mixed)
    matrix, bias = p["out"]
    times = len(matrix) if "bias once a head" in bad else 1
    if "units outside heads" in bad:
        matrix = matrix.reshape(size, -1, x.shape[-1]).swapaxes(0, 1)
    return np.einsum("bhqk,hkc->bqc", mixed, matrix) + times * bias


def feed_forward(x, p, bad, keep: Keep):
    inner = x @ p["mlp.c_fc"][0] + p["mlp.c_fc"][1]
    active = gelu(inner, bad)
    keep("active", active)
    return active @ p["mlp.c_proj"][0] + p["mlp.c_proj"][1]


def block(x, p, past, bad, keep: Keep):
    if "norm after adding" in bad:
        x = layer_norm(x + attention(x, p, past, bad, keep), *p["ln_1"], bad)
        return layer_norm(x + feed_forward(x, p, bad, keep), *p["ln_2"], bad)
    first = layer_norm(x, *p["ln_1"], bad)
    if "first norm twice" in bad:
        first = layer_norm(first, *p["ln_1"], bad)
    middle = x + attention(first, p, past, bad, keep)
    second = first if "feed reads the first norm" in bad else layer_norm(middle, *p["ln_2"], bad)
    fed = feed_forward(second, p, bad, keep)
    for name, value in (("first", first), ("middle", middle), ("second", second), ("fed", fed)):
        keep(name, value)
    return x + middle + fed if "block added again" in bad else middle + fed


def gpt2(ids, start, params, pasts, bad, keep: Keep):
    """The logits (B, t, V) of ``ids`` (B, t), which come after the ``start`` tokens that ``pasts`` holds."""
    place = np.arange(ids.shape[1]) + start
    if start and "positions begin again" in bad:
        place -= start
    elif start and "prompt counted twice" in bad:
        place += PROMPT
    x = params["wte"][ids] + params["wpe"][place]
    if start and "steps without positions" in bad:
        x = params["wte"][ids]
    keep("start", x)
    for n, (p, past) in enumerate(zip(params["blocks"], pasts, strict=True)):
        x = block(x, p, past, bad, lambda name, value, n=n: keep(f"{n} {name}", value))
        keep(f"{n} result", x)
    x = x if "no last norm" in bad else layer_norm(x, *params["ln_f"], bad)
    keep("last", x)
    return x @ params["head"].T


PROMPT = 5


def run(weights: dict[str, np.ndarray], n_head: int, ids: np.ndarray, bad: set[str], dtype: str) -> dict[str, np.ndarray]:
    """Every value by name, all passes joined along their tokens: (B, T, C), (B, H, T, K), (B, H, T, T) or (2, B, H, T, K)."""
    params = load(weights, n_head, bad, dtype)
    given = np.concatenate([0 * ids[:, :1], ids[:, :-1]], axis=1) if "tokens one late" in bad else ids
    pieces: dict[str, list[np.ndarray]] = {}
    pasts: list[list] = [[] for _ in params["blocks"]]
    tokens = ids.shape[1]

    def keep(name, value):
        if name.endswith(" weights"):
            value = np.pad(value, [(0, 0)] * 3 + [(0, tokens - value.shape[-1])])
        pieces.setdefault(name, []).append(value)

    for start, end in [(0, PROMPT), *((t, t + 1) for t in range(PROMPT, tokens))]:
        keep("logits", gpt2(given[:, start:end], start, params, pasts, bad, keep))
    return {name: np.concatenate(parts, axis=1 if parts[0].ndim == 3 else -2) for name, parts in pieces.items()}
