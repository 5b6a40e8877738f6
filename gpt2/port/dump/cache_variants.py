"""List caches whose entries are those of another row or token: rows that share a cache, entries that are one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpt2.port.diagnosis.hypotheses import IN_STEPS
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.simulation import Simulation, Stages, State
from gpt2.port.dump.variants import Variant

PARTS = {"kv": "keys and values", "k": "keys", "v": "values"}
ROWS = {"last": -1, "first": 0}
Places = Callable[[Tensor, Tensor], Tensor]  # from the numbers of queries (T, 1) and keys (T) to those that are wrong (T, T)


def cache_variants(simulation: Simulation, lengths: Iterable[int]) -> Iterator[Variant]:
    """Yield caches with wrong entries; ``lengths``: of a prompt, after which tokens come one by one."""
    rows = len(simulation.ids) > 1
    for which, number in ROWS.items() if rows else ():
        for part, what in PARTS.items():
            words = f"all rows read the {what} of the {which} row, as if the row's number were missing in an offset"
            yield _variant(words, "batch-dependent", part, lambda t, s: s <= t, partial(_of_row, number))
    for size in lengths:
        before = partial(_earlier, size)
        for part, what in PARTS.items():
            if rows:
                words = f"{IN_STEPS.format(size)}: rows read the {what} that the last row has left in the cache"
                yield _variant(words, "batch-dependent", part, before, partial(_of_row, -1))
            words = f"{IN_STEPS.format(size)}: all {what} since then are the newest token's, as views of one buffer"
            yield _variant(words, "cache-inconsistent", part, partial(_since, size), None)


def _variant(words: str, id: str, part: str, wrong: Places, other: Callable[[Tensor], Tensor] | None) -> Variant:
    variant = Variant.of(words, [Fault(id, "attn", words)], partial(_read, part, wrong, other))
    return replace(variant, mixes_rows=id == "batch-dependent", all_tokens=True, shared=True, rare=part != "kv")


def _of_row(number: int, value: Tensor) -> Tensor:
    return value[number].expand_as(value)


def _earlier(size: int, query: Tensor, key: Tensor) -> Tensor:
    return (query >= size) & (key < query)


def _since(size: int, query: Tensor, key: Tensor) -> Tensor:
    return (key >= size) & (key < query)


def _read(part: str, wrong: Places, other: Callable[[Tensor], Tensor] | None, simulation: Simulation, layer: int) -> Stages:
    """Return attention that reads ``other`` of the keys or values (B, T, D) at the places ``wrong``; None: the query's own."""

    def places(s: State) -> Tensor:
        token = torch.arange(s["attn.k"].shape[1])
        return wrong(token[:, None], token)

    def scores(s: State) -> Tensor:
        right = simulation.scores(s, layer)
        if other is None:
            read = right.diagonal(dim1=-2, dim2=-1)[..., None].expand_as(right)
        else:
            read = simulation.scores({"attn.q": s["attn.q"], "attn.k": other(s["attn.k"])}, layer)
        return torch.where(places(s), read, right)

    def mixed(s: State) -> Tensor:
        weights, hidden = s["attn.weights"], places(s)  # perhaps of another number of heads
        values = Layout.RIGHT.split(s["attn.v"], weights.shape[1])
        right, read = weights * ~hidden, weights * hidden
        if other is None:
            return right @ values + read.sum(-1, keepdim=True) * values
        return right @ values + read @ Layout.RIGHT.split(other(s["attn.v"]), weights.shape[1])

    stages = {"k": ("attn.scores", scores), "v": ("attn.mixed", mixed)}
    return dict(stages[name] for name in part)
