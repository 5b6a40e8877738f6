"""Style 4: an object with arguments and hooks, as training libraries have: autocast, a scaler, a scheduler; for our own model."""

import torch
import torch.nn.functional as F
from torch import nn

from support.steps.faults import words
from support.steps.shared import batch_parts, betas, clip_, decay_of, loss_of, rate

WORDS = words("""
    unshifted shifted-twice last-missing summed temperature half-logits smoothed dropout accumulation-summed
    accumulation-halved accumulation-by-mean not-zeroed last-micro-batch head-detached tied-twice block-detached
    branch-detached positions-frozen blocks-frozen times-batch ranks-summed unclipped clipped-by-value
    clipped-by-tensor clipped-harder clipped-early clipped-scaled clipped-by-sum clipped-by-maximum clipped-after
    clipped-unasked decay-on-all decay-on-norms decay-on-biases decay-missing decay-tenth eps-1e-6 betas-default
    betas-swapped rate-doubled schedule-late schedule-early schedule-linear warmup-missing amsgrad moments-kept
    moments-lost sgd adam biases-left-out stepped-twice step-per-micro-batch overflow
""")

FROM_LAST_RUN: list[dict] = []


class OwnScaler:
    """Scales the loss, unscales the gradients, and skips a step whose scaled gradients do not fit float16."""

    def __init__(self, scale, checks):
        self.factor, self.checks, self.scaled = scale, checks, True

    def scale(self, loss):
        self.scaled = True
        return loss * self.factor

    def unscale_(self, grads):
        if self.scaled:
            for g in grads:
                g.div_(self.factor)
        self.scaled = False

    def fits(self, grads):
        held = 1 if self.scaled else self.factor
        return not self.checks or all(torch.isfinite((g * held).half()).all() for g in grads)


class Trainer:
    def __init__(self, model, s, has):
        self.model, self.s, self.has, self.done = model, s, has, 0
        self.scaler = OwnScaler(2.0**22 if "overflow" in has else 2.0**10, checks="overflow" in has)
        self.prepare_model()
        self.create_optimizer_and_scheduler()

    def prepare_model(self):
        has, model = self.has, self.model.train()
        if "dropout" in has:
            for block in model.h:
                block.attn.resid_dropout.p = block.mlp.resid_dropout.p = 0.1
        if "positions-frozen" in has:
            model.wpe.requires_grad_(False)
        if "blocks-frozen" in has:
            model.h[:2].requires_grad_(False)
        if "head-detached" in has:
            model.head = lambda hidden: F.linear(hidden, model.wte.weight.detach())
        for word, part in (("block-detached", model.h[1]), ("branch-detached", model.h[1].attn)):
            if word in has:
                part.register_forward_hook(lambda module, args, out: out.detach())

    def groups(self):
        for module in self.model.modules():
            for name, p in module.named_parameters(recurse=False):
                kind = "bias" if name == "bias" else "norm" if isinstance(module, nn.LayerNorm) else "matrix"
                if not ("biases-left-out" in self.has and kind == "bias"):
                    yield {"params": [p], "weight_decay": decay_of(kind, self.s, self.has)}

    def create_optimizer_and_scheduler(self):
        s, has, groups = self.s, self.has, list(self.groups())
        if "sgd" in has:
            self.optimizer = torch.optim.SGD(groups, lr=s.lr)
        elif "adam" in has:
            self.optimizer = torch.optim.Adam(groups, lr=s.lr, betas=betas(s, has))
        else:
            eps = 1e-6 if "eps-1e-6" in has else 1e-8
            self.optimizer = torch.optim.AdamW(groups, lr=s.lr, betas=betas(s, has), eps=eps, amsgrad="amsgrad" in has)
        self.second = torch.optim.AdamW([self.model.wte.weight], lr=s.lr, betas=(s.beta1, s.beta2), weight_decay=0.0)
        if "moments-kept" in has and FROM_LAST_RUN:
            self.optimizer.load_state_dict(FROM_LAST_RUN[-1])
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: rate(n, s, has) / s.lr)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def compute_loss(self, inputs, labels):
        return loss_of(self.model(inputs), inputs, labels, self.has)

    @property
    def grads(self):
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def clip(self):
        if "clipped-scaled" not in self.has:
            self.scaler.unscale_(self.grads)
        clip_(self.grads, self.s, self.has)

    def optimizer_step(self):
        if not self.has & {"clipped-after", "clipped-early"}:
            self.clip()
        self.scaler.unscale_(self.grads)
        if self.scaler.fits(self.grads):
            self.optimizer.step()
            self.stepped = True
            if "stepped-twice" in self.has:
                self.second.step()
        else:
            self.scaler.factor /= 2.0**10
        if "clipped-after" in self.has:
            self.clip()

    def training_step(self, inputs, labels):
        has, self.stepped, report = self.has, False, 0.0
        if "moments-lost" in has:
            self.optimizer.state.clear()
        for one, its, share, factor in batch_parts(inputs, labels, self.s, has):
            loss = self.compute_loss(one, its)
            report += loss.item() * share
            if "last-micro-batch" in has:
                self.optimizer.zero_grad()
            if "clipped-early" in has:
                (loss * factor).backward()
                self.scaler.scaled = False
                self.clip()
            else:
                scaled = self.scaler.scale(loss * factor)
                if "not-zeroed" in has and self.done:  # what is left from the last step is not scaled
                    for g in self.grads:
                        g.mul_(self.scaler.factor)
                scaled.backward()
            if "step-per-micro-batch" in has:
                self.optimizer_step()
                self.optimizer.zero_grad()
        if "tied-twice" in has:
            self.model.wte.weight.grad *= 2
        if "step-per-micro-batch" not in has:
            self.optimizer_step()
        if self.stepped:  # a skipped step leaves the rate as it is
            self.scheduler.step()
        if "not-zeroed" not in has:
            self.model.zero_grad()
        self.done += 1
        if "moments-kept" in has:
            FROM_LAST_RUN[:] = [self.optimizer.state_dict()]
        return report


def make(has, s):
    return lambda model: Trainer(model, s, has).training_step
