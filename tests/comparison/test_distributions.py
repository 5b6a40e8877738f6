"""Every statistic against NumPy, a loop over Python floats or decimals, or a closed form."""

import itertools
import json
import math
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from decimal import Decimal, localcontext
from statistics import NormalDist, stdev

import numpy as np
import pytest
import torch
from support.random_models import uneven_model
from torch import Tensor

from gpt2.comparison.distributions import Bootstrap, summarise
from gpt2.measure import per_token
from gpt2.measure.metrics import language_scores
from gpt2.measure.per_token import Tokens, measure_pair
from gpt2.measure.windows import Windows

NAN, INF = math.nan, math.inf


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def text(vocab: int, length: int, seed: int = 9) -> Tensor:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))


def bigram(table: Tensor):
    """A model that reads the last token only: row i of ``table`` (V, W) holds the logits after token i."""
    return lambda ids: table[ids]


def pair(a: Tensor, b: Tensor, ids: Tensor | None = None, windows: Windows | None = None, **how) -> Tokens:
    """The rows of two tables, each used once, in order: token i of the result is predicted by row i."""
    ids = torch.cat((torch.arange(len(a)), torch.zeros(1, dtype=torch.long))) if ids is None else ids
    return measure_pair(bigram(a), bigram(b), ids, windows or Windows(4), **how)


def divergences(tokens: Tokens) -> Tensor:
    return torch.stack((tokens.kl_ab, tokens.kl_ba, tokens.js))


def softmax(table: Tensor) -> np.ndarray:
    powers = np.exp((table.double() - table.double().amax(1, keepdim=True)).numpy())
    return powers / powers.sum(1, keepdims=True)


@np.errstate(divide="ignore", invalid="ignore")
def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.where(p > 0, p * np.log(p / q), 0).sum(1)


def check(got: Tokens, p: np.ndarray, q: np.ndarray, rtol: float) -> None:
    np.testing.assert_allclose(divergences(got)[:2], np.stack((kl(p, q), kl(q, p))), rtol=rtol)
    np.testing.assert_allclose(got.js, (kl(p, (p + q) / 2) + kl(q, (p + q) / 2)) / 2, rtol=100 * rtol)


