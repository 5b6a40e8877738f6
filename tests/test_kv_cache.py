"""The key-value cache: the logits do not depend on how a text is split into passes."""

import pytest
import torch
from support.oracle import assert_same
from support.random_models import random_model
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.kv_cache import KVCache
from gpt2.model import GPT2, AttentionFunction, eager_attention, eager_attention_upcast, sdpa_attention

CONFIG = GPT2Config(vocab_size=29, n_positions=11, n_embd=12, n_layer=3, n_head=3, bos_token_id=None, eos_token_id=None)


SPLITS = [[11], [1] * 11, [10, 1], [1, 10], [5, 6], [8, 3], [3, 5, 3], [2, 2, 7], [7, 1, 3], [1, 9, 1]]
SPLITS += [[4, 1, 1, 5], [6, 2, 2, 1], [3, 3, 3, 2], [1, 1, 4, 5], [2, 3, 1, 4, 1], [1, 2, 1, 2, 1, 4]]


def read_in_parts(model: GPT2, ids: Tensor, sizes: list[int], cache: KVCache, mask: Tensor | None = None) -> Tensor:
    parts, done = [], 0
    for size in sizes:
        seen = None if mask is None else mask[:, : done + size]
        parts.append(model(ids[:, done : done + size], attention_mask=seen, cache=cache))
        done += size
    return torch.cat(parts, dim=1)


def poisoned(model: GPT2, batch: int, capacity: int | None = None) -> KVCache:
    """A cache with NaN in new memory: an entry that is read before it is written becomes visible."""
    cache = model.new_cache(batch, capacity)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("attend", [sdpa_attention, eager_attention, eager_attention_upcast])
@pytest.mark.parametrize("padded", [False, True])
def test_any_split_computes_what_one_pass_does(attend: AttentionFunction, padded: bool) -> None:
    """Possible bugs: positions that restart at 0, a chunk masked as the first one, layers written at different offsets."""
    model, generator = random_model(CONFIG).use_attention(attend), torch.Generator().manual_seed(1)
    ids = torch.randint(CONFIG.vocab_size, (3, 11), generator=generator)
    mask = torch.tensor([[0] * n + [1] * (11 - n) for n in (0, 4, 9)]) if padded else None
    with torch.no_grad():
        expected = model(ids, attention_mask=mask)
        real = torch.ones(3, 11, dtype=torch.bool) if mask is None else mask.bool()
        for sizes in SPLITS:
            cache = poisoned(model, 3)
            found = read_in_parts(model, ids, sizes, cache, mask)
            assert cache.length == 11
            assert_same(found[real], expected[real])


def test_reset_forgets_and_keeps_the_memory() -> None:
    """A second text must not see the first; the cache must not be allocated again for every text."""
    model = random_model(CONFIG)
    first, second = torch.arange(7)[None], torch.arange(9, 14)[None]
    with torch.no_grad():
        cache = model.new_cache()
        where = cache.keys.data_ptr()
        model(first, cache=cache)
        cache.reset()
        assert cache.length == 0
        assert_same(read_in_parts(model, second, [2, 3], cache), model(second))
        assert cache.keys.data_ptr() == where


def test_overflow_is_refused_and_harmless() -> None:
    """Without the check, the slice assignment gives an error about shapes; after the error the cache is unchanged."""
    model, ids = random_model(CONFIG), torch.arange(5)[None]
    with torch.no_grad():
        cache = model.new_cache(capacity=4)
        model(ids[:, :3], cache=cache)
        with pytest.raises(ValueError, match="holds 4 tokens; 5 were asked"):
            model(ids[:, 3:], cache=cache)
        assert cache.length == 3
        assert_same(model(ids[:, 3:4], cache=cache), model(ids[:, :4])[:, 3:])
        full = model.new_cache(capacity=100)
        model(torch.zeros(1, 11, dtype=torch.long), cache=full)
        with pytest.raises(ValueError, match="12 tokens do not fit the model's 11 positions"):
            model(ids[:, :1], cache=full)
        with pytest.raises(ValueError, match=r"ids are \(5,\); give rows of them"):  # was an IndexError of torch's
            model(torch.arange(5))


def test_capacity_dtype_and_shape() -> None:
    """Possible bugs: a capacity of 0 treated as "not given"; a float32 cache for a bfloat16 model."""
    assert KVCache(CONFIG, 1).capacity == CONFIG.n_positions
    assert KVCache(CONFIG, 1, 0).keys.shape == (3, 1, 3, 0, 4)
    cache = GPT2(CONFIG).to(torch.bfloat16).new_cache(2, 6)
    assert cache.keys.shape == cache.values.shape == (3, 2, 3, 6, 4)
    assert cache.keys.dtype == cache.values.dtype == torch.bfloat16
