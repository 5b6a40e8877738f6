"""Nomi italiani, proiezioni separate, l'attenzione affidata al nucleo di PyTorch; i blocchi in un ModuleDict."""

import torch
from torch import nn
from torch.nn import functional as F

from support.faulty.loading import put


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
        scala = d**-0.5 if "scale-by-width" in sbagli else 1.0 if "scale-missing" in sbagli else None
        scala = q.size(-1) ** -1.0 if "scale-twice" in sbagli else scala
        scala = q.size(-1) ** -0.5 / (self.strato + 1) if "scale-inverse-layer" in sbagli else scala
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
            eps = 1e-6 if "eps-1e-6" in qui else 1e-12 if "eps-1e-12" in qui else 1e-5
            return nn.LayerNorm(d, eps=eps, bias="no-norm-bias" not in qui, elementwise_affine="no-affine" not in qui)

        self.norma_prima, self.norma_seconda = norma("ln_1"), norma("ln_2")
        self.attenzione = Attenzione(d, config.n_head, strato, sbagli)
        self.allarga = nn.Linear(d, config.inner, bias="no-fc-bias" not in sbagli)
        self.stringi = nn.Linear(config.inner, d)

    def pensa(self, x):
        x = self.allarga(x)
        if "gelu-erf" in self.sbagli:
            x = F.gelu(x)
        elif "gelu-relu" in self.sbagli:
            x = F.relu(x)
        elif "gelu-silu" in self.sbagli:
            x = F.silu(x)
        elif "gelu-none" not in self.sbagli:
            x = F.gelu(x, approximate="tanh")
        return self.stringi(x)

    def forward(self, x, inizio):
        sbagli = self.sbagli
        if "post-norm" in sbagli:
            x = self.norma_prima(self.attenzione(x, inizio) + x)
            return self.norma_seconda(self.pensa(x) + x)
        if "parallel" in sbagli:
            return x + self.pensa(self.norma_seconda(x)) + self.attenzione(self.norma_prima(x), inizio)
        prima, seconda = self.norma_prima, self.norma_seconda
        if "norms-swapped" in sbagli:
            prima, seconda = seconda, prima
        y = self.attenzione(prima(x), inizio)
        x = y if "residual-missing-attn" in sbagli else y + x
        y = self.pensa(x if "ln_2-missing" in sbagli else seconda(x))
        return y if "residual-missing-mlp" in sbagli else y + x


class Modello(nn.Module):
    def __init__(self, config, faults):
        super().__init__()
        self.faults = faults
        self.parole = nn.Embedding(config.vocab_size, config.n_embd)
        self.posti = nn.Embedding(config.n_positions + 1, config.n_embd)
        self.strati = nn.ModuleDict({f"strato_{n}": Blocco(config, n, faults) for n in range(config.n_layer)})
        self.davanti = nn.LayerNorm(config.n_embd, elementwise_affine=False) if "extra-norm-embed" in faults else nn.Identity()
        self.ultima = nn.LayerNorm(config.n_embd, eps=1e-6 if "eps-1e-6" in faults.at("f") else 1e-5)

    def forward(self, ids, start_pos=0):
        x = self.parole(ids)
        if "embedding-scaled" in self.faults:
            x = x * x.size(-1) ** 0.5
        if "position-missing" not in self.faults:
            x = x + self.posti(self.indici(ids, start_pos) + ("position-offset" in self.faults))
        if "noise" in self.faults:
            x = x + torch.rand_like(x) * 0.01
        if "batch-centred" in self.faults:
            x = x - x.mean(dim=0, keepdim=True)
        x = self.davanti(x)
        for nome, strato in self.strati.items():
            if int(nome[7:]) in self.faults.layers("layer-missing", len(self.strati)):
                continue
            x = strato(x, start_pos)
            if int(nome[7:]) in self.faults.layers("layer-repeated", len(self.strati)):
                x = strato(x, start_pos)
        if "final-norm-missing" not in self.faults:
            x = self.ultima(x)
        y = F.linear(x, self.parole.weight)
        return F.log_softmax(y, dim=-1) if "logits-log-softmaxed" in self.faults else y

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
