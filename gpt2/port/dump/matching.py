"""Find the faults with which the simulation gives a program's values, between two streams that the program shows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.measure.metrics import Progress, worst_relative_error
from gpt2.measure.tracing import layer_of, points
from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.candidates import Candidate, Table
from gpt2.port.dump.simulation import Program, Simulation

COLUMNS = 512  # vocabulary entries on which candidates are compared first
MIN_ROWS = 4  # positions from which a bias of the head can be fitted
FIRSTS = 60  # single faults that pairs are built on, the nearest first


@dataclass(frozen=True)
class Fit:
    """A candidate and its largest relative error at the shown points."""

    candidate: Candidate
    error: float

    @property
    def price(self) -> float:
        return self.candidate.price


class Segment:
    """The part of a program between two streams: blocks ``first`` to ``last`` (excluded), and the embeddings or the head.

    ``start``: the stream that enters, None for the embeddings. ``shown``: the program's values in this part, ``end`` among them.
    """

    def __init__(
        self,
        simulation: Simulation,
        first: int,
        end: str,
        start: Tensor | None,
        shown: Mapping[str, Tensor],
        tolerance: Mapping[str, float],
    ) -> None:
        self.simulation, self.first, self.end, self.start, self.shown = simulation, first, end, start, shown
        self.tolerance = tolerance
        self.is_last = end in ("logits", "ln_f")
        layer = layer_of(end)
        self.last = simulation.config.n_layer if self.is_last else 0 if layer is None else layer + 1
        self.entering = shown[end]  # of the next segment: the program's own, unless this one is explained
        wanted = shown[end]
        vocabulary = wanted.shape[-1]
        self.columns = torch.arange(vocabulary)
        if end == "logits" and vocabulary > COLUMNS:
            self.columns = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))[:COLUMNS]
        self.softmaxed = self._softmaxed()

    def on(self, candidate: Candidate) -> Segment:
        """Return this segment with a candidate's faults in place of GPT-2."""
        base = self.simulation.on(candidate.program(self.simulation) or Program())
        return Segment(base, self.first, self.end, self.start, self.shown, self.tolerance)

    def go_on(self, candidate: Candidate) -> None:
        """Let the next segment begin with our own value."""
        self.entering = self.values(candidate)[self.end]

    def values(self, candidate: Candidate) -> dict[str, Tensor]:
        """Return all traced points of a candidate in this segment."""
        program = candidate.program(self.simulation) or Program()
        return self.simulation.trace(program, self.first, self.last, self.start)

    def first_wrong(self, candidate: Candidate) -> str | None:
        """Return the first shown point where a candidate's value is not the program's."""
        errors = self.errors(candidate)
        return next((point for point, error in errors.items() if not error <= self.tolerance.get(point, 0.0)), None)

    def errors(self, candidate: Candidate) -> dict[str, float]:
        """Return a candidate's relative error at each shown point, in the order of the forward pass."""
        values = self.values(candidate)
        out = {}
        for point in points(self.simulation.config.n_layer):
            if point in self.shown and point in values:
                value = self._headed(values[point], candidate.head) if point == "logits" else values[point]
                out[point] = worst_relative_error(self.shown[point], value.expand_as(self.shown[point]))
        return out

    # The head: what is seen in the logits alone

    def _softmaxed(self) -> str:
        if self.end != "logits":
            return ""
        given = self.shown["logits"]
        for name, p in (("softmax", given.clamp(min=0.0)), ("log_softmax", given.exp())):
            if bool(((p.sum(-1) - 1).abs() < 1e-3).all()):
                return name
        return ""

    def _headed(self, logits: Tensor, faults: Iterable[Fault]) -> Tensor:
        """Return a candidate's logits as the program gives them, with the head's faults."""
        wanted = self.shown["logits"]
        logits = logits[:, -wanted.shape[1] :]
        for fault in faults:
            if fault.id == "logits-scaled":
                logits = logits * _ratio(logits, wanted)
            elif fault.id == "extra-bias":
                logits = logits + (wanted - logits).mean((0, 1), keepdim=True)
            elif fault.id == "logits-softmaxed":
                logits = logits.softmax(-1) if self.softmaxed == "softmax" else logits.log_softmax(-1)
        return logits

    def heads(self, logits: Tensor) -> Iterator[tuple[Fault, ...]]:
        """Yield what the program may do to its logits (B, T, V) in the end: nothing, or one of the known faults."""
        wanted = self.shown["logits"]
        yield ()
        if self.softmaxed:
            words = f"the model returns {self.softmaxed} of the logits"
            yield (Fault("logits-softmaxed", "logits", words),)
            return
        ratio = _ratio(logits[:, -wanted.shape[1] :], wanted)
        yield (Fault("logits-scaled", "logits", f"the logits are multiplied by {ratio:.6g}"),)
        if wanted.shape[:2].numel() >= MIN_ROWS:
            yield (Fault("extra-bias", "logits", "the head adds a bias; GPT-2's head has none"),)

    # Many candidates at once

    def distances(self, candidates: Iterable[tuple[Candidate, Program]]) -> list[float]:
        """Return how far each candidate is from the program's values at the end, by the best of the head's forms."""
        pairs = list(candidates)
        out: list[float] = []
        programs = [program for _, program in pairs]
        for number, found in self.simulation.outputs(programs, self.first, self.last, self.start):
            out.append(self._distance(programs[number], found["end"]))
        return out

    def _distance(self, program: Program, stream: Tensor) -> float:
        wanted = self.shown[self.end]
        if not self.is_last:
            value = stream
        else:
            value = self.simulation.normed(program, stream)
            if self.end == "logits":
                value = value[:, -wanted.shape[1] :] @ self.simulation.head(program)[self.columns].T
                wanted = wanted[..., self.columns]
        value = value.expand_as(wanted)
        if self.softmaxed:
            logs = wanted if self.softmaxed == "log_softmax" else wanted.clamp(min=1e-12).log()
            difference = (logs - value) - (logs - value).mean(-1, keepdim=True)
            weight = wanted.clamp(0.0) if self.softmaxed == "softmax" else torch.ones_like(wanted)
            return float((difference * weight).abs().max() / wanted.square().mean().sqrt())
        size = float(wanted.square().mean().sqrt().clamp(min=1e-300))
        difference = wanted - value
        error = float(difference.abs().max()) / size
        if self.end == "logits":
            ratio = _ratio(value, wanted)
            error = min(error, float((wanted - ratio * value).abs().max()) / size)
            if wanted.shape[:2].numel() >= MIN_ROWS:
                error = min(error, float((difference - difference.mean((0, 1))).abs().max()) / size)
        return error if math.isfinite(error) else math.inf


