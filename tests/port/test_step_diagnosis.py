"""`diagnose_step` names the faults of training steps and says nothing of right ones. tools/step_table.py measures them all."""

import copy
import itertools
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.steps import COMBINED, FAULTY_STEPS, MEANINGS, module_of, right_model
from support.steps.right import RIGHT_STEPS
from support.steps.scoring import diagnosis_of, score_step
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import gpt2
from gpt2.errors import InputError
from gpt2.model import GPT2
from gpt2.port import diagnosis
from gpt2.port.diagnosis import examine_module
from gpt2.port.mapping.mapping import WeightMap
from gpt2.port.step.causes import STAGE
from gpt2.port.step.clipping import read_clipping
from gpt2.port.step.rules import ROUNDED, Rule, Track, directions, find_rule, fit
from gpt2.port.step.sessions import random_batch
from gpt2.port.step.settings import StepSettings
from gpt2.port.step.watching import Gradient, Sampled, Update
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import Place
from gpt2.port.terms.report import Diagnosis, Divergence

QUICK = ("climbs", "groups, fused", "unshifted decay-coupled unclipped", "accumulation-average-wrong", "update-rounded")


def each(names):
    """All of these, of which most are slow."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


# A right step, by its lines. By hand: an update without an optimizer.
STEP = """
def make_step(model):
    {prepare}
    params, state, calls = list(model.parameters()), {{}}, itertools.count()
    {groups}
    optimizer = {optimizer}
    def step(x, labels):
        {zero}
        total, step, attention_mask = 0.0, next(calls), labels.new_ones(labels.shape)
        {labels}
        all_targets = (labels != -100).sum()
        for x, y in zip(x.chunk(grad_accum), labels.chunk(grad_accum)):
            logits, targets = model(x).flatten(0, 1), y.flatten()
            {loss}
            {backward}
            total += float(loss.detach())
        {clip}
        {rate}
        {update}
        return total
    return step
"""
BY_HAND = """with torch.no_grad():
            for p in params:
                m, v, t = *(state.get(p) or (0, 0)), step + 1
                m, v, lr, weight_decay = b1 * m + (1 - b1) * p.grad, b2 * v + (1 - b2) * p.grad**2, rate(step), 0.1 * (p.ndim > 1)
                state[p], direction = (m, v), m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8)
                {decay}
                {adam}"""
LINES = {
    "prepare": "model.train()", "groups": 'groups = [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in params]',
    "optimizer": "torch.optim.AdamW(groups, lr, betas=(b1, b2))", "zero": "optimizer.zero_grad()",
    "labels": "pass", "loss": "F.cross_entropy(logits, targets)", "backward": "(loss / grad_accum).backward()",
    "clip": "torch.nn.utils.clip_grad_norm_(params, max_norm)", "update": "optimizer.step()",
    "rate": "for group in optimizer.param_groups: group['lr'] = rate(step)",
    "decay": "p -= lr * weight_decay * p", "adam": "p -= lr * direction",
}  # fmt: skip
SCALED = {
    "prepare": "scaler = torch.amp.GradScaler('cpu', init_scale=1024, growth_interval=1)",  # a scale that grows in each call
    "clip": "scaler.unscale_(optimizer); torch.nn.utils.clip_grad_norm_(params, max_norm)",
    "update": "scaler.step(optimizer); scaler.update()", "backward": "scaler.scale(loss / grad_accum).backward()",
}  # fmt: skip
SET = {
    "optim.lr": 1e-3, "optim.warmup": 3, "optim.beta1": 0.9, "optim.beta2": 0.95, "optim.weight_decay": 0.1, "optim.clip": 0.05,
    "batch_size": 4,
}  # fmt: skip
KINDS = {
    "parts": {"grad_accum": 2}, "four": {"grad_accum": 4}, "padded": {"data.prompt": "p"}, "short": {"context": 8},
    "free": {"optim.clip": 0.0}, "flat": {"optim.warmup": None}, "any": {"optim.lr": None, "optim.warmup": None},
}  # fmt: skip
KNOWN = {
    "lr": 1e-3, "b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "max_norm": 0.05, "rate": lambda step: 1e-3 * min(1, (step + 1) / 3),
    "torch": torch, "F": F, "itertools": itertools, "device": "cpu", "dtype": torch.bfloat16,
}  # fmt: skip


def step_of(parts: int = 1, **lines: str):
    """`make_step` of STEP with these lines in place of the right ones."""
    lines = LINES | lines
    lines["loss"] = lines["loss"] if "loss =" in lines["loss"] else f"loss = {lines['loss']}"
    lines["update"] = lines["update"].format(**lines)
    space = KNOWN | {"grad_accum": parts, "last": {}}
    exec(STEP.format(**lines), space)
    return space["make_step"]


PLAIN = {"clip": "pass", "rate": "pass"}


def test_a_bias_without_effect_need_not_move():
    """Bug: the gradient of a key's bias is rounding, so SGD does not move it; it was called missing from the optimizer."""
    make_step = step_of(optimizer="torch.optim.SGD(params, lr=1e-3)", **PLAIN)
    said = gpt2.diagnose_step(module_of("heads"), make_step, right_model())
    assert "parameter-missing" not in [cause.id for cause in said.causes], said.table()


