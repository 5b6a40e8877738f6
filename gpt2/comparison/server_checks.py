"""Find what a server does besides rounding: each suspicion is computed with our model, and explains the figures or does not.

A suspicion is a way to get other log-probabilities from the *same* weights: a text in front, a temperature, less context, rows a
place late. Our model is run that way. A suspicion is found if the median KL then falls to a tenth or less. What no suspicion
explains is the weights' own difference: as small as a quantisation's, or another model's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.comparison.sides.server import RunningServer
from gpt2.comparison.sides.side import Top
from gpt2.data import Tokenizer
from gpt2.measure.metrics import Logits

ROUNDING = 1e-5  # nats, median of a place: float16's arithmetic stays below it
QUANTISED = 0.05  # nats: a usable quantisation stays below it
EXPLAINS = 0.1  # a suspicion is found if it leaves at most this part of the KL
LEAST_REST = 1e-7  # float32's rounding of a sum of probabilities
PLACES = 48  # of a window, at which less context is tried
TEMPERATURES = [2 ** (step / 16) for step in range(-32, 33) if step]


@dataclass(frozen=True)
class Finding:
    """``id`` is stable; ``evidence`` is what was measured."""

    id: str
    evidence: str


@dataclass(frozen=True, eq=False)
class Seen:
    """One window, ``number`` counted from 1: ids (T + 1,), our log-probabilities (T, V), and what the side showed."""

    number: int
    ids: Tensor
    logp: Tensor
    top: Top

    @cached_property
    def costs(self) -> Tensor:
        """KL from below at each place (T,)."""
        return shown_kl(self.logp, self.top)

    @cached_property
    def median(self) -> float:
        return _median(self.costs)


def check(
    full: Logits | None, seen: list[Seen], vocab: int, tokenizer: Tokenizer | None, server: RunningServer | None
) -> tuple[Finding, ...]:
    """Return what explains the differences, most certain first; a side that agrees has the one finding ``rounding``.

    What is explained is the window that differs most: a server may begin right, and forget what lies far back.
    ``full`` is None where a side is a recording: then suspicions for which our side would have to run are left out.
    """
    findings: list[Finding] = []
    if server is not None and server.other_tokens:
        findings.append(Finding("tokens-differ", f"its tokenizer is another: {server.other_tokens}"))
    shown = sorted((each for each in seen if int(known(each.top).sum()) > 1), key=lambda each: each.median)
    if not shown:
        return tuple(findings)
    first, base = shown[-1], shown[-1].median
    if base > ROUNDING:
        ways = [] if full is None else [_in_front(full, first, vocab, tokenizer, server)]
        findings += [way.finding for way in (*ways, _temperature(first), _shifted(first)) if way.explains]
        if not findings and full is not None and (less := _less_context(full, first, vocab)).explains:
            findings.append(less.finding)
        if not findings and (cut := _cut(first)) is not None:
            findings.append(cut)
    if not findings:
        findings.append(_unexplained(first))
    if EXPLAINS * base > max(shown[0].median, ROUNDING):
        where = f" (window {first.number} of the text; window {shown[0].number}: {shown[0].median:.2g} nats)"
        findings = [Finding(each.id, each.evidence + where) for each in findings]
    return tuple(findings)


def _unexplained(seen: Seen) -> Finding:
    """Return how large a difference is that no suspicion explains."""
    places, base = known(seen.top), seen.median
    if base <= ROUNDING:
        return Finding("rounding", f"it only rounds: median KL of a place {base:.2g} nats")
    same = (seen.top.ids[places, 0] == seen.logp[places].argmax(1)).double().mean().item()
    figures = f"median KL of a place at least {base:.2g} nats, same first choice {same:.0%}; nothing tried explains it"
    if base <= QUANTISED and same > 0.8:
        return Finding("weights-nearly-equal", f"other precision or quantisation, or a light fine-tune: {figures}")
    return Finding("other-model", f"another model: {figures}")


def known(top: Top) -> Tensor:
    """(T,) bool: the places that the side showed."""
    return (top.ids >= 0).any(1)


class Shares(NamedTuple):
    """P and Q of T places at the shown tokens, and what both leave out."""

    known: Tensor  # (T, k) bool: a token of the vocabulary is shown
    q: Tensor  # (T, k) probabilities, 0 where nothing is shown
    log_q: Tensor
    ratio: Tensor  # (T, k) log(p / q), 0 where nothing is shown
    shown: Tensor  # (T,) Q of the shown tokens together
    rest_p: Tensor  # (T,) probability of all others
    rest_q: Tensor
    forward: Tensor  # (T,) KL(P||Q) from below, with the tokens left out as one; NaN where nothing is shown


def shares(logp: Tensor, top: Top) -> Shares:
    """Return the shares of P, from its log-probabilities (T, V), and of Q."""
    known = (top.ids >= 0) & (top.ids < logp.size(1))
    log_q = top.logp.masked_fill(~known, -math.inf)
    log_p = logp.gather(1, top.ids.clamp(0, logp.size(1) - 1)).masked_fill(~known, -math.inf)
    p, q, ratio = log_p.exp(), log_q.exp(), torch.where(known, log_p - log_q, 0.0)
    rest_p, rest_q = ((1 - total.sum(1)).clamp(min=LEAST_REST) for total in (p, q))
    forward = ((p * ratio).sum(1) + rest_p * (rest_p / rest_q).log()).clamp(min=0).masked_fill(~known.any(1), math.nan)
    return Shares(known, q, log_q, ratio, q.sum(1), rest_p, rest_q, forward)


def shown_kl(logp: Tensor, top: Top) -> Tensor:
    """KL(P||Q) from below at each place (T,), as :func:`shares` has it."""
    return shares(logp, top).forward


def _median(values: Tensor) -> float:
    return values[~values.isnan()].median().item() if bool((~values.isnan()).any()) else math.inf


class Way(NamedTuple):
    """A suspicion: the median KL that is ``left`` if it is right, of ``base``."""

    left: float
    id: str
    how: str
    base: float

    @property
    def explains(self) -> bool:
        return self.left <= EXPLAINS * self.base

    @property
    def finding(self) -> Finding:
        return Finding(self.id, f"{self.how}: median KL falls from {self.base:.2g} to {self.left:.2g} nats")


def _in_front(full: Logits, seen: Seen, vocab: int, tokenizer: Tokenizer | None, server: RunningServer | None) -> Way:
    """Put a token in front of the text: the end of text, or a line's end, as a template does."""
    counted = f"; it counted {server.extra_tokens} more tokens than the prompt has" if server and server.extra_tokens > 0 else ""
    best = Way(math.inf, "text-in-front", "", seen.median)
    candidates = {} if tokenizer is None else {"a line's end": tokenizer.encode("\n"), "a space": tokenizer.encode(" ")}
    if tokenizer is not None and tokenizer.eot is not None:
        candidates = {"the end-of-text token": [tokenizer.eot], **candidates}
    for name, ids in candidates.items():
        if ids:
            rows = torch.cat((torch.tensor(ids), seen.ids[:-1]))[None, : len(seen.ids) - 1]
            logp = full(rows)[0, len(ids) :, :vocab].double().log_softmax(-1).cpu()
            left = _median(shown_kl(logp, seen.top.at(slice(0, len(logp)))))
            best = min(best, best._replace(left=left, how=f"with {name} in front of the text{counted}"))
    return best


