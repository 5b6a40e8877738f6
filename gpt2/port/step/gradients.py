"""The gradients of a module's parameters, beside those that a right backward pass makes of its own gradient of the logits."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from gpt2.checkpoint.checkpoint import model_with
from gpt2.checkpoint.keys import HEAD
from gpt2.measure.metrics import relative_error
from gpt2.port.mapping.roles import Roles
from gpt2.port.recording.dataflow import Use
from gpt2.port.step.causes import StepFindings
from gpt2.port.step.watching import Forward, Sampler, Samples, Watched

TABLE = "wte.weight"  # its two uses are the head and the table of the tokens' rows
EQUAL, NOISE = 1e-8, 1e-11  # error of a parameter's gradient, relative to it (constants in float32), and to the whole gradient
DEAD = 1e-9  # of the norm of all gradients: a gradient that is none
SEEN = "from your own gradient of the logits, our model in float64 gives other gradients"
UNPENALISED = "F.cross_entropy(logits, targets)  # no penalty of weights: AdamW's weight_decay is theirs"
ADDED = ".grad after each backward pass, and what arrived in it"
Shares = dict[str, tuple[Tensor, Tensor]]  # of each gradient: what does not come through the head's use of wte, and all of it


def expected_gradients(state: Samples, roles: Roles, sampler: Sampler, forwards: Sequence[Forward]) -> tuple[Shares, float]:
    """Return the gradients of a module's parameters for its own gradients of the logits; NaN where the checkpoint has none.

    ``state`` is the checkpoint in float64. Parameters that are used scaled or shifted, and those without a place in the
    checkpoint, are left out. The gradients have the sampled entries. The number is the error of the logits that are trained on.
    """
    assert roles.mapping is not None
    mapping, config, error = roles.mapping, roles.mapping.config, 0.0
    model = model_with(replace(config, tie_word_embeddings=False), ({HEAD: state[TABLE]} | state).items()).requires_grad_(True)
    with torch.enable_grad():
        for one in forwards:
            assert one.gradient is not None
            both = (x.cpu().double().reshape(len(one.ids), -1, x.shape[-1]) for x in (one.gradient, one.logits))
            slope, own = (x[..., : config.vocab_size] for x in both)
            logits, live = model(one.ids.cpu())[:, -slope.shape[1] :], slope.abs().amax(-1) > 0
            (logits * slope).sum().backward()
            error = max(error, relative_error(own[live], logits.detach()[live]))
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    whole = found | ({TABLE: found[TABLE] + found[HEAD]} if config.tie_word_embeddings else {})
    out: Shares = {}
    for name, parameter in sampler.parameters.items():
        source = roles.sources.get(name)
        if source is None or mapping.use(source) != Use():
            continue
        entries = mapping.entries(source).flatten()
        if entries.numel() == parameter.numel():
            kept = entries[sampler.indices[name]]
            out[name] = mapping.values(kept, found), mapping.values(kept, whole)
    return out, error


def judge_gradients(findings: StepFindings, call: Watched, made: Shares, roles: Roles, untied: list[str], near: float) -> None:
    """Add the causes in gradients that are not those of ``made``, ``near`` them. ``untied``: embedding and head, if two."""
    arrived = {name: one.values for name, one in call.arrived().items()}
    got = {name: arrived.get(name, torch.zeros_like(g)).masked_fill(g.isnan(), 0.0) for name, (g, _) in made.items()}
    right = {name: both.nan_to_num(0.0) for name, (_, both) in made.items()}
    whole = math.hypot(*(float(gradient.norm()) for gradient in right.values()))

    def same(name: str, expected: Tensor) -> bool:
        return float((got[name] - expected).norm()) <= NOISE * whole + near * float(expected.norm())

    wrong = [name for name in got if not same(name, right[name])]
    for name in wrong:
        findings.differ("gradient", float((got[name] - right[name]).norm()) / max(float(right[name].norm()), NOISE * whole))
    factor = sum(float(got[name] @ right[name]) for name in got) / (whole**2 or 1.0)
    if wrong and factor and all(same(name, factor * right[name]) for name in got):
        findings.add("gradient-scaled", "gradient", f"all gradients arrive {factor:.6g} times what they should be", SEEN)
        return
    wrong = [name for name in wrong if name not in untied or name not in call.trains]
    dead = [name for name in wrong if float(got[name].norm()) <= DEAD * whole]
    unreached, rest = [name for name in dead if name in call.trains], [name for name in wrong if name not in dead]
    pulled, values = dict[str, float](), call.updates[0].before if call.updates else {}
    for name, p in ((name, values[name].masked_fill(made[name][1].isnan(), 0.0)) for name in rest if name in values):
        rate = float((got[name] - right[name]) @ p) / (float(p @ p) or 1.0)
        if same(name, right[name] + rate * p):
            pulled[name] = rate
    if pulled:
        words = f"the gradient that arrives has {median(pulled.values()):.4g} times the parameter in it: a penalty in the loss"
        findings.add("decay-coupled", [*pulled], words, SEEN, UNPENALISED)
        rest = [name for name in rest if name not in pulled]
    # both embeddings lack what reaches the stream
    lost = any(part.part == "wpe" for name in (*unreached, *rest) for part in roles.parts.get(name, []))
    for name, table in [(name, made[name][0].nan_to_num(0.0)) for name in rest]:
        only_head = same(name, right[name] - table) and not lost
        if only_head or same(name, table):
            missing = "that of the rows that the ids choose" if only_head else "the head's"
            findings.add("tied-gradient-lost", "wte", f"it lacks one of its two gradients, {missing}", SEEN)
            rest.remove(name)
    if frozen := [name for name in dead if name not in unreached]:
        findings.add("parameters-frozen", frozen, "requires_grad is False for these parameters", SEEN)
    if unreached:
        findings.add("gradient-detached", unreached, "no gradient reaches these parameters", SEEN)
    elif rest and call.by_hand:
        depths = {name: roles.depth(name) for name in rest}
        last = [name for name in rest if depths[name] == max(depths.values())]
        words = f"the backward pass of {' and '.join(sorted(call.by_hand))}, which is written by hand, gives other gradients"
        findings.add("backward-wrong", last, f"{words}, from these parameters on backward", SEEN)
    elif rest:
        findings.add("gradient-detached", rest, "the gradients of these parameters lack a part, or have one more", SEEN, sure=0.8)


def judge_accumulation(findings: StepFindings, calls: Sequence[Watched]) -> None:
    """Solve how much of each backward pass of an update, and of the gradient before it, is in each ``.grad`` at the end."""
    olds, parts, unknown, updated = dict[str, float](), list[float](), False, True
    for call in calls:
        before, done = call.start, 0
        for update in call.updates:
            passes, held = call.backwards[done : update.backwards], update.held
            for name in (n for n in held if update.moves(n) and all(n in one for one in passes)):  # what stays is not zeroed
                size, seen = held[name].values, [one[name].values for one in (*passes, before) if name in one]
                if held[name].two > DEAD * held.total and len(size) >= 2 * len(seen) > 0:
                    basis = torch.stack(seen, -1)
                    shares = torch.linalg.lstsq(basis, size[:, None], driver="gelsd").solution[:, 0]  # columns may be zero
                    shares *= shares.abs() * basis.norm(dim=0) >= 1e-9 * size.norm()
                    unknown = unknown or float((basis @ shares - size).norm()) > 1e-6 * float(size.norm())
                    parts += shares[: len(passes)].tolist()
                    olds[name] = max(olds.get(name, 0.0), updated * float(shares[len(passes) :].sum()), key=abs)
            before, done, updated = update.gradient, update.backwards, True
        updated = bool(call.updates)  # else its gradient is kept for the next call's update
    kept = {name: old for name, old in olds.items() if abs(old) > 1e-6}
    other = [share for share in parts if abs(share) >= 1e-6 and abs(share - 1) > 1e-6]
    lost = not other and any(abs(share) < 1e-6 for share in parts)  # clipped after each part, huge gradients are as good as lost
    if kept:
        times = "" if abs((old := median(kept.values())) - 1) < 1e-3 else f"{old:.3g} times "
        detail = f"each backward pass adds to {times}the gradient of the step before"
        findings.add("gradient-not-zeroed", [*kept] if len(kept) < len(olds) else "gradient", detail, ADDED)
    if lost:
        findings.add("accumulation-last-only", "gradient", "the gradient is zeroed between the parts of a batch", ADDED)
    if other or unknown:
        times = f": multiplied by {median(other):.4g}" if other else ""
        detail = f"between the backward passes of a step the gradient is changed{times}"
        findings.add("clip-before-accumulation", "clip", detail, ADDED)
    if kept or lost or other or unknown:
        findings.differ("gradient", 1.0)
