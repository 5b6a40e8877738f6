"""Options for the wiring of a port's blocks: what may enter a norm, what a branch may give, and what it may be added to.

Which option holds is decided by the projection that follows (see :mod:`.search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.hypotheses import Fault, Hypothesis, sinusoids
from gpt2.port.diagnosis.norms import bare_norm, norms
from gpt2.port.diagnosis.search import Kind, Option
from gpt2.port.recording.pool import Pool

STREAM = (0, 1)  # axes along which a port may have a (B, T, D) in pieces: rows, tokens
EXTRA_EPSILONS = (1e-5, 1e-6, 1e-12, 1e-8, 0.0)
WAVES = {"sin", "cos", "sin_", "cos_", "polar", "view_as_real"}  # operators that make sinusoidal positions


@dataclass
class AttentionBranch:
    """What is known of a block's attention: the stream before it (None if it was not found), its input, whether that is normed,
    and the results that it may have."""

    stream: Tensor | None
    input: Tensor
    normed: bool
    results: list[Option]


class Norms:
    """The hypotheses for each norm of a port, with the port's own weights; made on first use."""

    def __init__(self, config: GPT2Config, own: dict[str, Tensor]) -> None:
        self.config, self.own = config, own
        self.plain = bare_norm(config.layer_norm_epsilon)
        self._made: dict[str, list[Hypothesis]] = {}

    def at(self, name: str) -> list[Hypothesis]:
        """For the norm ``h.0.ln_1``, ``h.0.ln_2``, ... or ``ln_f``."""
        if name not in self._made:
            block, _, part = name.rpartition(".")
            others = {other: f"{block}.{other}" for other in {"ln_1": ["ln_2"], "ln_2": ["ln_1"]}.get(part, [])}
            if part == "ln_f":
                others = {other: other for other in ("h.0.ln_1", f"h.{self.config.n_layer - 1}.ln_2")}
            given = {other: self._parameters(full) for other, full in others.items()}
            self._made[name] = norms(self.config, part, *self._parameters(name), given)
        return self._made[name]

    def _parameters(self, name: str) -> tuple[Tensor, Tensor]:
        return self.own[f"{name}.weight"], self.own[f"{name}.bias"]

    def before(self, name: str, stream: Option, missing: Fault) -> Iterator[Option]:
        """What may go into a branch: the stream, normed in one way or another, or as it is."""
        for hypothesis in self.at(name):
            unlikely = name == "ln_f" and any(fault.id == "norms-swapped" for fault in hypothesis.faults)
            kind, cost = Kind.OTHER if hypothesis.faults else Kind.RIGHT, 0.3 if unlikely else 0.0
            yield stream.then(hypothesis.label, hypothesis.formula, *hypothesis.faults, kind=kind, cost=cost)
        yield stream.then("no norm", lambda x: x, missing, kind=Kind.NO_NORM, silent=True)

    def extra(self, names: Iterable[str], x: Option, part: str, words: str) -> Iterator[Option]:
        """A norm where GPT-2 has none: without parameters, with those of another norm, or RMS."""
        fault = Fault("extra-norm", part, words)
        yield x.then("extra plain", self.plain, fault)
        for name in names:
            for hypothesis in self.at(name)[:6]:
                more = [other for other in hypothesis.faults if other.id != "norms-swapped"]
                label = f"extra {name.rpartition('.')[2]} {hypothesis.label}"
                yield x.then(label, hypothesis.formula, fault, *more, cost=0.1)
        for eps in EXTRA_EPSILONS:
            yield x.then(f"extra plain {eps:g}", bare_norm(eps), fault, cost=0.2)
            yield x.then(f"extra rms {eps:g}", bare_norm(eps, rms=True), fault, cost=0.3)

    def after(self, names: Iterable[str], part: str, x: Option, words: str, expected: bool = False) -> Iterator[Option]:
        """A norm behind a branch: of any kind, with the parameters of one of ``names``, or with none. ``expected``: there was
        none before the branch, so that this one costs nothing more."""
        extra = Fault("extra-norm", "attn" if part == "ln_1" else "mlp", words)
        for number, name in enumerate(names):
            for hypothesis in self.at(name):
                if not any(fault.id in ("norms-swapped", "layernorm-without-affine") for fault in hypothesis.faults):
                    own = name.rpartition(".")[2]
                    faults = (replace(extra, norm_after=part), *(replace(fault, part=own) for fault in hypothesis.faults))
                    cost = (0.5 if own != part else 0.0) - expected
                    label = f"after {number} {hypothesis.label}"
                    yield x.then(label, hypothesis.formula, *faults, kind=Kind.NORM_AFTER, cost=cost)
        yield x.then("after plain", self.plain, extra, kind=Kind.NORM_AFTER)
        yield x.then("after rms", bare_norm(1e-5, rms=True), extra, kind=Kind.NORM_AFTER, cost=0.1)


