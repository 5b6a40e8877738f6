"""Right training steps whose optimizer, gradients or ties are written by hand, and adapters of two training libraries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.steps.right import adamw, groups, loss_of, plain, right


@right("written over lists", "mha")
def over_lists(s):
    def make_step(model):
        ps = list(model.train().parameters())
        ms, vs = [torch.zeros_like(p) for p in ps], [torch.zeros_like(p) for p in ps]
        count = [0]

        def step(x, y):
            loss = loss_of(model, x, y)
            grads = torch.autograd.grad(loss, ps)
            norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
            grads = [g * min(1.0, s.clip / (float(norm) + 1e-6)) for g in grads]
            count[0] += 1
            with torch.no_grad():
                torch._foreach_lerp_(ms, grads, 1 - s.beta1)
                torch._foreach_mul_(vs, s.beta2)
                torch._foreach_addcmul_(vs, grads, grads, 1 - s.beta2)
                for p, m, v in zip(ps, ms, vs, strict=True):
                    ratio = m / (1 - s.beta1 ** count[0]) / ((v / (1 - s.beta2 ** count[0])) ** 0.5 + 1e-8)
                    p.copy_(p * (1 - s.lr * (s.weight_decay if p.ndim > 1 else 0)) - s.lr * ratio)
            return loss.item()

        return step

    return make_step


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


@right("functional_call")
def functional(s):
    def make_step(model):
        own, optimizer = dict(model.train().named_parameters()), adamw(model, s)

        def step(x, y):
            found = torch.func.functional_call(model, own, (x,))
            loss = F.cross_entropy(found.flatten(0, 1), y.flatten())
            for p, g in zip(own.values(), torch.autograd.grad(loss, list(own.values())), strict=True):
                p.grad = g
            nn.utils.clip_grad_norm_(own.values(), s.clip)
            optimizer.step()
            return loss.detach()

        return step

    return make_step
