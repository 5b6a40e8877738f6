"""Returns (B T, V), flattened for the loss."""

import sound


class Flat(sound.Sound):
    def forward(self, ids):
        return super().forward(ids).flatten(0, 1)


def build(checkpoint_dir):
    return sound.load(Flat, checkpoint_dir)