class Embeddings:
    """What may enter the first block: token embeddings and positions of ids (B, T), scaled, normed or in other places."""

    def __init__(self, pool: Pool, norms: Norms, ids: Tensor) -> None:
        self.pool, self.norms, self.ids, self.tokens = pool, norms, ids, ids.size(1)
        self.wpe, self.words = norms.own["wpe.weight"], norms.own["wte.weight"][ids]
        self.width = self.wpe.size(1)
        words = "positions are sines and cosines, not the checkpoint's learned ones"
        self.sine = Fault("position-sinusoidal", "wpe", words)

    def options(self) -> list[Option]:
        rows, words = self.wpe[: self.tokens], self.words
        tables = sinusoids(len(self.wpe), self.width)
        is_sine = any(torch.allclose(table, self.wpe, atol=1e-5) for _, table in tables)
        faults = [self.sine] if is_sine else []
        values = {"wte": words, "wpe": rows[None]}
        right = replace(Option.known("right", words + rows, *faults, values=values), kind=Kind.RIGHT)
        both = [
            Option.known(f"both {factor:g}", (words + rows) * factor, self._both_scaled(factor), values=values)
            for factor in _others(self.pool.factors(words + rows, *STREAM))
        ]
        if (match := self.pool.find(right.value, *STREAM)) is not None:
            right = right.seen_as(self.pool.adopt(right.value, match))
            return [right, *both, *(more for option in (right, *both) for more in self._normed(option))]
        factors = list(dict.fromkeys([1.0, *_others([*self.pool.factors(words, 0), math.sqrt(self.width)])]))
        kept = []
        for option in self._sums(factors):
            if (match := self.pool.find(option.value, *STREAM)) is not None:
                kept.append(option.seen_as(self.pool.adopt(option.value, match)))
        kept += both
        if all(option.silent for option in kept):
            kept += self._unknown_positions(factors)
        kept.sort(key=lambda option: option.price)
        return [right, *kept, *(more for option in kept[:3] for more in self._normed(option))]

    def _normed(self, stream: Option) -> Iterator[Option]:
        words = "the embeddings are normalised before the first block"
        yield from self.norms.extra(("h.0.ln_1", "ln_f"), stream, "embed", words)

    def _scaled(self, factor: float, what: str) -> Fault:
        is_root = math.isclose(factor, math.sqrt(self.width), rel_tol=1e-6)
        root = f" (sqrt(n_embd) = {math.sqrt(self.width):.6g})" if is_root else ""
        return Fault("embedding-scaled", "wte", f"{what} are multiplied by {factor:.6g}{root}", fitted=not is_root)

    def _both_scaled(self, factor: float) -> Fault:
        return self._scaled(factor, "the embeddings, tokens and positions together,")

    def _sums(self, factors: list[float]) -> Iterator[Option]:
        """Words, with a factor or not, and positions, from their own rows or not."""
        places = list(self._positions())
        for factor in factors:
            for label, rows, faults in places:
                seen = {"wte": self.words * factor, "wpe": rows.expand(1, self.tokens, self.width) if rows.ndim < 3 else rows}
                scaled = [] if factor == 1 else [self._scaled(factor, "token embeddings")]
                sums = [("words", self.words * factor + rows, scaled)]
                if factor != 1:
                    sums.append(("both", (self.words + rows) * factor, [self._both_scaled(factor)]))
                for what, value, first in sums:
                    yield Option.known(f"{label} {factor:g} {what}", value, *first, *faults, silent=label == "none", values=seen)

    def _positions(self) -> Iterator[tuple[str, Tensor, tuple[Fault, ...]]]:
        """Label, rows (T, D) or (B, T, D), faults."""
        wpe, tokens = self.wpe, self.tokens
        yield "right", wpe[:tokens], ()

        def offset(detail: str) -> tuple[Fault, ...]:
            return (Fault("position-offset", "wpe", detail),)

        for shift in range(1, len(wpe) - tokens + 1):
            yield (
                f"shift {shift}",
                wpe[shift : shift + tokens],
                offset(f"positions begin at row {shift}, not at 0"),
            )
        for shift in range(1, tokens + 1):
            rows = torch.arange(tokens) - shift
            yield f"shift -{shift}", wpe[rows % len(wpe)], offset(f"positions begin at row -{shift}, the end of the table")
            yield f"clamped {shift}", wpe[rows.clamp(min=0)], offset(f"positions lag by {shift}")
        yield "reversed", wpe[:tokens].flip(0), offset("positions count backwards")
        yield "constant", wpe[:1].expand(tokens, -1), offset("every token is given position 0")
        by_token = offset("rows of the position table are taken by token id, not by position")
        yield "by token", wpe[self.ids.clamp(max=len(wpe) - 1)], by_token
        for label, rows in sinusoids(tokens, self.width):
            yield f"sines {label}", rows, (replace(self.sine, detail=f"{self.sine.detail} ({label})"),)
        for factor in _others(self.pool.factors(wpe[:tokens])):
            scaled = Fault("embedding-scaled", "wpe", f"position embeddings are multiplied by {factor:.6g}", fitted=True)
            yield f"scaled {factor:g}", wpe[:tokens] * factor, (scaled,)
        missing = Fault("position-missing", "wpe", "no positions are added")
        yield "none", torch.zeros(tokens, self.width, dtype=wpe.dtype), (missing,)

    def _unknown_positions(self, factors: list[float]) -> Iterator[Option]:
        """A tensor that differs from the token embeddings by the same in every row of the batch: by the positions."""
        words = self.words
        for entry in self.pool.of_size(words.numel()):
            for x in (entry, entry.transpose(0, 1)) if entry.ndim == 3 else (entry,):
                if x.shape != words.shape or len(x) < 2:
                    continue
                for factor in factors:
                    rows = x - words * factor
                    largest = float(rows.abs().max())
                    if largest < 1e-9 or float((rows - rows[:1]).abs().max()) > 1e-9 * largest:
                        continue
                    fault = Fault("not-loaded", "wpe", "positions are not the checkpoint's learned ones, and none known here")
                    if self.pool.operators & WAVES or largest <= 1.0:
                        words_of_sines = "positions are made of sines and cosines, not of the checkpoint's learned ones"
                        fault = replace(self.sine, detail=words_of_sines)
                    more = [self._scaled(factor, "token embeddings")] if factor != 1 else []
                    values = {"wte": words * factor, "wpe": rows[:1]}
                    yield Option.known("other positions", x, fault, *more, values=values)


