"""Known right and wrong formulas for GPT-2's activation, mask, scale and positions; the right one comes first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.model import ACTIVATIONS
from gpt2.port.diagnosis.search import Fault, Formula, Kind, Option

ROUNDED = float(torch.tensor(2 / math.pi, dtype=torch.float32).sqrt())  # as a port computes it in float32
_TANH = math.sqrt(2 / math.pi)
MIN_FITTED, FITTED_BOUND = 32, 1e-6  # elements that a fit needs, and its largest relative error


def _tanh_gelu(root: float = _TANH, cubic: float = 0.044715, power: int = 3) -> Formula:
    return lambda x: 0.5 * x * (1 + torch.tanh(root * (x + cubic * x**power)))


# The tanh and the erf GELU with parentheses in the wrong place; r is sqrt(2/pi), c is 0.044715.
MISPLACED: dict[str, tuple[str, Formula]] = {
    "constant cubed": ("the tanh GELU with its constant inside the cube, (c x)^3 for c x^3", _tanh_gelu(cubic=0.044715**3)),
    "sum cubed": (
        "the tanh GELU with the cube around the sum, (x + c x)^3 for x + c x^3",
        lambda x: 0.5 * x * (1 + torch.tanh(_TANH * (1.044715 * x) ** 3)),
    ),
    "root on x": (
        "the tanh GELU with r on x alone, r x + c x^3 for r (x + c x^3)",
        _tanh_gelu(cubic=0.044715 / _TANH),
    ),
    "root on the cube": (
        "the tanh GELU with r on the cube alone, x + r c x^3 for r (x + c x^3)",
        lambda x: 0.5 * x * (1 + torch.tanh(x + _TANH * 0.044715 * x**3)),
    ),
    "no cube's x": (
        "the tanh GELU with x^3 outside the sum, r (x + c) x^3 for r (x + c x^3)",
        lambda x: 0.5 * x * (1 + torch.tanh(_TANH * (x + 0.044715) * x**3)),
    ),
    "tanh of r": (
        "the tanh GELU with tanh around r alone, tanh(r) (x + c x^3) for tanh(r (x + c x^3))",
        lambda x: 0.5 * x * (1 + math.tanh(_TANH) * (x + 0.044715 * x**3)),
    ),
    "tanh of x": (
        "the tanh GELU with tanh around the first summand alone, tanh(r x) + c x^3",
        lambda x: 0.5 * x * (1 + torch.tanh(_TANH * x) + 0.044715 * x**3),
    ),
    "no parentheses": (
        "the tanh GELU without the parentheses around 1 + tanh(...): 0.5 x + tanh(...)",
        lambda x: 0.5 * x + torch.tanh(_TANH * (x + 0.044715 * x**3)),
    ),
    "half on both": (
        "the tanh GELU with x on the first summand alone: 0.5 (x + tanh(...)) for 0.5 x (1 + tanh(...))",
        lambda x: 0.5 * (x + torch.tanh(_TANH * (x + 0.044715 * x**3))),
    ),
    "half on one": (
        "the tanh GELU with 0.5 on the first summand alone: x (0.5 + tanh(...)) for 0.5 x (1 + tanh(...))",
        lambda x: x * (0.5 + torch.tanh(_TANH * (x + 0.044715 * x**3))),
    ),
    "no one": (
        "the tanh GELU without its 1: 0.5 x tanh(...)",
        lambda x: 0.5 * x * torch.tanh(_TANH * (x + 0.044715 * x**3)),
    ),
    "minus": ("the tanh GELU with a minus: 0.5 x (1 - tanh(...))", lambda x: x - _tanh_gelu()(x)),
    "cubic subtracted": ("the tanh GELU with x - c x^3 for x + c x^3", _tanh_gelu(cubic=-0.044715)),
    "no cubic": ("the tanh GELU without its cubic term", _tanh_gelu(cubic=0.0)),
    "erf over root": (
        "the erf GELU with the root outside: 0.5 x (1 + erf(x) / sqrt(2)) for 0.5 x (1 + erf(x / sqrt(2)))",
        lambda x: 0.5 * x * (1 + torch.erf(x) / math.sqrt(2)),
    ),
    "erf times root": ("the erf GELU with a product, erf(x sqrt(2))", lambda x: 0.5 * x * (1 + torch.erf(x * math.sqrt(2)))),
    "erf no parentheses": (
        "the erf GELU without the parentheses around 1 + erf(...): 0.5 x + erf(...)",
        lambda x: 0.5 * x + torch.erf(x / math.sqrt(2)),
    ),
    "erf float32": (
        "the exact GELU, by erf, its constant in float32",
        lambda x: 0.5 * x * (1 + torch.erf(x / float(torch.tensor(2.0, dtype=torch.float32).sqrt()))),
    ),
}
FUNCTIONS: dict[str, tuple[str, Formula]] = {
    "gelu_new": ("GELU by its tanh approximation", _tanh_gelu()),
    "gelu": ("the exact GELU, by erf", F.gelu),
    "relu": ("ReLU", torch.relu),
    "silu": ("SiLU, x sigmoid(x)", F.silu),
    "quick_gelu": ("the quick GELU, x sigmoid(1.702 x)", lambda x: x * torch.sigmoid(1.702 * x)),
    "none": ("no activation at all", lambda x: x),
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
    **{
        f"cubic {cubic:g}": (f"the tanh GELU with {cubic:g} for 0.044715", _tanh_gelu(cubic=cubic))
        for cubic in (0.44715, 0.0044715, 0.04715, 0.044, 0.0447, 0.044175)
    },
    "root 0.8": ("the tanh GELU with 0.8 for sqrt(2/pi)", _tanh_gelu(0.8)),
    "square": ("the tanh GELU with x^2 for x^3", _tanh_gelu(power=2)),
    **MISPLACED,
    "no x": ("0.5 (1 + tanh(...)) without the factor x", lambda x: 0.5 * (1 + torch.tanh(_TANH * (x + 0.044715 * x**3)))),
}
CONSTANTS = {"0.7978845608": 0.7978845608, "0.79788456": 0.79788456, "float32": ROUNDED, "0.7979": 0.7979}  # for sqrt(2/pi)
SHORT = {"gelu": "erf", "gelu_new": "tanh", "quick_gelu": "quick"}  # names in the literature
SAME = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "swish": "silu"}


def activation_faults(config: GPT2Config) -> Iterator[tuple[str, Formula, Fault]]:
    """Yield the label, the formula and the fault of every activation but the checkpoint's."""
    right = SAME.get(config.activation_function, config.activation_function)
    wanted = FUNCTIONS[right][0] if right in FUNCTIONS else right

    def fault(detail: str) -> Fault:
        return Fault("gelu-variant", "mlp.act", detail)

    for name, root in CONSTANTS.items() if right == "gelu_new" else ():
        yield f"gelu_new {name}", _tanh_gelu(root), fault(f"the tanh GELU with sqrt(2/pi) rounded ({name})")
    for name, (words, formula) in FUNCTIONS.items():
        if name != right:
            detail = f"{SHORT.get(name, name)}: your activation is {words}; the checkpoint's is {wanted}"
            yield name, formula, fault(detail)