def _ratio(value: Tensor, wanted: Tensor) -> float:
    return float((value * wanted).sum() / value.square().sum().clamp(min=1e-300))


def fitting(segment: Segment, table: Table, deadline: float, progress: Progress) -> tuple[list[Fit], bool]:
    """Return the candidates that explain a segment, the simplest first, and whether all single faults were tried in time."""
    singles, complete = _ranked(segment, table, deadline, progress)
    fits = _confirmed(segment, [candidate for _, candidate in singles])
    if fits or not complete:
        return fits, complete
    return _pairs(segment, singles, deadline, progress), complete


def _ranked(segment: Segment, table: Table, deadline: float, progress: Progress) -> tuple[list[tuple[float, Candidate]], bool]:
    """Return every single fault with its distance, the nearest first."""
    simulation = segment.simulation
    singles = list(table.singles(segment.first, segment.last, segment.start is None, segment.is_last))
    ranked: list[tuple[float, Candidate]] = []
    batch: list[tuple[Candidate, Program]] = []
    complete = True
    for number, candidate in enumerate([Candidate(), *singles]):
        if (program := candidate.program(simulation)) is not None or not number:
            batch.append((candidate, program or Program()))
        if len(batch) >= 200 or number == len(singles):
            progress(f"{segment.end}: {number} of {len(singles)} single faults")
            ranked += zip(segment.distances(batch), (one for one, _ in batch), strict=True)
            batch = []
            if time.monotonic() > deadline:
                complete = number == len(singles)
                break
    ranked.sort(key=lambda one: one[0])
    return ranked, complete


def _confirmed(segment: Segment, candidates: Iterable[Candidate], enough: int = 40) -> list[Fit]:
    """Return the candidates that fit all shown values, of the first ``enough``, with what is to be done at the head."""
    fits: list[Fit] = []
    for candidate in list(candidates)[:enough]:
        for whole in _with_heads(segment, candidate):
            errors = segment.errors(whole)
            if all(error <= segment.tolerance.get(point, 0.0) for point, error in errors.items()):
                ratio = max(error / max(segment.tolerance.get(point, 0.0), 1e-300) for point, error in errors.items())
                fits.append(Fit(whole, max(errors.values()) if ratio else 0.0))
                break
    return sorted(fits, key=lambda fit: (fit.price, fit.error))


def _with_heads(segment: Segment, candidate: Candidate) -> Iterator[Candidate]:
    if segment.end != "logits":
        yield candidate
        return
    logits = segment.values(candidate)["logits"]
    for faults in segment.heads(logits):
        yield replace(candidate, head=faults)


def _pairs(segment: Segment, singles: list[tuple[float, Candidate]], deadline: float, progress: Progress) -> list[Fit]:
    """Return the pairs of faults that explain a segment: the nearest single faults, each with every other."""
    simulation = segment.simulation
    worst = max(segment.tolerance.get(point, 0.0) for point in segment.shown)
    near = [candidate for _, candidate in singles if not candidate.is_right]
    firsts = [candidate for candidate in near if candidate.order is None]
    for number, first in enumerate(firsts[:FIRSTS]):
        progress(f"{segment.end}: pairs with fault {number + 1} of {FIRSTS}")
        base = segment.on(first)
        batch = []
        for second in near:
            if first.overlaps(second) or first.with_(second).program(simulation) is None:
                continue
            if (program := second.program(base.simulation)) is not None:
                batch.append((second, program))
        ranked = sorted(zip(base.distances(batch), range(len(batch)), strict=True))
        wholes = [first.with_(batch[place][0]) for distance, place in ranked[:20] if distance < 10 * worst + 1e-9]
        if fits := _confirmed(segment, wholes):
            return fits
        if time.monotonic() > deadline:
            break
    return []
