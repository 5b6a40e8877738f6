"""Statistics of two models' next-token distributions on one text: divergences, perplexities, calibration, with intervals.

``a`` is the reference: KL(a||b) is the loss from using ``b`` instead. llama.cpp's ``--kl-divergence`` calls ``a`` base and
``b`` Q.

Sources:
    [1] llama.cpp, tools/perplexity: KL against a base model with percentiles, the change in probability of the right token, the
        share of equal top tokens. (llama.cpp rounds base logits to 16 bits and cuts them at 16 nats; here they are exact.)
    [2] Lin, "Divergence measures based on the Shannon entropy", 1991: the Jensen-Shannon divergence, at most log 2.
    [3] Guo et al., "On Calibration of Modern Neural Networks", 2017: expected calibration error over equal bins of confidence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.measure.estimates import Bootstrap, Estimate, percentiles
from gpt2.measure.metrics import LanguageScore, exp_or_inf
from gpt2.measure.per_token import Tokens
from gpt2.measure.windows import Windows

POSITION_BINS = 16
CONFIDENCE_BINS = 10
CALIBRATION_BINS = 15  # Guo et al. [3]
HISTOGRAM_STEPS = 4  # bins per power of ten
DIVERGENCE_PERCENTILES = (50, 90, 95, 99, 99.9)
CHANGE_PERCENTILES = (0, 0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


@dataclass(frozen=True)
class Language:
    """A model's score on the text; ``score`` also has context and stride."""

    score: LanguageScore
    perplexity: Estimate
    bits_per_byte: Estimate


@dataclass(frozen=True)
class Divergence:
    """A divergence, nats: mean, percentiles, maximum and its place in the text; ``histogram`` has (low, high, tokens)."""

    mean: Estimate
    percentiles: dict[str, float]
    max: float
    max_at: int
    histogram: tuple[tuple[float, float, int], ...]


@dataclass(frozen=True)
class Change:
    """The change of the right token's probability from a to b: mean, root mean square, percentiles from 0 to 100 [1]."""

    mean: Estimate
    rms: Estimate
    percentiles: dict[str, float]


@dataclass(frozen=True)
class Bin:
    """Tokens with a position or confidence in ``low`` .. ``high``: mean KL(a||b), losses in nats, share of equal top tokens."""

    low: float
    high: float
    tokens: int
    kl: float
    loss_a: float
    loss_b: float
    same_top: float


@dataclass(frozen=True)
class CalibrationBin:
    """Tokens with a top probability in (``low``, ``high``]: its mean, and the share of correct top candidates."""

    low: float
    high: float
    tokens: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error [3]: the mean over tokens of |accuracy - confidence| of their bin, without empty bins."""

    ece: float
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True)
class Distributions:
    """The comparison of two models' distributions on one text.

    ``ratio`` is b's perplexity over a's, ``bits`` b's bits per byte minus a's, ``difference`` the mean log-probability under b
    minus that under a (ratio = exp(-difference)), all paired token by token. ``correlation`` is Pearson's, of the
    log-probabilities; NaN if one never varies. ``only_a`` is the probability that a gives to entries that b lacks, on average:
    KL(a||b) is infinite where it is above 0. ``undefined`` counts tokens with NaN figures, because a model returned NaN.
    """

    a: Language
    b: Language
    ratio: Estimate
    difference: Estimate
    bits: Estimate
    correlation: float
    kl_ab: Divergence
    kl_ba: Divergence
    js: Divergence
    same_top: Estimate
    overlap: Estimate
    top: int
    change: Change
    by_position: tuple[Bin, ...]
    by_confidence: tuple[Bin, ...]
    calibration_a: Calibration
    calibration_b: Calibration
    only_a: Estimate
    only_b: Estimate
    undefined: int
    tokens: int
    blocks: int
    block_tokens: float
    resamples: int
    seed: int

    def lacking(self, b: str = "B") -> list[tuple[str, str, float]]:
        """Who gives probability to tokens that the other lacks, as (one, other, share); ``b`` is the second model's letter."""
        shares = ("A", b, self.only_a.value), (b, "A", self.only_b.value)
        return [each for each in shares if each[2] > 0]


def summarise(tokens: Tokens, token_bytes: Tensor, *, seed: int = 0) -> Distributions:
    """Compute every statistic of a measured pair; ``token_bytes`` (V,) are byte lengths, ``seed`` is for the bootstrap."""
    bootstrap = Bootstrap(len(tokens), seed)
    lengths = token_bytes[tokens.targets]
    change = tokens.change
    squares = change.square()
    rms = bootstrap.interval(squares.mean().sqrt().item(), bootstrap.means(squares).sqrt())
    gained = gain(tokens.logp_a, tokens.logp_b)
    bits = -gained / math.log(2)
    per_byte = bootstrap.interval((bits.sum() / lengths.sum()).item(), bootstrap.means(bits, lengths))
    undefined = torch.stack((tokens.logp_a, tokens.logp_b, tokens.kl_ab, tokens.kl_ba, tokens.js)).isnan().any(0)
    edges = [0, *dict.fromkeys(round(tokens.windows.context ** (i / POSITION_BINS)) for i in range(POSITION_BINS + 1))]
    return Distributions(
        a=language(tokens.logp_a, lengths, tokens.windows, bootstrap),
        b=language(tokens.logp_b, lengths, tokens.windows, bootstrap),
        ratio=perplexity_ratio(tokens.logp_a, tokens.logp_b, bootstrap),
        difference=bootstrap.mean(gained),
        bits=per_byte,
        correlation=correlation(tokens.logp_a, tokens.logp_b),
        kl_ab=_divergence(tokens.kl_ab, tokens.index, bootstrap),
        kl_ba=_divergence(tokens.kl_ba, tokens.index, bootstrap),
        js=_divergence(tokens.js, tokens.index, bootstrap),
        same_top=bootstrap.fraction(tokens.same_top),
        overlap=bootstrap.mean(tokens.overlap),
        top=tokens.top_a.size(1),
        change=Change(bootstrap.mean(change), rms, _named_percentiles(change, CHANGE_PERCENTILES)),
        by_position=_bins(tokens, tokens.position, itertools.pairwise(edges), first=1),
        by_confidence=_bins(tokens, tokens.top_p_a[:, 0], _equal_bins(CONFIDENCE_BINS), first=0),
        calibration_a=calibration(tokens.top_p_a[:, 0], tokens.top_a[:, 0] == tokens.targets),
        calibration_b=calibration(tokens.top_p_b[:, 0], tokens.top_b[:, 0] == tokens.targets),
        only_a=bootstrap.mean(tokens.only_a),
        only_b=bootstrap.mean(tokens.only_b),
        undefined=int(undefined.sum()),
        tokens=len(tokens),
        blocks=bootstrap.blocks,
        block_tokens=len(tokens) / bootstrap.blocks,
        resamples=len(bootstrap.weights),
        seed=seed,
    )