def fitted_activation(x: Tensor, y: Tensor) -> str | None:
    """Return in words which constants a tanh GELU has that gives ``y`` from ``x``, tensors of one shape; None if none does.

    ``tanh`` is undone, and its argument is fitted by a x + b x^p for a few powers p: any constants show, wherever they stand.
    """
    x, y = x.flatten(), y.flatten()
    ratio = 2 * y / x - 1
    usable = (x.abs() > 0.05) & (ratio.abs() < 0.999) & ratio.isfinite()
    x, argument = x[usable], torch.atanh(ratio[usable])
    if len(x) < MIN_FITTED:
        return None
    for power in (3, 2, 4, 5):
        columns = torch.stack((x, x**power), 1)
        a, b = torch.linalg.lstsq(columns, argument[:, None]).solution[:, 0].tolist()
        error = float((columns @ torch.tensor([a, b], dtype=x.dtype) - argument).abs().max() / argument.abs().max())
        if error < FITTED_BOUND:
            right = f"GPT-2's is 0.5 x (1 + tanh({_TANH:.6g} x + {_TANH * 0.044715:.6g} x^3))"
            return f"a tanh GELU with other constants, 0.5 x (1 + tanh({a:.6g} x + {b:.6g} x^{power})); {right}"
    return None


def activations(config: GPT2Config, up: Tensor) -> list[Option]:
    """Return the possible results of the activation of ``up`` (B, T, I)."""
    options = [Option("right", lambda: ACTIVATIONS[config.activation_function](up), kind=Kind.RIGHT)]
    for label, formula, fault in activation_faults(config):
        options.append(Option(label, partial(formula, up), (fault,), silent=label == "none"))
    return options


