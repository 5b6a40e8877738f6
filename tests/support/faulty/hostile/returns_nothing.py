"""A forward without a return."""

import sound


class Mute(sound.Sound):
    def forward(self, ids):
        super().forward(ids)


def build(checkpoint_dir):
    model = Mute(sound.sizes(checkpoint_dir))
    model.load_state_dict(sound.build(checkpoint_dir).state_dict())
    return model
