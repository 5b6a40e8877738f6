"""`load_into` on every port of tests/support/ports: the weights equal the author's own loading, bit for bit; equal logits."""

import gc
from dataclasses import replace

import pytest
import torch
from support import hf_layouts
from support.checks import mostly_slow
from support.ports import CONFIGS, PORTS, logits

import gpt2
from gpt2.config import OFFICIAL_SIZES
from gpt2.port.mapping import load_into

BOUND = 1e-10
COMPLETE = [name for name, port in PORTS.items() if port.complete]
LACKING = [name for name, port in PORTS.items() if port.lacks]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint in the official layout for each of the sizes, written once."""
    folders = {}
    for sizes, config in CONFIGS.items():
        folders[sizes] = tmp_path_factory.mktemp(sizes)
        hf_layouts.official(folders[sizes], config)
    return folders


def relative_error(module, port, model):
    """Largest difference of a logit over the largest logit, at all positions that both take."""
    ids = port.some_ids(model.config, batch=2)
    expected = model(ids)
    return float((logits(module, ids, model.config.vocab_size) - expected).abs().max() / expected.abs().max())


def differing(port, module, by_hand):
    """Names of the weights that differ in any bit from the author's own loading."""
    weights, expected = port.weights(module), port.weights(by_hand)
    assert weights.keys() == expected.keys()
    if port.exact:
        return [name for name in weights if not torch.equal(weights[name], expected[name])]
    rounding = {name: 4 * torch.finfo(tensor.dtype).eps for name, tensor in weights.items()}
    return [name for name in weights if not torch.allclose(weights[name], expected[name], rounding[name], rounding[name])]


# Equal sizes are the hardest case. Different sizes, where shapes alone identify tensors, run with the slow tests.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *mostly_slow([(name, "alike") for name in COMPLETE], 5),
        *(pytest.param(n, "apart", marks=pytest.mark.slow) for n in COMPLETE[::2]),
    ],
)
@torch.no_grad()
def test_every_weight_lands_where_the_author_puts_it(name, sizes, checkpoints):
    """Logits do not show a wrong bias of the keys, and shapes do not show a wrong slice: only the bits do."""
    port, config = PORTS[name], CONFIGS[sizes]
    model = gpt2.load(str(checkpoints[sizes]), dtype="float64")
    module, by_hand = port.build(config).double(), port.build(config).double()
    report = load_into(module, str(checkpoints[sizes]))
    port.fill(by_hand, model.state_dict())
    assert differing(port, module, by_hand) == []
    assert relative_error(module, port, model) <= BOUND
    assert report.logits_error <= BOUND
    assert not report.unused
    assert not report.ambiguous
    assert not report.problems
    assert all(port.spare and port.spare in name for name in report.unfilled)
    assert report.ok or port.spare
    assert port.weights(module).keys() <= {row.name for row in report.rows}


@pytest.mark.parametrize("name", LACKING)
@torch.no_grad()
def test_missing_places_are_reported(name, checkpoints):
    """A port that lacks a bias must not be reported ok, and its other weights must still be correct."""
    port, config = PORTS[name], CONFIGS["tiny"]
    module, by_hand = port.build(config).double(), port.build(config).double()
    report = load_into(module, str(checkpoints["tiny"]))
    port.fill(by_hand, gpt2.load(str(checkpoints["tiny"]), dtype="float64").state_dict())
    assert differing(port, module, by_hand) == []
    assert not report.ok
    assert set(report.unused) == {family.format(layer) for family in port.lacks for layer in range(config.n_layer)}
    assert any("is the only difference from the checkpoint: without that, logits agree" in one for one in report.notes), report


@pytest.mark.slow
@torch.no_grad()
def test_official_shape(tmp_path):
    """At the official width and context: memory that is quadratic in these, or ids taken for positions, would show only here."""
    port, config = PORTS["interleaved"], replace(OFFICIAL_SIZES["gpt2"], n_layer=1, vocab_size=3000)
    hf_layouts.official(tmp_path, config)
    module = port.build(config).float()
    report = load_into(module, str(tmp_path))
    by_hand = port.build(config).float()
    port.fill(by_hand, gpt2.load(str(tmp_path)).state_dict())
    wrong = differing(port, module, by_hand)
    del module, by_hand
    gc.collect()
    assert wrong == []
    assert (report.logits_error <= BOUND) == (not port.lacks)
    assert report.unused.keys() == {family.format(n) for family in port.lacks for n in range(config.n_layer)}
