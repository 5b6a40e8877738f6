"""GPT-2's forward pass walked through stage by stage, with a port's own weights and from the port's own values.

At each stage the right formula and every wrong one that is known are computed from what was found before; the one whose value
is found among the port's tensors, and that the next projection bears out, is what the port does there. The walk goes on from
that, so several faults are all found. What is seen by nothing stays open until something that follows from it is seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import point_at
from gpt2.model import GPT2
from gpt2.port.diagnosis.attending import STREAM, Attending, Branch, Projected, added, affine, project, streams
from gpt2.port.diagnosis.ending import Ending
from gpt2.port.diagnosis.hypotheses import Finding, activations
from gpt2.port.diagnosis.report import Cause, Divergence
from gpt2.port.diagnosis.search import Choice, Chooser, Option
from gpt2.port.diagnosis.wiring import Norms, Taken, embeddings, inputs, middles, outputs
from gpt2.port.recording.pool import Pool

LOST = "undetermined"


@dataclass(frozen=True)
class Step:
    """One traced point: how far off the port's own value was found (None: nothing shows it), and what is wrong there."""

    point: str
    layer: int | None
    cause: str | None
    detail: str
    error: float | None


@dataclass(frozen=True)
class Walk:
    """``explained`` if the walk reaches the port's own logits with nothing unknown on the way. ``causes`` by the first place
    where each shows. ``blocks`` are the numbers of the blocks whose weights were used, as they ran; ``lost`` the
    points where the port computes something that is not known here."""

    steps: tuple[Step, ...]
    explained: bool
    first_divergence: Divergence | None
    causes: tuple[Cause, ...]
    blocks: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()


@torch.no_grad()
def walk(
    pool: Pool, own: Mapping[str, Tensor], config: GPT2Config, ids: Tensor, reference: GPT2, head: Tensor | None = None
) -> Walk:
    """What a port did in the run that ``pool`` was taken of.

    ``own`` are its weights by the checkpoint's names and ``head`` (V, D) its head's, if that is not the token embedding;
    ``reference`` is our model with the checkpoint's, in float64. ``ids`` (B, T), B and T at least 2.
    """
    weights = {name: tensor.detach().double() for name, tensor in own.items()}
    if not bool(weights["wpe.weight"].any()):  # it has none: then whether it adds the checkpoint's, or others, or none, is open
        weights["wpe.weight"] = reference.wpe.weight.detach().double()
    walker = Walker(pool, weights, config, ids, head)
    walker.run()
    return walker.report(reference)


