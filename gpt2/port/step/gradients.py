"""Causes in the gradients of a module or a dump: what each step adds to what, and where a derivative is wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from gpt2.port.dump.tolerance import UNITS
from gpt2.port.step.causes import Findings
from gpt2.port.step.clipping import LIMITS, ClipKind, Passage, judge_clipping, read_clipping
from gpt2.port.step.expected import TABLE, Gradients, Predictor
from gpt2.port.step.labels import Formula, average_of
from gpt2.port.step.layouts import LETTERS
from gpt2.port.step.recognition import Recorded
from gpt2.port.step.records import Backward, Gradient, Update, Watched, total_norm
from gpt2.port.step.settings import Settings

DEAD = 1e-9  # of the norm of all gradients: a gradient that is none
CLOSE = 2e-3  # relative difference of factors that are meant to be equal, in a dump
LAST_BIAS = "ln_f.bias"
NUMBERS = 3  # smoothings and factors of the logits that are tried
SEEN = "the dump's gradients are these, at the parameters that it has before the step"
ADDED = ".grad after each backward pass, and what arrived in it"
# The parts of a block in the order of the backward pass, and what its gradient has passed since the part before.
PASSED = {
    "mlp.c_proj": ("ln_1 of the next block, or the residual before it", "{next}.ln_1"),
    "mlp.c_fc": ("the derivative of GELU", "h.{layer}.mlp.act"),
    "ln_2": ("the product with the weight of mlp.c_fc", "h.{layer}.mlp.c_fc"),
    "attn.c_proj": ("ln_2, or the residual before it", "h.{layer}.ln_2"),
    "attn.c_attn": ("attention: its weights, softmax and scale", "h.{layer}.attn"),
    "ln_1": ("the product with the weight of attn.c_attn", "h.{layer}.attn.c_attn"),
}


@dataclass
class Comparison:
    """Which gradients are the expected ones, and the causes in the others.

    ``allowed``: each parameter's absolute error of computing its gradient (root mean square). ``relative`` and ``smallest``: the
    relative and absolute error of all; ``close``: the relative difference of factors that are meant to be equal. ``seen``: how
    we know. ``frozen``: parameters that are not trained, for the reason ``still``. ``positions``: those that hold the position
    embedding. ``derivatives``: whether derivatives may be wrong, which those of torch are not.
    """

    findings: Findings
    allowed: Mapping[str, float]
    relative: float
    smallest: float
    close: float
    seen: str
    frozen: Collection[str] = ()
    still: str = ""
    positions: Collection[str] = ()
    derivatives: bool = False

    def same(self, name: str, got: Tensor, expected: Tensor, factor: float = 1.0) -> bool:
        """Whether a gradient is ``factor`` times the expected one, up to the rounding of computing and storing it."""
        apart = float((got - factor * expected).square().mean().sqrt())
        size = float(expected.square().mean().sqrt()) * abs(factor)
        return apart <= abs(factor) * self.allowed[name] + self.relative * size + self.smallest

    def wrong(self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], factor: float = 1.0) -> list[str]:
        """Return the parameters whose gradients are not ``factor`` times the expected ones."""
        return [name for name, g in got.items() if not self.same(name, g, expected[name], factor)]

    def multiple(self, name: str, got: Tensor, expected: Tensor) -> float | None:
        """Return what the expected gradient is multiplied by; None if the other is no multiple of it."""
        factor = ratio(got, expected)
        return factor if self.same(name, got, expected, factor) else None

    def judge(self, got: Mapping[str, Tensor], wrong: Sequence[str], factor: float, made: Gradients) -> None:
        """Add the causes in the gradients ``wrong``; all others are ``factor`` times those of ``made``."""
        right, add = made.whole, partial(self.findings.add, seen=self.seen)
        dead = [name for name in wrong if float(got[name].norm()) <= DEAD * total_norm(right) * abs(factor)]
        frozen = [name for name in dead if name in self.frozen]
        unreached = [name for name in dead if name not in frozen]
        rest = [name for name in wrong if name not in dead]
        if self.derivatives and not dead:
            rest = self._judge_derivatives(got, rest, factor, right)
        lost = any(name in self.positions for name in (*unreached, *rest))  # both embeddings lack what reaches the stream
        for name in [name for name in rest if name in made.head]:
            head, table, lost_id, doubled = made.head[name], made.table[name], "tied-gradient-lost", "tied-gradient-doubled"
            ways = (
                (lost_id, "it gets the head's gradient only, not that of the rows that the ids choose", head),
                (lost_id, "it gets the gradient of the rows that the ids choose only, not the head's", table),
                (doubled, "a gradient of it is counted twice", 2 * right[name]),
                (doubled, "the head's gradient is counted twice", 2 * head + table),
                (doubled, "the gradient of the rows is counted twice", head + 2 * table),
            )
            for id, detail, value in ways:
                if self.same(name, got[name], value, factor) and not (lost and value is head):
                    add(id, "wte", detail)
                    rest.remove(name)
                    break
        if frozen:
            add("parameters-frozen", frozen, self.still)
        if unreached:
            add("gradient-detached", unreached, "no gradient reaches these parameters")
        elif rest:
            factors = [self.multiple(name, got[name], right[name]) for name in rest]
            known = [one / factor for one in factors if one is not None]
            if len(known) == len(factors) and max(known) - min(known) < self.close * max(map(abs, known)):
                add("gradient-scaled", rest, f"the gradient of these parameters is multiplied by {median(known):.6g}")
            else:
                detail = "the gradients of these parameters lack a part, or have one more"
                add("gradient-detached", rest, detail, confidence=0.8)

    def _judge_derivatives(
        self, got: Mapping[str, Tensor], wrong: list[str], factor: float, right: Mapping[str, Tensor]
    ) -> list[str]:
        """Add where a backward pass goes wrong: parts are right down to one, and wrong from there to the embeddings.

        Return the wrong gradients that this does not explain: all, or those of the parts before.
        """
        layers = 1 + max((int(name.split(".")[1]) for name in right if name.startswith("h.")), default=0)
        order = ["ln_f", *(f"h.{layer}.{part}" for layer in reversed(range(layers)) for part in PASSED), "wpe"]
        parts = {one: names for one in order if (names := [n for n in got if n.startswith(f"{one}.")])}
        known, bad = list(parts), [one for one, names in parts.items() if all(name in wrong for name in names)]
        first = known.index(bad[0]) if bad else 0
        if not 0 < first < len(known) - 1 or bad != known[first:]:
            return wrong
        last, here = known[first - 1], bad[0]
        layer, part = int(here.split(".")[1]), here.split(".", 2)[2]
        words, where = ("ln_f", "ln_f") if here == f"h.{layers - 1}.mlp.c_proj" else PASSED[part]
        detail = f"going backward, the gradients are right down to {last} and wrong from {here} on: look at {words}"
        name = f"{here}.bias"
        thirds = zip(got[name].chunk(3), right[name].chunk(3), strict=True) if part == "attn.c_attn" and name in got else ()
        shares = dict(zip(LETTERS, thirds, strict=False))
        if [x for x, (a, b) in shares.items() if x != "k" and self.same(name, a, b, factor)] == ["v"]:
            detail = (
                f"going backward, the gradients are right down to {here} (v) and wrong at q and k: look at softmax and its scale"
            )
            of_q = self.multiple(name, *shares["q"])
            detail += f"; that of q is {of_q / factor:.5g} times the right one" if of_q is not None else ""
        self.findings.add("backward-wrong", where.format(layer=layer, next=f"h.{layer + 1}"), detail, self.seen)
        return [name for one in known[:first] for name in parts[one] if name in wrong]


def ratio(got: Tensor, expected: Tensor) -> float:
    """Return the factor that brings the expected gradient nearest."""
    return float((got * expected).sum() / expected.square().sum().clamp(min=torch.finfo(torch.float64).tiny))


# What a module adds to its gradients


def judge_accumulation(findings: Findings, calls: Sequence[Watched]) -> None:
    """Compare ``.grad`` after each backward pass with what was in it before and what arrived."""
    kept, lost, other, unknown = list[float](), False, list[float](), False
    moving = {name for call in calls for update in call.updates for name in update.before if update.moves(name)}
    for call in calls:
        updated = {update.backwards for update in call.updates}
        before, fresh = call.start, True
        for number, backward in enumerate(call.backwards):
            if number in updated:
                before, fresh = call.updates[0].gradient, True
            share, error = _share(before, backward, moving) or (float(not fresh), 0.0)
            if error > 1e-6:
                unknown = True
            elif fresh and share > 0.5:
                kept.append(share)
            elif not fresh and abs(share) < 1e-6:
                lost = True
            elif abs(share - (not fresh)) > 1e-6:
                other.append(share)
            before, fresh = backward.held, False
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
    if abs(share) * float(old.norm()) < 1e-9 * float(size.norm()):
        share = 0.0
    return share, float((rest - share * old).norm()) / max(float(size.norm()), 1e-300)


# What a dump's gradients are of


@dataclass
class GradientReading:
    """What the first gradients of a dump are: ``factor`` times ``made``, those of a ``formula``, except for ``wrong`` ones.

    ``cut``: they are clipped by tensor, or by value. ``clipped``: the norm, if they are dumped after clipping.
    """

    formula: Formula
    made: Gradients
    factor: float
    wrong: list[str]
    cut: bool = False
    clipped: float | None = None


@dataclass
class Evidence:
    """What a dump's gradients and updates are compared with.

    ``exact``: the right gradients of the first step; ``allowed``: the rounding of each.
    """

    findings: Findings
    recorded: Recorded
    predictor: Predictor
    settings: Settings
    exact: Gradients
    allowed: Mapping[str, float]


@dataclass
class GradientExamination(Evidence):
    """The comparison of one dump's gradients."""

    def __post_init__(self) -> None:
        self.state, self.got = self.recorded.parameters[0], self.recorded.raw[0]
        units = [UNITS[dtype] for dtype in self.recorded.gradient_dtypes] or [(0.0, 0.0)]
        (self.unit, _), smallest = max(units), max(smallest for _, smallest in units)
        still = "no gradient reaches these parameters, and they never change"
        wpe, how = [name for name in self.got if name.startswith("wpe")], (self.allowed, self.unit, smallest, CLOSE, SEEN)
        self.comparison = Comparison(self.findings, *how, self.recorded.unchanged, still, wpe, derivatives=True)

    def read(self) -> GradientReading:
        """Read the first step's gradients, then those of later steps."""
        right, *others = self.predictor.formulas(0).values()
        reading = self._best(one for some in ([right], others) for one in self._sorted(some))
        if reading.wrong and self._is_cut(reading):
            reading.cut = True
        else:
            if len(reading.wrong) > len(self.got) / 2 and LAST_BIAS in self.got and self.predictor.can_try:
                free = self._best(self._sorted(self.predictor.numbers())[:NUMBERS])
                reading = free if len(free.wrong) <= len(self.got) / 2 else reading
            for id, words in reading.formula.wrong:
                self.findings.add(id, "loss", words, SEEN)
            if len(reading.wrong) == len(self.got):
                deadline = self.predictor.deadline
                for name, made in reading.made.whole.items():
                    apart = (self.got.get(name, made) - made).norm() / made.norm().clamp(min=1e-300)
                    self.findings.differ("gradient", float(apart))
                late = f"the search ended at its limit of {deadline.words}: " if deadline.passed else ""
                words = "the gradients are those of no known mistake in the loss; dump the gradient of the logits as well"
                self.findings.leave_open("gradient", late + words)
                return reading
            self.comparison.judge(self.got, reading.wrong, reading.factor, reading.made)
            self._judge_factor(reading)
        self._judge_later(reading)
        return reading

    def _sorted(self, formulas: list[Formula]) -> list[Formula]:
        """Return formulas, first those that give the gradient of the last bias, which needs no backward pass."""
        if LAST_BIAS not in self.got:
            return formulas
        logits, last = self.predictor.logits(self.state, 0), self.got[LAST_BIAS].flatten()
        made = torch.stack([self.predictor.last_bias(self.state, one.slope(logits)) for one in formulas])
        order = torch.cosine_similarity(made, last[None]).argsort(descending=True, stable=True)
        return [formulas[number] for number in order.tolist()]

    def _best(self, formulas: Iterable[Formula]) -> GradientReading:
        """Return the reading with fewest wrong gradients; the first without, or as long as there is time."""
        best: GradientReading | None = None
        for formula in formulas:
            made = self.predictor.gradients(self.state, 0, formula) if formula.wrong else self.exact
            right = made.whole
            factors = [ratio(g, right[n]) for n, g in self.got.items() if float(right[n].norm()) > 0]
            near = sorted(factors, key=lambda f: abs(f - median(factors)))[:8]
            tries = [(self.comparison.wrong(self.got, right, f), f) for f in ([1.0, *near] if near else [])]
            wrong, factor = min(tries, key=lambda one: len(one[0]), default=(list(self.got), 1.0))
            if best is None or len(wrong) < len(best.wrong):
                best = GradientReading(formula, made, factor, wrong)
            if not wrong or not self.predictor.can_try:
                break
        assert best is not None
        return best

    def _is_cut(self, reading: GradientReading) -> bool:
        """Add that gradients are clipped by tensor, or by value, if that explains all; return whether it does."""
        held, used = Gradient.of({n: reading.made.whole[n] for n in self.got}), Gradient.of(self.got)
        ratios = Passage.of(held, used, CLOSE).ratios.values()
        factor = max(ratios, default=1.0)
        cut = read_clipping([[Update(held=held, gradient=used)]], factor, CLOSE)
        least = {ClipKind.ENTRY: 0, ClipKind.PARAMETER: 2}  # parameters that are cut
        several = sum(one < factor * (1 - CLOSE) for one in ratios)
        if cut.odd or cut.clip is None or several < least.get(cut.clip.kind, math.inf) or min(ratios, default=1.0) <= 0:
            return False
        judge_clipping(self.findings, cut, None)
        reading.factor = factor
        return True

    def _judge_factor(self, reading: GradientReading) -> None:
        """Add the factor of the gradients, unless clipping or an average explains it."""
        factor, close = reading.factor, max(1e-4, 4 * self.unit)
        parts = self.settings.grad_accum or 1
        of_one = reading.formula.key.startswith("accumulation-last-only") and abs(factor * parts - 1) < close
        if abs(factor - 1) <= max(1e-5, 4 * self.unit) or of_one:
            return
        norm, limits = total_norm(self.got), [self.settings.clip] if self.settings.clip else LIMITS
        reading.clipped = next((one for one in limits if factor < 1 and abs(norm / one - 1) < close), None)
        known = average_of(factor, self.predictor.averages(self.predictor.batch(0).targets), close)
        if reading.clipped is not None:
            if not any(self.recorded.used):
                words = (
                    f"the gradients are those after clipping to a norm of {reading.clipped:g}; a factor of the loss is not seen"
                )
                self.findings.notes.append(words)
        elif known is None:
            self.findings.add("gradient-scaled", "gradient", f"the gradient is {factor:.6g} times that of the mean loss", SEEN)
        else:
            for id in known[1]:
                self.findings.add(id, "loss", f"the gradient is that of {known[2]}: {factor:.6g} times the mean's", SEEN)

    def _judge_later(self, reading: GradientReading) -> None:
        """Compare the gradients of later steps, from the program's own parameters: what is left of the step before."""
        recorded, comparison, unknown = self.recorded, self.comparison, list[int]()
        comparison.relative += 30 * max((UNITS[dtype][0] for dtype in recorded.parameter_dtypes), default=0.0)
        for step, (before, got) in enumerate(itertools.pairwise(recorded.raw), 1):
            part = {n: g for n, g in got.items() if n in before and n != TABLE}
            if not part or (weights := recorded.parameters[step]).keys() != self.state.keys():
                break
            made = self.predictor.gradients(weights, step, self.predictor.again(reading.formula, step)).whole
            new = {n: reading.factor * made[n] for n in part}
            if len(comparison.wrong(part, new)) < len(part) / 2:
                continue
            square = sum(float(before[n].square().sum()) for n in part)
            kept = sum(float(((g - new[n]) * before[n]).sum()) for n, g in part.items()) / max(square, 1e-300)
            summed = {n: new[n] + kept * before[n] for n in part}
            if kept > 0.01 and len(comparison.wrong(part, summed)) < len(part) / 2:
                detail = f"the gradient of step {step + 1} holds {kept:.3g} times that of the step before"
                self.findings.add("gradient-not-zeroed", "gradient", detail, SEEN)
            elif reading.clipped is None and not reading.cut:
                unknown.append(step + 1)
        if unknown and not self.findings.causes:
            words = f"the gradients of step {unknown[0]} are not those of its batch at the parameters before it"
            self.findings.leave_open("gradient", words)
