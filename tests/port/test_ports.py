"""The ports of tests/ports are right: filled by their own authors, they compute what our GPT-2 computes."""

import pytest
import torch
from support import hf_layouts
from support.ports import PORTS, Port, logits
from support.ports.sizes import CONFIGS, some_ids
from torch import Tensor, nn

from gpt2 import GPT2
from gpt2.config import GPT2Config


def without(state: dict[str, Tensor], port: Port, config: GPT2Config) -> dict[str, Tensor]:
    """The state with zeros for what the port has no place for."""
    lacking = {family.format(layer) for family in port.lacks for layer in range(config.n_layer)}
    return {name: tensor * 0 if name in lacking else tensor for name, tensor in state.items()}


def ours(config: GPT2Config, state: dict[str, Tensor]) -> GPT2:
    model = GPT2(config, initialise=False).double().eval()
    model.load_state_dict(state)
    return model


def filled(port: Port, config: GPT2Config) -> tuple[nn.Module, dict[str, Tensor]]:
    """The port in float64, filled by its author, and with what."""
    state = without(hf_layouts.weights(config, dtype=torch.float64), port, config)
    module = port.build(config).double()
    port.fill(module, state)
    return module, state


@pytest.mark.parametrize("sizes", CONFIGS)
@pytest.mark.parametrize("name", PORTS)
@torch.no_grad()
def test_filled_by_its_author_a_port_computes_gpt2(name, sizes):
    """A port with a fault of its own would let `load_into` be blamed, or let a wrong mapping pass for the port's fault."""
    port, config = PORTS[name], CONFIGS[sizes]
    module, state = filled(port, config)
    ids = some_ids(port, config, batch=3)
    tokens = ids.size(1)
    expected = ours(config, state)(ids)
    for length in (tokens,) if port.whole_windows else (tokens, 1, tokens // 2):
        found = logits(module, ids[:, :length], config.vocab_size)
        assert found.shape == (3, length, config.vocab_size)
        assert (found - expected[:, :length]).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("name", PORTS)
@torch.no_grad()
def test_every_weight_matters_but_the_bias_of_the_keys(name):
    """The control of the test above: a weight that the logits do not see could be filled with anything.

    The keys' bias alone is such: it adds the same q b to all of a query's scores, and the softmax takes that away again.
    """
    port, config = PORTS[name], hf_layouts.TINY
    module, _ = filled(port, config)
    ids = some_ids(port, config, batch=1)[:, : None if port.whole_windows else 6]
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


@pytest.mark.parametrize("name", PORTS)
def test_what_the_registry_says_is_so(name):
    """A port that lacks something and does not say so would be expected to load, or to be explained, wrongly."""
    port = PORTS[name]
    assert port.description
    if port.lacks or port.room < 1:
        assert port.note
