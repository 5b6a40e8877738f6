"""Options for a port's blocks (a norm's input, a branch's result, the stream after it); the next projection decides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.port.diagnosis.activations import FUNCTIONS
from gpt2.port.diagnosis.hypotheses import position_rows, sinusoids
from gpt2.port.diagnosis.norms import Norms
from gpt2.port.diagnosis.search import Fault, Formula, Kind, Option
from gpt2.port.recording.pool import Pool

STREAM = (0, 1)  # axes of (B, T, D) that a port may split: rows, tokens
BOTH = "the embeddings, tokens and positions together,"
SAME_TOKEN = 0.01  # times a usual embedding's length: how far a recorded one may be from its row
SCREENED = 16  # features in which a recorded embedding is compared with every token's first
SHOWN = 4  # positions that a message gives
LEAST_WAVES = 5  # positions that show whether they are waves
WAVE_ERROR = 1e-4  # of a table in float32
BENT = 1.9  # 2 cos(frequency) of the fastest column at most: a straight line has 2


def streams(pool: Pool, ids: Tensor, width: int) -> Iterator[Tensor]:
    """Yield every recorded tensor that may be a (B, T, D), as stored or with time first."""
    batch, tokens = ids.shape
    for entry in pool.of_size(batch * tokens * width):
        if entry.shape[-1] != width:
            if entry.shape[:2] == (batch, tokens):  # heads before they are merged
                yield entry.reshape(batch, tokens, width)
        elif entry.shape[:2] == (tokens, batch) and tokens != batch:
            yield entry.transpose(0, 1)
        elif entry.ndim <= 3:
            yield entry.reshape(batch, tokens, width)


class Embeddings:
    """What may enter the first block: token embeddings and positions of ids (B, T), perhaps scaled, normed or moved."""

    def __init__(self, pool: Pool, norms: Norms, ids: Tensor) -> None:
        self.pool, self.norms, self.ids, self.tokens = pool, norms, ids, ids.size(1)
        self.wpe, self.words = norms.own["wpe.weight"], norms.own["wte.weight"][ids]
        self.width = self.wpe.size(1)
        words = "positions are sines and cosines, not the checkpoint's learned ones"
        self.sine = Fault("position-sinusoidal", "wpe", words)

    def options(self) -> list[Option]:
        rows, words = self.wpe[: self.tokens], self.words
        is_sine = any(torch.allclose(table, self.wpe, atol=1e-5) for _, table in sinusoids(len(self.wpe), self.width))
        values = {"wte": words, "wpe": rows[None]}
        right = Option.known("right", words + rows, *[self.sine] * is_sine, kind=Kind.RIGHT, values=values)
        both = [
            Option.known(f"both {factor:g}", (words + rows) * factor, self._scaled(factor, BOTH), values=values)
            for factor in _others(self.pool.factors(words + rows, *STREAM))
        ]
        if (match := self.pool.find(right.value, *STREAM)) is not None:
            right = right.seen_as(self.pool.adopt(right.value, match))
            known = [right, *both, *self._shifted(right)]
            return [*known, *(more for option in known for more in self._normed(option))]
        factors = list(dict.fromkeys([1.0, *_others([*self.pool.factors(words, 0), math.sqrt(self.width)])]))
        kept = []
        for option in self._sums(factors):
            if (match := self.pool.find(option.value, *STREAM)) is not None:
                kept.append(option.seen_as(self.pool.adopt(option.value, match)))
        kept += both
        if all(option.silent for option in kept):
            kept += list(self._shifted(right)) or [*self._other_tokens(), *self._unknown_positions(factors)]
        kept.sort(key=lambda option: option.price)
        return [right, *kept, *(more for option in (right, *kept[:3]) for more in self._normed(option))]

    def _normed(self, stream: Option) -> Iterator[Option]:
        words = "the embeddings are normalised before the first block"
        yield from self.norms.after(("h.0.ln_1", "ln_f"), "embed", stream, words)

    def _shifted(self, right: Option) -> Iterator[Option]:
        """Yield a module's tensor that is the right embeddings plus one vector for all tokens."""
        words = "one vector is added to the embedding of every token, as of token types; GPT-2 has none"
        for x in streams(self.pool, self.ids, self.width) if not self.pool.allowance else ():
            more = x - right.value
            if bool(more.any()) and self.pool.error(right.value + more[:1, :1], x) <= self.pool.bound:
                yield Option.known("shifted", x, Fault("extra-bias", "embed", words), values=right.values)

    def _scaled(self, factor: float, what: str) -> Fault:
        is_root = math.isclose(factor, math.sqrt(self.width), rel_tol=1e-6)
        root = f" (sqrt(n_embd) = {math.sqrt(self.width):.6g})" if is_root else ""
        return Fault("embedding-scaled", "wte", f"{what} are multiplied by {factor:.6g}{root}", fitted=not is_root)

    def _sums(self, factors: list[float]) -> Iterator[Option]:
        """Yield sums of token embeddings (perhaps scaled) and positions (perhaps from other rows)."""
        for factor in factors:
            for label, rows, faults in self._positions():
                values = {"wte": self.words * factor, "wpe": rows.expand(1, self.tokens, self.width) if rows.ndim < 3 else rows}
                sums = [("words", self.words * factor + rows, [self._scaled(factor, "token embeddings")])]
                sums.append(("both", (self.words + rows) * factor, [self._scaled(factor, BOTH)]))
                if factor == 1:
                    sums = [("words", self.words + rows, [])]
                for what, value, first in sums:
                    name = f"{label} {factor:g} {what}"
                    yield Option.known(name, value, *first, *faults, silent=label == "none", values=values)

    def _positions(self) -> Iterator[tuple[str, Tensor, list[Fault]]]:
        """Yield label, rows (T, D) or (B, T, D), and faults; positions are off by any number."""
        wpe, tokens = self.wpe, self.tokens
        yield "right", wpe[:tokens], []
        for words, rows, _ in position_rows(self.ids, len(wpe), range(1, len(wpe) + 1), tokens):
            yield words, wpe[rows], [Fault("position-offset", "wpe", words)]
        for label, table in sinusoids(tokens, self.width):
            yield f"sines {label}", table, [replace(self.sine, detail=f"{self.sine.detail} ({label})")]
        for factor in _others(self.pool.factors(wpe[:tokens])):
            words = f"position embeddings are multiplied by {factor:.6g}"
            yield f"scaled {factor:g}", wpe[:tokens] * factor, [Fault("embedding-scaled", "wpe", words, fitted=True)]
        yield "none", torch.zeros_like(wpe[:tokens]), [Fault("position-missing", "wpe", "no positions are added")]

    def _other_tokens(self) -> Iterator[Option]:
        """Yield a tensor that is the sum of the right positions and of other tokens' embeddings."""
        wte, wpe = self.norms.own["wte.weight"], self.wpe[: self.tokens]
        some, bound = wte[:, :SCREENED].contiguous(), SAME_TOKEN * float(wte.norm(dim=1).mean())
        for x in streams(self.pool, self.ids, self.width):
            if float(torch.cdist((x - wpe)[0, -1:, :SCREENED], some).min()) > bound:
                continue
            taken = torch.cdist((x - wpe).flatten(0, 1), wte).argmin(-1).view_as(self.ids)
            if bool((taken == self.ids).all()) or self.pool.find(wte[taken] + wpe, *STREAM) is None:
                continue
            row, token = (taken != self.ids).nonzero()[0].tolist()
            words = f"token {token} of row {row} is given the embedding of id {taken[row, token]}, not {self.ids[row, token]}"
            if torch.equal(taken[:, 1:], self.ids[:, :-1]):
                words = "each token is given the embedding of the token before it"
            values = {"wte": wte[taken], "wpe": wpe[None]}
            yield Option.known("other tokens", x, Fault("wrong-tensor", "wte", words), values=values)

    def _unknown_positions(self, factors: list[float]) -> Iterator[Option]:
        """Yield a tensor that differs from the token embeddings by other rows of wpe, or equally in every row of the batch."""
        learned = Fault("not-loaded", "wpe", "positions are not the checkpoint's learned ones, and none known here")
        waves = replace(self.sine, detail="positions are made of sines and cosines, not of the checkpoint's learned ones")
        for x in streams(self.pool, self.ids, self.width):
            for factor in factors:
                rows = x - self.words * factor
                scaled = [self._scaled(factor, "token embeddings")] if factor != 1 else []
                places = self.wpe[: self.tokens].expand_as(rows)
                times = self.pool.rounded(float((rows * places).sum() / places.square().sum().clamp(min=1e-300)))
                if self.pool.error(self.words * factor + times * places, x) <= self.pool.bound and not math.isclose(
                    times, 0, abs_tol=1e-3
                ):
                    if not math.isclose(times, 1, rel_tol=1e-6 + self.pool.bound):
                        words = f"position embeddings are multiplied by {times:.6g}"
                        scaled.insert(0, Fault("embedding-scaled", "wpe", words, fitted=True))
                    if scaled:  # else they are GPT-2's own embeddings
                        values = {"wte": self.words * factor, "wpe": times * places[:1]}
                        yield Option.known("multiplied positions", x, *scaled, values=values)
                    continue
                if (taken := self._rows_of_wpe(rows, factor)) is not None:
                    yield Option.known("other rows", x, taken, *scaled, values={"wte": self.words * factor, "wpe": rows})
                    continue
                largest = float(rows.abs().max())
                if len(x) < 2 or largest < 1e-9 or float((rows - rows[:1]).abs().max()) > 1e-9 * largest:
                    continue
                fault = waves if are_waves(rows[0]) else learned
                values = {"wte": self.words * factor, "wpe": rows[:1]}
                yield Option.known("other positions", x, fault, *scaled, values=values)

    def _rows_of_wpe(self, rows: Tensor, factor: float) -> Fault | None:
        """Return the fault of positions (B, T, D) that are rows of wpe or none, each token its own; None if they are neither."""
        table, none = torch.cat([self.wpe, torch.zeros_like(self.wpe[:1])]), len(self.wpe)
        taken = torch.cdist(rows.flatten(0, 1), table).argmin(-1).view(rows.shape[:2])
        others = (taken != torch.arange(self.tokens)).nonzero().tolist()
        if not others or bool((taken == none).all()) or self.pool.find(self.words * factor + table[taken], *STREAM) is None:
            return None  # token embeddings alone are recorded in any case
        row, token = others[0]
        right = range(token, min(token + SHOWN, self.tokens))
        wrong = [taken[one, at].item() for one, at in others]
        given = ", ".join("none" if one == none else str(one) for one in taken[row, token : right.stop].tolist())
        words = f"from token {token} of row {row} on, the positions are {given}, not {', '.join(map(str, right))}"
        return Fault("position-missing" if set(wrong) == {none} else "position-offset", "wpe", words)


