"""GPT-2 en español: todo en un nn.Sequential, con posiciones de sobra."""

import torch
from torch import nn


class Incrustacion(nn.Module):
    def __init__(self, vocabulario, posiciones, ancho):
        super().__init__()
        self.posicion = nn.Embedding(posiciones, ancho)
        self.palabra = nn.Embedding(vocabulario, ancho)

    def forward(self, fichas):
        lugares = torch.arange(fichas.shape[1], device=fichas.device)
        return self.palabra(fichas) + self.posicion(lugares)


class Atencion(nn.Module):
    def __init__(self, ancho, cabezas):
        super().__init__()
        self.cabezas = cabezas
        self.salida = nn.Linear(ancho, ancho)
        self.valor = nn.Linear(ancho, ancho)
        self.clave = nn.Linear(ancho, ancho)
        self.consulta = nn.Linear(ancho, ancho)

    def forward(self, x):
        lote, largo, ancho = x.shape
        partir = (lote, largo, self.cabezas, ancho // self.cabezas)
        q = self.consulta(x).view(partir).transpose(1, 2)
        k_t = self.clave(x).view(partir).permute(0, 2, 3, 1)
        v = self.valor(x).view(partir).transpose(1, 2)
        puntos = torch.matmul(q, k_t) / (ancho // self.cabezas) ** 0.5
        puntos = puntos.masked_fill(~torch.tril(torch.ones_like(puntos, dtype=torch.bool)), float("-inf"))
        return self.salida(torch.matmul(torch.softmax(puntos, -1), v).transpose(1, 2).reshape(lote, largo, ancho))


class Residual(nn.Module):
    def __init__(self, *rama):
        super().__init__()
        self.rama = nn.Sequential(*rama)

    def forward(self, x):
        return x + self.rama(x)


def construir(vocabulario, posiciones, ancho, capas, cabezas, interior, olvido=0.1):
    partes = [Incrustacion(vocabulario, posiciones, ancho), nn.Dropout(olvido)]
    for _ in range(capas):
        partes.append(Residual(nn.LayerNorm(ancho), Atencion(ancho, cabezas), nn.Dropout(olvido)))
        partes.append(
            Residual(
                nn.LayerNorm(ancho),
                nn.Linear(ancho, interior),
                nn.GELU(approximate="tanh"),
                nn.Linear(interior, ancho),
                nn.Dropout(olvido),
            )
        )
    return nn.Sequential(*partes, nn.LayerNorm(ancho), nn.Linear(ancho, vocabulario, bias=False))


def build(config):
    return construir(config.vocab_size, 2 * config.n_positions, config.n_embd, config.n_layer, config.n_head, config.inner)


@torch.no_grad()
def fill(module, state):
    def copiar(capa, nombre):
        capa.weight.copy_(state[nombre + ".weight"].t())
        capa.bias.copy_(state[nombre + ".bias"])

    module[0].palabra.weight.copy_(state["wte.weight"])
    module[0].posicion.weight[: len(state["wpe.weight"])].copy_(state["wpe.weight"])
    for i in range((len(module) - 4) // 2):
        atencion, red = module[2 + 2 * i].rama, module[3 + 2 * i].rama
        copiar(atencion[0], f"h.{i}.ln_1")
        q, k, v = state[f"h.{i}.attn.c_attn.weight"].t().chunk(3)
        bq, bk, bv = state[f"h.{i}.attn.c_attn.bias"].chunk(3)
        atencion[1].consulta.load_state_dict({"weight": q, "bias": bq})
        atencion[1].clave.load_state_dict({"weight": k, "bias": bk})
        atencion[1].valor.load_state_dict({"weight": v, "bias": bv})
        copiar(atencion[1].salida, f"h.{i}.attn.c_proj")
        copiar(red[0], f"h.{i}.ln_2")
        copiar(red[1], f"h.{i}.mlp.c_fc")
        copiar(red[3], f"h.{i}.mlp.c_proj")
    copiar(module[-2], "ln_f")
    module[-1].weight.copy_(state["wte.weight"])
