"""What a dump holds, if its program computed in one dtype: its arrays, those that are right, and what rounding explains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import points
from gpt2.model import GPT2
from gpt2.port.dump.arrays import Output, parts, recognised
from gpt2.port.recording.pool import Pool
from gpt2.port.terms.tolerance import UNITS, Tolerance, excess, measured

WALKED = 3  # arrays of a stream's size a block from which on a walk is tried
THIRDS = ("[q]", "[k]", "[v]")  # endings of the names of the parts of c_attn's result
SHOWN = 3  # recognised arrays that a note names


@dataclass(frozen=True, eq=False)
class Dumped:
    """A dump's ``arrays``, all but the logits, under the assumption that they were computed in ``tolerance.dtype``.

    ``exact``: the trace of ``reference``, our model in float64, on the same ids. ``held``: the names of the arrays that hold a
    right value, by traced point. ``error``: of the logits; ``right``: rounding explains it.
    """

    arrays: Mapping[str, Tensor]
    output: Output
    exact: Mapping[str, Tensor]
    reference: GPT2
    tolerance: Tolerance
    pool: Pool
    held: Mapping[str, tuple[str, ...]]
    error: float
    right: bool

    @classmethod
    def of(
        cls, arrays: Mapping[str, Tensor], output: Output, exact: Mapping[str, Tensor], reference: GPT2, dtype: torch.dtype
    ) -> Dumped:
        config, ids = reference.config, output.ids
        tolerance = measured(reference, ids, dict(exact), dtype)
        pool = Pool(tolerance)
        for name, array in arrays.items():
            for part, tensor in parts(name, array, config, *ids.shape):
                pool.add(tensor, part, array.dtype, part == name)
        pool.logits, pool.logits_dtype = output.logits.double(), output.logits.dtype
        held = recognised(pool, exact, config)
        expected = exact["logits"][:, -output.logits.shape[1] :]
        mine = output.logits[..., : config.vocab_size].double()
        right = excess(mine, expected, output.logits.dtype) <= tolerance.points["logits"]
        return cls(arrays, output, exact, reference, tolerance, pool, held, worst_relative_error(mine, expected), right)

    @property
    def config(self) -> GPT2Config:
        return self.reference.config

    @property
    def ids(self) -> Tensor:
        return self.output.ids

    @property
    def order(self) -> list[str]:
        return points(self.config.n_layer)

    @property
    def coarsest(self) -> torch.dtype:
        """The dtype in which an array is stored that rounds most."""
        dtypes = {array.dtype for array in self.arrays.values()} | {self.output.logits.dtype}
        return max(dtypes, key=lambda dtype: UNITS[dtype][0])

    @property
    def is_constant(self) -> bool:
        """Whether each array is one number throughout."""
        return all(bool((one == one.flatten()[0]).all()) for one in (self.output.logits, *self.arrays.values()))

    @property
    def has_even_logits(self) -> bool:
        """Whether the logits are the same at every position."""
        flat = self.output.logits.flatten(0, 1)
        return len(flat) > 1 and bool((flat == flat[0]).all())

    @property
    def is_walkable(self) -> bool:
        """Whether it holds so many values that a walk from one to the next may succeed."""
        size = self.ids.numel() * self.config.n_embd
        entries = zip(self.pool.names, self.pool.entries, strict=True)
        names = {name[:-3] if name.endswith(THIRDS) else name for name, entry in entries if entry.numel() == size}
        return len(names) >= WALKED * self.config.n_layer

    @property
    def has_computed(self) -> bool:
        """Whether an array holds a right value that is computed, and not read from a table."""
        return not self.held.keys() <= {"wte", "wpe"}

    def notes(self) -> Iterator[str]:
        """Yield what the report says about the arrays."""
        dtypes = sorted({str(array.dtype).removeprefix("torch.") for array in [*self.arrays.values(), self.output.logits]})
        if not self.arrays:
            yield f"your dump holds the logits alone ({dtypes[0]})"
            return
        origin = {name: name.partition("[")[0].removesuffix(" masked") for names in self.held.values() for name in names}
        count = len(set(origin.values()) & set(self.arrays))
        some = [f"{names[0]} is {point}" for point, names in self.held.items() if len(names) == 1][:SHOWN]
        shown = f", such as: {', '.join(some)}" if some else ""
        arrays = f"{len(self.arrays)} other array{'s' if len(self.arrays) != 1 else ''}"
        yield f"your dump holds the logits, under the name {self.output.name}, and {arrays} ({', '.join(dtypes)})"
        yield f"{count} of the arrays {'hold' if count != 1 else 'holds'} GPT-2's own values{shown}"