def are_waves(rows: Tensor) -> bool:
    """Return whether each column of (T, D) is a wave of any frequency and phase: x[t-1] + x[t+1] is 2 cos(frequency) x[t]."""
    if len(rows) < LEAST_WAVES:
        return False
    around, at = rows[2:] + rows[:-2], rows[1:-1]
    twice = ((around * at).sum(0) / at.square().sum(0).clamp(min=1e-300)).clamp(-2, 2)
    return float(twice.min()) < BENT and worst_relative_error(twice * at, around) < WAVE_ERROR


def _others(factors: list[float]) -> list[float]:
    return [factor for factor in factors if not math.isclose(factor, 1.0)]


@dataclass
class Branch:
    """A branch: the stream before it (None if unknown), its input, whether that is normed, and its possible results."""

    is_attention: bool
    stream: Tensor | None
    input: Tensor
    normed: bool
    results: list[Option]


def _plus(x: Tensor, factor: float = 1.0) -> Formula:
    return lambda y: x + factor * y


def residuals(norms: Norms, pool: Pool, layer: int, branch: Branch, result: Option) -> Iterator[Option]:
    """Yield the stream after a branch of block ``layer``: the result added to the stream, or a known wrong form."""
    x, bare = branch.stream, not branch.normed
    subject, part, names = "the feed-forward's result", "", (f"h.{layer}.ln_2", f"h.{layer}.ln_1")
    if branch.is_attention:
        subject, part, names = "attention's result", "mid", names[::-1]
    after = partial(norms.after, part=names[0].rpartition(".")[2])
    replaced = Fault("residual-missing", part, f"{subject} replaces the stream: nothing is added to it")
    alone = result.then("branch", lambda y: y, replaced, silent=True)
    words = f"{subject} is added to its normalised input, not to the stream before the norm"
    normed = result.then("normed", _plus(branch.input), Fault("residual-from-normed", part, words))
    if x is not None:
        yield (added := result.then("add", _plus(x)))
    yield alone
    if branch.normed:
        yield normed
    if x is not None:
        yield from _scaled(pool, part, x, result)
        yield from after(names, x=added, words=f"{subject} is added and the sum normalised", expected=bare)
        if not branch.is_attention:
            words = "the last norm stands in the loop over the blocks: this block's result is normalised by ln_f"
            yield added.then("ln_f", norms.at("ln_f")[0].formula, Fault("extra-norm", "", words))
        if branch.normed:
            yield from after(names, x=normed, words="the sum is normalised")
        for one in after(names, x=result, words=f"{subject} is normalised before it is added", expected=bare):
            yield one.then(f"x + {one.label}", _plus(x), kind=Kind.NORM_AFTER)
        for name, (words, formula) in FUNCTIONS.items() if not pool.allowance else ():
            words = f"{subject} goes through an activation before it is added: {words}"
            if name not in ("none", "zero"):
                active = result.then(name, formula, Fault("gelu-variant", part or "mlp.c_proj", words))
                yield active.then(f"x + {name}", _plus(x), cost=0.5)
    yield from after(names[:1], x=alone, words=f"{subject} is normalised, and replaces the stream", expected=bare)


