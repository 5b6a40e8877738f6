"""What a walk comes to: the first divergence, the causes, each said once, and how we know."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import FLOAT64_BOUND, worst_relative_error
from gpt2.measure.tracing import layer_of, point_at, points, trace
from gpt2.model import GPT2
from gpt2.port.diagnosis.causes import cause
from gpt2.port.diagnosis.hypotheses import Finding, scale_finding
from gpt2.port.diagnosis.report import LIKELY, SURE, Cause, Divergence
from gpt2.port.diagnosis.wiring import AFTER

if TYPE_CHECKING:
    from gpt2.port.diagnosis.walk import Walk, Walker

NARROW = 1e-6  # the same where the port computes in less than float64


def account(walker: Walker, reference: GPT2) -> Walk:
    from gpt2.port.diagnosis.walk import Step, Walk

    layers = walker.config.n_layer
    explained = walker.reached and not walker.lost
    found = [*_combined(walker.found), *_scales(walker), *_order(walker.blocks, walker.own, reference, layers, walker.reached)]
    traced = trace(reference, walker.ids)
    bound = NARROW if walker.pool.narrow else FLOAT64_BOUND
    steps, first = [], None
    by_point = {point_at(n, finding.part): finding for n, finding, _ in reversed(found)}
    for point in points(layers):
        if point not in walker.values:
            continue
        finding, layer = by_point.get(point), layer_of(point)
        words = ("", "") if finding is None else (finding.id, finding.detail)
        steps.append(Step(point, layer, words[0] or None, words[1], walker.errors.get(point)))
        if first is None and (error := _departs(walker.values[point], traced[point])) > bound:
            first = Divergence(point, layer, error)
    if first is None and walker.lost:
        first = Divergence(walker.lost[0], layer_of(walker.lost[0]), float("inf"))
    causes = _causes(found, walker, layers, explained)
    return Walk(tuple(steps), explained, first, tuple(causes), tuple(walker.blocks), tuple(dict.fromkeys(walker.lost)))


def _departs(mine: Tensor, theirs: Tensor) -> float:
    if mine.shape[-1] != theirs.shape[-1] and mine.ndim == theirs.ndim == 3:  # a padded vocabulary
        shared = min(mine.shape[-1], theirs.shape[-1])
        mine, theirs = mine[..., :shared], theirs[..., :shared]
    if mine.shape[1:2] != theirs.shape[1:2] and theirs.ndim == 3:
        theirs = theirs[:, -mine.shape[1] :]
    return worst_relative_error(mine, theirs.expand(mine.shape) if theirs.shape[:1] == (1,) else theirs)


def _combined(found: list[tuple[int | None, Finding, float | None]]) -> list[tuple[int | None, Finding, float | None]]:
    """Norms that stand after the branches and not before them are one cause, and so on."""
    out = []
    for n in dict.fromkeys(layer for layer, _, _ in found):
        mine = [(finding, error) for layer, finding, error in found if layer == n]
        ids = {(finding.id, finding.part) for finding, _ in mine}
        posts = [part for part in ("ln_1", "ln_2") if {("norm-missing", part), (AFTER, part)} <= ids]
        if posts:
            words = "the norms stand behind the branches, ln(x + branch(x)), not before them"
            out.append((n, Finding("post-norm", "" if len(posts) == 2 else posts[0], words), None))
        for finding, error in mine:
            if finding.part in posts and finding.id in ("norm-missing", AFTER):
                continue
            if finding.id == AFTER:
                finding = Finding("extra-norm", "attn" if finding.part == "ln_1" else "mlp", finding.detail)
            if finding.id != "undetermined":
                out.append((n, finding, error))
    return out


def _scales(walker: Walker) -> list[tuple[int | None, Finding, float | None]]:
    """What is wrong with the factors of the scores. In one block a root of four heads and the number of the block may be the same
    factor: then what fits more blocks is meant."""
    config, out = walker.config, []
    known = {n: factor for n, factor in walker.factors.items() if n > 0}
    inverse = sum(any(f.id == "scale-inverse-layer" for f in scale_finding(config, n, x, True)) for n, x in known.items())
    width = sum(any(f.id == "scale-by-width" for f in scale_finding(config, n, x)) for n, x in walker.factors.items())
    for n, factor in walker.factors.items():
        error = walker.errors.get(f"h.{n}.attn.weights")
        out += [(n, finding, error) for finding in scale_finding(config, n, factor, inverse > width)]
    return out


def _order(
    blocks: list[int], own: dict[str, Tensor], reference: GPT2, layers: int, reached: bool
) -> list[tuple[int | None, Finding, float | None]]:
    """What is wrong with the sequence of blocks. They are numbered by whose weights of the checkpoint they hold."""
    ran = list(blocks)
    theirs = [block.mlp.c_fc.weight[:8].double() for block in reference.h]  # a few rows are as good as all
    holders = [
        next((number for number, weight in enumerate(theirs) if torch.allclose(weight, own[f"h.{b}.mlp.c_fc.weight"][:8])), b)
        for b in blocks
    ]
    if len(set(holders)) == len(set(blocks)):
        ran = holders
    found: list[tuple[int | None, Finding, float | None]] = []
    if ran == list(range(layers)) or not reached:
        return found
    sequence = ", ".join(f"h.{b}" for b in ran)
    for block in sorted(set(ran)):
        if ran.count(block) > 1:
            found.append(
                (block, Finding("layer-repeated", "", f"it runs {ran.count(block)} times; the blocks run are {sequence}"), None)
            )
    for block in sorted(set(range(layers)) - set(ran)):
        found.append((block, Finding("layer-missing", "", f"it does not run; the blocks run are {sequence}"), None))
    firsts = list(dict.fromkeys(ran))
    if firsts != sorted(firsts):
        astray = next(i for i, block in enumerate(firsts) if block != sorted(firsts)[i])
        found.append((astray, Finding("layer-order", "", f"the blocks run as {sequence}"), None))
    return found


def _causes(found: list, walker: Walker, layers: int, explained: bool) -> list[Cause]:
    """Each cause once, with all its places."""
    groups: dict[tuple[str, str], list[tuple[int | None, Finding, float | None]]] = {}
    order = {point: number for number, point in enumerate(points(layers))}

    def place(one: tuple[int | None, Finding, float | None]) -> int:
        where = point_at(one[0], one[1].part)
        return min((number for point, number in order.items() if point == where or point.startswith(f"{where}.")), default=0)

    for one in sorted(found, key=place):
        same = (
            re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", one[1].detail)
            if one[1].id in ("norms-swapped", "scale-inverse-layer")
            else one[1].detail
        )
        groups.setdefault((one[1].id, same), []).append(one)
    causes = []
    for (id, _), same in groups.items():
        detail = same[0][1].detail
        place = point_at(same[0][0], same[0][1].part)
        error = max((error for _, _, error in same if error is not None), default=None)
        close = "" if error is None else " to the last bit" if error == 0 else f" to {error:.0e}"
        if id in ("layer-order", "layer-missing", "layer-repeated"):
            told = "each block's projections were found in your run, with the weights of these blocks and in this order"
        else:
            told = f"computed so from your own weights and inputs, {place} is what your module has there{close}"
            if (missed := walker.missed.get(place)) is not None and missed > FLOAT64_BOUND:
                told += f"; GPT-2's formula is off by {missed:.0e}"
        if explained:
            told += "; with all causes here, the walk ends at your own logits"
        confidence = SURE if explained else LIKELY
        where = _places([point_at(n, finding.part) for n, finding, _ in same], len(walker.blocks) if walker.reached else layers)
        causes.append(cause(id, where, detail, told, confidence, _fix(id, walker.config)))
    return causes


def _fix(id: str, config: GPT2Config) -> str | None:
    """The corrected line, where it depends on the checkpoint's config."""
    if id == "layernorm-eps":
        return f"nn.LayerNorm(n_embd, eps={config.layer_norm_epsilon:g})"
    if id == "gelu-variant" and config.activation_function not in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        return f"the checkpoint's activation is {config.activation_function}"
    return None


def _places(where: list[str], layers: int) -> str:
    """``h.*.ln_1`` where all blocks have it (all that run, where some do not); else every place."""
    parts: dict[str, list[int]] = {}
    plain = []
    for one in dict.fromkeys(where):
        if (match := re.fullmatch(r"h\.(\d+)(.*)", one)) is None:
            plain.append(one)
        else:
            parts.setdefault(match[2], []).append(int(match[1]))
    out = []
    for part, numbers in parts.items():
        every = len(set(numbers)) == layers > 1
        out += [f"h.*{part}"] if every else [f"h.{number}{part}" for number in sorted(set(numbers))]
    return ", ".join([*out, *plain])
