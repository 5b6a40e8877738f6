"""Waits for input from the terminal."""

import sound


def build(checkpoint_dir):
    input("Which size? ")
    return sound.build(checkpoint_dir)
