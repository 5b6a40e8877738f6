"""The training loss without the logits.

The plain way holds logits, their log-softmax and the gradient of it all at once: at 50,257 tokens of vocabulary three times
200 KB for every token of the batch, more than all twelve blocks of gpt2 keep. But a loss is a single number, and its gradient
follows from the logits alone: so both are computed here together, for a few rows at a time, in the forward pass already. Not a
product is computed twice; what remains is one gradient for the stream and one for the embedding. (Liger Kernel does the same on
GPUs: Hsu et al., arXiv:2410.10989.)

Shapes: N tokens (of all windows in a row), D width, V vocabulary, n rows of one chunk.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}  # bytes of logits alive at a time: few, and still enough rows for a good product


class Scored(nn.Module):
    """``model`` with its training loss: what a step calls, and what DDP, FSDP2 and others wrap, whose hooks need a forward.

    It has no parameters of its own; optimizer and checkpoints speak of ``model``, under its own names.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean negative log-likelihood, in nats per token, of ``targets`` (B, T) after ``ids`` (B, T); a scalar."""
        if not hasattr(self.model, "hidden"):
            return F.cross_entropy(self.model(ids).flatten(0, 1), targets.flatten())
        wte = self.model.wte.weight
        tie = _Tie()
        rows = _Rows.apply(wte, ids, tie)
        return _Loss.apply(self.model.hidden(ids, rows=rows).flatten(0, 1), wte, targets.flatten(), tie)


def even(rows: Tensor, n_vocab: int) -> tuple[Tensor, ...]:
    """``rows`` (N, ...) in equal parts, of which each has no more than :data:`CHUNK` bytes of float32 logits."""
    most = max(1, CHUNK.get(rows.device.type, CHUNK["cuda"]) // (4 * n_vocab))
    return rows.chunk(-(-len(rows) // most))


class _Tie:
    """Hands the embedding's gradient as head over to the embedding as table, which adds its few rows to it in place.

    Left to itself, autograd would add two matrices as large as the embedding, one of them almost all zeros: at gpt2's shape and
    256 tokens, 8 % of the step.
    """

    grad: Tensor | None = None

    def take(self) -> Tensor | None:
        grad, self.grad = self.grad, None
        return grad


class _Rows(torch.autograd.Function):
    """``wte[ids]``, whose way back also delivers what :class:`_Loss` found for the same matrix."""

    @staticmethod
    def forward(ctx, wte: Tensor, ids: Tensor, tie: _Tie) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.tie = wte.shape, tie
        return F.embedding(ids, wte)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (ids,) = ctx.saved_tensors
        grad = ctx.tie.take()
        if grad_rows.is_cuda:  # where adding by index comes in any order, and with it other last digits each time
            return grad.add_(torch.ops.aten.embedding_dense_backward(grad_rows, ids, ctx.shape[0], -1, False)), None, None
        return grad.index_add_(0, ids.flatten(), grad_rows.flatten(0, -2).to(grad.dtype)), None, None


class _Loss(torch.autograd.Function):
    """Mean cross-entropy of ``hidden`` (N, D) against ``targets`` (N,), through the head ``wte`` (V, D).

    For a row of logits l with the target t, of which e = exp(l - max l) sums to s, the loss is log s - (l_t - max l), and its
    gradient with respect to l is (e - s 1_t) / s. The division is left to the thin side of both products.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, wte: Tensor, targets: Tensor, tie: _Tie) -> Tensor:
        device = hidden.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            head, losses = wte.to(low), []
            grad_hidden = torch.empty_like(hidden)
            grad_wte = torch.empty_like(wte) if ctx.needs_input_grad[1] else None
            for part, part_targets, part_grad in zip(
                *(even(each, len(wte)) for each in (hidden, targets, grad_hidden)), strict=True
            ):
                part_targets = part_targets[:, None]
                e = (part.to(low) @ head.t()).to(wide)  # (n, V): the logits, for now
                e.sub_(e.amax(-1, keepdim=True))
                target_logits = e.gather(1, part_targets)
                total = e.exp_().sum(-1, keepdim=True)  # (n, 1)
                losses.append(total.log() - target_logits)
                e.scatter_add_(1, part_targets, -total)
                e, share = e.to(low), 1 / (total * len(hidden))
                part_grad.copy_((e @ head) * share)
                if grad_wte is None:
                    continue
                product = e.t(), (part * share).to(low)
                if low != wte.dtype:  # summed over the parts in the weights' own dtype
                    product = torch.mm(*product)
                    grad_wte.copy_(product) if len(losses) == 1 else grad_wte.add_(product)
                elif len(losses) == 1:
                    torch.mm(*product, out=grad_wte)
                else:
                    grad_wte.addmm_(*product)
        ctx.found, ctx.tie = (grad_hidden, grad_wte), tie
        return torch.cat(losses).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.found = ctx.found, None
        if found is None:
            raise RuntimeError("this loss has been through backward once; its gradients are gone")
        grad_hidden, grad_wte = found
        if grad.is_cuda or grad != 1:  # asking a GPU would mean waiting for it
            found = [None if each is None else each.mul_(grad) for each in found]
        ctx.tie.grad = grad_wte
        return grad_hidden, None, None, None
