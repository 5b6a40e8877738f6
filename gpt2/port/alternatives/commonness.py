"""How common each mistake is among people: which of several explanations that fit a dump equally well is named first.

The numbers are of 217 public reports of wrong GPT-2 programs, those of the seventh and eighth set of programs, whose sources are
listed in tests/support/programs/seventh/SOURCES.md (commit 47a5ad9) and eighth/SOURCES.md (6d4dc6f).
"""

from __future__ import annotations

from collections.abc import Iterable

from gpt2.port.terms.causes import Cause

COUNTED = {  # causes, by how many reports each has
    23: "gelu-variant",
    20: "head-layout",
    16: "position-offset",
    10: "mask-missing",
    9: "missing-bias",
    7: "wrong-tensor output-projection-missing",
    6: "transposed layernorm-unbiased-variance scale-by-width "
    "mask-multiplied softmax-axis residual-from-normed final-norm-missing",
    5: "layernorm-axis qkv-order logits-softmaxed reduced-precision residual-missing",
    4: "layernorm-eps layernorm-not-normalising post-norm mask-strict layernorm-without-affine",
    3: "scale-wrong scale-missing untied-head embedding-scaled value-projection-wrong position-missing",
    2: "dropout-active extra-norm cache-inconsistent logits-scaled scale-twice layer-missing",
}
REPORTS = {id: count for count, ids in COUNTED.items() for id in ids.split()}
SELDOM = 1  # reports of all other causes, at most


def rarity(faults: Iterable[Cause]) -> int:
    """Return minus the number of reports of the least common of ``faults``: less is more common."""
    return -min((REPORTS.get(fault.id, SELDOM) for fault in faults), default=0)
