"""A tenth set: mistakes of GPT-2 ports in NumPy, C and JavaScript, listed by an author who knew nothing of the engine.

``modules`` is NumPy in classes that write into their arrays, row by row, with a loop over heads; ``kvcache`` is C that takes one
token at a time with a cache and weights grouped by kind; ``prefill`` is node: two prompts at once, then their rest step by step.
Each fault has the ids of the right answer (several where they are the same computation), its place, and the line it changes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..bed import Shape
from ..files import FileBed, pairs
from . import modules

QKV_OR_HEADS = ("qkv-order", "head-layout")  # q, k, v cut inside each head: one permutation of c_attn's columns
FLAT = ("transposed", "not-loaded")  # a flat matrix read by the other shape: a turned matrix by mistake, neither by its values
KEYS_MIXED = ("value-projection-wrong", "qkv-order")  # the keys stand where the values should
ONE_BLOCK = ("wrong-tensor", "layer-repeated", "layer-order")  # every block computes with the tensors of one
OTHER_NORM = ("norms-swapped", "wrong-tensor")
ONE_BIAS = ("missing-bias", "not-loaded")  # the bias of one block stays zero
HEAD_SIZE = ("scale-twice", "scale-wrong")  # the root left out: the factor applied twice

Fault = tuple[tuple[str, ...], str, str]  # ids, place, line
MODULES: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "scale from n_embd": (("scale-by-width",), "h.*.attn", "scale"),
    "head size without its root": (HEAD_SIZE, "h.*.attn", "scale"),
    "no mask": (("mask-missing",), "h.*.attn", "mask"),
    "triu k=0": (("mask-strict",), "h.*.attn", "mask"),
    "scores times tril": (("mask-multiplied",), "h.*.attn", "mask"),
    "softmax axis 0": (("softmax-axis",), "h.*.attn", "softmax"),
    "softmax over the matrix": (("softmax-axis",), "h.*.attn", "softmax"),
    "reshape to heads": (("head-layout",), "h.*.attn", "heads"),
    "heads joined by a reshape": (("head-layout",), "h.*.attn", "merge"),
    "k q v": (("qkv-order",), "h.*.attn.c_attn", "qkv"),
    "heads first, then q k v": (QKV_OR_HEADS, "h.*.attn.c_attn", "qkv"),
    "weights times k": (KEYS_MIXED, "h.*.attn", "mix"),
    "c_attn without bias": (("missing-bias",), "h.*.attn.c_attn", "c_attn"),
    "last block's c_attn bias not copied": (ONE_BIAS, "h.-1.attn.c_attn", "load"),
    "c_proj turned": (("transposed",), "h.*.attn.c_proj", "c_proj"),
    "no attention skip": (("residual-missing",), "h.*.attn", "skip"),
    "norm in place": (("residual-from-normed",), "h.*", "norm's copy"),
    "branches over the root of layers": (("residual-scaled",), "h.*", "skip"),
    "norms after the sums": (("post-norm",), "h.*", "skip"),
    "mlp without norm": (("norm-missing",), "h.*.ln_2", "skip 2"),
    "0.44715": (("gelu-variant",), "h.*.mlp", "act"),
    "mean over tokens": (("layernorm-axis",), "ln", "norm"),
    "mean over everything": (("layernorm-axis",), "ln", "norm"),
    "no gamma and beta": (("layernorm-without-affine",), "ln", "norm's gain"),
    "no final norm": (("final-norm-missing",), "ln_f", "final"),
    "final norm twice": (("extra-norm",), "ln_f", "final"),
    "embedding times root of width": (("embedding-scaled",), "wte", "embedding"),
    "wpe from 1": (("position-offset",), "wpe", "position"),
    "sum written into wpe": (("batch-dependent", "not-deterministic"), "wpe", "position"),
    "one block short": (("layer-missing",), "h.-1", "layers"),
    "late binding": (ONE_BLOCK, "h.*", "layers"),
    "half floats": (("reduced-precision",), "everywhere", "dtype"),
    "dropout left on": (("dropout-active", "not-deterministic"), "h.*", "dropout"),
}
KVCACHE: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "root of dim": (("scale-by-width",), "h.*.attn", "scale"),
    "t < pos": (("mask-strict",), "h.*.attn", "keys"),
    "t <= pos + 1": (("mask-off-by-one", "cache-inconsistent"), "h.*.attn", "keys"),
    "t < context": (("mask-missing", "mask-multiplied", "cache-inconsistent"), "h.*.attn", "keys"),
    "one cache for all layers": (("cache-inconsistent",), "h.*.attn", "cache"),
    "layers' caches overlap": (("cache-inconsistent",), "h.*.attn", "cache"),
    "k stored as v": (KEYS_MIXED, "h.*.attn", "store"),
    "q v k": (("qkv-order",), "h.*.attn.c_attn", "thirds"),
    "thirds inside heads": (QKV_OR_HEADS, "h.*.attn.c_attn", "thirds"),
    "heads strided": (("head-layout",), "h.*.attn", "heads"),
    "matmul wants (out, in)": (FLAT, "everywhere", "matmul"),
    "c_proj read as (out, in)": (("transposed",), "h.*.attn.c_proj", "c_proj"),
    "c_attn without bias": (("missing-bias",), "h.*.attn.c_attn", "c_attn"),
    "pointer never moved": (ONE_BLOCK, "h.*", "pointers"),
    "b before g": (("wrong-tensor",), "ln", "file's norms"),
    "ln_2 before ln_1": (OTHER_NORM, "h.*", "file's norms"),
    "last ln_2 bias not read": (ONE_BIAS, "h.-1.ln_2", "file's ln_2"),
    "second block's c_proj is the first's": (("wrong-tensor",), "h.1.attn.c_proj", "pointers"),
    "rmsnorm": (("rmsnorm",), "ln", "norm"),
    "norm without bias": (("missing-bias",), "ln", "norm's gain"),
    "attention overwrites x": (("residual-missing",), "h.*.attn", "skip"),
    "skip from xb": (("residual-from-normed",), "h.*.attn", "skip"),
    "mlp takes x": (("norm-missing",), "h.*.ln_2", "mlp's input"),
    "no last norm": (("final-norm-missing",), "ln_f", "final"),
    "last norm is the last ln_2": (("wrong-tensor", "norms-swapped"), "ln_f", "final"),
    "silu": (("gelu-variant",), "h.*.mlp", "act"),
    "pos + 1": (("position-offset",), "wpe", "position"),
    "no wpe": (("position-missing",), "wpe", "position"),
    "rope kept": (("rotary-positions",), "h.*.attn", "rope"),
    "l < n_layers - 1": (("layer-missing",), "h.-1", "layers"),
    "bfloat16 file": (("reduced-precision",), "everywhere", "file's numbers"),
    "padded vocabulary": (("padded-vocab",), "head", "head"),
    "softmax in place": (("logits-softmaxed",), "head", "sampling"),
}
PREFILL: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "times the root": (("scale-wrong",), "h.*.attn", "scale"),
    "prompt without mask": (("mask-missing",), "h.*.attn", "mask"),
    "masked scores are 0": (("mask-multiplied",), "h.*.attn", "mask"),
    "j > i + 1": (("mask-off-by-one",), "h.*.attn", "mask"),
    "step before its own key": (("mask-strict", "cache-inconsistent"), "h.*.attn", "append"),
    "fill shares one cache": (("cache-inconsistent",), "h.*.attn", "cache"),
    "row not in the cache's offset": (("batch-dependent", "cache-inconsistent"), "h.*.attn", "cache offset"),
    "steps count from 0": (("cache-inconsistent", "position-offset"), "wpe", "position"),
    "wpe from 1": (("position-offset",), "wpe", "position"),
    "no wpe": (("position-missing",), "wpe", "position"),
    "heads without transpose": (("head-layout",), "h.*.attn", "heads"),
    "thirds inside heads": (QKV_OR_HEADS, "h.*.attn.c_attn", "thirds"),
    "v before k": (("qkv-order",), "h.*.attn.c_attn", "thirds"),
    "c_attn as linear": (FLAT, "h.*.attn.c_attn", "c_attn"),
    "c_proj as linear": (("transposed",), "h.*.attn.c_proj", "c_proj"),
    "mlp's c_proj as linear": (FLAT, "h.*.mlp.c_proj", "down"),
    "no attention projection": (("output-projection-missing",), "h.*.attn.c_proj", "c_proj"),
    "no biases": (("missing-bias",), "everywhere", "bias"),
    "c_fc without bias": (("missing-bias",), "h.*.mlp.c_fc", "fc"),
    "first block's ln_2 keeps its defaults": (("not-loaded", "layernorm-without-affine"), "h.0.ln_2", "load"),
    "n - 1": (("layernorm-unbiased-variance",), "ln", "norm"),
    "eps 1e-3": (("layernorm-eps",), "ln", "norm's eps"),
    "ln_1 for both": (OTHER_NORM, "h.*.ln_2", "skip 2"),
    "norms after the sums": (("post-norm",), "h.*", "skip"),
    "mlp beside attention": (("parallel-block",), "h.*", "skip 2"),
    "norm writes into the stream": (("residual-from-normed",), "h.*.attn", "norm's copy"),
    "no mlp skip": (("residual-missing",), "h.*.mlp", "skip 2"),
    "relu": (("gelu-variant",), "h.*.mlp", "act"),
    "sigmoid gelu": (("gelu-variant",), "h.*.mlp", "act"),
    "blocks popped": (("layer-order",), "h.*", "layers"),
    "first block skipped": (("layer-missing",), "h.0", "layers"),
    "no ln_f": (("final-norm-missing",), "ln_f", "final"),
    "temperature": (("logits-scaled",), "head", "head"),
}
LISTS = {"modules": MODULES, "kvcache": KVCACHE, "prefill": PREFILL}
FAULTS = {program: {fault: ids for fault, (ids, _, _) in faults.items()} for program, faults in LISTS.items()}
SHAPES = (Shape(3, 48, 4, 211, 30, 12, 161), Shape(2, 40, 5, 233, 28, 13, 162), Shape(4, 36, 3, 197, 32, 11, 163))
ONE_A_BLOCK = {
    "modules": ("result", "attended", "mixed", "ln_2", "qkv", "fed"),
    "kvcache": ("result", "middle", "k", "ln_1", "fed", "act"),
    "prefill": ("result", "mixed", "middle", "up", "attended", "qkv"),
}
NOT_DUMPED = (  # from one dump to the next, an author leaves out these
    (),
    ("qkv", "embedded"),
    ("weights", "attended", "mean", "rstd"),
    ("scores", "q", "k", "v", "fed"),
    ("ln_2", "up", "middle", "final", "positions", "position"),
)
PAIRS = {program: pairs(faults, f"10 {program}") for program, faults in LISTS.items()}
KINDS = ("ln_1", "ln_2", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


class TenthBed(FileBed):
    """The models and programs of this set. The C program reads ``weights.bin``: two sizes, then the tensors kind by kind."""

    TABLES = 0.5
    NUMPY = "modules", modules.run
    COMPILED = "kvcache", Path(__file__).with_name("kvcache.c"), ("cc", "-O1", "-std=gnu11")
    NODE = "prefill", Path(__file__).with_name("prefill.mjs")
    ONE_A_BLOCK = ONE_A_BLOCK
    NOT_DUMPED = NOT_DUMPED

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        layers = range(shape.layers)
        names = ["wte.weight", "wpe.weight"]
        names += [f"h.{n}.{kind}.{part}" for kind in KINDS for part in ("weight", "bias") for n in layers]
        names += ["ln_f.weight", "ln_f.bias"]
        with (folder / "weights.bin").open("wb") as file:
            file.write(np.array([shape.width, shape.vocab], "<i4").tobytes())
            for name in names:
                file.write(self.weights[name].astype("<f4").tobytes())

    def weights_file(self, program: str) -> Path:
        return self.folder / "weights.bin" if program == self.COMPILED[0] else super().weights_file(program)


missing = TenthBed.missing