def test_the_loss_of_later_calls_is_judged():
    """Only the first call's loss was: a step that is right once was equal."""
    smoothed = "F.cross_entropy(logits, targets, label_smoothing=0.1 * (step > 1))"
    make_step = step_of(labels="labels = labels if step == 0 else x", loss=smoothed, **PLAIN)
    said = gpt2.diagnose_step(module_of("ours", 1), make_step, right_model(1))
    assert {cause.id for cause in said.causes} == {"labels-not-shifted", "label-smoothing"}, said.table()


def test_a_fault_of_padded_and_of_usual_batches_is_named_once():
    """It was listed twice, where the settings have a prompt: once from the batches in which some targets are -100."""
    settings = {"grad_accum": 2, "data.prompt": "p"}
    make_step = step_of(2, backward="(loss / 4).backward()", **PLAIN)
    causes = gpt2.diagnose_step(module_of("ours", 1), make_step, right_model(1), settings=settings).causes
    places = [(one.id, one.where) for one in causes]
    assert places.count(("accumulation-average-wrong", "loss")) == 1
    assert len(set(places)) == len(places)
    with pytest.raises(InputError, match=r"model alone.*missing 1 required"):
        gpt2.diagnose_step(module_of("ours"), lambda model, lr: None, right_model())
    with pytest.raises(InputError, match=r"takes a torch\.nn\.Module.*str"):
        gpt2.diagnose_step("gpt2", make_step, right_model())


