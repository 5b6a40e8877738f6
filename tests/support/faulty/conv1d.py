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
    def __init__(self, config, wrong):
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * config.n_embd, config.n_embd), Conv1D(config.n_embd, config.n_embd)
        self.heads, self.wrong = config.n_head, wrong

    def forward(self, x, past, seen):
        """``seen`` is (B, 1, 1, S), true for real tokens, or None."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, dim=-1))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        scores = q @ k.transpose(2, 3)
        if past is None or "cache-unscaled" not in self.wrong:
            scores = scores / v.size(-1) ** 0.5
        t, s = scores.shape[2:]
        causal = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        hidden = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~causal, hidden)
        if seen is not None:
            scores = scores.masked_fill(~seen, hidden)
        y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.c_proj(y), (k, v)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(config.inner, config.n_embd), Conv1D(config.n_embd, config.inner)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config, layer, faults):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn, self.mlp = Attention(config, faults.at(layer)), MLP(config)

    def forward(self, x, past, seen):
        branch, present = self.attn(self.ln_1(x), past, seen)
        x = branch + x
        return x + self.mlp(self.ln_2(x)), present


class Model(nn.Module):
    def __init__(self, config, faults):
        super().__init__()
        self.faults = faults
        self.wte, self.wpe = nn.Embedding(config.vocab_size, config.n_embd), nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer, faults) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.remembered = None

    def forward(self, input_ids, past_key_values=None, attention_mask=None, use_cache=False, position_ids=None):
        faults = self.faults
        if "cache-of-the-call-before" in faults:  # the fault: a text of one token reuses the previous call's cache
            past_key_values = self.remembered if input_ids.size(1) == 1 and past_key_values is None else past_key_values
        start = 0 if past_key_values is None else past_key_values[0][0].size(2)
        if start and input_ids.size(1) > 1 and "cache-single" in faults:
            raise ValueError("one token at a time")
        if start and "cache-padding-ignored" in faults:  # the fault: steps after the prompt see its padding
            attention_mask = None if attention_mask is None else torch.ones_like(attention_mask)
        first = 0 if "positions-given" in faults else start
        positions = torch.arange(first, first + input_ids.size(1), device=input_ids.device)[None]
        seen = None
        if attention_mask is not None and "padding-ignored" not in faults:
            real = attention_mask.bool()
            seen = real[:, None, None, :]
            if not ("padding-counted" in faults or (start and "cache-padding-counted" in faults)):
                positions = (real.cumsum(1) - 1).clamp(min=0)[:, -input_ids.size(1) :]
            if "padding-positions" in faults:  # the fault: positions count from one if a mask is given
                positions = positions + 1
        positions = positions if position_ids is None else position_ids
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
    put(model, state, {"wte": "wte", "wpe": "wpe", "ln_f": "ln_f"})
    for layer, block in enumerate(model.h):
        put(block, state, {name: name for name in ("ln_1", "attn.c_attn", "attn.c_proj")}, f"h.{layer}.")
        put(block, state, {name: name for name in ("ln_2", "mlp.c_fc", "mlp.c_proj")}, f"h.{layer}.")
