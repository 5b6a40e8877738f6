"""Sampling: candidates against transformers' filters, draws against exact probabilities."""

import itertools
import math
import re

import pytest
import torch
from support.commands import refusal

from gpt2.sampling import Sampling, accept_draft, penalise, restrict

INF = math.inf


def by_transformers(logits: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None, min_p: float = 0.0):
    """The logits (..., V) as transformers' own filters leave them, one after the other."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    filters = [TemperatureLogitsWarper(temperature), *([TopKLogitsWarper(top_k)] if top_k else [])]
    for each in (*filters, *([TopPLogitsWarper(top_p)] if top_p else []), MinPLogitsWarper(min_p)):
        logits = each(None, logits)
    return logits


@pytest.mark.parametrize("temperature", [0.3, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 99])
@pytest.mark.parametrize("top_p", [None, 1e-6, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_restrict_is_transformers(temperature: float, top_k: int | None, top_p: float | None, min_p: float) -> None:
    """Possible bugs: a nucleus that stops below p, k after p, probabilities before the temperature, a share of 1. Ties: below."""
    logits = torch.randn(20, 12, generator=torch.Generator().manual_seed(0)) * 3
    found, expected = (f(logits, temperature, top_k, top_p, min_p) for f in (restrict, by_transformers))
    assert torch.equal(found.isneginf(), expected.isneginf())
    torch.testing.assert_close(found.softmax(-1), expected.softmax(-1))
    assert torch.equal(found.argmax(-1), logits.argmax(-1))


def test_ties() -> None:
    """Equal logits at the edge: top-k keeps all of them, top-p only as many as needed, lowest ids first."""
    tied = torch.tensor([0.0, 3.0, 1.0, 3.0, 1.0, 1.0])
    kept = lambda *settings: (~restrict(tied, 1.0, *settings).isneginf()).nonzero().flatten().tolist()  # noqa: E731
    assert [kept(k) for k in (1, 2, 3)] == [[1, 3], [1, 3], [1, 2, 3, 4, 5]]
    flat = torch.zeros(8)  # an eighth each, exact in binary
    for count in range(1, 9):
        assert (~restrict(flat, top_p=count / 8).isneginf()).tolist() == [i < count for i in range(8)]
    wide = torch.zeros(50257)  # above the size up to which an unstable sort happens to be stable
    assert (~restrict(wide, top_p=0.5).isneginf()).nonzero().flatten().diff().unique().tolist() == [1]
    assert int((~restrict(wide, top_p=1e-9).isneginf()).nonzero()) == 0


def test_greedy_takes_the_lowest_of_equals() -> None:
    """The choice of argmax among equal logits depends on the vector width."""
    for size in (3, 64, 50257):
        logits = torch.zeros(2, size)
        logits[0, size // 2 :] = 1.0
        assert Sampling(0).next_ids(logits).tolist() == [size // 2, 0]


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_cold_is_greedy_and_hot_is_uniform(scale: float) -> None:
    """A quotient that overflows to inf gives a softmax of NaN, which `multinomial` refuses."""
    logits = torch.tensor([[-1.0, 0.5, 2.0, 1.999]]) * scale
    for cold in (1e-4, 1e-30, 1e-38, 1e-45, 5e-324):
        assert restrict(logits, cold).softmax(-1).tolist()[0] == pytest.approx([0, 0, 1, 0], abs=1e-4)
        assert Sampling(cold).next_ids(logits).tolist() == [2]
    for hot in (1e10, 1e30, 1e300):
        torch.testing.assert_close(restrict(logits, hot).softmax(-1), torch.full((1, 4), 0.25))


def test_forbidden_ids_stay_forbidden() -> None:
    """Ids with a logit of -inf must never be drawn, nor become NaN."""
    logits = torch.tensor([[-INF, 1.0, -INF, 0.5]]).expand(2000, 4)
    for settings in ({}, {"top_k": 3}, {"top_p": 0.99}, {"temperature": 0.1}):
        assert set(Sampling(**settings).next_ids(logits, torch.Generator().manual_seed(0)).tolist()) <= {1, 3}


def test_input_is_left_alone_and_any_dtype_is_read() -> None:
    """Masking in place would change the caller's logits; bfloat16 has too few digits for a cumulative sum."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    restrict(logits, 0.7, 5, 0.5)
    assert torch.equal(logits, before)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        low = logits.to(dtype)
        assert torch.equal(restrict(low, 0.7, 20, 0.9), restrict(low.float(), 0.7, 20, 0.9))


