"""GPT-2 in JAX: a tree of parameters stacked over the blocks, `lax.scan` over them, `vmap` over heads and over the batch."""

from __future__ import annotations

from collections.abc import Set
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

jax.config.update("jax_enable_x64", True)
Tree = dict[str, jax.Array]


def load(weights: dict[str, np.ndarray], heads: int, dtype: str, on: Set[str]) -> tuple[Tree, Tree]:
    """The blocks' parameters, each stacked to (L, ...), and the others."""
    numbers = {name.split(".")[1] for name in weights if name.startswith("h.")}
    order = sorted(numbers) if "blocks sorted as text" in on else sorted(numbers, key=int)
    leaves: dict[str, list[np.ndarray]] = {}
    for number in order:
        of_block: dict[str, np.ndarray] = {}
        for name in sorted(name for name in weights if name.startswith(f"h.{number}.")):
            part = name.split(".", 2)[2]
            of_block["c_proj.bias" if "biases by last name" in on and part.endswith("c_proj.bias") else part] = weights[name]
        for part, array in of_block.items():
            leaves.setdefault(part, []).append(array)
    stacked = {part: jnp.asarray(np.stack(arrays), dtype) for part, arrays in leaves.items()}
    if "biases by last name" in on:
        stacked["attn.c_proj.bias"] = stacked["mlp.c_proj.bias"] = stacked.pop("c_proj.bias")
    if "norms exchanged" in on:
        for leaf in ("weight", "bias"):
            stacked[f"ln_1.{leaf}"], stacked[f"ln_2.{leaf}"] = stacked[f"ln_2.{leaf}"], stacked[f"ln_1.{leaf}"]
    if "square kernel turned" in on:
        stacked["attn.c_proj.weight"] = stacked["attn.c_proj.weight"].swapaxes(1, 2)
    for leaf in ("weight", "bias"):
        both = stacked.pop(f"attn.c_attn.{leaf}")  # (L, D, 3D) or (L, 3D)
        start, size = both.shape[:-1], both.shape[-1] // 3 // heads
        if "thirds within heads" in on:
            both = both.reshape(*start, heads, 3, size).swapaxes(-2, -3)
        elif "units before heads" in on:
            both = both.reshape(*start, 3, size, heads).swapaxes(-1, -2)
        else:
            both = both.reshape(*start, 3, heads, size)
        stacked[f"qkv.{leaf}"] = both[..., jnp.array([0, 2, 1]), :, :] if "q v k" in on else both
    if "qkv without bias" in on:
        stacked["qkv.bias"] = jnp.zeros_like(stacked["qkv.bias"])
    rest = {name: jnp.asarray(array, dtype) for name, array in weights.items() if not name.startswith("h.")}
    if "bfloat16 parameters" in on:
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(dtype), (stacked, rest))
    return stacked, rest


