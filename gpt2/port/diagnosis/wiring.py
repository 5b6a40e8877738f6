"""How a port's blocks are wired: the streams that may enter a norm, and what may come out of a branch and be added to what.

Each function gives options (see :mod:`.search`); which of them holds is told by the projection that follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.diagnosis.hypotheses import Finding, Hypothesis, sinusoids
from gpt2.port.diagnosis.norms import norms
from gpt2.port.diagnosis.search import Option
from gpt2.port.recording.pool import Pool

AFTER = "norm-after"  # a norm that stands after a branch: with none before it, post-norm; else one too many


@dataclass
class Taken:
    """A block's attention branch, as far as it is settled: the stream before it (None if that was lost), its input, whether that
    is normed, and its results."""

    stream: Tensor | None
    taken: Tensor
    normed: bool
    results: list[Option]


class Norms:
    """The hypotheses for every norm of a port, with its own weights; made once each."""

    def __init__(self, config: GPT2Config, own: dict[str, Tensor]) -> None:
        self.config, self.own = config, own
        self._made: dict[str, list[Hypothesis]] = {}

    def parameters(self, name: str) -> tuple[Tensor, Tensor]:
        return self.own[f"{name}.weight"], self.own[f"{name}.bias"]

    def at(self, name: str) -> list[Hypothesis]:
        """For the norm ``h.0.ln_1``, ``h.0.ln_2``, ... or ``ln_f``."""
        if name not in self._made:
            block, _, part = name.rpartition(".")
            others = {"ln_1": ("ln_2",), "ln_2": ("ln_1",)}.get(part, ())
            given = {other: self.parameters(f"{block}.{other}") for other in others}
            if part == "ln_f":
                given = {name: self.parameters(name) for name in ("h.0.ln_1", f"h.{self.config.n_layer - 1}.ln_2")}
            self._made[name] = norms(self.config, part, *self.parameters(name), given)
        return self._made[name]

    def plain(self, x: Tensor) -> Tensor:
        """Normalised, and no more."""
        variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
        return (x - mean) / (variance + self.config.layer_norm_epsilon).sqrt()

    def before(self, name: str, stream: Option, missing: Finding, cost: float = 0.0) -> Iterator[Option]:
        """What may go into a branch: the stream normed in one way or another, or as it is."""
        for hypothesis in self.at(name):
            far = 0.3 if name == "ln_f" and any(f.id == "norms-swapped" for f in hypothesis.findings) else 0.0
            formula = hypothesis.formula
            yield Option(hypothesis.label, lambda f=formula: f(stream.value), hypothesis.findings, base=stream, cost=cost + far)
        yield Option("no norm", lambda: stream.value, (missing,), silent=True, base=stream, cost=cost)

    def extra(self, names: Iterable[str], x: Option, part: str, words: str) -> Iterator[Option]:
        """A norm where GPT-2 has none: without parameters, with those of another norm, or RMS."""
        found = (Finding("extra-norm", part, words),)
        yield Option("extra plain", lambda: self.plain(x.value), found, base=x)
        for name in names:
            for hypothesis in self.at(name)[:6]:
                more = tuple(f for f in hypothesis.findings if f.id != "norms-swapped")
                label = f"extra {name.rpartition('.')[2]} {hypothesis.label}"
                yield Option(label, lambda f=hypothesis.formula: f(x.value), (*found, *more), base=x, cost=0.1)
        eps = (1e-5, 1e-6, 1e-12, 1e-8, 0.0)
        for e in eps:
            yield Option(
                f"extra plain {e:g}",
                lambda e=e: (x.value - x.value.mean(-1, keepdim=True)) / (x.value.var(-1, keepdim=True, correction=0) + e).sqrt(),
                found,
                base=x,
                cost=0.2,
            )
            yield Option(
                f"extra rms {e:g}",
                lambda e=e: x.value * (x.value.square().mean(-1, keepdim=True) + e).rsqrt(),
                found,
                base=x,
                cost=0.3,
            )


def embeddings(pool: Pool, norms: Norms, ids: Tensor) -> list[Option]:
    """What may enter the first block."""
    own = norms.own
    wte, wpe = own["wte.weight"], own["wpe.weight"]
    tokens, width = ids.size(1), wte.size(1)
    words = wte[ids]
    sinus = next((label for label, rows in sinusoids(len(wpe), width) if torch.allclose(rows, wpe, atol=1e-5)), None)
    sine = Finding("position-sinusoidal", "wpe", "positions are sines and cosines, not the checkpoint's learned ones")
    right = Option("right", lambda: words + wpe[:tokens], () if sinus is None else (sine,))
    right.values = {"wte": words, "wpe": wpe[None, :tokens]}

    def scaled(factor: float, what: str) -> tuple[Finding, ...]:
        root = f" (sqrt(n_embd) = {math.sqrt(width):.6g})" if math.isclose(factor, math.sqrt(width), rel_tol=1e-6) else ""
        return (Finding("embedding-scaled", "wte", f"{what} are multiplied by {factor:.6g}{root}"),)

    both = []
    for factor in [f for f in pool.factors(words + wpe[:tokens], 0, 1) if not math.isclose(f, 1.0)]:
        value = (words + wpe[:tokens]) * factor
        found = scaled(factor, "the embeddings, tokens and positions together,")
        both.append(Option(f"both {factor:g}", lambda v=value: v, found, values={"wte": words, "wpe": wpe[None, :tokens]}))
    if (match := pool.find(right.value, 0, 1)) is not None:
        right = right.seen_as(pool.adopt(right.value, match))
        return [right, *both, *(more for option in (right, *both) for more in _normed_embedding(norms, option))]

    factors = [1.0, *(f for f in [*pool.factors(words, 0), math.sqrt(width)] if not math.isclose(f, 1.0))]
    places = list(_positions(pool, wpe, ids, sine))
    options = []
    for factor in dict.fromkeys(factors):
        scale = () if factor == 1 else scaled(factor, "token embeddings")
        for label, rows, findings in places:
            for whole in (False, True) if factor != 1 else (False,):
                value = (words + rows) * factor if whole else words * factor + rows
                found = scaled(factor, "the embeddings, tokens and positions together,") if whole else scale
                options.append(
                    Option(
                        f"{label} {factor:g} {whole}",
                        lambda v=value: v,
                        (*found, *findings),
                        silent=label == "none",
                        values={"wte": words * factor, "wpe": rows.expand(1, tokens, width) if rows.ndim < 3 else rows},
                    )
                )
    kept = []
    for option in options:
        match = pool.find(option.value, 0, 1)
        if match is not None:
            kept.append(option.seen_as(pool.adopt(option.value, match)))
    kept += both
    if not any(not option.silent for option in kept):
        kept += _unknown_positions(pool, words, factors, scaled)
    kept.sort(key=lambda option: option.price)
    return [right, *kept, *(more for option in kept[:3] for more in _normed_embedding(norms, option))]


def _normed_embedding(norms: Norms, stream: Option) -> Iterator[Option]:
    yield from norms.extra(("h.0.ln_1", "ln_f"), stream, "embed", "the embeddings are normalised before the first block")


def _positions(pool: Pool, wpe: Tensor, ids: Tensor, sine: Finding) -> Iterator[tuple[str, Tensor, tuple[Finding, ...]]]:
    """Label, (T, D) or (B, T, D) rows, findings."""
    tokens, width = ids.size(1), wpe.size(1)
    yield "right", wpe[:tokens], ()

    def offset(detail: str) -> tuple[Finding, ...]:
        return (Finding("position-offset", "wpe", detail),)

    for shift in range(1, len(wpe) - tokens + 1):
        yield f"shift {shift}", wpe[shift : shift + tokens], offset(f"positions begin at row {shift} of their table, not at 0")
    for shift in range(1, tokens + 1):
        rows = torch.arange(tokens) - shift
        yield f"shift -{shift}", wpe[rows % len(wpe)], offset(f"positions begin at row -{shift}, the end of the table")
        yield f"clamped {shift}", wpe[rows.clamp(min=0)], offset(f"positions lag by {shift}")
    yield "reversed", wpe[:tokens].flip(0), offset("positions count backwards")
    yield "constant", wpe[:1].expand(tokens, -1), offset("every token is given position 0")
    yield (
        "by token",
        wpe[ids.clamp(max=len(wpe) - 1)],
        offset("rows of the position table are taken by token id, not by position"),
    )
    for label, rows in sinusoids(tokens, width):
        found = (Finding(sine.id, sine.part, f"{sine.detail} ({label})"),)
        yield f"sines {label}", rows, found
    for factor in [f for f in pool.factors(wpe[:tokens]) if not math.isclose(f, 1.0)]:
        found = (Finding("embedding-scaled", "wpe", f"position embeddings are multiplied by {factor:.6g}"),)
        yield f"scaled {factor:g}", wpe[:tokens] * factor, found
    yield "none", torch.zeros(tokens, width, dtype=wpe.dtype), (Finding("position-missing", "wpe", "no positions are added"),)


def _unknown_positions(pool: Pool, words: Tensor, factors: list[float], scaled: object) -> Iterator[Option]:
    """A tensor that differs from the token embeddings by the same in every row of the batch: then that is the positions'."""
    waves = bool(pool.operators & {"sin", "cos", "sin_", "cos_", "polar", "view_as_real"})
    for entry in pool.of_size(words.numel()):
        for x in (entry, entry.transpose(0, 1)) if entry.ndim == 3 else (entry,):
            if x.shape != words.shape or len(x) < 2:
                continue
            for factor in factors:
                rows = x - words * factor
                spread = float((rows - rows[:1]).abs().max()) / float(rows.abs().max().clamp(min=1e-300))
                if spread > 1e-9 or float(rows.abs().max()) < 1e-9:
                    continue
                detail = "positions are made of sines and cosines, not of the checkpoint's learned ones"
                bounded = float(rows.abs().max()) <= 1.0
                if not (waves or bounded):
                    detail = "positions are not the checkpoint's learned ones, and none known here"
                found = [Finding("position-sinusoidal" if waves or bounded else "not-loaded", "wpe", detail)]
                found += scaled(factor, "token embeddings") if factor != 1 else ()
                yield Option("other positions", lambda x=x: x, tuple(found), values={"wte": words * factor, "wpe": rows[:1]})