def _others(factors: list[float]) -> list[float]:
    """The factors that are not one."""
    return [factor for factor in factors if not math.isclose(factor, 1.0)]


def middles(norms: Norms, pool: Pool, layer: int, attention: AttentionBranch) -> Iterator[Option]:
    """The stream between the branches."""
    first, both = f"h.{layer}.ln_1", (f"h.{layer}.ln_1", f"h.{layer}.ln_2")
    x, bare = attention.stream, not attention.normed
    replaced = Fault("residual-missing", "mid", "attention's result replaces the stream: nothing is added to it")
    words = "attention's result is added to its normalised input, not to the stream before the norm"
    from_normed = Fault("residual-from-normed", "mid", words)
    for result in attention.results:
        alone = result.then("branch", lambda y: y, replaced, silent=True)
        normed = result.then("normed", _plus(attention.input), from_normed)
        if x is None:
            yield from (alone, normed) if attention.normed else (alone,)
            continue
        added = result.then("add", _plus(x))
        yield from (added, alone, normed) if attention.normed else (added, alone)
        yield from _scaled(pool, "mid", x, result)
        yield from norms.after(both, "ln_1", added, "attention's result is added and the sum normalised", bare)
        if attention.normed:
            yield from norms.after(both, "ln_1", normed, "the sum is normalised")
        words = "attention's result is normalised before it is added"
        for branch in norms.after(both, "ln_1", result, words, bare):
            yield branch.then(f"x + {branch.label}", _plus(x), kind=Kind.NORM_AFTER)
        words = "attention's result is normalised, and replaces the stream"
        yield from norms.after((first,), "ln_1", alone, words, bare)


