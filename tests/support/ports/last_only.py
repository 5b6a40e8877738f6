"""For inference: without targets, only the last position's logits are computed."""

from torch import nn

from support.ports.parts import GPT, fill

__all__ = ["build", "fill"]


class Decoder(GPT):
    HEAD = nn.Linear

    def forward(self, ids):
        return self.logits(self.run(self.embed(ids))[:, [-1]]), None


build = Decoder
