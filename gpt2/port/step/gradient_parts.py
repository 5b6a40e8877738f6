"""Causes in the gradients of some parameters only: a use of the token embedding, frozen parts, and wrong backward passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gpt2.port.diagnosis.report import Cause
from gpt2.port.step.backward import UNREACHED, uneven, wrong_tables
from gpt2.port.step.causes import cause
from gpt2.port.step.gradient_comparison import Comparison, total_norm
from gpt2.port.step.gradients import TABLE, Gradients
from gpt2.port.step.layouts import LETTERS, Weights
from gpt2.port.step.trained import Places

SEEN = "the dump's gradients are these, at the parameters that it has before the step"
CLOSE = 2e-3  # relative difference of factors that are meant to be equal
# The parts of a block in the order of the backward pass, and what its gradient has passed since the part before.
PASSED = {
    "mlp.c_proj": ("ln_1 of the next block, or the residual before it", "{next}.ln_1"),
    "mlp.c_fc": ("the derivative of GELU", "h.{layer}.mlp.act"),
    "ln_2": ("the product with the weight of mlp.c_fc", "h.{layer}.mlp.c_fc"),
    "attn.c_proj": ("ln_2, or the residual before it", "h.{layer}.ln_2"),
    "attn.c_attn": ("attention: its weights, softmax and scale", "h.{layer}.attn"),
    "ln_1": ("the product with the weight of attn.c_attn", "h.{layer}.attn.c_attn"),
}


def part_causes(
    got: Weights,
    wrong: list[str],
    most: tuple[float, Gradients],
    comparison: Comparison,
    unchanged: Sequence[str],
    places: Places,
) -> list[Cause]:
    """Return the causes in the gradients ``wrong``; ``most``: all others are so many times these."""
    factor, made = most
    right, found = made.whole, []
    dead = [name for name in wrong if float(got[name].norm()) <= 1e-9 * total_norm(got)]
    frozen = [name for name in dead if name in unchanged]
    rest = [name for name in wrong if name not in dead]
    backward = _backward_cause(got, rest, factor, right, comparison) if not dead else None
    if backward is not None:
        found.append(backward[0])
        rest = backward[1]
    if TABLE in rest:
        for id, detail, value in wrong_tables(right[TABLE], made.head, made.table):
            if comparison.same(TABLE, got[TABLE], value, factor):
                found.append(cause(id, "wte", detail, SEEN))
                rest.remove(TABLE)
                break
    if frozen:
        found.append(cause("parameters-frozen", places(frozen), f"{UNREACHED}, and they never change", SEEN))
    if len(dead) > len(frozen):
        names = [name for name in dead if name not in frozen]
        found.append(cause("gradient-detached", places(names), UNREACHED, SEEN))
    if rest:
        factors = [(n, _factor(got[n], right[n])) for n in rest]
        shares = [f / factor if comparison.same(n, got[n], right[n], f) else None for n, f in factors]
        found.append(uneven(shares, places(rest), CLOSE, SEEN))
    return found


def _backward_cause(
    got: Weights, wrong: Sequence[str], factor: float, right: Mapping[str, Tensor], comparison: Comparison
) -> tuple[Cause, list[str]] | None:
    """Return where a backward pass goes wrong: parts are right down to one, and wrong from there to the embeddings.

    Beside it: the wrong gradients of the parts before, which this does not explain.
    """
    layers = 1 + max((int(name.split(".")[1]) for name in right if name.startswith("h.")), default=0)
    order = ["ln_f", *(f"h.{layer}.{part}" for layer in reversed(range(layers)) for part in PASSED), "wpe"]
    parts = {one: [n for n in got if n.startswith(f"{one}.")] for one in order}
    bad = [one for one, names in parts.items() if names and all(name in wrong for name in names)]
    known = [one for one, names in parts.items() if names]
    first = known.index(bad[0]) if bad else 0
    if not 0 < first < len(known) - 1 or bad != known[first:]:
        return None
    last, here = known[first - 1], bad[0]
    layer, part = int(here.split(".")[1]), here.split(".", 2)[2]
    words, where = PASSED[part]
    if part == "mlp.c_proj" and layer == layers - 1:
        words, where = "ln_f", "ln_f"
    detail = f"going backward, the gradients are right down to {last} and wrong from {here} on: look at {words}"
    name = f"{here}.bias"
    shares = zip(got[name].chunk(3), right[name].chunk(3), strict=True) if part == "attn.c_attn" and name in got else ()
    good = [x for x, (a, b) in zip(LETTERS, shares, strict=False) if x != "k" and comparison.same(name, a, b, factor)]
    if good == ["v"]:
        detail = f"going backward, the gradients are right down to {here} (v) and wrong at q and k: look at softmax and its scale"
        mine, theirs = got[name].chunk(3)[0], right[name].chunk(3)[0]
        ratio = _factor(mine, theirs)
        if comparison.same(name, mine, theirs, ratio):
            detail += f"; that of q is {ratio / factor:.5g} times the right one"
    found = cause("backward-wrong", where.format(layer=layer, next=f"h.{layer + 1}"), detail, SEEN)
    return found, [name for one in known[:first] for name in parts[one] if name in wrong]


def _factor(got: Tensor, right: Tensor) -> float:
    return float((got * right).sum() / (right**2).sum().clamp(min=torch.finfo(torch.float64).tiny))
