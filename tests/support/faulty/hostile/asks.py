"""Waits for somebody to type."""

import sound


def build(checkpoint_dir):
    input("Which size? ")
    return sound.build(checkpoint_dir)
