"""`build` returns the class."""

import sound


def build(checkpoint_dir):
    return sound.Sound