def middles(norms: Norms, pool: Pool, layer: int, attention: Taken) -> Iterator[Option]:
    """The stream between the branches."""
    at = f"h.{layer}."
    x, taken, bare = attention.stream, attention.taken, not attention.normed
    for a in attention.results:
        if x is not None:
            added = Option("add", lambda a=a: x + a.value, base=a)
            yield added
        missing = Finding("residual-missing", "mid", "attention's result replaces the stream: nothing is added to it")
        alone = Option("branch", lambda a=a: a.value, (missing,), silent=True, base=a)
        yield alone
        if attention.normed:
            words = "attention's result is added to its normalised input, not to the stream before the norm"
            normed = Finding("residual-from-normed", "mid", words)
            yield Option("normed", lambda a=a: taken + a.value, (normed,), base=a)
        if x is None:
            continue
        yield from _scaled(pool, "mid", x, a)
        yield from after(
            norms, (f"{at}ln_1", f"{at}ln_2"), "ln_1", added, "attention's result is added and the sum normalised", bare
        )
        if attention.normed:
            yield from after(norms, (f"{at}ln_1", f"{at}ln_2"), "ln_1", normed_sum(taken, a, normed), "the sum is normalised")
        for branch in after(
            norms, (f"{at}ln_1", f"{at}ln_2"), "ln_1", a, "attention's result is normalised before it is added", bare
        ):
            label = f"x + {branch.label}"
            yield Option(label, lambda b=branch: x + b.value, branch.findings, base=a, cost=branch.cost)
        yield from after(norms, (f"{at}ln_1",), "ln_1", alone, "attention's result is normalised, and replaces the stream", bare)