def _scaled(pool: Pool, part: str, x: Tensor, branch: Option) -> Iterator[Option]:
    """Yield a residual with a factor, if one is recorded."""
    for factor in _others(pool.factors(branch.value, *STREAM)):
        wrong = Fault("residual-scaled", part, f"the branch is multiplied by {factor:.6g} before it is added")
        yield branch.then(f"scaled {factor:.6g}", _plus(x, factor), wrong, cost=0.1)
    for factor in _fitted(pool, x, branch.value):
        wrong = Fault("residual-scaled", part, f"the branch is multiplied by {factor:.6g} before it is added")
        yield branch.then(f"fitted {factor:.6g}", _plus(x, factor), wrong, cost=0.1)
    for factor in _others(pool.factors(x + branch.value, *STREAM)):
        wrong = Fault("residual-scaled", part, f"the sum of stream and branch is multiplied by {factor:.6g}")
        yield branch.then(f"sum {factor:.6g}", _plus(factor * x, factor), wrong, cost=0.1)


def _fitted(pool: Pool, x: Tensor, y: Tensor) -> list[float]:
    """Return all f other than 0 and 1 with an entry x + f y; entries in another layout are not tried."""
    size = y.square().sum().clamp(min=1e-300)
    found = []
    for entry in streams(pool, y[..., 0], y.shape[-1]):
        factor = pool.rounded(float(((entry - x) * y).sum() / size))
        if abs(factor) > 1e-3 and not math.isclose(factor, 1.0) and pool.error(x + factor * y, entry) <= pool.bound:
            found.append(factor)
    return found


