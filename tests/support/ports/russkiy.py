"""GPT-2 dlya kursovoy raboty."""

import torch
from torch import nn

from support.ports.parts import Block, fill_block, put


class Normalizatsiya(nn.Module):
    def __init__(self, shirina):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(shirina)), nn.Parameter(torch.zeros(shirina))

    def forward(self, x):
        dispersiya, srednee = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        mnozhitel = torch.rsqrt(dispersiya + 1e-5) * self.gamma
        return x * mnozhitel + (self.beta - srednee * mnozhitel)


class Blok(Block):
    NORM, ORDER = Normalizatsiya, "norm_1 norm_2 k q v out up down"
    NAMES = "norm_1 norma_vnimaniya norm_2 norma_seti k klyuchi q zaprosy v znacheniya out vykhod up vverkh down vniz"

    def split(self, x):
        return [torch.stack(part(x).chunk(self.n_head, -1), 1) for part in (self.zaprosy, self.klyuchi, self.znacheniya)]

    def attend(self, x):
        return self.vykhod(torch.cat(self.mix(*self.split(x)).unbind(1), -1))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.golova, self.slova = (nn.Parameter(torch.randn(config.vocab_size, config.n_embd) * 0.02) for _ in range(2))
        self.mesta = nn.Parameter(torch.randn(config.n_positions, config.n_embd) * 0.02)
        self.bloki = nn.ModuleDict({f"blok{i}": Blok(config) for i in range(config.n_layer)})
        self.norma = Normalizatsiya(config.n_embd)

    def forward(self, x):
        x = self.slova[x] + self.mesta[: x.shape[1]]
        for blok in self.bloki.values():
            x = blok(x)
        return torch.einsum("btd,vd->btv", self.norma(x), self.golova)


build = Model


def fill(module, state):
    put(module, state, {"golova": "wte.weight", "slova": "wte.weight", "mesta": "wpe.weight", "norma": "ln_f"})
    for i, blok in enumerate(module.bloki.values()):
        fill_block(blok, state, i)
