"""Returns (B, T, D): the head is missing."""

import sound


class Headless(sound.Sound):
    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


def build(checkpoint_dir):
    return sound.load(Headless, checkpoint_dir)
