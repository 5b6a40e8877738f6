"""The ports of tests/support/faulty with a fault are faulty, and the architectures without faults are correct.

tools/diagnose_table.py goes through all of them, and counts one without effect as called equal. Here: a third, since
test_diagnosis_ports.py finds each fault's cause.
"""

from pathlib import Path

import pytest
import torch
from support.checks import mostly_slow
from support.faulty import ARCHITECTURES, CONFIG, COVERING, FAULTY, MEANINGS, write
from support.ports import logits
from torch import Tensor, nn

import gpt2
from gpt2.measure.metrics import FLOAT64_BOUND


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("faulty"), CONFIG)


@pytest.fixture(scope="module")
def reference(checkpoint):
    return gpt2.load(str(checkpoint), dtype="float64")


def some_ids() -> Tensor:
    return torch.randint(CONFIG.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))


def error(module: nn.Module, reference: nn.Module) -> float:
    """Largest difference of a logit, relative to the largest logit."""
    expected = reference(some_ids())
    found = logits(module.double(), some_ids(), CONFIG.vocab_size + 100)
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", mostly_slow([name for name in COVERING if FAULTY[name].points][::3], 4))
@torch.no_grad()
def test_a_faulty_port_is_faulty(name, checkpoint, reference):
    """A fault without effect would count as missed, or be named by chance. (Faults of caches and padding: each is diagnosed.)"""
    port = FAULTY[name]
    module = port.build(CONFIG, checkpoint)
    if port.filled:
        gpt2.load_into(module, str(checkpoint))
    torch.manual_seed(0)
    assert error(module, reference) > 10 * FLOAT64_BOUND


@pytest.mark.parametrize("name", mostly_slow([name for name, port in FAULTY.items() if len(port.causes) > 1][::2], 4))
@torch.no_grad()
def test_every_one_of_several_faults_counts(name, checkpoint):
    """One fault could hide another completely, and then no diagnosis could find it."""
    port, ids = FAULTY[name], some_ids()
    words = list(port.causes)
    whole = logits(port.build(CONFIG, checkpoint).double(), ids, CONFIG.vocab_size)
    for left_out in words:
        line = " ".join(word for word in words if word != left_out)
        less = type(port)(port.architecture, line).build(CONFIG, checkpoint).double()
        same = torch.allclose(logits(less, ids, CONFIG.vocab_size), whole, rtol=0, atol=1e-8)
        assert not same or left_out.startswith(("cache", "padding")), left_out


def test_every_cause_and_every_fault_is_there():
    """A cause or a fault without a port would never be tested."""
    from gpt2.port.diagnosis.causes import CAUSES

    first = {ids[0] for name in COVERING for ids in FAULTY[name].causes.values()}
    assert set(CAUSES) == first
    assert {word for name in COVERING for word in FAULTY[name].causes} == {*MEANINGS}
    assert {FAULTY[name].architecture for name in COVERING} == {*ARCHITECTURES}
    assert len(COVERING) < 0.4 * len(FAULTY)


@torch.no_grad()
def test_the_sound_file_among_the_hostile_is_right(checkpoint, reference, monkeypatch):
    """The other files are copies of it: they must fail by their behaviour, not by a mistake in the copy."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support" / "faulty" / "hostile"))
    import sound

    assert error(sound.build(str(checkpoint)), reference) < 1e-12