def made(n: int, seed: int = 0, context: int = 64) -> Tokens:
    """Random token measurements: every column is random."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(2, n, 5, generator=generator, dtype=torch.float64).sort(2, descending=True).values / 5
    top = torch.stack([torch.randperm(7, generator=generator)[:5] for _ in range(2 * n)]).view(2, n, 5)
    logs = -torch.rand(2, n, generator=generator, dtype=torch.float64) * 6
    kl = torch.rand(3, n, generator=generator, dtype=torch.float64).square()
    only = torch.rand(2, n, generator=generator, dtype=torch.float64)
    targets = torch.randint(7, (n,), generator=generator)
    index = torch.arange(1, n + 1)
    return Tokens(targets, index, (index - 1) % context + 1, *logs, *kl, *top, *p, *only, windows=Windows(context))


OF_DTYPES = [(2, 1, "float64"), (3, 5, "float32"), (50, 3, "bfloat16"), (130, 30, "float16"), (1000, 1, "float64")]


@pytest.mark.parametrize(("vocab", "scale", "dtype"), [*OF_DTYPES, (50257, 5, "float32"), (50257, 5, "bfloat16")])
def test_divergences_equal_numpys(vocab, scale, dtype):
    """Possible bugs: a sum over the batch instead of the vocabulary, a mean for a sum, bits for nats, JS for its root."""
    a, b = (draw(7, vocab, seed=seed, scale=scale).to(getattr(torch, dtype)) for seed in (0, 1))
    ids = torch.tensor([0, 1, 0, 1, 1, 0, 1, 0]) if vocab < 7 else None
    got = pair(a, b, ids)
    rows = ids[:-1] if vocab < 7 else torch.arange(7)
    p, q = (softmax(table[rows]) for table in (a, b))
    check(got, p, q, 1e-12)
    right = np.log((p, q))[:, np.arange(len(rows)), got.targets.numpy()]
    np.testing.assert_allclose(np.stack((got.logp_a, got.logp_b)), right, rtol=1e-12)
    np.testing.assert_allclose(got.top_p_a, np.sort(p)[:, : -min(vocab, 5) - 1 : -1], rtol=1e-12)
    assert divergences(got).dtype == got.logp_a.dtype == torch.float64


def exact(a: list[float], b: list[float]) -> tuple[Decimal, Decimal, Decimal]:
    """KL both ways and JS of two rows of logits, to 60 digits."""
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = 60, -(10**9), 10**9
        p, q = ([Decimal(x).exp() for x in row] for row in (a, b))
        p, q = [x / sum(p) for x in p], [y / sum(q) for y in q]
        kl_ab = sum(x * (x / y).ln() for x, y in zip(p, q, strict=True))
        kl_ba = sum(y * (y / x).ln() for x, y in zip(p, q, strict=True))
        js = sum(x * (2 * x / (x + y)).ln() + y * (2 * y / (x + y)).ln() for x, y in zip(p, q, strict=True)) / 2
        return +kl_ab, +kl_ba, +js


def near(noise: float) -> tuple[Tensor, Tensor, None]:
    a = draw(6, 40, scale=4).double() - 90  # the size of GPT-2's logits
    return a, a + draw(6, 40, seed=1).double() * noise, None


def wide() -> tuple[Tensor, Tensor, Tensor]:
    """Some of exp(x - 760) are 0, some subnormal."""
    values = torch.tensor([-1e4, -800.0, -700.0, -600.0, 0.0, 1.0, 25.0, 40.0, 500.0, 760.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([values[torch.randperm(10, generator=generator)] for _ in range(40)])
    rows[20, 3:] = rows[0, 3:]
    return rows[:10], rows[20:30], torch.randint(10, (60,), generator=generator)


def steep(span: float) -> tuple[Tensor, Tensor, Tensor]:
    return torch.tensor([[0.0, -span], [-span, 1.0]]), torch.tensor([[-1.0, 0.0], [-span, 1.0 - span]]), torch.tensor([0, 1, 0])


@pytest.mark.parametrize(
    ("made", "rel"),
    [
        # Two dtypes of one model differ by 1e-6 nats, two orders of summation by 1e-13. The difference of two cross-entropies,
        # or a float32 softmax, has rounding noise of that size, and below it may be negative.
        *((lambda noise=noise: near(noise), 1e-15) for noise in (1e-9, 1e-6, 1e-5, 1e-3, 1e-1, 3.0)),
        # exp(-800) is 0 in float64, yet its KL is 800 nats times the probability in the second model; e^800 is infinite.
        (wide, 1e-12),
        # exp(-720) is subnormal: it is not 0, but 1 over it is infinite, and JS becomes minus infinity.
        *((lambda span=span: steep(span), 1e-12) for span in (600.0, 708.0, 720.0, 740.0, 744.0, 746.0)),
    ],
)
def test_divergences_have_their_digits(made, rel):
    """Each beside sixty digits, and none below zero."""
    a, b, ids = made()
    got = divergences(pair(a, b, ids))
    assert (got >= 0).all()
    for value, last in zip(got.T.tolist(), range(len(a)) if ids is None else ids[:-1].tolist(), strict=True):
        for number, right in zip(value, exact(a[last].tolist(), b[last].tolist()), strict=True):
            assert abs(Decimal(number) - right) < Decimal("1e-15") + Decimal(rel) * right


def test_small_divergences_over_large_vocabularies_have_their_digits():
    """The logs of two sums of 50,257 exponentials are 10.8 each, so their plain difference has a rounding error of that size."""
    shifts, (a, b) = (1e-6, -2e-6, 3e-6, 1e-5), torch.zeros(2, 4, 50257).double()
    b[:, :25000] = torch.tensor(shifts)[:, None]
    for got, shift in zip(divergences(pair(a, b)).T.tolist(), map(Decimal, b[:, 0].tolist()), strict=True):
        with localcontext() as context:
            context.prec, part = 60, Decimal(25000) / 50257
            log = (1 + part * (shift.exp() - 1)).ln()
            kl_ab, kl_ba = log - part * shift, part * (shift - log).exp() * shift - log
        assert got[:2] == pytest.approx([float(kl_ab), float(kl_ba)], abs=5e-16)
        assert got[2] == pytest.approx(float(kl_ab + kl_ba) / 8, rel=1e-3, abs=2e-16)


def test_logits_of_minus_infinity():
    """0 log 0 is 0, and p log(p / 0) is infinite: neither is NaN, and JS is at most log 2."""
    a = torch.tensor([[0.0, 1.0, -INF, 2.0], [-INF, -INF, 0.0, 0.0], [1.0, 2.0, 3.0, -INF], [1.0, 2.0, 3.0, -INF]])
    b = torch.tensor([[1.0, 1.0, -INF, 0.0], [0.0, 0.0, -INF, -INF], [1.0, 2.0, 2.0, 5.0], [1.0, 2.0, 3.0, 1.0]])
    ids = torch.tensor([0, 1, 2, 3, 0])
    got = pair(a, b, ids)
    p, q = (softmax(table) for table in (a, b))
    check(got, p, q, 1e-14)
    assert got.kl_ab.isinf().tolist() == [False, True, False, False]
    assert got.kl_ba.isinf().tolist() == [False, True, True, True]
    assert got.js[1].item() == pytest.approx(math.log(2), rel=1e-15)
    assert (got.logp_a[1].item(), got.logp_b[1].item()) == (pytest.approx(-math.log(2)), -INF)  # token 2 after token 1
    alone = pair(a, b, torch.tensor([0, 1]))
    assert alone.js[0] == got.js[0]  # tokens of the same chunk


def test_nan_stays_with_its_token():
    """A NaN must appear at its own token only: a NaN that disappears makes a broken model look close."""
    a, b = draw(5, 70), draw(5, 70, seed=1)
    clean = divergences(pair(a, b))
    a[1, 69], b[3, 0], a[4, :] = NAN, INF, -INF
    got = pair(a, b)
    assert torch.equal(divergences(got)[:, [0, 2]], clean[:, [0, 2]])
    assert divergences(got)[:, [1, 3, 4]].isnan().all()
    found = summarise(got, torch.ones(70))
    assert math.isnan(found.kl_ab.mean.value)
    assert math.isnan(found.kl_ab.percentiles["50"])
    assert math.isnan(found.a.score.perplexity)
    assert math.isnan(found.ratio.value)
    json.dumps(asdict(found))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5, 64, 200, 50257])
def test_a_model_against_itself_is_exactly_zero(vocab, dtype):
    """A model compared with itself differs by exactly 0: both sides take the same path."""
    table = draw(5, vocab, scale=9).to(dtype)
    table[2] *= 100
    table[3, ::3] = -INF
    table[4, 1] = -5e4
    ids = torch.tensor([0, 1, 2, 3, 4, 1])
    got = pair(table, table.clone(), ids)
    assert divergences(got).tolist() == [[0.0] * 5] * 3
    assert torch.equal(got.logp_a, got.logp_b)
    assert torch.equal(got.top_a, got.top_b)
    assert torch.equal(got.top_p_a, got.top_p_b)
    found = summarise(got, torch.ones(vocab))
    zero, one = {"value": 0.0, "low": 0.0, "high": 0.0}, {"value": 1.0, "low": 1.0, "high": 1.0}
    for figure in (found.kl_ab.mean, found.kl_ba.mean, found.js.mean, found.difference, found.change.mean, found.change.rms):
        assert asdict(figure) == zero
    assert asdict(found.ratio) == one
    assert found.same_top.value == 1.0
    # Control: shifted logits are the same distribution, but not the same bits.
    assert divergences(pair(table[:2], table[:2] + 1, torch.tensor([0, 1, 0]))).max() < (1e-15 if dtype == torch.float64 else 1)


def test_how_rows_are_cut_and_shared_changes_nothing(monkeypatch):
    """Possible bugs: the shorter last chunk reuses memory of earlier chunks; a thread writes its rows to a wrong place."""
    a, b = draw(50, 100), draw(50, 100, seed=1)
    a[7, 3], b[8, 4] = -INF, NAN
    ids, threads = text(50, 70), torch.get_num_threads()
    whole = pair(a, b, ids, windows=Windows(30))
    assert divergences(whole).isnan().any()
    try:
        for cached, share, workers in ((1, 1 << 18, 1), (700, 1 << 18, 1), (700, 1, 3), (1 << 16, 300, 2), (1, 1, 8)):
            torch.set_num_threads(workers)
            monkeypatch.setattr(per_token, "CACHED", cached)
            monkeypatch.setattr(per_token, "SHARE", share)
            got = pair(a, b, ids, windows=Windows(30))
            torch.testing.assert_close(divergences(got), divergences(whole), rtol=1e-12, atol=1e-15, equal_nan=True)
            assert torch.equal(got.top_b, whole.top_b)
            torch.testing.assert_close(got.top_p_a, whole.top_p_a, rtol=1e-13, atol=0)
            torch.testing.assert_close(got.logp_b, whole.logp_b, rtol=1e-13, atol=0, equal_nan=True)
            assert torch.get_num_threads() == workers  # and for the following threads:
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(torch.get_num_threads).result() == workers
            assert divergences(pair(a[:7], a[:7], text(7, 30))).max() == 0
    finally:
        torch.set_num_threads(threads)


def likeliest(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


@pytest.mark.parametrize("k", [1, 2, 5, 9])
@pytest.mark.parametrize("vocab", [1, 3, 63, 64, 65, 128, 200, 1000])
def test_the_likeliest_tokens_and_the_lower_id_first_of_equals(vocab, k):
    """Ties must be broken in the same way for both models; otherwise equal models disagree."""
    table = torch.randint(4, (30, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    table[3], table[4, 5:], table[5, : vocab // 2] = 0, -INF, -INF
    table[6, 1:], table[7], table[8] = -INF, torch.arange(vocab), 0
    table[8, 0] = table[8, -2:-1] = 1  # equal logits; the later one is beside the largest
    table[8, -1] = 2
    ids, values = per_token.likeliest(table, min(k, vocab))
    assert ids.tolist() == [likeliest(row, k) for row in table.tolist()]
    assert torch.equal(values, table.double().gather(1, ids))


@pytest.mark.parametrize(("context", "stride"), [(8, None), (8, 3), (8, 1), (5, 4), (1, 1)])
@pytest.mark.parametrize("length", [2, 9, 10, 30])
def test_every_token_once_with_the_context_it_had(length, context, stride):
    """Possible bugs: logits one position off, a window's first tokens counted twice, a short tail with a full one's weight."""
    a, b, ids = uneven_model(13, seed=0), uneven_model(13, seed=1), text(13, length)
    found = {size: measure_pair(a, b, ids, Windows(context, stride), batch_size=size) for size in (3, None)}
    for i in range(length - 1):
        end = next(end for end in range(context, context + length, stride or context) if end > i)
        position = i + 1 - max(0, min(end, length - 1) - context)
        with torch.no_grad():
            p, q = (softmax(model(ids[None, i + 1 - position : i + 1])[0, -1:]) for model in (a, b))
        entropy, logp = kl(p, q)[0], math.log(p[0, ids[i + 1]])
        for got in found.values():
            assert (got.position[i], got.top_b[i, 0]) == (position, q.argmax())
            assert (got.kl_ab[i].item(), got.logp_a[i].item()) == pytest.approx((entropy, logp), rel=1e-9)
    for size, got in found.items():
        assert got.index.tolist() == list(range(1, length))
        assert torch.equal(got.targets, ids[1:])
        assert (got.windows.context, got.windows.step, len(got)) == (context, stride or context, length - 1)
        for model, own in ((a, got.logp_a), (b, got.logp_b)):  # the protocol is that of language_scores
            score = language_scores(model, ids, torch.full((13,), 2), Windows(context, stride), batch_size=size)[0]
            assert score.loss == pytest.approx(-own.mean().item(), rel=1e-12)
            assert (score.tokens, score.bytes, score.stride) == (length - 1, 2 * (length - 1), stride or context)


@pytest.mark.parametrize(("context", "stride"), [(8, 8), (8, 3)])
def test_tokens_that_a_protocol_leaves_out_are_left_out_of_everything(context, stride):
    """The guide's windows do not score their first token: its bytes must not count, and the other positions must not shift."""
    a, b, ids, lengths = uneven_model(13, seed=0), uneven_model(13, seed=1), text(13, 30), torch.arange(1, 14)
    windows = Windows(context, stride, guide=True)
    got = measure_pair(a, b, ids, windows)
    places = {place: window for window in windows.of(30) for place in range(window.first, window.end)}
    assert got.index.tolist() == [place + 1 for place in places]
    assert got.position.tolist() == [place + 1 - window.start for place, window in places.items()]
    assert torch.equal(got.targets, ids[got.index])
    assert (len(got) < 29) == (stride == 8)
    score = language_scores(a, ids, lengths, windows)[0]
    assert asdict(summarise(got, lengths).a.score) == pytest.approx(asdict(score), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("more", "high"), [(1, 0.0), (2, 9.0), (70, 2.0), (3, 600.0), (2, -INF)])
