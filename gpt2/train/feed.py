"""Draw each step's windows and move them to the device that trains."""

import numpy as np
import torch
from torch import Tensor

from gpt2.data.batches import batch
from gpt2.train.parallel import ALONE, Ranks
from gpt2.train.recipe import Recipe


class Feed:
    """Each step's inputs and targets (rows of this rank, context), int64, which depend only on ``ids``, seed and step.

    On a GPU :meth:`ahead` sends the next step's windows from pinned memory while this step runs; on a CPU it does nothing.
    """

    def __init__(self, ids: np.ndarray, ranks: Ranks = ALONE) -> None:
        self.ids, self.ranks = ids, ranks
        self.sent: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None

    def __call__(self, recipe: Recipe, step: int) -> tuple[Tensor, Tensor]:
        key, sent = (recipe.seed, step), self.sent
        self.sent = None
        return sent[1] if sent is not None and sent[0] == key else self.send(recipe, step)

    def ahead(self, recipe: Recipe, step: int) -> None:
        if self.ranks.device.type != "cpu" and step < recipe.steps:
            self.sent = (recipe.seed, step), self.send(recipe, step)

    def send(self, recipe: Recipe, step: int) -> tuple[Tensor, Tensor]:
        drawn = batch(
            self.ids,
            recipe.context,
            recipe.batch_size,
            seed=recipe.seed,
            step=step,
            stride=recipe.data.stride,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
        )
        x, y = (torch.from_numpy(windows) for windows in drawn)
        if self.ranks.device.type == "cuda":
            x, y = x.pin_memory(), y.pin_memory()
        return x.to(self.ranks.device, non_blocking=True), y.to(self.ranks.device, non_blocking=True)