def _temperature(seen: Seen) -> Way:
    left, best = min((_median(shown_kl((seen.logp / t).log_softmax(-1), seen.top)), t) for t in TEMPERATURES)
    return Way(left, "temperature", f"with a temperature of about {best:.2g} applied to its log-probabilities", seen.median)


def _shifted(seen: Seen) -> Way:
    """Compare each place with the place before or after it."""
    n = len(seen.logp)
    late = _median(shown_kl(seen.logp[1:], seen.top.at(slice(0, n - 1))))
    early = _median(shown_kl(seen.logp[:-1], seen.top.at(slice(1, n))))
    which = "after" if late < early else "before"
    return Way(min(late, early), "rows-shifted", f"with each row taken for the place {which} it", seen.median)


def _less_context(full: Logits, seen: Seen, vocab: int) -> Way:
    """Predict late places from their last c tokens only."""
    best, places = Way(math.inf, "context-truncated", "", math.inf), known(seen.top).nonzero()[:, 0]
    for c in (2**power for power in range((len(seen.logp) - 1).bit_length())):
        late = places[places >= c][-PLACES:]
        if len(late):
            rows = [seen.ids[int(at) - c + 1 : int(at) + 1] for at in late]  # one at a time: logits take most memory
            logp = torch.cat([full(row[None])[:, -1, :vocab] for row in rows]).double().log_softmax(-1).cpu()
            left, base = _median(shown_kl(logp, seen.top.at(late))), _median(seen.costs[late])
            best = min(best, Way(left, best.id, f"with only the last {c} tokens as context", base), key=lambda way: way.left)
    return best


def _cut(seen: Seen) -> Finding | None:
    """Find log-probabilities that were normalised over the shown tokens only, as after top-k or top-p sampling."""
    places = known(seen.top)
    shown = seen.top.logp[places].exp().sum(1)
    ours = seen.logp.gather(1, seen.top.ids.clamp(min=0))[places].exp() * (seen.top.ids[places] >= 0)
    if shown.median() < 0.9999 or ours.sum(1).median() > 0.99:
        return None
    sums = f"its shown tokens add up to 1, ours to {ours.sum(1).median():.2f}"
    return Finding("renormalised", f"{sums}: it cut before it normalised")
