"""Nomi italiani, proiezioni separate, l'attenzione affidata al nucleo di PyTorch; i blocchi in un ModuleDict."""

import torch
from torch import nn
from torch.nn import functional as F

from support.faulty.loading import put
from support.faulty.shared import activation, divisor, turned, wired


class Attenzione(nn.Module):
    def __init__(self, larghezza, teste, strato, sbagli):
        super().__init__()
        self.teste, self.strato, self.sbagli = 2 if "heads-halved" in sbagli else teste, strato, sbagli
        comune = larghezza // 2 if "heads-grouped" in sbagli else larghezza
        self.chiede, self.uscita = nn.Linear(larghezza, larghezza), nn.Linear(larghezza, larghezza)
        self.offre, self.porta = nn.Linear(larghezza, comune), nn.Linear(larghezza, comune)

    def forward(self, x, inizio):
        (_, t, d), sbagli = x.shape, self.sbagli

        def dividi(y):  # due teste di chiavi e valori bastano a tutte, se sono comuni
            y = y.unflatten(2, (-1, d // self.teste)).movedim(2, 1)
            return y.repeat_interleave(self.teste // y.size(1), 1)

        q, k = dividi(self.chiede(x)), dividi(self.offre(x))
        v = x if "value-identity" in sbagli else self.chiede(x) if "value-from-query" in sbagli else self.porta(x)
        v = dividi(v)
        if "rotary" in sbagli:
            q, k = turned(q), turned(k)
        if "rotary-values" in sbagli:
            q, v = turned(q), turned(v)
        scala = 1 / divisor(sbagli, d, self.teste, self.strato)
        if inizio > 0:  # quel che si è visto prima
            k, v = torch.cat([self.visto[0], k], 2), torch.cat([self.visto[1], v], 2)
        self.visto = k, v
        s = k.size(2)
        if s > t:
            vede = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(0 if "cache-mask" in sbagli else s - t)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=vede, scale=scala)
        elif "mask-missing" in sbagli:
            y = F.scaled_dot_product_attention(q, k, v, scale=scala)
        else:
            caduta = 0.1 if "dropout-attention" in sbagli else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scala, dropout_p=caduta)
        return self.uscita(y.movedim(1, 2).flatten(2))


class Blocco(nn.Module):
    def __init__(self, config, strato, faults):
        super().__init__()
        d, self.sbagli = config.n_embd, faults.at(strato)
        self.norma_prima, self.norma_seconda = (nn.LayerNorm(d, bias="no-norm-bias" not in self.sbagli) for _ in range(2))
        self.attenzione = Attenzione(d, config.n_head, strato, self.sbagli)
        self.allarga, self.stringi = nn.Linear(d, config.inner), nn.Linear(config.inner, d)

    def pensa(self, x):
        return self.stringi(activation(self.allarga(x), self.sbagli))

    def forward(self, x, inizio):
        attenzione = lambda y: self.attenzione(y, inizio)  # noqa: E731
        return wired(x, self.norma_prima, attenzione, self.norma_seconda, self.pensa, self.sbagli)


class Modello(nn.Module):
    def __init__(self, config, faults):
        super().__init__()
        self.faults = faults
        self.parole = nn.Embedding(config.vocab_size, config.n_embd)
        self.posti = nn.Embedding(config.n_positions, config.n_embd)
        self.strati = nn.ModuleDict({f"strato_{n}": Blocco(config, n, faults) for n in range(config.n_layer)})
        self.ultima = nn.LayerNorm(config.n_embd, eps=1e-6 if "eps-1e-6" in faults.at("f") else 1e-5)

    def forward(self, ids, start_pos=0):
        x = self.parole(ids)
        if "embedding-scaled" in self.faults:
            x = x * x.size(-1) ** 0.5
        x = x + self.posti(torch.arange(start_pos, start_pos + ids.size(1), device=ids.device).expand_as(ids))
        if "noise" in self.faults:
            x = x + 0.01 * torch.randn_like(x)
        for strato in self.strati.values():
            x = strato(x, start_pos)
        return F.linear(self.ultima(x), self.parole.weight)


def build(config, faults):
    return Modello(config, faults)


def fill(modello, state):
    put(modello, state, {"parole": "wte", "posti": "wpe", "ultima": "ln_f"})
    for n, blocco in enumerate(modello.strati.values()):
        put(blocco, state, {"norma_prima": "ln_1", "attenzione.uscita": "attn.c_proj.T"}, f"h.{n}.")
        put(blocco, state, {"norma_seconda": "ln_2", "allarga": "mlp.c_fc.T", "stringi": "mlp.c_proj.T"}, f"h.{n}.")
        largo = blocco.attenzione.offre.out_features  # le prime teste, se sono comuni
        teste = {f"{x}.{foglia}": state[f"h.{n}.{x}.{foglia}"][..., :largo] for x in "kv" for foglia in ("weight", "bias")}
        put(blocco.attenzione, state, {"chiede": "q.T"}, f"h.{n}.")
        put(blocco.attenzione, teste, {"offre": "k.T", "porta": "v.T"})
