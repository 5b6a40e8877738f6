"""Aborts the interpreter."""

import os

import sound


class Aborts(sound.Sound):
    def forward(self, ids):
        os.abort()


def build(checkpoint_dir):
    return Aborts(sound.sizes(checkpoint_dir))