def normed_sum(taken: Tensor, a: Option, finding: Finding) -> Option:
    return Option("normed", lambda: taken + a.value, (finding,), base=a)


def after(norms: Norms, names: Iterable[str], part: str, x: Option, words: str, expected: bool = False) -> Iterator[Option]:
    """A norm behind a branch: of any kind, with the parameters of one of ``names``, or with none. It is ``expected`` if there was
    none before the branch: then it costs nothing more."""
    found = Finding(AFTER, part, words)
    for number, name in enumerate(names):
        for hypothesis in norms.at(name):
            if not any(f.id in ("norms-swapped", "layernorm-without-affine") for f in hypothesis.findings):
                label = f"after {number} {hypothesis.label}"
                own = name.rpartition(".")[2]
                findings = (found, *(Finding(f.id, own, f.detail) for f in hypothesis.findings))
                cost = (0.5 if own != part else 0.0) - expected
                yield Option(label, lambda f=hypothesis.formula: f(x.value), findings, base=x, cost=cost)
    extra = Finding("extra-norm", "attn" if part == "ln_1" else "mlp", words)
    yield Option("after plain", lambda: norms.plain(x.value), (extra,), base=x)
    yield Option(
        "after rms", lambda: x.value * (x.value.square().mean(-1, keepdim=True) + 1e-5).rsqrt(), (extra,), base=x, cost=0.1
    )


def _scaled(pool: Pool, part: str, x: Tensor, branch: Option) -> Iterator[Option]:
    """A residual with a factor, where the pool shows one."""
    for factor in pool.factors(branch.value, *(0, 1)):
        if not math.isclose(factor, 1.0, rel_tol=1e-9):
            found = Finding("residual-scaled", part, f"the branch is multiplied by {factor:.6g} before it is added")
            yield Option(f"scaled {factor:.6g}", lambda f=factor: x + f * branch.value, (found,), base=branch, cost=0.1)
    both = x + branch.value
    for factor in pool.factors(both, *(0, 1)):
        if not math.isclose(factor, 1.0, rel_tol=1e-9):
            found = Finding("residual-scaled", part, f"the sum of stream and branch is multiplied by {factor:.6g}")
            yield Option(f"sum {factor:.6g}", lambda f=factor: f * both, (found,), base=branch, cost=0.1)


