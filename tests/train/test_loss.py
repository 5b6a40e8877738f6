"""The chunked loss, which never holds all logits, equals the plain one in value and gradient."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.random_models import random_model
from support.training import furthest

from gpt2.config import GPT2Config
from gpt2.lora import inject
from gpt2.model import GPT2
from gpt2.train import loss
from gpt2.train.loss import WithLoss

V, B, T = 101, 3, 16


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """At most 10 of 48 rows at a time: five parts, the last one smaller."""
    monkeypatch.setitem(loss.CHUNK, "cpu", 4 * V * 10)


@pytest.fixture
def model() -> GPT2:
    """Parameters so large that the softmax is far from uniform, and gradients are large beside their rounding."""
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return random_model(GPT2Config(V, T, 16, 2, 2, **rates, bos_token_id=0, eos_token_id=0), 0.3)


@pytest.fixture
def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """So few ids that most occur several times, as tokens and as targets."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, 20, (B, T), generator=generator) for _ in range(2))


def plain(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def gradients(model, score, scale=1.0) -> dict[str, torch.Tensor]:
    """Loss and gradients of a copy of the model, by name."""
    model = copy.deepcopy(model)
    value = score(model)
    (value * scale).backward()
    return {"loss": value.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_the_plain_ones(model, windows, scale, tied):
    """Possible bugs: the mean of a part instead of the batch, a target subtracted twice, missing rows of the embedding."""
    model = model if tied else random_model(replace(model.config, tie_word_embeddings=False), 0.3)
    reference = gradients(model, lambda m: plain(m, *windows), scale)
    assert furthest(gradients(model, lambda m: WithLoss(m)(*windows), scale), reference) < 1e-13


def broken_rows(ctx, grad):
    """Drop the gradient of the head's input."""
    return ctx.tie.take(), None, None


def broken_loss(ctx, grad):
    """Drop the loss's factor: with four parts a step, the gradient is four times too large."""
    (grad_hidden, ctx.tie.grad), ctx.grads = ctx.grads, None
    return grad_hidden, None, None, None


BROKEN = {
    "rows": (loss._EmbeddedRows, "backward", staticmethod(broken_rows)),
    "loss": (loss._Loss, "backward", staticmethod(broken_loss)),
    "a lost part": (loss, "even", lambda rows, n_vocab: rows.chunk(5)[:-1]),
}


@pytest.mark.parametrize(("where", "name", "broken"), BROKEN.values(), ids=BROKEN)
def test_what_is_broken_is_seen(model, windows, monkeypatch, where, name, broken):
    """Negative controls: among them parts that do not cover every row."""
    monkeypatch.setattr(where, name, broken)
    reference = gradients(model, lambda m: plain(m, *windows), 0.25)
    assert furthest(gradients(model, lambda m: WithLoss(m)(*windows), 0.25), reference) > 1e-2


@pytest.mark.parametrize(("precision", "aligned"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 64)])
def test_rounding_is_no_worse_than_the_plain_loss(model, windows, monkeypatch, precision, aligned):
    """In float32, and in bfloat16 by autocast with the vocabulary padded: the error is at most about that of the plain loss."""
    monkeypatch.setitem(loss.ALIGNED, "cpu", aligned)
    exact = gradients(model, lambda m: plain(m, *windows))
    single = model.float()

    def error(score):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            found = gradients(single, score)
        assert all(g.dtype == torch.float32 for g in found.values())
        return furthest(found, exact)

    ours, theirs = error(lambda m: WithLoss(m)(*windows)), error(lambda m: plain(m, *windows))
    assert ours < 1.5 * theirs
    assert theirs > (1e-3 if precision == torch.bfloat16 else 1e-8)  # else the precision was not in use


def test_large_logits_do_not_overflow(model, windows):
    """exp(300) overflows float32; a target 300 below the maximum has probability zero and a finite loss."""
    model.ln_f.weight.data *= 300
    single = model.float()
    ours, theirs = gradients(single, lambda m: WithLoss(m)(*windows)), gradients(single, lambda m: plain(m, *windows))
    assert ours["loss"].item() == pytest.approx(theirs["loss"].item(), rel=1e-6)
    assert furthest(ours, theirs) < 1e-4


def test_beside_adapters_the_frozen_embedding_gets_no_gradient(model, windows):
    """Computing the frozen embedding's gradient would waste half of the head's work."""
    adapted = inject(model, r=2)
    for name, parameter in adapted.named_parameters():
        if name.endswith("lora_B"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    ours = gradients(adapted, lambda m: WithLoss(m)(*windows))
    assert "wte.weight" not in ours
    assert furthest(ours, gradients(adapted, lambda m: plain(m, *windows))) < 1e-13


def test_the_logits_are_never_whole(model, windows, monkeypatch):
    """No tensor may have the size of the logits, and the backward pass keeps none of the vocabulary's size."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for each in result if isinstance(result, tuple | list) else [result]:
                if isinstance(each, torch.Tensor) and each.ndim and each.size(-1) == V and each.size(0) != 16:
                    self.rows = max(self.rows, each.numel() // V)
            return result

    with Largest() as ours:
        WithLoss(model)(*windows).backward()
    with Largest() as theirs:
        plain(model, *windows).backward()
    assert ours.rows == 10
    assert theirs.rows == B * T


def test_a_second_way_back_is_refused(model, windows):
    """A second backward pass is refused: the gradients were moved, not copied."""
    value = WithLoss(model)(*windows)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        value.backward()


def test_a_loss_that_is_not_finite_stays_so(model, windows):
    """The divergence guard reads the loss, so NaN must stay NaN: taking a maximum may drop it."""
    model.wte.weight.data[3, 2] = math.nan
    assert math.isnan(WithLoss(model)(*windows).item())
