"""A ninth set: mistakes that people make when they port GPT-2 to NumPy, C and JavaScript, listed before a program was written.

``batched`` computes a batch at once in NumPy; ``onebuffer`` is plain C and keeps the stream in one buffer; ``stepwise`` runs
token by token in node, with a cache. Each fault has the ids of the right answer (more than one where two names are the same
computation), the place, and the line of the program it changes: a pair is drawn from two different lines.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from ..bed import Shape
from ..files import FileBed
from . import batched

THIRDS = ("head-layout", "qkv-order")  # q, k, v inside each head: one permutation of c_attn's columns
NOT_TURNED = ("transposed", "not-loaded")  # a flat matrix read as its transposed shape: neither it nor its transpose
NO_SHIFT = ("missing-bias", "layernorm-without-affine")  # the norm's bias is left out, its gain is not
ONE_LAYER = ("wrong-tensor", "layer-order")  # every block has the tensors of one
VALUES = ("value-projection-wrong", "wrong-tensor", "qkv-order")  # the keys stand where the values should
OTHER_NORM = ("wrong-tensor", "norms-swapped")
STUCK = ("position-missing", "position-offset")  # one row of wpe for all tokens
ALIASED = ("residual-missing", "residual-scaled")  # the branch twice, the stream lost

Fault = tuple[tuple[str, ...], str, str]  # ids, place, line
BATCHED: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "root of the width": (("scale-by-width",), "h.*.attn", "scale"),
    "divided by the head size": (("scale-twice",), "h.*.attn", "scale"),
    "no mask": (("mask-missing",), "h.*.attn", "mask"),
    "diagonal masked": (("mask-strict",), "h.*.attn", "mask"),
    "one token ahead": (("mask-off-by-one",), "h.*.attn", "mask"),
    "scores times tril": (("mask-multiplied",), "h.*.attn", "mask"),
    "softmax over queries": (("softmax-axis",), "h.*.attn", "mask"),
    "reshape without transpose": (("head-layout",), "h.*.attn", "heads"),
    "heads last": (("head-layout",), "h.*.attn", "heads"),
    "heads not turned back": (("head-layout",), "h.*.attn", "merge"),
    "k before q": (("qkv-order",), "h.*.attn.c_attn", "heads"),
    "v before k": (("qkv-order",), "h.*.attn.c_attn", "heads"),
    "thirds inside heads": (THIRDS, "h.*.attn.c_attn", "heads"),
    "no bias of c_attn": (("missing-bias",), "h.*.attn.c_attn", "heads"),
    "no bias of c_fc, last layer": (("missing-bias",), "h.-1.mlp.c_fc", "fc"),
    "c_proj turned": (("transposed",), "h.*.attn.c_proj", "proj"),
    "no attention residual": (("residual-missing",), "h.*.attn", "skip"),
    "no mlp residual": (("residual-missing",), "h.*.mlp", "skip 2"),
    "stream is the norm": (("residual-from-normed",), "h.*.attn", "skip"),
    "norm after the sum": (("post-norm",), "h.*", "skip"),
    "both from one input": (("parallel-block",), "h.*", "skip"),
    "sigmoid gelu": (("gelu-variant",), "h.*.mlp", "act"),
    "relu": (("gelu-variant",), "h.*.mlp", "act"),
    "ddof 1": (("layernorm-unbiased-variance",), "ln", "norm"),
    "eps 1e-3": (("layernorm-eps",), "ln", "norm"),
    "norm over tokens": (("layernorm-axis",), "ln", "norm"),
    "no gain and bias": (("layernorm-without-affine",), "ln", "norm"),
    "ln_1 twice": (OTHER_NORM, "h.*.ln_2", "skip"),
    "no ln_f": (("final-norm-missing",), "ln_f", "final"),
    "positions from 1": (("position-offset",), "wpe", "position"),
    "no positions": (("position-missing",), "wpe", "position"),
    "sine positions": (("position-sinusoidal",), "wpe", "position"),
    "embedding times root of width": (("embedding-scaled",), "wte", "embedding"),
    "half precision": (("reduced-precision",), "everywhere", "dtype"),
    "probabilities": (("logits-softmaxed",), "head", "head"),
}
ONEBUFFER: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "root of the width": (("scale-by-width",), "h.*.attn", "scale"),
    "integer division": (("scale-wrong",), "h.*.attn", "scale"),
    "sees all": (("mask-missing",), "h.*.attn", "mask"),
    "sees only before": (("mask-strict",), "h.*.attn", "mask"),
    "sees one ahead": (("mask-off-by-one",), "h.*.attn", "mask"),
    "strided heads": (("head-layout",), "h.*.attn", "heads"),
    "thirds inside heads": (THIRDS, "h.*.attn.c_attn", "heads"),
    "k q v": (("qkv-order",), "h.*.attn.c_attn", "heads"),
    "v at the offset of k": (VALUES, "h.*.attn.c_attn", "heads"),
    "rows are outputs": (NOT_TURNED, "h.*.attn.c_attn", "layout"),
    "c_proj rows are outputs": (("transposed",), "h.*.attn.c_proj", "layout"),
    "first layer's weights": (ONE_LAYER, "h.1", "load"),
    "gain and bias exchanged": (("wrong-tensor",), "ln", "load"),
    "norms exchanged": (OTHER_NORM, "h.*", "load"),
    "bfloat16 weights": (("reduced-precision",), "everywhere", "load"),
    "no bias of c_attn": (("missing-bias",), "h.*.attn.c_attn", "qkv"),
    "no bias of c_proj": (("missing-bias",), "h.*.attn.c_proj", "proj"),
    "no bias of the mlp's c_proj, first layer": (("missing-bias",), "h.0.mlp.c_proj", "down"),
    "rms": (("rmsnorm",), "ln", "norm"),
    "n - 1": (("layernorm-unbiased-variance",), "ln", "norm"),
    "no root": (("layernorm-not-normalising",), "ln", "norm"),
    "no shift": (NO_SHIFT, "ln", "norm"),
    "norm in place, attention": (("residual-from-normed",), "h.*.attn", "skip"),
    "norm in place, mlp": (("residual-from-normed",), "h.*.mlp", "skip 2"),
    "no last norm": (("final-norm-missing",), "ln_f", "final"),
    "last norm is ln_2": (("wrong-tensor",), "ln_f", "final"),
    "stream overwritten by attention": (("residual-missing",), "h.*.attn", "skip"),
    "stream overwritten by mlp": (("residual-missing",), "h.*.mlp", "skip 2"),
    "stream added twice": (("residual-scaled",), "h.*.mlp", "skip 2"),
    "silu": (("gelu-variant",), "h.*.mlp", "act"),
    "cube is a square": (("gelu-variant",), "h.*.mlp", "act"),
    "wpe from 1": (("position-offset",), "wpe", "position"),
    "no wpe": (("position-missing",), "wpe", "position"),
    "last layer left out": (("layer-missing",), "h.-1", "layers"),
}
STEPWISE: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "times the root": (("scale-wrong",), "h.*.attn", "scale"),
    "root of the width": (("scale-by-width",), "h.*.attn", "scale"),
    "no own key": (("mask-strict",), "h.*.attn", "mask"),
    "one cache for all layers": (("cache-inconsistent",), "h.*.attn", "cache"),
    "empty slots too": (("mask-multiplied", "mask-missing", "cache-inconsistent"), "h.*.attn", "mask"),
    "keys cached as values": (VALUES, "h.*.attn", "cache"),
    "k q v": (("qkv-order",), "h.*.attn.c_attn", "heads"),
    "strided heads": (("head-layout",), "h.*.attn", "heads"),
    "thirds inside heads": (THIRDS, "h.*.attn.c_attn", "heads"),
    "no attention projection": (("output-projection-missing",), "h.*.attn.c_proj", "proj"),
    "c_proj as linear": (("transposed",), "h.*.attn.c_proj", "layout"),
    "mlp's c_proj as linear": (NOT_TURNED, "h.*.mlp.c_proj", "layout"),
    "no biases": (("missing-bias",), "everywhere", "bias"),
    "no bias of c_attn, first layer": (("missing-bias", "not-loaded"), "h.0.attn.c_attn", "bias"),
    "no bias of the mlp's c_proj": (("missing-bias",), "h.*.mlp.c_proj", "bias"),
    "default ln_2, last layer": (("layernorm-without-affine", "not-loaded"), "h.-1.ln_2", "norm"),
    "n - 1": (("layernorm-unbiased-variance",), "ln", "norm"),
    "eps 1e-3": (("layernorm-eps",), "ln", "norm"),
    "rms": (("rmsnorm",), "ln", "norm"),
    "ln_1 for both": (OTHER_NORM, "h.*.ln_2", "skip 2"),
    "norm into the stream": (("residual-from-normed",), "h.*.attn", "skip"),
    "skip is no copy": (ALIASED, "h.*.attn", "skip"),
    "no mlp residual": (("residual-missing",), "h.*.mlp", "skip 2"),
    "norm after the sum": (("post-norm",), "h.*", "skip"),
    "mlp beside attention": (("parallel-block",), "h.*", "skip 2"),
    "sigmoid gelu": (("gelu-variant",), "h.*.mlp", "act"),
    "relu": (("gelu-variant",), "h.*.mlp", "act"),
    "root of 2 pi": (("gelu-variant",), "h.*.mlp", "act"),
    "no activation": (("gelu-variant",), "h.*.mlp", "act"),
    "no wpe": (("position-missing",), "wpe", "position"),
    "wpe from 1": (("position-offset",), "wpe", "position"),
    "position never counted": (STUCK, "wpe", "position"),
    "last block's weights": (ONE_LAYER, "h.0", "load"),
    "no ln_f": (("final-norm-missing",), "ln_f", "final"),
    "temperature": (("logits-scaled",), "head", "head"),
}
LISTS = {"batched": BATCHED, "onebuffer": ONEBUFFER, "stepwise": STEPWISE}
FAULTS = {program: {fault: ids for fault, (ids, _, _) in faults.items()} for program, faults in LISTS.items()}
SHAPES = (Shape(2, 32, 4, 263, 26, 12, 151), Shape(3, 42, 3, 251, 33, 11, 152), Shape(4, 40, 5, 281, 24, 13, 153))
ONE_A_BLOCK = {
    "batched": ("result", "middle", "attended", "qkv", "ln_2", "act"),
    "onebuffer": ("result", "middle", "mixed", "qkv", "fed", "ln_1"),
    "stepwise": ("result", "middle", "attended", "k", "fed", "up"),
}
NOT_DUMPED = (  # from one dump to the next, an author leaves out these
    (),
    ("scores", "weights"),
    ("middle", "up"),
    ("q", "k", "v", "act", "embedded"),
    ("ln_1", "ln_2", "final", "mixed"),
)
HIDDEN = ("integer division", "strided heads")  # uniform attention weights are the same for each way to cut heads


def pairs(program: str, number: int = 8) -> list[tuple[str, str]]:
    """``number`` pairs of faults of ``program`` that stand in different lines of it, drawn with a seed."""
    draw, found, faults = random.Random(f"9 {program}"), [], LISTS[program]
    while len(found) < number:
        one, other = sorted(draw.sample(sorted(faults), 2))
        if faults[one][2] != faults[other][2] and (one, other) not in (*found, HIDDEN):
            found.append((one, other))
    return found


PAIRS = {program: pairs(program) for program in FAULTS}
TENSORS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


class NinthBed(FileBed):
    """The models and programs of this set. The C program reads ``weights.bin``: three sizes, then the tensors in order."""

    TABLES = 0.5
    NUMPY = "batched", batched.run
    COMPILED = "onebuffer", Path(__file__).with_name("onebuffer.c"), ("cc", "-O1", "-std=gnu11")
    NODE = "stepwise", Path(__file__).with_name("stepwise.mjs")
    ONE_A_BLOCK = ONE_A_BLOCK
    NOT_DUMPED = NOT_DUMPED

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        names = [f"h.{n}.{name}" for n in range(shape.layers) for name in TENSORS] + ["ln_f"]
        arrays = [self.weights["wte.weight"], self.weights["wpe.weight"]]
        arrays += [self.weights[f"{name}.{part}"] for name in names for part in ("weight", "bias")]
        with (folder / "weights.bin").open("wb") as file:
            file.write(np.array([shape.width, shape.vocab, shape.context], "<i4").tobytes())
            for array in arrays:
                file.write(array.astype("<f4").tobytes())

    def weights_file(self, program: str) -> Path:
        return self.folder / "weights.bin" if program == self.COMPILED[0] else super().weights_file(program)


missing = NinthBed.missing
