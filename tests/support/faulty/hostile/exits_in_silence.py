"""Leaves without unwinding anything, and reports success."""

import os


def build(checkpoint_dir):
    os._exit(0)
