"""Its forward never returns, and ignores SIGTERM."""

import signal
import time

import sound


class Sleeps(sound.Sound):
    def forward(self, ids):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(3600)


def build(checkpoint_dir):
    return Sleeps(sound.sizes(checkpoint_dir))