def _plus(x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda y: x + y


def _weighted(a: float, x: Tensor, b: float) -> Callable[[Tensor], Tensor]:
    return lambda y: a * x + b * y


def _scaled(pool: Pool, part: str, x: Tensor, branch: Option) -> Iterator[Option]:
    """A residual with a factor, where one is recorded."""

    def fault(what: str) -> Fault:
        return Fault("residual-scaled", part, what)

    for factor in _others(pool.factors(branch.value, *STREAM)):
        wrong = fault(f"the branch is multiplied by {factor:.6g} before it is added")
        yield branch.then(f"scaled {factor:.6g}", _weighted(1.0, x, factor), wrong, cost=0.1)
    for factor in _others(pool.factors(x + branch.value, *STREAM)):
        wrong = fault(f"the sum of stream and branch is multiplied by {factor:.6g}")
        yield branch.then(f"sum {factor:.6g}", _weighted(factor, x, factor), wrong, cost=0.1)


def inputs(norms: Norms, layer: int, attention: AttentionBranch, mids: list[Option]) -> Iterator[Option]:
    """What the feed-forward may take."""
    name = f"h.{layer}.ln_2"
    missing = Fault("norm-missing", "ln_2", "the feed-forward takes the stream as it is, without a norm before it")
    for mid in mids:
        for option in norms.before(name, mid, missing):
            if option.kind is Kind.NO_NORM and mid.kind is Kind.NORM_AFTER and not attention.normed:
                option = replace(option, cost=-1.0)  # all of a piece: norms after the branches, and none before them
            yield option
    if (stream := attention.stream) is not None:
        x = Option.known("parallel", stream, _parallel("the feed-forward takes the stream before attention"))
        missing = Fault("norm-missing", "ln_2", "the feed-forward takes no norm of its own")
        yield from norms.before(name, replace(x, kind=Kind.PARALLEL), missing)
        if attention.normed:
            same = _parallel("attention and feed-forward take the same norm of the same stream")
            yield replace(Option.known("parallel, one norm", attention.input, same, silent=True), kind=Kind.PARALLEL)


def _parallel(words: str) -> Fault:
    return Fault("parallel-block", "", words)


def outputs(
    norms: Norms, pool: Pool, layer: int, attention: AttentionBranch, mid: Option | None, taken: Option, result: Option
) -> Iterator[Option]:
    """The stream after the block: ``taken`` went into the feed-forward and ``result`` came out."""
    second, both = f"h.{layer}.ln_2", (f"h.{layer}.ln_2", f"h.{layer}.ln_1")
    x, bare = attention.stream, taken.kind is Kind.NO_NORM

    def missing(words: str, part: str = "") -> Fault:
        return Fault("residual-missing", part, words)

    def from_normed(words: str) -> Fault:
        return Fault("residual-from-normed", "", words)

    alone = missing("the feed-forward's result replaces the stream: nothing is added to it")
    lone = result.then("branch", lambda y: y, alone, silent=True)
    if taken.is_parallel and x is not None:
        for other in attention.results:
            a, cost = other.value, other.price
            yield result.then("parallel", _plus(x + a), cost=cost)
            words = "the branches' sum replaces the stream: nothing is added to it"
            yield result.then("branches", _plus(a), missing(words), cost=cost)
            if attention.normed:
                words = "the branches are added to the normalised stream"
                yield result.then("normed", _plus(attention.input + a), from_normed(words), cost=cost)
        words = "attention's result is dropped: the feed-forward is added without it"
        yield result.then("skipped", _plus(x), missing(words, "mid"))
    middle = None if mid is None else mid.value
    if middle is not None:
        yield (added := result.then("add", _plus(middle)))
    yield lone
    words = "the feed-forward's result is added to its normalised input, not to the stream before the norm"
    normed = result.then("normed", _plus(taken.value), from_normed(words))
    is_normed = middle is None or taken.value is not middle
    if is_normed:
        yield normed
    if x is not None and not taken.is_parallel:
        words = "the feed-forward's result is added to the stream as it was before attention"
        yield result.then("skipped", _plus(x), missing(words, "mid"))
        if attention.normed:
            words = "the feed-forward's result is added to what went into attention"
            yield result.then("normed, skipped", _plus(attention.input), from_normed(words))
    if middle is not None:
        yield from _scaled(pool, "", middle, result)
        yield from norms.after(both, "ln_2", added, "the feed-forward's result is added and the sum normalised", bare)
        if is_normed:
            yield from norms.after(both, "ln_2", normed, "the sum is normalised")
        words = "the feed-forward's result is normalised before it is added"
        for branch in norms.after(both, "ln_2", result, words, bare):
            yield branch.then(f"x + {branch.label}", _plus(middle), kind=Kind.NORM_AFTER)
    words = "the feed-forward's result is normalised, and replaces the stream"
    yield from norms.after((second,), "ln_2", lone, words, bare)
