"""Decide whether a training step has diverged: its loss or gradient is not finite, or its loss has exploded, from which later
steps do not recover.
"""

import math

MARGIN = 2.0  # minimum in nats, for small vocabularies
MAX_SKIPS, MAX_REWINDS = 10, 3  # skips in a row, rewinds in a run; more stop the run


class Rewind(Exception):
    """Step ``step`` diverged: resume from the newest checkpoint, with other windows."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step}: {why}")
        self.step, self.why = step, why


def limit(best_loss: float | None, n_vocab: int) -> float:
    """Return the training loss, nats per token, above which it has exploded: best held-out loss + that of a uniform guess."""
    return math.inf if best_loss is None else best_loss + max(MARGIN, math.log(n_vocab))


def fault(loss: float, grad_norm: float, limit: float = math.inf) -> str:
    """Return what is wrong with a step's loss and gradient norm; "" if nothing."""
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        return f"loss {loss}, gradient norm {grad_norm}"
    if loss > limit:
        return f"loss {loss:.4f}, which has exploded (more than {limit:.2f})"
    return ""