class Walker:
    def __init__(self, pool: Pool, own: dict[str, Tensor], config: GPT2Config, ids: Tensor, head: Tensor | None) -> None:
        self.pool, self.own, self.config, self.ids = pool, own, config, ids
        self.chooser, self.norms = Chooser(pool), Norms(config, own)
        self.ending = Ending(self.chooser, self.norms, own["wte.weight"] if head is None else head.double(), STREAM)
        self.values: dict[str, Tensor] = {}
        self.errors: dict[str, float] = {}
        self.found: list[tuple[int | None, Finding, float | None]] = []  # with the block as it runs
        self.blocks: list[int] = []
        self.factors: dict[int, float] = {}  # of the scores, by block
        self.missed: dict[str, float] = {}  # how far off GPT-2's own formula is, where the port's is another
        self.lost: list[str] = []
        self.reached = False

    # The walk

    def run(self) -> None:
        """All of it, or as far as it can be followed."""
        streams_now = embeddings(self.pool, self.norms, self.ids)
        while len(self.blocks) <= 2 * self.config.n_layer:
            if len(self.blocks) >= self.config.n_layer and self._end(streams_now):
                return
            entered = self._next(streams_now)
            if self.reached:
                return
            following = None if entered is None else self._block(len(self.blocks), *entered)
            if following is None:
                if not self.lost or entered is None:
                    inside = len(self.blocks) < self.config.n_layer
                    self.lost.append(point_at(len(self.blocks), "ln_1") if inside else "ln_f")
                return
            streams_now = following

    def _end(self, streams_now: list[Option], quick: bool = False) -> bool:
        found = self.ending.reach(streams_now, quick)
        if found is None:
            return False
        choice, findings, logits, error = found
        self._settle(None if not self.blocks else len(self.blocks) - 1, choice, "ln_f")
        for finding in findings:
            self.found.append((None, finding, error))
        self._keep("logits", logits, error)
        self.reached = True
        return True

    def _weights(self, layer: int) -> dict[str, Tensor]:
        return {name.removeprefix(f"h.{layer}."): t for name, t in self.own.items() if name.startswith(f"h.{layer}.")}

    def _order(self) -> list[int]:
        """Blocks' numbers, the one expected next first."""
        following = self.blocks[-1] + 1 if self.blocks else 0
        everything = list(range(self.config.n_layer))
        return sorted(everything, key=lambda layer: (layer != following, layer < following, layer))

    def _next(self, streams_now: list[Option]) -> tuple[int, Choice] | None:
        """The block that runs next, by whose weights are used, and what goes into its attention. None if the walk ends here."""
        expected, *others = self._order()
        likely = self.chooser.seen(self.chooser.likely("out", streams_now), STREAM)
        for layer in (expected, *others):  # another block, before another fault is thought of
            if (choice := self._enter(layer, likely, narrow=layer != expected)) is not None:
                return layer, choice
        if self.blocks and self._end(streams_now, quick=True):
            return None
        kept = self.chooser.seen(streams_now, STREAM)
        for layer in (expected, *others):
            some = kept if layer == expected else kept[:6]
            if (choice := self._enter(layer, some, narrow=layer != expected)) is not None:
                return layer, choice
        if self.blocks and self._end(streams_now):
            return None
        choice = self._found_again(expected) or self._unseen(expected, kept)
        return None if choice is None else (expected, choice)

    def _block(self, n: int, layer: int, choice: Choice) -> list[Option] | None:
        """Follow the block that runs as the ``n``-th; the streams that may come out of it."""
        self.blocks.append(layer)
        weights = self._weights(layer)
        stream = choice.option.base
        self.chooser.remember("out", stream)
        self._settle(n, choice, "ln_1")
        x = stream.value if stream is not None else None
        normed = choice.option.label != "no norm"
        branch = Attending(self.chooser, self.config, layer, weights, choice.result, choice.value, x).run()
        self._absorb(n, branch)
        attention = Taken(x, choice.value, normed, branch.results)
        return self._feed_forward(n, layer, weights, attention)

    def _enter(self, layer: int, kept: list[Option], narrow: bool = False) -> Choice | None:
        """What goes into attention, with block ``layer``'s weights."""
        weights = self._weights(layer)
        options: list[Option] = []
        missing = Finding("norm-missing", "ln_1", "attention takes the stream as it is, without a norm before it")
        for stream in kept:
            options += self.norms.before(f"h.{layer}.ln_1", stream, missing)
        if narrow:
            known = self.chooser.known.get("ln_1", [])
            options = [o for o in options if o.price <= 1 or o.path in known][:60]
        return self.chooser.choose("ln_1", options, lambda o, x: project(self.chooser, self.config, x, weights), STREAM)

    def _unseen(self, layer: int, kept: list[Option]) -> Choice | None:
        """The input that would be right, if it is seen and nothing shows its projections: what comes after has to."""
        if layer in self.blocks:
            return None
        for stream in kept:
            formula = self.norms.at(f"h.{layer}.ln_1")[0].formula
            option = Option("right", lambda f=formula, s=stream: f(s.value), base=stream)
            if stream.price <= 0 and (match := self.pool.find(option.value, *STREAM)) is not None:
                weights, bias = (self.own[f"h.{layer}.attn.c_attn.{kind}"] for kind in ("weight", "bias"))
                value = self.pool.adopt(option.value, match)
                parts = dict(zip("qkv", (value @ weights + bias).chunk(3, -1), strict=True))
                return Choice(option, value, match.error, Projected(parts, {}, ()))
        return None

    def _found_again(self, expected: int) -> Choice | None:
        """Whatever in the pool it is that a block's projection was applied to; the way there is not known."""
        shape = (*self.ids.shape, self.config.n_embd)
        if expected in self.blocks:
            return None
        weights = self._weights(expected)
        for entry in streams(self.pool, *shape):
            projected = project(self.chooser, self.config, entry, weights, enough=2)
            if projected is None:
                continue
            stream = None
            for hypothesis in self.norms.at(f"h.{expected}.ln_1")[:1]:
                for before in streams(self.pool, *shape):
                    if worst_relative_error(hypothesis.formula(before), entry) < self.pool.bound:
                        stream = Option("stream", lambda before=before: before)
                        break
            point = point_at(len(self.blocks), "ln_1")
            if stream is not None:
                point = "embed" if not self.blocks else f"h.{len(self.blocks) - 1}"
            self.lost.append(point)
            option = Option("found", lambda entry=entry: entry, (), base=stream)
            return Choice(option, entry, 0.0, projected)
        return None

    def _feed_forward(self, n: int, layer: int, weights: dict[str, Tensor], attention: Taken) -> list[Option] | None:
        def anchor(option: Option, x: Tensor) -> tuple | None:
            return affine(self.chooser, x, weights["mlp.c_fc.weight"], weights["mlp.c_fc.bias"], STREAM, "mlp.c_fc")

        choice = None
        every = list(middles(self.norms, self.pool, layer, attention)) if attention.results else []
        for mids in (self.chooser.likely("mid", every), every):
            kept = self.chooser.seen(mids, STREAM)
            choice = self.chooser.choose("ln_2", inputs(self.norms, layer, attention, kept), anchor, STREAM)
            if choice is not None:
                break
        mid = None
        if choice is None:
            choice, mid = self._taken_somewhere(n, layer, anchor)
        else:
            mid = choice.option.base if choice.option.base is not None and choice.option.base.label != "parallel" else None
            self.chooser.remember("mid", mid)
        if choice is None:
            self.lost.append(point_at(n, "attn" if not attention.results else "mid"))
            return None
        if not attention.results and mid is not None:
            self.lost.append(point_at(n, "attn"))
        self._settle(n, choice, "ln_2")
        up, error, findings = choice.result
        self._keep(point_at(n, "mlp.c_fc"), up, error)
        self.found += [(n, finding, error) for finding in findings]
        results = self._bend(n, weights, up)
        if mid is None and "parallel" in choice.option.path and attention.stream is not None:
            a = attention.results[0]
            mid_value = attention.stream + a.value
            self._keep(point_at(n, "mid"), mid_value, None)
        out = []
        for m in results:
            out += outputs(self.norms, self.pool, layer, attention, mid, replace_value(choice), m)
        return out

    def _taken_somewhere(self, n: int, layer: int, anchor: object) -> tuple[Choice | None, Option | None]:
        """Whatever in the pool it is that goes into the feed-forward."""
        shape = (*self.ids.shape, self.config.n_embd)
        for entry in streams(self.pool, *shape):
            if (found := anchor(Option("found", lambda: None), entry)) is None:
                continue
            formula = self.norms.at(f"h.{layer}.ln_2")[0].formula
            for before in streams(self.pool, *shape):
                if worst_relative_error(formula(before), entry) < self.pool.bound:
                    mid = Option("mid", lambda before=before: before)
                    self.lost.append(point_at(n, "mid"))
                    return Choice(Option("found", lambda entry=entry: entry, base=mid), entry, 0.0, found), mid
            self.lost.append(point_at(n, "ln_2"))
            return Choice(Option("found", lambda entry=entry: entry), entry, 0.0, found), None
        return None, None

    def _bend(self, n: int, weights: dict[str, Tensor], up: Tensor) -> list[Option]:
        """From the widened input to what the feed-forward may give."""
        weight, bias = weights["mlp.c_proj.weight"], weights["mlp.c_proj.bias"]

        def anchor(option: Option, x: Tensor) -> tuple | None:
            return affine(self.chooser, x, weight, bias, STREAM, "mlp.c_proj")

        options = [
            Option(h.label, lambda h=h: h.formula(up), h.findings, silent=h.label == "none") for h in activations(self.config)
        ]
        choice = self.chooser.choose("act", options, anchor, STREAM)
        if choice is None:
            for entry in self.pool.of_size(up.numel()):
                if entry.shape[-1] == up.shape[-1] and (found := anchor(options[0], entry.reshape(up.shape))) is not None:
                    detail = "an activation that is none of those known here"
                    option = Option("unknown", lambda e=entry: e.reshape(up.shape), (Finding("gelu-variant", "mlp.act", detail),))
                    choice = Choice(option, option.value, 0.0, found)
                    break
        if choice is None:  # neither seen nor borne out by what the pool has: what follows must tell
            hidden = []
            for option in options:
                hidden.append(Option(f"hidden {option.label}", lambda o=option: o.value @ weight + bias, option.findings))
            return hidden
        self._settle(n, choice, "mlp.act")
        value, error, _ = choice.result
        self._keep(point_at(n, "mlp.c_proj"), value, error)
        return added(bias, choice.result, "mlp.c_proj")

    # What was found

    def _keep(self, point: str, value: Tensor, error: float | None) -> None:
        self.values[point] = value
        if error is not None:
            self.errors[point] = error

    def _absorb(self, n: int, branch: Branch) -> None:
        for point, value in branch.values.items():
            self._keep(point_at(n, point), value, branch.errors.get(point))
        if branch.missed is not None:
            self.missed[point_at(n, "attn")] = branch.missed
        if branch.factor is not None:
            self.factors[n] = branch.factor
        for finding in branch.findings:
            self.found.append((n, finding, branch.errors.get("attn.weights", branch.errors.get("attn.heads"))))
            if finding.id == LOST:
                self.lost.append(point_at(n, "attn"))

    def _settle(self, n: int | None, choice: Choice, part: str) -> None:
        """A choice, and all that it was made from, is what the port does."""
        self._keep(point_at(n, part), choice.value, choice.error)
        if choice.missed is not None:
            self.missed[point_at(n, part)] = choice.missed
        option: Option | None = choice.option
        at = n
        self._blame(at, option, choice.error)
        option = option.base
        if option is None:
            return
        entering = part in ("ln_1", "ln_f")  # the stream that enters was made by what came before
        before = (n - 1 if part == "ln_1" else n) if n is not None else None
        if before is not None and before < 0:
            before = None
        at = before if entering else n
        point = point_at(at, "") if entering and at is not None else "embed" if entering else point_at(n, "mid")
        if option.label != "parallel":
            self._keep(point, option.value, None)
        while option is not None:
            self._blame(at, option, None)
            option = option.base

    def _blame(self, n: int | None, option: Option, error: float | None) -> None:
        self.found += [(n, finding, error) for finding in option.findings]
        for name, value in option.values.items():
            if name in ("wte", "wpe", "attn.c_proj", "mlp.c_proj"):
                self._keep(point_at(n, name), value.expand(len(self.ids), *value.shape[1:]) if value.ndim == 3 else value, error)

    # The report

    def report(self, reference: GPT2) -> Walk:
        from gpt2.port.diagnosis.account import account

        return account(self, reference)


def replace_value(choice: Choice) -> Option:
    """The option as it was taken, with the port's own value."""
    return choice.option.seen_as(choice.value)
