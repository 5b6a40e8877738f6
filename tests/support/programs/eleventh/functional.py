"""GPT-2 in NumPy as pure functions: a batch (B, T) at once, parameters in nested dicts, heads by reshape and transpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray
Params = dict[str, Any]
Show = Callable[[str, Array], Array]
PARTS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


def load(folder: Path, layers: int, dtype: str, faults: set[str]) -> Params:
    tensors = {name: tensor.astype(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    blocks: list[Params] = [{}] * layers if "one dict for all blocks" in faults else [{} for _ in range(layers)]
    for n, block in enumerate(blocks):
        for part in PARTS:
            block[part] = (tensors[f"h.{n}.{part}.weight"], tensors[f"h.{n}.{part}.bias"])
    return {
        "wte": tensors["wte.weight"],
        "wpe": tensors["wpe.weight"],
        "blocks": blocks,
        "ln_f": (tensors["ln_f.weight"], tensors["ln_f.bias"]),
    }


def linear(x: Array, w: Array, b: Array, faults: set[str]) -> Array:
    return x @ w if "linear without bias" in faults else x @ w + b


def layer_norm(x: Array, g: Array, b: Array, faults: set[str], eps: float = 1e-5) -> Array:
    axis = 1 if "norm over axis 1" in faults else -1
    mean, variance = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
    normed = (x - mean) / np.sqrt(variance + eps)
    return normed if "no gain and shift" in faults else g * normed + b


def gelu(x: Array, faults: set[str]) -> Array:
    if "relu" in faults:
        return np.maximum(x, 0)
    factor = 2 / np.pi if "gelu without its root" in faults else float(np.sqrt(2 / np.pi))
    return 0.5 * x * (1 + np.tanh(factor * (x + 0.044715 * x**3)))


def softmax(x: Array, axis: int | None = -1) -> Array:
    exps = np.exp(x - x.max(axis, keepdims=True))
    return exps / exps.sum(axis, keepdims=True)


def split_heads(x: Array, heads: int, faults: set[str]) -> Array:
    """(B, T, D) to (B, heads, T, D / heads)."""
    rows, tokens, width = x.shape
    if "heads without transpose" in faults:
        return x.reshape(rows, heads, tokens, width // heads)
    if "head size before heads" in faults:
        return x.reshape(rows, tokens, width // heads, heads).transpose(0, 3, 1, 2)
    return x.reshape(rows, tokens, heads, width // heads).transpose(0, 2, 1, 3)


def merge_heads(x: Array, faults: set[str]) -> Array:
    """Back to (B, T, D)."""
    rows, heads, tokens, size = x.shape
    if "merge without transpose" in faults:
        return x.reshape(rows, tokens, heads * size)
    return x.transpose(0, 2, 1, 3).reshape(rows, tokens, heads * size)


def split_qkv(qkv: Array, heads: int, faults: set[str]) -> list[Array]:
    if "heads before three" in faults:
        parts = qkv.reshape(*qkv.shape[:2], heads, 3, -1)
        return [parts[..., n, :].reshape(*qkv.shape[:2], -1) for n in range(3)]
    if "k, q, v" in faults:
        k, q, v = np.split(qkv, 3, axis=-1)
    else:
        q, k, v = np.split(qkv, 3, axis=-1)
    return [q, k, v]


def attention(x: Array, block: Params, heads: int, show: Show, faults: set[str]) -> Array:
    tokens, width = x.shape[1:]
    qkv = show("qkv", linear(x, *block["attn.c_attn"], faults))
    q, k, v = (split_heads(part, heads, faults) for part in split_qkv(qkv, heads, faults))
    root = float(np.sqrt(width if "root of the width" in faults else width // heads))
    if "q scaled and scores scaled" in faults:
        q = q / root
    show("q", q), show("k", k), show("v", v)
    scores = np.einsum("bhqd,bhkd->bhqk", q, k)
    if "no scale" not in faults:
        scores = scores / root
    show("scores", scores)
    seen = np.tri(tokens, k=1 if "tri with k=1" in faults else 0, dtype=x.dtype)
    if "mask as a factor" in faults:
        scores = scores * seen
    elif "no mask" not in faults:
        scores = scores + (1 - seen) * x.dtype.type(-1e10)
    axis: int | None = -2 if "softmax over queries" in faults else -1
    weights = show("weights", softmax(scores, None if "softmax without axis" in faults else axis))
    mixed = show("mixed", merge_heads(np.einsum("bhqk,bhkd->bhqd", weights, v), faults))
    if "no output projection" in faults:
        return mixed
    w, b = block["attn.c_proj"]
    return linear(mixed, w.T if "c_proj as (out, in)" in faults else w, b, faults)


def ffn(x: Array, block: Params, show: Show, faults: set[str]) -> Array:
    up = show("up", linear(x, *block["mlp.c_fc"], faults))
    return linear(show("act", gelu(up, faults)), *block["mlp.c_proj"], faults)


def transformer_block(x: Array, block: Params, heads: int, show: Show, faults: set[str]) -> Array:
    if "norms after the sums" in faults:
        attended = show("attended", attention(x, block, heads, show, faults))
        x = show("middle", show("ln_1", layer_norm(x + attended, *block["ln_1"], faults)))
        fed = show("fed", ffn(x, block, show, faults))
        return show("result", show("ln_2", layer_norm(x + fed, *block["ln_2"], faults)))
    normed = show("ln_1", layer_norm(x, *block["ln_1"], faults))
    if "x is the normed x" in faults:
        x = normed
    x = show("middle", x + show("attended", attention(normed, block, heads, show, faults)))
    normed = show("ln_2", layer_norm(x, *block["ln_2"], faults))
    if "x is the normed x" in faults:
        x = normed
    fed = show("fed", ffn(normed, block, show, faults))
    return show("result", fed if "ffn without its sum" in faults else x + fed)


def gpt2(ids: Array, params: Params, heads: int, show: Show, faults: set[str]) -> Array:
    wte, wpe = params["wte"], params["wpe"]
    x = wte[ids]
    if "no positions" not in faults:
        x = x + wpe[show("x positions", np.arange(ids.shape[1]))]
    show("x embedded", x)
    for n, block in enumerate(params["blocks"]):
        x = transformer_block(x, block, heads, lambda part, value, n=n: show(f"{n} {part}", value), faults)
    if "no ln_f" not in faults:
        x = layer_norm(x, *params["ln_f"], faults)
    show("x final", x)
    head = wte
    if "head of its own, at random" in faults:
        head = (0.02 * np.random.default_rng(11).standard_normal(wte.shape)).astype(wte.dtype)
    logits = np.einsum("btd,vd->btv", x, head)
    return show("logits", softmax(logits) if "probabilities returned" in faults else logits)


def run(folder: Path, ids: Array, layers: int, heads: int, faults: set[str], dtype: str) -> dict[str, Array]:
    """Every value of the rows ``ids`` (B, T), by the program's own names."""
    shown: dict[str, Array] = {}

    def show(name: str, value: Array) -> Array:
        shown[name] = np.array(value)
        return value

    gpt2(ids, load(folder, layers, dtype, faults), heads, show, faults)
    return shown
