"""minimal gpt2: a list of arrays and a function"""

import torch
import torch.nn.functional as F
from torch import nn

from support.ports import put


def ln(x, g, b):
    return F.layer_norm(x, g.shape, g, b, 1e-5)


def f(x, w, n_head):
    e, p, g, b = w[:4]
    T = x.shape[1]
    h = e.T[x] + p.T[:T]
    for i in range(4, len(w), 12):
        b1, b2, b3, b4, g1, g2, n1, n2, w1, w2, w3, w4 = w[i : i + 12]
        q, k, v = (ln(h, g1, n1) @ w1 + b1).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (n_head, -1)).movedim(-2, 1) for y in (q, k, v))
        a = (q * q.shape[-1] ** -0.5) @ k.mT
        a = a + torch.full((T, T), -torch.inf, dtype=a.dtype, device=a.device).triu(1)
        h = h + (a.softmax(-1) @ v).movedim(1, -2).flatten(-2) @ w2 + b2
        h = h + F.gelu(ln(h, g2, n2) @ w3 + b3, approximate="tanh") @ w4 + b4
    return ln(h, g, b) @ e


class M(nn.Module):
    def __init__(self, V, P, D, L, H, I):  # noqa: E741
        super().__init__()
        layer = [(3 * D,), (D,), (I,), (D,), (D,), (D,), (D,), (D,), (D, 3 * D), (D, D), (D, I), (I, D)]
        shapes = [(D, V), (D, P), (D,), (D,)] + layer * L
        self.w = nn.ParameterList([torch.randn(s) * 0.02 for s in shapes])
        self.n_head = H

    def forward(self, x):
        return f(x, list(self.w), self.n_head)


def build(config):
    return M(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    names = ["attn.c_attn.bias", "attn.c_proj.bias", "mlp.c_fc.bias", "mlp.c_proj.bias"]
    names += ["ln_1.weight", "ln_2.weight", "ln_1.bias", "ln_2.bias"]
    names += ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    order = ["wte.weight.T", "wpe.weight.T", "ln_f.weight", "ln_f.bias"]
    order += [f"h.{i}.{name}" for i in range(len(module.w) // 12) for name in names]
    put(module.w, state, {str(i): name for i, name in enumerate(order)})
