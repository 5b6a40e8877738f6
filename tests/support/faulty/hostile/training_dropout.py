"""Ignores `eval()`: dropout is always active."""

import sound
from torch.nn import functional as F


class Trains(sound.Sound):
    def train(self, mode=True):
        return super().train(True)

    def forward(self, ids):
        return F.dropout(super().forward(ids), 0.1, self.training)


def build(checkpoint_dir):
    return sound.load(Trains, checkpoint_dir)
