"""GPT-2 in NumPy with einsum: a matrix for each head, the weights of all layers stacked, and a hook at every value.

Letters of the axes: l layers, b rows of ids, t, q and k tokens, h heads, m the model's width, d a head's size, f hidden units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray
einsum = np.einsum


@dataclass(frozen=True)
class Config:
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    d_vocab: int
    faults: set[str]


def stacked(p: dict[str, Array], cfg: Config) -> dict[str, Array]:
    """Every weight with the layers as its first axis, and those of the heads with the heads as their second."""
    faults, L, H, D, d = cfg.faults, cfg.n_layers, cfg.n_heads, cfg.d_model, cfg.d_head

    def layers(name: str) -> Array:
        return np.stack([p[f"h.{0 if 'h.0 in each name' in faults else n}.{name}"] for n in range(L)])

    def heads(c_attn: Array) -> list[Array]:
        """Cut (..., 3 * m) into queries, keys and values (..., h, d)."""
        front = c_attn.shape[:-1]
        if "c_attn as (head, third, size)" in faults:
            return list(np.moveaxis(c_attn.reshape(*front, H, 3, d), -2, 0))
        if "c_attn as (third, size, head)" in faults:
            return list(np.moveaxis(c_attn.reshape(*front, 3, d, H), (-3, -1), (0, -2)))
        return list(np.moveaxis(c_attn.reshape(*front, 3, H, d), -3, 0))

    w, w_o = {}, layers("attn.c_proj.weight")
    c_attn = layers("attn.c_attn.weight")
    if "c_attn reshaped as torch's" in faults:
        c_attn = c_attn.reshape(L, 3 * D, D).swapaxes(1, 2)
    w["W_Q"], w["W_K"], w["W_V"] = (einsum("lmhd->lhmd", third) for third in heads(c_attn))
    w["b_Q"], w["b_K"], w["b_V"] = heads(layers("attn.c_attn.bias"))
    if "no b_Q, b_K, b_V" in faults:
        w |= {name: np.zeros_like(w[name]) for name in ("b_Q", "b_K", "b_V")}
    if "W_O turned" in faults:
        w_o = w_o.swapaxes(1, 2)
    w["W_O"] = w_o.reshape(L, H, d, D)
    if "W_O as (size, head)" in faults:
        w["W_O"] = einsum("ldhm->lhdm", w_o.reshape(L, d, H, D))
    w["b_O"] = layers("attn.c_proj.bias") * (0 if "no b_O" in faults else 1)
    w["W_in"], w["b_in"] = layers("mlp.c_fc.weight"), layers("mlp.c_fc.bias")
    w["W_out"], w["b_out"] = layers("mlp.c_proj.weight"), layers("mlp.c_proj.bias")
    second = "ln_1" if "ln2 loaded from ln_1" in faults else "ln_2"
    w["ln1.w"], w["ln1.b"] = layers("ln_1.weight"), layers("ln_1.bias")
    w["ln2.w"], w["ln2.b"] = layers(f"{second}.weight"), layers(f"{second}.bias")
    return w


class HookedGPT2:
    def __init__(self, p: dict[str, Array], cfg: Config, hook: Callable[[str, Array], Array]) -> None:
        self.cfg, self.hook, self.blocks = cfg, hook, stacked(p, cfg)
        self.W_E, self.W_pos, self.W_U = p["wte.weight"], p["wpe.weight"], p["wte.weight"].T
        self.ln_final = p["ln_f.weight"], p["ln_f.bias"]
        if "W_U at random" in cfg.faults:
            drawn = np.random.default_rng(0).normal(0, 0.02, (cfg.d_model, cfg.d_vocab))
            self.W_U = drawn.astype(self.W_E.dtype)

    def embed(self, tokens: Array) -> Array:
        faults, x = self.cfg.faults, self.W_E[tokens]
        if "W_E times sqrt(d_model)" in faults:
            x = x * self.cfg.d_model**0.5
        x = self.hook("x embed", x)
        if "no W_pos" not in faults:
            first = int("positions from 1" in faults)
            x = x + self.hook("x pos_embed", np.broadcast_to(self.W_pos[first : first + x.shape[1]], x.shape))
        return self.hook("x resid_pre", x)

    def norm(self, name: str, x: Array, w: Array, b: Array) -> Array:
        faults = self.cfg.faults
        axis = None if "mean and var without axis" in faults else -1
        x = x - x.mean(axis, keepdims=True)
        var = x.var(axis, keepdims=True, ddof=int("ddof=1" in faults))
        x = x / self.hook(f"{name}.scale", np.sqrt(var + 1e-5))
        return self.hook(f"{name}.normalized", x if "norm without w and b" in faults else x * w + b)

    def scores(self, q: Array, k: Array) -> Array:
        faults, T = self.cfg.faults, q.shape[1]
        found = einsum("bqhd,bkhd->bhkq" if "scores as (key, query)" in faults else "bqhd,bkhd->bhqk", q, k)
        if "divided by d_head" in faults:
            found = found / self.cfg.d_head
        elif "no scale" not in faults:
            found = found / (self.cfg.d_model if "root of d_model" in faults else self.cfg.d_head) ** 0.5
        if "no mask" in faults:
            return found
        future = np.triu(np.ones((T, T), bool), k=0 if "triu without k=1" in faults else 1)
        return np.where(future, -1e-5 if "IGNORE is -1e-5" in faults else -1e5, found)

    def attention(self, n: int, x: Array) -> Array:
        faults, hook, w = self.cfg.faults, self.hook, {name: stack[n] for name, stack in self.blocks.items()}
        key = "Q" if "W_Q for the keys" in faults else "K"
        q = hook(f"{n} q", einsum("btm,hmd->bthd", x, w["W_Q"]) + w["b_Q"])
        k = hook(f"{n} k", einsum("btm,hmd->bthd", x, w[f"W_{key}"]) + w[f"b_{key}"])
        v = hook(f"{n} v", einsum("btm,hmd->bthd", x, w["W_V"]) + w["b_V"])
        scores = hook(f"{n} attn_scores", self.scores(q, k))
        axis = 2 if "softmax over queries" in faults else 3
        raised = np.exp(scores - scores.max(axis, keepdims=True))
        pattern = hook(f"{n} pattern", raised / raised.sum(axis, keepdims=True))
        z = einsum("bhqk,bkhd->bqhd", pattern, k if "pattern with k" in faults else v)
        hook(f"{n} z", z.reshape(x.shape))
        return hook(f"{n} attn_out", einsum("bqhd,hdm->bqm", z, w["W_O"]) + w["b_O"])

    def mlp(self, n: int, x: Array) -> Array:
        w = self.blocks
        pre = self.hook(f"{n} pre", einsum("btm,mf->btf", x, w["W_in"][n]) + w["b_in"][n])
        if "relu" in self.cfg.faults:
            post = np.maximum(pre, 0)
        else:
            post = 0.5 * pre * (1 + np.tanh((2 / np.pi) ** 0.5 * (pre + 0.044715 * pre**3)))
        return self.hook(f"{n} mlp_out", einsum("btf,fm->btm", self.hook(f"{n} post", post), w["W_out"][n]) + w["b_out"][n])

    def block(self, n: int, resid_pre: Array) -> Array:
        faults, hook, w = self.cfg.faults, self.hook, self.blocks
        from_normalized = "sums with the normalized" in faults
        normalized = self.norm(f"{n} ln1", resid_pre, w["ln1.w"][n], w["ln1.b"][n])
        attn_out = self.attention(n, normalized)
        resid_mid = hook(f"{n} resid_mid", (normalized if from_normalized else resid_pre) + attn_out)
        normalized = self.norm(
            f"{n} ln2", resid_pre if "ln2 reads resid_pre" in faults else resid_mid, w["ln2.w"][n], w["ln2.b"][n]
        )
        mlp_out = self.mlp(n, resid_mid if "mlp reads resid_mid" in faults else normalized)
        if "resid_post is mlp_out" in faults:
            return hook(f"{n} resid_post", mlp_out)
        return hook(f"{n} resid_post", (normalized if from_normalized else resid_mid) + mlp_out)

    def __call__(self, tokens: Array) -> Array:
        resid = self.embed(tokens)
        for n in range(self.cfg.n_layers):
            resid = self.block(n, resid)
        if "no ln_final" not in self.cfg.faults:
            resid = self.norm("x ln_final", resid, *self.ln_final)
        return self.hook("logits", einsum("btm,mv->btv", resid, self.W_U))


def run(folder: Path, ids: Array, layers: int, heads: int, faults: set[str], dtype: str) -> dict[str, Array]:
    """Every value of the rows ``ids`` (B, T), by the program's own names."""
    cache: dict[str, Array] = {}
    p = {name: tensor.astype(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    d_vocab, d_model = p["wte.weight"].shape
    cfg = Config(layers, heads, d_model, d_model // heads, d_vocab, faults)
    HookedGPT2(p, cfg, lambda name, x: cache.setdefault(name, np.array(x)))(ids)
    return cache
