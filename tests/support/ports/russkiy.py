"""GPT-2 dlya kursovoy raboty."""

import torch
from torch import nn


class Normalizatsiya(nn.Module):
    def __init__(self, shirina):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(shirina))
        self.beta = nn.Parameter(torch.zeros(shirina))

    def forward(self, x):
        srednee = x.mean(dim=-1, keepdim=True)
        dispersiya = x.var(dim=-1, keepdim=True, correction=0)
        return (x - srednee) * torch.rsqrt(dispersiya + 1e-5) * self.gamma + self.beta


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


@torch.no_grad()
def fill(module, state):
    module.golova.copy_(state["wte.weight"])
    module.slova.copy_(state["wte.weight"])
    module.mesta.copy_(state["wpe.weight"])
    module.norma.gamma.copy_(state["ln_f.weight"])
    module.norma.beta.copy_(state["ln_f.bias"])
    for i in range(len(module.bloki)):
        blok = module.bloki[f"blok{i}"]
        weights = list(state[f"h.{i}.attn.c_attn.weight"].T.chunk(3))
        biases = list(state[f"h.{i}.attn.c_attn.bias"].chunk(3))
        for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            weights.append(state[f"h.{i}.{name}.weight"].T)
            biases.append(state[f"h.{i}.{name}.bias"])
        v = blok.vnimanie
        sloi = (v.zaprosy, v.klyuchi, v.znacheniya, v.vykhod, blok.set[0], blok.set[2])
        for sloy, weight, bias in zip(sloi, weights, biases, strict=True):
            sloy.weight.copy_(weight)
            sloy.bias.copy_(bias)
        for norma, name in ((blok.norma_vnimaniya, "ln_1"), (blok.norma_seti, "ln_2")):
            norma.gamma.copy_(state[f"h.{i}.{name}.weight"])
            norma.beta.copy_(state[f"h.{i}.{name}.bias"])
