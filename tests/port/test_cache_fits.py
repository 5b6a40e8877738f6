"""What a cache holds in place of GPT-2's keys and values is read off attention's weights and results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpt2.port.fits.observed import Observed
from gpt2.port.fits.slots import Slots

PROMPT, SCALE = 4, 0.35  # tokens before the first step, and GPT-2's factor of the scores


def random(seed: int) -> Tensor:
    return torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V, K_BEFORE, V_BEFORE = map(random, range(5))  # by heads; the last two are those of the block before
Cache = tuple[Tensor, Tensor]


def right(row: int, token: int) -> Cache:
    return K[row, :, : token + 1].clone(), V[row, :, : token + 1].clone()


def empty(row: int, token: int) -> Cache:
    keys, values = right(row, token)
    keys[:, 0] = values[:, 0] = 0
    return keys, values


def block_before(row: int, token: int) -> Cache:
    keys, values = right(row, token)
    keys[:, :-1], values[:, :-1] = K_BEFORE[row, :, :token], V_BEFORE[row, :, :token]
    return keys, values


def attended(cache: Callable[[int, int], Cache], factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return weights (B, H, T, S) and results of steps with a cache, behind a right prompt."""
    weights, results = torch.zeros(2, 3, 9, 9, dtype=torch.float64), torch.zeros_like(V)
    for row in range(2):
        for token in range(9):
            keys, values = (right if token < PROMPT else cache)(row, token)
            scores = SCALE * torch.einsum("hk,hsk->hs", Q[row, :, token], keys)
            weights[row, :, token, : token + 1] = (scores * (factor if token >= PROMPT else 1.0)).softmax(-1)
            results[row, :, token] = torch.einsum("hs,hsk->hk", weights[row, :, token, : token + 1], values)
    return weights, results


def observed(value: Tensor, expected: Tensor, half: bool) -> Observed:
    value = value.half().double() if half else value
    return Observed(value, 2.0**-11 * value.abs() + 6e-8 if half else 1e-12 * value.abs(), 1e-6, expected, 0)


CACHES = {
    "all rows read the last one's": (lambda row, token: right(1, token), "batch-dependent", "in slot"),
    "the first slot is empty": (empty, "cache-inconsistent", "in slot 0"),
    "the block before": (block_before, "cache-inconsistent", "in slots 0, 1, 2, 3"),
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", CACHES)
def test_the_token_is_named_at_which_a_cache_goes_wrong(name: str, half: bool) -> None:
    """Without this, 9 of 13 faults of caches were undetermined."""
    cache, id, words = CACHES[name]
    weights = observed(attended(cache)[0], attended(right)[0], half)
    slots = Slots(Q, [K, K_BEFORE], [V, V_BEFORE], SCALE, lambda: None)
    found = next(slots.weights(weights, weights.wrong_rows()))
    assert [fault.id for fault in found.faults] == [id]
    assert f"right until token {PROMPT}, where the cache holds other keys than GPT-2's, {words}" in found.faults[0].detail


def test_other_weights_are_no_other_cache() -> None:
    """Control: with another factor of the scores in steps, no key differs."""
    weights = observed(attended(right, factor=1.5)[0], attended(right)[0], half=False)
    slots = Slots(Q, [K, K_BEFORE], [V, V_BEFORE], SCALE, lambda: None)
    assert not list(slots.weights(weights, weights.wrong_rows()))
