"""Examine a dump against a checkpoint: recognise its arrays, walk through them or simulate, and say what they show."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.containers import shown
from gpt2.config import GPT2Config
from gpt2.errors import InputError
from gpt2.int8 import require_float
from gpt2.measure.dumps import STEP, Dump, dump_of, of_a_step, read
from gpt2.measure.metrics import Progress, silent
from gpt2.measure.tracing import trace
from gpt2.model import GPT2
from gpt2.port.dump.arrays import find_output
from gpt2.port.dump.attempt import Attempt
from gpt2.port.dump.dumped import Dumped
from gpt2.port.search.logits import Reference, padding_causes
from gpt2.port.terms.budget import Budget, few_threads, of_model
from gpt2.port.terms.ranking import ranked
from gpt2.port.terms.report import Diagnosis
from gpt2.port.terms.tolerance import HALVES, SLACK, measured

FIRST = 4 / 3  # the part of the work for the likelier of two precisions
UNLIKELY = 4.0  # that for float32, if rounding to a half precision explains the logits


def exact_weights(ours: GPT2) -> dict[str, Tensor]:
    """Return a model's weights in float64, on the CPU, as :func:`examine` takes them. Raises InputError for an int8 model."""
    require_float(ours, "diagnose")
    return {name: tensor.detach().to("cpu", torch.float64) for name, tensor in ours.state_dict().items()}


def examine(
    what: Dump | str | Path | Mapping[str, Any], config: GPT2Config, state: Mapping[str, Tensor], progress: Progress = silent
) -> Diagnosis:
    """Diagnose a dump (also its path, or arrays by name).

    ``state``: the right model's weights (:func:`exact_weights`); the model itself need not be kept. Raises InputError as
    :func:`gpt2.diagnose` does.
    """
    dump = what if isinstance(what, Dump) else dump_of(what, config) if isinstance(what, Mapping) else read(what, config)
    with few_threads(config.num_parameters()):
        return DumpExamination(dump, config, state, of_model(config.num_parameters()), progress).diagnosis()


