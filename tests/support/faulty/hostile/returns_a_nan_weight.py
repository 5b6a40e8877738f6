"""Correct, except that one weight is NaN."""

import math

import sound
import torch


def build(checkpoint_dir):
    model = sound.build(checkpoint_dir)
    with torch.no_grad():
        model.layers[0].up.weight[0, 0] = math.nan
    return model
