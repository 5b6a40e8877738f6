"""List caches that the rows of a batch share: faults of attention by which a row reads another row's keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.simulation import Simulation, Stages, State
from gpt2.port.dump.variants import Variant, on_top


def row_variants(simulation: Simulation, lengths: Iterable[int]) -> Iterator[Variant]:
    """Yield caches in which the last row's keys and values stay; ``lengths``: of a prompt before single tokens."""
    whole = "all rows read the keys and values of the last row, as in a cache without a place for each row"
    every = Variant.of(whole, [Fault("batch-dependent", "attn", whole)], _all_of_last_row)
    yield replace(every, mixes_rows=True, all_tokens=True, shared=True)
    for size in lengths:
        words = f"from token {size} on, rows read the keys and values of the last row for all earlier tokens"
        variant = Variant.of(words, [Fault("batch-dependent", "attn", words)], partial(_earlier_of_last_row, size))
        yield replace(variant, mixes_rows=True, all_tokens=True, shared=True)


def _all_of_last_row(simulation: Simulation, layer: int) -> Stages:
    right = simulation.right(layer)
    return {name: on_top(_last, right[name]) for name in ("attn.k", "attn.v")}


def _earlier_of_last_row(size: int, simulation: Simulation, layer: int) -> Stages:
    def earlier(s: State) -> Tensor:
        query = torch.arange(s["attn.k"].shape[1])[:, None]
        return (query >= size) & (query.mT < query)

    def scores(s: State) -> Tensor:
        own, last = (simulation.scores(s | {"attn.k": keys}, layer) for keys in (s["attn.k"], _last(s["attn.k"])))
        return torch.where(earlier(s), last, own)

    def mixed(s: State) -> Tensor:
        weights, hidden = s["attn.weights"], earlier(s)  # perhaps of another number of heads
        own, last = (Layout.RIGHT.split(values, weights.shape[1]) for values in (s["attn.v"], _last(s["attn.v"])))
        return (weights * ~hidden) @ own + (weights * hidden) @ last

    return {"attn.scores": scores, "attn.mixed": mixed}


def _last(value: Tensor) -> Tensor:
    return value[-1:].expand_as(value)