GROUPS = "groups = [{'params': [p], 'weight_decay': 0.1 * %s} for name, p in model.named_parameters()]"
ALL = "F.cross_entropy(logits, targets, reduction='none')"
TWO = "groups = [{'params': [p for p in params if (p.ndim > 1) is on], 'weight_decay': 0.1 * on} for on in (True, False)]"
HALF = "model.forward = torch.autocast('cpu', torch.float16)(model.forward)"
SECOND = "torch.optim.AdamW(groups[:1], lr, (b1, b2))"
PARTS = "(loss / grad_accum).backward(); "
# A cause: the line that has it (and that which its fix mends, if it is another), what stands there, and kinds of the step.
HEALED = {
    "labels-not-shifted": ("loss", "F.cross_entropy(logits, x.flatten())", ""),
    "labels-shifted-twice": ("loss", "F.cross_entropy(model(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten())", ""),
    "labels-wrong": ("loss", "F.cross_entropy(logits, x.roll(1, 1).flatten())", ""),
    "last-token-in-loss": ("loss", "F.cross_entropy(logits, x.roll(-1, 1).flatten())", ""),
    "last-token-missing": ("loss", "F.cross_entropy(model(x)[:, :-1].flatten(0, 1), y[:, :-1].flatten())", ""),
    "tokens-left-out": ("loss", "F.cross_entropy(model(x)[:, 1:].flatten(0, 1), y[:, 1:].flatten())", ""),
    "loss-average-wrong": ("loss", f"({ALL} * torch.linspace(0.5, 1.5, 64)).mean()", ""),
    "loss-not-averaged": ("loss", f"{ALL}.sum()", ""),
    "padding-in-average": ("loss", f"{ALL}.mean()", "padded"),
    "logits-scaled": ("loss", "F.cross_entropy(0.7 * logits, targets)", ""),
    "logits-half-precision": ("loss", "F.cross_entropy(logits.half(), targets)", ""),
    "label-smoothing": ("loss", "F.cross_entropy(logits, targets, label_smoothing=0.1)", ""),
    "token-ignored": ("labels", "labels = labels.masked_fill(labels == model.config.eos_token_id, -100)", ""),
    "accumulation-not-averaged": ("backward", "loss.backward()", "parts"),
    "accumulation-average-wrong": ("backward", "(loss / grad_accum).backward()", "parts padded"),
    "gradient-scaled": ("backward", "(3 * loss / grad_accum).backward()", ""),
    "gradient-not-zeroed": ("zero", "pass", ""),
    "accumulation-last-only": ("backward>zero", "optimizer.zero_grad(); (loss / grad_accum).backward()", "parts"),
    "clip-missing": ("clip", "pass", ""),
    "clip-unwanted": ("clip", LINES["clip"], "free"),
    "clip-before-accumulation": ("backward>clip", PARTS + LINES["clip"], "parts"),
    "clip-before-unscaling": ("clip", LINES["clip"] + "; scaler.unscale_(optimizer)", "scaled"),
    "parameters-frozen": ("prepare", "model.wpe.requires_grad_(False)", ""),
    "clip-by-value": ("clip", "torch.nn.utils.clip_grad_value_(params, 1e-4)", ""),
    "clip-norm": ("clip", "torch.nn.utils.clip_grad_norm_(params, 1e-3, float('inf'))", ""),
    "clip-per-tensor": ("clip", "[torch.nn.utils.clip_grad_norm_(p, 0.01) for p in params]", ""),
    "clip-threshold": ("clip", "torch.nn.utils.clip_grad_norm_(params, 0.01)", ""),
    "optimizer-sgd": ("optimizer", "torch.optim.SGD(params, lr)", ""),
    "optimizer-other": ("optimizer", "torch.optim.RMSprop(groups, lr)", ""),
    "betas-swapped": ("optimizer", "torch.optim.AdamW(groups, lr, (b2, b1))", ""),
    "betas-wrong": ("optimizer", "torch.optim.AdamW(groups, lr)", ""),
    "eps-wrong": ("optimizer", "torch.optim.AdamW(groups, lr, (b1, b2), 1e-6)", ""),
    "amsgrad": ("optimizer", "torch.optim.AdamW(groups, lr, (b1, b2), amsgrad=True)", ""),
    "decay-coupled": ("optimizer", "torch.optim.Adam(groups, lr, (b1, b2))", ""),
    "decay-on-all": ("groups", "groups = [{'params': params, 'weight_decay': 0.1}]", ""),
    "decay-on-norms": ("groups", GROUPS % "(p.ndim > 1 or 'bias' not in name)", ""),
    "decay-on-biases": ("groups", GROUPS % "(p.ndim > 1 or 'bias' in name)", ""),
    "decay-not-on-embeddings": ("groups", GROUPS % "(p.ndim > 1 and name[0] == 'h')", ""),
    "decay-missing": ("groups", GROUPS % 0, ""),
    "decay-wrong": ("groups", GROUPS % "0.1 * (p.ndim > 1)", ""),
    "decay-after-update": ("adam", "p -= lr * direction; p -= lr * weight_decay * p", "undecayed"),
    "decay-without-rate": ("decay", "p -= weight_decay * p", ""),
    "bias-correction-step": ("adam", "p -= lr * m / (1 - b1 ** (t + 1)) / ((v / (1 - b2 ** (t + 1))).sqrt() + 1e-8)", ""),
    "eps-before-correction": ("adam", "p -= lr * m / (1 - b1**t) / ((v.sqrt() + 1e-8) / (1 - b2**t) ** 0.5)", ""),
    "eps-inside-root": ("adam", "p -= lr * m / (1 - b1**t) / (v / (1 - b2**t) + 1e-8).sqrt()", ""),
    "bias-correction-missing": ("adam", "p -= lr * m / (v.sqrt() + 1e-8)", ""),
    "schedule-step": ("rate", "for group in optimizer.param_groups: group['lr'] = rate(step + 1)", ""),
    "schedule-wrong": ("rate", "pass", ""),
    "rate-wrong": ("rate", "for group in optimizer.param_groups: group['lr'] = 2e-3", "flat"),
    "momentum-kept": ("optimizer", "last.setdefault(0, torch.optim.AdamW(groups, lr, (b1, b2)))", ""),
    "momentum-lost": ("zero>optimizer", "optimizer = torch.optim.AdamW(groups, lr, (b1, b2)); optimizer.zero_grad()", ""),
    "parameter-missing": ("groups", f"{GROUPS[:-1]} if name != 'wpe.weight']" % "(p.ndim > 1)", ""),
    "parameter-twice": ("update>groups", f"optimizer.step(); state.setdefault(0, {SECOND}).step()", ""),
    "step-per-micro-batch": ("backward>update", PARTS + LINES["clip"] + "; optimizer.step(); optimizer.zero_grad()", "parts"),
    "update-skipped": ("prepare", f"{HALF}; scaler = torch.amp.GradScaler('cpu', init_scale=2.0**100)", "scaled"),
    "update-rounded": ("prepare", "model.bfloat16()", ""),
}
# What the right step of a kind has in place of LINES; SCALED, or BY_HAND where a rule is written out, in any case.
RIGHT_LINES = {"free": {"clip": "pass"}, "flat": {"rate": "pass"}}
RIGHT_LINES["parts padded"] = {"backward": "(F.cross_entropy(logits, targets, reduction='sum') / all_targets).backward()"}
FOLLOWING = {"step-per-micro-batch": ["schedule-wrong"], "update-skipped": ["logits-half-precision"]}
IDS = [meaning.ids[0] for meaning in MEANINGS.values()]
ALONE = [word for n, (word, id) in enumerate(zip(MEANINGS, IDS, strict=True)) if id in IDS[:n] or id not in HEALED]  # not healed
EXAMINED: dict[tuple[type, int], tuple[Diagnosis, WeightMap | None]] = {}
# Steps of strangers: the kind, the lines, and all causes that are named; None: the update is left open, and nothing named.
TENFOLD = "for group in optimizer.param_groups: group['lr'] = 1e-2"
SINES = "direction.sin() if any(p is one for one in params[:3]) else"
ZERO, FUSED = "model.zero_grad()", "torch.optim.AdamW(groups, lr, (b1, b2), fused=True)"
FLAT = {
    "prepare": "flat = torch.cat([p.detach().flatten() for p in model.parameters()])", "zero": ZERO, "rate": "pass",
    "groups": "for p, own in zip(params, flat.split([p.numel() for p in params])): p.data = own.view_as(p)",
    "optimizer": "torch.cat([torch.full((p.numel(),), 0.1 * (p.ndim > 1)) for p in params])  # the decays",
    "clip": "g = torch.cat([p.grad.flatten() for p in params]); g *= min(1, max_norm / (g.norm() + 1e-6))",
    "update": """(m, v), lr, t = state.get(0) or (0, 0), rate(step), step + 1
        state[0] = m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        flat.sub_(lr * optimizer * flat).sub_(lr * m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8))""",
}  # fmt: skip
MASTER = {
    "prepare": "master = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]", "zero": ZERO,
    "groups": LINES["groups"].replace("params]", "master]"),
    "clip": "for p, own in zip(params, master): own.grad = p.grad.float()",
    "update": f"{LINES['clip'].replace('params', 'master')}; optimizer.step(); [p.data.copy_(q) for p, q in zip(params, master)]",
}  # fmt: skip
MEANS = f"for p, *g in zip(params, state[2 * step], state[2 * step + 1]): p.grad = sum(g) / 2\n        {LINES['clip']}"
LION = "m = state.get(-id(p), 0); p -= lr * (0.9 * m + 0.1 * p.grad).sign(); state[-id(p)] = 0.99 * m + 0.01 * p.grad"
LAMB = "u = direction + weight_decay * p; p -= lr * u * p.norm() / u.norm()"
PAD = "model.register_forward_hook(lambda part, args, out: F.pad(out, (0, 5)))"
ROLLED = "F.cross_entropy(logits, torch.cat([y[:, 1:], x[:, :1]], 1).flatten())"
HELD = {"zero": "pass", "backward": "(loss / 4).backward()", "clip": "pass"}
HELD |= {"update": f"if step % 4 == 3: {LINES['clip']}; optimizer.step(); {ZERO}"}
GROWING = {"backward": "(loss * 2.0**step).backward()", "clip": "[p.grad.div_(2.0**step) for p in params]"}
AGAIN = f"optimizer.step(); {ZERO}; F.cross_entropy(model(x).flatten(0, 1), targets).backward()"
EACH_PART = {"backward": HEALED["step-per-micro-batch"][1], "update": "pass"}
APART, LATE, COUPLED = "padding-in-average accumulation-not-averaged", "decay-after-update decay-on-all", "decay-coupled"
STRANGERS: dict[str, tuple[str, dict[str, str], str | None]] = {
    "one buffer, clipped elsewhere": ("", FLAT, ""),
    "master weights, clipped": ("", MASTER, ""),
    "unscaled by the optimizer": ("scaled free", {"optimizer": FUSED, "clip": "pass"}, ""),
    "a rate for each": ("hand", {"decay": "pass", "adam": LAMB}, "optimizer-other"),
    "one moment corrected": ("hand", {"adam": "p -= lr * m / ((v / (1 - b2**t)).sqrt() + 1e-8)"}, "bias-correction-missing"),
    "steps not counted": ("hand", {"adam": "p -= lr * m / (1 - b1) / ((v / (1 - b2)).sqrt() + 1e-8)"}, "bias-correction-step"),
    "half a direction": ("hand", {"adam": "p -= lr * 0.5 * direction"}, "rate-wrong"),
    "one group scheduled": ("", {"groups": TWO, "rate": "optimizer.param_groups[0]['lr'] = rate(step)"}, "schedule-wrong"),
    "rate and decay": ("flat", {"groups": GROUPS % "0.1 * (p.ndim > 1)", "rate": TENFOLD}, "rate-wrong decay-wrong"),
    "Adagrad, unclipped": ("", {"optimizer": "torch.optim.Adagrad(groups, lr)", "clip": "pass"}, "clip-missing"),
    "some by SGD": ("hand", {"adam": f"p -= lr * ({SINES} direction if p.ndim > 1 else p.grad)"}, "optimizer-sgd"),
    "decay unscheduled": ("hand", {"decay": "p -= 1e-3 * weight_decay * p"}, "decay-wrong"),
    "climbs": ("", {"optimizer": FUSED.replace("fused", "maximize")}, "rate-wrong"),
    "clipped after each of four": ("four", {"backward": PARTS + LINES["clip"]}, "clip-before-accumulation"),
    "rolled and shifted": ("", {"loss": ROLLED}, "labels-shifted-twice last-token-in-loss"),
    "a padded row's last": ("padded short", {"labels": "labels = labels.masked_fill(labels == 0, -100)"}, "token-ignored"),
    "rounded weights": ("", {"prepare": "model.h[0].attn.c_attn.weight.data.mul_(1 + 1e-7)"}, ""),
    "columns, noise": ("", {"prepare": PAD, "loss": "F.cross_entropy(logits[:, :67], targets)", "labels": "torch.randn(3)"}, ""),
    "hooks of all": ("", {"prepare": "[p.register_hook(lambda g: g / 2) for p in model.parameters()]"}, "gradient-scaled"),
    "other ids": ("", {"labels": "x = x.clone(); x[:, 3] = 5"}, None),
    "another function": ("", {"prepare": "model.ln_f.register_forward_hook(lambda part, args, out: 2 * out)"}, None),
    "Lion, unclipped": ("hand", {"clip": "pass", "adam": LION}, "clip-missing optimizer-other"),
    "exchanged": ("hand any", {"adam": "p -= lr * m / (1 - b2**t) / ((v / (1 - b1**t)).sqrt() + 1e-8)"}, "bias-correction-step"),
    "a loss that is halved": ("", {"backward": "(loss * (0.5 if step else 1)).backward()"}, "gradient-scaled"),
    "Adagrad for each part": ("parts", EACH_PART | {"optimizer": "torch.optim.Adagrad(groups, lr)"}, "step-per-micro-batch"),
    "biases are not zeroed": ("", {"zero": "for p in params: p.grad = p.grad if p.ndim == 1 else None"}, "gradient-not-zeroed"),
    "noise": ("", {"clip": f"[p.grad.add_(torch.randn_like(p)) for p in params]; {LINES['clip']}"}, None),
    "parts averaged": ("parts", {"backward": "state[len(state)] = torch.autograd.grad(loss, params)", "clip": MEANS}, ""),
    "Nesterov": ("", {"optimizer": "torch.optim.SGD(params, lr, 0.9, nesterov=True)"}, "optimizer-sgd"),
    "no loss": ("", {"loss": "0 * F.cross_entropy(logits, targets)"}, "gradient-scaled"),
    "a penalty": ("", {"loss": f"{LINES['loss']} + 0.05 * sum((p**2).sum() for p in params if p.ndim > 1)"}, "decay-coupled"),
    "over four calls": ("", HELD, "update-skipped"),
    "clipped, then unscaled": ("", {**GROWING, "clip": f"{LINES['clip']}; {GROWING['clip']}"}, "clip-threshold"),
    "a scale that grows": ("free", GROWING, ""),
    "the same tokens again": ("free flat", {"clip": AGAIN, "rate": "pass"}, None),
    "centred": ("", {"groups": GROUPS % 0, "clip": "[p.grad.sub_(p.grad.mean()) for p in params[:9]]"}, "decay-missing"),
    "decay in .grad": ("free", {"groups": GROUPS % 0, "clip": "[p.grad.add_(0.1 * p) for p in params if p.ndim > 1]"}, COUPLED),
    "all decay at last": ("hand", {"decay": "pass", "adam": "p -= lr * direction; p -= lr * 0.1 * p"}, LATE),
    "sums of rows": ("padded", {"loss": f"{ALL}.sum() / 4"}, "loss-not-averaged"),
    "sums of parts": ("parts padded", {"loss": f"{ALL}.mean()", "backward": "loss.backward()"}, APART),
}


