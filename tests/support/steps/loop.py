"""Style 1: a loop over micro-batches, two groups of parameters, torch's AdamW, a cosine schedule; for the port `nano`."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from support.steps.faults import words

WORDS = words("""
    unshifted shifted-twice rolled last-missing summed smoothed temperature half-logits dropout accumulation-summed
    accumulation-halved accumulation-by-mean not-zeroed last-micro-batch untied tied-twice embedding-detached
    block-detached positions-frozen times-batch ranks-summed unclipped unclipped-at-first clipped-by-value clipped-by-tensor
    clipped-harder clipped-early clipped-by-maximum clipped-after clipped-unasked decay-on-all decay-on-norms
    decay-on-biases decay-not-on-embeddings decay-missing decay-tenth eps-1e-6 betas-swapped betas-default
    rate-doubled schedule-late schedule-early schedule-linear warmup-missing warmup-from-zero amsgrad moments-lost sgd adam
    biases-left-out head-left-out step-per-micro-batch zero-ignored
""")


def make(has, s):
    """``make_step`` with the faults that ``has`` names, for the settings ``s``."""

    def get_lr(it):
        if "schedule-late" in has:
            it = max(it - 1, 0)
        if "schedule-early" in has:
            it += 1
        if it < s.warmup and "warmup-missing" not in has:
            return s.lr * (it if "warmup-from-zero" in has else it + 1) / s.warmup
        ratio = min(1.0, (it - s.warmup) / max(1, s.steps - s.warmup))
        if "warmup-missing" in has:
            ratio = min(1.0, it / s.steps)
        coeff = 1 - ratio if "schedule-linear" in has else 0.5 * (1 + math.cos(math.pi * ratio))
        return s.min_lr + coeff * (s.lr - s.min_lr)

    def groups(model):
        decay, rest = [], []
        for name, p in model.named_parameters():
            matrix = p.dim() >= 2
            if "biases-left-out" in has and name.endswith("bias"):
                continue
            if "head-left-out" in has and name.endswith("wte.weight"):
                continue
            if "decay-on-norms" in has and "ln_" in name and name.endswith("weight"):
                matrix = True
            if "decay-on-biases" in has and name.endswith("bias"):
                matrix = True
            if "decay-not-on-embeddings" in has and ("wte" in name or "wpe" in name):
                matrix = False
            (decay if matrix or "decay-on-all" in has else rest).append(p)
        wd = 0.0 if "decay-missing" in has else s.weight_decay
        wd = wd / 10 if "decay-tenth" in has else wd
        return [{"params": decay, "weight_decay": wd}, {"params": rest, "weight_decay": 0.0}]

    def configure_optimizer(model):
        betas = (s.beta2, s.beta1) if "betas-swapped" in has else (s.beta1, s.beta2)
        betas = (0.9, 0.999) if "betas-default" in has else betas
        if "sgd" in has:
            return torch.optim.SGD(groups(model), lr=s.lr)
        if "adam" in has:
            return torch.optim.Adam(groups(model), lr=s.lr, betas=betas)
        eps = 1e-6 if "eps-1e-6" in has else 1e-8
        return torch.optim.AdamW(groups(model), lr=s.lr, betas=betas, eps=eps, amsgrad="amsgrad" in has)

    def loss_of(logits, x, y):
        if "half-logits" in has:
            logits = logits.bfloat16().to(logits.dtype)
        if "temperature" in has:
            logits = logits / 0.8
        if "unshifted" in has:
            y = x
        if "rolled" in has:
            y = torch.roll(x, -1, dims=1)
        if "shifted-twice" in has:
            logits, y = logits[:, :-1], y[:, 1:]
        if "last-missing" in has:
            logits, y = logits[:, :-1], y[:, :-1]
        return F.cross_entropy(
            logits.reshape(-1, logits.size(-1)),
            y.reshape(-1),
            ignore_index=0 if "zero-ignored" in has else -100,
            reduction="sum" if "summed" in has else "mean",
            label_smoothing=0.1 if "smoothed" in has else 0.0,
        )

    def make_step(model):
        model.train()
        if "dropout" in has:
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.1
        if "untied" in has:
            model.lm_head.weight = nn.Parameter(model.transformer["wte"].weight.detach().clone())
        if "positions-frozen" in has:
            model.transformer["wpe"].weight.requires_grad_(False)
        if "embedding-detached" in has:
            model.transformer["wte"].register_forward_hook(lambda module, args, out: out.detach())
        if "block-detached" in has:
            model.transformer["h"][1].register_forward_pre_hook(lambda module, args: (args[0].detach(),))
        state = {"it": 0, "optimizer": configure_optimizer(model)}

        def clip():
            parameters = [p for p in model.parameters() if p.grad is not None]
            limit = s.clip / 2 if "clipped-harder" in has else s.clip
            if "clipped-unasked" in has:
                limit = 1.0
            if not limit or "unclipped" in has or ("unclipped-at-first" in has and state["it"] < 2):
                return
            if "clipped-by-value" in has:
                nn.utils.clip_grad_value_(parameters, limit / 100)
            elif "clipped-by-tensor" in has:
                for p in parameters:
                    nn.utils.clip_grad_norm_(p, limit)
            else:
                kind = math.inf if "clipped-by-maximum" in has else 2.0
                nn.utils.clip_grad_norm_(parameters, limit if kind == 2.0 else limit / 50, norm_type=kind)

        def step(x, y):
            if "moments-lost" in has:
                state["optimizer"] = configure_optimizer(model)
            optimizer = state["optimizer"]
            for group in optimizer.param_groups:
                group["lr"] = get_lr(state["it"]) * (2 if "rate-doubled" in has else 1)
            parts = list(zip(x.chunk(s.grad_accum), y.chunk(s.grad_accum), strict=True))
            real = int((y != -100).sum())
            if "ranks-summed" in has:
                parts = list(zip(x.chunk(2), y.chunk(2), strict=True))
            total = 0.0
            for xb, yb in parts:
                logits, _ = model(xb)
                loss = loss_of(logits, xb, yb)
                share = int((yb != -100).sum()) / real if "accumulation-by-mean" not in has else 1 / len(parts)
                if len(parts) == 1 or "summed" in has:
                    share = 1.0
                total += float(loss.detach()) * share / (len(parts) if "ranks-summed" in has else 1)
                if "accumulation-summed" in has or "ranks-summed" in has:
                    share = 1.0
                if "accumulation-halved" in has:
                    share /= len(parts)
                if "last-micro-batch" in has:
                    optimizer.zero_grad()
                (loss * share * (len(x) if "times-batch" in has else 1)).backward()
                if "clipped-early" in has:
                    clip()
                if "step-per-micro-batch" in has:
                    clip()
                    optimizer.step()
                    optimizer.zero_grad()
            if "tied-twice" in has:
                model.transformer["wte"].weight.grad += model.lm_head.weight.grad
            if "clipped-early" not in has and "clipped-after" not in has and "step-per-micro-batch" not in has:
                clip()
            if "step-per-micro-batch" not in has:
                optimizer.step()
            if "clipped-after" in has:
                clip()
            if "not-zeroed" not in has:
                optimizer.zero_grad(set_to_none=True)
            state["it"] += 1
            return total

        return step

    return make_step
