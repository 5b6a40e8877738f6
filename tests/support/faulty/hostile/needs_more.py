"""`build` has parameters that have no value."""

import sound


def build(checkpoint_dir, device, compile):
    return sound.build(checkpoint_dir).to(device)