def norm(on: Set[str], x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    axis = None if "mean of everything" in on else -1
    mean = x.mean(axis, keepdims=True)
    var = x.var(axis, keepdims=True, ddof=1 if "ddof 1" in on else 0)
    eps = 1e-6 if "flax epsilon" in on else 1e-5
    root = jnp.sqrt(var) + eps if "epsilon beside the root" in on else jnp.sqrt(var + eps)
    return (x - mean) / root * scale + shift


def dot(on: Set[str], spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    if "bfloat16 products" in on:
        a, b = (one.astype(jnp.bfloat16).astype(one.dtype) for one in (a, b))
    return jnp.einsum(spec, a, b)


def dropped(on: Set[str], x: jax.Array) -> jax.Array:
    if "dropout stays" not in on:
        return x
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x / 0.9, 0)


def attend(on: Set[str], q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Tree]:
    """(T, H, K) each; the values that each head mixes, (T, H * K)."""
    axis = 0 if "vmap over tokens" in on else 1
    tokens, heads, size = q.shape

    def score(q: jax.Array, k: jax.Array) -> jax.Array:
        if "scaled twice" in on:
            q = q / np.sqrt(size).astype(q.dtype)
        scores = dot(on, "qk,sk->qs", q, k) / np.sqrt(heads * size if "scaled by width" in on else size).astype(q.dtype)
        mask = jnp.ones_like(scores, bool)
        mask = jnp.triu(mask) if "triu" in on else jnp.tril(mask)
        if "no mask" in on:
            return scores
        if "mask times scores" in on:
            return scores * mask
        return jnp.where(mask, scores, 1e-9 if "hidden is 1e-9" in on else jnp.finfo(scores.dtype).min)

    scores = jax.vmap(score, in_axes=axis)(q, k)
    over = -2 if "softmax over queries" in on else 0 if "softmax over heads" in on else -1
    weights = dropped(on, jax.nn.softmax(scores, axis=over))
    back = 0 if "heads come out first" in on else axis
    mixed = jax.vmap(partial(dot, on, "qs,sk->qk"), in_axes=(0, axis), out_axes=back)(weights, v)
    return mixed.reshape(tokens, -1), {"scores": scores, "weights": weights}


def block(on: Set[str], x: jax.Array, p: Tree) -> tuple[jax.Array, Tree]:
    h = norm(on, x, p["ln_1.weight"], p["ln_1.bias"])
    q, k, v = dot(on, "td,dchk->cthk", h, p["qkv.weight"]) + p["qkv.bias"][:, None]
    mixed, kept = attend(on, q, k, v)
    projected = dropped(on, dot(on, "td,de->te", mixed, p["attn.c_proj.weight"]) + p["attn.c_proj.bias"])
    middle = x + projected
    h2 = norm(on, middle, p["ln_2.weight"], p["ln_2.bias"])
    wide = dot(on, "td,de->te", h2, p["mlp.c_fc.weight"]) + p["mlp.c_fc.bias"]
    active = jax.nn.gelu(wide, approximate="exact gelu" not in on)
    fed = dropped(on, dot(on, "td,de->te", active, p["mlp.c_proj.weight"]) + p["mlp.c_proj.bias"])
    result = (x if "attention not carried" in on else middle) + fed
    if "feed-forward not carried" in on:
        result = middle
    kept |= {"input": x, "normed": h, "q": q, "k": k, "v": v, "mixed": mixed, "projected": projected, "middle": middle}
    return result, kept | {"second": h2, "wide": wide, "active": active, "fed": fed, "result": result}


def forward(on: Set[str], params: tuple[Tree, Tree], ids: jax.Array) -> tuple[jax.Array, Tree, Tree]:
    """Logits of one sequence, what each block computed, stacked, and the rest."""
    blocks, rest = params
    if "ids in uint8" in on:
        ids = ids.astype(jnp.uint8)
    embedded = rest["wte.weight"][ids]
    if "embedding times root" in on:
        embedded = embedded * np.sqrt(embedded.shape[-1]).astype(embedded.dtype)
    embedded = dropped(on, embedded + rest["wpe.weight"][: ids.shape[0]])
    x, kept = lax.scan(partial(block, on), embedded, blocks, reverse="scan reversed" in on)
    if "last input of the scan" in on:
        x = kept["input"][-1]
    last = x if "no final norm" in on else norm(on, x, rest["ln_f.weight"], rest["ln_f.bias"])
    table = rest["wte.weight"]
    logits = last @ table.reshape(table.shape[::-1]) if "head by reshape" in on else dot(on, "td,vd->tv", last, table)
    if "log_softmax" in on:
        logits = jax.nn.log_softmax(logits)
    return logits, kept, {"embedded": embedded, "last": last}


def run(weights: dict[str, np.ndarray], heads: int, ids: np.ndarray, on: Set[str], dtype: str) -> dict[str, np.ndarray]:
    """All values for ids (B, T); each block's is (B, ...), or with "stacked" (B, L, ...), as `vmap` and `scan` return it."""
    params = load(weights, heads, dtype, on)
    with jax.disable_jit():  # one operation after the other: to compile each variant takes seconds
        logits, kept, rest = jax.vmap(partial(forward, on), in_axes=(None, 0))(params, jnp.asarray(ids))
    out = {name: np.asarray(array) for name, array in rest.items()}
    for name, array in kept.items():
        if "stacked" in on:
            out[f"all {name}"] = np.asarray(array)
        else:
            out |= {f"{number} {name}": np.asarray(array[:, number]) for number in range(array.shape[1])}
    return out | {"logits": np.asarray(logits)}
