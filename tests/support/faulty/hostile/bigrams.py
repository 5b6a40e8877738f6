"""Not a GPT-2: a table of bigrams."""

import json
from pathlib import Path

from torch import nn


class Bigrams(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.next = nn.Embedding(words, words)

    def forward(self, ids):
        return self.next(ids)


def build(checkpoint_dir):
    return Bigrams(json.loads((Path(checkpoint_dir) / "config.json").read_text())["vocab_size"])
