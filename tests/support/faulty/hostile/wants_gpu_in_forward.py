"""Makes its positions on the GPU."""

import sound
import torch


class Cuda(sound.Sound):
    def forward(self, ids):
        torch.arange(ids.size(1), device="cuda")
        return super().forward(ids)


def build(checkpoint_dir):
    return sound.load(Cuda, checkpoint_dir)
