"""The ports of tests/support/faulty with a fault are faulty, and the architectures without faults are correct.

tools/diagnose_table.py goes through all of them, and counts one without effect as called equal. Here: each fault once.
"""

import inspect
from pathlib import Path

import pytest
import torch
from support.checks import mostly_slow
from support.faulty import ARCHITECTURES, CONFIG, COVERING, FAULTY, MEANINGS, SOUND, write
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


def misbehaves(module: nn.Module) -> bool:
    """Whether logits change when the port is called twice, with one row, with its cache, or padded on the left."""
    module, ids = module.double(), some_ids()
    first = logits(module, ids, CONFIG.vocab_size)
    if not torch.allclose(logits(module, ids, CONFIG.vocab_size), first, rtol=0, atol=1e-9):
        return True
    if not torch.allclose(logits(module, ids[:1], CONFIG.vocab_size), first[:1], rtol=0, atol=1e-9):
        return True
    cached = in_pieces(module, ids[:, :-1], ids[:, -1:])
    cached = in_pieces(module, ids[:, :-3], ids[:, -3:]) if "cache-single" not in getattr(module, "faults", ()) else cached
    if cached is not None and not torch.allclose(cached, first[:, -cached.size(1) :], rtol=0, atol=1e-9):
        return True
    for one in ids[:, :-1].split(1, dim=1):
        module(one)
    if not torch.allclose(logits(module, ids[:, :1], CONFIG.vocab_size), first[:, :1], rtol=0, atol=1e-9):
        return True
    for name, real in (("attention_mask", 1), ("key_padding_mask", 0)):
        if name in inspect.signature(module.forward).parameters:
            return mistakes_padding(module, ids, first, name, real)
    return False


def in_pieces(module: nn.Module, start: Tensor, rest: Tensor) -> Tensor | None:
    """Logits of ``rest`` computed with the port's cache, called as its author would call it; None if it has no cache."""
    takes = inspect.signature(module.forward).parameters
    if "past_key_values" in takes:
        return module(rest, past_key_values=module(start, use_cache=True).past_key_values).logits
    if "past" in takes:
        return module(rest, past=module(start, use_cache=True)[1])
    if "kv_cache" in takes:
        cache = module.new_cache(len(start))
        module(start, kv_cache=cache)
        return module(rest, kv_cache=cache)
    if "start_pos" in takes:
        module(start)
        return module(rest, start_pos=start.size(1))
    return None


def mistakes_padding(module: nn.Module, ids: Tensor, alone: Tensor, name: str, real: int) -> bool:
    """Whether an empty mask, or the tokens under a mask, change the logits (B, T, V) of real tokens."""

    def masked(where: Tensor, tokens: Tensor) -> Tensor:
        return logits(lambda x: module(x, **{name: where.long() if real else ~where}), tokens, CONFIG.vocab_size)

    everything = torch.ones_like(ids, dtype=torch.bool)
    if not torch.allclose(masked(everything, ids), alone, rtol=0, atol=1e-9):
        return True
    left = everything.clone()
    left[:, :3] = False
    seen = [masked(left, torch.where(left, ids, other))[:, 3:] for other in (0, 5)]
    if "past_key_values" in inspect.signature(module.forward).parameters:
        start = module(ids[:, :-1], attention_mask=left[:, :-1].long(), use_cache=True)
        last = module(ids[:, -1:], attention_mask=left.long(), past_key_values=start.past_key_values)
        seen = [seen[0][:, -1], last.logits[:, -1]] if torch.allclose(*seen, rtol=0, atol=1e-9) else seen
    return not torch.allclose(*seen, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", mostly_slow(COVERING, 4))
@torch.no_grad()
def test_a_faulty_port_is_faulty(name, checkpoint, reference):
    """A fault without effect would count as missed, or be named by chance."""
    port = FAULTY[name]
    module = port.build(CONFIG, checkpoint)
    if port.filled:
        gpt2.load_into(module, str(checkpoint))
    torch.manual_seed(0)
    assert error(module, reference) > 10 * FLOAT64_BOUND if port.points else misbehaves(module)


@pytest.mark.parametrize("name", mostly_slow([name for name, port in FAULTY.items() if len(port.causes) > 1], 4))
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


@pytest.mark.parametrize("name", mostly_slow(SOUND, 4))
@torch.no_grad()
def test_an_architecture_without_a_fault_is_right(name, checkpoint, reference):
    """Control: a mistake in the architecture would count as the fault under test."""
    port = SOUND[name]
    module = port.build(CONFIG, checkpoint)
    if port.filled:
        assert gpt2.load_into(module, str(checkpoint)).ok
    assert error(module, reference) < (1e-5 if "upcast" in port.line else 1e-12)
    assert "upcast" in port.line or not misbehaves(module)


def test_every_cause_and_every_fault_is_there():
    """A cause or a fault without a port would never be tested."""
    from gpt2.port.diagnosis.causes import CAUSES

    first = {ids[0] for name in COVERING for ids in FAULTY[name].causes.values()}
    assert set(CAUSES) == first
    assert {word for name in COVERING for word in FAULTY[name].causes} == {*MEANINGS}
    assert {FAULTY[name].architecture for name in COVERING} == {*ARCHITECTURES}
    assert len(COVERING) < 0.4 * len(FAULTY)


def test_there_are_enough():
    """At least 100 ports, 15 of them with several faults, and common causes in at least four architectures."""
    assert len(FAULTY) >= 100
    assert sum(" " in port.line for port in FAULTY.values()) >= 15
    assert {port.architecture for port in FAULTY.values()} == set(ARCHITECTURES)
    for id in (
        "gelu-variant",
        "scale-by-width",
        "mask-off-by-one",
        "rmsnorm",
        "residual-from-normed",
        "transposed",
        "not-loaded",
    ):
        homes = {port.architecture for port in FAULTY.values() if any(id == ids[0] for ids in port.causes.values())}
        assert len(homes) >= 4, id


@torch.no_grad()
def test_the_sound_file_among_the_hostile_is_right(checkpoint, reference, monkeypatch):
    """The other files are copies of it: they must fail by their behaviour, not by a mistake in the copy."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support" / "faulty" / "hostile"))
    import sound

    assert error(sound.build(str(checkpoint)), reference) < 1e-12
