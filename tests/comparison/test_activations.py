"""Activations of two models compared block by block: the figures, the first difference, and the memory used."""

import math
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from support.hf_layouts import TINY
from support.random_models import random_model
from torch import Tensor, nn

from gpt2.comparison.tensors import Blocks, compare_activations
from gpt2.config import GPT2Config
from gpt2.measure.tracing import points, trace, trace_blocks
from gpt2.model import GPT2


def model(seed: int = 0, config: GPT2Config = TINY) -> GPT2:
    return random_model(config, seed=seed)


def traced(model: nn.Module) -> Blocks:
    return partial(trace_blocks, model)


IDS = torch.randint(TINY.vocab_size, (1, 11), generator=torch.Generator().manual_seed(0))


def test_figures_by_their_definitions() -> None:
    """Possible bugs: a norm of the wrong tensor, a wrong sign of the decibels, b in place of a."""
    a, b = model(1), model(2)
    found = {point.point: point for point in compare_activations(traced(a), traced(b), IDS, 1e-3).points}
    assert list(found) == points(TINY.n_layer)
    x, y = trace(a, IDS), trace(b, IDS)
    for name in ("wte", "h.0.attn.q", "h.1.attn.weights", "h.1", "logits"):
        difference = (y[name] - x[name]).norm() / x[name].norm()
        assert found[name].error == pytest.approx(float(difference), rel=1e-12)
        ratio = float(x[name].square().sum() / (y[name] - x[name]).square().sum())
        assert found[name].sqnr == pytest.approx(10 * math.log10(ratio))
        assert found[name].max_abs == pytest.approx(float((y[name] - x[name]).abs().max()))
        cosine = torch.nn.functional.cosine_similarity(x[name].flatten(), y[name].flatten(), dim=0)
        assert found[name].cosine == pytest.approx(float(cosine), rel=1e-9)


NOISY = "wpe.weight", "h.0.ln_1.bias", "h.1.attn.c_attn.weight", "h.1.attn.c_proj.bias", "h.1.mlp.c_fc.weight", "ln_f.weight"


@pytest.mark.parametrize("parameter", NOISY)
def test_noise_is_located_where_it_was_put(parameter: str) -> None:
    """The report must name the first point past the threshold, in the order of computation."""
    b, point = model(), parameter.rpartition(".")[0].replace("c_attn", "q")
    with torch.no_grad():
        b.get_parameter(parameter).mul_(1.05)
    found = compare_activations(traced(model()), traced(b), IDS, 1e-3)
    assert found.first_past.point == point
    before = found.points[: points(TINY.n_layer).index(point)]
    assert all(p.error == 0 for p in before)
    assert compare_activations(traced(model()), traced(b), IDS, 1e9).first_past is None


def test_memory_is_one_block_of_each() -> None:
    """Compared points must be freed: all points of both models take gigabytes for gpt2-xl."""
    seen: list[weakref.ref] = []
    alive: list[int] = []

    def watched(model: GPT2, ids: Tensor) -> Iterator[dict[str, Tensor]]:
        for block in trace_blocks(model, ids):
            seen.extend(map(weakref.ref, block.values()))
            alive.append(sum(reference() is not None for reference in seen))
            yield block

    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=12, n_layer=6, n_head=3, bos_token_id=None, eos_token_id=None)
    compare_activations(partial(watched, model(0, config)), partial(watched, model(1, config)), IDS, 1e-3)
    assert len(seen) == 2 * len(points(6))
    assert max(alive) <= 2 * 14 * 2  # one block of each model, and the next one in progress
