"""Statistics of two models' next-token distributions on one text: divergences and perplexities, with intervals.

``a`` is the reference: KL(a||b) is the loss from using ``b`` instead. llama.cpp's ``--kl-divergence`` calls them base and Q.

Sources:
    [1] llama.cpp, tools/perplexity: KL against a base model with percentiles, the change in probability of the right token, the
        share of equal top tokens. (llama.cpp rounds base logits to 16 bits and cuts them at 16 nats; here they are exact.)
    [2] Lin, "Divergence measures based on the Shannon entropy", 1991: the Jensen-Shannon divergence, at most log 2.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.measure.estimates import Bootstrap, Estimate, percentiles, positive
from gpt2.measure.metrics import LanguageScore, exp_or_inf
from gpt2.measure.per_token import Tokens
from gpt2.measure.windows import Windows

POSITION_BINS = 16
PERCENTILES = (50, 90, 95, 99, 99.9)


@dataclass(frozen=True)
class Language:
    """A model's score on the text; ``score`` also has context and stride."""

    score: LanguageScore
    perplexity: Estimate
    bits_per_byte: Estimate


@dataclass(frozen=True)
class DivergenceFigures:
    """A divergence, nats: mean, percentiles, maximum and its place in the text."""

    mean: Estimate
    percentiles: dict[str, float]
    max: float
    max_at: int


@dataclass(frozen=True)
class Change:
    """The change of the right token's probability from a to b: mean and root mean square [1]."""

    mean: Estimate
    rms: Estimate


@dataclass(frozen=True)
class Bin:
    """Tokens predicted from ``low`` .. ``high`` tokens: mean KL(a||b), losses in nats, share of equal top tokens."""

    low: int
    high: int
    tokens: int
    kl: float
    loss_a: float
    loss_b: float
    same_top: float


@dataclass(frozen=True)
class Distributions:
    """The comparison of two models' distributions on one text.

    ``ratio`` is b's perplexity over a's, ``bits`` b's bits per byte minus a's, ``difference`` the mean log-probability under b
    minus that under a (ratio = exp(-difference)), all paired token by token. ``only_a`` is the probability that a gives to
    entries that b lacks, on average: KL(a||b) is infinite where it is above 0.
    """

    a: Language
    b: Language
    ratio: Estimate
    difference: Estimate
    bits: Estimate
    kl_ab: DivergenceFigures
    kl_ba: DivergenceFigures
    js: DivergenceFigures
    same_top: Estimate
    change: Change
    by_position: tuple[Bin, ...]
    only_a: Estimate
    only_b: Estimate
    tokens: int

    def lacking(self, b: str = "B") -> list[tuple[str, str, float]]:
        """Who gives probability to tokens that the other lacks, as (one, other, share); ``b`` is the second model's letter."""
        shares = ("A", b, self.only_a.value), (b, "A", self.only_b.value)
        return [each for each in shares if each[2] > 0]


def summarise(tokens: Tokens, token_bytes: Tensor, bootstrap: Bootstrap | None = None) -> Distributions:
    """Compute every statistic of a measured pair; ``token_bytes`` (V,) are byte lengths, ``bootstrap`` makes the intervals."""
    bootstrap = bootstrap or Bootstrap(len(tokens))
    lengths, squares = token_bytes[tokens.targets], tokens.change.square()
    gained = gain(tokens.logp_a, tokens.logp_b)
    bits = -gained / math.log(2)
    a, b = (language(logp, lengths, tokens.windows, bootstrap) for logp in (tokens.logp_a, tokens.logp_b))
    per_byte = bootstrap.interval((bits.sum() / lengths.sum()).item(), bootstrap.means(bits, lengths))
    score = a, b, perplexity_ratio(tokens.logp_a, tokens.logp_b, bootstrap), bootstrap.mean(gained), per_byte
    kl_ab, kl_ba, js = (_divergence(each, tokens.index, bootstrap) for each in (tokens.kl_ab, tokens.kl_ba, tokens.js))
    rms = bootstrap.mean(squares).through(positive).through(math.sqrt)
    change, same_top = Change(bootstrap.mean(tokens.change), rms), bootstrap.fraction(tokens.same_top)
    only_a, only_b = (bootstrap.mean(each).through(positive) for each in (tokens.only_a, tokens.only_b))
    return Distributions(*score, kl_ab, kl_ba, js, same_top, change, _by_position(tokens), only_a, only_b, len(tokens))


def gain(logp_a: Tensor, logp_b: Tensor) -> Tensor:
    """Return b's log-probabilities minus a's of the same tokens (N,); -inf minus -inf is no change."""
    return torch.where(logp_a == logp_b, 0.0, logp_b - logp_a)


def perplexity_ratio(logp_a: Tensor, logp_b: Tensor, bootstrap: Bootstrap) -> Estimate:
    """Return b's perplexity over a's from the log-probabilities (N,) of the same tokens, paired token by token."""
    return bootstrap.mean(-gain(logp_a, logp_b)).through(exp_or_inf)


def language(logp: Tensor, lengths: Tensor, windows: Windows, bootstrap: Bootstrap) -> Language:
    """Return a model's score from log-probabilities (N,) of tokens of ``lengths`` bytes."""
    score = LanguageScore(-logp.sum().item() / len(logp), len(logp), round(lengths.sum().item()), windows.context, windows.step)
    bits = bootstrap.interval(score.bits_per_byte, bootstrap.means(-logp, lengths) / math.log(2))
    return Language(score, bootstrap.interval(score.loss, bootstrap.means(-logp)).through(exp_or_inf), bits.through(positive))


def _divergence(values: Tensor, index: Tensor, bootstrap: Bootstrap) -> DivergenceFigures:
    worst = int(values.argmax())  # argmax counts NaN as the largest
    named = zip((f"{percent:g}" for percent in PERCENTILES), percentiles(values, PERCENTILES), strict=True)
    return DivergenceFigures(bootstrap.mean(values).through(positive), dict(named), values[worst].item(), int(index[worst]))


def _by_position(tokens: Tokens) -> tuple[Bin, ...]:
    """Summarise the tokens by the number that each was predicted from, in bins of growing width, without empty ones."""
    edges = [0, *dict.fromkeys(round(tokens.windows.context ** (i / POSITION_BINS)) for i in range(POSITION_BINS + 1))]
    columns = (tokens.kl_ab, -tokens.logp_a, -tokens.logp_b, tokens.same_top)
    pairs = itertools.pairwise(edges)
    filled = ((low, high, inside) for low, high in pairs if (inside := (low < tokens.position) & (tokens.position <= high)).any())
    means = ((low, high, inside.sum(), [each[inside].double().mean().item() for each in columns]) for low, high, inside in filled)
    return tuple(Bin(low + 1, high, int(count), *figures) for low, high, count, figures in means)
