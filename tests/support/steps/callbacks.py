"""Style 7: a trainer class with callbacks; gradients change in hooks, AdamW is called with a closure."""

import torch

from support.steps.faults import words
from support.steps.plain import kind_of
from support.steps.shared import batch_parts, betas, clip_, decay_of, loss_of, rate

WORDS = words("""
    unshifted summed zero-ignored half-logits accumulation-halved not-zeroed times-batch positions-frozen tied-twice
    unclipped clipped-harder clipped-after clipped-by-tensor decay-on-norms decay-on-biases betas-default amsgrad adam
    schedule-late schedule-linear
""")


class Clip:
    def on_gradients(self, trainer):
        if "clipped-after" not in trainer.has:
            clip_([p.grad for p in trainer.params], trainer.s, trainer.has)


class Rate:
    def on_begin(self, trainer):
        for group in trainer.optimizer.param_groups:
            group["lr"] = rate(trainer.count, trainer.s, trainer.has)


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
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.params = [p for _, p in named]
        groups = [{"params": [p], "weight_decay": decay_of(kind_of(name, p), s, has)} for name, p in named]
        kind = torch.optim.Adam if "adam" in has else torch.optim.AdamW
        self.optimizer = kind(groups, s.lr, betas(s, has), amsgrad="amsgrad" in has)
        self.callbacks = [Rate(), Clip()]

    def call(self, event):
        for callback in self.callbacks:
            getattr(callback, f"on_{event}", lambda trainer: None)(self)

    def closure(self, x, y):
        if "not-zeroed" not in self.has:
            self.optimizer.zero_grad()
        total = 0.0
        for xb, yb, share, factor in batch_parts(x, y, self.s, self.has - {"times-batch"}):
            loss = loss_of(self.model(xb), xb, yb, self.has)
            (loss * factor).backward()
            total += loss.detach() * share
        self.call("gradients")
        return total

    def step(self, x, y):
        self.call("begin")
        loss = self.optimizer.step(lambda: self.closure(x, y))
        self.count += 1
        return loss


def make(has, s):
    return lambda model: Trainer(model, has, s).step
