"""GPT-2, zu Fuß nachgebaut."""

import math

import torch
from torch import nn


class Schichtnorm(nn.Module):
    def __init__(self, breite):
        super().__init__()
        self.versatz = nn.Parameter(torch.zeros(breite))
        self.skala = nn.Parameter(torch.ones(breite))

    def forward(self, x):
        mittel = x.mean(-1, keepdim=True)
        streuung = ((x - mittel) ** 2).mean(-1, keepdim=True)
        return self.skala * (x - mittel) / torch.sqrt(streuung + 1e-5) + self.versatz


class Aufmerksamkeit(nn.Module):
    def __init__(self, breite, koepfe):
        super().__init__()
        self.koepfe = koepfe
        self.abfrage = nn.Linear(breite, breite)
        self.schluessel = nn.Linear(breite, breite)
        self.wert = nn.Linear(breite, breite)
        self.ausgang = nn.Linear(breite, breite)

    def forward(self, x):
        stapel, laenge, breite = x.shape

        def teile(y):
            return y.reshape(stapel, laenge, self.koepfe, -1).transpose(1, 2)

        q, k, v = teile(self.abfrage(x)), teile(self.schluessel(x)), teile(self.wert(x))
        punkte = q @ k.mT / math.sqrt(breite // self.koepfe)
        zukunft = torch.ones(laenge, laenge, dtype=torch.bool, device=x.device).triu(1)
        gewichte = punkte.masked_fill(zukunft, -torch.inf).softmax(-1)
        return self.ausgang((gewichte @ v).transpose(1, 2).reshape(stapel, laenge, breite))


class Vorwaerts(nn.Module):
    def __init__(self, breite, innen):
        super().__init__()
        self.hinein = nn.Linear(breite, innen)
        self.hinaus = nn.Linear(innen, breite)

    def forward(self, x):
        y = self.hinein(x)
        return self.hinaus(y / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3))))


class Schicht(nn.Module):
    def __init__(self, breite, koepfe, innen):
        super().__init__()
        self.norm_davor = Schichtnorm(breite)
        self.aufmerksamkeit = Aufmerksamkeit(breite, koepfe)
        self.norm_danach = Schichtnorm(breite)
        self.vorwaerts = Vorwaerts(breite, innen)

    def forward(self, x):
        x = x + self.aufmerksamkeit(self.norm_davor(x))
        return x + self.vorwaerts(self.norm_danach(x))


class Rumpf(nn.Module):
    def __init__(self, woerter, stellen, breite, schichten, koepfe, innen):
        super().__init__()
        self.wort_einbettung = nn.Embedding(woerter, breite)
        self.stellen_einbettung = nn.Embedding(stellen, breite)
        self.anzahl = schichten
        for nummer in range(schichten):
            setattr(self, f"schicht_{nummer}", Schicht(breite, koepfe, innen))
        self.schlussnorm = Schichtnorm(breite)

    def forward(self, x):
        x = self.wort_einbettung(x) + self.stellen_einbettung.weight[: x.shape[1]]
        for nummer in range(self.anzahl):
            x = getattr(self, f"schicht_{nummer}")(x)
        return self.schlussnorm(x)


class Sprachmodell(nn.Module):
    def __init__(self, woerter, stellen, breite, schichten, koepfe, innen):
        super().__init__()
        self.rumpf = Rumpf(woerter, stellen, breite, schichten, koepfe, innen)
        self.kopf = nn.Linear(breite, woerter, bias=False)

    def forward(self, x):
        return self.kopf(self.rumpf(x))


def build(config):
    return Sprachmodell(config.vocab_size, config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


@torch.no_grad()
def fill(module, state):
    def linear(ziel, weight, bias):
        ziel.weight.copy_(weight.T)
        ziel.bias.copy_(bias)

    def norm(ziel, name):
        ziel.skala.copy_(state[name + ".weight"])
        ziel.versatz.copy_(state[name + ".bias"])

    rumpf = module.rumpf
    rumpf.wort_einbettung.weight.copy_(state["wte.weight"])
    module.kopf.weight.copy_(state["wte.weight"])
    rumpf.stellen_einbettung.weight.copy_(state["wpe.weight"])
    norm(rumpf.schlussnorm, "ln_f")
    for n in range(rumpf.anzahl):
        schicht = getattr(rumpf, f"schicht_{n}")
        norm(schicht.norm_davor, f"h.{n}.ln_1")
        norm(schicht.norm_danach, f"h.{n}.ln_2")
        auf = schicht.aufmerksamkeit
        weights, biases = state[f"h.{n}.attn.c_attn.weight"].chunk(3, 1), state[f"h.{n}.attn.c_attn.bias"].chunk(3)
        for ziel, weight, bias in zip((auf.abfrage, auf.schluessel, auf.wert), weights, biases, strict=True):
            linear(ziel, weight, bias)
        linear(auf.ausgang, state[f"h.{n}.attn.c_proj.weight"], state[f"h.{n}.attn.c_proj.bias"])
        linear(schicht.vorwaerts.hinein, state[f"h.{n}.mlp.c_fc.weight"], state[f"h.{n}.mlp.c_fc.bias"])
        linear(schicht.vorwaerts.hinaus, state[f"h.{n}.mlp.c_proj.weight"], state[f"h.{n}.mlp.c_proj.bias"])
