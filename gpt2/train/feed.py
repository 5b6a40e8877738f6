"""Draw each step's windows and move them to the device that trains."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpt2.data.batches import UNSCORED, batch, documents
from gpt2.train.parallel import ALONE, Ranks
from gpt2.train.recipe import Recipe


class StepRows(NamedTuple):
    """This rank's rows of a step, int64: inputs ``x`` and targets ``y`` (rows, context), of which some may be :data:`UNSCORED`.

    ``documents`` (rows, context) is given where documents are kept apart. ``scored`` (rows,), on the CPU, counts scored targets.
    Behind the first ``width`` columns nothing is scored.
    """

    x: Tensor
    y: Tensor
    scored: Tensor
    width: int
    documents: Tensor | None = None


class Feed:
    """Each step's :class:`StepRows`, a function of ``ids``, ``marks``, recipe and step; ``end`` parts documents.

    On a GPU :meth:`ahead` sends the next step's windows from pinned memory while this step runs; on a CPU it does nothing.
    """

    def __init__(self, ids: np.ndarray, ranks: Ranks = ALONE, *, marks: np.ndarray | None = None, end: int | None = None) -> None:
        self.ids, self.ranks, self.marks, self.end = ids, ranks, marks, end
        self.partial = marks is not None or end is not None  # targets may be unscored
        self.width = 0.0  # columns of the last step's rows that were computed, the mean over the ranks
        self.sent: tuple[tuple[int, int], StepRows] | None = None

    def __call__(self, recipe: Recipe, step: int) -> StepRows:
        key, sent = (recipe.seed, step), self.sent
        self.sent = None
        return sent[1] if sent is not None and sent[0] == key else self.send(recipe, step)

    def ahead(self, recipe: Recipe, step: int) -> None:
        if self.ranks.device.type != "cpu" and step < recipe.steps:
            self.sent = (recipe.seed, step), self.send(recipe, step)

    def send(self, recipe: Recipe, step: int) -> StepRows:
        x, y = batch(
            self.ids,
            recipe.context,
            recipe.batch_size,
            seed=recipe.seed,
            step=step,
            stride=recipe.context if recipe.data.padded else recipe.data.stride,
            rank=self.ranks.rank,
            ranks=self.ranks.size,
            marks=self.marks,
        )
        apart = None
        if self.end is not None:
            apart = documents(x, self.end)
            y = np.where(x == self.end, UNSCORED, y)  # the first token of a document is not predicted from the one before
        scored = y != UNSCORED
        width = 1 + int(scored.any(0).nonzero()[0].max(initial=0))
        counts = torch.from_numpy(scored.sum(1))
        return StepRows(self.copied(x), self.copied(y), counts, width, None if apart is None else self.copied(apart))

    def copied(self, rows: np.ndarray) -> Tensor:
        own = torch.from_numpy(rows)
        return (own.pin_memory() if self.ranks.device.type == "cuda" else own).to(self.ranks.device, non_blocking=True)
