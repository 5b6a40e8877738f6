"""GPT-2 in NumPy in classes, as lectures and books build it: a list of heads, matrices (out, in), weights assigned by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray


@dataclass
class Config:
    emb_dim: int
    n_heads: int
    n_layers: int
    head_size: int
    show: Callable[[str, Array], Array]
    faults: set[str]
    rng: np.random.Generator

    def dropout(self, x: Array, rate: float = 0.1) -> Array:
        return x * (self.rng.random(x.shape) >= rate) / (1 - rate) if "dropout stays on" in self.faults else x


class Linear:
    weight: Array
    bias: Array | None = None

    def __call__(self, x: Array) -> Array:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class LayerNorm:
    def __init__(self, cfg: Config) -> None:
        self.scale, self.shift, self.faults = np.float32(1), np.float32(0), cfg.faults

    def __call__(self, x: Array) -> Array:
        axis, ddof = 1 if "norm over axis 1" in self.faults else -1, int("ddof=1" in self.faults)
        mean, var = x.mean(axis, keepdims=True), x.var(axis, keepdims=True, ddof=ddof)
        return self.scale * ((x - mean) / np.sqrt(var + 1e-5)) + self.shift


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


class Head:
    def __init__(self, cfg: Config) -> None:
        self.cfg, self.key, self.query, self.value = cfg, Linear(), Linear(), Linear()

    def __call__(self, x: Array) -> dict[str, Array]:
        faults, (_, T, C) = self.cfg.faults, x.shape
        k, q, v = self.key(x), self.query(x), self.value(x)
        factor = C**-0.5 if "C ** -0.5" in faults else self.cfg.head_size ** (0.5 if "head_size ** 0.5" in faults else -0.5)
        wei = q @ k.transpose(0, 2, 1) * (1 if "no scale" in faults else factor)
        scores = wei  # as they are shown
        if "scores times tril" in faults:
            wei = wei * np.tri(T, dtype=x.dtype)
        elif "no mask" not in faults:
            future = np.triu(np.ones((T, T), bool), k=0 if "triu with k=0" in faults else 1)
            wei = np.where(future, -1e9, wei)
        wei = self.cfg.dropout(softmax(wei, 1 if "softmax over axis 1" in faults else -1))
        return {"query": q, "key": k, "value": v, "scores": scores, "wei": wei, "out": wei @ (k if "wei @ k" in faults else v)}


class MultiHead:
    def __init__(self, cfg: Config) -> None:
        self.cfg, self.proj, one = cfg, Linear(), "one Head for all" in cfg.faults
        self.heads = [Head(cfg)] * cfg.n_heads if one else [Head(cfg) for _ in range(cfg.n_heads)]

    def __call__(self, x: Array, n: int) -> Array:
        cfg, outs = self.cfg, [head(x) for head in self.heads]
        for part in ("query", "key", "value", "scores", "wei"):
            cfg.show(f"{n} {part}", np.stack([out[part] for out in outs], axis=1))
        mixed = np.concatenate([out["out"] for out in outs], axis=-1)
        if "heads stacked on the last axis" in cfg.faults:
            mixed = np.stack([out["out"] for out in outs], axis=-1).reshape(x.shape)
        cfg.show(f"{n} heads", mixed)
        return cfg.show(f"{n} att", mixed if "no output projection" in cfg.faults else cfg.dropout(self.proj(mixed)))


class FeedForward:
    def __init__(self, cfg: Config) -> None:
        self.cfg, self.fc1, self.fc2 = cfg, Linear(), Linear()

    def gelu(self, x: Array) -> Array:
        tanh = np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))
        return np.maximum(x, 0) if "relu" in self.cfg.faults else 0.5 * x * (1 + tanh)

    def __call__(self, x: Array, n: int) -> Array:
        x = self.cfg.show(f"{n} gelu", self.gelu(self.cfg.show(f"{n} fc1", self.fc1(x))))
        return self.cfg.show(f"{n} ff", self.cfg.dropout(self.fc2(x)))


class Block:
    def __init__(self, cfg: Config) -> None:
        self.cfg, self.att, self.ff = cfg, MultiHead(cfg), FeedForward(cfg)
        self.norm1, self.norm2 = LayerNorm(cfg), LayerNorm(cfg)

    def __call__(self, x: Array, n: int) -> Array:
        faults, show = self.cfg.faults, self.cfg.show
        norm2 = self.norm1 if "norm1 twice" in faults else self.norm2
        if "norms after the sums" in faults:
            x = show(f"{n} shortcut", show(f"{n} norm1", self.norm1(x + self.att(x, n))))
            return show(f"{n} block", show(f"{n} norm2", norm2(x + self.ff(x, n))))
        shortcut, x = x, show(f"{n} norm1", self.norm1(x))
        if "shortcut after the norm" in faults:
            shortcut = x
        x = self.att(x, n)
        x = show(f"{n} shortcut", x if "attention without shortcut" in faults else x + shortcut)
        shortcut, x = x, show(f"{n} norm2", norm2(x))
        if "shortcut after the norm" in faults:
            shortcut = x
        return show(f"{n} block", self.ff(x, n) + shortcut)


class GPT:
    def __init__(self, cfg: Config) -> None:
        self.cfg, self.final_norm, self.out_head, one = cfg, LayerNorm(cfg), Linear(), "one Block for all" in cfg.faults
        self.tok_emb = self.pos_emb = np.zeros((0, cfg.emb_dim))
        self.blocks = [Block(cfg)] * cfg.n_layers if one else [Block(cfg) for _ in range(cfg.n_layers)]

    def positions(self, tokens: int) -> Array:
        if "sines" not in self.cfg.faults:
            return self.pos_emb[np.arange(tokens)]
        unit = np.arange(self.cfg.emb_dim)
        angles = np.arange(tokens)[:, None] / 10000 ** (2 * (unit // 2) / self.cfg.emb_dim)
        return np.where(unit % 2, np.cos(angles), np.sin(angles)).astype(self.pos_emb.dtype)

    def __call__(self, ids: Array) -> Array:
        cfg, x = self.cfg, self.tok_emb[ids]
        if "embedding times sqrt(C)" in cfg.faults:
            x = x * cfg.emb_dim**0.5
        if "no positions" not in cfg.faults:
            x = x + self.positions(ids.shape[1])
        x = cfg.show("x emb", cfg.dropout(x))
        for n, block in enumerate(self.blocks):
            x = block(x, n)
        if "no final norm" not in cfg.faults:
            x = self.final_norm(x)
        return cfg.show("logits", self.out_head(cfg.show("x final", x)))


def load_weights(gpt: GPT, p: dict[str, Array]) -> None:
    cfg, faults = gpt.cfg, gpt.cfg.faults

    def thirds(c_attn: Array) -> list[Array]:
        """The columns of c_attn for query, key and value, each with all heads' columns side by side."""
        if "thirds inside each head" in faults:
            inside = c_attn.reshape(*c_attn.shape[:-1], cfg.n_heads, 3, cfg.head_size)
            return [inside[..., n, :].reshape(*c_attn.shape[:-1], cfg.emb_dim) for n in range(3)]
        one, two, three = np.split(c_attn, 3, axis=-1)
        return [two, one, three] if "key, query, value" in faults else [one, two, three]

    def assign_norm(norm: LayerNorm, name: str) -> None:
        if "scale and shift not assigned" not in faults:
            norm.scale, norm.shift = p[f"{name}.weight"], p[f"{name}.bias"]

    def assign(linear: Linear, name: str, turned: bool = True) -> None:
        w = p[f"{name}.weight"]
        linear.weight, linear.bias = w.T if turned else w, p[f"{name}.bias"]

    gpt.tok_emb, gpt.pos_emb = p["wte.weight"], p["wpe.weight"]
    for n, block in enumerate(gpt.blocks):
        parts = zip(thirds(p[f"h.{n}.attn.c_attn.weight"]), thirds(p[f"h.{n}.attn.c_attn.bias"]), strict=True)
        for name, (w, b) in zip(("query", "key", "value"), parts, strict=True):
            rows = w if "q_w, k_w, v_w not turned" in faults else w.T
            for h, head in enumerate(block.att.heads):
                own, of_head = getattr(head, name), slice(h * cfg.head_size, (h + 1) * cfg.head_size)
                own.weight, own.bias = rows[of_head], None if "heads without bias" in faults else b[of_head]
        assign(block.att.proj, f"h.{n}.attn.c_proj", turned="proj not turned" not in faults)
        assign(block.ff.fc1, f"h.{n}.mlp.c_fc")
        assign(block.ff.fc2, f"h.{n}.mlp.c_proj")
        assign_norm(block.norm1, f"h.{n}.ln_1")
        assign_norm(block.norm2, f"h.{n}.ln_2")
    assign_norm(gpt.final_norm, "ln_f")
    gpt.out_head.weight, bound = gpt.tok_emb, cfg.emb_dim**-0.5  # torch's of a new Linear
    if "out_head at random" in faults:
        gpt.out_head.weight = cfg.rng.uniform(-bound, bound, gpt.tok_emb.shape).astype(gpt.tok_emb.dtype)
    if "out_head with a bias" in faults:
        gpt.out_head.bias = cfg.rng.uniform(-bound, bound, len(gpt.tok_emb)).astype(gpt.tok_emb.dtype)


def run(folder: Path, ids: Array, layers: int, heads: int, faults: set[str], dtype: str) -> dict[str, Array]:
    """Every value of the rows ``ids`` (B, T), by the program's own names."""
    shown: dict[str, Array] = {}
    weights = {name: tensor.astype(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    width = weights["wte.weight"].shape[1]
    rng = np.random.default_rng(123)
    gpt = GPT(Config(width, heads, layers, width // heads, lambda name, x: shown.setdefault(name, np.array(x)), faults, rng))
    load_weights(gpt, weights)
    gpt(ids)
    return shown
