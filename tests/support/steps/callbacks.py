"""Style 7: a trainer class with callbacks; gradients change in hooks, AdamW is called with a closure."""

import math

import torch
import torch.nn.functional as F

from support.steps.faults import words

WORDS = words("""
    unshifted summed zero-ignored half-logits accumulation-halved not-zeroed times-batch positions-frozen tied-twice
    unclipped clipped-harder clipped-after clipped-by-tensor decay-on-norms decay-on-biases betas-default amsgrad adam
    schedule-late schedule-linear
""")


class Callback:
    def on_begin(self, trainer): ...
    def on_gradients(self, trainer): ...
    def on_end(self, trainer): ...


class Clip(Callback):
    def __init__(self, has, s):
        self.has, self.limit = has, s.clip / 2 if "clipped-harder" in has else s.clip

    def on_gradients(self, trainer):
        if not self.limit or {"unclipped", "clipped-after"} & self.has:
            return
        groups = [[p] for p in trainer.params] if "clipped-by-tensor" in self.has else [trainer.params]
        for group in groups:
            limit = self.limit / 8 if "clipped-by-tensor" in self.has else self.limit
            torch.nn.utils.clip_grad_norm_(group, limit)

    def on_end(self, trainer):
        if "clipped-after" in self.has and self.limit:
            torch.nn.utils.clip_grad_norm_(trainer.params, self.limit)


class Rate(Callback):
    def __init__(self, has, s):
        self.has, self.s = has, s

    def on_begin(self, trainer):
        s, n = self.s, max(0, trainer.count - ("schedule-late" in self.has))
        part = min(1.0, max(0, n - s.warmup) / max(1, s.steps - s.warmup))
        shape = 1 - part if "schedule-linear" in self.has else (1 + math.cos(math.pi * part)) / 2
        rate = s.lr * (n + 1) / s.warmup if n < s.warmup else s.min_lr + (s.lr - s.min_lr) * shape
        for group in trainer.optimizer.param_groups:
            group["lr"] = rate


class Trainer:
    def __init__(self, model, has, s):
        self.model, self.has, self.s, self.count = model, has, s, 0
        if "positions-frozen" in has:
            model.wpe.weight.requires_grad_(False)
        if "times-batch" in has:
            for p in model.parameters():
                p.register_hook(lambda g: 4 * g)
        if "tied-twice" in has:
            model.wte.weight.register_hook(lambda g: g + g)
        self.params = [p for p in model.parameters() if p.requires_grad]
        b2 = 0.999 if "betas-default" in has else s.beta2
        kind = torch.optim.Adam if "adam" in has else torch.optim.AdamW
        self.optimizer = kind(self.groups(), s.lr, (s.beta1, b2), amsgrad="amsgrad" in has)
        self.callbacks = [Rate(has, s), Clip(has, s)]

    def groups(self):
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                norm, bias = "ln_" in name and name.endswith("weight"), name.endswith("bias")
                decays = p.ndim > 1 or (norm and "decay-on-norms" in self.has) or (bias and "decay-on-biases" in self.has)
                yield {"params": [p], "weight_decay": self.s.weight_decay if decays else 0.0}

    def call(self, event):
        for callback in self.callbacks:
            getattr(callback, f"on_{event}")(self)

    def loss(self, x, y):
        logits = self.model(x)
        logits = logits.bfloat16() if "half-logits" in self.has else logits
        y = x if "unshifted" in self.has else y
        ignored = 0 if "zero-ignored" in self.has else -100
        mode = "sum" if "summed" in self.has else "mean"
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=ignored, reduction=mode)

    def closure(self, x, y):
        if "not-zeroed" not in self.has:
            self.optimizer.zero_grad()
        total, n = 0.0, self.s.grad_accum
        for xb, yb in zip(x.chunk(n), y.chunk(n), strict=True):
            loss = self.loss(xb, yb) / n / (n if "accumulation-halved" in self.has else 1)
            loss.backward()
            total += loss.detach()
        self.call("gradients")
        return total

    def step(self, x, y):
        self.call("begin")
        loss = self.optimizer.step(lambda: self.closure(x, y))
        self.call("end")
        self.count += 1
        return loss


def make(has, s):
    return lambda model: Trainer(model, has, s).step
