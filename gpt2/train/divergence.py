"""When a step has gone wrong, and what is then said.

A loss or a gradient that is not finite poisons every weight it reaches. A loss that explodes does not, at once; but a model that
was that good and is now worse by more than knowing nothing costs has lost what it had learnt, and no later step brings it back.
"""

from __future__ import annotations

import math

MARGIN = 2.0  # nats; for vocabularies so small that the logarithm of their size says little
MAX_SKIPS, MAX_REWINDS = 10, 3  # in a row; in a run: then it stops, whatever the policy


class Rewind(Exception):
    """The run is to go on from its newest checkpoint, with other windows, because ``step`` diverged."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step}: {why}")
        self.step, self.why = step, why


def limit(best_loss: float | None, n_vocab: int) -> float:
    """The training loss, nats per token, above which it has exploded: the best held-out loss and a uniform guess on top."""
    return math.inf if best_loss is None else best_loss + max(MARGIN, math.log(n_vocab))


def fault(loss: float, grad_norm: float, limit: float = math.inf) -> str:
    """What is wrong with a step's loss and the norm of its gradient, in words; empty where nothing is."""
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        return f"loss {loss}, gradient norm {grad_norm}"
    if loss > limit:
        return f"loss {loss:.4f}, which has exploded (more than {limit:.2f})"
    return ""
