"""Style 3: a class that trains, with AdamW written by hand; for the port `mha`."""

import math

import torch
from torch import nn

from support.steps.faults import words
from support.steps.shared import batch_parts, betas, clip_, decay_of, loss_of, rate

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
        self.s, self.has, self.named, self.t = s, has, named, 0
        self.state = KEPT if "moments-kept" in has else {}

    @torch.no_grad()
    def step(self, lr):
        has, s = self.has, self.s
        self.t += 1
        (b1, b2), eps, t = betas(s, has), 1e-6 if "eps-1e-6" in has else 1e-8, self.t + ("corrected-late" in has)
        c1, c2 = (1.0, 1.0) if "uncorrected" in has else (1 - b1**t, 1 - b2**t)
        for number, (name, p) in enumerate(self.named):
            kind = "bias" if name.endswith("bias") else "norm" if "norm" in name else "table" if "emb" in name else "matrix"
            if ("biases-left-out" in has and kind == "bias") or ("head-left-out" in has and name == "tok_emb.weight"):
                continue
            if p.grad is None or "sgd" in has:
                p -= lr * (0 if p.grad is None else p.grad)
                continue
            wd = decay_of(kind, s, has)
            g = p.grad + wd * p if "decay-coupled" in has else p.grad
            if number not in self.state or "moments-lost" in has:
                self.state[number] = {key: torch.zeros_like(p) for key in ("m", "v", "most")}
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

    def clip(self):
        clip_([p.grad for p in self.model.parameters() if p.grad is not None], self.s, self.has)

    def step(self, x, y):
        has, total = self.has, 0.0
        if "not-zeroed" not in has:
            self.model.zero_grad()
        for xb, yb, share, factor in batch_parts(x, y, self.s, has):
            loss = loss_of(self.model(xb), xb, yb, has)
            total += share * loss.item()
            if "last-micro-batch" in has:
                self.model.zero_grad()
            (loss * factor).backward()
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
        self.optimizer.step(rate(self.n, self.s, self.has))


def make(has, s):
    return lambda model: Training(model, s, has).step
