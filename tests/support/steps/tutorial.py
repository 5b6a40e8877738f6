"""Style 2: one function as a tutorial writes it, with its own cross-entropy and torch's AdamW; for this project's own model."""

import torch
from torch import nn

from support.steps.faults import words

WORDS = words("""
    unshifted shifted-twice rolled last-missing summed summed-by-row padding-averaged smoothed temperature half-logits
    zero-ignored dropout not-zeroed head-detached embedding-detached tied-twice block-detached branch-detached
    blocks-frozen times-batch unclipped clipped-by-value clipped-by-tensor clipped-harder clipped-by-sum
    clipped-by-maximum clipped-unasked decay-on-all decay-missing decay-not-on-embeddings decay-tenth eps-1e-6
    betas-swapped betas-default rate-doubled amsgrad moments-lost sgd adam biases-left-out positions-frozen
    stepped-twice clipped-after
""")


def cross_entropy(logits, targets, has):
    """Mean of -log p(target) over the targets that are not -100."""
    log_p = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    real = targets != (0 if "zero-ignored" in has else -100)
    picked = torch.gather(log_p, 2, targets.clamp(min=0)[..., None])[..., 0]
    if "smoothed" in has:
        picked = 0.9 * picked + 0.1 * log_p.mean(-1)
    picked = torch.where(real, picked, torch.zeros_like(picked))
    if "summed" in has:
        return -picked.sum()
    if "summed-by-row" in has:
        return -picked.sum(1).mean()
    if "padding-averaged" in has:
        return -picked.mean()
    return -picked.sum() / real.sum()


def make(has, s):
    def make_step(model):
        model.train()
        if "dropout" in has:
            model.drop.p = 0.1
        if "positions-frozen" in has:
            model.wpe.weight.requires_grad = False
        if "blocks-frozen" in has:
            for p in model.h[0].parameters():
                p.requires_grad = False
        if "head-detached" in has:
            model.head = lambda hidden: hidden @ model.wte.weight.detach().T
        if "embedding-detached" in has:
            model.wte.register_forward_hook(lambda module, args, out: out.detach())
        if "block-detached" in has:
            model.h[-1].register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))
        if "branch-detached" in has:
            model.h[0].mlp.register_forward_hook(lambda module, args, out: out.detach())

        def new_optimizer():
            with_decay, without = [], []
            for name, p in model.named_parameters():
                if "biases-left-out" in has and name.endswith("bias"):
                    continue
                plain = name.endswith("bias") or "ln_" in name
                if "decay-not-on-embeddings" in has and ("wte" in name or "wpe" in name):
                    plain = True
                (without if plain and "decay-on-all" not in has else with_decay).append(p)
            wd = 0 if "decay-missing" in has else s.weight_decay
            groups = [
                dict(params=with_decay, weight_decay=wd / 10 if "decay-tenth" in has else wd),
                dict(params=without, weight_decay=0),
            ]
            b1, b2 = (s.beta2, s.beta1) if "betas-swapped" in has else (s.beta1, s.beta2)
            if "betas-default" in has:
                b1, b2 = 0.9, 0.999
            lr = s.lr * 2 if "rate-doubled" in has else s.lr
            if "sgd" in has:
                return torch.optim.SGD(groups, lr)
            if "adam" in has:
                return torch.optim.Adam(groups, lr, (b1, b2))
            return torch.optim.AdamW(groups, lr, (b1, b2), 1e-6 if "eps-1e-6" in has else 1e-8, amsgrad="amsgrad" in has)

        optimizer = new_optimizer()
        second = torch.optim.AdamW([model.wte.weight], s.lr, (s.beta1, s.beta2), weight_decay=0.0)

        def step(inputs, targets):
            nonlocal optimizer
            if "moments-lost" in has:
                optimizer = new_optimizer()
            logits = model(inputs)
            if "half-logits" in has:
                logits = logits.half().to(logits.dtype)
            if "temperature" in has:
                logits = logits * 1.5
            if "unshifted" in has:
                targets = inputs
            if "rolled" in has:
                targets = inputs.roll(-1, 1)
            if "shifted-twice" in has:
                logits, targets = logits[:, :-1, :], targets[:, 1:]
            if "last-missing" in has:
                logits, targets = logits[:, :-1, :], targets[:, :-1]
            loss = cross_entropy(logits, targets, has)
            if "not-zeroed" not in has:
                optimizer.zero_grad()
            (loss * inputs.size(0) if "times-batch" in has else loss).backward()
            if "tied-twice" in has:
                model.wte.weight.grad.mul_(2)
            if s.clip and "unclipped" not in has and "clipped-after" not in has:
                clip(model, s.clip)
            if "clipped-unasked" in has:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if "clipped-after" in has:
                clip(model, s.clip)
            if "stepped-twice" in has:
                second.step()
            return loss.item()

        return step

    def clip(model, limit):
        if "clipped-by-value" in has:
            nn.utils.clip_grad_value_(model.parameters(), 0.02)
        elif "clipped-by-tensor" in has:
            for p in model.parameters():
                if p.grad is not None:
                    nn.utils.clip_grad_norm_([p], limit)
        elif "clipped-by-sum" in has:
            nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type=1)
        elif "clipped-by-maximum" in has:
            nn.utils.clip_grad_norm_(model.parameters(), limit / 20, norm_type=float("inf"))
        else:
            nn.utils.clip_grad_norm_(model.parameters(), limit * 3 if "clipped-harder" in has else limit)

    return make_step
