"""Statistics of two models' next-token distributions on one text: divergences, perplexities, calibration, with intervals.

``a`` is the reference: KL(a||b) is what is lost by using ``b`` instead of ``a``. In llama.cpp's ``--kl-divergence`` ``a`` is
called base and ``b`` Q.

Sources:
    [1] llama.cpp, tools/perplexity: KL against a base model with its percentiles, the change in probability of the right
        token, the share of equal top tokens. (There base logits are rounded to 16 bits and cut at 16 nats; here nothing is.)
    [2] Lin, "Divergence measures based on the Shannon entropy", 1991: the Jensen-Shannon divergence, at most log 2.
    [3] Guo et al., "On Calibration of Modern Neural Networks", 2017: expected calibration error over equal bins of confidence.
    [4] Efron, "Bootstrap Methods: Another Look at the Jackknife", 1979; Efron and Tibshirani, "An Introduction to the
        Bootstrap", 1993, chapters 13 (percentile intervals) and 8 (blocks, for what is not independent).
    [5] Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", 1927: the interval of a fraction.
    [6] Kish, "Survey Sampling", 1965: the design effect, by which correlated observations count for fewer independent ones.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.measure.metrics import LanguageScore
from gpt2.measure.per_token import Tokens
from gpt2.measure.windows import Windows

RESAMPLES = 2000
CONFIDENCE = 0.95
POSITION_BINS = 16
CONFIDENCE_BINS = 10
CALIBRATION_BINS = 15  # Guo et al. [3]
HISTOGRAM_STEPS = 4  # bins per power of ten
DIVERGENCE_PERCENTILES = (50, 90, 95, 99, 99.9)
CHANGE_PERCENTILES = (0, 0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval, by :class:`Bootstrap`."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Language:
    """How well one model predicts the text; ``score`` also holds context and stride."""

    score: LanguageScore
    perplexity: Estimate
    bits_per_byte: Estimate


@dataclass(frozen=True)
class Divergence:
    """A divergence over the tokens, nats: mean, percentiles by name, the largest and where in the text (an id's index).

    ``histogram`` has (low, high, tokens) of equal steps of the logarithm; tokens of divergence 0, infinite or NaN are in no bin.
    """

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
    """Tokens whose position or confidence is in ``low`` .. ``high``: mean KL(a||b) and losses in nats, share of equal tops."""

    low: float
    high: float
    tokens: int
    kl: float
    loss_a: float
    loss_b: float
    same_top: float


@dataclass(frozen=True)
class CalibrationBin:
    """Tokens whose likeliest candidate had a probability in (``low``, ``high``]: its mean, and how often it was right."""

    low: float
    high: float
    tokens: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error [3]: the mean over tokens of |accuracy - confidence| of their bin. Empty bins are left out."""

    ece: float
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True)
class Distributions:
    """Two models' distributions on one text, compared.

    ``ratio`` is b's perplexity over a's, ``difference`` the mean of log-probability under b less that under a (so that
    ratio = exp(-difference)), both paired token by token. ``correlation`` is Pearson's, of both log-probabilities; NaN where one
    of them never varies. ``undefined`` counts the tokens of which a figure is NaN because a model gave NaN.
    """

    a: Language
    b: Language
    ratio: Estimate
    difference: Estimate
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
    undefined: int
    tokens: int
    blocks: int
    block_tokens: float
    resamples: int
    seed: int


