"""Read off attention's recorded mixtures which values were mixed, and with which weights, or what else is mixed.

Shapes: weights (B, H, T, S); q, k, v and mixtures by heads (B, H, T, K); rows (B, T) are the queries that are not GPT-2's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from gpt2.port.diagnosis.hypotheses import ALLOWED, allowed
from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.fits.attention import slots
from gpt2.port.dump.fits.contents import softmax
from gpt2.port.dump.fits.library import permutation
from gpt2.port.dump.fits.observed import Fit, Observed, combined, nice
from gpt2.port.dump.fits.precision import rounded_mixture

LEAST_FACTORS = 24  # of weights that show that some are dropped
NEAR = 0.02
Way = tuple[Fault, Callable[[slice], Tensor]]  # to compute the mixtures of some queries


class Mixed:
    """What ``weights`` (B, H, T, S) mix: ``v`` (B, H, S, K), or one of ``others``, in words.

    ``in_time`` raises TimeUp behind the limit of time.
    """

    def __init__(self, weights: Tensor, v: Tensor, others: Mapping[str, Tensor], in_time: Callable[[], None]) -> None:
        self.weights, self.v, self.others, self.in_time = weights, v, others, in_time

    def fit(self, seen: Observed, rows: Tensor) -> Fit | None:
        for family in (self._others, self._columns, self._tokens, self._rounded, self._left_out, self._thinned):
            self.in_time()
            if (fit := next(iter(family(seen, rows)), None)) is not None:
                return fit
        return None

    def alone(self, seen: Observed, rows: Tensor) -> Fit | None:
        """Return the fit of one token's value instead of the sum, as where each term is assigned and none is added."""
        own = torch.eye(self.weights.shape[-1], dtype=self.weights.dtype)
        for kept, words in ((own, "the token itself"), (own[0], "the first token")):
            fault = Fault("value-projection-wrong", "attn", f"only the value of {words} counts: the others are not added to it")
            if (fit := seen.fitted((self.weights * kept) @ self.v, rows, fault)) is not None:
                return fit
        return None

    def _others(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        own = torch.eye(self.weights.shape[-1], dtype=self.weights.dtype)
        for words, other in self.others.items():
            self.in_time()
            fault = Fault("value-projection-wrong", "attn", f"{words} are mixed, not the values")
            yield from seen.fits(self.weights @ other, rows, fault)
            value = (self.weights * (1 - own)) @ other + (self.weights * own) @ self.v
            fault = Fault("cache-inconsistent", "attn", f"{words} are mixed, except for the value of the token itself")
            yield from seen.fits(value, rows, fault)
        for slot, written, words in slots(self.v.shape[1], self.v.shape[2]):
            self.in_time()
            value = (self.weights * written) @ self.v.flatten(1, 2)[:, slot].unflatten(1, self.v.shape[1:3])
            yield from seen.fits(value, rows, Fault("head-layout", "attn", f"values are {words}"))
        for label in ALLOWED:
            value = (self.weights * allowed(label, self.weights)) @ self.v
            words = f"the values of some tokens are left out of the mixture ({label})"
            yield from seen.fits(value, rows, Fault("mask-multiplied", "attn", words))
        found = combined(
            seen.value.transpose(1, 2).flatten(2), {"the mixture": seen.right.transpose(1, 2).flatten(2)}, rows, _flat(seen)
        )
        if found is not None:
            words = f"the mixture is multiplied by {found[0]['the mixture']:.6g}"
            yield from seen.fits(seen.right * found[0]["the mixture"], rows, Fault("residual-scaled", "attn", words))

    def _columns(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Other features of the values, or other heads' weights, in each feature of the result."""
        heads, size = self.v.shape[1], self.v.shape[-1]
        every = torch.einsum("bgts,bhsk->btghk", self.weights, self.v)
        made = every[rows].flatten(1)
        wanted = seen.value.transpose(1, 2)[rows].flatten(1)
        if len(made) < 3:
            return
        columns = torch.cat([made, torch.zeros_like(made[:, :1])], 1)
        nearest = torch.cdist(wanted.T.contiguous(), columns.T.contiguous()).argmin(1)
        empty = nearest == columns.shape[1] - 1
        if bool(empty.all()):  # nothing is computed
            return
        flat = torch.cat([every.flatten(2), torch.zeros_like(every.flatten(2)[..., :1])], -1)
        value = flat[..., nearest].unflatten(-1, (heads, size)).transpose(1, 2)
        weigher, feature = nearest // (heads * size), nearest % (heads * size)
        own = torch.arange(heads * size)
        parts = []
        if bool(empty.any()):
            parts.append(f"features {permutation(empty.nonzero().flatten())} are zero")
        if not torch.equal(weigher[~empty], (own // size)[~empty]):
            parts.append(f"head by head the weights are those of heads {', '.join(map(str, weigher[::size].tolist()))}")
        if not torch.equal(feature[~empty], own[~empty]):
            parts.append(f"the values' features are in another order ({permutation(feature)})")
        yield from seen.fits(value, rows, Fault("head-layout", "attn", "; ".join(parts)))

    def _tokens(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """The values of other tokens."""
        tokens = torch.arange(self.v.shape[2])
        orders = [(tokens - n).clamp(0, len(tokens) - 1) for n in (1, 2, -1, -2)] + [tokens.flip(0)]
        if bool(rows[:, 1:].all()) and float(self.weights.diagonal(dim1=-2, dim2=-1).abs().min()) > 1e-6:
            solved, _ = torch.linalg.solve_ex(self.weights, seen.value)  # of even weights, not finite
            orders.append(torch.cdist(solved[0].transpose(0, 1).flatten(1), self.v[0].transpose(0, 1).flatten(1)).argmin(1))
        for order in orders:
            words = f"the weights mix the values of other tokens: {permutation(order)}"
            fault = Fault("value-projection-wrong" if bool(rows[:, 2:].all()) else "cache-inconsistent", "attn", words)
            yield from seen.fits(self.weights @ self.v[:, :, order], rows, fault)

    def _rounded(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        yield from rounded_mixture(seen, rows, lambda rounded: rounded(self.weights) @ rounded(self.v), self.in_time)

    def _left_out(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Values of some tokens that are not added, for each query its own."""
        value, shown = seen.right.clone(), list[str]()
        for row, token in rows.nonzero().tolist():
            self.in_time()
            w, v = self.weights[row, :, token, : token + 1], self.v[row, :, : token + 1]
            terms = (w[..., None] * v).transpose(0, 1).flatten(1)  # (tokens, D)
            if terms.shape[1] < 2 * len(terms):  # so many factors give any sum
                return
            factors = torch.linalg.lstsq(terms.T, seen.value[row, :, token].flatten()[:, None]).solution[:, 0]
            exact = torch.tensor([nice(float(f), seen.loose) for f in factors], dtype=w.dtype)
            value[row, :, token] = (exact @ terms).view(v.shape[0], -1)
            shown = shown or [f"token {token}: {', '.join(f'{float(f):.4g}' for f in exact)}"]
        words = f"the terms of the sum over the values have other factors ({'; '.join(shown)})"
        yield from seen.fits(value, rows, Fault("mask-multiplied", "attn", words))

    def _thinned(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Weights of which some are zero, for each head others: dropout of weights that were recorded before it."""
        found, size = [], self.v.shape[-1]
        for row, token in rows[:, : size - 1].nonzero().tolist():
            self.in_time()
            terms = (self.weights[row, :, token, : token + 1, None] * self.v[row, :, : token + 1]).mT  # (H, K, S)
            wanted = seen.value[row, :, token, :, None]
            factors = torch.linalg.lstsq(terms, wanted).solution
            if float((terms @ factors - wanted).abs().max()) > 1e-3 * float(wanted.abs().max()):
                return
            found.append(factors.flatten())
        if not found or len(factors := torch.cat(found)) < LEAST_FACTORS:
            return
        zero = factors.abs() < NEAR
        times = float(factors[~zero].median()) if not bool(zero.all()) else 0.0
        if bool(zero.any()) and times > 1 + NEAR and float((factors[~zero] - times).abs().max()) < NEAR * times:
            words = f"{float(zero.double().mean()):.0%} of the weights are zero when values are mixed, and the others "
            words += f"{times:.4g} times what is recorded: dropout"
            yield from seen.fits(seen.value, rows, Fault("dropout-active", "attn", words))


def _flat(seen: Observed) -> Observed:
    """Return an observation of heads (B, H, T, K) as one of (B, T, D)."""
    value, slack, right = (x.transpose(1, 2).flatten(2) for x in (seen.value, seen.slack, seen.right))
    return Observed(value, slack, seen.bound, right, seen.number)


def mixed_otherwise(seen: Observed, rows: Tensor, ways: Iterator[Way], in_time: Callable[[], None]) -> Iterator[Fit]:
    """Yield the fits of mixtures that are computed in other ways, of which the last wrong query is compared first."""
    last = int(rows.any(0).nonzero()[-1])
    one = slice(last, last + 1)
    loose = 2 * (seen.slack + seen.bound * seen.value.square().mean().sqrt())
    for fault, made in ways:
        in_time()
        near = (made(one) - seen.value[:, :, one]).abs() <= loose[:, :, one]
        if bool(near[rows[:, last]].all()):
            yield from seen.fits(made(slice(None)), rows, fault)


def each_token(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Iterator[Way]:
    """Yield mixtures over the heads of each token alone: axes of tokens and heads that have changed places."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))  # (B, T, H, K)
    if q.shape[2] == 1:
        return
    scores = q @ k.mT * scale
    for words, weights in ((" that come before", softmax(scores)), ("", scores.softmax(-1))):
        made = weights @ v
        text = f"each token is alone: its heads attend to its other heads{words}, not tokens to tokens"
        for other, value in (("", made), ("; what comes out is in another order", made.transpose(1, 2).reshape(made.shape))):
            yield Fault("head-layout", "attn", text + other), partial(_queries, value.transpose(1, 2))


def _queries(value: Tensor, queries: slice) -> Tensor:
    return value[:, :, queries]


def tiled(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Iterator[Way]:
    """Yield mixtures tile by tile of keys, in which what was summed before is not rescaled when the maximum grows."""
    tokens = q.shape[2]
    scores = (q @ k.mT * scale).masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
    most = scores.cummax(-1).values

    def mixture(last: Tensor, stale: tuple[bool, bool], queries: slice) -> Tensor:
        """``last``: of each key's tile; ``stale``: whether the mixture and the sum are not rescaled."""
        some, top = scores[:, :, queries], most[:, :, queries]
        powers = {False: (some - top[..., -1:]).exp(), True: (some - top[..., last]).exp()}
        return powers[stale[0]] @ v / powers[stale[1]].sum(-1, keepdim=True)

    for size in range(1, tokens):
        last = (torch.arange(tokens) // size * size + size - 1).clamp(max=tokens - 1)
        for what, stale in (("sum and mixture", (True, True)), ("the mixture", (True, False)), ("the sum", (False, True))):
            words = f"keys are taken in tiles of {size}, and {what} of earlier tiles is not rescaled when the largest score grows"
            yield Fault("softmax-missing", "attn", words), partial(mixture, last, stale)
