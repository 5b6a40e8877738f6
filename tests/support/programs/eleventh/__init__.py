"""An eleventh set: ordinary mistakes of GPT-2 ports in NumPy, C and JavaScript, by an author who knew nothing of the engine.

``functional`` is NumPy in pure functions, a batch at once, heads by reshape and transpose; ``batch`` is C in the manner of
llm.c: all rows and tokens at once, a buffer of activations, weights stacked by kind; ``stream`` is node that generates: the
prompt, then one token at a time with growing lists of past keys and values.
Each fault has the ids of the right answer (several where they are the same computation), its place, and the line it changes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..bed import Shape
from ..files import FileBed, pairs
from . import functional

QKV_OR_HEADS = ("qkv-order", "head-layout")  # q, k, v cut inside each head: one permutation of c_attn's columns
FLAT = ("transposed", "not-loaded")  # a flat matrix read by the other shape: a turned matrix by mistake, neither by its values
KEYS_MIXED = ("value-projection-wrong", "qkv-order")  # the keys stand where the values should
ONE_BLOCK = ("wrong-tensor", "layer-repeated")  # every block computes with the tensors of one
OTHER_NORM = ("norms-swapped", "wrong-tensor")
HEAD_SIZE = ("scale-twice", "scale-wrong")  # the factor applied twice, or the root left out
STEP_POSITION = ("cache-inconsistent", "position-offset")  # the prompt has its positions, the steps have others

Fault = tuple[tuple[str, ...], str, str]  # ids, place, line
FUNCTIONAL: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "root of the width": (("scale-by-width",), "h.*.attn", "scale"),
    "q scaled and scores scaled": (HEAD_SIZE, "h.*.attn", "scale"),
    "no mask": (("mask-missing",), "h.*.attn", "mask"),
    "mask as a factor": (("mask-multiplied",), "h.*.attn", "mask"),
    "tri with k=1": (("mask-off-by-one",), "h.*.attn", "mask"),
    "softmax over queries": (("softmax-axis",), "h.*.attn", "softmax"),
    "softmax without axis": (("softmax-axis",), "h.*.attn", "softmax"),
    "heads without transpose": (("head-layout",), "h.*.attn", "heads"),
    "head size before heads": (("head-layout",), "h.*.attn", "heads"),
    "merge without transpose": (("head-layout",), "h.*.attn", "merge"),
    "heads before three": (QKV_OR_HEADS, "h.*.attn.c_attn", "qkv"),
    "k, q, v": (("qkv-order",), "h.*.attn.c_attn", "qkv"),
    "no output projection": (("output-projection-missing",), "h.*.attn.c_proj", "c_proj"),
    "c_proj as (out, in)": (("transposed",), "h.*.attn.c_proj", "c_proj"),
    "linear without bias": (("missing-bias",), "everywhere", "linear"),
    "one dict for all blocks": (ONE_BLOCK, "h.*", "load"),
    "gelu without its root": (("gelu-variant",), "h.*.mlp", "act"),
    "relu": (("gelu-variant",), "h.*.mlp", "act"),
    "norm over axis 1": (("layernorm-axis",), "ln", "norm"),
    "no gain and shift": (("layernorm-without-affine",), "ln", "norm's gain"),
    "x is the normed x": (("residual-from-normed",), "h.*", "block"),
    "norms after the sums": (("post-norm",), "h.*", "block"),
    "ffn without its sum": (("residual-missing",), "h.*.mlp", "block"),
    "no ln_f": (("final-norm-missing",), "ln_f", "final"),
    "no positions": (("position-missing",), "wpe", "position"),
    "head of its own, at random": (("untied-head", "not-loaded"), "head", "head"),
    "probabilities returned": (("logits-softmaxed",), "head", "return"),
}
BATCH: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "scale from C": (("scale-by-width",), "h.*.attn", "scale"),
    "1 / hs": (HEAD_SIZE, "h.*.attn", "scale"),
    "t2 < T": (("mask-missing",), "h.*.attn", "keys"),
    "t2 < t": (("mask-strict",), "h.*.attn", "keys"),
    "key at 2C, value at C": (("qkv-order",), "h.*.attn.c_attn", "qkv offsets"),
    "thirds inside heads": (QKV_OR_HEADS, "h.*.attn.c_attn", "qkv offsets"),
    "key without + C": (("qkv-order",), "h.*.attn.c_attn", "qkv offsets"),
    "value at C": (KEYS_MIXED, "h.*.attn", "qkv offsets"),
    "keys without b * T": (("batch-dependent",), "h.*.attn", "keys' row"),
    "atty by heads": (("head-layout",), "h.*.attn", "merge"),
    "qkvw in steps of C * C": (("not-loaded", "wrong-tensor"), "h.*.attn.c_attn", "qkvw"),
    "ln2 without l's offset": (("wrong-tensor", "norms-swapped"), "h.*.ln_2", "ln2's weights"),
    "fcprojb before attprojb": (("wrong-tensor",), "h.*", "file's biases"),
    "fcproj without bias": (("missing-bias",), "h.*.mlp.c_proj", "fcproj"),
    "no matrix turned": (FLAT, "everywhere", "file's matrices"),
    "attprojw not turned": (("transposed",), "h.*.attn.c_proj", "file's attprojw"),
    "fcproj takes fch": (("gelu-variant",), "h.*.mlp", "fcproj's input"),
    "every layer takes encoded": (("layer-missing",), "h.0 to h.-2", "residual"),
    "ln2 takes residual": (("parallel-block",), "h.*", "ln2's input"),
    "residual2 is attproj": (("residual-missing",), "h.*.attn", "residual2"),
    "ln2 with ln1's weights": (OTHER_NORM, "h.*.ln_2", "ln2's weights"),
    "fch takes residual2": (("norm-missing",), "h.*.ln_2", "fch's input"),
    "no lnf": (("final-norm-missing",), "ln_f", "final"),
    "lnf takes layer 0's residual3": (("layer-missing",), "h.1 to h.-1", "final's input"),
    "wpe at b * T + t": (("position-offset", "batch-dependent"), "wpe", "position"),
    "logits of Vp": (("padded-vocab",), "head", "head"),
    "probs": (("logits-softmaxed",), "head", "probs"),
}
STREAM: dict[str, Fault] = {
    "no scale": (("scale-missing",), "h.*.attn", "scale"),
    "root of nEmbd": (("scale-by-width",), "h.*.attn", "scale"),
    "prompt without mask": (("mask-missing",), "h.*.attn", "mask"),
    "masked with Number.MIN_VALUE": (("mask-multiplied",), "h.*.attn", "mask"),
    "mask from the chunk's index": (("cache-inconsistent",), "h.*.attn", "mask"),
    "step without its own key": (("cache-inconsistent", "mask-strict"), "h.*.attn", "past's end"),
    "steps count from 0": (STEP_POSITION, "wpe", "position"),
    "steps are one too far": (STEP_POSITION, "wpe", "position"),
    "prompt's last token fed again": (("cache-inconsistent",), "everywhere", "loop"),
    "fill shares one past": (("cache-inconsistent",), "h.*.attn", "past"),
    "past kept for the next row": (("batch-dependent", "cache-inconsistent"), "h.*.attn", "past"),
    "scratch pushed into the past": (("cache-inconsistent",), "h.*.attn", "push"),
    "heads interleaved": (("head-layout",), "h.*.attn", "heads"),
    "v before k": (("qkv-order",), "h.*.attn.c_attn", "thirds"),
    "weights as (out, in)": (FLAT, "everywhere", "linear"),
    "c_proj as (out, in)": (("transposed",), "h.*.attn.c_proj", "c_proj"),
    "c_attn without bias": (("missing-bias",), "h.*.attn.c_attn", "c_attn"),
    "quick gelu": (("gelu-variant",), "h.*.mlp", "act"),
    "n - 1": (("layernorm-unbiased-variance",), "ln", "norm"),
    "eps 1e-3": (("layernorm-eps",), "ln", "norm's eps"),
    "gamma and beta not found": (("layernorm-without-affine", "not-loaded"), "ln", "load"),
    "norm in place": (("residual-from-normed",), "h.*", "norm's copy"),
    "position added into wte": (("batch-dependent", "not-deterministic", "cache-inconsistent"), "wte", "embedding"),
    "no ln_f": (("final-norm-missing",), "ln_f", "final"),
    "attention replaces x": (("residual-missing",), "h.*.attn", "sum"),
    "mlp without ln_2": (("norm-missing",), "h.*.ln_2", "ln_2"),
    "temperature": (("logits-scaled",), "head", "head"),
    "last layer not run": (("layer-missing",), "h.-1", "layers"),
}
LISTS = {"functional": FUNCTIONAL, "batch": BATCH, "stream": STREAM}
FAULTS = {program: {fault: ids for fault, (ids, _, _) in faults.items()} for program, faults in LISTS.items()}
SHAPES = (Shape(2, 40, 5, 223, 32, 13, 171), Shape(3, 36, 3, 241, 30, 12, 172), Shape(4, 48, 4, 199, 29, 14, 173))
ONE_A_BLOCK = {
    "functional": ("result", "mixed", "ln_1", "act", "middle", "q"),
    "batch": ("residual3", "attproj", "qkv", "fch", "residual2", "atty"),
    "stream": ("out", "middle", "attended", "ln_2", "k", "fed"),
}
NOT_DUMPED = (  # from one dump to the next, an author leaves out these, by the names of each program
    (),
    ("qkv", "embedded", "encoded", "positions", "ln1_mean", "ln1_rstd", "ln2_mean", "ln2_rstd"),
    ("scores", "preatt", "q", "k", "v", "up", "fch", "hidden"),
    ("weights", "att", "mixed", "atty", "context", "fed", "fcproj", "final", "lnf"),
    ("ln_1", "ln1", "ln_2", "ln2", "attended", "attproj", "middle", "residual2"),
)
PAIRS = {program: pairs(faults, f"11 {program}") for program, faults in LISTS.items()}
KINDS = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")


class EleventhBed(FileBed):
    """The models and programs of this set. The C program reads ``weights.bin``: three sizes, then the tensors kind by kind."""

    TABLES = 0.5
    NUMPY = "functional", functional.run
    COMPILED = "batch", Path(__file__).with_name("batch.c"), ("cc", "-O1", "-std=gnu11")
    COMPILED_ROWS = True
    NODE = "stream", Path(__file__).with_name("stream.mjs")
    ONE_A_BLOCK = ONE_A_BLOCK
    NOT_DUMPED = NOT_DUMPED

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        names = ["wte.weight", "wpe.weight"]
        names += [f"h.{n}.{kind}.{part}" for kind in KINDS for part in ("weight", "bias") for n in range(shape.layers)]
        names += ["ln_f.weight", "ln_f.bias"]
        with (folder / "weights.bin").open("wb") as file:
            file.write(np.array([shape.width, shape.vocab, len(self.ids)], "<i4").tobytes())
            for name in names:
                file.write(self.weights[name].astype("<f4").tobytes())

    def weights_file(self, program: str) -> Path:
        return self.folder / "weights.bin" if program == self.COMPILED[0] else super().weights_file(program)


missing = EleventhBed.missing
