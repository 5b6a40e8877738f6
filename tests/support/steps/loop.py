"""Style 1: a loop over micro-batches, two groups of parameters, torch's AdamW, a cosine schedule; for the port `nano`."""

import torch
from torch import nn

from support.steps.faults import words
from support.steps.shared import batch_parts, betas, clip_, decay_of, loss_of, rate

WORDS = words("""
    unshifted shifted-twice rolled last-missing summed smoothed temperature half-logits dropout accumulation-summed
    accumulation-halved accumulation-by-mean not-zeroed last-micro-batch untied tied-twice embedding-detached
    block-detached positions-frozen times-batch ranks-summed unclipped unclipped-at-first clipped-by-value clipped-by-tensor
    clipped-harder clipped-early clipped-by-maximum clipped-after clipped-unasked decay-on-all decay-on-norms
    decay-on-biases decay-not-on-embeddings decay-missing decay-tenth eps-1e-6 betas-swapped betas-default
    rate-doubled schedule-late schedule-early schedule-linear warmup-missing warmup-from-zero amsgrad moments-lost sgd adam
    biases-left-out head-left-out step-per-micro-batch zero-ignored
""")


def kind_of(name, p):
    """What a parameter is, by its name."""
    if p.dim() < 2:
        return "norm" if "ln_" in name and name.endswith("weight") else "bias"
    return "table" if "wte" in name or "wpe" in name else "matrix"


def make(has, s):
    """``make_step`` with the faults that ``has`` names, for the settings ``s``."""

    def configure_optimizer(model):
        left_out = ("bias",) * ("biases-left-out" in has) + ("wte.weight",) * ("head-left-out" in has)
        named = [(name, p) for name, p in model.named_parameters() if not name.endswith(left_out)]
        groups = [{"params": [p], "weight_decay": decay_of(kind_of(name, p), s, has)} for name, p in named]
        if "sgd" in has:
            return torch.optim.SGD(groups, lr=s.lr)
        if "adam" in has:
            return torch.optim.Adam(groups, lr=s.lr, betas=betas(s, has))
        eps = 1e-6 if "eps-1e-6" in has else 1e-8
        return torch.optim.AdamW(groups, lr=s.lr, betas=betas(s, has), eps=eps, amsgrad="amsgrad" in has)

    def make_step(model):
        parts = model.train().transformer
        for module in model.modules():
            if "dropout" in has and isinstance(module, nn.Dropout):
                module.p = 0.1
        if "untied" in has:
            model.lm_head.weight = nn.Parameter(parts["wte"].weight.detach().clone())
        if "positions-frozen" in has:
            parts["wpe"].weight.requires_grad_(False)
        if "embedding-detached" in has:
            parts["wte"].register_forward_hook(lambda module, args, out: out.detach())
        if "block-detached" in has:
            parts["h"][1].register_forward_pre_hook(lambda module, args: (args[0].detach(),))
        state = {"it": 0, "optimizer": configure_optimizer(model)}

        def clip():
            if not ("unclipped-at-first" in has and state["it"] < 2):
                clip_([p.grad for p in model.parameters() if p.grad is not None], s, has)

        def step(x, y):
            if "moments-lost" in has:
                state["optimizer"] = configure_optimizer(model)
            optimizer, total = state["optimizer"], 0.0
            for group in optimizer.param_groups:
                group["lr"] = rate(state["it"], s, has)
            for xb, yb, share, factor in batch_parts(x, y, s, has):
                loss = loss_of(model(xb)[0], xb, yb, has)
                total += float(loss.detach()) * share
                if "last-micro-batch" in has:
                    optimizer.zero_grad()
                (loss * factor).backward()
                if has & {"clipped-early", "step-per-micro-batch"}:
                    clip()
                if "step-per-micro-batch" in has:
                    optimizer.step()
                    optimizer.zero_grad()
            if "tied-twice" in has:
                parts["wte"].weight.grad += model.lm_head.weight.grad
            if not has & {"clipped-early", "clipped-after", "step-per-micro-batch"}:
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