# Which keys (columns) a query (row) may attend to, of T tokens; by label.
ALLOWED: dict[str, Callable[[Tensor], Tensor]] = {
    "right": lambda every: every.tril(),
    "missing": lambda every: every,
    "strict": lambda every: every.tril(-1),
    "all but first strict": lambda every: every.tril(-1) | (every.cumsum(0) + every.cumsum(1) == 2),
    "ahead": lambda every: every.tril(1),
    "future": lambda every: every.triu(),
    "strict future": lambda every: every.triu(1),
}
INVERTED = Fault("mask-missing", "attn", "the mask is the wrong way round: a token sees itself and the future, not the past")
ALL_INVERTED = Fault(
    "mask-missing", "attn", "the mask is the wrong way round: a token sees the future alone, not itself or the past"
)
MASK_FAULTS: dict[str, tuple[Fault, ...]] = {
    "right": (),
    "missing": (Fault("mask-missing", "attn", "every token sees the whole sequence, the future too"),),
    "strict": (Fault("mask-strict", "attn", "a token sees only what came before it, and not itself"),),
    "all but first strict": (
        Fault("mask-strict", "attn", "a token sees only what came before it, but for the first, which sees itself"),
    ),
    "ahead": (Fault("mask-off-by-one", "attn", "a token sees the one after it"),),
    "future": (INVERTED,),
    "strict future": (ALL_INVERTED,),
}


def allowed(label: str, scores: Tensor) -> Tensor:
    """Return the boolean mask (T, T) of ``label`` for scores (..., T, T)."""
    return ALLOWED[label](torch.ones(scores.shape[-2:], dtype=torch.bool))


def _masked(label: str, fill: float, axis: int = -1) -> Formula:
    return lambda scores: scores.masked_fill(~allowed(label, scores), fill).softmax(axis)


def _cleared(label: str, axis: int = -1) -> Formula:
    return lambda scores: _masked(label, -math.inf, axis)(scores).nan_to_num(0.0)


def _added(label: str) -> Formula:
    """Return the weights if a large number is added to hidden scores: a token that may see nothing sees everything."""

    def formula(scores: Tensor) -> Tensor:
        empty = ~allowed(label, scores).any(-1)
        return torch.where(empty[:, None], scores.softmax(-1), _masked(label, -1e30)(scores))

    return formula


def _after(label: str, axis: int = -1) -> Formula:
    return lambda scores: scores.softmax(axis) * allowed(label, scores)


class Weighing(NamedTuple):
    """A way from scores (B, H, T, T) to attention weights; ``axis``: of the softmax."""

    label: str
    formula: Formula
    faults: tuple[Fault, ...] = ()
    cost: float = 0.0
    axis: int = -1


