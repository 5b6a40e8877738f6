"""GPT-2 in NumPy with a prompt and then a token at a time; every mistake is in what its slots of keys and values hold."""

from __future__ import annotations

import numpy as np

from .bed import Bed

PROMPT = 4
FAULTS = {
    "reads the block before": "cache-inconsistent",
    "rows share": "batch-dependent",
    "first slot is empty": "cache-inconsistent",
    "step over the last of the prompt": "cache-inconsistent",
    "read before written": "cache-inconsistent",
    "values are a token late": "cache-inconsistent",
    "room for 14": "mask-multiplied",
    "bfloat16 values": "reduced-precision",
    "keys in 8 bits, a scale for each head": "reduced-precision",
    "keys alone turned in halves": "rotary-positions",
    "heads first, read heads last": "head-layout",
    "last of the prompt twice": "cache-inconsistent",
    "prompt of the other row": "batch-dependent",
}


def run(bed: Bed, fault: str | None, dtype: str = "float64", weights_too: bool = True) -> dict[str, np.ndarray]:
    """Return every value (B, T, ...) under a name that says nothing, but for the logits and ids."""
    w = {name: array.astype("float32" if dtype == "float16" else dtype) for name, array in bed.weights.items()}
    layers, heads = bed.shape.layers, bed.shape.heads
    batch, tokens = bed.ids.shape
    width = bed.shape.width
    size, room = width // heads, 14
    kept: dict[str, np.ndarray] = {}

    def keep(name: str, rows: slice, value: np.ndarray) -> np.ndarray:
        kept.setdefault(name, np.zeros((batch, tokens, *value.shape[2:])))[:, rows] = value
        return value

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        away = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt(np.square(away).mean(-1, keepdims=True) + 1e-5)
        return away / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]

    def stored(name: str, x: np.ndarray) -> np.ndarray:
        """What a slot holds of keys or values (B, n, H, K)."""
        if fault == "bfloat16 values" and name == "v":
            bits = x.astype(np.float32).view(np.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(x.dtype)
        if fault == "keys in 8 bits, a scale for each head" and name == "k":
            scale = np.abs(x).max(-1, keepdims=True) / 127
            return np.round(x / scale) * scale
        return x

    def turned(k: np.ndarray, first: int) -> np.ndarray:
        if fault != "keys alone turned in halves":
            return k
        half = size // 2
        angle = (first + np.arange(k.shape[1]))[:, None] / 10000 ** (np.arange(half) / half)
        one, other, c, s = k[..., :half], k[..., half:], np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([one * c - other * s, other * c + one * s], -1)

    held = {(name, n): np.zeros((batch, 2 * room, heads, size), w["wte.weight"].dtype) for name in "kv" for n in range(layers)}

    def attend(n: int, first: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        count, rows = q.shape[1], slice(first, first + q.shape[1])
        k, at = turned(k, first), first
        if fault == "first slot is empty":
            at += 1
        if fault == "step over the last of the prompt" and first:
            at -= 1
        if fault == "last of the prompt twice" and first:
            at += 1
            for name in "kv":
                held[name, n][:, PROMPT] = held[name, n][:, PROMPT - 1]
        end, past = at + count, 1 if at > first else -1 if at < first else 0
        keys, values = held["k", n], held["v", n]
        before = {name: held[name, n].copy() for name in "kv"}
        keys[:, at:end], values[:, at:end] = stored("k", k), stored("v", v)
        if fault == "values are a token late" and first:
            values[:, end] = values[:, at]
            values[:, at:end] = before["v"][:, at:end]
        read_k, read_v = (before["k"], before["v"]) if fault == "read before written" and first else (keys, values)
        if fault == "reads the block before" and n and first:
            read_k, read_v = held["k", n - 1].copy(), held["v", n - 1].copy()
            read_k[:, at:end], read_v[:, at:end] = keys[:, at:end], values[:, at:end]
        if fault == "rows share" and first:
            read_k, read_v = (x[-1:].repeat(batch, 0) for x in (read_k, read_v))
        if fault == "prompt of the other row" and first:
            read_k, read_v = read_k.copy(), read_v.copy()
            for x in (read_k, read_v):
                x[:, :PROMPT] = x[::-1, :PROMPT]
        if fault == "heads first, read heads last":
            read_k = read_k.swapaxes(1, 2).reshape(batch, 2 * room, heads, size)
        seen = first + np.arange(count)[:, None] >= np.arange(2 * room) - past
        scores = np.einsum("bthk,bshk->bhts", q, read_k) / np.sqrt(size)
        if fault == "room for 14":
            seen, scores = np.broadcast_to(np.arange(2 * room) < room, seen.shape), np.where(seen, scores, 0)
        scores = np.where(seen, scores, -np.inf)
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        chance = powers / powers.sum(-1, keepdims=True)
        if fault == "room for 14":
            chance = np.where(first + np.arange(count)[:, None] >= np.arange(2 * room), chance, 0)
        if weights_too:
            shown = np.zeros((batch, count, heads, tokens))
            shown[:] = chance[..., :tokens].swapaxes(1, 2)
            keep(f"{n} chance", rows, shown)
        return keep(f"{n} mixed", rows, np.einsum("bhts,bshk->bthk", chance, read_v)).reshape(batch, count, width)

    def forward(ids: np.ndarray, first: int) -> None:
        rows = slice(first, first + ids.shape[1])
        x = keep("x", rows, w["wte.weight"][ids] + w["wpe.weight"][first : first + ids.shape[1]])
        for n in range(layers):
            y = keep(f"{n} a", rows, norm(x, f"h.{n}.ln_1")) @ w[f"h.{n}.attn.c_attn.weight"] + w[f"h.{n}.attn.c_attn.bias"]
            q, k, v = (keep(f"{n} {name}", rows, part) for name, part in zip("qkv", np.split(y, 3, -1), strict=True))
            mixed = attend(n, first, *(part.reshape(*ids.shape, heads, size) for part in (q, k, v)))
            y = mixed @ w[f"h.{n}.attn.c_proj.weight"] + w[f"h.{n}.attn.c_proj.bias"]
            x = keep(f"{n} m", rows, x + keep(f"{n} p", rows, y))
            y = keep(f"{n} b", rows, norm(x, f"h.{n}.ln_2")) @ w[f"h.{n}.mlp.c_fc.weight"] + w[f"h.{n}.mlp.c_fc.bias"]
            y = keep(f"{n} f", rows, y)
            y = keep(f"{n} g", rows, 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3))))
            x = keep(f"{n} o", rows, x + (y @ w[f"h.{n}.mlp.c_proj.weight"] + w[f"h.{n}.mlp.c_proj.bias"]))
        keep("logits", rows, keep("n", rows, norm(x, "ln_f")) @ w["wte.weight"].T)

    forward(bed.ids[:, :PROMPT], 0)
    for t in range(PROMPT, tokens):
        forward(bed.ids[:, t : t + 1], t)
    out = {"ids": bed.ids, "logits": kept.pop("logits").astype(dtype)}
    return out | {f"a{number}": array.astype(dtype) for number, array in enumerate(kept.values())}
