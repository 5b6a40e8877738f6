"""Other activations, and activations where GPT-2 has none. A new function is one line of FUNCTIONS."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from gpt2.config import GPT2Config
from gpt2.port.alternatives.alternative import Alternative, changed, family
from gpt2.port.graph import Function, Model
from gpt2.port.terms.causes import Cause

ROUNDED = float(torch.tensor(2 / math.pi, dtype=torch.float32).sqrt())  # as a port computes it in float32
_TANH = math.sqrt(2 / math.pi)


def _tanh_gelu(root: float = _TANH, cubic: float = 0.044715, power: int = 3) -> Function:
    return lambda x: 0.5 * x * (1 + torch.tanh(root * (x + cubic * x**power)))


# The tanh and the erf GELU with parentheses in the wrong place; r is sqrt(2/pi), c is 0.044715.
MISPLACED: dict[str, tuple[str, Function]] = {
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
FUNCTIONS: dict[str, tuple[str, Function]] = {
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
    "exclusive or": (
        "the tanh GELU with an exclusive or for the cube, as x ^ 3 is in C and JavaScript",
        lambda x: 0.5 * x * (1 + torch.tanh(_TANH * (x + 0.044715 * (x.nan_to_num(0, 0, 0).long() ^ 3).to(x)))),
    ),
    "square": ("the tanh GELU with x^2 for x^3", _tanh_gelu(power=2)),
    **MISPLACED,
    "twice": ("the tanh GELU of the tanh GELU", lambda x: _tanh_gelu()(_tanh_gelu()(x))),
    "zero": ("always zero, as where a program divides 1 by 2 in integers", torch.zeros_like),
    "times x": ("the tanh GELU multiplied by x once more, as if it were its factor", lambda x: x * _tanh_gelu()(x)),
    "times x erf": ("the exact GELU multiplied by x once more", lambda x: x * F.gelu(x)),
    "no x": ("0.5 (1 + tanh(...)) without the factor x", lambda x: 0.5 * (1 + torch.tanh(_TANH * (x + 0.044715 * x**3)))),
}
CONSTANTS = {"0.7978845608": 0.7978845608, "0.79788456": 0.79788456, "float32": ROUNDED, "0.7979": 0.7979}  # for sqrt(2/pi)
SHORT = {"gelu": "erf", "gelu_new": "tanh", "quick_gelu": "quick"}  # names in the literature
SAME = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "swish": "silu"}


def activation_faults(config: GPT2Config) -> Iterator[tuple[str, Function, Cause]]:
    """Yield the label, the formula and the fault of every activation but the checkpoint's."""
    right = SAME.get(config.activation_function, config.activation_function)
    wanted = FUNCTIONS[right][0] if right in FUNCTIONS else right

    def fault(detail: str) -> Cause:
        return Cause.at("gelu-variant", "mlp.act", detail)

    for name, root in CONSTANTS.items() if right == "gelu_new" else ():
        yield f"gelu_new {name}", _tanh_gelu(root), fault(f"the tanh GELU with sqrt(2/pi) rounded ({name})")
    for name, (words, formula) in FUNCTIONS.items():
        if name != right:
            detail = f"{SHORT.get(name, name)}: your activation is {words}; the checkpoint's is {wanted}"
            yield name, formula, fault(detail)


TWINS = ("relu6",)  # activations that give most numbers what a commoner one gives
PLACES = {
    "attn.c_proj": "attention's result",
    "mlp.c_proj": "the feed-forward's result",
    "attn.heads": "the merged heads",
    "attn.q": "the queries",
    "attn.k": "the keys",
    "attn.v": "the values",
    "": "the stream behind the block",
}
COMMON = ("attn.c_proj", "mlp.c_proj", "attn.heads", "attn.v", "")  # where people do so


@family
def activations(model: Model) -> Iterator[Alternative]:
    """Yield every activation but the checkpoint's, and one that stands behind the second layer."""
    for label, formula, fault in activation_faults(model.config):
        edits = {"mlp.act": lambda c, s, f=formula: f(s["mlp.c_fc"])}
        yield Alternative(fault.id, fault.detail, edits, rare=label in TWINS)
    behind = {
        "mlp.act": lambda c, s: s["mlp.c_fc"],
        "mlp.c_proj": lambda c, s: c.right("mlp.act", {"mlp.c_fc": c.right("mlp.c_proj", s)}),
    }
    yield Alternative("gelu-variant", "the activation stands behind the second linear layer, not before it", behind, "mlp.act")


@family
def more_activations(model: Model) -> Iterator[Alternative]:
    """Yield activations behind each value of a block."""
    for (node, what), name in itertools.product(PLACES.items(), ("relu", "gelu_new", "tanh")):
        words = (
            f"{what} {'go' if what.endswith('s') else 'goes'} through an activation, {FUNCTIONS[name][0]}; GPT-2 has none there"
        )
        rare = name != "relu" or node not in COMMON
        yield Alternative("gelu-variant", words, changed(FUNCTIONS[name][1], node), rare=rare, shared=node not in COMMON)
