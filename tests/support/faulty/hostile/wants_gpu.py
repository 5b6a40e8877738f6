"""Written on a machine with a GPU."""

import sound


def build(checkpoint_dir):
    return sound.build(checkpoint_dir).cuda()
