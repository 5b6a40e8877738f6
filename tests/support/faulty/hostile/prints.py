"""Prints to both streams and to their file descriptors; otherwise correct."""

import atexit
import os
import sys

import sound

print('{"verdict": "not this one"}')


class Talks(sound.Sound):
    def forward(self, ids):
        print("forward", ids.shape, "x" * 10_000)
        os.write(1, b"straight to the descriptor\n\xff\xfe\n")
        print("and to stderr \x1b[31m", file=sys.stderr)
        return super().forward(ids)


def build(checkpoint_dir):
    print("building ...")
    atexit.register(print, "a last word")
    return sound.load(Talks, checkpoint_dir)