def gain(logp_a: Tensor, logp_b: Tensor) -> Tensor:
    """Return b's log-probabilities minus a's of the same tokens (N,); -inf minus -inf is no change."""
    return torch.where(logp_a == logp_b, 0.0, logp_b - logp_a)


def perplexity_ratio(logp_a: Tensor, logp_b: Tensor, bootstrap: Bootstrap) -> Estimate:
    """Return b's perplexity over a's from the log-probabilities (N,) of the same tokens, paired token by token."""
    gained = gain(logp_a, logp_b)
    return bootstrap.interval(exp_or_inf(-gained.mean().item()), (-bootstrap.means(gained)).exp())


def language(logp: Tensor, lengths: Tensor, windows: Windows, bootstrap: Bootstrap) -> Language:
    """Return a model's score from log-probabilities (N,) of tokens of ``lengths`` bytes."""
    score = LanguageScore(-logp.sum().item() / len(logp), len(logp), round(lengths.sum().item()), windows.context, windows.step)
    perplexity = bootstrap.interval(score.perplexity, (-bootstrap.means(logp)).exp())
    return Language(score, perplexity, bootstrap.interval(score.bits_per_byte, bootstrap.means(-logp, lengths) / math.log(2)))


def correlation(x: Tensor, y: Tensor) -> float:
    """Return Pearson's correlation of two (N,): exactly 1 for a tensor with itself, NaN if one is constant."""
    if x.min() == x.max() or y.min() == y.max():
        return math.nan
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return (x * y).sum().item() / math.sqrt((x * x).sum().item() * (y * y).sum().item())


def _named_percentiles(values: Tensor, which: tuple[float, ...]) -> dict[str, float]:
    return dict(zip((f"{percent:g}" for percent in which), percentiles(values, which), strict=True))


def _divergence(values: Tensor, index: Tensor, bootstrap: Bootstrap) -> Divergence:
    worst = int(values.argmax())  # argmax counts NaN as the largest
    middle, largest = _named_percentiles(values, DIVERGENCE_PERCENTILES), (values[worst].item(), int(index[worst]))
    return Divergence(bootstrap.mean(values), middle, *largest, _histogram(values))


def _histogram(values: Tensor) -> tuple[tuple[float, float, int], ...]:
    """Count values in four bins per power of ten, from the smallest to the largest positive finite value."""
    exponents = values[values.isfinite() & (values > 0)].log10()
    if not len(exponents):
        return ()
    bins = (exponents * HISTOGRAM_STEPS).floor().long()
    first, last = int(bins.min()), int(bins.max())
    counts = torch.bincount(bins - first, minlength=last - first + 1).tolist()
    edges = [10 ** ((first + i) / HISTOGRAM_STEPS) for i in range(len(counts) + 1)]
    return tuple(zip(edges, edges[1:], counts, strict=False))


def _bins(tokens: Tokens, values: Tensor, intervals: Iterable[tuple[float, float]], first: int) -> tuple[Bin, ...]:
    """Summarise the tokens with a value in each (low, high], without empty bins; ``first`` is added to low, 1 for integers."""
    columns = (tokens.kl_ab, -tokens.logp_a, -tokens.logp_b, tokens.same_top)
    filled = ((low, high, inside) for low, high in intervals if (inside := (low < values) & (values <= high)).any())
    return tuple(
        Bin(low + first, high, int(inside.sum()), *(column[inside].double().mean().item() for column in columns))
        for low, high, inside in filled
    )


def _equal_bins(count: int) -> list[tuple[float, float]]:
    """Split (0, 1] into ``count`` intervals (low, high]."""
    return [(i / count, (i + 1) / count) for i in range(count)]


def calibration(confidence: Tensor, right: Tensor, bins: int = CALIBRATION_BINS) -> Calibration:
    """Compute calibration from top candidates' probabilities (N,) and correctness (N,), in bins of equal width [3]."""
    filled, error = [], 0.0
    for low, high in _equal_bins(bins):
        inside = (low < confidence) & (confidence <= high)
        if inside.any():
            mean, accuracy = confidence[inside].mean().item(), right[inside].double().mean().item()
            filled.append(CalibrationBin(low, high, int(inside.sum()), mean, accuracy))
            error += abs(accuracy - mean) * filled[-1].tokens / len(confidence)
    return Calibration(math.nan if confidence.isnan().any() else error, tuple(filled))