def test_entries_that_one_model_lacks_are_one_more_entry(more, high, dtype):
    """Added tokens were left out: a model that gives them 90 % of the probability was called unchanged."""
    a, b = draw(30, 20, scale=3).to(dtype), draw(30, 20 + more, seed=1, scale=3).to(dtype)
    b[:, 20:] += high
    ids = text(20, 31)
    p, q = (softmax(table[ids[:-1]]) for table in (a, b))
    p, q_beyond = np.concatenate((p, np.zeros((30, 1))), 1), q[:, 20:].sum(1)
    whole, q = q, np.concatenate((q[:, :20], q_beyond[:, None]), 1)
    for got, (x, y) in ((pair(a, b, ids), (p, q)), (pair(b, a, ids), (q, p))):
        check(got, x, y, 1e-11)
    assert got.kl_ab.isinf().all() == (high > -INF)
    np.testing.assert_allclose(got.only_a, q_beyond, rtol=1e-12)
    assert (got.only_b == 0).all()
    np.testing.assert_allclose(got.logp_a, np.log(whole[np.arange(30), ids[1:].numpy()]), rtol=1e-12)
    np.testing.assert_array_equal(got.top_a[:, 0], whole.argmax(1))
    found = summarise(got, torch.ones(20))
    assert found.only_a.value == pytest.approx(q_beyond.mean())
    assert found.same_top.value == (whole.argmax(1) == p.argmax(1)).mean()


