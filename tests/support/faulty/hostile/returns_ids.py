"""Returns the most likely tokens instead of logits."""

import sound


class Argmax(sound.Sound):
    def forward(self, ids):
        return super().forward(ids).argmax(-1)


def build(checkpoint_dir):
    return sound.load(Argmax, checkpoint_dir)
