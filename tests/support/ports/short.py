"""GPT-2 for small memories: half the context, everything else in place."""

from torch import nn

from support.ports.parts import GPT
from support.ports.parts import fill as fill_parts


class Model(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.places = nn.Embedding(config.n_positions // 2, config.n_embd)


build = Model


def fill(module, state):
    fill_parts(module, {**state, "wpe.weight": state["wpe.weight"][: module.places.num_embeddings]})
