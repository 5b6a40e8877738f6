"""GPT-2 dlya kursovoy raboty."""

import torch
from torch import nn

from support.ports import put


class Normalizatsiya(nn.Module):
    def __init__(self, shirina):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(shirina))
        self.beta = nn.Parameter(torch.zeros(shirina))

    def forward(self, x):
        dispersiya, srednee = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        mnozhitel = torch.rsqrt(dispersiya + 1e-5) * self.gamma
        return x * mnozhitel + (self.beta - srednee * mnozhitel)


class Vnimanie(nn.Module):
    def __init__(self, shirina, golovy):
        super().__init__()
        self.golovy = golovy
        self.klyuchi = nn.Linear(shirina, shirina)
        self.zaprosy = nn.Linear(shirina, shirina)
        self.znacheniya = nn.Linear(shirina, shirina)
        self.vykhod = nn.Linear(shirina, shirina)

    def na_golovy(self, x):
        return torch.stack(x.chunk(self.golovy, dim=-1), dim=1)

    def forward(self, x):
        klyuchi = self.na_golovy(self.klyuchi(x))
        zaprosy = self.na_golovy(self.zaprosy(x))
        znacheniya = self.na_golovy(self.znacheniya(x))
        itog = nn.functional.scaled_dot_product_attention(zaprosy, klyuchi, znacheniya, is_causal=True)
        return self.vykhod(torch.cat(itog.unbind(dim=1), dim=-1))


class Blok(nn.Module):
    def __init__(self, shirina, golovy, vnutri):
        super().__init__()
        self.norma_vnimaniya = Normalizatsiya(shirina)
        self.norma_seti = Normalizatsiya(shirina)
        self.vnimanie = Vnimanie(shirina, golovy)
        self.set = nn.Sequential(nn.Linear(shirina, vnutri), nn.GELU("tanh"), nn.Linear(vnutri, shirina))

    def forward(self, x):
        x = x + self.vnimanie(self.norma_vnimaniya(x))
        return x + self.set(self.norma_seti(x))


class Model(nn.Module):
    def __init__(self, slovar, dlina, shirina, glubina, golovy, vnutri):
        super().__init__()
        self.golova = nn.Parameter(torch.randn(slovar, shirina) * 0.02)
        self.slova = nn.Parameter(torch.randn(slovar, shirina) * 0.02)
        self.mesta = nn.Parameter(torch.randn(dlina, shirina) * 0.02)
        self.bloki = nn.ModuleDict({f"blok{i}": Blok(shirina, golovy, vnutri) for i in range(glubina)})
        self.norma = Normalizatsiya(shirina)

    def forward(self, x):
        x = self.slova[x] + self.mesta[: x.shape[1]]
        for blok in self.bloki.values():
            x = blok(x)
        return torch.einsum("btd,vd->btv", self.norma(x), self.golova)


def build(config):
    return Model(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


def fill(module, state):
    put(module, state, {"golova": "wte.weight", "slova": "wte.weight", "mesta": "wpe.weight", "norma": "ln_f"})
    for i, blok in enumerate(module.bloki.values()):
        put(blok.vnimanie, state, {"zaprosy": "q.T", "klyuchi": "k.T", "znacheniya": "v.T"}, f"h.{i}.")
        put(blok, state, {"norma_vnimaniya": "ln_1", "vnimanie.vykhod": "attn.c_proj.T"}, f"h.{i}.")
        put(blok, state, {"norma_seti": "ln_2", "set.0": "mlp.c_fc.T", "set.2": "mlp.c_proj.T"}, f"h.{i}.")
