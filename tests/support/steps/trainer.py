"""Style 4: an object with arguments and hooks, as training libraries have: autocast, a scaler, a scheduler; for our own model."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from support.steps.faults import words

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
        has, model = self.has, self.model
        model.train()
        if "dropout" in has:
            for block in model.h:
                block.attn.resid_dropout.p = block.mlp.resid_dropout.p = 0.1
        if "positions-frozen" in has:
            model.wpe.requires_grad_(False)
        if "blocks-frozen" in has:
            model.h[:2].requires_grad_(False)
        if "head-detached" in has:
            model.head = lambda hidden: F.linear(hidden, model.wte.weight.detach())
        if "block-detached" in has:
            model.h[1].register_forward_hook(lambda module, args, out: out.detach())
        if "branch-detached" in has:
            model.h[1].attn.register_forward_hook(lambda module, args, out: out.detach())

    def groups(self):
        has = self.has
        decayed, plain = [], []
        for module in self.model.modules():
            for name, p in module.named_parameters(recurse=False):
                if "biases-left-out" in has and name == "bias":
                    continue
                is_norm = isinstance(module, nn.LayerNorm)
                undecayed = name == "bias" or is_norm
                if "decay-on-norms" in has and is_norm and name == "weight":
                    undecayed = False
                if "decay-on-biases" in has and name == "bias":
                    undecayed = False
                if "decay-on-all" in has:
                    undecayed = False
                (plain if undecayed else decayed).append(p)
        wd = self.s.weight_decay * (0.0 if "decay-missing" in has else 0.1 if "decay-tenth" in has else 1.0)
        return [{"params": decayed, "weight_decay": wd}, {"params": plain, "weight_decay": 0.0}]

    def create_optimizer_and_scheduler(self):
        s, has = self.s, self.has
        betas = (s.beta2, s.beta1) if "betas-swapped" in has else (0.9, 0.999) if "betas-default" in has else (s.beta1, s.beta2)
        lr = s.lr * 2 if "rate-doubled" in has else s.lr
        if "sgd" in has:
            self.optimizer = torch.optim.SGD(self.groups(), lr=lr)
        elif "adam" in has:
            self.optimizer = torch.optim.Adam(self.groups(), lr=lr, betas=betas)
        else:
            eps = 1e-6 if "eps-1e-6" in has else 1e-8
            self.optimizer = torch.optim.AdamW(self.groups(), lr=lr, betas=betas, eps=eps, amsgrad="amsgrad" in has)
        self.second = torch.optim.AdamW([self.model.wte.weight], lr=s.lr, betas=(s.beta1, s.beta2), weight_decay=0.0)
        if "moments-kept" in has and FROM_LAST_RUN:
            self.optimizer.load_state_dict(FROM_LAST_RUN[-1])
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)

    def factor(self, n):
        s, has = self.s, self.has
        n = max(0, n - 1) if "schedule-late" in has else n + 1 if "schedule-early" in has else n
        if n < s.warmup and "warmup-missing" not in has:
            return (n + 1) / s.warmup
        part = min(1.0, max(0, n - s.warmup) / max(1, s.steps - s.warmup))
        least = s.min_lr / s.lr
        curve = 1 - part if "schedule-linear" in has else (1 + math.cos(math.pi * part)) / 2
        return least + (1 - least) * curve

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def compute_loss(self, inputs, labels):
        has, logits = self.has, self.model(inputs)
        if "half-logits" in has:
            logits = logits.to(torch.bfloat16).to(logits.dtype)
        if "temperature" in has:
            logits = logits / 2
        if "unshifted" in has:
            labels = inputs
        if "shifted-twice" in has:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        if "last-missing" in has:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., :-1].contiguous()
        criterion = nn.CrossEntropyLoss(
            reduction="sum" if "summed" in has else "mean", label_smoothing=0.1 if "smoothed" in has else 0.0
        )
        return criterion(logits.view(-1, logits.size(-1)), labels.reshape(-1))

    @property
    def grads(self):
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def clip(self):
        has, limit = self.has, self.s.clip
        limit = limit * 2 if "clipped-harder" in has else 0.25 if "clipped-unasked" in has else limit
        if not limit or "unclipped" in has:
            return
        if "clipped-scaled" not in has:
            self.scaler.unscale_(self.grads)
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if "clipped-by-value" in has:
            nn.utils.clip_grad_value_(parameters, 0.01)
        elif "clipped-by-tensor" in has:
            for p in parameters:
                nn.utils.clip_grad_norm_([p], limit / 4)
        elif "clipped-by-sum" in has or "clipped-by-maximum" in has:
            kind = 1.0 if "clipped-by-sum" in has else math.inf
            nn.utils.clip_grad_norm_(parameters, limit if kind == 1 else limit / 30, norm_type=kind)
        else:
            nn.utils.clip_grad_norm_(parameters, limit)

    def optimizer_step(self):
        if "clipped-after" not in self.has and "clipped-early" not in self.has:
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
        has, s, self.stepped = self.has, self.s, False
        if "moments-lost" in has:
            self.optimizer.state.clear()
        count = 2 if "ranks-summed" in has else s.grad_accum
        real, report = int((labels != -100).sum()), 0.0
        for one, its in zip(inputs.chunk(count), labels.chunk(count), strict=True):
            loss = self.compute_loss(one, its)
            part = 1 / count if "accumulation-by-mean" in has else int((its != -100).sum()) / real
            part = 1.0 if "summed" in has or count == 1 else part
            report += loss.item() * part
            if "accumulation-summed" in has or "ranks-summed" in has:
                part = 1.0
            if "accumulation-halved" in has:
                part /= count
            if "last-micro-batch" in has:
                self.optimizer.zero_grad()
            if "clipped-early" in has:
                loss.mul(part * (len(inputs) if "times-batch" in has else 1)).backward()
                self.scaler.scaled = False
                self.clip()
            else:
                scaled = self.scaler.scale(loss * part * (len(inputs) if "times-batch" in has else 1))
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
    def make_step(model):
        return Trainer(model, s, has).training_step

    return make_step
