"""In the style of the Hub's models: Conv1D, the checkpoint's names, a cache of keys and values, a mask, an object out."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.faulty.loading import put


@dataclass
class Output:
    logits: Tensor
    past_key_values: list[tuple[Tensor, Tensor]] | None = None


class Conv1D(nn.Module):
    def __init__(self, n_out, n_in):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(n_in, n_out) * 0.02), nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Attention(nn.Module):
    def __init__(self, config, layer, wrong):
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * config.n_embd, config.n_embd), Conv1D(config.n_embd, config.n_embd)
        self.heads, self.layer, self.wrong = config.n_head, layer, wrong

    def forward(self, x, past, seen):
        """``seen`` is (B, 1, 1, S), true for real tokens, or None."""
        wrong = self.wrong
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        if "value-from-key" in wrong:
            v = k
        if past is not None and "cache-forgets" not in wrong:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        scores = q @ k.transpose(2, 3)
        plain = "scale-missing" in wrong or ("cache-unscaled" in wrong and past is not None)
        if not plain:
            scores = scores / (x.size(-1) if "scale-by-width" in wrong else v.size(-1)) ** 0.5
        if "scale-inverse-layer" in wrong:
            scores = scores / (self.layer + 1)
        t, s = scores.shape[2:]
        diagonal = (0 if "cache-mask" in wrong else s - t) + ("mask-off-by-one" in wrong)
        causal = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(diagonal)
        hidden = torch.finfo(scores.dtype).min
        scores = scores * causal if "mask-multiplied" in wrong else scores.masked_fill(~causal, hidden)
        if seen is not None:
            if "padding-queries" in wrong:  # rows of padding masked instead of columns
                seen = seen.transpose(2, 3)[:, :, -t:]
            scores = scores.masked_fill(~seen, hidden)
        weights = scores.softmax(2 if "softmax-queries" in wrong else -1)
        y = (weights @ v).transpose(1, 2).flatten(2)
        return self.c_proj(y), (k, v)


class MLP(nn.Module):
    def __init__(self, config, wrong):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(config.inner, config.n_embd), Conv1D(config.n_embd, config.inner)
        known = {"gelu-erf": F.gelu, "gelu-relu": F.relu}
        self.act = next((known[word] for word in known if word in wrong), lambda x: F.gelu(x, approximate="tanh"))
        self.wrong = wrong

    def forward(self, x):
        x = self.act(self.c_fc(x))
        return self.c_proj(F.dropout(x, 0.1) if "ffn-dropout" in self.wrong else x)


class Block(nn.Module):
    def __init__(self, config, layer, faults):
        super().__init__()

        def norm(name):
            return nn.LayerNorm(config.n_embd, eps=1e-6 if "eps-1e-6" in faults.at(f"{layer}.{name}") else 1e-5)

        self.wrong = faults.at(layer)
        self.ln_1, self.ln_2 = norm("ln_1"), norm("ln_2")
        self.attn, self.mlp = Attention(config, layer, self.wrong), MLP(config, self.wrong)

    def forward(self, x, past, seen):
        normed = self.ln_1(x)
        branch, present = self.attn(normed, past, seen)
        x = branch + (normed if "residual-from-normed" in self.wrong else x)
        if "dropout-active" in self.wrong:
            x = F.dropout(x, p=0.1, training=True)
        if "residual-missing-mlp" in self.wrong:
            return self.mlp(self.ln_2(x)), present
        return x + self.mlp(self.ln_2(x)), present


class Model(nn.Module):
    def __init__(self, config, faults):
        super().__init__()
        self.faults = faults
        self.wte, self.wpe = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer, faults) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if "untied-head" not in faults:
            self.lm_head.weight = self.wte.weight
        self.remembered = None

    def forward(self, input_ids, past_key_values=None, attention_mask=None, use_cache=False):
        faults = self.faults
        if "cache-of-the-call-before" in faults:  # the fault: a text of one token reuses the previous call's cache
            past_key_values = self.remembered if input_ids.size(1) == 1 and past_key_values is None else past_key_values
        start = 0 if past_key_values is None else past_key_values[0][0].size(2)
        if start and input_ids.size(1) > 1 and "cache-single" in faults:
            raise ValueError("one token at a time")
        if "cache-positions" in faults:
            start = 0
        if start and "cache-padding-ignored" in faults:  # the fault: steps after the prompt see its padding
            attention_mask = None if attention_mask is None else torch.ones_like(attention_mask)
        positions = torch.arange(start, start + input_ids.size(1), device=input_ids.device)[None]
        seen = None
        if attention_mask is not None and "padding-ignored" not in faults:
            real = attention_mask.bool()
            seen = (~real if "padding-inverted" in faults else real)[:, None, None, :]
            if not ("padding-counted" in faults or (start and "cache-padding-counted" in faults)):
                positions = (real.cumsum(1) - 1).clamp(min=0)[:, -input_ids.size(1) :]
            if "padding-positions" in faults:  # the fault: positions count from one if a mask is given
                positions = positions + 1
        x = self.wte(input_ids) + self.wpe(positions.clamp(max=self.wpe.num_embeddings - 1))
        presents = []
        for layer, block in enumerate(self.h):
            x, present = block(x, None if past_key_values is None else past_key_values[layer], seen)
            presents.append(present)
        self.remembered = presents
        x = self.ln_f(x)
        return Output(self.lm_head(x), presents if use_cache else None)


def build(config, faults):
    return Model(config, faults)


def fill(model, state):
    put(model, state, {"wte": "wte", "wpe": "wpe", "ln_f": "ln_f", "lm_head": "head"})
    for layer, block in enumerate(model.h):
        put(block, state, {name: name for name in ("ln_1", "attn.c_attn", "attn.c_proj")}, f"h.{layer}.")
        put(block, state, {name: name for name in ("ln_2", "mlp.c_fc", "mlp.c_proj")}, f"h.{layer}.")
