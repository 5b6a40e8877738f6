"""GPT-2 code golf: one dict of arrays, words and positions in one table (as the first GPT had them), norms as (2, d) pairs."""

import torch
from torch import nn

from support.ports import put


class G(nn.Module):
    def __init__(s, v, p, d, n, h, f):
        super().__init__()
        s.v, s.h, s.n = v, h, n
        z = {"e": (v + p, d), "z": (2, d)}
        for i in range(n):
            z |= {f"a{i}": (f, d), f"b{i}": (d,), f"c{i}": (d, f), f"g{i}": (f,), f"m{i}": (2, d)}
            z |= {f"o{i}": (d, d), f"p{i}": (d,), f"q{i}": (d, 3 * d), f"r{i}": (3 * d,), f"s{i}": (2, d)}
        s.w = nn.ParameterDict({k: nn.Parameter(torch.randn(x) / 50) for k, x in z.items()})

    def forward(s, t):
        w = s.w

        def norm(x, k):
            x = x - x.mean(-1, True)
            return x / (x.pow(2).mean(-1, True) + 1e-5).sqrt() * w[k][0] + w[k][1]

        m = torch.ones(t.shape[1], t.shape[1], device=t.device).tril().log()
        x = w["e"][t] + w["e"][s.v : s.v + t.shape[1]]
        for i in range(s.n):
            q, k, v = (norm(x, f"s{i}") @ w[f"q{i}"] + w[f"r{i}"]).unflatten(-1, (3, s.h, -1)).permute(2, 0, 3, 1, 4)
            y = (q @ k.mT / k.shape[-1] ** 0.5 + m).softmax(-1) @ v
            x = x + y.transpose(1, 2).flatten(2) @ w[f"o{i}"] + w[f"p{i}"]
            y = norm(x, f"m{i}") @ w[f"c{i}"] + w[f"g{i}"]
            x = x + nn.functional.gelu(y, approximate="tanh") @ w[f"a{i}"] + w[f"b{i}"]
        return norm(x, "z") @ w["e"][: s.v].T


def build(config):
    return G(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    module.w["e"].copy_(torch.cat((state["wte.weight"], state["wpe.weight"])))
    for i in range(module.n):
        for letters, name in (("qr", "attn.c_attn"), ("op", "attn.c_proj"), ("cg", "mlp.c_fc"), ("ab", "mlp.c_proj")):
            put(module.w, state, {f"{letters[0]}{i}": f"{name}.weight", f"{letters[1]}{i}": f"{name}.bias"}, f"h.{i}.")
        for letter, name in (("s", "ln_1"), ("m", "ln_2")):
            module.w[f"{letter}{i}"].copy_(torch.stack((state[f"h.{i}.{name}.weight"], state[f"h.{i}.{name}.bias"])))
    module.w["z"].copy_(torch.stack((state["ln_f.weight"], state["ln_f.bias"])))
