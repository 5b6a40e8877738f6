"""Formulas that ports are known to compute in place of GPT-2's activation, mask, scale and positions.

A hypothesis is a label, a formula, and the faults that a port has if it computes this. The right one comes first and has no
faults. Shapes: x (B, T, D); scores (B, H, T, T).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.model import ACTIVATIONS


@dataclass(frozen=True)
class Fault:
    """What is wrong: a cause's id, the part of the block (or the point outside the blocks), and what the port does, in words.

    Faults of one id and one ``kind`` are the same fault in several places; ``kind`` is needed where ``detail`` names a block.
    ``norm_after``: the norm ("ln_1", "ln_2") that may have been moved from before a branch to here, behind it. ``fitted``: a
    factor was fitted, and is no known constant.
    """

    id: str
    part: str
    detail: str
    kind: str = ""
    norm_after: str = ""
    fitted: bool = False


@dataclass(frozen=True)
class Hypothesis:
    """A formula that a port may follow. ``silent``: its value is recorded whether or not the port follows it."""

    label: str
    formula: Callable[[Tensor], Tensor]
    faults: tuple[Fault, ...] = ()
    silent: bool = False


class Weighting(NamedTuple):
    """Attention weights (B, H, T, T) that a port may compute. ``cost`` puts a variant behind others that are as right."""

    label: str
    weights: Tensor
    faults: tuple[Fault, ...]
    cost: float = 0.0


ROUNDED = float(torch.tensor(2 / math.pi, dtype=torch.float32).sqrt())  # what a port has that computes it in float32
_TANH = math.sqrt(2 / math.pi)


def _tanh_gelu(root: float = _TANH, cubic: float = 0.044715, power: int = 3) -> Callable[[Tensor], Tensor]:
    return lambda x: 0.5 * x * (1 + torch.tanh(root * (x + cubic * x**power)))


def _identity(x: Tensor) -> Tensor:
    return x


FUNCTIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "gelu_new": ("GELU by its tanh approximation", _tanh_gelu()),
    "gelu": ("the exact GELU, by erf", F.gelu),
    "relu": ("ReLU", torch.relu),
    "silu": ("SiLU, x sigmoid(x)", F.silu),
    "quick_gelu": ("the quick GELU, x sigmoid(1.702 x)", lambda x: x * torch.sigmoid(1.702 * x)),
    "none": ("no activation at all", _identity),
    "tanh": ("tanh", torch.tanh),
    "sigmoid": ("sigmoid", torch.sigmoid),
    "leaky": ("leaky ReLU, slope 0.01", F.leaky_relu),
    "leaky 0.1": ("leaky ReLU, slope 0.1", lambda x: F.leaky_relu(x, 0.1)),
    "leaky 0.2": ("leaky ReLU, slope 0.2", lambda x: F.leaky_relu(x, 0.2)),
    "squared relu": ("the square of ReLU", lambda x: torch.relu(x).square()),
    "relu6": ("ReLU6", F.relu6),
    "elu": ("ELU", F.elu),
    "selu": ("SELU", F.selu),
    "mish": ("Mish", F.mish),
    "softplus": ("softplus", F.softplus),
    "hardswish": ("hard swish", F.hardswish),
    "quick_gelu 1.7": ("a sigmoid GELU, x sigmoid(1.7 x)", lambda x: x * torch.sigmoid(1.7 * x)),
    "quick_gelu 1.6": ("a sigmoid GELU, x sigmoid(1.59577 x)", lambda x: x * torch.sigmoid(2 * _TANH * x)),
    "no half": ("the tanh GELU without its factor 0.5", lambda x: 2 * _tanh_gelu()(x)),
    "no half erf": ("the erf GELU without its factor 0.5", lambda x: 2 * F.gelu(x)),
    "erf unscaled": ("0.5 x (1 + erf(x)), without the division by sqrt(2)", lambda x: 0.5 * x * (1 + torch.erf(x))),
    "no root": ("the tanh GELU with 2/pi instead of its root", _tanh_gelu(2 / math.pi)),
    "root of pi": ("the tanh GELU with sqrt(2) / pi for sqrt(2 / pi)", _tanh_gelu(math.sqrt(2) / math.pi)),
    "root pi/2": ("the tanh GELU with sqrt(pi / 2) for sqrt(2 / pi)", _tanh_gelu(math.sqrt(math.pi / 2))),
    "cubic 0.44715": ("the tanh GELU with 0.44715 for 0.044715", _tanh_gelu(cubic=0.44715)),
    "cubic 0.0044715": ("the tanh GELU with 0.0044715 for 0.044715", _tanh_gelu(cubic=0.0044715)),
    "cubic 0.04715": ("the tanh GELU with 0.04715 for 0.044715", _tanh_gelu(cubic=0.04715)),
    "cubic 0.044": ("the tanh GELU with 0.044 for 0.044715", _tanh_gelu(cubic=0.044)),
    "cubic 0.0447": ("the tanh GELU with 0.0447 for 0.044715", _tanh_gelu(cubic=0.0447)),
    "cubic 0.044175": ("the tanh GELU with 0.044175 for 0.044715", _tanh_gelu(cubic=0.044175)),
    "root 0.8": ("the tanh GELU with 0.8 for sqrt(2/pi)", _tanh_gelu(0.8)),
    "square": ("the tanh GELU with x^2 for x^3", _tanh_gelu(power=2)),
    "no x": ("0.5 (1 + tanh(...)) without the factor x", lambda x: 0.5 * (1 + torch.tanh(_TANH * (x + 0.044715 * x**3)))),
}
CONSTANTS = {"gelu_new 0.7978845608": _tanh_gelu(0.7978845608), "gelu_new 0.79788456": _tanh_gelu(0.79788456)}
CONSTANTS |= {"gelu_new float32": _tanh_gelu(ROUNDED), "gelu_new 0.7979": _tanh_gelu(0.7979)}
SHORT = {"gelu": "erf", "gelu_new": "tanh", "quick_gelu": "quick"}  # as the literature calls them
SAME = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "swish": "silu"}


def activations(config: GPT2Config) -> list[Hypothesis]:
    """Hypotheses for the feed-forward's function; the right one is the config's."""
    right = SAME.get(config.activation_function, config.activation_function)
    wanted = FUNCTIONS[right][0] if right in FUNCTIONS else right
    out = [Hypothesis("right", ACTIVATIONS[config.activation_function])]
    for name, formula in CONSTANTS.items() if right == "gelu_new" else ():
        detail = f"the tanh GELU with sqrt(2/pi) rounded ({name.removeprefix('gelu_new ')})"
        out.append(Hypothesis(name, formula, (Fault("gelu-variant", "mlp.act", detail),)))
    for name, (words, formula) in FUNCTIONS.items():
        if name != right:
            detail = f"{SHORT.get(name, name)}: your activation is {words}; the checkpoint's is {wanted}"
            out.append(Hypothesis(name, formula, (Fault("gelu-variant", "mlp.act", detail),), silent=formula is _identity))
    return out


def attention_weights(scores: Tensor) -> Iterator[Weighting]:
    """What a port may make of scaled scores (B, H, T, T) by mask and softmax. The right weights come first."""
    tokens = scores.size(-1)

    def within(shift: int, transposed: bool = False) -> Tensor:
        allowed = torch.ones(tokens, tokens, dtype=torch.bool).tril(shift)
        return allowed.mT if transposed else allowed

    def masked(allowed: Tensor, fill: float, axis: int = -1) -> Tensor:
        return scores.masked_fill(~allowed, fill).softmax(axis)

    def fault(id: str, detail: str) -> tuple[Fault, ...]:
        return (Fault(id, "attn", detail),)

    missing = fault("mask-missing", "every token sees the whole sequence, the future too")
    strict = fault("mask-strict", "a token sees only what came before it, and not itself")
    ahead = fault("mask-off-by-one", "a token sees the one after it")
    future = fault("mask-missing", "the mask is the wrong way round: a token sees itself and the future, not the past")
    right = ("right", within(0), tuple[Fault, ...]())
    kinds = [right, ("missing", within(tokens), missing), ("strict", within(-1), strict), ("ahead", within(1), ahead)]
    kinds += [("future", within(0, True), future), ("strict future", within(-1, True), future)]
    for label, allowed, why in kinds:
        yield Weighting(label, masked(allowed, -math.inf), why)
        empty = ~allowed.any(-1)
        if bool(empty.any()):  # a token that sees nothing
            yield Weighting(f"{label} filled", masked(allowed, -1e30), why)
            yield Weighting(f"{label} cleared", masked(allowed, -math.inf).nan_to_num(0.0), why)
            added = torch.where(empty[:, None], scores.softmax(-1), masked(allowed, -1e30))
            yield Weighting(f"{label} added", added, why)
    for fill in (-1e4, -1e9, torch.finfo(torch.float32).min):  # the same weights, unless scores are as large
        yield Weighting(f"filled {fill:g}", masked(within(0), fill), (), cost=0.1)
    multiplied = "masked scores become {}, which softmax gives a share, instead of minus infinity"
    for label, allowed, why in (right, kinds[2], kinds[3]):
        for fill in (0.0, 1e-9, -1e-9, -1.0, 1.0, -10.0, -100.0, -1000.0, 1e-20, 1e9):
            detail = fault("mask-multiplied", multiplied.format("zero" if fill == 0 else f"{fill:g}"))
            yield Weighting(f"{label} fill {fill:g}", masked(allowed, fill), (*detail, *why))
        after = fault("mask-multiplied", "the mask is multiplied in after softmax, so the weights no longer sum to one")
        yield Weighting(f"{label} after", scores.softmax(-1) * allowed, (*after, *why))
    ones = fault("mask-missing", "the mask is added to the scores as zeros and ones, which hides nothing")
    yield Weighting("ones added", (scores + within(0)).softmax(-1), ones)
    yield Weighting("ones taken", (scores - (~within(0)).to(scores)).softmax(-1), ones)
    none = fault("softmax-missing", "scores weigh the values as they are, without a softmax")
    yield Weighting("no softmax", scores * within(0), none)
    for axis, words in ((-2, "over the queries"), (1, "over the heads"), (0, "over the batch")):
        if axis in (0, 1) and scores.size(axis) == 1:
            continue
        wrong = fault("softmax-axis", f"the softmax runs {words} (dim={axis}), not over the keys")
        for label, allowed, why in kinds:
            for fill in (-math.inf, -1e30):
                weights = masked(allowed, fill, axis)
                yield Weighting(f"{label} axis {axis} fill {fill:g}", weights, (*wrong, *why))
                if fill == -math.inf and bool(weights.isnan().any()):
                    yield Weighting(f"{label} axis {axis} cleared", weights.nan_to_num(0.0), (*wrong, *why))
        zero = fault("mask-multiplied", multiplied.format("zero"))
        yield Weighting(f"axis {axis} multiplied", (scores * within(0)).softmax(axis), (*wrong, *zero))
        yield Weighting(f"axis {axis} after", scores.softmax(axis) * within(0), wrong)


def right_scale(config: GPT2Config, layer: int) -> float:
    """What GPT-2 multiplies the scores of a block by."""
    root = 1 / math.sqrt(config.head_dim) if config.scale_attn_weights else 1.0
    return root / (layer + 1 if config.scale_attn_by_inverse_layer_idx else 1)


def scale_faults(config: GPT2Config, layer: int, factor: float, inverse_first: bool = False) -> tuple[Fault, ...]:
    """What it means that the scores are multiplied by ``factor``; ``inverse_first``: try the layer's number first."""
    width, size, heads, number = config.n_embd, config.head_dim, config.n_head, layer + 1
    root, right = 1 / math.sqrt(size), right_scale(config, layer)
    if math.isclose(factor, right, rel_tol=1e-7):
        return ()
    wanted = f"the checkpoint's attention multiplies them by {right:.6g}"
    wanted += " (1/sqrt(head size))" if math.isclose(right, root) else ""
    inverse = f"divided by the number of the layer, {number}" if number > 1 else "divided by the number of the layer"
    by_layer = ("scale-inverse-layer", root / number, f"the scores are also {inverse}")
    if config.scale_attn_by_inverse_layer_idx:
        by_layer = ("scale-inverse-layer", root, "the scores are not divided by the layer's number, as the config asks")
    known = [
        ("scale-missing", 1.0, "the scores are not scaled"),
        ("scale-by-width", 1 / math.sqrt(width), "the scores are divided by the root of the width n_embd"),
        ("scale-twice", 1 / size, "the scores are divided by the root of a head's size twice"),
        ("scale-twice", root / math.sqrt(width), "the scores are divided by the root of the width and of a head's size"),
        ("scale-by-width", 1 / width, "the scores are divided by the width n_embd"),
        ("scale-wrong", math.sqrt(size), "the scores are multiplied by the root of a head's size, not divided"),
        ("scale-wrong", 1 / math.sqrt(heads), "the scores are divided by the root of the number of heads"),
    ]
    known.insert(0 if inverse_first or config.scale_attn_by_inverse_layer_idx else len(known), by_layer)

    def fault(id: str, detail: str) -> Fault:
        return Fault(id, "attn", detail, "by the layer's number" if id == "scale-inverse-layer" else "")

    for id, value, words in known:
        if math.isclose(factor, value, rel_tol=1e-7):
            return (fault(id, f"{words}; {wanted}"),)
    for id, value, words in known[:6] if number > 1 else ():
        if math.isclose(factor, value / number, rel_tol=1e-7):
            return fault(id, words), fault("scale-inverse-layer", f"the scores are also {inverse}")
    return (fault("scale-wrong", f"the scores are multiplied by {factor:.6g}; {wanted}"),)


