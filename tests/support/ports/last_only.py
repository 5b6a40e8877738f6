"""For inference: without targets, only the last position's logits are computed. Blocks are called by name, first to last."""

from torch import nn
from torch.nn import functional as F

from support.ports.parts import GPT, Block, fill_block, put


class Layer(Block):
    ORDER = "norm_1 v q k out norm_2 up down"
    NAMES = "norm_1 pre_attention norm_2 pre_mlp out o"


class Decoder(GPT):
    NAMES = "words tokens places positions blocks layers last norm"

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleDict({f"layer_{i + 1:02}": Layer(config) for i in range(config.n_layer)})
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tokens.weight = self.head.weight

    def forward(self, ids, targets=None):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


build = Decoder


def fill(module, state):
    put(module, state, {"head": "wte", "positions": "wpe", "norm": "ln_f"})
    for i, layer in enumerate(module.layers.values()):
        fill_block(layer, state, i)
