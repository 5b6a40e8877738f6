"""Other activations, and activations where GPT-2 has none. A new function is one line of FUNCTIONS."""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from gpt2.port.alternatives.alternative import Alternative, changed
from gpt2.port.graph import Function, Model

ROOT, CUBIC = math.sqrt(2 / math.pi), 0.044715  # r and c in words
ROOT_OF_TWO = float(torch.tensor(2.0).sqrt())  # both in float32, as ports compute them
ROUNDED = float(torch.tensor(2 / math.pi, dtype=torch.float32).sqrt())
TANH = "the tanh GELU with"


def _tanh(root: float = ROOT, cubic: float = CUBIC, power: int = 3) -> Function:
    """Return GELU with other constants: 0.5 x (1 + tanh(r (x + c x^3)))."""
    return lambda x: 0.5 * x * (1 + torch.tanh(root * (x + cubic * x**power)))


def _erf(times: float) -> Function:
    return lambda x: 0.5 * x * (1 + torch.erf(x * times))


def _sigmoid(times: float) -> Function:
    return lambda x: x * torch.sigmoid(times * x)


GELU = _tanh()
FUNCTIONS: dict[str, tuple[str, Function]] = {
    "gelu_new": ("GELU by its tanh approximation", GELU),
    "gelu": ("the exact GELU, by erf", F.gelu),
    "relu": ("ReLU", torch.relu),
    "silu": ("SiLU, x sigmoid(x)", F.silu),
    "quick_gelu": ("the quick GELU, x sigmoid(1.702 x)", _sigmoid(1.702)),
    "none": ("no activation at all", lambda x: x),
    "tanh": ("tanh", torch.tanh),
    "sigmoid": ("sigmoid", torch.sigmoid),
    "leaky": ("leaky ReLU, slope 0.01", F.leaky_relu),
    "squared relu": ("the square of ReLU", lambda x: torch.relu(x).square()),
    "elu": ("ELU", F.elu),
    "mish": ("Mish", F.mish),
    "quick_gelu 1.7": ("a sigmoid GELU, x sigmoid(1.7 x)", _sigmoid(1.7)),
    "no half": ("the tanh GELU without its factor 0.5", lambda x: 2 * GELU(x)),
    "no half erf": ("the erf GELU without its factor 0.5", lambda x: 2 * F.gelu(x)),
    "erf unscaled": ("0.5 x (1 + erf(x)), without the division by sqrt(2)", _erf(1.0)),
    "erf times root": ("the erf GELU with a product, erf(x sqrt(2))", _erf(math.sqrt(2))),
    "erf float32": ("the exact GELU, by erf, its constant in float32", _erf(1 / ROOT_OF_TWO)),
    "no root": (f"{TANH} 2/pi instead of its root", _tanh(2 / math.pi)),
    "root of pi": (f"{TANH} sqrt(2) / pi for sqrt(2 / pi)", _tanh(math.sqrt(2) / math.pi)),
    **{
        f"cubic {cubic:g}": (f"{TANH} {cubic:g} for 0.044715", _tanh(cubic=cubic))
        for cubic in (0.44715, 0.0044715, 0.04715, 0.044, 0.0447, 0.044175, 0.0)
    },
    "swapped": (f"{TANH} its two constants exchanged", _tanh(CUBIC, ROOT)),
    "root 0.8": (f"{TANH} 0.8 for sqrt(2/pi)", _tanh(0.8)),
    "square": (f"{TANH} x^2 for x^3", _tanh(power=2)),
    "constant cubed": (f"{TANH} its constant inside the cube, (c x)^3 for c x^3", _tanh(cubic=CUBIC**3)),
    "root on x": (f"{TANH} r on x alone, r x + c x^3 for r (x + c x^3)", _tanh(cubic=CUBIC / ROOT)),
    "twice": ("the tanh GELU of the tanh GELU", lambda x: GELU(GELU(x))),
    "times x": ("the tanh GELU multiplied by x once more, as if it were its factor", lambda x: x * GELU(x)),
}
CONSTANTS = {"0.7978845608": 0.7978845608, "0.79788456": 0.79788456, "float32": ROUNDED, "0.7979": 0.7979}  # for sqrt(2/pi)
SHORT = {"gelu": "erf", "gelu_new": "tanh", "quick_gelu": "quick"}  # names in the literature
SAME = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "swish": "silu"}
PLACES = {
    "attn.c_proj": "attention's result goes",
    "mlp.c_proj": "the feed-forward's result goes",
    "attn.heads": "the merged heads go",
    "attn.v": "the values go",
    "": "the stream behind the block goes",
}


def activations(model: Model) -> Iterator[Alternative]:
    """Yield every activation but the checkpoint's, one behind the second layer, and a ReLU where there is no activation."""
    right = SAME.get(model.config.activation_function, model.config.activation_function)
    wanted = FUNCTIONS[right][0] if right in FUNCTIONS else right
    known = {f"the tanh GELU with sqrt(2/pi) rounded ({name})": _tanh(root) for name, root in CONSTANTS.items()}
    made = known if right == "gelu_new" else {}
    for name, (words, formula) in FUNCTIONS.items():
        if name != right:
            made[f"{SHORT.get(name, name)}: your activation is {words}; the checkpoint's is {wanted}"] = formula
    for words, formula in made.items():
        yield Alternative("gelu-variant", words, {"mlp.act": lambda c, s, f=formula: f(s["mlp.c_fc"])})
    behind = {
        "mlp.act": lambda c, s: s["mlp.c_fc"],
        "mlp.c_proj": lambda c, s: c.right("mlp.act", {"mlp.c_fc": c.right("mlp.c_proj", s)}),
    }
    words, fix = "the activation stands behind the second linear layer, not before it", "x = c_proj(gelu(c_fc(x)))"
    yield Alternative("gelu-variant", words, behind, "mlp.act", fix=fix)
    for node, what in PLACES.items():
        words = f"{what} through an activation, ReLU; GPT-2 has none there"
        fix = "no activation but behind c_fc: c_proj(gelu(c_fc(x)))"
        yield Alternative("gelu-variant", words, changed(torch.relu, node), fix=fix)
