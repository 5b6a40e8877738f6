"""Measure how far right programs round beyond our own model's rounding: what SLACK in gpt2/port/dump/tolerance.py rests on.

    python tools/rounding_table.py                      # shakespeare-mini, three rows of ids
    python tools/rounding_table.py --model random:gpt2 --rows 1

A right GPT-2 in NumPy, float32, whose sums run in several orders (BLAS, einsum, a plain loop, a loop from the end, two
halves), and one that computes in float16. For each place the largest error over the error of our own model at that place, in
float32; 8 is what SLACK allows. Each line on stdout is a program, with the verdict on the dump of the first row.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
import torch

import gpt2
from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import part_of, trace
from gpt2.port.dump.tolerance import SLACK, measured

Product = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (..., N, I) and (..., I, O)


def plain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One product after the other, as three nested loops add them."""
    out = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    for i in range(a.shape[-1]):
        out += a[..., :, i, None] * b[..., i, None, :]
    return out


PRODUCTS: dict[str, Product] = {
    "BLAS": np.matmul,
    "einsum": lambda a, b: np.einsum("...ni,...io->...no", a, b),
    "plain loop": plain,
    "loop from the end": lambda a, b: plain(a[..., ::-1], b[..., ::-1, :]),
    "halves": lambda a, b: plain(a[..., ::2], b[..., ::2, :]) + plain(a[..., 1::2], b[..., 1::2, :]),
}


def right(model: gpt2.GPT2, ids: np.ndarray, product: Product, dtype: type = np.float32) -> dict[str, np.ndarray]:
    """A right program's values by traced point, (B, T, ...), of one row after the other."""
    w = {name: tensor.detach().numpy().astype(dtype) for name, tensor in model.state_dict().items()}
    config, out = model.config, {}
    heads, (rows, tokens) = config.n_head, ids.shape

    def sum_of(x: np.ndarray) -> np.ndarray:
        return product(x[..., None, :], np.ones((x.shape[-1], 1), dtype))[..., 0]

    def keep(name: str, value: np.ndarray) -> np.ndarray:
        out[name] = value.astype(dtype)
        return out[name]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        width = dtype(x.shape[-1])
        middle = x - sum_of(x) / width
        scale = np.sqrt(sum_of(middle * middle) / width + dtype(config.layer_norm_epsilon))
        return keep(name, middle / scale * w[f"{name}.weight"] + w[f"{name}.bias"])

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return product(x, w[f"{name}.weight"]) + w[f"{name}.bias"]

    x = keep("embed", w["wte.weight"][ids] + w["wpe.weight"][:tokens])
    future = np.triu(np.ones((tokens, tokens), bool), 1)
    for n in range(config.n_layer):
        whole = linear(norm(x, f"h.{n}.ln_1"), f"h.{n}.attn.c_attn")
        parts = [keep(f"h.{n}.attn.{name}", part) for name, part in zip("qkv", np.split(whole, 3, -1), strict=True)]
        q, k, v = (part.reshape(rows, tokens, heads, -1).swapaxes(1, 2) for part in parts)
        scores = product(q, np.ascontiguousarray(k.swapaxes(2, 3))) / dtype(np.sqrt(q.shape[-1]))
        keep(f"h.{n}.attn.scores", np.where(future, dtype(0), scores))
        masked = np.where(future, dtype(-np.inf), scores)
        shifted = np.exp(masked - masked.max(-1, keepdims=True))
        weights = keep(f"h.{n}.attn.weights", shifted / sum_of(shifted))
        mixed = product(weights, v).swapaxes(1, 2).reshape(x.shape)
        x = keep(f"h.{n}.mid", x + keep(f"h.{n}.attn.c_proj", linear(keep(f"h.{n}.attn.heads", mixed), f"h.{n}.attn.c_proj")))
        up = keep(f"h.{n}.mlp.c_fc", linear(norm(x, f"h.{n}.ln_2"), f"h.{n}.mlp.c_fc"))
        root, half = dtype(np.sqrt(2 / np.pi)), dtype(0.5)
        bent = keep(f"h.{n}.mlp.act", half * up * (dtype(1) + np.tanh(root * (up + dtype(0.044715) * up * up * up))))
        x = keep(f"h.{n}", x + keep(f"h.{n}.mlp.c_proj", linear(bent, f"h.{n}.mlp.c_proj")))
    keep("logits", product(norm(x, "ln_f"), np.ascontiguousarray(w["wte.weight"].T)))
    return out


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="shakespeare-mini")
    parser.add_argument("--rows", type=int, default=3, help="rows of ids, each measured alone")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = gpt2.load(options.model).double().eval()
    draw = torch.Generator().manual_seed(0)
    ratios: dict[str, dict[str, list[float]]] = {name: {} for name in [*PRODUCTS, "float16"]}
    verdicts: dict[str, str] = {}
    for row in range(options.rows):
        ids = torch.randint(model.config.vocab_size, (1, options.tokens), generator=draw)
        exact = trace(model, ids)
        allowed = measured(model, ids, exact, torch.float32).points
        for name in ratios:
            half = name == "float16"
            values = right(model, ids.numpy(), np.matmul if half else PRODUCTS[name], np.float16 if half else np.float32)
            for point, value in values.items():
                error = worst_relative_error(torch.from_numpy(value).double(), exact[point])
                ratios[name].setdefault(part_of(point), []).append(error / (allowed[point] / SLACK))
            if row == 0:
                verdicts[name] = gpt2.diagnose({**values, "ids": ids.numpy()}, model).verdict
    for name, places in ratios.items():
        every = sorted(ratio for some in places.values() for ratio in some)
        worst = max(places, key=lambda part: max(places[part]))
        print(
            f"{name:20} median {every[len(every) // 2]:8.2f}   99 % {every[int(0.99 * len(every))]:8.2f}   "
            f"worst {every[-1]:8.2f} at {worst:14} {verdicts[name]}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
