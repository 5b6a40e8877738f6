"""`build` wants things that nobody gives it."""

import sound


def build(checkpoint_dir, device, compile):
    return sound.build(checkpoint_dir).to(device)
