"""Everything is declared in the reverse of the order in which it runs, and whole groups sit outside the blocks."""

from torch import nn

from support.ports.parts import GPT, Block, fill_block, put


class Layer(Block):
    ORDER = "down up norm_2 out v k q norm_1"
    NAMES = "down mlp_down up mlp_up out o"


class GPT2(GPT):
    NAMES = "words tok places pos last ln_f"

    def __init__(self, config):
        nn.Module.__init__(self)
        self.head = nn.Linear(config.n_embd, config.vocab_size)
        nn.init.zeros_(self.head.bias)
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.blocks = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.pos = nn.Embedding(config.n_positions, config.n_embd)
        self.tok = nn.Embedding(config.vocab_size, config.n_embd)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.ln_f(x))


build = GPT2


def fill(module, state):
    put(module, state, {"tok": "wte", "pos": "wpe", "ln_f": "ln_f"})
    for i, block in enumerate(reversed(module.blocks)):
        fill_block(block, state, i)
