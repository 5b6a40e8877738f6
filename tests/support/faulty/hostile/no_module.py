"""`build` returns a state dict."""

import sound


def build(checkpoint_dir):
    return sound.build(checkpoint_dir).state_dict()
