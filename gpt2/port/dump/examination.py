"""Examine a dump against a checkpoint: recognise its arrays, walk through them, and say what they show."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpt2.errors import InputError
from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import trace
from gpt2.model import GPT2
from gpt2.port.diagnosis.causes import ranked
from gpt2.port.diagnosis.logits import Reference, padding_causes
from gpt2.port.diagnosis.report import LIKELY, SURE, Diagnosis, Divergence
from gpt2.port.diagnosis.trail import Trail, Walk, account
from gpt2.port.diagnosis.walk import Walker
from gpt2.port.dump.arrays import find_output, recognised
from gpt2.port.dump.loading import Loaded, Loading
from gpt2.port.dump.pool import DumpPool, TimeUp
from gpt2.port.dump.reading import Dump, dump_of, read
from gpt2.port.dump.tolerance import HALVES, excess, measured

SMALL = 20_000_000  # parameters of a model whose diagnosis must be quick
SECONDS = {True: 50.0, False: 240.0}  # for the whole search, by whether the model is small


def examine(what: str | Path | Mapping[str, Any], ours: GPT2) -> Diagnosis:
    """Diagnose the dump at a path, or of arrays by name, against ``ours``. Raises InputError as :func:`gpt2.diagnose` does."""
    dump = dump_of(what, ours.config) if isinstance(what, Mapping) else read(what, ours.config)
    return DumpExamination(dump, ours).diagnosis()


class DumpExamination:
    """The diagnosis of one dump; ``ours`` is the right model in any dtype."""

    def __init__(self, dump: Dump, ours: GPT2) -> None:
        self.dump, self.config = dump, ours.config
        self.end = time.monotonic() + SECONDS[ours.config.num_parameters() < SMALL]
        state = {name: tensor.detach().to("cpu", torch.float64) for name, tensor in ours.state_dict().items()}
        self.reference = Reference(ours, state).model
        self.notes: list[str] = []

    @torch.no_grad()
    def diagnosis(self) -> Diagnosis:
        expected = self.reference(self.dump.ids)
        output = find_output(self.dump, expected, self.config)
        if output is None:
            wanted = f"({', '.join(map(str, self.dump.ids.shape))}, {self.config.vocab_size})"
            raise InputError(f"{self.dump.source}: holds no logits {wanted}, with a batch dimension or none; save them as well")
        self.output, self.ids = output, output.ids
        self.exact = trace(self.reference, self.ids)
        attempts = [Attempt(self, dtype) for dtype in self._computed()]
        best: Attempt | None = None
        for attempt in attempts:
            self.last = attempt
            attempt.run()
            if attempt.settled:
                return self._diagnosed(attempt)
            best = best or attempt
        assert best is not None
        return self._diagnosed(best)

    def _computed(self) -> Iterator[torch.dtype]:
        """Yield the dtypes in which the program may have computed, the narrowest error first."""
        arrays = [*self.dump.arrays.values()]
        dtypes = {array.dtype for array in arrays}
        widened = (bool((array == array.float().double()).all()) for array in arrays if array.dtype == torch.float64)
        if torch.float64 in dtypes and not any(widened):
            yield torch.float64
        yield torch.float32
        if dtypes <= set(HALVES):
            yield self.output.logits.dtype

    def _diagnosed(self, attempt: Attempt) -> Diagnosis:
        padding, notes = padding_causes(self.output.logits.double(), self.config)
        causes = ranked([*attempt.causes, *padding], self.config.n_layer)
        equal = attempt.equal and not causes
        verdict = "equal" if equal else "mismatch" if causes else "undetermined"
        first = None if equal else attempt.first()
        others = {name for name in self.dump.arrays if name != self.output.name}
        return Diagnosis(
            verdict,
            first,
            tuple(cause.cause() for cause in causes),
            tuple(dict.fromkeys([*attempt.notes(), *notes, *self.notes])),
            self.dump.source,
            logits_error=attempt.error,
            seen="dump" if others else "logits",
        )


class Attempt:
    """An examination under the assumption that the program computed in ``dtype``."""

    def __init__(self, examination: DumpExamination, dtype: torch.dtype) -> None:
        self.of, self.dtype = examination, dtype

    def run(self) -> None:
        of = self.of
        self.tolerance = measured(of.reference, of.ids, of.exact, self.dtype)
        logits = of.output.logits
        self.expected = of.exact["logits"][:, -logits.shape[1] :]
        mine = logits[..., : of.config.vocab_size].double()
        self.error = worst_relative_error(mine, self.expected)
        self.right = excess(mine, self.expected, logits.dtype) <= self.tolerance.points["logits"]
        shape = (of.ids.shape[0], of.ids.shape[1])
        self.pool = DumpPool(self.tolerance, of.config, shape)
        self.pool.fill(((name, array) for name, array in of.dump.arrays.items() if name != of.output.name), logits)
        self.points = recognised(self.pool, of.exact, of.config)
        self.loaded = Loaded(of.reference.state_dict(), ())
        if not self.right:
            self.loaded = Loading(self.pool, self.loaded.weights, of.config, of.ids).run()
        self.walked = self._walk()
        sure = SURE if self.walked.explained else LIKELY
        self.causes = [*self.walked.causes, *(replace(cause, confidence=sure) for cause in self.loaded.causes)]
        if self.right and not self.walked.explained:
            self.causes = []  # nothing contradicts the logits; a walk that misses arrays may only guess
        self.equal = self.right and not self.causes

    @property
    def settled(self) -> bool:
        """Whether this assumption explains all that the dump shows."""
        return self.equal or self.walked.explained

    def _walk(self) -> Walk:
        of = self.of
        trail = Trail(self.pool, dict(self.loaded.weights), of.config, of.ids)
        self.pool.deadline = time.monotonic() + (of.end - time.monotonic()) / 2
        try:
            Walker(trail, trail.own["wte.weight"]).run()
        except TimeUp:
            trail.lost.append("logits")
        self.pool.deadline = float("inf")
        return account(trail, of.reference)

    def first(self) -> Divergence:
        """Return the first place that is not GPT-2's."""
        first = self.walked.first_divergence
        if first is None or first.point == "logits":
            first = replace(first or Divergence("logits", None, self.error), error=self.error)
        return first

    def notes(self) -> list[str]:
        of = self.of
        stored = sorted({str(array.dtype).removeprefix("torch.") for array in of.dump.arrays.values()})
        found = {name.partition("[")[0].partition(" ")[0] for names in self.points.values() for name in names}
        count = len(of.dump.arrays) - 1
        out = []
        if count:
            out.append(f"{len(found)} of your {count} arrays hold GPT-2's own values ({', '.join(stored)})")
        return out
