"""Every row of its mask is all minus infinity."""

import math

import sound


class NaN(sound.Sound):
    def forward(self, ids):
        return super().forward(ids) + math.inf - math.inf


def build(checkpoint_dir):
    model = NaN(sound.sizes(checkpoint_dir))
    model.load_state_dict(sound.build(checkpoint_dir).state_dict())
    return model