class Bootstrap:
    """Percentile intervals of means over ``n`` tokens in a row, by resampling blocks of them [4].

    Neighbouring tokens are similarly hard, so resampling single tokens would make intervals too narrow. The text is cut into
    blocks of consecutive tokens of equal length (to within one): 64 blocks, or one for every 1024 tokens if that is more (up to
    1024), or fewer in a text too short for blocks of 16. Blocks are drawn with replacement, the same ones for every figure of a
    pair.

    Measured coverage of a 95 % interval of a mean, on series whose neighbours correlate by 0.5: 93 to 94 % with 2048 or 16,384
    tokens; 88 to 89 % for values so skewed that 2 % of them make half the sum (log-normal, sigma 2); 91 % with 512 tokens (32
    blocks). With fewer than about 20 blocks the intervals are too narrow.
    """

    def __init__(self, n: int, seed: int = 0, resamples: int = RESAMPLES) -> None:
        self.n = n
        self.blocks = min(max(min(64, n // 16), n // 1024, 1), 1024)
        self.block = torch.arange(n) * self.blocks // n  # (N,) which block a token is in
        drawn = torch.randint(self.blocks, (resamples, self.blocks), generator=torch.Generator().manual_seed(seed))
        self.weights = torch.zeros(resamples, self.blocks, dtype=torch.float64)
        self.weights.scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))

    def means(self, values: Tensor, per: Tensor | None = None) -> Tensor:
        """(resamples,) of sum(values) / sum(per); ``per`` (default: ones) may be bytes."""
        per = torch.ones(self.n, dtype=torch.float64) if per is None else per.double()
        return self._sums(values) / self._sums(per)

    def _sums(self, values: Tensor) -> Tensor:
        sums = torch.zeros(self.blocks, dtype=torch.float64).index_add_(0, self.block, values.double())
        finite = sums.isfinite()
        infinite = torch.where(self.weights[:, ~finite] > 0, sums[~finite], 0).sum(1)  # only where drawn: 0 times inf is NaN
        return self.weights[:, finite] @ sums[finite] + infinite

    def interval(self, value: float, resampled: Tensor) -> Estimate:
        """``value`` with the percentiles 2.5 and 97.5 of its resampled values."""
        tail = 50 * (1 - CONFIDENCE)
        low, high = percentiles(resampled, (tail, 100 - tail))
        return Estimate(value, low, high)

    def mean(self, values: Tensor) -> Estimate:
        return self.interval(values.double().mean().item(), self.means(values))

    def fraction(self, hits: Tensor) -> Estimate:
        """A share of tokens with Wilson's interval [5], which also holds near 0 and 1, where a bootstrap has no spread.

        Wilson assumes independent tokens. Correlated tokens count for fewer, by the design effect [6]: the resampled variance
        over p (1 - p) / n, where that is above 1.
        """
        p, n = hits.double().mean().item(), float(self.n)
        if 0 < p < 1:
            n /= max(1.0, self.means(hits).var().item() / (p * (1 - p) / n))
        z = torch.special.ndtri(torch.tensor((1 + CONFIDENCE) / 2, dtype=torch.float64)).item()
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)
        return Estimate(p, 0.0 if p == 0 else low, 1.0 if p == 1 else high)


def percentiles(values: Tensor, which: tuple[float, ...]) -> list[float]:
    """Percentiles of (N,), interpolated linearly as in NumPy and llama.cpp; all NaN if one value is NaN."""
    ordered = values.double().sort().values
    if ordered[-1].isnan():
        return [math.nan] * len(which)
    interpolated = []
    for percent in which:
        place = percent / 100 * (len(ordered) - 1)
        low, high = ordered[math.floor(place)].item(), ordered[math.ceil(place)].item()
        interpolated.append(low if low == high else low + (high - low) * (place - math.floor(place)))
    return interpolated


def summarise(tokens: Tokens, token_bytes: Tensor, *, seed: int = 0) -> Distributions:
    """Compute every statistic of a measured pair; ``token_bytes`` (V,) are byte lengths of tokens, ``seed`` the bootstrap's."""
    bootstrap = Bootstrap(len(tokens), seed)
    lengths = token_bytes[tokens.targets]
    gained = torch.where(tokens.logp_a == tokens.logp_b, 0.0, tokens.logp_b - tokens.logp_a)  # -inf less -inf is no change
    difference = gained.mean().item()
    ratios = (-bootstrap.means(gained)).exp()
    change = tokens.change
    squares = change.square()
    logs = torch.stack((tokens.logp_a, tokens.logp_b))
    undefined = torch.stack((tokens.logp_a, tokens.logp_b, tokens.kl_ab, tokens.kl_ba, tokens.js)).isnan().any(0)
    edges = [0, *dict.fromkeys(round(tokens.windows.context ** (i / POSITION_BINS)) for i in range(POSITION_BINS + 1))]
    by_position = [
        _bin(tokens, (low < tokens.position) & (tokens.position <= high), low + 1, high)
        for low, high in itertools.pairwise(edges)
    ]
    confidence = tokens.top_p_a[:, 0]
    by_confidence = [
        _bin(tokens, (low < confidence) & (confidence <= high), low, high) for low, high in _equal_bins(CONFIDENCE_BINS)
    ]
    return Distributions(
        a=_language(tokens.logp_a, lengths, tokens.windows, bootstrap),
        b=_language(tokens.logp_b, lengths, tokens.windows, bootstrap),
        ratio=bootstrap.interval(exp_or_inf(-difference), ratios),
        difference=bootstrap.mean(gained),
        correlation=correlation(*logs),
        kl_ab=_divergence(tokens.kl_ab, tokens.index, bootstrap),
        kl_ba=_divergence(tokens.kl_ba, tokens.index, bootstrap),
        js=_divergence(tokens.js, tokens.index, bootstrap),
        same_top=bootstrap.fraction(tokens.same_top),
        overlap=bootstrap.mean(tokens.overlap),
        top=tokens.top_a.size(1),
        change=Change(
            bootstrap.mean(change),
            bootstrap.interval(squares.mean().sqrt().item(), bootstrap.means(squares).sqrt()),
            _named_percentiles(change, CHANGE_PERCENTILES),
        ),
        by_position=tuple(bin for bin in by_position if bin is not None),
        by_confidence=tuple(bin for bin in by_confidence if bin is not None),
        calibration_a=calibration(tokens.top_p_a[:, 0], tokens.top_a[:, 0] == tokens.targets),
        calibration_b=calibration(tokens.top_p_b[:, 0], tokens.top_b[:, 0] == tokens.targets),
        undefined=int(undefined.sum()),
        tokens=len(tokens),
        blocks=bootstrap.blocks,
        block_tokens=len(tokens) / bootstrap.blocks,
        resamples=len(bootstrap.weights),
        seed=seed,
    )


