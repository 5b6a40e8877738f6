"""A seventh set: faults that real people made, as public issues and commits tell of them, written down in SOURCES.md.

Three programs: ``student`` in NumPy, ``engine`` in C with a cache, ``port`` in JavaScript. No fault was left out for being easy
or hard. Where a fault has two ids, the words beside it say why either is right. Half of the faults, drawn at random, are A.
"""

from __future__ import annotations

import random
from pathlib import Path

from ..bed import Shape
from ..files import FileBed
from . import student

STUDENT = {
    "eps 1e-6": ("layernorm-eps",),
    # the deviation is n - 1's, and the epsilon is added to it: two mistakes in one expression
    "std of torch": ("layernorm-unbiased-variance", "layernorm-eps"),
    # a norm of another power: its result is not normalised
    "norm squared": ("layernorm-not-normalising",),
    "norm over tokens": ("layernorm-axis",),
    "norm over everything": ("layernorm-axis",),
    "exact gelu": ("gelu-variant",),
    "relu": ("gelu-variant",),
    "0.44715": ("gelu-variant",),
    "no qkv bias": ("missing-bias",),
    "projection not turned": ("transposed",),
    "heads by view": ("head-layout",),
    # queries see the norm, keys and values do not: the norm before them is missing
    "only queries normed": ("norm-missing",),
    # the keys' and values' matrices hold the queries' columns, which are taken from a wrong place of c_attn
    "all from the queries": ("wrong-tensor", "qkv-order"),
    # the order of the thirds and of the heads: one and the same permutation
    "thirds in each head": ("head-layout", "qkv-order"),
    "units before heads": ("head-layout",),
    # keys are the values: columns taken from a wrong place, or, in tensors, another one of the checkpoint
    "values as keys": ("qkv-order", "wrong-tensor"),
    # k q^T is q k^T with the names of queries and keys exchanged
    "keys times queries": ("qkv-order", "softmax-axis"),
    "divided by the reciprocal": ("scale-wrong",),
    "scaled by width": ("scale-by-width",),
    "merged without transposing": ("head-layout",),
    # rows of the batch and heads are mixed up: heads in another order, and a row that depends on the others
    "batch and heads exchanged": ("head-layout", "batch-dependent"),
    # a bias that is added once more is one that GPT-2 does not have, or another value than the checkpoint's
    "bias twice": ("extra-bias", "not-loaded"),
    # an activation where GPT-2 has none; what comes out of the layer is not the checkpoint's product
    "relu after projection": ("gelu-variant", "not-loaded"),
    # weights are multiplied by the mask, not normalised again
    "mask after softmax": ("mask-multiplied", "mask-missing", "softmax-axis"),
    # the future's scores are about zero, as with scores times mask
    "hidden is 1e-9": ("mask-multiplied",),
    # the future is seen, only weaker
    "mask added as ones": ("mask-missing", "mask-multiplied"),
    # sees the future, and neither itself nor the past
    "mask inverted": ("mask-missing", "mask-strict"),
    "softmax over queries": ("softmax-axis",),
    "softmax over heads": ("softmax-axis",),
    # the same program gives the same numbers here, for its random numbers have a seed
    "attention dropout": ("dropout-active", "not-deterministic"),
    # ln_2 holds ln_1's values
    "one norm for both": ("wrong-tensor", "norms-swapped"),
    "norm after the sum": ("post-norm",),
    "residual after norm": ("residual-from-normed",),
    # each block holds the last block's tensors; the last block runs n times
    "last block again": ("wrong-tensor", "layer-repeated", "layer-order"),
    "head not tied": ("untied-head",),
    # all tokens of a row have one position: no positions, or from another row of the table
    "positions of the batch": ("position-offset", "position-missing"),
    "positions by id": ("position-offset",),
    "sinusoids": ("position-sinusoidal",),
    "positions from 1": ("position-offset",),
    "embedding times root": ("embedding-scaled",),
    "no final norm": ("final-norm-missing",),
    "final norm twice": ("extra-norm",),
    # a constant is taken from each row of logits, as log_softmax does; or a head with other weights (the mean row taken off)
    "logits centred": ("logits-softmaxed", "untied-head"),
    "log_softmax": ("logits-softmaxed",),
}
ENGINE = {
    "eps 1e-12": ("layernorm-eps",),
    "unbiased variance": ("layernorm-unbiased-variance",),
    "norms without bias": ("missing-bias",),
    # without the bias as well, which follows from being an RMS norm
    "rms without bias": ("rmsnorm",),
    "norm in place": ("residual-from-normed",),
    "one norm for both": ("wrong-tensor", "norms-swapped"),
    "exact gelu": ("gelu-variant",),
    "silu": ("gelu-variant",),
    "root of two over pi": ("gelu-variant",),
    # an activation in half precision: another activation, or its rounding
    "table of halves": ("reduced-precision", "gelu-variant"),
    # rows of the flat matrix in place of columns
    "thirds by rows": ("qkv-order", "wrong-tensor", "not-loaded"),
    # every matrix is read as its transposed shape: the numbers stay in their order
    "kernels as linear": ("transposed", "wrong-tensor"),
    "no projection bias": ("missing-bias",),
    "no feed-forward bias": ("missing-bias",),
    "no output projection": ("output-projection-missing",),
    # the branch is not added to the stream: missing, as a factor of zero is
    "attention not used": ("residual-missing", "residual-scaled"),
    "fewer heads": ("head-layout",),
    "one head": ("head-layout",),
    "scaled by width": ("scale-by-width",),
    "scaled by number of heads": ("scale-wrong",),
    "divided by the block's number": ("scale-inverse-layer",),
    # the weights do not add up to one
    "softmax plus one": ("softmax-axis", "softmax-missing"),
    # a token does not see all before it: the mask of GPT-2 is another, and a cache that lacks keys
    "window in odd blocks": ("mask-strict", "cache-inconsistent"),
    "prompt sees everything": ("mask-missing",),
    # keys are values, in the cache alone
    "one cache for keys and values": ("cache-inconsistent", "qkv-order", "wrong-tensor"),
    # the values of the cache have another layout, so heads and their units are read in another order
    "values read features first": ("cache-inconsistent", "head-layout", "value-projection-wrong"),
    "half cache": ("reduced-precision",),
    # only the last value counts
    "assigned, not added": ("value-projection-wrong",),
    "positions from 2": ("position-offset",),
    # positions that are wrong only where the cache is used
    "steps at position 0": ("position-offset", "cache-inconsistent"),
    "steps without position": ("position-missing", "cache-inconsistent"),
    "prompt counted twice": ("position-offset", "cache-inconsistent"),
    "steps at number of heads": ("position-offset", "cache-inconsistent"),
    "int8 weights": ("reduced-precision",),
    # rounded, and multiplied by another row's factor: a matrix that is not the checkpoint's
    "scales of the wrong axis": ("reduced-precision", "not-loaded"),
    "logits over root": ("logits-scaled",),
}
PORT = {
    "epsilon is a flag": ("layernorm-eps",),
    "no root in the norm": ("layernorm-not-normalising",),
    # a norm of another power, as above; for a small deviation it is an epsilon at another place
    "root of the deviation": ("layernorm-not-normalising", "layernorm-eps"),
    "norm without parameters": ("layernorm-without-affine",),
    "quick gelu": ("gelu-variant",),
    "relu": ("gelu-variant",),
    "coefficients swapped": ("gelu-variant",),
    "phi with x": ("gelu-variant",),
    "no qkv bias": ("missing-bias",),
    "no feed-forward bias": ("missing-bias",),
    # c_fc's bias is absent, and c_proj's is another tensor's: either is a half of the mistake
    "up's bias to down": ("missing-bias", "wrong-tensor"),
    "projection not turned": ("transposed",),
    "no output projection": ("output-projection-missing",),
    "values not projected": ("value-projection-wrong",),
    "heads by view": ("head-layout",),
    "twice the heads": ("head-layout",),
    "merged without transposing": ("head-layout",),
    # as the student's exchange of batch and heads
    "transposed as in R": ("head-layout", "batch-dependent"),
    "unscaled": ("scale-missing",),
    "scaled twice": ("scale-twice",),
    "no mask": ("mask-missing",),
    "mask after softmax": ("mask-multiplied", "mask-missing", "softmax-axis"),
    "not itself": ("mask-strict",),
    "one ahead": ("mask-off-by-one",),
    "softmax over queries": ("softmax-axis",),
    # here dropout has a seed, as above
    "dropout stays": ("dropout-active", "not-deterministic"),
    "no residuals": ("residual-missing",),
    "side by side": ("parallel-block",),
    "second residual after norm": ("residual-from-normed",),
    # all at one position: an offset of its own for each token, or no positions
    "all at position 0": ("position-offset", "position-missing"),
    "positions 1 to 0": ("position-offset",),
    # the second row's positions do not begin at 0, as they would alone
    "second row is padded": ("position-offset", "batch-dependent", "padding-wrong"),
    "no positions": ("position-missing",),
    "embedding times root": ("embedding-scaled",),
    "no final norm": ("final-norm-missing",),
    "last block not run": ("layer-missing",),
    # the head holds zeros: its own weights, or weights never loaded
    "head of zeros": ("untied-head", "not-loaded", "logits-scaled"),
    # logits through a tanh: near zero a factor, else no known function
    "logits capped": ("logits-scaled", "logits-softmaxed"),
    "softmax at the end": ("logits-softmaxed",),
    # cut off, not rounded: a narrower dtype all the same
    "bfloat16 weights": ("reduced-precision",),
}
FAULTS: dict[str, dict[str, tuple[str, ...]]] = {"student": STUDENT, "engine": ENGINE, "port": PORT}
EVERY = [(program, fault) for program, faults in FAULTS.items() for fault in sorted(faults)]
HALF_A = frozenset(random.Random(7).sample(EVERY, len(EVERY) // 2))
SHAPES = (Shape(2, 36, 3, 301, 28, 12, 131), Shape(3, 40, 5, 277, 26, 11, 132), Shape(4, 24, 4, 263, 30, 13, 133))
ONE_A_BLOCK = {
    "student": ("result", "middle", "ln_2", "mixed", "attended", "fed"),
    "engine": ("result", "middle", "qkv", "ln_2", "attended", "fed"),
    "port": ("residual3", "residual2", "qkv", "ln2", "attproj", "fcproj"),
}
NOT_DUMPED = (  # from one dump to the next, an author leaves out these
    (),
    ("scores", "weights", "preatt", "att", "keys"),
    ("q", "k", "v", "up", "fch"),
    ("ln_1", "ln_2", "ln1", "ln2", "final", "lnf"),
    ("act", "fch_gelu", "mixed", "atty", "embedded", "encoded"),
)


class SeventhBed(FileBed):
    """The models and programs of this set."""

    TABLES = 0.45
    NUMPY = "student", student.run
    COMPILED = "engine", Path(__file__).with_name("engine.c"), ("cc", "-O1")
    NODE = "port", Path(__file__).with_name("port.js")
    ONE_A_BLOCK = ONE_A_BLOCK
    NOT_DUMPED = NOT_DUMPED


missing = SeventhBed.missing