def test_draws_follow_the_distribution() -> None:
    """The candidates may be right and their weights wrong. Control: the same draws against the neighbour's distribution."""
    logits, settings = torch.tensor([[1.0, -0.5, 0.3, 2.0, 0.0, 0.7]]), {"temperature": 2.0, "top_k": 5, "top_p": 0.7}
    drawn = Sampling(**settings).next_ids(logits.expand(60000, 6), torch.Generator().manual_seed(5))
    assert (drawn.dtype, drawn.shape) == (torch.long, (60000,))

    def chi_square(probabilities: torch.Tensor) -> float:
        pairs = zip(drawn.bincount(minlength=6).tolist(), probabilities[0].tolist(), strict=True)
        return sum((count - 60000 * p) ** 2 / (60000 * p) if p else count for count, p in pairs)

    right, quantile = by_transformers(logits, **settings).softmax(-1), 13.816  # at 0.999, with two degrees of freedom
    assert (right > 0).sum() == 3
    assert chi_square(right) < quantile < chi_square(by_transformers(logits, **settings | {"temperature": 2.2}).softmax(-1))


BAD = [
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": INF}, "temperature is inf"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"top_k": 0}, "top_k is 0"),
    ({"top_k": -3}, "top_k is -3"),
    ({"top_p": 0.0}, "top_p is 0.0"),
    ({"top_p": 1.01}, "top_p is 1.01"),
    ({"top_p": math.nan}, "top_p is nan"),
]


@pytest.mark.parametrize(("settings", "message"), [*BAD, *(({"temperature": 0.0} | s, m) for s, m in BAD[3:])])
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    """A negative temperature samples the least likely; top-k 0 crashes inside torch; greedy must not hide an invalid value."""
    for refuses in (Sampling, lambda **s: restrict(torch.zeros(1, 4), **s)):
        assert re.search(message, refusal(refuses, **settings))


def test_what_has_no_distribution_is_refused() -> None:
    """Greedy decoding must not divide by 0. Invalid logits must give a clear error instead of a traceback from torch."""
    assert "temperature is 0" in refusal(restrict, torch.zeros(1, 4), 0)
    assert "not finite numbers" in refusal(Sampling().next_ids, torch.tensor([[0.0, math.nan, 0.0]]))


def test_accepted_and_resampled_ids_follow_the_models_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Possible bugs: ids accepted too often, the next one of a wrong distribution, none left where both are equal."""
    generator = torch.Generator().manual_seed(0)
    proposed, wanted = torch.rand(2, 2, 5, generator=generator).pow(3)
    wanted = torch.cat((wanted, torch.rand(1, 5, generator=generator)))
    proposed[1, 2], wanted[0, 4] = 0, 0
    proposed, wanted = (p / p.sum(-1, keepdim=True) for p in (proposed, wanted))
    found = torch.zeros(3, 5)  # of the first id, and of the second and third if the ids before were accepted
    with monkeypatch.context() as patch:
        patch.setattr(torch, "multinomial", lambda rest, count, **settings: rest / rest.sum())
        for pair in itertools.product(range(5), repeat=2):
            odds = torch.stack([wanted[n, i] / proposed[n, i] for n, i in enumerate(pair)]).clamp(0, 1).nan_to_num()
            for accepts in itertools.product((True, False), repeat=2):
                chosen = torch.tensor(accepts)
                weight = torch.where(chosen, odds, 1 - odds).prod() * proposed[0, pair[0]] * proposed[1, pair[1]]
                drawn = odds * torch.where(chosen, 0.999, 1.001)
                patch.setattr(torch, "rand", lambda *_, drawn=drawn, **settings: drawn)
                if weight > 0:
                    accepted, last = accept_draft(torch.tensor(pair), proposed, wanted)
                    for n in range(accepted):
                        found[n, pair[n]] += weight
                    found[accepted] += weight * last
    torch.testing.assert_close(found / found.sum(-1, keepdim=True), wanted, rtol=0, atol=1e-6)
    same = torch.tensor([[0.5, 0.5], [0.5, 0.5 - 1e-8]])
    assert accept_draft(torch.tensor([0]), same[:1] * (1 + 1e-6), same, generator)[0] in (0, 1)
    sure = torch.tensor([[0.0, 1.0, 0.0]]).expand(3, 3)
    assert accept_draft(torch.tensor([1, 1]), sure[:2], sure, generator) == (2, torch.tensor([1]))
    assert accept_draft(torch.tensor([2, 1]), torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]), sure) == (0, torch.tensor([1]))


@pytest.mark.parametrize("penalty", [0.5, 1.2])
def test_the_repetition_penalty_is_transformers(penalty: float) -> None:
    """Dividing a negative logit would make its id likelier."""
    from transformers import RepetitionPenaltyLogitsProcessor

    pick = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(3, 40, generator=pick) * 5, torch.randint(40, (3, 9), generator=pick)
    seen = torch.zeros(3, 40, dtype=torch.bool).scatter(1, ids, True)
    assert torch.equal(penalise(logits, seen, penalty), RepetitionPenaltyLogitsProcessor(penalty)(ids, logits))
    assert torch.equal(penalise(logits, seen, 1.0), logits)
