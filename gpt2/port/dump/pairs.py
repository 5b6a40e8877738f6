"""Run all pairs of many faults on the first tokens, in one batch.

A stage that neither fault of a pair replaces is computed for all pairs at once, and a replaced one for all pairs with that fault.
So a pair costs little more than its multiplications, and on one token these are few. No token sees a later one, so what a pair
makes of the first token shows whether it may be the program's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from gpt2.port.alternative import Shown
from gpt2.port.deadline import Deadline
from gpt2.port.dump.sieve import Lens
from gpt2.port.dump.simulation import Program
from gpt2.port.graph import LAST, NODES, OUTSIDE, Formula, Site, State

MAX_ELEMENTS = 1 << 23  # of the widest tensor of the pairs that are run together
NOTHING = -1  # in a sequence of blocks
HEADS = ("attn.qh", "attn.kh", "attn.vh")


class PairRunner:
    """Runs pairs of ``programs`` on the tokens of ``lens``, one row of them. Their numbers begin at 1; 0 replaces nothing.

    A program gives NaN if a formula of its cannot be computed for many rows at once, or has another shape than GPT-2's.
    """

    def __init__(self, lens: Lens, programs: Sequence[Program], deadline: Deadline) -> None:
        self.lens, self.simulation, self.deadline = lens, lens.simulation, deadline
        self.programs = [Program(), *programs]
        span, config = lens.span, lens.simulation.config
        self.blocks = range(span.first, span.last)
        self.tables: dict[tuple[int | None, str], dict[int, Formula]] = defaultdict(dict)
        for number, program in enumerate(self.programs):
            for layer, stages in program.blocks.items():
                for stage, formula in stages.items():
                    self.tables[layer, stage][number] = formula
            for stage in OUTSIDE:
                if stage in program.outside:
                    self.tables[None, stage][number] = program.outside[stage]
        tokens = self.simulation.ids.shape[1]
        widest = tokens * max(config.inner, 3 * config.n_embd, config.n_head * tokens, len(lens.columns))
        self.chunk = max(1, MAX_ELEMENTS // widest)

    @staticmethod
    def takes(lens: Lens) -> bool:
        """Return whether whole blocks, and all tokens' values, lie between what is known and what is compared."""
        entrance = lens.span.entrance
        whole = lens.span.until == LAST and (entrance is None or entrance.after < 0)
        return whole and not lens.simulation.base.run and lens.span.wanted.shape[1] == lens.simulation.ids.shape[1]

    def clash(self) -> Tensor:
        """Return (P, P): whether both programs replace the same stage, or both have an order of blocks."""
        replaced = torch.zeros(len(self.programs), len(self.tables) + 1)
        for column, table in enumerate(self.tables.values()):
            replaced[list(table), column] = 1.0
        replaced[:, -1] = torch.tensor([float(program.order is not None) for program in self.programs])
        return replaced @ replaced.T > 0

    @cached_property
    def _other_heads(self) -> Tensor:
        """Return (P,) whether a program has another number of heads than GPT-2."""
        out = torch.zeros(len(self.programs), dtype=torch.bool)
        for layer, node in itertools.product(self.blocks, HEADS):
            state = self.simulation.right_state(layer)
            for number, formula in self.tables.get((layer, node), {}).items():
                value = _tried(formula, self.simulation.site(layer), state)
                out[number] |= value is not None and value.shape[1] != self.simulation.config.n_head
        return out

    def values(self, pairs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some of the ``pairs`` (N, 2), numbers of programs, and what each gives (N, T, X); until the deadline."""
        ordered = torch.tensor([program.order is not None for program in self.programs])[pairs].any(1)
        odd = self._other_heads[pairs].any(1)
        parts = [pairs[~ordered & ~odd], pairs[ordered & ~odd]]
        parts += [pairs[(pairs == number).any(1)] for number in self._other_heads.nonzero().flatten().tolist()]
        for part in parts:
            for some in part.split(self.chunk):
                if self.deadline.passed:
                    return
                if len(some):
                    yield some, self._run(some)

    def alone(self) -> Tensor:
        """Return what each program gives alone (P, T, X), the one that replaces nothing first; NaN behind the deadline."""
        numbers = torch.arange(len(self.programs))
        out = torch.full((len(numbers), *self.lens.wanted.shape[1:]), torch.nan, dtype=self.simulation.dtype)
        for some, values in self.values(torch.stack([numbers, torch.zeros_like(numbers)], 1)):
            out[some[:, 0]] = values
        return out

    def near(self, pairs: Tensor, limit: float) -> Tensor:
        """Return those of the ``pairs`` whose largest difference from the program is ``limit`` at most, the nearest first."""
        wanted, kept, errors = self.lens.wanted[0], [pairs[:0]], [torch.zeros(0)]
        for some, values in self.values(pairs):
            error = (values - wanted).abs().amax((1, 2)).nan_to_num(torch.inf, torch.inf)
            kept.append(some[error <= limit])
            errors.append(error[error <= limit])
        return torch.cat(kept)[torch.cat(errors).argsort()]

    def _run(self, pairs: Tensor) -> Tensor:
        entrance, simulation = self.lens.span.entrance, self.simulation
        x = simulation.embed() if entrance is None else entrance.state["x"].to(simulation.dtype)
        x = self._stage(None, "embed", pairs, {"x": x.expand(len(pairs), -1, -1)}, lambda c, s: s["x"])
        for layers in self._sequence(pairs).T:
            if bool((layers == layers[0]).all()):
                x = self._block(int(layers[0]), pairs, x)
                continue
            x = x.clone()
            for layer in set(layers.tolist()) - {NOTHING}:
                rows = (layers == layer).nonzero().flatten()
                x[rows] = self._block(layer, pairs[rows], x[rows])
        span, columns = self.lens.span, self.lens.columns
        if span.end not in ("ln_f", "logits"):
            return x
        x = self._stage(None, "ln_f", pairs, {"x": x}, simulation.outside(Program(), "ln_f"))
        if span.end == "logits":
            own = simulation.table[columns]
            held = self.tables.get((None, "head"), {})
            heads = {number: made(simulation.site(0), {})[columns].to(x.dtype) for number, made in held.items()}
            parts = _groups(heads, pairs)
            x = _placed([(rows, x[rows] @ heads.get(number, own).T) for number, rows in parts], len(pairs))
        return x - x.mean(-1, keepdim=True) if span.softmaxed else x

    def _sequence(self, pairs: Tensor) -> Tensor:
        """Return (N, S) the block that each pair runs at each step; NOTHING behind its last one."""
        orders = {number: program.order for number, program in enumerate(self.programs) if program.order is not None}
        steps = max([len(self.blocks), *map(len, orders.values())])
        table = torch.full((len(self.programs), steps), NOTHING)
        table[:, : len(self.blocks)] = torch.tensor(self.blocks)
        for number, order in orders.items():
            table[number] = torch.tensor([*order, *[NOTHING] * (steps - len(order))])
        which = torch.where(torch.isin(pairs[:, 1], torch.tensor([*orders])), pairs[:, 1], pairs[:, 0])
        sequence = table[which]
        return sequence[:, : int((sequence != NOTHING).any(0).sum())]

    def _block(self, layer: int, pairs: Tensor, x: Tensor) -> Tensor:
        state, right = {"x": x}, self.simulation.right(layer)
        for stage in NODES:
            state[stage] = self._stage(layer, stage, pairs, state, right[stage])
        return state[""]

    def _stage(self, layer: int | None, stage: str, pairs: Tensor, state: State, right: Formula) -> Tensor:
        """Return a stage of all pairs: by the formula of the fault that replaces it, or by GPT-2's."""
        found = self.tables.get((layer, stage), {})
        table = {number: formula for number, formula in found.items() if not isinstance(formula, Shown)}
        site = self.simulation.site(layer or 0)
        if not table:
            return right(site, state)
        groups = list(_groups(table, pairs))
        value = right(site, state) if any(number < 0 and 2 * len(rows) > len(pairs) for number, rows in groups) else None
        shape = None  # of one program's alone it may be another
        if value is not None:  # most pairs', so no rows are picked for it
            value, shape = value.clone(), value.shape[1:]
        elif len(groups) > 1:
            shape = right(site, _some(state, torch.tensor([0]))).shape[1:]
        parts = []
        for number, rows in groups:
            if number < 0 and value is not None:
                continue
            some = _some(state, rows)
            one = right(site, some) if number < 0 else _tried(table[number], site, some)
            if one is None or (shape is not None and one.shape[1:] != shape):
                one = torch.full((1, *(shape or right(site, state).shape[1:])), torch.nan)
            parts.append((rows, one.to(self.simulation.dtype).expand(len(rows), *one.shape[1:])))
        return _placed(parts, len(pairs), value)


class _Rows(Mapping[str, Tensor]):
    """Some rows of a state; each tensor is taken when a formula reads it."""

    def __init__(self, whole: State, rows: Tensor) -> None:
        self._whole, self._rows = whole, rows

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[name][self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def _some(state: State, rows: Tensor) -> State:
    return cast(State, _Rows(state, rows))


def _groups(table: Mapping[int, object], pairs: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield each program of ``table`` with the numbers of the pairs that have it; -1 with those that have none."""
    has = torch.zeros(int(pairs.max()) + 1, dtype=torch.bool)
    has[[number for number in table if number < len(has)]] = True
    which = torch.where(has[pairs[:, 0]], pairs[:, 0], torch.where(has[pairs[:, 1]], pairs[:, 1], -1))
    ordered, rows = which.sort()
    numbers, counts = ordered.unique_consecutive(return_counts=True)
    yield from zip(numbers.tolist(), rows.split(counts.tolist()), strict=True)


def _placed(parts: Sequence[tuple[Tensor, Tensor]], count: int, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = parts[0][1].new_empty(count, *parts[0][1].shape[1:])
    for rows, value in parts:
        out[rows] = value
    return out


def _tried(formula: Formula, site: Site, state: State) -> Tensor | None:
    """Return what a formula gives; None, if it cannot be computed for many rows."""
    try:
        return formula(site, state)
    except (IndexError, RuntimeError):
        return None
