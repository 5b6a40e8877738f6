"""A thirteenth set: ordinary mistakes of GPT-2 ports in NumPy, C and JavaScript, by an author who knew nothing of the engine.

``hooked`` is NumPy with einsum, a matrix for each head and the weights of all layers stacked, in the manner of TransformerLens;
``ops`` is C in the manner of ggml: tensors with sizes and strides, views of them, a memory of keys, a prompt in chunks;
``closures`` is node in functions that return functions: a text is an array of rows, a block a function of it.
Each fault has the ids of the right answer (several where they are the same computation), its place, and the line it changes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..bed import Shape
from ..files import FileBed, pairs
from . import hooked

QKV_OR_HEADS = ("qkv-order", "head-layout")  # q, k, v cut inside each head: one permutation of c_attn's columns
FLAT = ("transposed", "not-loaded")  # a flat matrix read by the other shape: a turned matrix by mistake, neither by its values
KEYS_MIXED = ("value-projection-wrong", "qkv-order")  # the keys stand where the values should
ONE_BLOCK = ("layer-repeated", "wrong-tensor")  # every block computes with the tensors of one
OTHER_NORM = ("norms-swapped", "wrong-tensor")
HEAD_SIZE = ("scale-twice", "scale-wrong")  # the factor applied twice, or the root left out

Fault = tuple[tuple[str, ...], str, str]  # ids, place, line
HOOKED: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "root of d_model": (("scale-by-width",), "h.*.attn", "scale"),
    "divided by d_head": (HEAD_SIZE, "h.*.attn", "scale"),
    "no mask": (("mask-missing",), "h.*.attn", "mask"),
    "triu without k=1": (("mask-strict",), "h.*.attn", "mask"),
    "IGNORE is -1e-5": (("mask-multiplied",), "h.*.attn", "mask"),
    "softmax over queries": (("softmax-axis",), "h.*.attn", "softmax"),
    "scores as (key, query)": (("qkv-order",), "h.*.attn", "scores"),
    "W_Q for the keys": (("qkv-order",), "h.*.attn.c_attn", "key"),
    "pattern with k": (KEYS_MIXED, "h.*.attn", "mix"),
    "c_attn as (head, third, size)": (QKV_OR_HEADS, "h.*.attn.c_attn", "c_attn's axes"),
    "c_attn as (third, size, head)": (("head-layout",), "h.*.attn.c_attn", "c_attn's axes"),
    "c_attn reshaped as torch's": (FLAT, "h.*.attn.c_attn", "c_attn's axes"),
    "W_O as (size, head)": (("head-layout",), "h.*.attn.c_proj", "W_O's axes"),
    "W_O turned": (("transposed",), "h.*.attn.c_proj", "W_O's axes"),
    "no b_Q, b_K, b_V": (("missing-bias",), "h.*.attn.c_attn", "heads' biases"),
    "no b_O": (("missing-bias",), "h.*.attn.c_proj", "b_O"),
    "relu": (("gelu-variant",), "h.*.mlp", "act"),
    "ddof=1": (("layernorm-unbiased-variance",), "ln", "norm"),
    "norm without w and b": (("layernorm-without-affine",), "ln", "norm"),
    "mean and var without axis": (("layernorm-axis", "batch-dependent"), "ln", "norm"),
    "ln2 loaded from ln_1": (OTHER_NORM, "h.*.ln_2", "ln2's names"),
    "h.0 in each name": (ONE_BLOCK, "h.*", "names"),
    "W_E times sqrt(d_model)": (("embedding-scaled",), "wte", "embedding"),
    "no W_pos": (("position-missing",), "wpe", "position"),
    "positions from 1": (("position-offset",), "wpe", "position"),
    "sums with the normalized": (("residual-from-normed",), "h.*", "sums"),
    "resid_post is mlp_out": (("residual-missing",), "h.*.mlp", "sums"),
    "ln2 reads resid_pre": (("parallel-block",), "h.*", "ln2's input"),
    "mlp reads resid_mid": (("norm-missing",), "h.*.ln_2", "mlp's input"),
    "no ln_final": (("final-norm-missing",), "ln_f", "final"),
    "W_U at random": (("untied-head", "not-loaded"), "head", "unembedding"),
}
OPS: dict[str, Fault] = {
    "KQ not scaled": (("scale-missing",), "h.*.attn", "scale"),
    "root of n_embd": (("scale-by-width",), "h.*.attn", "scale"),
    "soft_max scales again": (HEAD_SIZE, "h.*.attn", "softmax"),
    "no diag_mask": (("mask-missing",), "h.*.attn", "mask"),
    "diag_mask_zero": (("mask-multiplied",), "h.*.attn", "mask"),
    "diag_mask without n_past": (("cache-inconsistent",), "h.*.attn", "mask"),
    "positions without n_past": (("cache-inconsistent", "position-offset"), "wpe", "position"),
    "no wpe": (("position-missing",), "wpe", "position"),
    "rope kept": (("rotary-positions",), "h.*.attn", "rope"),
    "memory without il": (("cache-inconsistent",), "h.*.attn", "memory's place"),
    "n_past without n_embd": (("cache-inconsistent",), "h.*.attn", "memory's place"),
    "V from memory_k": (KEYS_MIXED, "h.*.attn", "V"),
    "heads not permuted": (("head-layout",), "h.*.attn", "heads"),
    "KQV not permuted": (("head-layout",), "h.*.attn", "merge"),
    "K and V views exchanged": (("qkv-order",), "h.*.attn.c_attn", "views"),
    "views inside each head": (QKV_OR_HEADS, "h.*.attn.c_attn", "views"),
    "c_attn without bias": (("missing-bias",), "h.*.attn.c_attn", "c_attn's bias"),
    "mlp c_proj without bias": (("missing-bias",), "h.*.mlp.c_proj", "mlp c_proj's bias"),
    "attn c_proj not turned": (("transposed",), "h.*.attn.c_proj", "file's matrices"),
    "no matrix turned": (FLAT, "everywhere", "file's matrices"),
    "rms_norm": (("rmsnorm",), "ln", "norm"),
    "norm without g and b": (("layernorm-without-affine",), "ln", "norm's weights"),
    "norm in place": (("residual-from-normed",), "h.*", "norm's output"),
    "ln_1_g and ln_1_b again": (OTHER_NORM, "h.*.ln_2", "second norm"),
    "silu": (("gelu-variant",), "h.*.mlp", "act"),
    "attention without its add": (("residual-missing",), "h.*.attn", "first sum"),
    "second norm of inpL": (("parallel-block",), "h.*", "second norm's input"),
    "layers[0]": (ONE_BLOCK, "h.*", "layer"),
    "no ln_f": (("final-norm-missing",), "ln_f", "final"),
    "n_vocab in blocks of 32": (("padded-vocab",), "head", "file's n_vocab"),
    "temperature in place": (("logits-scaled",), "head", "sampler"),
    "soft_max in place": (("logits-softmaxed",), "head", "sampler"),
}
CLOSURES: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "root of width": (("scale-by-width",), "h.*.attn", "scale"),
    "times the root": (("scale-wrong",), "h.*.attn", "scale"),
    "no mask": (("mask-missing",), "h.*.attn", "mask"),
    "j >= i": (("mask-strict",), "h.*.attn", "mask"),
    "j > i + 1": (("mask-off-by-one",), "h.*.attn", "mask"),
    "Number.MIN_VALUE": (("mask-multiplied",), "h.*.attn", "mask"),
    "softmax down the columns": (("softmax-axis",), "h.*.attn", "softmax"),
    "[k, q, v]": (("qkv-order",), "h.*.attn.c_attn", "split"),
    "q, k, v inside each head": (QKV_OR_HEADS, "h.*.attn.c_attn", "split"),
    "keys and values memoised": (("batch-dependent",), "h.*.attn", "memo"),
    "heads joined unit by unit": (("head-layout",), "h.*.attn", "join"),
    "no c_proj": (("output-projection-missing",), "h.*.attn.c_proj", "projection"),
    "c_proj turned": (("transposed",), "h.*.attn.c_proj", "c_proj"),
    "linear as torch's": (FLAT, "everywhere", "linear"),
    "linear without bias": (("missing-bias",), "everywhere", "linear's bias"),
    "Math.sqrt(2) / Math.PI": (("gelu-variant",), "h.*.mlp", "act"),
    "x ^ 3": (("gelu-variant",), "h.*.mlp", "act"),
    "variance by n - 1": (("layernorm-unbiased-variance",), "ln", "norm"),
    "norm without shift": (("missing-bias",), "ln", "norm's shift"),
    "norm writes into its rows": (("residual-from-normed",), "h.*", "norm's rows"),
    "attention without ln_1": (("norm-missing",), "h.*.ln_1", "block"),
    "norm round the sum": (("post-norm",), "h.*", "block"),
    "mlp without residual": (("residual-missing",), "h.*.mlp", "block"),
    "var in the loop": (ONE_BLOCK, "h.*", "blocks"),
    "compose for pipe": (("layer-order",), "h.*", "order"),
    "layers without + 1": (("layer-missing",), "h.-1", "layers"),
    "no positions": (("position-missing",), "wpe", "position"),
    "sines": (("position-sinusoidal",), "wpe", "position"),
    "counter not reset": (("position-offset", "batch-dependent"), "wpe", "position"),
    "no final norm": (("final-norm-missing",), "ln_f", "final"),
    "softmax at the end": (("logits-softmaxed",), "head", "head"),
}
LISTS = {"hooked": HOOKED, "ops": OPS, "closures": CLOSURES}
FAULTS = {program: {fault: ids for fault, (ids, _, _) in faults.items()} for program, faults in LISTS.items()}
SHAPES = (Shape(3, 40, 5, 173, 31, 13, 191), Shape(2, 42, 3, 239, 36, 12, 192), Shape(4, 32, 4, 197, 27, 11, 193))
ONE_A_BLOCK = {
    "hooked": ("resid_post", "attn_out", "resid_mid", "mlp_out", "z", "post"),
    "ops": ("inpL", "attn_proj", "norm_2", "act", "inpFF", "Kcur"),
    "closures": ("out", "attended", "qkv", "middle", "up", "joined"),
}
NOT_DUMPED = (  # from one dump to the next, an author leaves out these, by the names of each program
    (),
    ("q", "k", "v", "c_attn", "Qcur", "Kcur", "Vcur", "qkv", "embed", "pos_embed", "inp", "embedded"),
    ("attn_scores", "KQ_masked", "scores", "pre", "fc", "up", "ln1.scale", "ln2.scale"),
    ("pattern", "KQ_soft_max", "weights", "z", "KQV_merged", "joined", "ln_final.normalized", "result_norm", "normed"),
    ("ln1.normalized", "ln2.normalized", "norm_1", "norm_2", "norm1", "norm2", "resid_mid", "inpFF", "middle", "ffn_out", "down"),
)
PAIRS = {program: pairs(faults, f"13 {program}") for program, faults in LISTS.items()}
KINDS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


class ThirteenthBed(FileBed):
    """The models and programs of this set. The C program reads ``weights.bin``: two sizes, then the tensors in their order."""

    TABLES = 0.5
    NUMPY = "hooked", hooked.run
    COMPILED = "ops", Path(__file__).with_name("ops.c"), ("cc", "-O1", "-std=gnu11")
    NODE = "closures", Path(__file__).with_name("closures.mjs")
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


missing = ThirteenthBed.missing
