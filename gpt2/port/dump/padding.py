"""A dump of padded rows: each row without its padding is a dump of its own, and its logits tell how the padding was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from gpt2.measure.dumps import Dump
from gpt2.measure.tracing import trace
from gpt2.port.diagnosis.causes import PlacedCause, ranked
from gpt2.port.diagnosis.logits import Reference
from gpt2.port.diagnosis.places import Place
from gpt2.port.diagnosis.report import SURE, Diagnosis, Divergence
from gpt2.port.dump.arrays import find_output
from gpt2.port.dump.tolerance import HALVES, excess, measured

SHOWN = 3  # rows that are named


class Reading(Enum):
    """How a program has read the padding of some rows, with words for it."""

    HIDDEN = ""
    COUNTED = (
        "positions count the padding, and give other logits than the row alone, unless position_ids begin at its first token"
    )
    AS_TEXT = "what stands at padded positions is read as text: the logits are those of the row without the mask"
    UNKNOWN = "its logits are not those of the row alone, whether positions count the padding or not"


@dataclass(frozen=True)
class Part:
    """Rows with real tokens at the same places, from ``begin`` on: ``dump`` holds these alone, ``ids`` (b, T) the whole rows."""

    rows: tuple[int, ...]
    begin: int
    dump: Dump
    ids: Tensor


def unpadded(dump: Dump, mask: Tensor) -> list[Part]:
    """Return the parts of a dump, that with most tokens first; ``mask`` (B, T): whether a token is real."""
    spans: dict[tuple[int, int], list[int]] = {}
    for row, real in enumerate(mask):
        tokens = real.nonzero().flatten().tolist()
        spans.setdefault((tokens[0], tokens[-1] + 1), []).append(row)
    parts = [_part(dump, rows, begin, end) for (begin, end), rows in spans.items()]
    return sorted(parts, key=lambda part: -part.dump.ids.numel())


def _part(dump: Dump, rows: Sequence[int], begin: int, end: int) -> Part:
    ids = dump.ids[rows, begin:end]
    arrays = {name: _cut(array, rows, begin, end, tuple(dump.ids.shape)) for name, array in dump.arrays.items()}
    return Part(tuple(rows), begin, replace(dump, ids=ids, arrays=arrays, batches=ids[None], mask=None), dump.ids[rows])


def _cut(array: Tensor, rows: Sequence[int], begin: int, end: int, shape: tuple[int, ...]) -> Tensor:
    """Return the rows and tokens of an array whose first axis is the batch; others, such as parameters, as they are."""
    batch, tokens = shape
    if array.ndim and array.shape[0] == batch * tokens != batch:
        array = array.unflatten(0, shape)
    axes = [axis for axis in range(1, array.ndim) if array.shape[axis] == tokens]
    axes = axes[-2:] if array.ndim > 3 and axes[-2:] == [array.ndim - 2, array.ndim - 1] else axes[:1]  # scores, or one axis
    if array.ndim < 2 or array.shape[0] != batch or not axes:
        return array
    array = array[list(rows)]
    for axis in axes:
        array = array.narrow(axis, begin, end - begin)
    return array


def examined(dump: Dump, mask: Tensor, reference: Reference, examine: Callable[[Dump], Diagnosis]) -> Diagnosis:
    """Return what ``examine`` says of the rows with most tokens, and what the logits of all rows say of their padding."""
    parts = unpadded(dump, mask)
    first = parts[0]
    tolerance = _tolerance(first, reference)
    read = {part.rows: _read(part, reference, tolerance) for part in parts}
    notes = [f"{_words(first)}: judged without the padding that your mask hides"]
    notes += [f"{_words(part)}: {how.value}" for part in parts if (how := read[part.rows][0]) is Reading.COUNTED]
    found = Diagnosis("equal", None, (), module=dump.source, seen="logits")
    if read[first.rows][0] not in (Reading.COUNTED, Reading.AS_TEXT):
        found = examine(first.dump)
    wrong = next((part for part in parts if read[part.rows][0] in (Reading.AS_TEXT, Reading.UNKNOWN)), None)
    if found.ok and wrong is not None:
        how, error = read[wrong.rows]
        places = tuple(Place(layer, "attn") for layer in range(reference.model.config.n_layer))
        evidence = f"they differ by {error:.1e} from those of the row alone"
        cause = PlacedCause("padding-wrong", places, f"{_words(wrong)}: {how.value}", evidence, SURE)
        causes = tuple(one.cause() for one in ranked([cause], len(places)))
        found = replace(found, verdict="mismatch", first_divergence=Divergence("logits", None, error), causes=causes)
    return replace(found, notes=(*found.notes, *notes))


def _tolerance(part: Part, reference: Reference) -> float:
    """Return the error of logits that rounding explains, in the dtype that they may have been computed in."""
    logits = find_output(part.dump, reference(part.dump.ids), reference.model.config)
    dtype = torch.float32 if logits is None or logits.logits.dtype not in HALVES else logits.logits.dtype
    exact = trace(reference.model, part.dump.ids)
    return measured(reference.model, part.dump.ids, exact, dtype).points["logits"]


def _read(part: Part, reference: Reference, tolerance: float) -> tuple[Reading, float]:
    """Return how the padding of some rows was read, and the error of their logits as those of the rows alone."""
    alone = reference(part.dump.ids)
    output = find_output(part.dump, alone, reference.model.config)
    if output is None or len(output.ids) != len(part.ids):
        return Reading.HIDDEN, 0.0

    def error(expected: Tensor) -> float:
        mine = output.logits[..., : expected.shape[-1]].double()
        return excess(mine, expected[:, -mine.shape[1] :], output.logits.dtype)

    if (apart := error(alone)) <= tolerance:
        return Reading.HIDDEN, apart
    if not part.begin:
        return Reading.UNKNOWN, apart
    if error(reference(part.dump.ids, slice(part.begin, None))) <= tolerance:
        return Reading.COUNTED, apart
    tokens = torch.arange(part.ids.shape[1])
    real = slice(part.begin, part.begin + part.dump.ids.shape[1])
    as_text = (reference(part.ids, positions)[:, real] for positions in (tokens, (tokens - part.begin).clamp(min=0)))
    return (Reading.AS_TEXT if any(error(logits) <= tolerance for logits in as_text) else Reading.UNKNOWN), apart


def _words(part: Part) -> str:
    rows = ", ".join(map(str, part.rows[:SHOWN])) + (", ..." if len(part.rows) > SHOWN else "")
    return f"row{'s' if len(part.rows) > 1 else ''} {rows}"
