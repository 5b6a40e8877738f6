"""The trace: every point once, in order, with the value that its name says; afterwards the model has no hooks."""

import threading

import pytest
import torch
from support.random_models import random_model

from gpt2.config import GPT2Config
from gpt2.measure.tracing import points, trace, trace_blocks
from gpt2.model import GPT2, eager_attention_upcast, sdpa_attention

CONFIG = GPT2Config(61, n_positions=16, n_embd=24, n_layer=2, n_head=3, bos_token_id=None, eos_token_id=None)
IDS = torch.randint(61, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model() -> GPT2:
    return random_model(CONFIG)


def test_a_block_at_a_time_is_the_whole_trace(model: GPT2) -> None:
    """Each point must appear once, with the right block and in order: first_divergence relies on it."""
    whole = trace(model, IDS)
    blocks = list(trace_blocks(model, IDS))
    assert [len(block) for block in blocks] == [3, 14, 14, 2]
    assert [name for block in blocks for name in block] == points(2) == list(whole)
    assert all(torch.equal(block[name], whole[name]) for block in blocks for name in block)
    assert list(blocks[1])[-1] == "h.0"
    assert list(blocks[-1]) == ["ln_f", "logits"]


def test_points_are_what_their_names_say(model: GPT2) -> None:
    """Each point is computed again from neighbouring points: a hook may be one module too early or too late."""
    found = trace(model, IDS)
    torch.testing.assert_close(found["embed"], model.wte(IDS) + model.wpe(torch.arange(11)))
    torch.testing.assert_close(found["h.0.mid"], found["embed"] + found["h.0.attn.c_proj"])
    torch.testing.assert_close(found["h.0"], found["h.0.mid"] + found["h.0.mlp.c_proj"])
    torch.testing.assert_close(found["h.1.ln_1"], model.h[1].ln_1(found["h.0"]))
    q, k = (found[f"h.1.attn.{part}"].view(2, 11, 3, 8).transpose(1, 2) for part in "qk")
    torch.testing.assert_close(found["h.1.attn.scores"], (q @ k.mT / 8**0.5).tril())
    torch.testing.assert_close(found["logits"], found["ln_f"] @ model.wte.weight.T)
    torch.testing.assert_close(found["logits"], model(IDS))


def test_a_trace_given_up_leaves_nothing_behind(model: GPT2) -> None:
    """A trace that stops early must not leave a waiting thread, a hook, or the slower eager path."""
    before = threading.active_count()
    walk = trace_blocks(model, IDS)
    next(walk)
    next(walk)
    walk.close()
    assert threading.active_count() == before
    trace(model, IDS)
    assert all(block.attn.attend is sdpa_attention for block in model.h)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_a_model_raises_reaches_the_caller(model: GPT2) -> None:
    with pytest.raises(ValueError, match="do not fit the model's 16 positions"):
        list(trace_blocks(model, torch.zeros(1, 17, dtype=torch.int64)))


def test_an_upcast_attention_stays(model: GPT2) -> None:
    """Tracing replaces the fused kernel by the eager path, and changes nothing else."""
    model.use_attention(eager_attention_upcast)
    list(trace_blocks(model, IDS))
    assert all(block.attn.attend is eager_attention_upcast for block in model.h)
