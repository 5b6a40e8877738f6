"""The weights of several models: their size, how far each moved from the first, and which is another one's rounding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from gpt2.checkpoint.checkpoint import StoredCheckpoint
from gpt2.checkpoint.keys import expected
from gpt2.comparison.blame import quantisation
from gpt2.comparison.compatibility import Compatibility, compatibility, parameters_of_both
from gpt2.comparison.many_results import letters_of
from gpt2.comparison.sides.checkpoint_side import CheckpointSide, readers
from gpt2.comparison.sides.engine import EngineSide
from gpt2.comparison.sides.side import Side
from gpt2.comparison.weights import distance, weights_norm
from gpt2.data import Tokenizer
from gpt2.measure.metrics import Progress


def size_of(side: Side) -> int | None:
    """Return the bytes of a model's weights, as :class:`Candidate` says."""
    if isinstance(side, CheckpointSide):
        checkpoint = side.checkpoint
        if isinstance(checkpoint, StoredCheckpoint) and side.dtype == checkpoint.stored:
            files, held = checkpoint.assignment.files, checkpoint.assignment.sources.values()
            return sum(files[key].entries[key].end - files[key].entries[key].start for keys in held for key in keys)
        return side.config.num_parameters() * side.dtype.itemsize
    return sum(path.stat().st_size for path in side.files) if isinstance(side, EngineSide) else None


def made_of(sides: Sequence[Side], own: Sequence[Tokenizer | None], progress: Progress) -> list[str]:
    """Say of each model whether it is another one, rounded to a type or as it is: "A in q8_0"; "" if not."""
    letters, made = letters_of(len(sides)), [""] * len(sides)
    matrix = "h.0.attn.c_proj.weight"  # read of each model once: those far apart there are not looked at further
    seen = {n: side.reader(mapped=True)(matrix).float() for n, side in enumerate(sides) if isinstance(side, CheckpointSide)}
    for b, a in itertools.permutations(seen, 2):
        whole, rounded = sides[a], sides[b]
        if made[b] or seen[a].shape != seen[b].shape or (seen[a] - seen[b]).norm() > 0.05 * seen[a].norm():
            continue
        assert isinstance(whole, CheckpointSide)
        assert isinstance(rounded, CheckpointSide)
        if (names := expected(whole.config)) != expected(rounded.config):
            continue
        if not compatibility(whole.config, rounded.config, own[a], own[b]).departures:
            progress(f"weights: is {letters[b]} made of {letters[a]}?")
            read = readers(whole, rounded, mapped=True)
            if all((type := quantisation(*read, some)) is not None for some in ([matrix], names)):
                same = all(torch.equal(read[0](name), read[1](name)) for name in names)
                made[b] = f"{letters[a]}, the same weights" * (a < b) if same else f"{letters[a]} in {type}"
    return made


def moved_from_first(sides: Sequence[Side], fits: Sequence[Compatibility], progress: Progress) -> list[float | None]:
    """Return the norm of each model's change of weights over the first one's norm; None where they cannot be compared."""
    first, norm = sides[0], None
    moved: list[float | None] = [None]
    for side, fit in zip(sides[1:], fits[1:], strict=True):
        if "weights" in fit.impossible or not (isinstance(first, CheckpointSide) and isinstance(side, CheckpointSide)):
            moved.append(None)
            continue
        names, (read, other) = parameters_of_both(first.config, side.config), readers(first, side, mapped=True)
        norm = weights_norm(expected(first.config), first.reader(mapped=True)) if norm is None else norm
        moved.append(distance(names, read, other, norm, progress=progress))
    return moved
