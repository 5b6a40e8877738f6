"""Flash attention written out: tiles of keys, running maxima and sums. With a value head, for reinforcement learning."""

import torch
from torch import nn

from support.ports.parts import GPT, Block, fill

__all__ = ["build", "fill"]


class Layer(Block):
    def mix(self, q, k, v, tile=4):
        """(B, H, T, K) each; never holds more than a tile of scores."""
        t = q.shape[-2]
        row = torch.arange(t, device=q.device)[:, None]
        top = torch.full_like(q[..., :1], -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(v)
        for start in range(0, t, tile):
            stop = min(start + tile, t)
            scores = q @ k[..., start:stop, :].transpose(-1, -2) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(torch.arange(start, stop, device=q.device) > row, -torch.inf)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            safe = new_top.masked_fill(new_top.isinf(), 0)
            weights, shrink = (scores - safe).exp(), (top - safe).exp()
            total = total * shrink + weights.sum(-1, keepdim=True)
            out = out * shrink + weights @ v[..., start:stop, :]
            top = new_top
        return out / total


class ActorCritic(GPT):
    BLOCK, NAMES = Layer, "words embedding places position blocks layers last norm"

    def __init__(self, config):
        super().__init__(config)
        d = config.n_embd
        self.value_head = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, 1))

    def forward(self, ids):
        x = self.run(self.embed(ids))
        return self.value_head(x).squeeze(-1), self.logits(x)


build = ActorCritic
