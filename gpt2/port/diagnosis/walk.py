"""Walk through GPT-2's forward pass stage by stage, with a port's own weights and from the port's own recorded values.

At each stage the right formula and every known wrong one are computed from what was found before. The port follows the formula
whose value is among its recorded tensors, and which the next projection confirms. The walk goes on from that value, so it finds
several faults. A stage that no recorded tensor confirms stays open until something that follows from it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import point_at
from gpt2.model import GPT2
from gpt2.port.diagnosis.account import Walk, account
from gpt2.port.diagnosis.attending import Attending, Projected, Recorded, added, affine, project, streams
from gpt2.port.diagnosis.ending import Ending
from gpt2.port.diagnosis.hypotheses import Fault, Hypothesis, activations
from gpt2.port.diagnosis.search import Choice, Chooser, Kind, Option
from gpt2.port.diagnosis.trail import Trail
from gpt2.port.diagnosis.wiring import STREAM, AttentionBranch, Embeddings, Norms, inputs, middles, outputs
from gpt2.port.recording.pool import Pool

Confirm = Callable[[Tensor], Recorded | None]


@torch.no_grad()
def walk(
    pool: Pool, own: Mapping[str, Tensor], config: GPT2Config, ids: Tensor, reference: GPT2, head: Tensor | None = None
) -> Walk:
    """What a program computed on ``ids`` (B, T), B and T at least 2, of which ``pool`` holds the intermediate tensors.

    Args:
        pool: from a module (:func:`.recording.pool.collect`), or from arrays of any origin (:meth:`.Pool.of`).
        own: the program's weights by the checkpoint's names.
        reference: our model with the checkpoint's weights, in float64.
        head: the head's own weight (V, D), if that is not the token embedding.
    """
    weights = {name: tensor.detach().double() for name, tensor in own.items()}
    if not bool(weights["wpe.weight"].any()):  # no positions: whether it adds the checkpoint's, or others, or none, is open
        weights["wpe.weight"] = reference.wpe.weight.detach().double()
    walker = Walker(pool, weights, config, ids, head)
    walker.run()
    return account(walker.trail, reference)


def walk_arrays(arrays: Iterable[Tensor], logits: Tensor, ids: Tensor, reference: GPT2) -> Walk:
    """:func:`walk` without a module: ``arrays`` are a program's intermediate values, in any order and layout, and ``logits``
    (B, T, V) its output. The program is taken to hold the weights of ``reference``."""
    return walk(Pool.of(arrays, logits), reference.state_dict(), reference.config, ids, reference)


class Walker:
    """Follows the blocks as they run; all that it learns goes to :attr:`trail`."""

    def __init__(self, pool: Pool, own: dict[str, Tensor], config: GPT2Config, ids: Tensor, head: Tensor | None) -> None:
        self.pool, self.own, self.config, self.ids = pool, own, config, ids
        self.trail = Trail(config, ids, own, pool.narrow)
        self.blocks = self.trail.blocks
        self.chooser, self.norms = Chooser(pool), Norms(config, own)
        self.ending = Ending(self.chooser, self.norms, own["wte.weight"] if head is None else head.double())

    def run(self) -> None:
        """To the logits, or as far as the port can be followed."""
        options = Embeddings(self.pool, self.norms, self.ids).options()
        while len(self.blocks) <= 2 * self.config.n_layer:
            if len(self.blocks) >= self.config.n_layer and self._end(options):
                return
            entered = self._next(options)
            if self.trail.reached:
                return
            following = None if entered is None else self._block(len(self.blocks), *entered)
            if following is None:
                if not self.trail.lost or entered is None:
                    inside = len(self.blocks) < self.config.n_layer
                    self.trail.lost.append(point_at(len(self.blocks), "ln_1") if inside else "ln_f")
                return
            options = following

    def _end(self, options: list[Option], quick: bool = False) -> bool:
        choice = self.ending.reach(options, quick)
        if choice is None:
            return False
        self.trail.settle(len(self.blocks) - 1 if self.blocks else None, choice, "ln_f")
        self.trail.blame(None, choice.result.faults, choice.result.error)
        self.trail.keep("logits", self.ending.logits(choice.value), choice.result.error)
        self.trail.reached = True
        return True

    def _weights(self, layer: int) -> dict[str, Tensor]:
        return {name.removeprefix(f"h.{layer}."): t for name, t in self.own.items() if name.startswith(f"h.{layer}.")}

    def _next(self, options: list[Option]) -> tuple[int, Choice[Projected]] | None:
        """The block that runs next, by whose weights are used, and what goes into its attention. None if the walk ends here."""
        expected = self.blocks[-1] + 1 if self.blocks else 0
        every = range(self.config.n_layer)
        expected, *others = sorted(every, key=lambda layer: (layer != expected, layer < expected, layer))
        likely = self.chooser.seen(self.chooser.likely("out", options), STREAM)
        for layer in (expected, *others):  # another block, before another fault is assumed
            if (choice := self._enter(layer, likely, narrow=layer != expected)) is not None:
                return layer, choice
        if self.blocks and self._end(options, quick=True):
            return None
        kept = self.chooser.seen(options, STREAM)
        for layer in (expected, *others):
            some = kept if layer == expected else kept[:6]
            if (choice := self._enter(layer, some, narrow=layer != expected)) is not None:
                return layer, choice
        if self.blocks and self._end(options):
            return None
        choice = self._search_input(expected) or self._unseen(expected, kept)
        return None if choice is None else (expected, choice)

    def _enter(self, layer: int, kept: list[Option], narrow: bool = False) -> Choice[Projected] | None:
        """What goes into attention, with block ``layer``'s weights. ``narrow``: only options that are cheap or known."""
        weights = self._weights(layer)
        options: list[Option] = []
        missing = Fault("norm-missing", "ln_1", "attention takes the stream as it is, without a norm before it")
        for stream in kept:
            options += self.norms.before(f"h.{layer}.ln_1", stream, missing)
        if narrow:
            known = self.chooser.known.get("ln_1", [])
            options = [option for option in options if option.price <= 1 or option.path in known][:60]
        return self.chooser.choose("ln_1", options, lambda x: project(self.chooser, self.config, x, weights), STREAM)

    def _unseen(self, layer: int, kept: list[Option]) -> Choice[Projected] | None:
        """The right input, if it is recorded although its projections are not: what comes after has to confirm it."""
        if layer in self.blocks:
            return None
        for stream in kept:
            option = stream.then("right", self.norms.at(f"h.{layer}.ln_1")[0].formula, kind=Kind.RIGHT)
            if stream.price <= 0 and (match := self.pool.find(option.value, *STREAM)) is not None:
                weights, bias = (self.own[f"h.{layer}.attn.c_attn.{leaf}"] for leaf in ("weight", "bias"))
                value = self.pool.adopt(option.value, match)
                parts = dict(zip("qkv", (value @ weights + bias).chunk(3, -1), strict=True))
                return Choice(option, value, match.error, Projected(parts, {}))
        return None

    def _search_input(self, layer: int) -> Choice[Projected] | None:
        """Any recorded tensor that a block's projection is applied to; how it was made is unknown."""
        if layer in self.blocks:
            return None
        weights = self._weights(layer)
        for entry in self._streams():
            projected = project(self.chooser, self.config, entry, weights, enough=2)
            if projected is not None:
                stream = self._normed_from(entry, f"h.{layer}.ln_1")
                point = point_at(len(self.blocks), "ln_1")
                if stream is not None:
                    point = f"h.{len(self.blocks) - 1}" if self.blocks else "embed"
                self.trail.lost.append(point)
                return Choice(self._recorded(entry, stream), entry, 0.0, projected)
        return None

    def _streams(self) -> Iterable[Tensor]:
        return streams(self.pool, self.ids, self.config.n_embd)

    def _normed_from(self, entry: Tensor, norm: str) -> Option | None:
        """The recorded tensor that gives ``entry`` by the right norm."""
        formula = self.norms.at(norm)[0].formula
        for before in self._streams():
            if worst_relative_error(formula(before), entry) < self.pool.bound:
                return Option.known("recorded stream", before)
        return None

    def _recorded(self, entry: Tensor, base: Option | None) -> Option:
        return Option("recorded", lambda: entry, base=base)

    def _block(self, n: int, layer: int, choice: Choice[Projected]) -> list[Option] | None:
        """Follow the block that runs as number ``n``, with the weights of block ``layer``: the streams that may come out."""
        self.blocks.append(layer)
        weights, stream = self._weights(layer), choice.option.base
        self.chooser.remember("out", stream)
        self.trail.settle(n, choice, "ln_1")
        x = None if stream is None else stream.value
        results = Attending(self.chooser, self.trail, n, layer, weights, choice.result, choice.value, x).run()
        attention = AttentionBranch(x, choice.value, choice.option.kind is not Kind.NO_NORM, results)
        return self._feed_forward(n, layer, weights, attention)

    def _feed_forward(self, n: int, layer: int, weights: dict[str, Tensor], attention: AttentionBranch) -> list[Option] | None:
        def confirm(x: Tensor) -> Recorded | None:
            return affine(self.chooser, x, weights["mlp.c_fc.weight"], weights["mlp.c_fc.bias"], "mlp.c_fc")

        choice = None
        every = list(middles(self.norms, self.pool, layer, attention)) if attention.results else []
        for mids in (self.chooser.likely("mid", every), every):
            kept = self.chooser.seen(mids, STREAM)
            choice = self.chooser.choose("ln_2", inputs(self.norms, layer, attention, kept), confirm, STREAM)
            if choice is not None:
                break
        recognised = choice is not None
        choice = choice or self._search_feed_forward_input(n, layer, confirm)
        if choice is None:
            self.trail.lost.append(point_at(n, "mid" if attention.results else "attn"))
            return None
        mid = choice.option.base
        if mid is not None and mid.kind is Kind.PARALLEL:
            mid = None
        if recognised:
            self.chooser.remember("mid", mid)
        if not attention.results and mid is not None:
            self.trail.lost.append(point_at(n, "attn"))
        self.trail.settle(n, choice, "ln_2")
        up = choice.result
        self.trail.keep(point_at(n, "mlp.c_fc"), up.value, up.error)
        self.trail.blame(n, up.faults, up.error)
        results = self._activate(n, weights, up.value)
        if choice.option.is_parallel and attention.stream is not None:
            self.trail.keep(point_at(n, "mid"), attention.stream + attention.results[0].value, None)
        taken = choice.option.seen_as(choice.value)
        return [option for result in results for option in outputs(self.norms, self.pool, layer, attention, mid, taken, result)]

    def _search_feed_forward_input(self, n: int, layer: int, confirm: Confirm) -> Choice[Recorded] | None:
        """Any recorded tensor that goes into the feed-forward; how it was made is unknown."""
        for entry in self._streams():
            if (up := confirm(entry)) is not None:
                mid = self._normed_from(entry, f"h.{layer}.ln_2")
                self.trail.lost.append(point_at(n, "ln_2" if mid is None else "mid"))
                return Choice(self._recorded(entry, mid), entry, 0.0, up)
        return None

    def _activate(self, n: int, weights: dict[str, Tensor], up: Tensor) -> list[Option]:
        """From the hidden units before the activation to what the feed-forward may give."""
        weight, bias = weights["mlp.c_proj.weight"], weights["mlp.c_proj.bias"]

        def confirm(x: Tensor) -> Recorded | None:
            return affine(self.chooser, x, weight, bias, "mlp.c_proj")

        options = [_activated(hypothesis, up) for hypothesis in activations(self.config)]
        choice = self.chooser.choose("act", options, confirm, STREAM) or self._unknown_activation(up, confirm)
        if choice is None:  # neither recorded nor confirmed: what follows has to decide
            return [Option.known(f"hidden {one.label}", one.value @ weight + bias, *one.faults) for one in options]
        self.trail.settle(n, choice, "mlp.act")
        self.trail.keep(point_at(n, "mlp.c_proj"), choice.result.value, choice.result.error)
        return added(bias, choice.result, "mlp.c_proj")

    def _unknown_activation(self, up: Tensor, confirm: Confirm) -> Choice[Recorded] | None:
        """Any recorded tensor that the second layer is applied to."""
        fault = Fault("gelu-variant", "mlp.act", "an activation that is none of those known here")
        for entry in self.pool.of_size(up.numel()):
            if entry.shape[-1] == up.shape[-1] and (down := confirm(entry.reshape(up.shape))) is not None:
                option = Option.known("unknown", entry.reshape(up.shape), fault)
                return Choice(option, option.value, 0.0, down)
        return None


def _activated(hypothesis: Hypothesis, up: Tensor) -> Option:
    kind = Kind.OTHER if hypothesis.faults else Kind.RIGHT
    return Option(hypothesis.label, lambda: hypothesis.formula(up), hypothesis.faults, kind, hypothesis.silent)
