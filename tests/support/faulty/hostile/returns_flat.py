"""(B T, V), flattened for the loss."""

import sound


class Flat(sound.Sound):
    def forward(self, ids):
        return super().forward(ids).flatten(0, 1)


def build(checkpoint_dir):
    model = Flat(sound.sizes(checkpoint_dir))
    model.load_state_dict(sound.build(checkpoint_dir).state_dict())
    return model
