"""GPT-2 as a class over plain lists of floats, in pure Python: no arrays, a loop for everything."""

from __future__ import annotations

import math
import struct

FAULTS = {
    "square for cube": ("gelu-variant",),
    "sigmoid": ("gelu-variant",),
    "relu squared": ("gelu-variant",),
    "exact": ("gelu-variant",),
    "sample variance": ("layernorm-unbiased-variance",),
    "uncentred": ("rmsnorm",),
    "eps 1e-4": ("layernorm-eps",),
    "eps beside the root": ("layernorm-eps",),
    "gain left out": ("layernorm-without-affine", "not-loaded"),
    "norms exchanged": ("norms-swapped", "wrong-tensor"),
    "no norm before attention": ("norm-missing",),
    "unscaled": ("scale-missing",),
    "root of heads": ("scale-wrong",),
    "thrice": ("scale-wrong",),
    "hidden as zero": ("mask-multiplied",),
    "future seen": ("mask-missing",),
    "itself hidden": ("mask-strict",),
    "over heads": ("softmax-axis",),
    "queries mixed": ("value-projection-wrong", "qkv-order", "wrong-tensor"),
    "merged as it lies": ("head-layout",),
    "projection turned": ("transposed",),
    "k q v": ("qkv-order",),
    "attention without bias": ("missing-bias",),
    "projection without bias": ("missing-bias",),
    "next position": ("position-offset",),
    "embedding by root": ("embedding-scaled",),
    "stream from norm": ("residual-from-normed",),
    "side by side": ("parallel-block",),
    "half of attention": ("residual-scaled",),
    "last norm left out": ("final-norm-missing",),
    "second block skipped": ("layer-missing",),
    "first two exchanged": ("layer-order",),
    "bfloat16": ("reduced-precision",),
    "next token's row": ("wrong-tensor",),
    "logits by three": ("logits-scaled",),
    "bias behind": ("extra-bias",),
    "other head": ("untied-head", "not-loaded"),
}
# What a dump may hold of each block if it holds one tensor: by the value's name.
ONE_A_BLOCK = ("result", "between", "attention", "feed", "second norm", "active", "chances")

Rows = list[list[float]]


def by_matrix(rows: Rows, matrix: Rows, bias: list[float]) -> Rows:
    columns = list(zip(*matrix, strict=True))
    return [[sum(map(float.__mul__, row, column)) + b for column, b in zip(columns, bias, strict=True)] for row in rows]


def plus(one: Rows, other: Rows, by: float = 1.0) -> Rows:
    return [[a + by * b for a, b in zip(x, y, strict=True)] for x, y in zip(one, other, strict=True)]


def shortened(value: object) -> object:
    """bfloat16's digits, of a number or of lists of them."""
    if isinstance(value, list):
        return [shortened(one) for one in value]
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0]