def test_only_one_batch_of_logits_of_each_model_is_alive():
    """At 50,257 floats a token, keeping the previous batch wastes a gigabyte."""
    alive: list[weakref.ref] = []

    def model(ids: Tensor) -> Tensor:
        assert sum(reference() is not None for reference in alive) < 2  # the second model's logits of this batch may be alive
        assert all(reference() is None for reference in alive[:-1])
        logits = draw(*ids.shape, 20)
        alive.append(weakref.ref(logits))
        return logits

    measure_pair(model, model, text(20, 100), Windows(5), batch_size=2)
    assert len(alive) == 2 * 10
    alive.clear()
    language_scores(model, text(20, 100), torch.ones(20), Windows(5), batch_size=2)[0]
    assert len(alive) == 10


def test_every_figure_of_the_summary_against_numpy():
    tokens = made(1000)
    lengths = torch.randint(1, 9, (40,), generator=torch.Generator().manual_seed(5))
    got = summarise(tokens, lengths)
    logp_a, logp_b = tokens.logp_a.numpy(), tokens.logp_b.numpy()
    n_bytes = sum(lengths[target].item() for target in tokens.targets.tolist())
    for side, logp in ((got.a, logp_a), (got.b, logp_b)):
        assert side.score.loss == pytest.approx(-logp.mean(), rel=1e-13)
        assert (side.score.tokens, side.score.bytes, side.score.context, side.score.stride) == (1000, n_bytes, 64, 64)
        assert side.perplexity.value == side.score.perplexity == pytest.approx(np.exp(-logp.mean()), rel=1e-13)
        assert side.bits_per_byte.value == pytest.approx(-np.log2(np.e) * logp.sum() / n_bytes, rel=1e-13)
        assert side.bits_per_byte.low < side.bits_per_byte.value < side.bits_per_byte.high
    assert got.ratio.value == pytest.approx(got.b.score.perplexity / got.a.score.perplexity, rel=1e-13)
    assert got.difference.value == pytest.approx((logp_b - logp_a).mean(), rel=1e-12)
    more_bits = got.b.bits_per_byte.value - got.a.bits_per_byte.value
    assert got.bits.value == pytest.approx(more_bits, rel=1e-11)
    assert got.bits.low < got.bits.value < got.bits.high
    assert (got.ratio.low, got.ratio.high) == pytest.approx((math.exp(-got.difference.high), math.exp(-got.difference.low)))
    for divergence, values in ((got.kl_ab, tokens.kl_ab), (got.kl_ba, tokens.kl_ba), (got.js, tokens.js)):
        assert divergence.mean.value == pytest.approx(values.numpy().mean(), rel=1e-13)
        assert list(divergence.percentiles) == ["50", "90", "95", "99", "99.9"]
        expected = np.percentile(values.numpy(), [50, 90, 95, 99, 99.9])
        np.testing.assert_allclose(list(divergence.percentiles.values()), expected, rtol=1e-13)
        assert (divergence.max, divergence.max_at) == (values.max().item(), values.numpy().argmax() + 1)
    change = np.exp(logp_b) - np.exp(logp_a)
    assert got.change.mean.value == pytest.approx(change.mean(), rel=1e-12)
    assert got.change.rms.value == pytest.approx(np.sqrt((change**2).mean()), rel=1e-12)
    rows = list(zip(tokens.top_a.tolist(), tokens.top_b.tolist(), strict=True))
    assert got.same_top.value == pytest.approx(sum(x[0] == y[0] for x, y in rows) / 1000)
    few = summarise(made(3), lengths)  # Student's interval is as far below
    assert min(few.kl_ab.mean.low, few.change.rms.low, few.a.bits_per_byte.low, few.only_a.low, few.a.perplexity.low) >= 0
    later = summarise(replace(tokens, index=tokens.index + 100), lengths)
    assert (later.kl_ab.max_at, later.js.max_at) == (got.kl_ab.max_at + 100, got.js.max_at + 100)


