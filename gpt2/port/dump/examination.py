"""Examine a dump against a checkpoint: recognise its arrays, walk through them or simulate, and say what they show."""

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
from gpt2.int8 import require_float
from gpt2.measure.dumps import STEP, Dump, dump_of, of_a_step, read
from gpt2.measure.metrics import Progress, silent
from gpt2.measure.tracing import trace
from gpt2.model import GPT2
from gpt2.port.dump.attempt import Attempt
from gpt2.port.dump.dumped import Dumped, find_output
from gpt2.port.search.logits import Reference, padding_causes
from gpt2.port.terms.budget import few_threads, of_model
from gpt2.port.terms.ranking import ranked
from gpt2.port.terms.report import Diagnosis
from gpt2.port.terms.tolerance import HALVES, SLACK, measured

FIRST = 4 / 3  # the part of the work for the likelier of two precisions
UNLIKELY = 4.0  # that for float32, if rounding to a half precision explains the logits


def exact_weights(ours: GPT2) -> dict[str, Tensor]:
    """Return a model's weights in float64, on the CPU, as :func:`examine` takes them. Raises InputError for an int8 model."""
    require_float(ours, "diagnose")
    return {name: tensor.detach().to("cpu", torch.float64) for name, tensor in ours.state_dict().items()}


@torch.no_grad()
def examine(
    what: Dump | str | Path | Mapping[str, Any], config: GPT2Config, state: Mapping[str, Tensor], progress: Progress = silent
) -> Diagnosis:
    """Diagnose a dump (also its path, or arrays by name), assuming one precision after the other until one explains it.

    ``state``: the right model's weights (:func:`exact_weights`). Raises InputError as :func:`gpt2.diagnose` does.
    """
    dump = what if isinstance(what, Dump) else dump_of(what, config) if isinstance(what, Mapping) else read(what, config)
    with few_threads(config.num_parameters()):
        reference, budget = Reference(config, state).model.eval(), of_model(config.num_parameters())
        output = find_output(dump, reference(dump.ids), config)
        exact = trace(reference, output.ids)
        arrays = {name: array for name, array in dump.arrays.items() if name != output.name}
        halves, half = {name: in_half(array) for name, array in arrays.items()}, replace(output, logits=in_half(output.logits))
        dtypes, rounded = computed_in(half.logits, halves.values())

        @cache
        def attempt(dtype: torch.dtype) -> Attempt:
            given = (halves, half) if dtype in HALVES else (arrays, output)
            made = Attempt(Dumped(*given, exact, reference, dtype), progress)
            if dtype in HALVES and output.logits.dtype not in HALVES:
                made.notes.append(f"your numbers have no more digits than {_name(dtype)}: they are judged by its rounding")
            return made

        share, likelier = FIRST, False
        if rounded is not None and not (first := attempt(dtypes[0]).dumped).right:
            last = attempt(rounded).dumped
            likelier = last.has_computed and not last.right and not first.has_computed
            dtypes = [rounded, dtypes[0]] if likelier else [dtypes[0], rounded]
            share = UNLIKELY if last.right and not first.has_computed else FIRST
        for number, dtype in enumerate(dtypes, 1):
            tried = attempt(dtype)
            tried.run(budget.part(share if number < len(dtypes) else 1))
            if tried.settled:
                break
        else:
            attempts = [attempt(dtype) for dtype in dtypes]
            most = max(attempts, key=lambda one: len(one.dumped.held))  # in another precision rounding looks wrong at once
            if rounded is None and not arrays:
                gc.collect()  # a model and the table of its faults hold each other
                most.notes += _roundings(most.dumped)
            tried = next((one for one in attempts[: 1 if likelier else None] if one.causes), most)
        if tried.settled and tried.equal and dtype in HALVES and output.logits.dtype in HALVES:
            words = f"equal for a program that computes in {_name(dtype)}; one that computes in float32 has a mistake"
            tried.notes.append(f"{words}, of {tried.dumped.error:.1g}")
    padding, notes = padding_causes(tried.dumped.output.logits.double(), config)
    if others := of_a_step(dump.arrays, config):
        notes = [*notes, f"{shown(others[0])} has a parameter's shape: training steps are not read from a dump; {STEP}"]
    causes = ranked([*tried.causes, *padding], config.n_layer)
    equal = tried.equal and not causes
    return Diagnosis(
        "equal" if equal else "mismatch" if causes else "undetermined",
        None if equal else tried.first,
        tuple(causes),
        tuple(dict.fromkeys([*tried.notes, *notes])),
        dump.source,
        logits_error=tried.dumped.error,
        seen="dump" if arrays else "logits",
    )


def _roundings(dumped: Dumped) -> list[str]:
    """Return a note for a half precision whose rounding makes an error as large as that of logits that are dumped alone."""
    for dtype in HALVES:
        error = measured(dumped.reference, dumped.ids, dict(dumped.exact), dtype).points["logits"] / SLACK
        if dumped.error <= 2 * error:
            words = f"GPT-2 computed in {_name(dtype)} has an error of {error:.2g} in the logits"
            return [f"{words}; if your program is, it may be right"]
    return []


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
