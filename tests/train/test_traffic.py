"""What a job's ranks send each other in a step, counted in a trace, against arithmetic."""

import contextlib

import numpy as np
import pytest
import torch
from support.ranks import job

from gpt2.config import GPT2Config
from gpt2.model import GPT2
from gpt2.optim import adamw
from gpt2.train import loop, parallel
from gpt2.train.cost import FLOAT
from gpt2.train.feed import Feed
from gpt2.train.loss import Scored
from gpt2.train.recipe import Recipe

CONFIG = GPT2Config(64, 16, 32, 3, 2, bos_token_id=None, eos_token_id=None)


def traffic(config: GPT2Config, ranks: int, parallel: str, parts: int = 1) -> float:
    """Return the bytes that each rank sends in a step, and receives, if all is done in rings; ``parts`` of a rank's batch.

    A ring of N moves (N - 1) / N of a tensor from each rank to gather or to sum it, twice that for both (Patarasuk and Yuan
    2009). DDP sums the float32 gradients and gathers the sums, once a step. FSDP gathers the weights for every part, those of
    blocks again for the backward pass, and sums the gradients once.
    """
    outside = (config.vocab_size + config.n_positions + 2) * config.n_embd  # embeddings and the last norm
    all_parameters = config.num_parameters()
    moved = 2 * all_parameters if parallel == "ddp" else parts * (2 * all_parameters - outside) + all_parameters
    return moved * FLOAT * (ranks - 1) / ranks


class Traced:
    """Run one step under torch's profiler; return the numbers of the collectives and the sizes of their tensors."""

    def __init__(self, how: str, parts: int, *, broken: bool = False) -> None:
        self.how, self.parts, self.broken = how, parts, broken

    def __call__(self, rank: int) -> list[tuple[str, int]]:
        if self.broken:
            parallel.synchronised = lambda wrapped, now: contextlib.nullcontext()
        recipe = Recipe(batch_size=4 * self.parts, grad_accum=2 * self.parts, context=16, parallel=self.how, device="cpu")
        with parallel.joined("cpu") as ranks:
            model = GPT2(CONFIG)
            parallel.broadcast(model, ranks)
            scored = parallel.wrap(Scored(model), recipe, ranks)
            optimizer, feed = adamw(model, recipe.optim), Feed(np.arange(2000) % 64, ranks)
            loop.optimizer_step(scored, optimizer, feed, recipe, 0, 1e-3)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as trace:
                loop.optimizer_step(scored, optimizer, feed, recipe, 1, 1e-3)
        events = [(event.name, event.input_shapes) for event in trace.events() if event.name.startswith("gloo:")]
        found = [(name.removeprefix("gloo:"), shapes[0][0]) for name, shapes in events]
        return [(name, size) for name, size in found if size > 100]  # without the losses and the gradients' norms


def sent(collectives: list[tuple[str, int]]) -> int:
    """The bytes that one of two ranks sends by rings. (gloo sums for FSDP's reduce-scatter by an all-reduce.)"""
    return sum(4 * size if name == "all_gather" else 4 * size // 2 for name, size in collectives)


@pytest.mark.slow
def test_ddp_exchanges_gradients_once_however_many_parts() -> None:
    """An all-reduce after every part of a batch sends the same gradients as often as there are parts."""
    found = job(2, Traced("ddp", 3))[0]
    assert [name for name, _ in found] == ["all_reduce"]
    assert 2 * sent(found) == traffic(CONFIG, 2, "ddp", 3) == 4 * CONFIG.num_parameters()
    assert [name for name, _ in job(2, Traced("ddp", 3, broken=True))[0]] == ["all_reduce"] * 3  # the control


@pytest.mark.slow
def test_fsdp_scatters_gradients_once_and_gathers_weights_for_every_part() -> None:
    """The plan would be wrong if a part did not gather, or if gradients were summed after every part."""
    found = job(2, Traced("fsdp", 2))[0]
    assert [name for name, _ in found].count("all_reduce") == CONFIG.n_layer + 1
    assert sent(found) == traffic(CONFIG, 2, "fsdp", 2)