def _language(logp: Tensor, lengths: Tensor, windows: Windows, bootstrap: Bootstrap) -> Language:
    score = LanguageScore(-logp.sum().item() / len(logp), len(logp), int(lengths.sum()), windows.context, windows.step)
    return Language(
        score,
        bootstrap.interval(score.perplexity, (-bootstrap.means(logp)).exp()),
        bootstrap.interval(score.bits_per_byte, bootstrap.means(-logp, lengths) / math.log(2)),
    )


def exp_or_inf(x: float) -> float:
    """exp(x); infinite where a float cannot hold it."""
    return math.inf if x >= 700 else math.exp(x)  # NaN stays NaN


def correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's correlation of two (N,): exactly 1 for a tensor with itself, NaN if one is constant."""
    if x.min() == x.max() or y.min() == y.max():
        return math.nan
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    return (x * y).sum().item() / math.sqrt((x * x).sum().item() * (y * y).sum().item())


def _named_percentiles(values: Tensor, which: tuple[float, ...]) -> dict[str, float]:
    return dict(zip((f"{percent:g}" for percent in which), percentiles(values, which), strict=True))


def _divergence(values: Tensor, index: Tensor, bootstrap: Bootstrap) -> Divergence:
    worst = int(values.argmax())  # argmax counts NaN as the largest
    return Divergence(
        bootstrap.mean(values),
        _named_percentiles(values, DIVERGENCE_PERCENTILES),
        values[worst].item(),
        int(index[worst]),
        _histogram(values),
    )


def _histogram(values: Tensor) -> tuple[tuple[float, float, int], ...]:
    """Four bins per power of ten, from the smallest to the largest positive finite value."""
    exponents = values[values.isfinite() & (values > 0)].log10()
    if not len(exponents):
        return ()
    bins = (exponents * HISTOGRAM_STEPS).floor().long()
    first, last = int(bins.min()), int(bins.max())
    counts = torch.bincount(bins - first, minlength=last - first + 1).tolist()
    edges = [10 ** ((first + i) / HISTOGRAM_STEPS) for i in range(len(counts) + 1)]
    return tuple(zip(edges, edges[1:], counts, strict=False))


def _bin(tokens: Tokens, inside: Tensor, low: float, high: float) -> Bin | None:
    if not inside.any():
        return None
    means = [column[inside].double().mean().item() for column in (tokens.kl_ab, -tokens.logp_a, -tokens.logp_b, tokens.same_top)]
    return Bin(low, high, int(inside.sum()), *means)


def _equal_bins(count: int) -> list[tuple[float, float]]:
    """Cut (0, 1] into ``count`` intervals (low, high]."""
    return [(i / count, (i + 1) / count) for i in range(count)]


def calibration(confidence: Tensor, right: Tensor, bins: int = CALIBRATION_BINS) -> Calibration:
    """Calibration from the top candidates' probabilities (N,) and whether they were right (N,), in bins of equal width [3]."""
    filled, error = [], 0.0
    for low, high in _equal_bins(bins):
        inside = (low < confidence) & (confidence <= high)
        if inside.any():
            mean, accuracy = confidence[inside].mean().item(), right[inside].double().mean().item()
            filled.append(CalibrationBin(low, high, int(inside.sum()), mean, accuracy))
            error += abs(accuracy - mean) * filled[-1].tokens / len(confidence)
    return Calibration(math.nan if confidence.isnan().any() else error, tuple(filled))
