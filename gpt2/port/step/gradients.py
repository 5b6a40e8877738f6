"""The gradients of a module's parameters, beside those that a right backward pass makes of its own gradient of the logits."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import model_with
from gpt2.checkpoint.keys import head_name
from gpt2.config import GPT2Config
from gpt2.port.mapping.mapping import WeightMap
from gpt2.port.recording.dataflow import Holder, Use
from gpt2.port.step.causes import StepFindings
from gpt2.port.step.records import Backward, Forward, Gradient, Sampler, Samples, Watched, total_norm

TABLE = "wte.weight"  # its two uses are the head and the table of the tokens' rows
EQUAL, NOISE = 1e-8, 1e-11  # error of a parameter's gradient, relative to it (constants in float32), and to the whole gradient
DEAD = 1e-9  # of the norm of all gradients: a gradient that is none
SEEN = "from your own gradient of the logits, our model in float64 gives other gradients"
ADDED = ".grad after each backward pass, and what arrived in it"
Shares = dict[str, tuple[Tensor, Tensor]]  # of each gradient: what does not come through the head's use of wte, and what does


class Roles:
    """Which tensors of the checkpoint each parameter of a module holds, by the names that its step's parameters have."""

    def __init__(self, module: nn.Module, mapping: WeightMap | None) -> None:
        self.mapping = mapping
        self.aliases: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.aliases.setdefault(id(parameter), []).append(name)
        self.sources: dict[str, Holder] = {}
        self.parts: dict[str, list[tuple[int | None, str]]] = {}
        for source in mapping.sources if mapping else ():
            same = next((names for names in self.aliases.values() if source.name in names), [source.name])
            self.sources |= dict.fromkeys(same, source)
            self.parts |= {name: [(part.layer, part.part) for part in mapping.parts(source)] for name in same if mapping}

    def names_of(self, *parts: str) -> list[str]:
        """Return the parameters that hold only these parts, such as "ln_f"."""
        return [name for name, held in self.parts.items() if held and all(part in parts for _, part in held)]

    def role(self, name: str, parameter: Tensor) -> str:
        """Return "embedding", "norm", "bias" or "matrix": by its parts if they agree, else by its shape and name."""
        parts = [part for _, part in self.parts.get(name, [])]
        if any(part.split(".")[0] in ("wte", "wpe", "head") for part in parts):
            return "embedding"
        kinds = {"bias" if part.endswith(".bias") else "norm" if part.startswith("ln_") else "matrix" for part in parts}
        if len(kinds) == 1:
            return kinds.pop()
        return "matrix" if parameter.ndim >= 2 else "norm" if not kinds and "bias" not in name.split(".")[-1] else "bias"

    def where(self, name: str) -> list[str]:
        """Return the checkpoint's names for a parameter; its own name if it holds none of its tensors."""
        found = []
        for layer, part in self.parts.get(name, []):
            stem = head_name(self.mapping.shapes if self.mapping else ()) if part == "head" else part
            stem = re.sub(r"^attn\.[qkv](?=\.|$)", "attn.c_attn", stem)
            stem += "" if stem.endswith((".weight", ".bias")) else ".weight"
            found.append(stem if layer is None else f"h.{layer}.{stem}")
        return list(dict.fromkeys(found)) or [name]

    def depth(self, name: str) -> int:
        """Return when the forward pass last uses a parameter: the number of its part, of those that have weights."""
        stems = [one.rpartition(".")[0] for one in (self.mapping.shapes if self.mapping else ())]
        return max((stems.index(stem) for one in self.where(name) if (stem := one.rpartition(".")[0]) in stems), default=0)


def expected_gradients(config: GPT2Config, state: Samples, roles: Roles, sampler: Sampler, forwards: Sequence[Forward]) -> Shares:
    """Return the gradients of a module's parameters for its own gradients of the logits; NaN where the checkpoint has none.

    ``state`` is the checkpoint in float64. Parameters that are used scaled or shifted, and those without a place in the
    checkpoint, are left out. The gradients have the sampled entries.
    """
    mapping, model = roles.mapping, model_with(config, state.items())
    assert mapping is not None
    model.requires_grad_(True)
    table = model.wte.weight.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        for one in forwards:
            assert one.gradient is not None
            slope = one.gradient.cpu().double().reshape(len(one.ids), -1, one.gradient.shape[-1])[..., : config.vocab_size]
            logits = model.head(model.hidden(one.ids.cpu(), rows=F.embedding(one.ids.cpu(), table)))
            (logits[:, -slope.shape[1] :] * slope).sum().backward()
    assert table.grad is not None
    found = {name: p.new_tensor(torch.nan).expand(p.shape) if p.grad is None else p.grad for name, p in model.named_parameters()}
    head = {name: grad.new_zeros(()).expand(grad.shape) for name, grad in found.items()}
    head |= {} if model.wte.weight.grad is None else {TABLE: model.wte.weight.grad}  # None, if the head is untied
    out: Shares = {}
    for name, parameter in sampler.parameters.items():
        source = roles.sources.get(name)
        if source is None or mapping.use(source) != Use():
            continue
        entries = mapping.entries(source).flatten()
        if entries.numel() == parameter.numel():
            kept = entries[sampler.indices[name]]
            out[name] = mapping.values(kept, found | {TABLE: table.grad}), mapping.values(kept, head).nan_to_num(0.0)
    return out