@pytest.mark.parametrize("context", [1, 2, 7, 64, 1000])
def test_bins_hold_every_token_once(context):
    """Possible bugs: a token on an edge in two bins or in none; a NaN mean of an empty bin."""
    tokens = made(700, context=context)
    bins = summarise(tokens, torch.ones(40)).by_position
    assert (bins[0].low, bins[-1].high) == (1, context)
    assert len(bins) <= 17
    assert all(first.high + 1 == second.low for first, second in itertools.pairwise(bins))
    assert sum(part.tokens for part in bins) == 700
    for part in bins:
        inside = (part.low <= tokens.position) & (tokens.position <= part.high)
        columns = tokens.kl_ab, -tokens.logp_a, -tokens.logp_b, (tokens.top_a[:, 0] == tokens.top_b[:, 0]).double()
        means = [float(column[inside].mean()) for column in columns]
        assert (part.tokens, part.kl, part.loss_a, part.loss_b, part.same_top) == pytest.approx((int(inside.sum()), *means))


def test_infinite_figures_stay_infinite():
    """0 times inf is NaN: a resample without the infinite block must stay finite, one with it must be infinite."""
    a, b = draw(30, 30), draw(30, 30, seed=1)
    b[3, 5] = -INF  # a gives probability, b gives none
    ids = text(30, 640)
    ids[300], ids[301] = 3, 5
    got = summarise(pair(a, b, ids), torch.ones(30))
    assert (got.kl_ab.mean.value, got.kl_ab.mean.high, got.kl_ab.max) == (INF, INF, INF)
    assert math.isfinite(got.kl_ba.mean.high)
    assert math.isfinite(got.kl_ab.percentiles["50"])
    assert got.js.max < math.log(2)
    assert (got.b.score.perplexity, got.b.perplexity.high, got.ratio.value) == (INF, INF, INF)
    assert math.isfinite(got.b.perplexity.low)  # 64 % of resamples contain that block, so the 2.5 % quantile is finite
    assert math.isfinite(got.a.perplexity.high)
    assert got.difference.value == -INF


