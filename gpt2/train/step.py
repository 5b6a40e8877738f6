"""Draw each step's windows, move them to the device that trains, and run one optimizer step.

This rank's rows in parts, the exchange of gradients, and the update, unless the step has diverged.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from gpt2.data.batches import UNSCORED, batch, documents
from gpt2.train import parallel
from gpt2.train.parallel import ALONE, Ranks
from gpt2.train.recipe import Recipe

MARGIN = 2.0  # nats at least that a loss has exploded by, from which later steps do not recover; for small vocabularies
MAX_SKIPS, MAX_REWINDS = 10, 3  # skips in a row, rewinds in a run; more stop the run


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
        stride = recipe.context if recipe.data.padded else recipe.data.stride
        drawn = {"seed": recipe.seed, "step": step, "stride": stride, "rank": self.ranks.rank, "ranks": self.ranks.size}
        x, y = batch(self.ids, recipe.context, recipe.batch_size, **drawn, marks=self.marks)
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


def optimizer_step(
    scored: nn.Module, optimizer: torch.optim.Optimizer, feed: Feed, recipe: Recipe, step: int, lr: float, limit: float = math.inf
) -> tuple[float, float]:
    """Run one optimizer step, unless it diverged; return the batch's loss (nats per scored token) and unclipped gradient norm.

    A batch without a scored token has no loss: then nothing changes, not even by weight decay, and both are 0.
    """
    scored.train()
    ranks = feed.ranks
    part = ranks.part(recipe)
    seed = np.random.SeedSequence((recipe.seed, step, ranks.rank))  # rank 0 has the seed of a single-process run
    _seed(seed.generate_state(1, np.uint64)[0].item(), ranks.device)
    given = feed(recipe, step)
    n = part.grad_accum
    # What stands behind the last scored token changes a step by rounding alone; with dropout, other masks are drawn without it.
    # For each new shape torch.compile would compile anew.
    width = recipe.context if recipe.compile else given.width
    x, y, scored_rows = given.x[:, :width].chunk(n), given.y[:, :width].chunk(n), given.scored.chunk(n)
    apart = given.documents[:, :width].chunk(n) if given.documents is not None else [None] * n
    own = given.scored.sum().item()
    total, columns = ranks.sum(own, width) if feed.partial else [own * ranks.size, width * ranks.size]
    feed.width = columns / ranks.size
    if not total:
        feed.ahead(recipe, step + 1)
        return 0.0, 0.0
    losses = []  # read after all parts are launched, because each read waits for the GPU
    mixed = torch.autocast(ranks.device.type, torch.bfloat16, enabled=recipe.precision == "bf16")
    for index in range(n):
        with parallel.synchronised(scored, index == n - 1), mixed:
            # DDP and FSDP average over ranks. A part counts by its scored tokens: if all are scored, the divisor is n.
            count = scored_rows[index].sum().item() * ranks.size
            loss = scored(x[index], y[index], apart[index]) / (total / count if count else math.inf)
        loss.backward()
        losses.append(loss.detach())
    feed.ahead(recipe, step + 1)
    mean = ranks.sum(sum(each.item() for each in losses))[0] / ranks.size
    norm = float(parallel.full(torch.nn.utils.clip_grad_norm_(scored.parameters(), recipe.optim.clip or math.inf)))
    for group in optimizer.param_groups:
        group["lr"] = lr
    if not fault_of(mean, norm, limit):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return mean, norm


def _seed(seed: int, device: torch.device) -> None:
    """Seed the CPU and ``device``; torch.manual_seed formats a stack trace per missing backend, 2 % of a small model's step."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


class Rewind(Exception):
    """Step ``step`` diverged: resume from the newest checkpoint, with other windows."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step}: {why}")
        self.step, self.why = step, why


def loss_limit(best_loss: float | None, n_vocab: int) -> float:
    """Return the training loss, nats per token, above which it has exploded: best held-out loss + that of a uniform guess."""
    return math.inf if best_loss is None else best_loss + max(MARGIN, math.log(n_vocab))


def fault_of(loss: float, grad_norm: float, limit: float = math.inf) -> str:
    """Return what is wrong with a step's loss and gradient norm; "" if nothing."""
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        return f"loss {loss}, gradient norm {grad_norm}"
    if loss > limit:
        return f"loss {loss:.4f}, which has exploded (more than {limit:.2f})"
    return ""
