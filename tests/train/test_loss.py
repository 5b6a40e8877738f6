"""The loss that never holds the logits: equal to the plain one, in value, in gradient, and in what it leaves alone."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from gpt2.config import GPT2Config
from gpt2.lora import inject
from gpt2.model import GPT2
from gpt2.train import loss
from gpt2.train.bigram import Bigram, BigramConfig
from gpt2.train.loss import Scored
from gpt2.train.models import _checkpointed as checkpointed

V, B, T = 101, 3, 16


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Ten rows at most, of 48: five parts, of which the last is smaller."""
    monkeypatch.setitem(loss.CHUNK, "cpu", 4 * V * 10)


@pytest.fixture
def model() -> GPT2:
    """Parameters so large that the softmax is far from even, and no gradient is small beside its rounding."""
    torch.manual_seed(0)
    sizes = {"n_positions": T, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2(GPT2Config(V, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture
def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """Few enough ids that most occur several times: as a token, and as a target."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, 20, (B, T), generator=generator) for _ in range(2))


def plain(model, ids, targets):
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def gradients(model, score, scale=1.0) -> dict[str, torch.Tensor]:
    """A copy's loss and gradients, by name."""
    model = copy.deepcopy(model)
    value = score(model)
    (value * scale).backward()
    return {"loss": value.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def distance(ours, theirs) -> float:
    """The largest difference, relative to the largest entry of its tensor."""
    assert ours.keys() == theirs.keys()
    return max(((ours[k].double() - theirs[k].double()).abs().max() / theirs[k].double().abs().max()).item() for k in ours)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_loss_and_gradients_are_the_plain_ones(model, windows, scale):
    """A part's mean in place of the batch's, a target subtracted twice, the table's rows forgotten: each trains, and worse."""
    reference = gradients(model, lambda m: plain(m, *windows), scale)
    assert distance(gradients(model, lambda m: Scored(m)(*windows), scale), reference) < 1e-13


def broken_rows(ctx, grad):
    """The head's gradient alone."""
    return ctx.tie.take(), None, None


def broken_loss(ctx, grad):
    """Its factor lost: with four parts a step, four times too large."""
    (grad_hidden, ctx.tie.grad), ctx.grads = ctx.grads, None
    return grad_hidden, None, None, None


@pytest.mark.parametrize(("where", "broken"), [(loss._Rows, broken_rows), (loss._Loss, broken_loss)])
def test_what_is_broken_is_seen(model, windows, monkeypatch, where, broken):
    monkeypatch.setattr(where, "backward", staticmethod(broken))
    reference = gradients(model, lambda m: plain(m, *windows), 0.25)
    assert distance(gradients(model, lambda m: Scored(m)(*windows), 0.25), reference) > 1e-2


def test_a_lost_part_is_seen(model, windows, monkeypatch):
    """Were the parts not to cover every row, the test above must say so."""
    monkeypatch.setattr(loss, "even", lambda rows, n_vocab: rows.chunk(5)[:-1])
    assert Scored(model)(*windows).item() != pytest.approx(plain(model, *windows).item(), rel=1e-6)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_rounding_is_no_worse_than_the_plain_loss(model, windows, precision):
    """In float32, and in bfloat16 by autocast: nearer to float64 than the plain loss, or as near as makes no difference."""
    exact = gradients(model, lambda m: plain(m, *windows))
    single = model.float()

    def error(score):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            found = gradients(single, score)
        assert all(g.dtype == torch.float32 for g in found.values())
        return distance(found, exact)

    ours, theirs = error(lambda m: Scored(m)(*windows)), error(lambda m: plain(m, *windows))
    assert ours < 1.5 * theirs
    assert theirs > (1e-3 if precision == torch.bfloat16 else 1e-8)  # else the precision was never reached


@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_logits_far_from_zero_do_not_overflow(windows, shift):
    """exp(300) is infinite in float32, and a target that is 300 below the top has a probability of zero, not an infinite loss."""
    torch.manual_seed(0)
    hidden, wte = torch.randn(40, 8, requires_grad=True), torch.randn(V, 8, requires_grad=True)
    targets = torch.randint(0, V, (40,))
    with torch.no_grad():
        wte[:, 0] += shift
        wte[5, 0] += shift
    tie = loss._Tie()
    value = loss._Loss.apply(hidden, wte, targets, tie)
    value.backward()
    reference = F.cross_entropy(F.linear(hidden, wte), targets)
    assert value.item() == pytest.approx(reference.item(), rel=1e-6)
    torch.testing.assert_close(tie.grad, torch.autograd.grad(reference, wte)[0], rtol=1e-4, atol=1e-6)


def test_beside_adapters_the_frozen_embedding_gets_no_gradient(model, windows):
    """Half of the work at the head would be for nothing."""
    adapted = inject(model, r=2)
    for name, parameter in adapted.named_parameters():
        if name.endswith("lora_B"):
            parameter.data += 0.1 * torch.randn_like(parameter)
    ours = gradients(adapted, lambda m: Scored(m)(*windows))
    assert "wte.weight" not in ours
    assert distance(ours, gradients(adapted, lambda m: plain(m, *windows))) < 1e-13


def test_with_blocks_computed_again(model, windows):
    reference = gradients(model, lambda m: plain(m, *windows))

    def again(m):
        for block in m.h:
            block.forward = checkpointed(block.forward)
        return Scored(m)(*windows)

    assert distance(gradients(model, again), reference) < 1e-13


def test_a_model_without_a_stream_takes_the_plain_way(windows):
    bigram = Bigram(BigramConfig(V)).double()
    assert torch.equal(Scored(bigram)(*windows), plain(bigram, *windows))


def test_parts_are_equal_and_small_enough():
    """A last part of a few rows costs as much traffic as a full one."""
    assert [len(part) for part in loss.even(torch.zeros(48, 3), V)] == [10, 10, 10, 10, 8]
    assert [len(part) for part in loss.even(torch.zeros(11, 3), V)] == [6, 5]
    assert [len(part) for part in loss.even(torch.zeros(3, 3), 10**9)] == [1, 1, 1]


def test_the_logits_are_never_whole(model, windows, monkeypatch):
    """What it is for: nothing as large as the logits is ever made, and the backward pass waits with nothing of the vocabulary."""
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
        Scored(model)(*windows).backward()
    with Largest() as theirs:
        plain(model, *windows).backward()
    assert ours.rows == 10
    assert theirs.rows == B * T


def test_names_are_the_models_own(model):
    """Optimizer and checkpoints speak of the model; the loss adds nothing of its own."""
    scored = Scored(model)
    assert [id(p) for p in scored.parameters()] == [id(p) for p in model.parameters()]
    assert not list(scored.buffers())


def test_through_ddps_hooks(model, windows, tmp_path):
    """A loss beside the wrapped forward would train each rank alone. One rank: the same numbers, and every hook called."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        reference = gradients(model, lambda m: plain(m, *windows))
        wrapped = torch.nn.parallel.DistributedDataParallel(Scored(model))
        seen = []
        wrapped.register_comm_hook(
            None,
            lambda state, bucket: (
                seen.append(1) or dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])
            ),
        )
        value = wrapped(*windows)
        value.backward()
        found = {"loss": value.detach()} | {name: p.grad for name, p in model.named_parameters()}
        assert seen
        assert distance(found, reference) < 1e-13
    finally:
        dist.destroy_process_group()


def test_a_second_way_back_is_refused(model, windows):
    """Its gradients were handed over, not copied."""
    value = Scored(model)(*windows)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        value.backward()


def test_a_loss_that_is_not_finite_stays_so(model, windows):
    """The loop's guard against divergence reads the loss; a maximum that swallows NaN would blind it."""
    model.wte.weight.data[3, 2] = math.nan
    assert math.isnan(Scored(model)(*windows).item())
