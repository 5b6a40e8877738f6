"""Names of the faults in tests/support/faulty: the expected causes of each, and the point where it first shows.

A port's faults are one line: `gelu-erf rmsnorm@1.ln_2 scale-missing@0,2 eps-1e-6@f`. A word alone applies everywhere; `@1` in
block 1 only, `@1.ln_2` in one norm of it, `@f` in the final norm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """The meaning of a fault's name.

    ``ids`` are the causes that describe it, the best first. ``points`` are the places where the port may first differ, each a
    traced point or the beginning of one (`h.{}.attn` is any of `h.1.attn.q`, ...), `=` before it if it is the point itself and
    none of its parts; `{}` is the first block that has the fault. No points: the logits need not differ.
    """

    ids: tuple[str, ...]
    points: tuple[str, ...]
    first_layer: int = 0


def _mean(ids: str, *points: str, first_layer: int = 0) -> Meaning:
    return Meaning(tuple(ids.split()), points, first_layer)


NORM = "norm"  # stands for the first norm that has the fault
SCORES, HEADS = "h.{}.attn", "h.{}.attn"
MID, MLP, END = "h.{}.mid", "h.{}.mlp", "=h.{}"

MEANINGS: dict[str, Meaning] = {
    # Norms.
    "eps-1e-6": _mean("layernorm-eps", NORM),
    "eps-1e-12": _mean("layernorm-eps", NORM),
    "eps-1e-3": _mean("layernorm-eps", NORM),
    "eps-none": _mean("layernorm-eps", NORM),
    "eps-outside": _mean("layernorm-eps", NORM),
    "unbiased": _mean("layernorm-unbiased-variance", NORM),
    "annotated": _mean("layernorm-unbiased-variance layernorm-eps", NORM),  # (x - mean) / (std + 1e-6), std unbiased
    "not-normalising": _mean("layernorm-not-normalising", NORM),
    "no-affine": _mean("layernorm-without-affine", NORM),
    "rmsnorm": _mean("rmsnorm", NORM),
    "rmsnorm-no-bias": _mean("rmsnorm missing-bias", NORM),
    "post-norm": _mean("post-norm", "h.{}.ln_1", SCORES),
    "ln_1-missing": _mean("norm-missing", "h.{}.ln_1", SCORES),
    "ln_2-missing": _mean("norm-missing", "h.{}.ln_2", MLP),
    "final-norm-missing": _mean("final-norm-missing", "ln_f", "logits"),
    "norms-swapped": _mean("norms-swapped", "h.{}.ln_1"),
    # Feed-forward.
    "gelu-erf": _mean("gelu-variant", MLP),
    "gelu-quick": _mean("gelu-variant", MLP),
    "gelu-relu": _mean("gelu-variant", MLP),
    "gelu-silu": _mean("gelu-variant", MLP),
    "gelu-none": _mean("gelu-variant", MLP),
    "fed-activated": _mean("gelu-variant", MLP, END),
    "ffn-dropout": _mean("ffn-dropout dropout-active", MLP, END),
    # Attention.
    "scale-missing": _mean("scale-missing", SCORES),
    "scale-by-width": _mean("scale-by-width", SCORES),
    "scale-by-heads": _mean("scale-wrong", SCORES),
    "scale-by-8": _mean("scale-wrong", SCORES),  # the root of an official model's head size
    "scale-twice": _mean("scale-twice", SCORES),
    "scale-inverse-layer": _mean("scale-inverse-layer", SCORES, first_layer=1),
    "mask-missing": _mean("mask-missing", SCORES),
    "mask-strict": _mean("mask-strict", SCORES),
    "mask-multiplied": _mean("mask-multiplied", SCORES),
    "mask-off-by-one": _mean("mask-off-by-one", SCORES),
    "softmax-queries": _mean("softmax-axis", SCORES),
    "softmax-heads": _mean("softmax-axis", SCORES),
    "softmax-batch": _mean("softmax-axis batch-dependent", SCORES),
    "softmax-missing": _mean("softmax-missing", SCORES),
    "output-projection-missing": _mean("output-projection-missing", HEADS, MID),
    "value-from-key": _mean("value-projection-wrong", HEADS),
    "value-from-query": _mean("value-projection-wrong", HEADS),
    "value-identity": _mean("value-projection-wrong", HEADS),
    "mask-inverted": _mean("mask-missing", SCORES),
    "mask-strict-but-first": _mean("mask-strict", SCORES),
    "logits-rounded": _mean("logits-softmaxed", "logits"),
    "scale-rounded": _mean("scale-wrong", SCORES),
    "gelu-misplaced": _mean("gelu-variant", MLP),
    "gelu-constants": _mean("gelu-variant", MLP),
    "gelu-erf-rounded": _mean("gelu-variant", MLP),
    "heads-unsplit": _mean("head-layout", SCORES),
    "heads-one": _mean("head-layout", SCORES),
    "heads-halved": _mean("head-layout", SCORES),
    "heads-share-keys": _mean("head-layout", SCORES),
    "heads-share-values": _mean("head-layout", SCORES),
    "weights-of-one-head": _mean("head-layout", SCORES),
    "weights-averaged": _mean("head-layout", SCORES),
    "scores-of-queries": _mean("wrong-tensor qkv-order", SCORES),
    "scores-of-keys": _mean("wrong-tensor qkv-order", SCORES),
    "scores-cosine": _mean("extra-norm", SCORES),
    "heads-grouped": _mean("head-layout", SCORES),
    "weights-scaled": _mean("softmax-missing", SCORES),
    "scores-relative": _mean("extra-bias scale-wrong", SCORES),
    "heads-split-wrongly": _mean("head-layout", HEADS),  # view(B, H, T, K) without a transpose
    "heads-merged-wrongly": _mean("head-layout", HEADS),  # view(B, T, D) without a transpose
    # Positions and embeddings.
    "position-missing": _mean("position-missing", "wpe", "embed"),
    "position-offset": _mean("position-offset", "wpe", "embed"),
    "position-sinusoidal": _mean("position-sinusoidal", "wpe", "embed"),
    "rotary": _mean("rotary-positions", SCORES),
    "rotary-halves": _mean("rotary-positions", SCORES),
    "kind-embedded": _mean("extra-bias", "embed"),
    "embedding-scaled": _mean("embedding-scaled", "wte", "embed"),
    # Wiring.
    "residual-missing": _mean("residual-missing", MID),
    "residual-missing-attn": _mean("residual-missing", MID),
    "residual-missing-mlp": _mean("residual-missing", END),
    "residual-halved": _mean("residual-scaled", END),
    "residual-from-normed": _mean("residual-from-normed", MID),
    "residual-from-normed-mlp": _mean("residual-from-normed", END),
    "parallel": _mean("parallel-block", MID, "h.{}.ln_2"),
    "extra-norm-embed": _mean("extra-norm", "embed", "h.0.ln_1"),
    "extra-norm-branch": _mean("extra-norm", "h.{}.attn.c_proj", MID),
    "extra-norm-end": _mean("extra-norm", END, "h.1.ln_1"),
    "layer-reversed": _mean("layer-order", "h.{}"),
    "layer-swapped": _mean("layer-order", "h.{}", first_layer=1),  # the last two
    "attention-identity": _mean("layer-missing", "h.{}.attn", "h.{}.mid"),
    "blocks-identity": _mean("layer-missing", "h.{}", "ln_f"),
    "layer-missing": _mean("layer-missing", "h.{}", "ln_f"),
    "layer-repeated": _mean("layer-repeated", "h.{}", "h.1", "h.2", "ln_f"),
    "logits-scaled": _mean("logits-scaled", "logits"),
    "head-bias": _mean("extra-bias", "logits"),
    "logits-softmaxed": _mean("logits-softmaxed", "logits"),
    "logits-log-softmaxed": _mean("logits-softmaxed", "logits"),
    # Weights.
    "transposed-proj": _mean("transposed", "h.{}.attn.c_proj", MID),
    "transposed-q": _mean("transposed", "h.{}.attn.q"),
    "viewed-fc": _mean("transposed wrong-tensor", MLP),
    "qkv-kqv": _mean("qkv-order", "h.{}.attn"),
    "qkv-vkq": _mean("qkv-order", "h.{}.attn"),
    "qkv-kvq": _mean("qkv-order", "h.{}.attn"),
    "qkv-cut": _mean("qkv-order", "h.{}.attn"),  # into pieces of D * D numbers
    "head-interleaved": _mean("head-layout", "h.{}.attn"),
    "head-columns": _mean("head-layout", "h.{}.attn"),
    "not-loaded-proj": _mean("not-loaded", "h.{}.attn.c_proj", MID),
    "not-loaded-fc": _mean("not-loaded", MLP),
    "not-loaded-ln_2": _mean("not-loaded layernorm-without-affine", "h.{}.ln_2"),
    "not-loaded-ln_f": _mean("not-loaded layernorm-without-affine", "ln_f"),
    "not-loaded-biases": _mean("not-loaded missing-bias", "h.{}.attn"),
    "not-loaded-wpe": _mean("not-loaded", "wpe", "embed"),
    "not-loaded-block": _mean("not-loaded", "h.{}"),
    "wrong-fc": _mean("wrong-tensor", MLP),  # the next block's
    "wrong-ln_1": _mean("wrong-tensor norms-swapped", "h.{}.ln_1"),  # ln_2's
    "wrong-all-first": _mean("wrong-tensor layer-repeated", "h.{}", first_layer=1),  # h.0's weights everywhere
    "wrong-tokens": _mean("wrong-tensor", "wte", "embed"),  # one row too far
    "wrong-bias": _mean("wrong-tensor", "h.{}.attn.c_proj", MID),  # the feed-forward's output bias on attention's output
    "gamma-beta": _mean("wrong-tensor norms-swapped", "h.{}.ln_1"),
    "norm-weights-swapped": _mean("norms-swapped", "h.{}.ln_1"),
    "weights-reversed": _mean("layer-order", "h.{}"),
    "wpe-rolled": _mean("position-offset wrong-tensor", "wpe", "embed"),
    "bf16-on-the-way": _mean("reduced-precision", "wte", "embed"),
    "fp16-on-the-way": _mean("reduced-precision", "wte", "embed"),
    "bf16-fc": _mean("reduced-precision", MLP),
    "untied-head": _mean("untied-head", "logits"),
    "padded-vocab": _mean("padded-vocab", "logits"),
    "no-qkv-bias": _mean("missing-bias", "h.{}.attn"),
    "no-out-bias": _mean("missing-bias", "h.{}.attn.c_proj", MID),
    "no-fc-bias": _mean("missing-bias", MLP),
    "no-norm-bias": _mean("missing-bias", NORM),
    # Behaviour other than the logits of one forward pass.
    "dropout-active": _mean("dropout-active", "embed", "h", "ln_f", "logits"),
    "dropout-attention": _mean("dropout-active", "h.{}.attn", MID),
    "noise": _mean("not-deterministic", "embed", "h", "ln_f", "logits"),
    "counts-calls": _mean("not-deterministic cache-inconsistent"),
    "cache-positions": _mean("cache-inconsistent"),
    "cache-mask": _mean("cache-inconsistent"),
    "cache-unscaled": _mean("cache-inconsistent"),
    "cache-forgets": _mean("cache-inconsistent"),
    "cache-of-the-call-before": _mean("cache-inconsistent not-deterministic"),
    "norm-over-tokens": _mean("layernorm-axis", NORM),
    "batch-statistics": _mean("batch-dependent layernorm-axis", NORM),
    "batch-centred": _mean("batch-dependent", "embed", "h.0.ln_1"),
    "padding-ignored": _mean("padding-wrong"),
    "padding-inverted": _mean("padding-wrong"),
    "padding-positions": _mean("padding-wrong"),
    "padding-queries": _mean("padding-wrong"),
    "cache-padding-ignored": _mean("padding-wrong"),
    "cache-padding-counted": _mean("padding-wrong"),
}


# Differences without effect, which must not be called faults.
HARMLESS = {
    "mask-1e4": "masked scores are -10,000, whose exponential is zero",
    "cache-single": "a cache that takes one token at a time",
    "padding-counted": "positions count the padding, as in the Hub's models if they are given no positions",
    "masked-first": "scores are masked before they are scaled",
    "scale-split": "queries and keys are each divided by the fourth root",
    "key-bias-missing": "softmax does not see what is added to all keys alike",
    "softmax-upcast": "the softmax is taken in float32",
    "norm-upcast": "norms are taken in float32",
    "logits-upcast": "logits are given in float32",
    "logits-flattened": "logits are flattened for the loss, and attention maps returned beside them",
    "hidden-first": "the last hidden states are returned before the logits",
    "vocabulary-cut": "the vocabulary is padded, and the padding cut off again",
    "heads-permuted": "heads in another order, in and out",
    "dropout-in-training": "dropout where nobody trains",
    "idle-norm": "a norm that nothing calls",
}


class Faults:
    """The faults of a line, and their places."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.sites: dict[str, tuple[str, ...]] = {}
        for word in line.split():
            name, _, sites = word.partition("@")
            if name not in MEANINGS and name not in HARMLESS:
                raise KeyError(f"{name!r} is no fault that tests/support/faulty/faults.py knows")
            self.sites[name] = tuple(filter(None, sites.split(",")))

    def __contains__(self, name: str) -> bool:
        return name in self.sites

    def at(self, site: object) -> frozenset[str]:
        """The words that apply at a block (`1`), a norm (`1.ln_2`) or the final norm (`f`)."""
        held = (name for name, sites in self.sites.items() if not sites or any(_within(str(site), one) for one in sites))
        return frozenset(held)

    def layers(self, name: str, n_layer: int) -> list[int]:
        """The blocks that have a fault; [] if the line does not have it."""
        if name not in self.sites:
            return []
        sites = self.sites[name]
        return [int(site.split(".")[0]) for site in sites if site != "f"] if sites else list(range(n_layer))

    def points(self, name: str) -> tuple[str, ...]:
        """Points where a fault may first show."""
        sites, meaning = self.sites[name], MEANINGS[name]
        first = sites[0] if sites else str(meaning.first_layer)
        if first == "f":
            return ("ln_f",)
        layer, _, norm = first.partition(".")
        return tuple(f"h.{layer}.{norm or 'ln_1'}" if point == NORM else point.format(layer) for point in meaning.points)

    def first(self) -> tuple[str, ...]:
        """The points of the fault that comes first in the forward pass: the port may first differ there."""
        harmful = [name for name in self.sites if name in MEANINGS]
        shown = [(min(map(_rank, points)), points) for name in harmful if (points := self.points(name))]
        return min(shown)[1] if shown else ()


def matches(point: str, allowed: tuple[str, ...]) -> bool:
    """Whether a traced point is one of the allowed places."""
    return any(point == place[1:] if place[0] == "=" else point == place or point.startswith(place + ".") for place in allowed)


def _within(site: str, given: str) -> bool:
    return site == given or site.startswith(given + ".")


PARTS = ("ln_1", "attn", "attn.q", "attn.k", "attn.v", "attn.c_proj", "mid", "ln_2", "mlp")


def _rank(place: str) -> tuple[int, int]:
    """Order of computation of a place."""
    name = place.removeprefix("=")
    if name in ("wte", "wpe", "embed"):
        return -1, 0
    found = re.match(r"h\.(\d+)\.?(.*)", name)
    if found is None:
        return (0, 0) if name == "h" else (10_000, ["ln_f", "logits"].index(name))
    part = found[2]
    if not part:
        return int(found[1]), 99 if place[0] == "=" else 0
    return int(found[1]), PARTS.index(part)