def inputs(norms: Norms, layer: int, attention: Taken, mids: list[Option]) -> Iterator[Option]:
    """What the feed-forward may take."""
    name = f"h.{layer}.ln_2"
    for mid in mids:
        post = "after" in mid.label
        words = "the feed-forward takes the stream as it is, without a norm before it"
        missing = Finding("norm-missing", "ln_2", words)
        options = norms.before(name, mid, missing)
        if post and not attention.normed:  # of one piece: norms after the branches, and none before them
            options = (o if o.label != "no norm" else Option("no norm", o.make, o.findings, True, mid, -1.0) for o in options)
        yield from options
    if attention.stream is not None:
        x = Option("parallel", lambda: attention.stream, (_parallel("the feed-forward takes the stream before attention"),))
        yield from norms.before(name, x, Finding("norm-missing", "ln_2", "the feed-forward takes no norm of its own"))
        if attention.normed:
            words = "attention and feed-forward take the same norm of the same stream"
            yield Option("parallel, one norm", lambda: attention.taken, (_parallel(words),), silent=True)


def _parallel(words: str) -> Finding:
    return Finding("parallel-block", "", words)


def outputs(norms: Norms, pool: Pool, layer: int, attention: Taken, mid: Option | None, taken: Option, m: Option) -> list[Option]:
    """The stream after the block: ``taken`` went into the feed-forward and ``m`` came out."""
    at, x = f"h.{layer}.", attention.stream
    parallel = taken.path.startswith("parallel")
    found: list[Option] = []
    alone = Finding("residual-missing", "", "the feed-forward's result replaces the stream: nothing is added to it")
    lone = Option("branch", lambda: m.value, (alone,), silent=True, base=m)
    if parallel and x is not None:
        for a in attention.results:
            found.append(Option("parallel", lambda a=a: x + a.value + m.value, base=m, cost=a.price))
            words = "the branches' sum replaces the stream: nothing is added to it"
            missing = Finding("residual-missing", "", words)
            found.append(Option("branches", lambda a=a: a.value + m.value, (missing,), base=m, cost=a.price))
            if attention.normed:
                normed = Finding("residual-from-normed", "", "the branches are added to the normalised stream")
                found.append(Option("normed", lambda a=a: attention.taken + a.value + m.value, (normed,), base=m, cost=a.price))
        skipped = Finding("residual-missing", "mid", "attention's result is dropped: the feed-forward is added without it")
        found.append(Option("skipped", lambda: x + m.value, (skipped,), base=m))
    middle = mid.value if mid is not None else None
    bare = "no norm" in taken.label
    if middle is not None:
        added = Option("add", lambda: middle + m.value, base=m)
        found.append(added)
    found.append(lone)
    if middle is None or taken.value is not middle:
        words = "the feed-forward's result is added to its normalised input, not to the stream before the norm"
        found.append(Option("normed", lambda: taken.value + m.value, (Finding("residual-from-normed", "", words),), base=m))
    if x is not None and not parallel:
        words = "the feed-forward's result is added to the stream as it was before attention"
        found.append(Option("skipped", lambda: x + m.value, (Finding("residual-missing", "mid", words),), base=m))
        if attention.normed:
            words = "the feed-forward's result is added to what went into attention"
            found.append(
                Option(
                    "normed, skipped", lambda: attention.taken + m.value, (Finding("residual-from-normed", "", words),), base=m
                )
            )
    names = (f"{at}ln_2", f"{at}ln_1")
    if middle is not None:
        found += _scaled(pool, "", middle, m)
        found += after(norms, names, "ln_2", added, "the feed-forward's result is added and the sum normalised", bare)
        if taken.value is not middle:
            words = "the feed-forward's result is added to its normalised input, not to the stream before the norm"
            both = Option("normed", lambda: taken.value + m.value, (Finding("residual-from-normed", "", words),), base=m)
            found += after(norms, names, "ln_2", both, "the sum is normalised")
        for branch in list(after(norms, names, "ln_2", m, "the feed-forward's result is normalised before it is added", bare)):
            found.append(
                Option(f"x + {branch.label}", lambda b=branch: middle + b.value, branch.findings, base=m, cost=branch.cost)
            )
    found += after(norms, (f"{at}ln_2",), "ln_2", lone, "the feed-forward's result is normalised, and replaces the stream", bare)
    return found
