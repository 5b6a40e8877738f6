"""Exits with success, as a training script that ends in sys.exit(0)."""

import sys


def build(checkpoint_dir):
    sys.exit(0)
