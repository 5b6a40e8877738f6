"""Correct, but with a thread that keeps the process alive."""

import threading
import time

import sound


def build(checkpoint_dir):
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return sound.build(checkpoint_dir)