class Lists:
    """A program with its faults; ``kept`` holds what it computed, by "<block> <name>"."""

    def __init__(self, weights: dict[str, list], n_head: int, faults: set[str]) -> None:
        self.w = {name: shortened(value) for name, value in weights.items()} if "bfloat16" in faults else weights
        self.heads, self.faults = n_head, faults
        self.width = len(self.w["ln_f.weight"])
        self.size = self.width // n_head
        self.blocks = list(range(sum(name.endswith("ln_1.bias") for name in self.w)))
        self.kept: dict[str, list] = {}

    def norm(self, rows: Rows, name: str) -> Rows:
        if "norms exchanged" in self.faults and name != "ln_f":
            name = name[:-1] + {"1": "2", "2": "1"}[name[-1]]
        gain, shift = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
        out = []
        for row in rows:
            mean = 0.0 if "uncentred" in self.faults else sum(row) / self.width
            spread = sum((a - mean) ** 2 for a in row) / (self.width - ("sample variance" in self.faults))
            eps = 1e-4 if "eps 1e-4" in self.faults else 1e-5
            root = math.sqrt(spread) + eps if "eps beside the root" in self.faults else math.sqrt(spread + eps)
            if "gain left out" in self.faults:
                out.append([(a - mean) / root for a in row])
            else:
                out.append([(a - mean) / root * g + s for a, g, s in zip(row, gain, shift, strict=True)])
        return out

    def active(self, a: float) -> float:
        if "sigmoid" in self.faults:
            return a / (1 + math.exp(-1.702 * a))
        if "relu squared" in self.faults:
            return max(a, 0.0) ** 2
        if "exact" in self.faults:
            return a * 0.5 * (1 + math.erf(a / math.sqrt(2)))
        power = 2 if "square for cube" in self.faults else 3
        return a * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**power)))

    def chances(self, scores: list[Rows]) -> list[Rows]:
        """Softmax of scores by head, query and key."""
        tokens = len(scores[0])
        seen = {(i, j) for i in range(tokens) for j in range(tokens) if j <= i or "future seen" in self.faults}
        if "itself hidden" in self.faults:
            seen -= {(i, i) for i in range(1, tokens)}
        low = 0.0 if "hidden as zero" in self.faults else -math.inf
        held = [[[a if (i, j) in seen else low for j, a in enumerate(row)] for i, row in enumerate(one)] for one in scores]
        if "over heads" in self.faults:
            most = [[max(one[i][j] for one in held) for j in range(tokens)] for i in range(tokens)]
            power = [
                [
                    [math.exp(a - m) if a > low else 0.0 for a, m in zip(r, ms, strict=True)]
                    for r, ms in zip(one, most, strict=True)
                ]
                for one in held
            ]
            total = [[sum(one[i][j] for one in power) or 1.0 for j in range(tokens)] for i in range(tokens)]
            return [[[a / t for a, t in zip(r, ts, strict=True)] for r, ts in zip(one, total, strict=True)] for one in power]
        out = []
        for one in held:
            power = [[math.exp(a - max(row)) for a in row] for row in one]
            out.append([[a / sum(row) for a in row] for row in power])
        return out

    def attention(self, rows: Rows, n: int) -> Rows:
        name = f"h.{n}.attn"
        bias = self.w[f"{name}.c_attn.bias"]
        whole = by_matrix(
            rows, self.w[f"{name}.c_attn.weight"], [0.0] * len(bias) if "attention without bias" in self.faults else bias
        )
        q, k, v = ([row[third * self.width : (third + 1) * self.width] for row in whole] for third in range(3))
        if "k q v" in self.faults:
            q, k = k, q
        if "queries mixed" in self.faults:
            v = q
        self.kept |= {f"{n} q": q, f"{n} k": k, f"{n} v": v}
        factor = 1 / math.sqrt(self.size)
        factor = 1.0 if "unscaled" in self.faults else 1 / math.sqrt(self.heads) if "root of heads" in self.faults else factor
        factor *= 3 if "thrice" in self.faults else 1
        parts = [slice(h * self.size, (h + 1) * self.size) for h in range(self.heads)]
        scores = [[[factor * sum(map(float.__mul__, a[part], b[part])) for b in k] for a in q] for part in parts]
        chances = self.kept[f"{n} chances"] = self.chances(scores)
        mixed = [
            [[sum(c * row[d] for c, row in zip(one, v, strict=True)) for d in range(part.start, part.stop)] for one in head]
            for head, part in zip(chances, parts, strict=True)
        ]  # by head, token and feature
        if "merged as it lies" in self.faults:
            flat = [a for head in mixed for row in head for a in row]
            merged = [flat[t * self.width : (t + 1) * self.width] for t in range(len(rows))]
        else:
            merged = [[a for head in mixed for a in head[t]] for t in range(len(rows))]
        self.kept[f"{n} merged"] = merged
        matrix, bias = self.w[f"{name}.c_proj.weight"], self.w[f"{name}.c_proj.bias"]
        if "projection turned" in self.faults:
            matrix = [list(column) for column in zip(*matrix, strict=True)]
        return by_matrix(merged, matrix, [0.0] * self.width if "projection without bias" in self.faults else bias)

    def feed(self, rows: Rows, n: int) -> Rows:
        inner = by_matrix(rows, self.w[f"h.{n}.mlp.c_fc.weight"], self.w[f"h.{n}.mlp.c_fc.bias"])
        active = [[self.active(a) for a in row] for row in inner]
        self.kept |= {f"{n} inner": inner, f"{n} active": active}
        return by_matrix(active, self.w[f"h.{n}.mlp.c_proj.weight"], self.w[f"h.{n}.mlp.c_proj.bias"])

    def block(self, x: Rows, n: int) -> Rows:
        first = x if "no norm before attention" in self.faults else self.norm(x, f"h.{n}.ln_1")
        attention = self.attention(first, n)
        stream = first if "stream from norm" in self.faults else x
        between = plus(stream, attention, 0.5 if "half of attention" in self.faults else 1.0)
        second = self.norm(x if "side by side" in self.faults else between, f"h.{n}.ln_2")
        feed = self.feed(second, n)
        result = plus(between, feed)
        self.kept |= {f"{n} first norm": first, f"{n} attention": attention, f"{n} between": between}
        self.kept |= {f"{n} second norm": second, f"{n} feed": feed, f"{n} result": result}
        return result

    def run(self, ids: list[int]) -> dict[str, list]:
        table, places = self.w["wte.weight"], self.w["wpe.weight"]
        if "next token's row" in self.faults:
            table = [*table[1:], table[0]]
        factor = math.sqrt(self.width) if "embedding by root" in self.faults else 1.0
        start = 1 if "next position" in self.faults else 0
        words = [[factor * a for a in table[token]] for token in ids]
        x = self.kept["start"] = plus(words, places[start : start + len(ids)])
        order = self.blocks[:1] + self.blocks[2:] if "second block skipped" in self.faults else self.blocks
        for n in (1, 0, *order[2:]) if "first two exchanged" in self.faults else order:
            x = self.block(x, n)
        last = self.kept["last"] = x if "last norm left out" in self.faults else self.norm(x, "ln_f")
        if "other head" in self.faults:
            table = [[math.sin(31 * r + 7 * c) for c in range(self.width)] for r in range(len(table))]
        columns = [list(column) for column in zip(*table, strict=True)]
        bias = [math.cos(r) if "bias behind" in self.faults else 0.0 for r in range(len(table))]
        logits = by_matrix(last, columns, bias)
        self.kept["logits"] = [[a / 3 for a in row] for row in logits] if "logits by three" in self.faults else logits
        return self.kept
