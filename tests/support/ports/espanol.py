"""GPT-2 en español: todo en un nn.Sequential, con posiciones de sobra."""

import torch
from torch import nn

from support.ports import put


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


def fill(module, state):
    put(module, state, {"0.palabra": "wte", str(len(module) - 2): "ln_f", str(len(module) - 1): "head"})
    module[0].posicion.weight[: len(state["wpe.weight"])] = state["wpe.weight"]
    for i in range((len(module) - 4) // 2):
        atencion, red = module[2 + 2 * i].rama, module[3 + 2 * i].rama
        put(atencion[1], state, {"consulta": "q.T", "clave": "k.T", "valor": "v.T", "salida": "attn.c_proj.T"}, f"h.{i}.")
        put(atencion, state, {"0": "ln_1"}, f"h.{i}.")
        put(red, state, {"0": "ln_2", "1": "mlp.c_fc.T", "3": "mlp.c_proj.T"}, f"h.{i}.")
