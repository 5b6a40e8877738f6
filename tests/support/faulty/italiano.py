"""Nomi italiani, proiezioni separate, l'attenzione affidata al nucleo di PyTorch; i blocchi in un ModuleDict."""

import torch
from torch import nn
from torch.nn import functional as F

from support.faulty.loading import put
from support.faulty.shared import EPS, activation, divisor, ending, entering, order, wired


class Attenzione(nn.Module):
    def __init__(self, larghezza, teste, strato, sbagli):
        super().__init__()
        self.teste, self.strato, self.sbagli = teste, strato, sbagli
        self.chiede = nn.Linear(larghezza, larghezza)
        self.offre = nn.Linear(larghezza, larghezza)
        self.porta = nn.Linear(larghezza, larghezza)
        self.uscita = nn.Linear(larghezza, larghezza)

    def forward(self, x, inizio):
        b, t, d = x.shape
        sbagli = self.sbagli

        def dividi(y):
            if "heads-split-wrongly" in sbagli:
                return y.reshape(b, self.teste, t, -1)
            return y.unflatten(2, (self.teste, -1)).movedim(2, 1)

        q, k = dividi(self.chiede(x)), dividi(self.offre(x))
        v = x if "value-identity" in sbagli else self.chiede(x) if "value-from-query" in sbagli else self.porta(x)
        v = dividi(v)
        scala = 1 / divisor(sbagli, d, self.teste, self.strato)
        if inizio > 0 and "cache-forgets" not in sbagli:  # quel che si è visto prima
            k, v = torch.cat([self.visto[0], k], 2), torch.cat([self.visto[1], v], 2)
        self.visto = k, v
        s = k.size(2)
        if s > t:
            vede = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(0 if "cache-mask" in sbagli else s - t)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=vede, scale=scala)
        elif "mask-missing" in sbagli:
            y = F.scaled_dot_product_attention(q, k, v, scale=scala)
        elif "mask-off-by-one" in sbagli:
            vede = torch.ones(t, t, dtype=torch.bool, device=x.device).tril(1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=vede, scale=scala)
        elif "mask-strict" in sbagli:
            vieta = torch.zeros(t, t, device=x.device, dtype=x.dtype).masked_fill(torch.ones(t, t).triu().bool(), -1e9)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=vieta, scale=scala)
        else:
            caduta = 0.1 if "dropout-attention" in sbagli else 0.0
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scala, dropout_p=caduta)
        y = y.reshape(b, t, d) if "heads-merged-wrongly" in sbagli else y.movedim(1, 2).flatten(2)
        return y if "output-projection-missing" in sbagli else self.uscita(y)


class Blocco(nn.Module):
    def __init__(self, config, strato, faults):
        super().__init__()
        d, self.sbagli = config.n_embd, faults.at(strato)
        sbagli = self.sbagli

        def norma(nome):
            qui = faults.at(f"{strato}.{nome}")
            if "rmsnorm-no-bias" in qui:
                return nn.RMSNorm(d, eps=1e-5)
            eps = next((EPS[sbaglio] for sbaglio in EPS if sbaglio in qui), 1e-5)
            return nn.LayerNorm(d, eps=eps, bias="no-norm-bias" not in qui, elementwise_affine="no-affine" not in qui)

        self.norma_prima, self.norma_seconda = norma("ln_1"), norma("ln_2")
        self.attenzione = Attenzione(d, config.n_head, strato, sbagli)
        self.allarga = nn.Linear(d, config.inner, bias="no-fc-bias" not in sbagli)
        self.stringi = nn.Linear(config.inner, d)

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
        self.posti = nn.Embedding(config.n_positions + 1, config.n_embd)
        self.strati = nn.ModuleDict({f"strato_{n}": Blocco(config, n, faults) for n in range(config.n_layer)})
        self.ultima = nn.LayerNorm(config.n_embd, eps=1e-6 if "eps-1e-6" in faults.at("f") else 1e-5)

    def forward(self, ids, start_pos=0):
        x = self.parole(ids)
        if "embedding-scaled" in self.faults:
            x = x * x.size(-1) ** 0.5
        if "position-missing" not in self.faults:
            x = x + self.posti(self.indici(ids, start_pos) + ("position-offset" in self.faults))
        x, strati = entering(x, self.faults), list(self.strati.values())
        for numero in order(len(strati), self.faults):
            x = strati[numero](x, start_pos)
        if "final-norm-missing" not in self.faults:
            x = self.ultima(x)
        return ending(F.linear(x, self.parole.weight), self.faults)

    def indici(self, ids, inizio):
        inizio = 0 if "cache-positions" in self.faults else inizio
        return torch.arange(inizio, inizio + ids.size(1), device=ids.device).expand_as(ids)


def build(config, faults):
    return Modello(config, faults)


def fill(modello, state):
    modello.posti.weight[: len(state["wpe.weight"])] = state["wpe.weight"]
    put(modello, state, {"parole": "wte", "ultima": "ln_f"})
    for n, blocco in enumerate(modello.strati.values()):
        put(blocco, state, {"norma_prima": "ln_1", "attenzione.uscita": "attn.c_proj.T"}, f"h.{n}.")
        put(blocco, state, {"norma_seconda": "ln_2", "allarga": "mlp.c_fc.T", "stringi": "mlp.c_proj.T"}, f"h.{n}.")
        put(blocco.attenzione, state, {"chiede": "q.T", "offre": "k.T", "porta": "v.T"}, f"h.{n}.")