def judge_gradients(
    findings: StepFindings, call: Watched, made: Shares, roles: Roles, untied: Collection[str], relative: float = EQUAL
) -> None:
    """Add the causes in the gradients of a call that are not those of ``made``.

    ``untied``: the token embedding and the head, if they are two parameters. ``relative``: the error that rounding explains.
    """
    arrived = call.arrived()
    got = {name: arrived.get(name, torch.zeros_like(g)).masked_fill(g.isnan(), 0.0) for name, (g, _) in made.items()}
    right = {name: g.nan_to_num(0.0) + head for name, (g, head) in made.items()}
    whole = total_norm(right)

    def same(name: str, expected: Tensor) -> bool:
        return float((got[name] - expected).norm()) <= NOISE * whole + relative * float(expected.norm())

    wrong = [name for name in got if not same(name, right[name])]
    for name in wrong:
        findings.differ("gradient", float((got[name] - right[name]).norm()) / max(float(right[name].norm()), NOISE * whole))
    wrong = [name for name in wrong if name not in untied or name not in call.trains]
    dead = [name for name in wrong if float(got[name].norm()) <= DEAD * whole]
    unreached, rest = [name for name in dead if name in call.trains], [name for name in wrong if name not in dead]
    # both embeddings lack what reaches the stream
    lost = any(part == "wpe" for name in (*unreached, *rest) for _, part in roles.parts.get(name, []))
    for name in [name for name in rest if bool(made[name][1].any())]:
        head = made[name][1]
        only_head = same(name, head) and not lost
        if only_head or same(name, right[name] - head):
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
        detail = "the gradients of these parameters lack a part, or have one more"
        findings.add("gradient-detached", rest, detail, SEEN, confidence=0.8)


def judge_accumulation(findings: StepFindings, calls: Sequence[Watched]) -> None:
    """Compare ``.grad`` after each backward pass with what was in it before and what arrived."""
    moving = {name for call in calls for update in call.updates for name in update.before if update.moves(name)}
    kept, later, unknown = list[float](), list[float](), False  # shares of what was there, in a first pass and in others
    for call in calls:
        updated = {0: call.start} | {update.backwards: call.updates[0].gradient for update in call.updates}
        for number, backward in enumerate(call.backwards):
            fresh = number in updated
            before = updated[number] if fresh else call.backwards[number - 1].held
            share, error = _share(before, backward, moving) or (float(not fresh), 0.0)
            unknown = unknown or error > 1e-6
            (kept if fresh else later).append(share if error <= 1e-6 else float(not fresh))
    kept, lost = [share for share in kept if abs(share) > 1e-6], any(abs(share) < 1e-6 for share in later)
    other = [share for share in later if abs(share) >= 1e-6 and abs(share - 1) > 1e-6]
    if kept:
        times = "" if abs(median(kept) - 1) < 1e-3 else f"{median(kept):.3g} times "
        detail = f"each backward pass adds to {times}the gradient of the step before"
        findings.add("gradient-not-zeroed", "gradient", detail, ADDED)
    if lost:
        findings.add("accumulation-last-only", "gradient", "the gradient is zeroed between the parts of a batch", ADDED)
    if kept or lost or other or unknown:
        findings.differ("gradient", 1.0)
    if other or unknown:
        detail = "between the backward passes of a step the gradient is changed"
        detail += f": multiplied by {median(other):.4g}" if other else ""
        findings.add("clip-before-accumulation", "clip", detail, ADDED)


def _share(before: Gradient, backward: Backward, moving: set[str]) -> tuple[float, float] | None:
    """Return how much of the gradient ``before`` is in ``.grad`` after a backward pass, and the relative error of that."""
    held, arrived = backward.held, backward.arrived
    names = [n for n in held if n in moving and n in arrived and n in before and before[n].two > 0]
    if not names:
        return None
    size, came, old = (torch.cat([one[name].values for name in names]) for one in (held, arrived, before))
    rest = size - came
    share = float(rest @ old / (old @ old)) if bool((old != 0).any()) else 0.0
    share *= abs(share) * float(old.norm()) >= 1e-9 * float(size.norm())
    return share, float((rest - share * old).norm()) / max(float(size.norm()), 1e-300)