def likely_scales(config: GPT2Config, layer: int) -> list[float]:
    """Factors to try where the scores are not recorded; the right one first."""
    root, width = 1 / math.sqrt(config.head_dim), 1 / math.sqrt(config.n_embd)
    others = [root, 1.0, width, root**2, root / (layer + 1), root * width, width**2, 1 / root]
    return list(dict.fromkeys([right_scale(config, layer), *others]))


def sinusoids(tokens: int, width: int) -> Iterator[tuple[str, Tensor]]:
    """(T, D) tables of sines and cosines, as they are commonly made."""
    places = torch.arange(tokens, dtype=torch.float64)[:, None]
    half = torch.arange((width + 1) // 2, dtype=torch.float64)
    for label, powers in (("2i/D", 2 * half / width), ("i/(D/2 - 1)", half / max(len(half) - 1, 1)), ("4i/D", 4 * half / width)):
        angles = places / 10000.0**powers
        sines, cosines = angles.sin(), angles.cos()
        yield f"interleaved, {label}", torch.stack((sines, cosines), -1).flatten(1)[:, :width]
        yield f"interleaved from the cosine, {label}", torch.stack((cosines, sines), -1).flatten(1)[:, :width]
        yield f"in halves, {label}", torch.cat((sines, cosines), -1)[:, :width]
        yield f"in halves from the cosine, {label}", torch.cat((cosines, sines), -1)[:, :width]
    every = torch.arange(width, dtype=torch.float64)
    angles = places / 10000.0 ** (every / width)
    odd = (every % 2).bool()
    yield "each column of its own frequency", torch.where(odd, angles.cos(), angles.sin())
    angles = places / 10000.0 ** (2 * every / width)
    yield "each column of its own frequency, 2i/D", torch.where(odd, angles.cos(), angles.sin())
    angles = places / 10000.0 ** (2 * (every // 2) / width)
    yield "the sines alone", angles.sin()