def inputs(norms: Norms, layer: int, attention: Branch, mids: list[Option]) -> Iterator[Option]:
    """Yield what the feed-forward may take: a stream after attention, or the one before it."""
    name = f"h.{layer}.ln_2"
    for mid in mids:
        for option in norms.before(name, mid, "the feed-forward takes the stream as it is, without a norm before it"):
            if option.kind is Kind.NO_NORM and mid.kind is Kind.NORM_AFTER and not attention.normed:
                option = replace(option, cost=-1.0)  # consistent: norms after the branches, and none before them
            yield option
    if (stream := attention.stream) is not None:
        words = "the feed-forward takes the stream before attention"
        x = Option.known("parallel", stream, Fault("parallel-block", "", words), kind=Kind.PARALLEL)
        yield from norms.before(name, x, "the feed-forward takes no norm of its own")
        if attention.normed:
            same = Fault("parallel-block", "", "attention and feed-forward take the same norm of the same stream")
            yield Option.known("parallel, one norm", attention.input, same, silent=True, kind=Kind.PARALLEL)


def outputs(
    norms: Norms, pool: Pool, layer: int, attention: Branch, feed_forward: Branch, parallel: bool, result: Option
) -> Iterator[Option]:
    """Yield the stream after the block; ``parallel``: the feed-forward takes the stream before attention."""
    x = attention.stream
    if parallel and x is not None:
        for other in attention.results:
            a, cost = other.value, other.price
            yield result.then("parallel", _plus(x + a), cost=cost)
            alone = Fault("residual-missing", "", "the branches' sum replaces the stream: nothing is added to it")
            yield result.then("branches", _plus(a), alone, cost=cost)
            if attention.normed:
                normed = Fault("residual-from-normed", "", "the branches are added to the normalised stream")
                yield result.then("normed", _plus(attention.input + a), normed, cost=cost)
    yield from residuals(norms, pool, layer, feed_forward, result)
    if x is not None:
        if attention.results:
            words = "the block's input is added once more to its result, which holds it already"
            yield result.then("added again", _plus(x + attention.results[0].value + x), Fault("residual-scaled", "", words))
        words = "the feed-forward's result is added to the stream as it was before attention"
        words = "attention's result is dropped: the feed-forward is added without it" if parallel else words
        yield result.then("skipped", _plus(x), Fault("residual-missing", "mid", words))
        if attention.normed and not parallel:
            words = "the feed-forward's result is added to what went into attention"
            yield result.then("normed, skipped", _plus(attention.input), Fault("residual-from-normed", "", words))
