"""Find a float32 module that computes in fewer digits than float32 has: by a cast, autocast, or products of short numbers."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gpt2.measure.metrics import max_abs, worst_relative_error
from gpt2.measure.rounding import WORST_RATIO, explained_errors
from gpt2.measure.tracing import trace
from gpt2.measure.user_code import logits_of
from gpt2.port.module.runs import Runs
from gpt2.port.recording.collecting import collect
from gpt2.port.recording.dispatch import run_deterministically
from gpt2.port.recording.forward import Borrowed
from gpt2.port.recording.pool import LOOSE
from gpt2.port.search.logits import Reference
from gpt2.port.terms.causes import SURE, Cause
from gpt2.port.terms.places import Place

FIX = "compute in float32: no .bfloat16(), no .half() and no autocast within the forward pass"
SLACK = 4.0 * WORST_RATIO  # times what rounding explains: another order of the same operations may round more


def imprecise(runs: Runs, borrowed: Borrowed, ids: Tensor, wide: Tensor, same: Reference) -> list[Cause]:
    """Return the cause that a module's logits in float32 are farther from its own in float64, ``wide``, than rounding explains.

    ``same``: our model with the module's weights; it says what rounding explains, and where the module departs from that.
    """
    run = partial(runs.module, ids.to(runs.device))
    runs.rewind()
    with borrowed.in_own_dtype():
        try:
            output, mode = run_deterministically(lambda: logits_of(run(), ids, runs.config.vocab_size), keep_casts=True)
        except Exception:  # what it does in the dtype of its weights is no question of digits
            return []
        narrow = output.detach().to("cpu", torch.float64)
        error = worst_relative_error(narrow, wide)
        if not error > LOOSE:
            return []
        explained = explained_errors(same.model, ids, torch.float32, worst_relative_error)
        if error <= SLACK * explained["logits"]:
            return []
        own, _ = run_deterministically(lambda: collect(runs.module, ids.to(runs.device), runs.config), keep_casts=True)
    pool, _ = run_deterministically(lambda: collect(runs.module, ids.to(runs.device), runs.config))
    first = "logits"
    for point, value in trace(same.model, ids).items():
        ordered = value.flatten().sort().values
        arrays = (one.flatten().sort().values for one in own.of_size(value.numel()))
        nearest = min((worst_relative_error(one, ordered) for one in arrays), default=0.0)
        if pool.find(value) is not None and nearest > SLACK * explained[point]:
            first = point
            break
    casts = "".join(f", and casts to {dtype}" for dtype in sorted(mode.casts - {"float32"}))
    words = f"your forward computes in fewer digits than float32 has{casts}"
    evidence = (
        f"in float32, your logits are off by {error:.0e} from your own in float64; rounding explains {explained['logits']:.0e}"
    )
    return [Cause("reduced-precision", (Place.of(first),), words, evidence, SURE, FIX, effect=max_abs(narrow, wide))]