@cache
def weighings() -> tuple[Weighing, ...]:
    """Return the known ways of mask and softmax, the right one first."""
    out: list[Weighing] = []

    def add(label: str, formula: Formula, *faults: Fault, cost: float = 0.0, axis: int = -1) -> None:
        out.append(Weighing(label, formula, faults, cost, axis))

    def fault(id: str, detail: str) -> Fault:
        return Fault(id, "attn", detail)

    for label, why in MASK_FAULTS.items():
        add(label, _masked(label, -math.inf), *why)
        if label.startswith("strict"):  # some token sees nothing
            add(f"{label} filled", _masked(label, -1e30), *why)
            add(f"{label} cleared", _cleared(label), *why)
            add(f"{label} added", _added(label), *why)
    for fill in (-1e4, -1e9, torch.finfo(torch.float32).min):  # the same weights, unless scores are this large
        add(f"filled {fill:g}", _masked("right", fill), cost=0.1)
    multiplied = "masked scores become {}, which softmax gives a share, instead of minus infinity"
    after = fault("mask-multiplied", "the mask is multiplied in after softmax, so the weights no longer sum to one")
    for label in ("right", "strict", "ahead"):
        for fill in (0.0, 1e-9, -1e-9, -1.0, 1.0, -10.0, -100.0, -1000.0, 1e-20, 1e9):
            detail = fault("mask-multiplied", multiplied.format("zero" if fill == 0 else f"{fill:g}"))
            add(f"{label} fill {fill:g}", _masked(label, fill), detail, *MASK_FAULTS[label])
        add(f"{label} after", _after(label), after, *MASK_FAULTS[label])
    ones = fault("mask-missing", "the mask is added to the scores as zeros and ones, which hides nothing")
    add("ones added", lambda scores: (scores + allowed("right", scores)).softmax(-1), ones)
    add("ones taken", lambda scores: (scores - (~allowed("right", scores)).to(scores)).softmax(-1), ones)
    none = fault("softmax-missing", "scores weigh the values as they are, without a softmax")
    add("no softmax", lambda scores: scores * allowed("right", scores), none)
    zero = fault("mask-multiplied", multiplied.format("zero"))
    for axis, words in ((-2, "over the queries"), (1, "over the heads"), (0, "over the batch")):
        wrong = fault("softmax-axis", f"the softmax runs {words} (dim={axis}), not over the keys")
        for label, why in MASK_FAULTS.items():
            add(f"{label} axis {axis}", _masked(label, -math.inf, axis), wrong, *why, axis=axis)
            if label.startswith("strict") or (axis >= 0 and label != "missing"):  # nothing along the axis is allowed somewhere
                add(f"{label} axis {axis} cleared", _cleared(label, axis), wrong, *why, axis=axis)
            add(f"{label} axis {axis} filled", _masked(label, -1e30, axis), wrong, *why, axis=axis)
        add(f"axis {axis} multiplied", _multiplied(axis), wrong, zero, axis=axis)
        add(f"axis {axis} after", _after("right", axis), wrong, axis=axis)
    return tuple(out)


def _multiplied(axis: int) -> Formula:
    return lambda scores: (scores * allowed("right", scores)).softmax(axis)


def attention_weights(scores: Tensor, factor: float, cost: float = 0.0) -> Iterator[Option]:
    """Yield the possible results of mask and softmax on scores (B, H, T, T); ``factor`` scaled them, ``cost`` is its price."""
    for one in weighings():
        if one.axis < 0 or scores.size(one.axis) > 1:
            kind = Kind.RIGHT if one.label == "right" else Kind.OTHER
            make = partial(one.formula, scores)
            yield Option(one.label, make, one.faults, kind=kind, cost=cost + one.cost, factor=factor)


def right_scale(config: GPT2Config, layer: int) -> float:
    """Return GPT-2's factor of the scores in a block."""
    root = 1 / math.sqrt(config.head_dim) if config.scale_attn_weights else 1.0
    return root / (layer + 1 if config.scale_attn_by_inverse_layer_idx else 1)


