"""`build` has parameters without a default."""

import sound


def build(checkpoint_dir, device, compile):
    return sound.build(checkpoint_dir).to(device)