def autocorrelated(n: int, rho: float, generator: torch.Generator) -> Tensor:
    """A stationary series of unit variance; neighbours have correlation ``rho``."""
    noise = torch.randn(n, generator=generator, dtype=torch.float64) * math.sqrt(1 - rho * rho)
    noise[0] /= math.sqrt(1 - rho * rho)
    for step in (2**power for power in range(n.bit_length())):  # each is the sum of twice as many
        noise[step:] += rho**step * noise[:-step].clone()
    return noise


@pytest.mark.parametrize(("transform", "rho"), [("normal", 0.0), ("normal", 0.5), ("heavy", 0.5), ("fraction", 0.5)])
def test_intervals_hold_the_truth_as_often_as_they_say(rho, transform):
    """Resampling single tokens gives intervals of half the width, which are wrong every fifth time."""
    generator, held, naive = torch.Generator().manual_seed(3), 0, 0
    truth = {"normal": 0.0, "heavy": math.exp(0.5), "fraction": NormalDist().cdf(1.5)}[transform]
    for seed in range(200):
        x = autocorrelated(4096, rho, generator)
        values = {"normal": x, "heavy": x.exp(), "fraction": x < 1.5}[transform]
        bootstrap = Bootstrap(4096, seed, resamples=400)
        got = bootstrap.fraction(values) if transform == "fraction" else bootstrap.mean(values)
        held += got.low <= truth <= got.high
        naive += abs(values.double().mean().item() - truth) <= 1.96 * values.double().std().item() / 64
    assert 0.90 <= held / 200 <= 0.985
    if rho:
        assert naive / 200 < (0.92 if transform == "fraction" else 0.86)


