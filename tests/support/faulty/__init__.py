"""Hundreds of GPT-2s with known faults, in ten architectures, to test `diagnose`.

An architecture is a file with `build(config, faults)`, in the style of its typical authors, and `fill(module, state)`, the
author's loading. A port is an architecture and a line of faults (`faults.py` defines the words); faults of the weights are
mistakes in reading the file (`loading.py`). tests/port/test_faulty_ports.py shows that every port here is faulty, and that the
architectures without faults are correct.
"""

import importlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from gpt2.config import GPT2Config
from support.faulty.faults import MEANINGS, Faults, Meaning, matches
from support.faulty.loading import read, write

__all__ = ["ARCHITECTURES", "CONFIG", "FAULTY", "MEANINGS", "SOUND", "Faults", "Faulty", "matches", "write"]

# All sizes differ.
CONFIG = GPT2Config(vocab_size=67, n_positions=23, n_embd=20, n_layer=3, n_head=4, n_inner=52, bos_token_id=0, eos_token_id=0)

ARCHITECTURES = {
    "fused": "modules all the way down, one fused Linear, attention spelt out, tied",
    "functions": "bare functions over flat parameters, no submodule; separate projections",
    "heads": "a ModuleList of single heads, an untied head",
    "einsum3d": "einsum over (H, D, K) tensors, an untied head",
    "italiano": "another language, separate projections, scaled_dot_product_attention",
    "conv1d": "Conv1D, the checkpoint's names, cache, attention mask, an object out",
    "compiled": "fused, through torch.compile",
    "scanned": "layers stacked in single tensors, time first, bmm",
    "attentions": "attention in forms that no tutorial has; separate projections",
    "tutorials": "what four kinds of tutorial end with",
}


