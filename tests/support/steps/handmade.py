"""Style 3: a class that trains, with AdamW written by hand; for the port `mha`."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from support.steps.faults import words

WORDS = words("""
    unshifted rolled last-missing summed summed-by-row temperature smoothed dropout accumulation-summed
    accumulation-halved accumulation-by-mean padding-averaged not-zeroed last-micro-batch untied embedding-detached
    tied-twice block-detached positions-frozen times-batch ranks-summed unclipped clipped-by-value clipped-by-tensor
    clipped-harder clipped-early clipped-by-sum clipped-by-maximum clipped-unasked decay-coupled decay-on-all
    decay-on-norms decay-on-biases decay-not-on-embeddings decay-missing decay-tenth decay-without-rate decay-after
    uncorrected corrected-late eps-inside eps-before-correction eps-1e-6 betas-swapped betas-default rate-doubled
    schedule-late schedule-early schedule-linear warmup-missing amsgrad moments-kept moments-lost sgd biases-left-out
    head-left-out step-per-micro-batch shifted-twice
""")

KEPT: dict[int, dict] = {}  # what "moments-kept" forgets to clear


class HandAdamW:
    """AdamW over named parameters."""

    def __init__(self, named, s, has):
        self.s, self.has, self.named = s, has, named
        self.state = KEPT if "moments-kept" in has else {}
        self.t = 0

    def decays(self, name, p):
        has = self.has
        if "decay-on-all" in has:
            return True
        if name.endswith("bias"):
            return "decay-on-biases" in has
        if "norm" in name:
            return "decay-on-norms" in has
        return not ("decay-not-on-embeddings" in has and "emb" in name)

    @torch.no_grad()
    def step(self, lr):
        has, s = self.has, self.s
        self.t += 1
        b1, b2 = (s.beta2, s.beta1) if "betas-swapped" in has else (s.beta1, s.beta2)
        b2 = 0.98 if "betas-default" in has else b2
        eps = 1e-6 if "eps-1e-6" in has else 1e-8
        t = self.t + 1 if "corrected-late" in has else self.t
        c1, c2 = (1.0, 1.0) if "uncorrected" in has else (1 - b1**t, 1 - b2**t)
        for number, (name, p) in enumerate(self.named):
            if p.grad is None:
                continue
            if ("biases-left-out" in has and name.endswith("bias")) or ("head-left-out" in has and name == "tok_emb.weight"):
                continue
            if "sgd" in has:
                p -= lr * p.grad
                continue
            wd = s.weight_decay if self.decays(name, p) and "decay-missing" not in has else 0.0
            wd = wd / 10 if "decay-tenth" in has else wd
            g = p.grad + wd * p if "decay-coupled" in has else p.grad
            if number not in self.state or "moments-lost" in has:
                self.state[number] = {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "most": torch.zeros_like(p)}
            known = self.state[number]
            known["m"] = b1 * known["m"].to(p) + (1 - b1) * g
            known["v"] = b2 * known["v"].to(p) + (1 - b2) * g * g
            known["most"] = torch.maximum(known["most"].to(p), known["v"])
            v = known["most"] if "amsgrad" in has else known["v"]
            if "decay-coupled" not in has and "decay-after" not in has:
                p -= (wd if "decay-without-rate" in has else lr * wd) * p
            if "eps-inside" in has:
                root = (v / c2 + eps).sqrt()
            elif "eps-before-correction" in has:
                root = (v.sqrt() + eps) / math.sqrt(c2)
            else:
                root = (v / c2).sqrt() + eps
            p -= lr * (known["m"] / c1) / root
            if "decay-after" in has:
                p -= lr * wd * p


class Training:
    def __init__(self, model, s, has):
        self.model, self.s, self.has, self.n = model.train(), s, has, 0
        if "dropout" in has:
            model.drop.p = 0.2
        if "untied" in has:
            model.out.weight = nn.Parameter(model.tok_emb.weight.detach().clone())
        if "positions-frozen" in has:
            model.pos_emb.requires_grad = False
        if "embedding-detached" in has:
            model.tok_emb.register_forward_hook(lambda module, args, out: out.detach())
        if "block-detached" in has:
            model.layer2.register_forward_pre_hook(lambda module, args: (args[0].detach(), args[1]))
        self.optimizer = HandAdamW(list(model.named_parameters()), s, has)

    def rate(self):
        s, has, n = self.s, self.has, self.n
        n = max(0, n - 1) if "schedule-late" in has else n + 1 if "schedule-early" in has else n
        factor = 2 if "rate-doubled" in has else 1
        if n < s.warmup and "warmup-missing" not in has:
            return factor * s.lr * (n + 1) / s.warmup
        part = min(1.0, max(0.0, n - s.warmup) / max(1, s.steps - s.warmup))
        if "schedule-linear" in has:
            return factor * (s.lr + part * (s.min_lr - s.lr))
        return factor * (s.min_lr + (s.lr - s.min_lr) * (1 + math.cos(math.pi * part)) / 2)

    def loss(self, x, y):
        has, logits = self.has, self.model(x)
        if "temperature" in has:
            logits = logits * 0.5
        if "unshifted" in has:
            y = x
        if "rolled" in has:
            y = torch.cat([x[:, 1:], x[:, :1]], dim=1)
        if "shifted-twice" in has:
            logits, y = logits[:, :-1], y[:, 1:]
        if "last-missing" in has:
            logits, y = logits[:, :-1], y[:, :-1]
        smoothing = 0.05 if "smoothed" in has else 0.0
        each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none", label_smoothing=smoothing)
        if "summed" in has:
            return each.sum()
        if "summed-by-row" in has:
            return each.sum(dim=1).mean()
        return each.mean() if "padding-averaged" in has else each.sum() / (y != -100).sum()

    def clip(self):
        has, limit = self.has, self.s.clip
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        limit = 0.3 if "clipped-unasked" in has else limit * 0.7 if "clipped-harder" in has else limit
        if not limit or "unclipped" in has:
            return
        if "clipped-by-value" in has:
            for g in grads:
                g.clamp_(-0.01, 0.01)
            return
        norms = torch.stack([g.norm() for g in grads])
        if "clipped-by-sum" in has:
            norms = torch.stack([g.abs().sum() for g in grads])
        if "clipped-by-tensor" in has:
            factors = (limit / (norms + 1e-6)).clamp(max=1)
        elif "clipped-by-maximum" in has:
            factors = (limit / 50 / (max(g.abs().max() for g in grads) + 1e-6)).clamp(max=1).expand(len(grads))
        else:
            whole = norms.sum() if "clipped-by-sum" in has else norms.norm()
            factors = (limit / (whole + 1e-6)).clamp(max=1).expand(len(grads))
        for g, factor in zip(grads, factors, strict=True):
            g.mul_(factor)

    def step(self, x, y):
        has, parts = self.has, 2 if "ranks-summed" in self.has else self.s.grad_accum
        every, total = int((y != -100).sum()), 0.0
        if "not-zeroed" not in has:
            self.model.zero_grad()
        for xb, yb in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = self.loss(xb, yb)
            weight = 1 / parts if "accumulation-by-mean" in has else int((yb != -100).sum()) / every
            if "summed" in has or parts == 1:
                weight = 1.0
            total += weight * loss.item()
            if "accumulation-summed" in has or "ranks-summed" in has:
                weight = 1.0
            if "accumulation-halved" in has:
                weight /= parts
            if "last-micro-batch" in has:
                self.model.zero_grad()
            if "times-batch" in has:
                weight *= len(x)
            (loss * weight).backward()
            if "clipped-early" in has:
                self.clip()
            if "step-per-micro-batch" in has:
                self.update()
                self.model.zero_grad()
        if "tied-twice" in has:
            self.model.tok_emb.weight.grad.add_(self.model.out.weight.grad)
        if "step-per-micro-batch" not in has:
            self.update()
        self.n += 1
        return torch.tensor(total)

    def update(self):
        if "clipped-early" not in self.has:
            self.clip()
        self.optimizer.step(self.rate())


def make(has, s):
    def make_step(model):
        return Training(model, s, has).step

    return make_step
