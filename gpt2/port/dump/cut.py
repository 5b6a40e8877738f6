"""Run all pairs of a fault before a block and a fault in it, on the first tokens.

What enters the block is computed once for each fault before it. A fault in the block is then run on all of these streams at once,
from the first stage that it replaces. So a pair costs little more than the multiplications of the blocks behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gpt2.port.deadline import Deadline
from gpt2.port.dump.batches import Batches
from gpt2.port.dump.sieve import Lens
from gpt2.port.dump.simulation import Program
from gpt2.port.graph import NODES, ORDER, State

MAX_ELEMENTS = 1 << 20  # of the widest tensor of the pairs that are run together
COLUMNS = 48  # vocabulary entries that are compared


class Cut:
    """Pairs of programs around the place where block ``layer`` begins; behind the last block if it is the number of blocks.

    ``lens``: all tokens of one row, of which the first ``tokens`` are compared.
    """

    def __init__(self, lens: Lens, layer: int, tokens: int, deadline: Deadline) -> None:
        self.lens, self.layer, self.tokens, self.deadline = lens, layer, tokens, deadline
        self.simulation, self.span = lens.simulation, lens.span
        self.columns = torch.arange(min(lens.wanted.shape[-1], COLUMNS) if self.span.end == "logits" else lens.wanted.shape[-1])
        self.wanted = lens.wanted[0, :tokens, self.columns]

    def entering(self, programs: Sequence[Program]) -> Tensor:
        """Return what enters the block with each program (P, T, D); NaN behind the deadline."""
        entrance = self.span.entrance
        start = None if entrance is None else entrance.state["x"].to(self.simulation.dtype)
        shape = self.simulation.ids.shape[1], self.simulation.config.n_embd
        out = torch.full((len(programs), *shape), torch.nan, dtype=self.simulation.dtype)
        for number, stream in Batches(self.simulation).outputs(programs, self.span.first, self.layer, start):
            if self.deadline.passed:
                break
            out[number] = stream[0]
        return out

    def near(self, entering: Tensor, programs: Sequence[Program], later: Sequence[bool], limit: float) -> Tensor:
        """Return which streams of ``entering`` (N, T, D) and which programs in the block give the first tokens, to ``limit``.

        (M, 2): their numbers, the nearest first. ``later``: whether a token sees later ones in a program.
        """
        wide = self.simulation.config.inner
        found, errors = [torch.zeros(0, 2, dtype=torch.long)], [torch.zeros(0)]
        for sees_later, tokens in ((False, self.tokens), (True, entering.shape[1])):
            some = [number for number, one in enumerate(later) if one == sees_later]
            streams, twins = entering[:, :tokens].unique(dim=0, return_inverse=True)
            rows = max(1, MAX_ELEMENTS // (tokens * wide))
            for part, begin in zip(streams.split(rows), range(0, len(streams), rows), strict=True) if some else ():
                for numbers, values in self._behind(part, [(number, programs[number]) for number in some]):
                    error = (values - self.wanted).abs().amax((2, 3)).nan_to_num(torch.inf, torch.inf)  # (P, N)
                    for program, row in (error <= limit).nonzero().tolist():
                        alike = (twins == begin + row).nonzero().flatten()
                        found.append(torch.stack([alike, torch.full_like(alike, numbers[program])], 1))
                        errors.append(error[program, row].expand(len(alike)))
        return torch.cat(found)[torch.cat(errors).argsort()]

    def _behind(self, streams: Tensor, programs: Sequence[tuple[int, Program]]) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the numbers of some programs and their values at the end (P, N, T, X), until the deadline."""
        if self.layer == self.span.last:
            for number, program in programs:
                if self.deadline.passed:
                    return
                yield [number], self._ended(streams, program)[None, :, : self.tokens]
            return
        state = self.simulation.run_block(self.layer, {"x": streams}, {})
        step = max(1, MAX_ELEMENTS // (streams.shape[:-1].numel() * self.simulation.config.inner))
        for begin in range(0, len(programs), step):
            if self.deadline.passed:
                return
            results = {number: self._block(state, program) for number, program in programs[begin : begin + step]}
            held = {number: x[:, : self.tokens] for number, x in results.items() if x is not None}
            if held:
                x = torch.cat([*held.values()])
                for layer in range(self.layer + 1, self.span.last):
                    x = self.simulation.run_block(layer, {"x": x}, {})[""]
                yield [*held], self._ended(x, Program()).unflatten(0, (len(held), -1))

    def _block(self, state: State, program: Program) -> Tensor | None:
        """Return the block's result (N, T, D) by a program; None if it cannot be computed for many rows, or has another shape."""
        replaced = program.blocks[self.layer]
        first = min(ORDER[stage] for stage in replaced)
        try:
            begun = {name: state[name] for name in ("x", *NODES[:first])}
            x = self.simulation.run_block(self.layer, begun, replaced, after=first - 1)[""]
        except (IndexError, RuntimeError):
            return None
        return x if x.shape == state["x"].shape else None

    def _ended(self, x: Tensor, program: Program) -> Tensor:
        if self.span.end not in ("ln_f", "logits"):
            return x
        x = self.simulation.normed(program, x)
        return x @ self.simulation.head(program)[self.lens.columns[self.columns]].T if self.span.end == "logits" else x