@pytest.fixture
def examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examine the forward pass of a kind of module once for all its steps; the first tests of this file examine each."""

    def once(module: nn.Module, ours: GPT2, *rest: Any) -> tuple[Diagnosis, WeightMap | None]:
        kind = type(module), len(ours.h)
        if kind not in EXAMINED:
            EXAMINED[kind] = examine_module(copy.deepcopy(module), ours, *rest)  # the module itself is trained
        return EXAMINED[kind]

    monkeypatch.setattr(diagnosis, "examine_module", once)


def settings_of(kind: str) -> dict[str, Any]:
    settings = SET | {"grad_accum": 1}
    for word in kind.split():
        settings |= KINDS.get(word, {})
    return {key: value for key, value in settings.items() if value is not None}


@cache
def said_of(kind: str, lines: tuple[tuple[str, str], ...]) -> Diagnosis:
    """What is said of a step of these lines, and a model of one block; many corrections give the same step."""
    settings = settings_of(kind)
    step = step_of(settings["grad_accum"], **dict(lines))
    return gpt2.diagnose_step(module_of("ours", 1), step, right_model(1), settings=settings)


def trained(kind: str, lines: Mapping[str, str]) -> Tensor:
    """The losses and then the parameters after four steps of these lines, in float64."""
    settings, module = StepSettings.of(settings_of(kind)), module_of("ours", 1).double()
    step = step_of(settings.grad_accum, **lines)(module)
    batches = [random_batch(module.config, settings, seed, padded=settings.padded) for seed in range(4)]
    losses = torch.tensor([float(step(batch.ids, batch.targets)) for batch in batches], dtype=torch.float64)
    return torch.cat([losses, *(p.detach().double().flatten() for p in module.parameters())])


@pytest.mark.usefixtures("examined_once")
@pytest.mark.parametrize("id", each(HEALED))
def test_a_correction_that_is_carried_out_heals_the_step(id: str) -> None:
    """The printed line was the one that the user had: `(loss / grad_accum)`; weights in bfloat16 were called detached."""
    faulty, wrong, kind = HEALED[id]
    slot, _, mended = faulty.partition(">")
    right = LINES | ({"update": BY_HAND} if slot in ("decay", "adam") else SCALED if kind == "scaled" else {})
    lines = right | ({"decay": "pass"} if kind == "undecayed" else {})
    right |= RIGHT_LINES.get(kind, {})
    assert said_of(kind, tuple(right.items())).ok
    found = said_of(kind, tuple((lines | {slot: wrong}).items()))
    causes = {cause.id: cause for cause in found.causes}
    assert causes.keys() == {id, *FOLLOWING.get(id, ())}, found.table()
    assert all(("as written" in cause.detail) == (id == "update-skipped") for cause in found.causes)  # not seen in float64
    mend = causes[id].fix.partition("  #")[0].replace("...", LINES["loss"])
    healed = lines | {"loss" if "loss = " in mend else mended or slot: mend}
    wanted, broken, made = (trained(kind, some) for some in (right, lines | {slot: wrong}, healed))
    near, far = (float((one - wanted).abs().max()) for one in (made, broken))
    if not (near < 1e-12 and far > 1e-6):  # else it is the right step, which the fault is not
        found = said_of(kind, tuple(healed.items()))
        assert found.ok, found.table()


@pytest.mark.usefixtures("examined_once")
@pytest.mark.parametrize("name", each(STRANGERS))
def test_what_strangers_write_is_named_or_equal(name: str) -> None:
    """Right steps were told of parameters that never change, of clipping, decay and a scale, others of faults of chance."""
    kind, own, ids = STRANGERS[name]
    right = LINES | {"hand": {"update": BY_HAND}, "scaled": SCALED}.get(kind.partition(" ")[0], {})
    found = said_of(kind, tuple((right | own).items()))
    verdict = "undetermined" if ids is None else "mismatch" if ids else "equal"
    assert (found.verdict, {cause.id for cause in found.causes}) == (verdict, set((ids or "").split())), found.table()


@pytest.mark.usefixtures("examined_once")
@pytest.mark.parametrize("name", each([*COMBINED, *ALONE]))
def test_the_causes_of_faults_are_named(name):
    """A fault of one stage must not hide one of another, nor be taken for another; what one says falsely, another may have."""
    found = score_step(name, FAULTY_STEPS[name], diagnosis_of(FAULTY_STEPS[name]))
    assert found.perfect, found.flaws()


@pytest.mark.usefixtures("examined_once")
@pytest.mark.parametrize("name", each(name for name in RIGHT_STEPS if name != "torch.compile"))
def test_right_steps_are_equal_and_their_modules_untouched(name):
    """Other ways to write the same training are no faults; and the author goes on with the module, which must not be trained."""
    step = RIGHT_STEPS[name]
    module = step.module()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    diagnosis = gpt2.diagnose_step(module, step.make_step, right_model(), settings=step.given)
    assert json.loads(diagnosis.to_json())["verdict"] == "equal", diagnosis.table()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None and p.requires_grad and p.dtype == torch.float32 for p in module.parameters())


@pytest.mark.slow
def test_a_head_of_its_own_is_named_where_the_forward_pass_differs_too():
    """The gradients are not compared then: scripts with a head of their own and another GELU were told of the GELU only."""
    step = RIGHT_STEPS["groups"]
    module = step.module()
    module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())
    module.transformer["ln_f"].weight.data += 0.1
    diagnosis = gpt2.diagnose_step(module, step.make_step, right_model(), settings=step.given)
    assert "tied-gradient-lost" in [cause.id for cause in diagnosis.causes], diagnosis.table()
    assert any("were not compared" in note for note in diagnosis.notes)


# A right step but for its settings, which nobody gives.
unset = step_of(optimizer="torch.optim.AdamW(params, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.02)", **PLAIN)


def test_settings_that_are_not_given_are_read_off() -> None:
    """Without them a rate is no fault, but a sentence. Two decays were said as one of 0.01, where a key was misspelt."""
    groups = LINES["groups"].replace("* (p.ndim > 1)", "if p.ndim > 1 else 0.01")
    found = gpt2.diagnose_step(module_of("ours", 1), step_of(**PLAIN, groups=groups), right_model(1))
    decays = "read off: a weight decay of 0.1, on matrices, embeddings, and of 0.01, on norms, biases"
    assert (found.verdict, decays in found.notes) == ("equal", True), found.notes
    assert all(words in " ".join(found.notes) for words in ("rate of 0.001", "betas of 0.9 and 0.95", "no clipping")), found.notes


def test_a_constant_in_float32_loses_no_gradient() -> None:
    """In a stranger's model with large weights, the rounding of its GELU's constant was called a gradient that lacks a part."""
    model, root = module_of("ours"), torch.tensor(2 / torch.pi).sqrt()
    model.requires_grad_(False)
    for block in model.h:
        block.mlp.c_fc.weight *= 8
        block.attn.c_attn.weight *= 8
    module = copy.deepcopy(model).requires_grad_(True)
    for block in module.h:
        block.mlp.activation = lambda x: 0.5 * x * (1 + torch.tanh(root * (x + 0.044715 * x**3)))
    found = gpt2.diagnose_step(module, unset, model)
    assert (found.verdict, found.causes) == ("equal", ()), found.table()


def per_example(model):
    """A step whose gradients are those of each example alone: the module runs within vmap."""
    params = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_fn(params, row, answers):
        return F.cross_entropy(functional_call(model, params, (row[None],))[0], answers)

    return lambda x, y: len(vmap(grad(loss_fn), (None, 0, 0))(params, x, y))


@pytest.mark.parametrize(
    ("maker", "words"),
    [
        (lambda model: unset(module_of("ours")), "no parameter"),
        (per_example, r"torch\.func.*whole batch"),  # it would look as if it never called its module
        pytest.param(lambda model: lambda x, y: model(x).sum() * float("nan"), "loss of nan", marks=pytest.mark.slow),
        pytest.param(lambda model: lambda x, y: model(x.view(7, -1)).sum(), "batch_size", marks=pytest.mark.slow),
        pytest.param(lambda model: None, "return a function step", marks=pytest.mark.slow),
    ],
)
def test_a_bad_step_is_one_line(maker, words: str) -> None:
    """A traceback of ours hides what the user has to change."""
    with pytest.raises(InputError, match=words) as caught:
        gpt2.diagnose_step(module_of("ours", 1), maker, right_model(1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("line", "words"), [("optim.lrr=1", r"did you mean optim\.lr"), ("optim.lr=fast", "give a number")])
def test_settings_are_refused_by_name(line: str, words: str) -> None:
    """A misspelt key would leave a setting unknown, and its fault unsaid."""
    with pytest.raises(InputError, match=words):
        StepSettings.of([line])
    assert StepSettings.of(["optim.lr=3e-4", "data.prompt="]) == StepSettings(lr=3e-4)


def test_a_mismatch_is_no_number_that_is_zero_for_a_reader() -> None:
    """``first at update (error 6.4e-17)`` made people look for rounding where a rule was another one."""
    cause = Cause("decay-coupled", (Place.of("wte.weight"),), "", mend=" ")
    found = [Diagnosis("mismatch", Divergence("update", error), (cause,), (), "a step") for error in (6.4e-17, 0.25)]
    heads = [one.table().splitlines()[0] for one in found]
    assert heads == ["MISMATCH  first at update", "MISMATCH  first at update (error 2.5e-01)"]


USUAL = (Rule(beta1=0.8, beta2=0.98, eps=1e-6), Rule(coupled=0.05), Rule(late=True, beta2=0.95))
ODD = (Rule(beta1=0.88, beta2=0.93, eps=3e-7), Rule(coupled=0.03))


@pytest.mark.parametrize(("rule", "known"), [*((rule, True) for rule in USUAL), *((rule, False) for rule in ODD)])
def test_constants_that_nobody_writes_are_no_usual_ones(rule: Rule, known: bool) -> None:
    """The nearest usual constants would be reported as the author's: what none of the table gives is left open."""
    draw = np.random.default_rng(0)
    before, gradient, seen = draw.standard_normal((4, 12)), 1e-2 * draw.standard_normal((4, 12)), np.ones(4, dtype=bool)
    change = -1e-3 * directions(rule, Track(before, gradient, before, seen)) - 1e-4 * before
    track = Track(before, gradient, change, seen)
    found, error = find_rule([track], StepSettings())
    assert (error <= ROUNDED) == known
    if known:
        assert found == rule
        assert fit(track, found).rates == pytest.approx(1e-3)
    if rule is USUAL[0]:
        other = track._replace(change=-1e-3 * directions(ODD[0], track))  # a second parameter, which goes by no known rule
        assert find_rule([track, other], StepSettings())[1] > ROUNDED


def test_gradients_that_clipping_cannot_have_made_are_no_traceback() -> None:
    """A gradient that was set to zero was divided by; one that had grown gave a limit that is no number."""

    def read(a: float, b: float):
        sizes = ({"a": 1.0, "b": 1.0}, {"a": a, "b": b})
        held, used = (Gradient({n: Sampled(f * torch.ones(3), f, f) for n, f in some.items()}) for some in sizes)
        return read_clipping([[Update(held=held, gradient=used)]])

    assert "b" in read(0.5, 0.0).odd
    assert read(1.0, 2.0).odd


def test_every_cause_of_a_step_has_a_fault():
    """A cause without a fault would never be tested."""
    assert set(IDS) == set(STAGE)
    assert {word for line in COMBINED for word in line.split()} == set(MEANINGS)
    for line in COMBINED:  # of two faults that share an id, one could go unnamed
        for one, other in itertools.permutations(map(MEANINGS.get, line.split()), 2):
            assert not {*one.ids} & {*other.ids, *other.implied}, line
