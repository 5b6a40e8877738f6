"""Fused linear cross-entropy: compute the training loss and its gradients without keeping all logits.

The plain way keeps the logits, their log-softmax and its gradient: with a vocabulary of 50,257, three times 200 KB per token,
more than the twelve blocks of gpt2 keep. Here the forward pass computes loss and gradient together, a few rows at a time, and
keeps two gradients: of the residual stream and of the embedding (as Liger Kernel on GPUs: Hsu et al., arXiv:2410.10989).

Shapes: N tokens (of all windows in a row), D width, V vocabulary, n rows of one chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gpt2.data.batches import UNSCORED
from gpt2.model import GPT2

CHUNK = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}  # bytes of logits alive at a time
ALIGNED = {"cuda": 64}  # 16-bit products whose sizes are multiples of it are fast; 50,257 is odd


class WithLoss(nn.Module):
    """``model`` and its training loss as one module, which DDP and FSDP2 can wrap; it adds no parameters.

    Only with ``partial`` may targets be unscored: finding them on a GPU waits for it.
    """

    def __init__(self, model: nn.Module, *, partial: bool = False) -> None:
        super().__init__()
        self.model, self.partial = model, partial

    def forward(self, ids: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy of ``targets`` (B, T) after ``ids`` (B, T), nats per scored token; 0 without any.

        Targets below 0 are not scored: their logits are not computed. ``documents`` (B, T) as in :meth:`GPT2.hidden`.
        """
        targets = targets.flatten()
        scored = (targets >= 0).nonzero().flatten() if self.partial else None
        if scored is not None and not len(scored):  # a loss of 0 that gives every parameter its gradient, as other ranks' do
            return 0 * self.forward(ids, targets.clamp(min=0).view_as(ids), documents)
        if not isinstance(self.model, GPT2):
            return F.cross_entropy(self.model(ids).flatten(0, 1), targets, ignore_index=UNSCORED)
        table = self.model.head_table.weight
        tie = _Tie() if table is self.model.wte.weight else None
        rows = None if tie is None else _EmbeddedRows.apply(table, ids, tie)  # type: ignore[no-untyped-call]
        hidden = self.model.hidden(ids, rows=rows, documents=documents).flatten(0, 1)
        if scored is not None and len(scored) < len(targets):
            hidden, targets = hidden[scored], targets[scored]
        return _Loss.apply(hidden, table, targets, tie)  # type: ignore[no-untyped-call]


def even(rows: Tensor, n_vocab: int) -> tuple[Tensor, ...]:
    """Split ``rows`` (N, ...) into equal parts, each with at most :data:`CHUNK` bytes of float32 logits."""
    most = max(1, CHUNK.get(rows.device.type, CHUNK["cuda"]) // (4 * n_vocab))
    return rows.chunk(-(-len(rows) // most))


class _Tie:
    """Adds the table's few gradient rows to the head's gradient in place; autograd would add two matrices (8 % of a step)."""

    grad: Tensor | None = None

    def take(self) -> Tensor | None:
        grad, self.grad = self.grad, None
        return grad


class _EmbeddedRows(torch.autograd.Function):
    """``wte[ids]``; its backward also returns the gradient that :class:`_Loss` computed for the same matrix."""

    @staticmethod
    def forward(ctx: Any, wte: Tensor, ids: Tensor, tie: _Tie) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.tie = wte.shape, tie
        return F.embedding(ids, wte)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (ids,) = ctx.saved_tensors
        grad = ctx.tie.take()
        if grad_rows.is_cuda:  # index_add_ is not deterministic there
            return grad.add_(torch.ops.aten.embedding_dense_backward(grad_rows, ids, ctx.shape[0], -1, False)), None, None
        return grad.index_add_(0, ids.flatten(), grad_rows.flatten(0, -2).to(grad.dtype)), None, None


class _Loss(torch.autograd.Function):
    """Mean cross-entropy of ``hidden`` (N, D) against ``targets`` (N,), through the head's ``table`` (V, D).

    For a row of logits l with target t, e = exp(l - max l) and s = sum(e): the loss is log s - (l_t - max l), and its gradient
    with respect to l is (e - s 1_t) / s. Both products apply the division by s on their (n, D) side.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, table: Tensor, targets: Tensor, tie: _Tie | None) -> Tensor:
        device = hidden.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wide = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(device, enabled=False):
            head, losses = table.to(low), []
            if low != table.dtype:  # a copy in any case
                head = F.pad(head, (0, 0, 0, -len(table) % ALIGNED.get(device, 1)))
            grad_hidden = torch.empty_like(hidden)
            grad_table = torch.empty_like(table) if ctx.needs_input_grad[1] else None
            parts = (even(each, len(table)) for each in (hidden, targets, grad_hidden))
            for part, part_targets, part_grad in zip(*parts, strict=True):
                part_targets = part_targets[:, None]
                e = (part.to(low) @ head.t()).to(wide)  # (n, V): logits, which the next lines change in place
                e[:, len(table) :] = -torch.inf  # of no token
                e.sub_(e.amax(-1, keepdim=True))
                target_logits = e.gather(1, part_targets)
                total = e.exp_().sum(-1, keepdim=True)  # (n, 1)
                losses.append(total.log() - target_logits)
                e.scatter_add_(1, part_targets, -total)
                e, share = e.to(low), 1 / (total * len(hidden))
                part_grad.copy_((e @ head) * share)
                if grad_table is None:
                    continue
                left, right = e.t(), (part * share).to(low)
                if low != table.dtype:  # summed over the parts in the dtype of the weights
                    product = torch.mm(left, right)[: len(table)]
                    grad_table.copy_(product) if len(losses) == 1 else grad_table.add_(product)
                elif len(losses) == 1:
                    torch.mm(left, right, out=grad_table)
                else:
                    grad_table.addmm_(left, right)
        ctx.grads, ctx.tie = (grad_hidden, grad_table), tie
        return torch.cat(losses).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("backward was called twice on this loss; its gradients were freed by the first call")
        grad_hidden, grad_table = grads
        if grad.is_cuda or grad != 1:  # reading the value on a GPU would wait for it
            for each in filter(lambda each: each is not None, grads):
                each.mul_(grad)
        if ctx.tie is None:
            return grad_hidden, grad_table, None, None
        ctx.tie.grad = grad_table
        return grad_hidden, None, None, None
