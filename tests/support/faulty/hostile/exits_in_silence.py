"""Exits with success, without raising SystemExit."""

import os


def build(checkpoint_dir):
    os._exit(0)
