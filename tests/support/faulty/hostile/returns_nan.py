"""Returns NaN, as with a mask of minus infinity only."""

import math

import sound


class NaN(sound.Sound):
    def forward(self, ids):
        return super().forward(ids) + math.inf - math.inf


def build(checkpoint_dir):
    return sound.load(NaN, checkpoint_dir)