def scale_faults(
    config: GPT2Config, layer: int, factor: float, inverse_first: bool = False, exact: bool = False
) -> tuple[Fault, ...]:
    """Return the faults that ``factor`` on the scores shows; ``inverse_first``: try the layer's number first.

    ``exact``: the factor was measured in float64, so that a constant rounded to float32 shows.
    """
    width, size, number = config.n_embd, config.head_dim, layer + 1
    root, right = 1 / math.sqrt(size), right_scale(config, layer)

    def fault(id: str, detail: str) -> Fault:
        return Fault(id, "attn", detail, "by the layer's number" if id == "scale-inverse-layer" else "")

    def is_factor(value: float) -> bool:
        return math.isclose(factor, value, rel_tol=1e-7)

    if is_factor(right):
        if not exact or math.isclose(factor, right, rel_tol=1e-10):
            return ()
        return (fault("scale-wrong", f"the factor of the scores is rounded to float32: {factor:.12g} for {right:.12g}"),)
    inverse = f"the scores are also divided by the number of the layer{f', {number}' if number > 1 else ''}"
    by_layer = ("scale-inverse-layer", root / number, inverse)
    if config.scale_attn_by_inverse_layer_idx:
        by_layer = ("scale-inverse-layer", root, "the scores are not divided by the layer's number, as the config asks")
    known = [
        ("scale-missing", 1.0, "the scores are not scaled"),
        ("scale-by-width", 1 / math.sqrt(width), "the scores are divided by the root of the width n_embd"),
        ("scale-twice", 1 / size, "the scores are divided by the root of a head's size twice"),
        ("scale-twice", root / math.sqrt(width), "the scores are divided by the root of the width and of a head's size"),
        ("scale-by-width", 1 / width, "the scores are divided by the width n_embd"),
        ("scale-wrong", math.sqrt(size), "the scores are multiplied by the root of a head's size, not divided"),
        ("scale-wrong", 1 / math.sqrt(config.n_head), "the scores are divided by the root of the number of heads"),
    ]
    known.insert(0 if inverse_first or config.scale_attn_by_inverse_layer_idx else len(known), by_layer)
    head_size = " (1/sqrt(head size))" if math.isclose(right, root) else ""
    wanted = f"the checkpoint's attention multiplies them by {right:.6g}{head_size}"
    for id, value, words in known:
        if is_factor(value):
            return (fault(id, f"{words}; {wanted}"),)
    for id, value, words in known[:6] if number > 1 else ():
        if is_factor(value / number):
            return fault(id, words), fault("scale-inverse-layer", inverse)
    return (fault("scale-wrong", f"the scores are multiplied by {factor:.6g}; {wanted}"),)


# Factors of the scores in a block that ports apply, the right one among them; by label.
SCALES: dict[str, Callable[[GPT2Config, int], float]] = {
    "by the head size": lambda config, layer: 1 / math.sqrt(config.head_dim),
    "none": lambda config, layer: 1.0,
    "by the width": lambda config, layer: 1 / math.sqrt(config.n_embd),
    "twice": lambda config, layer: 1 / config.head_dim,
    "by the layer": lambda config, layer: 1 / math.sqrt(config.head_dim) / (layer + 1),
    "by both": lambda config, layer: 1 / math.sqrt(config.head_dim * config.n_embd),
    "by the width, no root": lambda config, layer: 1 / config.n_embd,
    "multiplied": lambda config, layer: math.sqrt(config.head_dim),
    "by the heads": lambda config, layer: 1 / math.sqrt(config.n_head),
    "doubled": lambda config, layer: 2 / math.sqrt(config.head_dim),
    "halved": lambda config, layer: 0.5 / math.sqrt(config.head_dim),
}


def likely_scales(config: GPT2Config, layer: int) -> list[float]:
    """Return factors to try if the scores are not recorded, the right one first."""
    return list(dict.fromkeys([right_scale(config, layer), *(scale(config, layer) for scale in SCALES.values())]))


def sinusoids(tokens: int, width: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the usual (T, D) tables of sines and cosines."""
    places = torch.arange(tokens, dtype=torch.float64)[:, None]
    half = torch.arange((width + 1) // 2, dtype=torch.float64)
    for label, powers in (("2i/D", 2 * half / width), ("i/(D/2 - 1)", half / max(len(half) - 1, 1)), ("4i/D", 4 * half / width)):
        angles = places / 10000.0**powers
        for words, waves in (("", (angles.sin(), angles.cos())), (" from the cosine", (angles.cos(), angles.sin()))):
            yield f"interleaved{words}, {label}", torch.stack(waves, -1).flatten(1)[:, :width]
            yield f"in halves{words}, {label}", torch.cat(waves, -1)[:, :width]
    every = torch.arange(width, dtype=torch.float64)
    for label, powers in (("", every / width), (", 2i/D", 2 * every / width)):
        angles = places / 10000.0**powers
        yield f"each column of its own frequency{label}", torch.where((every % 2).bool(), angles.cos(), angles.sin())
    yield "the sines alone", (places / 10000.0 ** (2 * (every // 2) / width)).sin()
