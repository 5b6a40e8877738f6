"""Rank candidates by how near they come to a program's values, in batches; for a large model on few tokens and in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gpt2.port.deadline import Deadline
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.simulation import Program, Simulation
from gpt2.port.dump.spans import Span
from gpt2.port.graph import ROWS, TEXT

COLUMNS = 256  # vocabulary entries that are compared
TOKENS = 4  # of a large model, where a token's values depend on earlier tokens alone
MIN_ROWS = 4  # positions from which a bias of the head can be fitted
BATCH = 256  # candidates that are ranked together
MAX_ELEMENTS = 1 << 26  # of the streams that are compared together


@dataclass(frozen=True)
class Nearness:
    """How far a candidate is from the program: ``fit`` is the largest relative error, after what the head does is fitted.

    That is a factor and a number added to all logits of a token, or a bias.

    The others rank candidates that do not fit: ``log`` is the mean logarithm of each position's error, ``angle`` of each
    position's angle, ``first`` the error at the first position, which sees no other token.
    """

    fit: float
    log: float
    angle: float
    first: float


class Lens:
    """A simulation on some of the tokens, and the program's values there."""

    def __init__(self, simulation: Simulation, span: Span) -> None:
        self.simulation, self.span = simulation, span
        vocabulary = span.wanted.shape[-1]
        self.columns = torch.arange(vocabulary)
        if span.end == "logits" and vocabulary > COLUMNS:
            self.columns = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))[:COLUMNS]
        wanted = span.wanted[..., self.columns].to(simulation.dtype)
        if span.softmaxed == "softmax":
            wanted = wanted.clamp(min=1e-12).log()
        self.wanted = wanted - wanted.mean(-1, keepdim=True) if span.softmaxed else wanted

    def on(self, program: Program) -> Lens:
        return Lens(self.simulation.on(program), self.span)

    def nearness(self, programs: Sequence[Program], deadline: Deadline) -> dict[int, Nearness]:
        """Return how near each program comes, by its number; only those that ended before the deadline."""
        out: dict[int, Nearness] = {}
        for numbers, values in self.values(programs, deadline):
            out |= zip(numbers, self._measured(values), strict=True)
        return out

    def values(self, programs: Sequence[Program], deadline: Deadline) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the numbers of some programs and their values at the end (N, B, T, X), until the deadline."""
        alike: list[tuple[int, Tensor]] = []
        if deadline.passed:  # the first program below costs as much as all of its batch
            return
        for number, end in self.span.ends(self.simulation, programs):
            if deadline.passed:
                break
            program = programs[number]
            if program.outside.keys() & {"ln_f", "head"}:
                yield [number], self.ended(program, end)[None]
            else:
                alike.append((number, end.expand(len(self.wanted), -1, -1)))
        step = max(1, MAX_ELEMENTS // max((end.numel() for _, end in alike), default=1))
        for start in range(0, len(alike), step):
            part = alike[start : start + step]
            yield [number for number, _ in part], self.ended(Program(), torch.stack([stream for _, stream in part]))

    def ended(self, program: Program, stream: Tensor) -> Tensor:
        """Return the value at the end from a stream (..., B, T, D)."""
        if self.span.end not in ("ln_f", "logits"):
            return stream
        value = self.simulation.normed(program, stream)
        if self.span.end == "logits":
            value = value[..., -self.wanted.shape[1] :, :] @ self.simulation.head(program)[self.columns].T
        return value - value.mean(-1, keepdim=True) if self.span.softmaxed else value

    def _measured(self, values: Tensor) -> list[Nearness]:
        """Return the nearness of values (N, B, T, X)."""
        wanted = self.wanted
        size = wanted.square().mean().sqrt().clamp(min=1e-30)
        difference = wanted - values
        fit = difference.abs().amax((1, 2, 3))
        middle = values - values.mean(-1, keepdim=True)
        goal = wanted - wanted.mean(-1, keepdim=True)
        if self.span.end == "logits" and not self.span.softmaxed:
            factor = (middle * goal).sum(-1, keepdim=True) / middle.square().sum(-1, keepdim=True).clamp(min=1e-30)
            fit = torch.minimum(fit, (goal - factor * middle).abs().amax((1, 2, 3)))
            if wanted.shape[:2].numel() >= MIN_ROWS:
                fit = torch.minimum(fit, (difference - difference.mean((1, 2), keepdim=True)).abs().amax((1, 2, 3)))
        errors = difference.square().mean(-1).sqrt() / size  # (N, B, T)
        cosine = (middle * goal).sum(-1) / (middle.norm(dim=-1) * goal.norm(dim=-1)).clamp(min=1e-30)
        log = errors.clamp(min=1e-9).log().mean((1, 2))
        angle = (1 - cosine).clamp(min=1e-12).log().mean((1, 2))
        columns = torch.stack([fit / size, log, angle, errors[..., 0].amax(1)], 1)
        return [Nearness(*row) for row in columns.nan_to_num(math.inf, math.inf, math.inf).tolist()]


class Sieve:
    """Ranks candidates for a span; ``exact`` is the simulation in float64 on all tokens."""

    def __init__(self, exact: Simulation, span: Span) -> None:
        self.exact, self.span = exact, span
        self.small = exact.small

    @cached_property
    def whole(self) -> Lens:
        """All tokens: for faults that mix the rows of a batch, and for small models."""
        simulation = self.exact if self.small else Simulation(self.exact.state, self.exact.config, self.exact.ids, torch.float32)
        return Lens(simulation, self.span)

    @cached_property
    def _narrow(self) -> Simulation:
        exact = self.exact
        return self.whole.simulation if not self.small else Simulation(exact.state, exact.config, exact.ids, torch.float32)

    def first(self, tokens: int) -> Lens:
        """The first ``tokens`` of the first row, in float32."""
        return Lens(self._narrow.on_ids(self.exact.ids[:1, :tokens]), self.span.cut(1, tokens))

    @cached_property
    def row(self) -> Lens:
        """All tokens of the first row."""
        return self._cut(self.exact.ids.shape[1])

    @cached_property
    def few(self) -> Lens:
        """The first tokens of the first row; all of them, if only the last position's logits are shown."""
        tokens = self.exact.ids.shape[1]
        return self.row if self.span.wanted.shape[1] < tokens else self._cut(min(TOKENS, tokens))

    def _cut(self, tokens: int) -> Lens:
        simulation = self.whole.simulation.on_ids(self.exact.ids[:1, :tokens])
        return Lens(simulation, self.span.cut(1, tokens))

    def lens(self, candidate: Candidate) -> Lens:
        if self.small:
            return self.whole
        sees = {one.sees for one, _ in candidate.sites}
        return self.whole if ROWS in sees else self.row if TEXT in sees else self.few

    def ranked(
        self, candidates: Iterable[Candidate], base: Candidate | None, deadline: Deadline
    ) -> Iterator[tuple[Nearness, Candidate]]:
        """Yield candidates with their nearness, until the deadline; ``base``: faults that each has beside its own."""
        waiting: dict[int, list[tuple[Candidate, Program]]] = {}
        lenses: dict[int, Lens] = {}
        based: dict[int, Lens] = {}
        for candidate in candidates:
            lens = self.lens(candidate if base is None else base.with_(candidate))
            if base is not None:
                if id(lens) not in based:
                    based[id(lens)] = lens.on(base.program(lens.simulation) or Program())
                lens = based[id(lens)]
            program = candidate.program(lens.simulation)
            if not candidate.is_right and (program is None or not self.span.reaches(program)):
                continue
            lenses[id(lens)] = lens
            batch = waiting.setdefault(id(lens), [])
            batch.append((candidate, program or Program()))
            if len(batch) == BATCH:
                yield from _near(lens, batch, deadline)
                batch.clear()
        for key, batch in waiting.items():
            yield from _near(lenses[key], batch, deadline)


def _near(lens: Lens, batch: list[tuple[Candidate, Program]], deadline: Deadline) -> Iterator[tuple[Nearness, Candidate]]:
    near = lens.nearness([program for _, program in batch], deadline)
    yield from ((near[number], candidate) for number, (candidate, _) in enumerate(batch) if number in near)
