"""The trace: every point, in order, of either implementation, and no trace of itself afterwards."""

from __future__ import annotations

import torch

from gpt2.config import GPT2Config
from gpt2.measure.tracing import points, trace
from gpt2.model import GPT2, sdpa_attention

CONFIG = GPT2Config(61, n_positions=16, n_embd=24, n_layer=2, n_head=3, bos_token_id=None, eos_token_id=None)


def traced() -> tuple[GPT2, torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = GPT2(CONFIG).double().eval()
    ids = torch.randint(61, (2, 11))
    return model, ids, trace(model, ids)


def test_every_point_once_in_the_order_of_computation() -> None:
    """first_divergence means "first", so the order is part of the contract."""
    _, _, found = traced()
    assert list(found) == points(2)
    assert len(points(2)) == 3 + 2 * 14 + 2


def test_points_are_what_their_names_say() -> None:
    """Recomputed from neighbouring points, so that no hook sits one module too early or too late."""
    model, ids, found = traced()
    torch.testing.assert_close(found["embed"], model.wte(ids) + model.wpe(torch.arange(11)))
    torch.testing.assert_close(found["h.0.mid"], found["embed"] + found["h.0.attn.c_proj"])
    torch.testing.assert_close(found["h.0"], found["h.0.mid"] + found["h.0.mlp.c_proj"])
    torch.testing.assert_close(found["h.1.ln_1"], model.h[1].ln_1(found["h.0"]))
    q, k = (found[f"h.1.attn.{part}"].view(2, 11, 3, 8).transpose(1, 2) for part in "qk")
    torch.testing.assert_close(found["h.1.attn.scores"], (q @ k.mT / 8**0.5).tril())
    torch.testing.assert_close(found["logits"], found["ln_f"] @ model.wte.weight.T)
    torch.testing.assert_close(found["logits"], model(ids))


def test_attention_rows_sum_to_one_and_look_back_only() -> None:
    """What a reader of a tutorial expects to see."""
    _, _, found = traced()
    weights = found["h.1.attn.weights"]
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 11, dtype=torch.float64))
    assert torch.equal(weights, weights.tril())


def test_tracing_leaves_nothing_behind() -> None:
    """A hook or an eager path that stays would slow every later pass, and silently."""
    model, _, _ = traced()
    assert all(block.attn.attend is sdpa_attention for block in model.h)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
