"""A twelfth set: ordinary mistakes of GPT-2 ports in NumPy, C and JavaScript, by an author who knew nothing of the engine.

``lecture`` is NumPy in classes as in lectures and books: a list of heads in each block, matrices (out, in) as in torch;
``runner`` is C in the manner of llama2.c: one token of one row at a time, with caches of keys and values;
``kernels`` is node as for WebGPU: one flat memory, and kernels that are given places in it.
Each fault has the ids of the right answer (several where they are the same computation), its place, and the line it changes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..bed import Shape
from ..files import FileBed, pairs
from . import lecture

QKV_OR_HEADS = ("qkv-order", "head-layout")  # q, k, v cut inside each head: one permutation of c_attn's columns
FLAT = ("transposed", "not-loaded")  # a flat matrix read by the other shape: a turned matrix by mistake, neither by its values
KEYS_MIXED = ("value-projection-wrong", "qkv-order")  # the keys stand where the values should
ONE_BLOCK = ("layer-repeated", "wrong-tensor")  # every block computes with the tensors of one
ONE_HEAD = ("qkv-order", "not-loaded")  # every head computes with the columns of one
OTHER_NORM = ("norms-swapped", "wrong-tensor")
HEAD_SIZE = ("scale-twice", "scale-wrong")  # the factor applied twice, or the root left out

Fault = tuple[tuple[str, ...], str, str]  # ids, place, line
LECTURE: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "C ** -0.5": (("scale-by-width",), "h.*.attn", "scale"),
    "head_size ** 0.5": (("scale-wrong",), "h.*.attn", "scale"),
    "no mask": (("mask-missing",), "h.*.attn", "mask"),
    "triu with k=0": (("mask-strict",), "h.*.attn", "mask"),
    "scores times tril": (("mask-multiplied",), "h.*.attn", "mask"),
    "softmax over axis 1": (("softmax-axis",), "h.*.attn", "softmax"),
    "wei @ k": (KEYS_MIXED, "h.*.attn", "mix"),
    "heads stacked on the last axis": (("head-layout",), "h.*.attn", "concatenation"),
    "no output projection": (("output-projection-missing",), "h.*.attn.c_proj", "proj"),
    "key, query, value": (("qkv-order",), "h.*.attn.c_attn", "split"),
    "thirds inside each head": (QKV_OR_HEADS, "h.*.attn.c_attn", "split"),
    "q_w, k_w, v_w not turned": (("transposed",), "h.*.attn.c_attn", "heads' weights"),
    "heads without bias": (("missing-bias",), "h.*.attn.c_attn", "heads' biases"),
    "proj not turned": (("transposed",), "h.*.attn.c_proj", "proj's weight"),
    "one Head for all": (ONE_HEAD, "h.*.attn.c_attn", "list of heads"),
    "one Block for all": (ONE_BLOCK, "h.*", "list of blocks"),
    "relu": (("gelu-variant",), "h.*.mlp", "act"),
    "ddof=1": (("layernorm-unbiased-variance",), "ln", "norm"),
    "norm over axis 1": (("layernorm-axis",), "ln", "norm"),
    "scale and shift not assigned": (("layernorm-without-affine", "not-loaded"), "ln", "norm's weights"),
    "norm1 twice": (OTHER_NORM, "h.*.ln_2", "second norm"),
    "shortcut after the norm": (("residual-from-normed",), "h.*", "block"),
    "attention without shortcut": (("residual-missing",), "h.*.attn", "block"),
    "norms after the sums": (("post-norm",), "h.*", "block"),
    "no final norm": (("final-norm-missing",), "ln_f", "final"),
    "no positions": (("position-missing",), "wpe", "position"),
    "sines": (("position-sinusoidal",), "wpe", "position"),
    "embedding times sqrt(C)": (("embedding-scaled",), "wte", "embedding"),
    "out_head at random": (("untied-head", "not-loaded"), "head", "head"),
    "out_head with a bias": (("extra-bias",), "head", "head's bias"),
    "dropout stays on": (("dropout-active",), "everywhere", "eval"),
}
RUNNER: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "sqrt(dim)": (("scale-by-width",), "h.*.attn", "scale"),
    "score / head_size": (HEAD_SIZE, "h.*.attn", "scale"),
    "t < pos": (("mask-strict",), "h.*.attn", "keys"),
    "caches without loff": (("cache-inconsistent",), "h.*.attn", "loff"),
    "loff without seq_len": (("cache-inconsistent",), "h.*.attn", "loff"),
    "keys without h * head_size": (("qkv-order",), "h.*.attn.c_attn", "key"),
    "values from key_cache": (KEYS_MIXED, "h.*.attn", "value"),
    "k at 2 * dim": (("qkv-order",), "h.*.attn.c_attn", "file's thirds"),
    "q, k, v inside each head": (QKV_OR_HEADS, "h.*.attn.c_attn", "file's thirds"),
    "rope kept": (("rotary-positions",), "h.*.attn", "rope"),
    "pos + 1": (("position-offset",), "wpe", "position"),
    "no wpe": (("position-missing",), "wpe", "position"),
    "rmsnorm kept": (("rmsnorm",), "ln", "norm"),
    "norm without bias": (("missing-bias",), "ln", "norm's bias"),
    "norm's weights without l * dim": (("wrong-tensor", "norms-swapped"), "h.*.ln_1 and ln_2", "norms' weights"),
    "norm into x": (("residual-from-normed",), "h.*", "norm's output"),
    "no final norm": (("final-norm-missing",), "ln_f", "final"),
    "matmul without bias": (("missing-bias",), "everywhere", "matmul"),
    "no matrix turned": (FLAT, "everywhere", "file's matrices"),
    "wo not turned": (("transposed",), "h.*.attn.c_proj", "file's wo"),
    "w1 in steps of dim * dim": (("not-loaded", "wrong-tensor"), "h.*.mlp.c_fc", "w1"),
    "b2 without l * dim": (("wrong-tensor",), "h.*.mlp.c_proj", "b2"),
    "x += xb": (("output-projection-missing",), "h.*.attn.c_proj", "first sum"),
    "x = ffn": (("residual-missing",), "h.*.mlp", "second sum"),
    "w1 takes x": (("norm-missing",), "h.*.ln_2", "w1's input"),
    "silu kept": (("gelu-variant",), "h.*.mlp", "act"),
    "M_2_PI without sqrt": (("gelu-variant",), "h.*.mlp", "act"),
    "temperature in place": (("logits-scaled",), "head", "sampler"),
    "softmax in place": (("logits-softmaxed",), "head", "sampler"),
}
KERNELS: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "root of nEmbd": (("scale-by-width",), "h.*.attn", "scale"),
    "root of nHead": (("scale-wrong",), "h.*.attn", "scale"),
    "scaled in both kernels": (HEAD_SIZE, "h.*.attn", "softmax's scale"),
    "no mask": (("mask-missing",), "h.*.attn", "mask"),
    "col >= row": (("mask-strict",), "h.*.attn", "mask"),
    "masked with 0": (("mask-multiplied",), "h.*.attn", "mask"),
    "softmax by columns": (("softmax-axis",), "h.*.attn", "softmax"),
    "rows as one text": (("batch-dependent",), "h.*.attn", "attention's sizes"),
    "k's place left at 0": (("qkv-order",), "h.*.attn.c_attn", "qkv places"),
    "heads in steps of 3 sizes": (QKV_OR_HEADS, "h.*.attn.c_attn", "qkv places"),
    "unit times nHead": (("head-layout",), "h.*.attn", "unit"),
    "mix as (heads, tokens, size)": (("head-layout",), "h.*.attn", "mix"),
    "matrices as (out, in)": (FLAT, "everywhere", "matmul"),
    "c_proj as (out, in)": (("transposed",), "h.*.attn.c_proj", "c_proj"),
    "c_fc's bias not bound": (("missing-bias",), "h.*.mlp.c_fc", "c_fc"),
    "sigmoid gelu": (("gelu-variant",), "h.*.mlp", "gelu"),
    "gelu not dispatched": (("gelu-variant",), "h.*.mlp", "gelu's dispatch"),
    "norm down the columns": (("layernorm-axis",), "ln", "norm"),
    "gain and shift not dispatched": (("layernorm-without-affine",), "ln", "norm's second pass"),
    "gain and shift exchanged": (("wrong-tensor",), "ln", "norm's bindings"),
    "sum reads the normed": (("residual-from-normed",), "h.*", "sums' inputs"),
    "mlp without its sum": (("residual-missing",), "h.*.mlp", "second sum"),
    "attention summed twice": (("residual-scaled",), "h.*.attn", "first sum"),
    "c_fc reads the stream": (("norm-missing",), "h.*.ln_2", "c_fc's input"),
    "ln_2 reads the block's input": (("parallel-block",), "h.*", "ln_2's input"),
    "no ln_f": (("final-norm-missing",), "ln_f", "final"),
    "no positions": (("position-missing",), "wpe", "position"),
    "position is the row": (("position-offset", "batch-dependent"), "wpe", "position"),
    "one uniform for all layers": (ONE_BLOCK, "h.*", "uniforms"),
    "ln_f reads the other buffer": (("layer-missing",), "h.-1", "final's input"),
    "logits of whole tiles": (("padded-vocab",), "head", "head"),
}
LISTS = {"lecture": LECTURE, "runner": RUNNER, "kernels": KERNELS}
FAULTS = {program: {fault: ids for fault, (ids, _, _) in faults.items()} for program, faults in LISTS.items()}
SHAPES = (Shape(2, 40, 4, 211, 34, 12, 181), Shape(3, 48, 6, 187, 30, 13, 182), Shape(4, 36, 3, 229, 28, 11, 183))
ONE_A_BLOCK = {
    "lecture": ("block", "att", "norm1", "gelu", "shortcut", "query"),
    "runner": ("x", "xb2", "xb", "hb", "x att", "k"),
    "kernels": ("blockOut", "attnOut", "qkv", "hidden", "mid", "mix"),
}
NOT_DUMPED = (  # from one dump to the next, an author leaves out these, by the names of each program
    (),
    ("query", "key", "value", "q", "k", "v", "qkv", "emb", "embed"),
    ("scores", "score", "fc1", "hb", "hidden"),
    ("wei", "att", "probs", "heads", "xb att", "mix", "final", "normF"),
    ("norm1", "norm2", "xb", "xb ffn", "shortcut", "x att", "mid", "ff", "xb ffn out", "mlpOut"),
)
PAIRS = {program: pairs(faults, f"12 {program}") for program, faults in LISTS.items()}
KINDS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


class TwelfthBed(FileBed):
    """The models and programs of this set. The C program reads ``weights.bin``: two sizes, then the tensors in their order."""

    TABLES = 0.5
    NUMPY = "lecture", lecture.run
    COMPILED = "runner", Path(__file__).with_name("runner.c"), ("cc", "-O1", "-std=gnu11")
    NODE = "kernels", Path(__file__).with_name("kernels.mjs")
    ONE_A_BLOCK = ONE_A_BLOCK
    NOT_DUMPED = NOT_DUMPED

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        names = ["wte.weight", "wpe.weight"]
        names += [f"h.{n}.{kind}.{part}" for n in range(shape.layers) for kind in KINDS for part in ("weight", "bias")]
        names += ["ln_f.weight", "ln_f.bias"]
        with (folder / "weights.bin").open("wb") as file:
            file.write(np.array([shape.width, shape.vocab], "<i4").tobytes())
            for name in names:
                file.write(self.weights[name].astype("<f4").tobytes())

    def weights_file(self, program: str) -> Path:
        return self.folder / "weights.bin" if program == self.COMPILED[0] else super().weights_file(program)


missing = TwelfthBed.missing
