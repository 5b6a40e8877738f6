"""An eighth set: a sample of what people get wrong in a GPT's forward pass, one fault for each public report that a search gave.

Three programs: ``notebook`` in NumPy, ``blocked`` in C++ with a cache, ``pipeline`` in JavaScript; SOURCES.md says how reports
were found, and has a line for each. "erf (2)" is the same mistake as "erf", reported of another program: what is reported more
often is there more often. Where a fault has two ids, the words beside it say why either is right. Half, drawn by lot, is A.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from ..bed import Shape
from ..files import FileBed
from . import notebook

OUTSIDE = ("layernorm-unbiased-variance", "layernorm-eps")  # n - 1 and an epsilon beside the root: two mistakes in one expression
ONE_GAIN = ("layernorm-without-affine", "not-loaded", "wrong-tensor")  # the first number of each tensor, for all features
OTHER_THIRD = ("wrong-tensor", "qkv-order")  # the matrices of keys and values hold other columns of c_attn
INTERLEAVED = ("head-layout", "qkv-order")  # thirds inside each head: one permutation of c_attn's columns
NOT_TURNED = ("transposed", "not-loaded")  # a flat matrix read as its transposed shape: neither it nor its transpose
CACHED = "cache-inconsistent"  # wrong only in steps that use the cache
NOTEBOOK = {
    "n-1 and eps outside": OUTSIDE,
    "norm over tokens": ("layernorm-axis",),
    "norm over tokens and features": ("layernorm-axis",),
    "one gain and bias": ONE_GAIN,
    "norms after the sums": ("post-norm",),
    "norms after the sums (2)": ("post-norm",),
    "no final norm": ("final-norm-missing",),
    "no final norm (2)": ("final-norm-missing",),
    # attention is not in the sum: missing there, as with a factor of zero
    "second sum with the block's input": ("residual-missing", "residual-scaled"),
    "normed twice": ("extra-norm",),
    "erf": ("gelu-variant",),
    "erf (2)": ("gelu-variant",),
    "relu": ("gelu-variant",),
    "all from the keys": OTHER_THIRD,
    # values are queries: what is mixed, or where it is taken from
    "mixes queries": ("value-projection-wrong", "qkv-order", "wrong-tensor"),
    "thirds in heads": INTERLEAVED,
    "merged by view": ("head-layout",),
    "view of thirds": INTERLEAVED,
    "scaled by width": ("scale-by-width",),
    "scaled by width (2)": ("scale-by-width",),
    "no mask": ("mask-missing",),
    # sees the future, and neither itself nor the past
    "mask inverted": ("mask-missing", "mask-strict"),
    # -1e9 on all that may be seen: scores are lost in rounding, as times zero
    "mask of another convention": ("scale-wrong", "reduced-precision"),
    "lower triangle of the scores": ("mask-multiplied",),
    "softmax over queries": ("softmax-axis",),
    "no output projection": ("output-projection-missing",),
    "no output projection (2)": ("output-projection-missing",),
    # an activation where GPT-2 has none; what comes out of the layer is not the checkpoint's product
    "relu after projection": ("gelu-variant", "not-loaded"),
    "positions by id": ("position-offset",),
    "embedding times root": ("embedding-scaled",),
    "blocks reversed": ("layer-order",),
    # a constant is taken from each row of logits, as log_softmax does; or a head with other weights (the mean row taken off)
    "logits centred": ("logits-softmaxed", "untied-head"),
}
BLOCKED = {
    "variance by n-1": ("layernorm-unbiased-variance",),
    "n-1 and eps outside": OUTSIDE,
    "no gain and bias": ("layernorm-without-affine",),
    "ln_1 with ln_2's bias": ("wrong-tensor", "not-loaded"),
    "no final norm": ("final-norm-missing",),
    "second sum with the norm": ("residual-from-normed",),
    "no residuals": ("residual-missing",),
    # the sum of stream and norm: the normed one is added, or a stream of another size
    "norm added as well": ("residual-from-normed", "residual-scaled"),
    "erf": ("gelu-variant",),
    "relu": ("gelu-variant",),
    "0.44715": ("gelu-variant",),
    "order q v k": ("qkv-order",),
    "thirds in heads": INTERLEAVED,
    # k q^T is q k^T with the names of queries and keys exchanged
    "keys times queries": ("qkv-order", "softmax-axis"),
    "merged by view": ("head-layout",),
    "one head": ("head-layout",),
    # units of a key are mixed with other keys' units, and the more keys there are, the more
    "transposed with the columns' stride": ("head-layout", CACHED, "qkv-order"),
    "scaled by width": ("scale-by-width",),
    "scaled twice": ("scale-twice",),
    "unscaled": ("scale-missing",),
    "prompt without a mask": ("mask-missing", CACHED),
    "hidden is 1e-10": ("mask-multiplied",),
    "keys before the token": ("mask-strict",),
    "no output projection": ("output-projection-missing",),
    "no position for one token": ("position-missing", CACHED),
    "steps from position 0": ("position-offset", CACHED),
    "steps from position 0 (2)": ("position-offset", CACHED),
    "steps at the number of heads": ("position-offset", CACHED),
    "feed-forward not turned": NOT_TURNED,
    "matrices not turned": NOT_TURNED,
    # the bias is missing in part, so it is another one
    "bias for the first columns": ("missing-bias", "not-loaded"),
    "head not tied": ("untied-head",),
}
PIPELINE = {
    "n-1 and eps outside": OUTSIDE,
    "eps outside the root": ("layernorm-eps",),
    "norm over tokens": ("layernorm-axis",),
    "input scaled and shifted": ("layernorm-not-normalising",),
    "one gain and bias": ONE_GAIN,
    "norms after the sums": ("post-norm",),
    "no final norm": ("final-norm-missing",),
    "sums with the norms": ("residual-from-normed",),
    "no residuals": ("residual-missing",),
    "erf": ("gelu-variant",),
    "erf (2)": ("gelu-variant",),
    "erf (3)": ("gelu-variant",),
    "relu": ("gelu-variant",),
    "sigmoid of 1.702 x": ("gelu-variant",),
    "all from the queries": OTHER_THIRD,
    "thirds in heads": INTERLEAVED,
    "merged by view": ("head-layout",),
    "scaled by width": ("scale-by-width",),
    "unscaled": ("scale-missing",),
    "no mask": ("mask-missing",),
    "no mask (2)": ("mask-missing",),
    "no mask (3)": ("mask-missing",),
    "scores times the mask": ("mask-multiplied",),
    "not itself": ("mask-strict",),
    "softmax over queries": ("softmax-axis",),
    "no output projection": ("output-projection-missing",),
    # the matrix has one added on its diagonal, and the bias is absent
    "projection added to its input": ("output-projection-missing", "not-loaded", "missing-bias"),
    "positions go on": ("position-offset",),
    # all at one position: an offset of its own for each token, or no positions
    "all at position 0": ("position-offset", "position-missing"),
    # only the last block's result counts
    "each block sees the embedding": ("layer-missing",),
    "no biases": ("missing-bias",),
    "feed-forward not turned": NOT_TURNED,
    "softmax at the end": ("logits-softmaxed",),
}
FAULTS: dict[str, dict[str, tuple[str, ...]]] = {"notebook": NOTEBOOK, "blocked": BLOCKED, "pipeline": PIPELINE}
EVERY = [(program, fault) for program, faults in FAULTS.items() for fault in sorted(faults)]
HALF_A = frozenset(random.Random(8).sample(EVERY, len(EVERY) // 2))
SHAPES = (Shape(2, 36, 3, 293, 29, 12, 141), Shape(3, 40, 5, 271, 27, 11, 142), Shape(4, 24, 4, 257, 31, 13, 143))
ONE_A_BLOCK = {
    "notebook": ("result", "middle", "both", "ln_2", "attended", "merged"),
    "blocked": ("result", "middle", "qkv", "attended", "fed", "act"),
    "pipeline": ("result", "middle", "v", "ln_1", "attended", "fed"),
}
NOT_DUMPED = (  # from one dump to the next, an author leaves out these
    (),
    ("scores", "weights", "keys", "values"),
    ("q", "k", "v", "up", "both", "qkv"),
    ("ln_1", "ln_2", "final", "attended"),
    ("act", "merged", "mixed", "embedded", "middle"),
)
# Two faults of one line have no sense together, nor have those that undo what another one changes.
LINES = (
    ("eps", "norm over", "gain", "variance", "scaled and shifted"),
    ("norms after", "residuals", "sum", "normed twice", "norm added", "each block sees"),
    ("erf", "relu", "sigmoid", "0.44715"),
    ("all from", "mixes", "third", "order q", "keys times", "stride", "one head", "merged", "convention"),
    ("scale", "convention"),
    ("mask", "hidden", "triangle", "softmax over", "not itself", "keys before"),
    ("projection",),
    ("position", "1e-10"),
    ("turned", "bias"),
    ("logits", "softmax at", "head not"),
)


def named(fault: str) -> str:
    """The mistake that ``fault`` is a report of: its name without a number."""
    return fault.partition(" (")[0]


def pairs(program: str, number: int = 8) -> list[tuple[str, str]]:
    """``number`` pairs of faults of ``program`` that stand in different lines of it, drawn with a seed."""
    draw, found = random.Random(f"8 {program}"), []
    lines = {fault: [n for n, words in enumerate(LINES) if any(word in fault for word in words)] for fault in FAULTS[program]}
    while len(found) < number:
        one, other = sorted(draw.sample(sorted(FAULTS[program]), 2))
        kinds = {named(one), named(other)}
        if not set(lines[one]) & set(lines[other]) and all(kinds != {named(a), named(b)} for a, b in found):
            found.append((one, other))
    return found


PAIRS = {program: pairs(program) for program in FAULTS}


class EighthBed(FileBed):
    """The models and programs of this set."""

    TABLES = 0.5
    NUMPY = "notebook", notebook.run
    COMPILED = "blocked", Path(__file__).with_name("blocked.cpp"), ("c++", "-O1", "-std=c++17")
    NODE = "pipeline", Path(__file__).with_name("pipeline.mjs")
    ONE_A_BLOCK = ONE_A_BLOCK
    NOT_DUMPED = NOT_DUMPED

    def switches(self, faults: Iterable[str]) -> set[str]:
        return {named(fault) for fault in faults}


missing = EighthBed.missing
