"""Walk through GPT-2's forward pass stage by stage, with a port's own weights and from its own recorded values.

At each stage compute the right formula and every known wrong one. The port follows the one that its recorded tensors contain and
that the next projection confirms; the walk continues from that value, so it finds several faults. A stage without a recorded
tensor stays open until a later one decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gpt2.checkpoint.keys import head_name
from gpt2.config import GPT2Config
from gpt2.measure.metrics import Progress, silent
from gpt2.measure.tracing import point_at
from gpt2.model import GPT2
from gpt2.port.deadline import TimeUp
from gpt2.port.diagnosis.activations import activations, fitted_activation
from gpt2.port.diagnosis.attending import Attending
from gpt2.port.diagnosis.ending import Ending
from gpt2.port.diagnosis.norms import Norms
from gpt2.port.diagnosis.projecting import Projected, added, affine, project
from gpt2.port.diagnosis.replay import Replay
from gpt2.port.diagnosis.search import Choice, Confirm, Fault, Kind, Option, Recorded, Result
from gpt2.port.diagnosis.trail import Trail, Walk, account
from gpt2.port.diagnosis.wiring import STREAM, Branch, Embeddings, inputs, outputs, residuals, streams
from gpt2.port.recording.pool import Pool

UNKNOWN_ACTIVATION = "an activation that is none of those known here"
USUAL = 12  # activations, the likeliest ones, that are tried where only their result is recorded


@torch.no_grad()
def walk(
    pool: Pool,
    own: Mapping[str, Tensor],
    config: GPT2Config,
    ids: Tensor,
    reference: GPT2,
    head: Tensor | None = None,
    progress: Progress = silent,
) -> Walk:
    """Walk through the tensors in ``pool``, which a program computed on ``ids`` (B, T), B and T at least 2.

    ``pool``: from a module (:func:`.recording.collecting.collect`) or from arrays (:meth:`.Pool.of`). ``own``: the program's
    weights by the checkpoint's names. ``reference``: our model in float64. ``head`` (V, D): a head that is not the token
    embedding. At the pool's deadline the walk ends with what it has found.
    """
    weights = {name: tensor.detach().double() for name, tensor in own.items()}
    if not bool(weights["wpe.weight"].any()):  # no positions: it may add the checkpoint's, others, or none
        weights["wpe.weight"] = reference.wpe.weight.detach().double()
    trail = Trail(pool, weights, config, ids, progress)
    try:
        Walker(trail, weights[head_name(weights)] if head is None else head.double()).run()
    except TimeUp:
        trail.run_out()
    trail.faults = Replay(trail, reference).effective()
    return account(trail, reference)


class Walker:
    """Follows the blocks as they run and stores all findings in ``trail``; ``head`` (V, D) is the head's weight."""

    def __init__(self, trail: Trail, head: Tensor) -> None:
        self.trail, self.pool, self.chooser, self.own, self.config = trail, trail.pool, trail.chooser, trail.own, trail.config
        self.blocks, self.norms = trail.blocks, Norms(trail.config, trail.own)
        self.ending = Ending(self.pool, head)

    def run(self) -> None:
        options = Embeddings(self.pool, self.norms, self.trail.ids).options()
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
                    self.trail.lost.append(point_at(len(self.blocks), "ln_1") if inside else self._last_right(options))
                return
            options = following

    # From one block to the next

    def _next(self, options: list[Option]) -> tuple[int, Choice[Projected]] | None:
        """Return the block that runs next, by its weights, and its attention's input; None if the walk ends."""
        self.trail.enter(len(self.blocks), "ln_1" if len(self.blocks) < self.config.n_layer else "ln_f")
        expected = self.blocks[-1] + 1 if self.blocks else 0
        every = range(self.config.n_layer)
        expected, *others = sorted(every, key=lambda layer: (layer != expected, layer < expected, layer))
        for quick in (True, False):
            kept = self.chooser.seen(self.chooser.likely("out", options) if quick else options, STREAM, options)
            for layer in (expected, *others):  # another block is more likely than another fault
                streams_in = kept if quick or layer == expected else kept[:6]
                if (choice := self._enter(layer, streams_in, narrow=layer != expected)) is not None:
                    return layer, choice
            if self._end(options, quick):
                return None
        if expected in self.blocks:
            return None
        weights = self.trail.weights(expected)
        choice = self._search(
            f"h.{expected}.ln_1",
            lambda x: project(self.chooser, self.config, x, weights, min_recorded=2),
            point_at(len(self.blocks), "ln_1"),
            f"h.{len(self.blocks) - 1}" if self.blocks else "embed",
        )
        choice = choice or self._unseen(expected, kept)
        return None if choice is None else (expected, choice)

    def _last_right(self, options: list[Option]) -> str:
        """Return the point where a walk is lost behind the last block: the logits, if the last norm is recorded as GPT-2's."""
        formula = self.norms.at("ln_f")[0].formula
        for stream in options:
            if stream.price <= 0 and (normed := self.chooser.recorded(formula(stream.value), STREAM)) is not None:
                self.trail.values["ln_f"] = normed.value
                return "logits"
        return "ln_f"

    def _enter(self, layer: int, kept: list[Option], narrow: bool) -> Choice[Projected] | None:
        """Return attention's input, with block ``layer``'s weights. ``narrow``: only options that are cheap or known."""
        weights = self.trail.weights(layer)
        words = "attention takes the stream as it is, without a norm before it"
        options = [option for stream in kept for option in self.norms.before(f"h.{layer}.ln_1", stream, words)]
        if narrow:
            known = self.chooser.known.get("ln_1", [])
            options = [option for option in options if option.price <= 1 or option.path in known][:60]
        return self.chooser.choose("ln_1", options, lambda x: project(self.chooser, self.config, x, weights), STREAM)

    def _unseen(self, layer: int, kept: list[Option]) -> Choice[Projected] | None:
        """Return the input, if recorded while its projections are not: GPT-2's, or a dump's by another norm.

        Later stages must confirm it. A module's pool holds the inner tensors of its norms, which look like other norms.
        """
        weights, name = self.trail.weights(layer), f"h.{layer}.ln_1"

        def parts(x: Tensor) -> Projected | None:
            return project(self.chooser, self.config, x, weights, min_recorded=0)

        rights = [stream for stream in kept if stream.price <= 0]
        for stream in rights:
            option = stream.then("right", self.norms.at(name)[0].formula, kind=Kind.RIGHT)
            if (input := self.chooser.recorded(option.value, STREAM)) is not None:
                return Choice(option, input.value, input.error, parts(input.value) or {})
        options = [one for stream in rights for one in self.norms.before(name, stream, "") if one.faults and not one.silent]
        return self.chooser.choose("ln_1", options, parts, STREAM, max_unseen=0) if self.pool.allowance else None

    def _search(self, norm: str, confirm: Confirm[Result], input_point: str, stream_point: str) -> Choice[Result] | None:
        """Return any recorded tensor that fits as a branch's input, or as the stream under its ``norm``, of unknown origin."""
        formula = self.norms.at(norm)[0].formula
        entries = list(streams(self.pool, self.trail.ids, self.config.n_embd))
        for entry in entries:
            if (result := confirm(entry)) is not None:
                sources = (x for x in entries if self.pool.error(formula(x), entry) < self.pool.bound)
                stream = next((Option.known("recorded stream", x) for x in sources), None)
                self.trail.lost.append(input_point if stream is None else stream_point)
                return Choice(Option.known("recorded", entry, base=stream), entry, 0.0, result)
        return None

    # Through a block

    def _block(self, n: int, layer: int, choice: Choice[Projected]) -> list[Option] | None:
        """Follow the ``n``-th running block, with the weights of block ``layer``; return its possible output streams."""
        self.blocks.append(layer)
        self.chooser.remember("out", choice.option.base)
        self.trail.settle(n, choice, "ln_1")
        self.trail.enter(n, "attn")
        attending = Attending(self.trail, n, layer, choice)
        normed = choice.option.kind is not Kind.NO_NORM
        return self._feed_forward(n, layer, Branch(True, attending.weighing.stream, choice.value, normed, attending.run()))

    def _feed_forward(self, n: int, layer: int, attention: Branch) -> list[Option] | None:
        weights = self.trail.weights(layer)
        self.trail.enter(n, "mid")
        # A dump may hold what the activation gives, and not what enters it; a module's pool holds both.
        fused = bool(self.pool.allowance) and any(True for _ in streams(self.pool, self.trail.ids, self.config.inner))

        def confirm(x: Tensor) -> Recorded | None:
            weight, bias = weights["mlp.c_fc.weight"], weights["mlp.c_fc.bias"]
            if (found := affine(self.chooser, x, weight, bias, "mlp.c_fc")) is not None or not fused:
                return found
            up = x @ weight + bias
            results = (one.value for one in activations(self.config, up)[:USUAL] if not one.silent)
            return Recorded(up, None) if any(self.chooser.recorded(one, STREAM) is not None for one in results) else None

        choice = None
        every = [mid for one in attention.results for mid in residuals(self.norms, self.pool, layer, attention, one)]
        for mids in (self.chooser.likely("mid", every), every):
            kept = self.chooser.seen(mids, STREAM, every)
            choice = self.chooser.choose("ln_2", inputs(self.norms, layer, attention, kept), confirm, STREAM)
            if choice is not None:
                break
        recognised = choice is not None
        choice = choice or self._search(f"h.{layer}.ln_2", confirm, point_at(n, "ln_2"), point_at(n, "mid"))
        if choice is None:
            self.trail.lost.append(point_at(n, "mid" if attention.results else "attn"))
            return None
        parallel, mid = choice.option.is_parallel, choice.option.base
        mid = None if parallel else mid
        if recognised:
            self.chooser.remember("mid", mid)
        if not attention.results and mid is not None:
            self.trail.lost.append(point_at(n, "attn"))
        self.trail.settle(n, choice, "ln_2")
        up = choice.result
        self.trail.values[point_at(n, "mlp.c_fc")] = up.value
        self.trail.blame(n, up.faults, up.error)
        results = self._activate(n, weights, up.value)
        if parallel and attention.stream is not None:
            self.trail.values[point_at(n, "mid")] = attention.stream + attention.results[0].value
        middle, normed = None if mid is None else mid.value, choice.option.kind is not Kind.NO_NORM
        branch = Branch(False, middle, choice.value, normed, results)
        return [x for one in results for x in outputs(self.norms, self.pool, layer, attention, branch, parallel, one)]

    def _activate(self, n: int, weights: dict[str, Tensor], up: Tensor) -> list[Option]:
        """Return the feed-forward's possible results, from the hidden units before the activation."""
        weight, bias = weights["mlp.c_proj.weight"], weights["mlp.c_proj.bias"]
        self.trail.enter(n, "mlp.act")

        def confirm(x: Tensor) -> Recorded | None:
            return affine(self.chooser, x, weight, bias, "mlp.c_proj")

        options = activations(self.config, up)
        choice = self.chooser.choose("act", options, confirm, STREAM)
        if choice is None:  # any recorded tensor that enters the second layer
            fault = Fault("gelu-variant", "mlp.act", UNKNOWN_ACTIVATION)
            others = ((x, confirm(x)) for x in streams(self.pool, self.trail.ids, up.shape[-1]))
            choice = next((Choice(Option.known("unknown", x, fault), x, 0.0, y) for x, y in others if y is not None), None)
            words = None if choice is None else fitted_activation(up, choice.value)
            if choice is not None and words is not None:
                named = Option.known("fitted", choice.value, replace(fault, detail=words, fitted=True))
                choice = replace(choice, option=named)
        if choice is None:  # neither recorded nor confirmed: a later stage decides
            return [Option.known(f"hidden {one.label}", one.value @ weight + bias, *one.faults) for one in options]
        self.trail.settle(n, choice, "mlp.act")
        self.trail.values[point_at(n, "mlp.c_proj")] = choice.result.value
        return added(bias, choice.result, "mlp.c_proj")

    # To the logits

    def _end(self, options: list[Option], quick: bool = False) -> bool:
        """Return whether one of these streams leads to the logits. ``quick``: only the likely ones."""
        words = "the head takes the stream as it is, without the last norm"
        for some in (self.chooser.likely("out", options), *([] if quick else [options])):
            kept = self.chooser.seen(some, STREAM)
            normed = [option for stream in kept for option in self.norms.before("ln_f", stream, words)]
            choice = self.chooser.choose("ln_f", normed, self.ending.right_logits, STREAM, max_unseen=0)
            choice = choice or self.chooser.choose("ln_f", normed, self.ending.logits, STREAM)
            if choice is None and not quick:
                again = "the stream is normalised once more before the head"
                rights = [option for option in normed if option.kind is Kind.RIGHT]
                twice = [more for option in rights for more in self.norms.after(("ln_f",), "ln_f", option, again)]
                choice = self.chooser.choose("ln_f", twice, self.ending.right_logits, STREAM)
            if choice is not None:
                self.trail.settle(len(self.blocks) - 1 if self.blocks else None, choice, "ln_f")
                self.trail.blame(None, choice.result.faults, choice.result.error)
                self.trail.values["logits"] = choice.result.value
                self.trail.reached = True
                return True
        return False
