"""Read off recorded values what has free numbers: weights, factors, constants, and which entries were never computed.

Fits are asked where no alternative of the table explains a node. Nothing here names a formula that the table has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from gpt2.port.alternatives.rounding import roundings
from gpt2.port.fits.attention import multiplied, weights_fit
from gpt2.port.fits.lacking import clipped, dropped, left_out
from gpt2.port.fits.linear import Library, Linear
from gpt2.port.fits.norm import Norm
from gpt2.port.fits.observed import Fit, Observed
from gpt2.port.fits.slots import Slots
from gpt2.port.fits.wiring import activation_fit, sum_fit
from gpt2.port.graph import ATTENTION, MODULES, READS, THIRDS, Model, State, right_scale, split
from gpt2.port.terms.causes import Cause

# The cause where some features of a node are not computed; not-loaded for a linear layer.
LEFT_OUT = {
    "ln_1": "layernorm-not-normalising",
    "ln_2": "layernorm-not-normalising",
    "attn.weights": "softmax-missing",
    "attn.mixed": "value-projection-wrong",
    "attn.heads": "value-projection-wrong",
    "mid": "residual-missing",
    "mlp.act": "gelu-variant",
    "": "residual-missing",
}
SUMS = ("mid", "")  # of stream and branch


class Fits:
    """The fits of all nodes of a ``model``; ``earlier``: the nodes of the blocks before. ``check`` raises Spent.

    ``of_module``: the text is read at once, so there is no cache.
    """

    def __init__(self, model: Model, earlier: Sequence[State], check: Callable[[], None], of_module: bool = False) -> None:
        self.model, self.config, self.earlier, self.check = model, model.config, earlier, check
        self.of_module = of_module
        self.library = Library(model.state)
        self.slots: dict[int, Slots] = {}  # by block

    def fit(self, layer: int, node: str, state: State, seen: Observed) -> Fit | None:
        """Return what ``node`` computes from those in ``state`` to give ``seen``; None if nothing fits."""
        rows = seen.wrong_rows()
        for family in (self._chance, self._numbers, self._rounded, self._lacking):
            self.check()
            if (fit := next(iter(family(layer, node, state, seen, rows)), None)) is not None:
                return fit
        return None

    def _chance(self, layer: int, node: str, state: State, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Entries that are zero at random, and limits."""
        part = "attn" if node in ATTENTION else node
        if node in SUMS:
            stream = state["x" if node == "mid" else "mid"]
            branch = Observed(seen.value - stream, seen.slack, seen.bound, seen.right - stream, seen.number)
            fits = (dropped(branch, rows, part),)
            yield from (fit._replace(value=fit.value + stream) for fit in fits if fit is not None)
        yield from filter(None, [dropped(seen, rows, part)])
        if node != "attn.weights":
            id = "residual-scaled" if node in SUMS else "gelu-variant" if node in MODULES or node == "mlp.act" else "wrong-tensor"
            yield from filter(None, [clipped(seen, rows, part, id)])

    def _numbers(self, layer: int, node: str, state: State, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """The free numbers of the node's own formula."""
        if node in MODULES:
            yield from self.linear(layer, node, state).fits(seen, state[READS[node][0]], rows)
        elif node in ("ln_1", "ln_2"):
            weight, bias = (self.model.state[f"h.{layer}.{node}.{leaf}"] for leaf in ("weight", "bias"))
            norm = Norm(node, weight, bias, self.config.layer_norm_epsilon, self.library.vectors)
            yield from norm.fits(seen, state["x" if node == "ln_1" else "mid"], rows)
        elif node == "attn.weights":
            q, k = (split(state[f"attn.{letter}"], self.config.n_head) for letter in "qk")
            yield from weights_fit(seen, q, k, self.config, layer, rows)
            if not self.of_module:
                self.slots[layer] = self._slots(layer, state)
                yield from self.slots[layer].weights(seen, rows)
        elif node == "attn.mixed":
            yield from multiplied(seen, rows)
            if not self.of_module:
                yield from (self.slots.get(layer) or self._slots(layer, state)).results(seen, rows)
        elif node == "mlp.act":
            yield from filter(None, [activation_fit(seen, state["mlp.c_fc"], rows)])
        elif node in SUMS:
            yield from filter(None, [sum_fit(seen, self._terms(node, state), rows, node)])

    def _rounded(self, layer: int, node: str, state: State, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """A result in fewer bits."""
        for words, rounded in roundings() if node not in (*MODULES, *ATTENTION) else ():
            fault = Cause.at("reduced-precision", node, f"its result is rounded {words}")
            yield from filter(None, [seen.mostly(rounded(seen.right), rows, fault)])

    def _lacking(self, layer: int, node: str, state: State, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """A few features that are not computed."""
        bias = self.linear(layer, node, state).bias if node in MODULES else None
        part = "attn" if node in ATTENTION else node
        yield from (one.fit for one in left_out(seen, rows, part, LEFT_OUT.get(node, "not-loaded"), bias))

    def _slots(self, layer: int, state: State) -> Slots:
        """Return the slots of a cache, which may hold keys and values of this block and of those before."""
        keys, values = ([split(one[f"attn.{letter}"], self.config.n_head) for one in (state, *self.earlier)] for letter in "kv")
        return Slots(split(state["attn.q"], self.config.n_head), keys, values, right_scale(self.config, layer), self.check)

    def linear(self, layer: int, node: str, state: State) -> Linear:
        """Return the linear layer of a node."""
        weight, bias = (self.model.state[f"h.{layer}.{MODULES[node]}.{leaf}"] for leaf in ("weight", "bias"))
        if node in THIRDS:
            weight, bias = weight.chunk(3, 1)[THIRDS[node]], bias.chunk(3)[THIRDS[node]]
        return Linear(self.library, f"h.{layer}.{MODULES[node]}.weight", node, weight, bias, self.config, self.check)

    def _terms(self, node: str, state: State) -> dict[str, Tensor]:
        """Return what a sum may hold, GPT-2's two terms first."""
        bare = partial(F.layer_norm, normalized_shape=state["x"].shape[-1:], eps=self.config.layer_norm_epsilon)
        terms = {
            "the block's input": state["x"],
            "attention's result": state["attn.c_proj"],
            "attention's normed input": state["ln_1"],
            "attention's input normed, without weight and bias,": bare(state["x"]),
        }
        if node != "mid":
            after = {"the stream after attention": state["mid"], "the feed-forward's result": state["mlp.c_proj"]}
            normed = {
                "the feed-forward's normed input": state["ln_2"],
                "the feed-forward's input normed, without weight and bias,": bare(state["mid"]),
            }
            terms = after | terms | normed
        if self.earlier:
            before, names = self.earlier[-1], {"feed-forward": "mlp.c_proj", "attention": "attn.c_proj", "input": "x"}
            terms |= {"the embeddings": self.earlier[0]["x"]}
            terms |= {f"the {name} of the block before": before[part] for name, part in names.items()}
        return {
            words: value for words, value in terms.items() if value.shape == state["x"].shape and bool(value.isfinite().all())
        }