@dataclass(frozen=True)
class Faulty:
    """A port and its faults.

    ``line`` is the faults, "" for none; ``kind`` the class within tutorials.py. ``filled`` if `load_into` loads the
    checkpoint, and not the author's own code.
    """

    architecture: str
    line: str
    kind: str = ""
    filled: bool = False

    @property
    def name(self) -> str:
        words = self.kind or self.line or "sound"
        return f"{self.architecture}: {words}{' (load_into)' if self.filled else ''}"

    @property
    def faults(self) -> Faults:
        return Faults(self.line)

    @property
    def causes(self) -> dict[str, tuple[str, ...]]:
        """For each word of a fault: the ids of the causes that describe it, the best first."""
        return {word: MEANINGS[word].ids for word in self.faults.sites if word in MEANINGS}

    @staticmethod
    def meaning(word: str) -> Meaning:
        return MEANINGS[word]

    @property
    def points(self) -> tuple[str, ...]:
        """Points where the port may first differ from GPT-2; () if its logits need not differ."""
        return self.faults.first()

    def build(self, config: GPT2Config, directory: str | Path) -> nn.Module:
        """The module, filled by its author unless `load_into` must fill it; from a fixed seed, in eval mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            file = importlib.import_module(f"{__name__}.{self.architecture}")
            module = file.KINDS[self.kind](config) if self.kind else file.build(config, self.faults)
        if not self.filled:
            with torch.no_grad():
                file.fill(module, read(directory, config, self.faults))
        return module.eval()


def _ports(single: str, *several: str) -> list[str]:
    """Lines of faults: one for each word of ``single``, and those with several faults."""
    return [*single.split(), *several]


LINES = {
    "fused": _ports(
        """
        gelu-erf gelu-relu@2 gelu-quick eps-1e-6 unbiased annotated eps-outside@1.ln_2 rmsnorm rmsnorm@f
        rmsnorm-no-bias@1.ln_1 not-normalising@2 no-affine@0.ln_1 post-norm ln_2-missing@1 final-norm-missing
        norms-swapped@1 scale-missing scale-by-width@2 scale-twice scale-inverse-layer mask-missing mask-strict
        mask-multiplied mask-off-by-one@1 softmax-queries softmax-heads@2 softmax-batch output-projection-missing@0
        value-from-key value-identity@1 heads-split-wrongly heads-merged-wrongly@2 position-missing position-offset
        position-sinusoidal embedding-scaled residual-missing residual-missing-mlp@1 residual-from-normed parallel
        extra-norm-embed extra-norm-branch@1 extra-norm-end@0 layer-reversed layer-swapped layer-missing@1
        layer-repeated@1 logits-softmaxed transposed-proj transposed-q@1 viewed-fc qkv-kqv qkv-cut head-interleaved
        not-loaded-fc@1 not-loaded-block@1 wrong-fc@0 norm-weights-swapped weights-reversed untied-head padded-vocab
        bf16-on-the-way no-qkv-bias no-out-bias@1 dropout-active ffn-dropout@1 noise counts-calls batch-statistics
        batch-centred norm-over-tokens@1.ln_2 scale-by-heads scale-by-8 softmax-missing@2 residual-halved logits-scaled
        head-bias
        """,
        "rotary",
        "rotary-halves position-missing",
        "softmax-missing@0 gelu-erf@2",
        "residual-halved@1 head-bias",
        "masked-first scale-by-width",
        "masked-first scale-missing@1",
        "masked-first rmsnorm@1.ln_1",
        "output-projection-missing no-qkv-bias",
        "value-from-key no-qkv-bias",
        "rmsnorm no-qkv-bias no-out-bias",
        "gelu-erf eps-1e-6",
        "gelu-erf@2 scale-by-width@0",
        "post-norm gelu-relu scale-by-width",
        "mask-strict@0 unbiased@2",
        "transposed-proj@1 gelu-erf",
        "position-offset rmsnorm final-norm-missing",
        "qkv-kvq@2 no-affine@f",
        "residual-missing-mlp@2 value-from-key@1 gelu-silu@0",
    ),
    "functions": _ports(
        """
        position-sinusoidal noise extra-norm-end@1 padded-vocab batch-centred ffn-dropout@1 cache-positions cache-mask
        cache-forgets padding-ignored padding-inverted gelu-erf gelu-silu@1 gelu-none@2 unbiased@f rmsnorm@2
        not-normalising no-affine@f eps-none eps-1e-3@1.ln_1 post-norm ln_1-missing@1 final-norm-missing norms-swapped
        scale-missing@2 scale-by-width scale-twice@1 scale-inverse-layer mask-missing@1 mask-strict@1 mask-multiplied
        mask-off-by-one softmax-queries@1 softmax-heads output-projection-missing value-from-key@1 position-missing
        position-offset embedding-scaled residual-missing-attn@2 residual-from-normed@1 residual-from-normed-mlp
        parallel@1 layer-reversed layer-missing@0 layer-repeated@1 logits-log-softmaxed transposed-q qkv-vkq
        head-columns@1 not-loaded-ln_f not-loaded-wpe wrong-all-first wrong-ln_1@1 wpe-rolled untied-head
        fp16-on-the-way no-out-bias
        """,
        "gelu-quick mask-off-by-one",
        "scale-twice@1 residual-missing-mlp@2",
        "not-normalising@0 scale-missing@1 gelu-relu@2",
        "layer-missing@1 gelu-erf",
        "no-out-bias eps-1e-3",
    ),
    "heads": _ports(
        """
        position-sinusoidal position-offset norms-swapped@1 norm-weights-swapped batch-statistics padding-ignored
        padding-queries gelu-erf gelu-none@1 rmsnorm@1.ln_2 unbiased not-normalising@f no-affine eps-1e-3@f post-norm
        ln_1-missing final-norm-missing scale-missing scale-by-width mask-missing mask-multiplied@0 mask-off-by-one
        softmax-queries output-projection-missing@2 value-from-query position-missing residual-missing-attn
        residual-from-normed parallel extra-norm-embed layer-missing@2 layer-repeated@0 logits-softmaxed
        transposed-proj@2 qkv-kqv@1 not-loaded-ln_2@2 wrong-bias@1 weights-reversed untied-head bf16-fc@1 no-qkv-bias
        dropout-attention ffn-dropout noise
        """,
        "no-qkv-bias gelu-erf residual-from-normed",
        "scale-by-width gelu-relu",
        "mask-multiplied@1 not-loaded-ln_2@0",
    ),
    "einsum3d": _ports(
        """
        norms-swapped logits-softmaxed noise extra-norm-branch@1 extra-norm-embed ffn-dropout@2 cache-positions
        cache-mask cache-forgets padding-inverted gelu-quick gelu-relu eps-1e-12 eps-outside rmsnorm unbiased@0.ln_1
        not-normalising@1.ln_2 no-affine@2.ln_2 ln_1-missing@2 ln_2-missing final-norm-missing scale-missing@1
        scale-by-width scale-twice scale-inverse-layer mask-missing mask-strict mask-multiplied mask-off-by-one@2
        softmax-queries softmax-heads output-projection-missing@1 value-from-key position-sinusoidal position-missing
        residual-missing-mlp residual-from-normed parallel@2 layer-swapped layer-missing@1 layer-repeated@2
        transposed-proj@0 head-interleaved head-columns not-loaded-proj@2 wrong-fc@1 gamma-beta@1 wrong-tokens
        untied-head padded-vocab batch-centred
        """,
        "scale-twice gelu-quick",
        "mask-multiplied not-normalising@f",
        "rmsnorm eps-outside@2 position-missing",
    ),
    "italiano": _ports(
        """
        noise logits-log-softmaxed batch-centred extra-norm-embed cache-positions cache-mask cache-forgets gelu-erf@1
        gelu-none eps-1e-6@f eps-1e-12 rmsnorm-no-bias no-affine@1 post-norm ln_2-missing norms-swapped@2
        final-norm-missing scale-missing scale-by-width scale-twice scale-inverse-layer mask-missing mask-missing@1
        mask-off-by-one mask-strict@2 output-projection-missing value-from-query@1 value-identity
        heads-split-wrongly@1 heads-merged-wrongly position-offset embedding-scaled residual-missing-attn@1 parallel
        layer-missing@1 layer-repeated@1 transposed-proj qkv-vkq@1 not-loaded-biases no-fc-bias@1 no-norm-bias
        dropout-attention@1
        """,
        "mask-missing scale-missing",
        "scale-by-width@1 gelu-erf@2",
        "not-loaded-fc@0 scale-twice@2",
    ),
    "conv1d": _ports(
        """
        gelu-erf eps-1e-6@1.ln_1 scale-inverse-layer scale-missing@0 mask-off-by-one mask-multiplied@1
        softmax-queries@2 value-from-key@0 residual-from-normed residual-missing-mlp@2 transposed-proj@1 qkv-kqv
        head-interleaved@2 not-loaded-wpe not-loaded-fc untied-head bf16-on-the-way dropout-active ffn-dropout@2
        cache-positions cache-mask cache-unscaled cache-forgets cache-of-the-call-before padding-ignored
        padding-inverted padding-positions padding-queries cache-padding-ignored cache-padding-counted
        """,
        "cache-single cache-positions",
        "gelu-relu cache-positions",
        "scale-by-width@1 padding-ignored",
    ),
    "compiled": _ports(
        """
        gelu-erf rmsnorm@1 scale-by-width mask-strict residual-from-normed layer-missing@1 transposed-proj untied-head
        """,
        "unbiased gelu-quick@1",
    ),
    "scanned": _ports(
        """
        extra-norm-embed dropout-active norm-weights-swapped@1 gelu-erf gelu-relu@1 gelu-quick eps-1e-6 unbiased
        rmsnorm@f not-normalising@1 ln_1-missing@0 final-norm-missing scale-missing scale-by-width@1 mask-missing
        mask-off-by-one output-projection-missing@1 value-from-key position-missing embedding-scaled
        residual-missing-attn residual-from-normed parallel layer-reversed layer-missing@2 transposed-q@2
        not-loaded-wpe wrong-fc@1
        """,
        "gelu-erf unbiased",
        "scale-by-width mask-off-by-one@2",
    ),
    "attentions": _ports(
        """
        heads-unsplit heads-one@1 heads-halved heads-share-keys heads-share-values@2 weights-of-one-head weights-averaged@0
        scores-of-queries scores-of-keys@1 scores-cosine@2 mask-inverted@1 mask-strict-but-first logits-rounded
        scale-rounded@1 gelu-misplaced@2 gelu-constants gelu-erf-rounded heads-grouped weights-scaled scores-relative
        kind-embedded fed-activated blocks-identity@1 blocks-identity attention-identity@1
        """,
        "heads-grouped rotary",
        "weights-scaled scale-by-width",
        "kind-embedded gelu-constants",
        "weights-of-one-head@0 heads-unsplit@2",
    ),
}

FAULTY: dict[str, Faulty] = {
    port.name: port
    for port in (
        *(Faulty(name, line) for name, lines in LINES.items() for line in lines),
        # Implementations from tutorials; filled by their authors, and by `load_into`.
        *(
            Faulty("tutorials", line, kind, filled)
            for kind, line in (
                ("lecture", "no-qkv-bias gelu-erf residual-from-normed"),
                ("translation", "post-norm gelu-relu scale-by-width"),
                ("notation", "not-normalising scale-twice"),
            )
            for filled in (False, True)
        ),
        # Filled by `load_into`: parts without a source keep their initial values.
        *(
            Faulty(name, line, filled=True)
            for name, line in (
                ("fused", "gelu-erf"),
                ("fused", "no-qkv-bias"),
                ("fused", "rotary gelu-erf"),
                ("fused", "rotary no-qkv-bias"),
                ("fused", "post-norm"),
                ("functions", "scale-by-width"),
                ("functions", "layer-missing@1"),
                ("heads", "no-qkv-bias"),
                ("heads", "rmsnorm"),
                ("einsum3d", "mask-multiplied"),
                ("italiano", "value-from-query@1"),
                ("italiano", "no-norm-bias"),
                ("scanned", "parallel"),
            )
        ),
    )
}

# The same architectures without a fault.
SOUND: dict[str, Faulty] = {port.name: port for name in LINES for port in (Faulty(name, ""),)}
SOUND |= {
    port.name: port
    for name, lines in (
        (
            "fused",
            "mask-1e4 masked-first scale-split softmax-upcast norm-upcast logits-upcast vocabulary-cut heads-permuted "
            "dropout-in-training idle-norm logits-flattened hidden-first",
        ),
        ("functions", "key-bias-missing heads-permuted"),
        ("conv1d", "cache-single padding-counted"),
        ("heads", "heads-permuted"),
        ("italiano", "heads-permuted"),
    )
    for port in (Faulty(name, line) for line in lines.split())
}
SOUND |= {port.name: port for sound in list(SOUND.values()) if not sound.line for port in (replace(sound, filled=True),)}