class DumpExamination:
    """The diagnosis of one dump's forward pass; ``state``: the right model's weights, in float64 on the CPU."""

    def __init__(self, dump: Dump, config: GPT2Config, state: Mapping[str, Tensor], budget: Budget, progress: Progress) -> None:
        self.dump, self.config, self.progress = dump, config, progress
        self.budget = budget
        self.reference = Reference(config, state).model.eval()

    @torch.no_grad()
    def diagnosis(self) -> Diagnosis:
        """Examine the dump, assuming one precision after the other until one explains it."""
        output = find_output(self.dump, self.reference(self.dump.ids), self.config)
        if output is None:
            raise self._without_logits()
        exact = trace(self.reference, output.ids)
        arrays = {name: array for name, array in self.dump.arrays.items() if name != output.name}
        halves = {name: in_half(array) for name, array in arrays.items()}
        half = replace(output, logits=in_half(output.logits))
        exactly, rounded = computed_in(half.logits, halves.values())

        @cache
        def attempt(dtype: torch.dtype) -> Attempt:
            given = (halves, half) if dtype in HALVES else (arrays, output)
            made = Attempt(Dumped.of(*given, exact, self.reference, dtype), self.progress)
            if dtype in HALVES and output.logits.dtype not in HALVES:
                made.notes.append(f"your numbers have no more digits than {_name(dtype)}: they are judged by its rounding")
            return made

        dtypes, share, likelier = exactly, FIRST, False
        if rounded is not None and not (first := attempt(exactly[0]).dumped).right:
            last = attempt(rounded).dumped
            likelier = last.has_computed and not last.right and not first.has_computed
            dtypes = [rounded, exactly[0]] if likelier else [exactly[0], rounded]
            if last.right and not first.has_computed:
                share = UNLIKELY
        for number, dtype in enumerate(dtypes, 1):
            tried = attempt(dtype)
            tried.run(self.budget.part(share if number < len(dtypes) else 1))
            if tried.settled:
                if tried.equal and dtype in HALVES and output.logits.dtype in HALVES:
                    words = f"equal for a program that computes in {_name(dtype)}; one that computes in float32 has a mistake"
                    tried.notes.append(f"{words}, of {tried.dumped.error:.1g}")
                return self._diagnosed(tried)
        attempts = [attempt(dtype) for dtype in dtypes]
        most = max(attempts, key=lambda one: len(one.dumped.held))  # in another precision rounding looks wrong from the start
        if rounded is None and not arrays:
            gc.collect()  # a model and the table of its faults hold each other
            most.notes += self._roundings(exact, most.dumped)
        return self._diagnosed(next((one for one in attempts[: 1 if likelier else None] if one.causes), most))

    def _roundings(self, exact: dict[str, Tensor], dumped: Dumped) -> list[str]:
        """Return a note for a half precision whose rounding makes an error as large as that of logits that are dumped alone."""
        for dtype in HALVES:
            error = measured(self.reference, dumped.ids, exact, dtype).points["logits"] / SLACK
            if dumped.error <= 2 * error:
                words = f"GPT-2 computed in {_name(dtype)} has an error of {error:.2g} in the logits"
                return [f"{words}; if your program is, it may be right"]
        return []

    def _without_logits(self) -> InputError:
        """Return the error of a dump without logits, which says what an array of this name has instead."""
        shape, arrays, width = (*self.dump.ids.shape, self.config.vocab_size), self.dump.arrays, self.config.n_embd
        name, todo = next((name for name in arrays if "logits" in name.lower()), None), "; save them as well"
        if any(array.shape[-1:] == (width,) for array in (arrays.values() if name is None else [arrays[name]])):
            what = "arrays" if name is None else shown(name)
            todo = f"; {what} of {width:,} columns are hidden states: save x @ wte.T, the head's"
        elif name is not None:
            todo = f": the array {shown(name)} has {tuple(arrays[name].shape)}; "
            todo += "save the logits of these ids, or give the checkpoint that the program has loaded (--model)"
        return InputError(f"{self.dump.source}: holds no logits {shape}, with a batch dimension or none{todo}")

    def _diagnosed(self, attempt: Attempt) -> Diagnosis:
        padding, notes = padding_causes(attempt.dumped.output.logits.double(), self.config)
        if others := of_a_step(self.dump.arrays, self.config):
            notes = [*notes, f"{shown(others[0])} has a parameter's shape: training steps are not read from a dump; {STEP}"]
        causes = ranked([*attempt.causes, *padding], self.config.n_layer)
        equal = attempt.equal and not causes
        verdict = "equal" if equal else "mismatch" if causes else "undetermined"
        return Diagnosis(
            verdict,
            None if equal else attempt.first,
            tuple(causes),
            tuple(dict.fromkeys([*attempt.notes, *notes])),
            self.dump.source,
            logits_error=attempt.dumped.error,
            seen="dump" if attempt.dumped.arrays else "logits",
        )


def in_half(array: Tensor) -> Tensor:
    """Return an array in the half precision that holds all of its values, or as it is, if they have more digits.

    NumPy has no bfloat16: programs that compute in it store float32.
    """
    return next((half for dtype in reversed(HALVES) if bool(((half := array.to(dtype)).to(array.dtype) == array).all())), array)


def computed_in(logits: Tensor, others: Iterable[Tensor]) -> tuple[list[torch.dtype], torch.dtype | None]:
    """Return the dtypes in which a program may have computed, the likely one first, and a half precision, if it may be one.

    float64 first, if every array has more digits than float32. If the logits or half of the arrays have, the program widened its
    numbers on the way, as NumPy does in a product with a float64 scalar: float32 comes first. A few others may be anything.
    A half precision, if that of the logits or of all other arrays (as :func:`in_half` gives them) holds no more digits.
    """
    arrays = [logits, *(one for one in others if bool((one != one.round()).any()))]  # no masks and positions
    wide = [one.dtype == torch.float64 and bool((one != one.float().double()).any()) for one in arrays]
    if all(wide):
        exactly = [torch.float64, torch.float32]
    else:
        exactly = [torch.float32, torch.float64][: 2 if wide[0] or 2 * sum(wide) >= len(wide) else 1]
    rest = {one.dtype for one in arrays[1:]}
    if logits.dtype in HALVES:
        return exactly, logits.dtype
    if rest and rest <= set(HALVES):
        return exactly, torch.bfloat16 if torch.bfloat16 in rest else torch.float16
    return exactly, None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
