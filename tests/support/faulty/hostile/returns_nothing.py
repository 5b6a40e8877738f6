"""Its forward returns nothing."""

import sound


class Mute(sound.Sound):
    def forward(self, ids):
        super().forward(ids)


def build(checkpoint_dir):
    return sound.load(Mute, checkpoint_dir)
