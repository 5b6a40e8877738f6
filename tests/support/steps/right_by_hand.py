"""Right training steps whose update or loss is taken in an unusual place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.steps.right import groups, loss_of, plain, right


@right("tied by hand: gradients added, values copied", "nano")
def tied_by_hand(s):
    def optimizer_of(model, s):
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())

        class Tied(torch.optim.AdamW):
            def step(self, closure=None):
                super().step(closure)
                with torch.no_grad():
                    model.lm_head.weight.copy_(model.transformer["wte"].weight)

        own = [{**group, "params": [p for p in group["params"] if p is not model.lm_head.weight]} for group in groups(model, s)]
        return Tied(own, lr=s.lr, betas=(s.beta1, s.beta2))

    def added(model):
        model.transformer["wte"].weight.grad += model.lm_head.weight.grad
        model.lm_head.weight.grad = None

    return plain(s, optimizer_of, gradients=added)


@right("update within the backward pass", "mha", clip=0.0)
def in_backward(s):
    def make_step(model):
        for p in model.train().parameters():
            own = torch.optim.AdamW([p], lr=s.lr, betas=(s.beta1, s.beta2), weight_decay=s.weight_decay * (p.ndim > 1))

            def update(p, own=own):
                own.step()
                own.zero_grad()

            p.register_post_accumulate_grad_hook(update)

        def step(x, y):
            loss = loss_of(model, x, y)
            loss.backward()
            return loss.detach()

        return step

    return make_step


@right("a module that returns the loss alone", "nano", grad_accum=2)
def loss_alone(s):
    """In training it is called with targets, and returns no logits."""

    def prepare(model):
        forward = model.forward

        def with_targets(ids, targets=None):
            found = forward(ids)
            if targets is None:
                return found
            return None, F.cross_entropy(found[0].flatten(0, 1), targets.flatten())

        model.forward = with_targets
        return model

    def losses(model, x, y):
        for ids, targets in zip(x.chunk(s.grad_accum), y.chunk(s.grad_accum), strict=True):
            yield model(ids, targets)[1] / s.grad_accum

    return plain(s, losses=losses, prepare=prepare)
