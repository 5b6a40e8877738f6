"""A sixth set, written when the first five had been used to develop the engine: GPT-2 in JAX, and in Go with a cache.

Faults are chosen for how often people make them; those of `RARE` are made less often. Beside each: a thread of a public project
that tells of it or of its like, or why people make it. A program without faults is right in another way from dump to dump.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ..bed import Bed, Shape
from ..fifth import FifthBed, read_arrays

SCAN = {
    "exact gelu": ("gelu-variant",),  # nntile#370, jax#4428, gemma_pytorch#33
    "flax epsilon": ("layernorm-eps",),  # Flax's default is 1e-6; candle#271
    "epsilon beside the root": ("layernorm-eps",),  # Flux.jl#1187
    "no mask": ("mask-missing",),  # ColossalAI#461, transformers#12007
    "mask times scores": ("mask-multiplied",),  # memory-compressed-attention#2
    "triu": ("mask-missing",),  # the other triangle; sees the future, not the past
    "softmax over queries": ("softmax-axis",),  # annotated_deep_learning_paper_implementations#282, llms-from-scratch-rs#30
    "scaled by width": ("scale-by-width",),  # Machine-Learning-Collection#65
    "scaled twice": ("scale-twice",),  # by hand, and in dot_product_attention
    "heads come out first": ("head-layout",),  # transformer-from-scratch#6: merged without the transposition; out_axes
    "vmap over tokens": ("head-layout",),  # in_axes forgotten; flax#5537
    "thirds within heads": ("head-layout", "qkv-order"),  # sglang#40127, Megatron's order
    "q v k": ("qkv-order",),  # transformer-from-scratch#1
    "square kernel turned": ("transposed",),  # nntile#370: Conv1D is [in, out]
    "blocks sorted as text": ("layer-order",),  # distributed-llama#52: 1, 10, 2
    "attention not carried": ("residual-missing", "residual-scaled"),  # audiolm-pytorch#265: its output is not assigned
    "no final norm": ("final-norm-missing",),  # forgotten with a head that is tied
    "embedding times root": ("embedding-scaled",),  # the first transformer, Gemma
    "bfloat16 parameters": ("reduced-precision",),  # loaded with dtype=jnp.bfloat16
    "bfloat16 products": ("reduced-precision",),  # jax#1856, jax#7010: the default on TPU
    "qkv without bias": ("missing-bias",),  # use_bias=False, as in Llama
    "biases by last name": ("wrong-tensor",),  # both are called c_proj.bias; a dict keeps the last
    "norms exchanged": ("wrong-tensor", "norms-swapped"),  # torchtitan#1454
    "dropout stays": ("dropout-active", "ffn-dropout", "not-deterministic"),  # deterministic=False, one key for all
    "log_softmax": ("logits-softmaxed",),  # for the loss, returned
    "hidden is 1e-9": ("mask-multiplied", "mask-missing"),  # gluonts#1401
    "mean of everything": ("layernorm-axis",),  # axis=-1 forgotten
    "ddof 1": ("layernorm-unbiased-variance",),  # torch's default
    "softmax over heads": ("softmax-axis",),  # PyTorch-NLP#2: the first axis
    "units before heads": ("head-layout",),  # nntile#402: reshaped the other way round
    "scan reversed": ("layer-order",),  # jax#5002
    "feed-forward not carried": ("residual-missing", "residual-scaled"),  # the body returns a value of before it
    "last input of the scan": ("layer-missing",),  # ys in place of the carry
    "ids in uint8": ("wrong-tensor",),  # ids saved as uint16 with a larger vocabulary
    "head by reshape": ("untied-head", "transposed", "wrong-tensor"),  # wte.reshape(D, V) for wte.T
}
GO = {
    "quick gelu": ("gelu-variant",),  # tinygrad#526
    "square for cube": ("gelu-variant",),  # PufferDrive#100: slightly off
    "llama norm": ("rmsnorm",),  # the engine was one for Llama
    "bert epsilon": ("layernorm-eps",),  # emoASR#13, transformers#585
    "unscaled": ("scale-missing",),  # forgotten
    "step at position 0": ("position-offset", "position-missing", "cache-inconsistent"),  # mlx-lm#93
    "first step a slot late": ("position-offset", "cache-inconsistent"),  # onnxruntime-genai#2354, tiny-llm#46
    "prompt sees everything": ("mask-missing",),  # TinyLLM#17, mlx-node#24
    "step does not see itself": ("mask-strict", "cache-inconsistent"),  # t < pos
    "one slot for all steps": ("cache-inconsistent",),  # mlx-swift-lm#90
    "cache not cleared": ("batch-dependent", "cache-inconsistent", "position-offset"),  # lag-llama#81
    "residual is the same slice": ("residual-from-normed",),  # a slice is no copy; mlir-aie#3656
    "cache without layers": ("cache-inconsistent", "wrong-tensor"),  # mistral.rs#300: wrong indexing
    "softmax over the buffer": ("mask-multiplied", "mask-missing", "softmax-axis"),  # of the context's length, zeros behind
    "last bias forgotten": ("missing-bias",),  # Llama has none
    "feed-forward replaces": ("residual-missing",),  # = for +=
    "feeds not turned": ("transposed", "wrong-tensor"),  # nntile#370
    "bias before weight": ("wrong-tensor",),  # names in alphabetical order
    "int8": ("reduced-precision",),  # Q8_0
    "half cache": ("reduced-precision",),  # llama.cpp's default
    "no positions": ("position-missing",),  # Llama has none
    "bias of block 0": ("wrong-tensor",),  # the block's offset forgotten
    "mixed not cleared": ("value-projection-wrong",),  # LMCache#1064: a buffer that is used again
    "rope": ("rotary-positions",),  # the engine was one for Llama
    "heads of another size": ("head-layout",),  # ollama#5817, mlc-llm#576: a constant of another model
    "keys read token first": ("head-layout", "cache-inconsistent", "wrong-tensor"),  # gluon-nlp#1015: the axes of the cache
    "one half is zero": ("gelu-variant",),  # constants of integers
    "root of the heads": ("scale-wrong",),  # H for H's size
    "steps without bias": ("missing-bias", "cache-inconsistent"),  # two code paths
    "one buffer for all heads": ("head-layout",),  # goroutines that share a slice
    "scales by column": ("reduced-precision", "not-loaded"),  # onnxruntime#28228
    "logits over root": ("logits-scaled",),  # muP, T5
    "loop from 1": ("layer-missing",),  # off by one
    "remainder of the head": ("not-loaded", "untied-head"),  # V / workers
}
RARE = {
    *("hidden is 1e-9", "mean of everything", "ddof 1", "softmax over heads", "units before heads", "scan reversed"),
    *("feed-forward not carried", "last input of the scan", "ids in uint8", "head by reshape"),
    *("keys read token first", "one half is zero", "root of the heads", "steps without bias", "one buffer for all heads"),
    *("scales by column", "logits over root", "loop from 1", "remainder of the head"),
}
FAULTS: dict[str, dict[str, tuple[str, ...]]] = {"scan": SCAN, "go": GO}
HARMLESS = {"scan": "stacked", "go": "(token by token)"}
SHAPES = (Shape(2, 36, 3, 311, 26, 12, 111), Shape(3, 30, 5, 293, 24, 10, 112), Shape(12, 20, 2, 283, 25, 11, 113))
ONE_A_BLOCK = {
    "scan": ("result", "input", "middle", "projected", "mixed", "fed"),
    "go": ("result", "middle", "qkv", "ln2", "proj", "fed"),
}


def missing(program: str) -> str | None:
    """What the machine lacks for ``program``, or None."""
    if program == "scan":
        return None if importlib.util.find_spec("jax") else "jax is not installed"
    return None if shutil.which("go") else "no go on this machine"


class SixthBed(FifthBed):
    """A random model whose tables are as small as trained ones, and ids; both programs compute in float32 or float64."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        super().__init__(folder, shape)
        for name in ("wte.weight", "wpe.weight"):
            self.weights[name] *= np.float32(0.45)
        save_file(self.weights, self.model / "model.safetensors", metadata={"format": "pt"})

    def run(self, program: str, faults: Iterable[str] = (), dtype: str = "float64") -> tuple[np.ndarray, dict[str, np.ndarray]]:
        if program == "scan":
            from . import scan

            return self.ids, scan.run(self.weights, self.shape.heads, self.ids, set(faults), dtype)
        given, out, engine = (self.folder / name for name in ("in.bin", "out.bin", "engine"))
        if not engine.exists():
            source = Path(__file__).with_name("gpt2.go")
            cache = {"GOCACHE": str(self.folder / "cache"), "GO111MODULE": "off"}
            subprocess.run(["go", "build", "-o", str(engine), str(source)], check=True, timeout=300, env=os.environ | cache)
            given.write_bytes(self.stacked())
        subprocess.run([str(engine), str(given), str(out), ";".join(faults), dtype], check=True, timeout=60)
        return self.ids, read_arrays(out, dtype)

    def dump(self, program: str, faults: Iterable[str], level: str, dtype: str, seed: int) -> Path:
        if not list(faults) and seed % 2:
            faults = [HARMLESS[program]]
        return Bed.dump(self, program, faults, level, dtype, seed)

    def one_a_block(self, program: str, seed: int) -> str:
        return ONE_A_BLOCK[program][seed % 6]
