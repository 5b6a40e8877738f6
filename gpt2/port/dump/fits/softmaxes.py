"""Read off attention's recorded weights another softmax: other exponentials, soft caps, scores that take part, fewer bits.

Shapes: weights (B, H, T, S); queries and keys by heads (B, H, T, K); rows (B, T) are the queries that are not GPT-2's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from torch import Tensor

from gpt2.port.diagnosis.hypotheses import allowed
from gpt2.port.diagnosis.norms import layer_norm
from gpt2.port.diagnosis.search import Fault, Formula
from gpt2.port.dump.fits.attention import CLEAR, LEAST, LEAST_SEEN
from gpt2.port.dump.fits.contents import MOST_EMPTY, softmax
from gpt2.port.dump.fits.observed import Fit, Observed, nice
from gpt2.port.dump.fits.precision import rounded_mixture
from gpt2.port.dump.fits.rounding import roundings
from gpt2.port.golden_section import least

LEAST_TABLE = 60  # weights that show another function than the exponential
ROUGH = 0.3  # mean square of its steps from one score to the next, of its variance
STEEP = 2.0  # the largest slope of its logarithm, beyond the exponential's
SMOOTH = 0.9  # the share of steps within that slope
CAPS = 0.4  # step of the logarithm of a soft cap


class Softmaxes:
    """Attention weights of ``q``, ``k``, with GPT-2's factor ``scale``. ``in_time`` raises TimeUp behind the limit of time."""

    def __init__(self, q: Tensor, k: Tensor, scale: float, in_time: Callable[[], None]) -> None:
        self.q, self.k, self.scale, self.in_time = q, k, scale, in_time
        self.scores = q @ k.mT * scale
        self.visible = allowed("right", self.scores).expand_as(self.scores)

    def fit(self, seen: Observed, rows: Tensor) -> Fit | None:
        """Return the fit of a softmax with at most one fitted number, which few weights would show by chance."""
        shown = (self.visible & rows[:, None, :, None]).sum(-1) - 1  # differences of scores
        if int(shown.clamp(min=0).sum()) < LEAST_SEEN:
            return None
        for family in (self._buffer, self._again, self._keys, self._compared, self._added, self._capped, self._rounded):
            self.in_time()
            if (fit := next(iter(family(seen, rows)), None)) is not None:
                return fit
        return None

    def _buffer(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """A sum of exponentials over further scores of zero, as in a buffer that is longer than the text."""
        powers = self.scores.exp() * self.visible
        sums, total = powers.sum(-1, keepdim=True), seen.value.sum(-1, keepdim=True)
        count = (sums * (1 / total.clamp(min=1e-300) - 1)).mean((0, 1), keepdim=True).round()  # of each query
        some = count[:, :, rows.any(0)]
        if not bool(((some > 0) & (some <= MOST_EMPTY)).all()) or bool((seen.value[~self.visible] != 0).any()):
            return
        words = f"the softmax also runs over more scores, of zero ({int(some.amax())}), as in a buffer longer than the text"
        fault = Fault("mask-multiplied", "attn", words)
        if bool(rows.all()) and bool((some == 1).all()):  # in steps alone, it is a slot of a cache
            fault = Fault("softmax-missing", "attn", "1 is added to the sum that divides the exponentials (softmax-one)")
        yield from seen.fits(powers / (count + sums), rows, fault)

    def _again(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """The softmax of the softmax, or its logarithm."""
        once = softmax(self.scores, self.visible)
        logarithm = once.clamp(min=1e-300).log().masked_fill(~self.visible, 0.0)
        yield from seen.fits(softmax(once, self.visible), rows, Fault("softmax-missing", "attn", "the softmax runs twice"))
        yield from seen.fits(logarithm, rows, Fault("softmax-missing", "attn", "values are mixed with logarithms of weights"))

    def _keys(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """The keys of another head, for each head its own."""
        value, taken = seen.right.clone(), []
        for head in range(self.q.shape[1]):
            self.in_time()
            made = softmax(self.q[:, [head]] @ self.k.mT * self.scale)
            errors = ((made - seen.value[:, [head]]) * rows[:, None, :, None]).square().sum((0, 2, 3))
            taken.append(int(errors.argmin()))
            value[:, head] = made[:, taken[-1]]
        words = f"heads compare their queries with the keys of heads {', '.join(map(str, taken))}"
        yield from seen.fits(value, rows, Fault("head-layout", "attn", words))

    def _compared(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Keys that are turned by a reshape; queries and keys that are normalised in each head."""
        q, k = self.q, self.k
        made = softmax(q @ k.reshape(*k.shape[:2], k.shape[3], k.shape[2]) * self.scale)
        words = "keys are transposed by a reshape, which leaves the numbers in their order"
        yield from seen.fits(made, rows, Fault("head-layout", "attn", words))
        root = math.sqrt(q.shape[-1])
        for text, normed in (
            ("to length 1", lambda x: x / x.norm(dim=-1, keepdim=True).clamp(min=1e-300)),
            ("by their root mean square", lambda x: root * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-300)),
            ("by a layer norm", lambda x: layer_norm(x)),
        ):
            one, other = normed(q), normed(k)
            for which, scores in (("queries and keys", one @ other.mT), ("queries", one @ k.mT), ("keys", q @ other.mT)):
                words = f"{which} are normalised in each head, {text}, before they are compared"
                for times in (self.scale, 1.0):
                    fault = Fault("extra-norm", "attn", words)
                    yield from seen.fits(softmax(scores * times), rows, fault)

    def _added(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Hidden scores that are replaced by a number, or have one added, and take part in the softmax."""
        y, hidden = seen.value, ~self.visible & rows[:, None, :, None]
        clear = hidden & (y > CLEAR * seen.slack) & (y > LEAST)
        if not bool(clear.any()):
            return
        log = y.clamp(min=1e-300).log()
        level = (log - self.scores).masked_fill(~self.visible, -math.inf).amax(-1, keepdim=True)
        fill, more = (nice(float(one[clear].median()), 10 * seen.loose) for one in (log - level, log - level - self.scores))
        ways = [(self.scores.masked_fill(~self.visible, fill), f"masked scores are {fill:.6g}, not minus infinity")]
        if more:  # else there is no mask
            ways.append((self.scores + more * ~self.visible, f"{more:.6g} is added to masked scores, not minus infinity"))
        for value, words in ways:
            fault = Fault("mask-multiplied", "attn", f"{words}: the softmax gives them a share")
            yield from seen.fits(value.softmax(-1), rows, fault)

    def _capped(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Scores with a soft cap, cap * tanh(score / cap), as in Gemma 2."""
        at = rows[:, None].expand(seen.value.shape[:3])

        def error(level: float) -> float:
            self.in_time()
            cap = math.exp(level)
            return float((softmax(cap * (self.scores / cap).tanh()) - seen.value)[at].square().sum())

        largest = math.log(max(float(self.scores.abs().max()), 1e-300))
        nearest = min((largest + CAPS * n for n in range(-8, 9)), key=error)
        cap = nice(math.exp(least(error, nearest - CAPS, nearest + CAPS, 40)[1]), 10 * seen.loose)
        fault = Fault("scale-wrong", "attn", f"the scores have a soft cap: they are {cap:.5g} x tanh(score / {cap:.5g})")
        value = softmax(cap * (self.scores / cap).tanh())
        if seen.mostly(value, rows) is not None:  # a wide cap brings a single weight within its rounding
            yield from seen.fits(value, rows, fault)

    def _rounded(self, seen: Observed, rows: Tensor) -> Iterator[Fit]:
        """Scores, weights or the operands of the scores in fewer bits."""
        for words, rounded in roundings():
            self.in_time()
            made = softmax(rounded(self.scores))
            ways = {"scores are": made, "attention weights are": rounded(seen.right), "scores and weights are": rounded(made)}
            for what, value in ways.items():
                fault = Fault("reduced-precision", "attn", f"the {what} rounded {words}")
                yield from filter(None, [seen.mostly(value, rows, fault)])
        for before, behind in ((1.0, self.scale), (self.scale, 1.0)):  # the factor stands behind the product, or before it
            for twice in (False, True):

                def made_of(rounded: Formula, before: float = before, behind: float = behind, twice: bool = twice) -> Tensor:
                    product = rounded(self.q * before) @ rounded(self.k).mT
                    return softmax((rounded(product) if twice else product) * behind)

                yield from rounded_mixture(seen, rows, made_of, self.in_time, scores=True)

    def tabulated(self, seen: Observed, rows: Tensor) -> Fit | None:
        """Return the fit of another function than the exponential: each weight beside its query's largest shows its values."""
        y, at = seen.value, self.visible & rows[:, None, :, None]
        top = self.scores.masked_fill(~self.visible, -math.inf).max(-1, keepdim=True)
        below, ratio = self.scores - top.values, y / y.gather(-1, top.indices).clamp(min=1e-300)
        clear = at & (y > CLEAR * seen.slack) & (y > LEAST) & (below < 0)
        if int(clear.sum()) < LEAST_TABLE or float(y[~self.visible].abs().amax()) > LEAST:
            return None
        x, off = below[clear], ratio[clear].log() - below[clear]
        order = x.argsort()
        x, off = x[order], off[order]
        jumps = off.diff().abs() > STEEP * x.diff() + 4 / CLEAR + 10 * seen.loose
        rough = float(off.diff().square().mean() / off.var().clamp(min=1e-300))  # 2 if the score tells nothing
        if rough > ROUGH or float(jumps.double().mean()) > 1 - SMOOTH or float(off.abs().max()) < 10 * seen.loose:
            return None
        away = off.expm1()
        shown = ", ".join(
            f"exp({float(x[i]):.3g}) is {float(x[i].exp() * (1 + away[i])):.4g}" for i in range(0, len(x), len(x) // 3)
        )
        words = (
            f"your exponential is another function: it differs by {float(away.min()):+.2%} to {float(away.max()):+.2%} ({shown})"
        )
        return seen.fitted(y, rows, Fault("softmax-missing", "attn", words))
