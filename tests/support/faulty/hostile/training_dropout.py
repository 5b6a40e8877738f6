"""Ignores `eval()`: it trains for ever."""

import sound
from torch.nn import functional as F


class Trains(sound.Sound):
    def train(self, mode=True):
        return super().train(True)

    def forward(self, ids):
        return F.dropout(super().forward(ids), 0.1, self.training)


def build(checkpoint_dir):
    model = Trains(sound.sizes(checkpoint_dir))
    model.load_state_dict(sound.build(checkpoint_dir).state_dict())
    return model
