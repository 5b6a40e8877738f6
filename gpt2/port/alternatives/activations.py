"""Other activations, and activations where GPT-2 has none. A new function is one line of ``diagnosis/activations.py``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from gpt2.port.alternative import Alternative, changed, family
from gpt2.port.diagnosis.activations import FUNCTIONS, activation_faults
from gpt2.port.graph import Model

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