@pytest.mark.parametrize(("documents", "t"), [(2, 12.7062047), (3, 4.3026527), (6, 2.5705818), (12, 2.2009852), (20, 2.0930241)])
def test_intervals_of_few_documents_are_students(documents, t):  # by the printed table, 95 %
    """Of two documents every other model was better or worse, by chance; of tokens in their place most were."""
    level = torch.randn(documents, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    groups = torch.arange(documents).repeat_interleave(240)
    draws = Bootstrap(len(groups), 0, 40_000, groups=groups)
    got, mean, error = draws.mean(level[groups]), level.mean().item(), t * stdev(level.tolist()) / math.sqrt(documents)
    assert (got.low, got.high) == pytest.approx((mean - error, mean + error), abs=0.04 * error)
    right = torch.arange(240).repeat(documents) < (120 + 60 * level).round()[groups]
    got, error = draws.fraction(right), stdev(right.view(-1, 240).double().mean(1).tolist()) / math.sqrt(documents)
    wilson = (got.value - got.low) / math.sqrt(got.low * (1 - got.low)) * math.sqrt(got.value * (1 - got.value))
    assert wilson == pytest.approx(t * error, rel=0.002)


def test_seeds_make_intervals_and_nothing_else():
    tokens = made(500)
    first, again, other = (summarise(tokens, torch.ones(40), Bootstrap(500, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first.kl_ab.mean != other.kl_ab.mean
    assert replace(first.kl_ab.mean, low=0, high=0) == replace(other.kl_ab.mean, low=0, high=0)


@pytest.mark.parametrize("hits", [0, 1, 60, 128])
def test_the_interval_of_a_fraction_is_wilsons(hits):
    """If all or no tokens agree, a bootstrap has no spread and shows certainty."""
    values = torch.zeros(128, dtype=torch.bool)
    values[torch.arange(hits) * 128 // max(1, hits)] = True  # evenly, so that blocks vary less than independent tokens
    got = Bootstrap(128).fraction(values)
    part, spread = hits / 128, NormalDist().inv_cdf(0.975) ** 2 / 128  # (part - end)² = spread × end (1 - end)
    low, high = sorted(np.roots([1 + spread, -2 * part - spread, part**2]))
    assert (got.value, got.low, got.high) == pytest.approx((part, low, high), abs=1e-12)


def test_bits_per_byte_is_resampled_with_the_bytes():
    """A block of long tokens has more bits and more bytes: only their quotient is the result."""
    ids = torch.cat((text(4, 500), text(4, 500) + 4))
    lengths = torch.tensor([1, 1, 1, 1, 5, 5, 5, 5])
    table = torch.full((8, 8), -30.0)
    table[:4, :4], table[4:, 4:] = 0, 0  # 2 bits a token
    got = summarise(pair(table, table, ids, Windows(10)), lengths).a
    assert got.bits_per_byte.low < 2 * 1000 / 3000 < got.bits_per_byte.high
    assert got.bits_per_byte.high < 2
