"""The ports of tests/support/ports are correct: filled by their own authors, they compute our GPT-2."""

import pytest
import torch
from support import hf_layouts
from support.ports import CONFIGS, PORTS, Port, logits
from torch import Tensor, nn

from gpt2 import GPT2
from gpt2.config import GPT2Config


def filled(port: Port, config: GPT2Config) -> tuple[nn.Module, dict[str, Tensor]]:
    """The port in float64, filled by its author, and its weights: zeros where the port has no place."""
    lacking = {family.format(layer) for family in port.lacks for layer in range(config.n_layer)}
    state = {name: w * (name not in lacking) for name, w in hf_layouts.weights(config, dtype=torch.float64).items()}
    module = port.build(config).double()
    port.fill(module, state)
    return module, state


@pytest.mark.parametrize("sizes", ["apart", "alike", pytest.param("tiny", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PORTS)
@torch.no_grad()
def test_filled_by_its_author_a_port_computes_gpt2(name, sizes):
    """A mistake in a port would look like a mistake of `load_into`, or hide one."""
    port, config = PORTS[name], CONFIGS[sizes]
    module, state = filled(port, config)
    ids = port.some_ids(config, batch=3)
    tokens = ids.size(1)
    model = GPT2(config, initialise=False).double().eval()
    model.load_state_dict(state)
    expected = model(ids)
    for length in (tokens,) if port.whole_windows else (tokens, 1, tokens // 2):
        found = logits(module, ids[:, :length], config.vocab_size)
        assert found.shape == (3, length, config.vocab_size)
        assert (found - expected[:, :length]).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("name", PORTS)
@torch.no_grad()
def test_every_weight_matters_but_the_bias_of_the_keys(name):
    """Control of the test above: a weight without effect on the logits could have any value.

    Only the bias of the keys has no effect: it adds the same q b to all scores of a query, and softmax removes that.
    """
    port, config = PORTS[name], hf_layouts.TINY
    module, _ = filled(port, config)
    ids = port.some_ids(config, batch=1)[:, : None if port.whole_windows else 6]
    right, unseen = logits(module, ids, config.vocab_size), 0
    weights = port.weights(module).values()
    for weight in weights:
        kept = weight.clone()
        weight.add_(torch.rand(weight.shape, dtype=weight.dtype, generator=torch.Generator().manual_seed(2)))
        error = (logits(module, ids, config.vocab_size) - right).abs().max()
        unseen += weight.numel() * bool(error <= 1e-10 * right.abs().max())
        weight.copy_(kept)
    assert sum(weight.numel() for weight in weights) > 10 * unseen
    assert unseen in (0, config.n_layer * config.n_embd)
