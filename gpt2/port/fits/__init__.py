"""Read off recorded values what has free numbers: a weight, a bias, one constant in linear maps, norms and wiring.

Fits are asked where no alternative of the table explains a node. Nothing here names a formula that the table has.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from gpt2.port.fits.affine import Linear, Norm, vectors_of
from gpt2.port.fits.observed import Fit, Observed, dropped
from gpt2.port.fits.wiring import SUMS, activation_fit, mask_fit, scores_fit, sum_fit
from gpt2.port.graph import ATTENTION, MODULES, READS, Model, State, right_scale, split


class Fits:
    """The fits of all nodes of a ``model``; ``earlier``: the nodes of the blocks before. ``check`` raises Spent."""

    def __init__(self, model: Model, earlier: Sequence[State], check: Callable[[], None]) -> None:
        self.model, self.config, self.earlier, self.check = model, model.config, earlier, check
        self.vectors = vectors_of(model.state)

    def fit(self, layer: int, node: str, state: State, seen: Observed) -> Fit | None:
        """Return what ``node`` computes from those in ``state`` to give ``seen``; None if nothing fits."""
        rows = seen.wrong_rows()
        for family in (self._dropped, self._numbers):
            self.check()
            if (fit := next(filter(None, family(layer, node, state, seen, rows)), None)) is not None:
                return fit
        return None

    def _dropped(self, layer: int, node: str, state: State, seen: Observed, rows: Tensor) -> Iterator[Fit | None]:
        """Yield entries that are zero at random: of the branch that a sum adds, or of the node."""
        part = "attn" if node in ATTENTION else node
        if node in SUMS:
            stream = state["x" if node == "mid" else "mid"]
            branch = Observed(seen.value - stream, seen.slack, seen.bound, seen.right - stream, seen.number)
            fit = dropped(branch, rows, part)
            yield fit and fit._replace(value=fit.value + stream)
        yield dropped(seen, rows, part)

    def _numbers(self, layer: int, node: str, state: State, seen: Observed, rows: Tensor) -> Iterator[Fit | None]:
        """Yield the free numbers of the node's own formula."""
        if node in MODULES:
            linear = Linear(node, *self.model.site(layer).linear(node), self.vectors)
            yield from linear.fits(seen, state[READS[node][0]], rows)
        elif node in ("ln_1", "ln_2"):
            numbers = self.model.site(layer).numbers(node)
            norm = Norm(node, *numbers, self.config.layer_norm_epsilon, self.vectors)
            yield from norm.fits(seen, state["x" if node == "ln_1" else "mid"], rows)
        elif node == "attn.weights":
            q, k = (split(state[f"attn.{letter}"], self.config.n_head) for letter in "qk")
            yield scores_fit(seen, q, k, self.config, layer, rows)
            yield mask_fit(seen, q, k, right_scale(self.config, layer), self.model.ids, rows)
        elif node == "mlp.act":
            yield activation_fit(seen, state["mlp.c_fc"], rows)
        elif node in SUMS:
            yield sum_fit(seen, self._terms(node, state), rows, node)

    def _terms(self, node: str, state: State) -> dict[str, Tensor]:
        """Return what a sum may hold, GPT-2's two terms first."""
        bare = partial(F.layer_norm, normalized_shape=state["x"].shape[-1:], eps=self.config.layer_norm_epsilon)
        after = {"the stream after attention": "mid", "the feed-forward's result": "mlp.c_proj"} if node != "mid" else {}
        names = {**after, "the block's input": "x", "attention's result": "attn.c_proj", "attention's normed input": "ln_1"}
        terms = {words: state[name] for words, name in names.items()}
        terms["attention's input normed, without weight and bias,"] = bare(state["x"])
        if node != "mid":
            terms["the feed-forward's normed input"] = state["ln_2"]
            terms["the feed-forward's input normed, without weight and bias,"] = bare(state["mid"])
        if self.earlier:
            terms["the embeddings"] = self.earlier[0]["x"]
        return {words: one for words, one in terms.items() if one.shape == state["x"].shape and bool(one.isfinite().all())}
