"""Run many programs on a part: each is some rows of one batch, and a node is computed once for all that do not replace it.

Blocks before the first that one of them replaces are GPT-2's, and computed once. On the first tokens of a text, which see no
later ones, a program costs little.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from gpt2.errors import misfit
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.graph import LAST, NODES, READS, RIGHT, Edits, Entrance, Formula, Lazily, Model, Program, Site, State, run_block
from gpt2.port.search.part import MIN_ROWS, Part

DISTANCE = 12  # operators of a comparison
COLUMNS = 256  # vocabulary entries that are compared
MAX_PROGRAMS = 128  # that are run together: those that begin in one block
MAX_ELEMENTS = 1 << 20  # of the widest tensor of the rows that are run together: few enough to stay in a cache
Moved = dict[str, set[int]]  # by node: the programs whose value is not that of GPT-2
MAX_WORK = 1 << 34  # multiplications for these rows, after which a caller looks at the budget


def rows_together(model: Model, blocks: int = 1, columns: int = 1) -> int:
    """Return how many programs run together, through so many blocks, and to so many columns of the logits."""
    config, size = model.config, model.ids.numel()
    widest = max(config.inner, 3 * config.n_embd, config.n_head * model.ids.shape[1], columns)
    work = max(1, blocks) * (4 * config.n_embd + 2 * config.inner) * config.n_embd
    return max(1, min(MAX_PROGRAMS, MAX_ELEMENTS // (size * widest), MAX_WORK // (size * work)))


def by_node(every: Sequence[Edits]) -> dict[str, dict[int, Formula]]:
    """Return the formulas of several programs by node, and by the number of the program."""
    own: dict[str, dict[int, Formula]] = {}
    for n, edits in enumerate(every):
        for node, formula in edits.items():
            own.setdefault(node, {})[n] = formula
    return own


def _of_program(batch: State, n: int, read: set[str], node: str, x: Tensor) -> Tensor:
    read.add(node)
    return x[n] if node in batch else x


def in_rows(
    c: Site, node: str, shared: State, batch: State, own: Mapping[int, Formula], count: int, odd: set[int], moved: Moved
) -> Tensor:
    """Return a node of the first ``count`` programs (N, B, ...): by GPT-2's formula, where they replace it by their ``own``.

    ``batch``: their nodes so far, in this layout; ``shared``: nodes (B, ...) that all of them have. Programs whose value has
    another shape, or cannot be computed, are added to ``odd``, and those whose value is not GPT-2's to ``moved``, by node.
    """
    reads = READS.get(node, ("x",))
    moved[node] = set(own).union(*(moved.get(read, ()) for read in reads))
    if node == "embed":
        made = batch["x"]
    else:
        some = {n: batch[n][:count] if n in batch else shared[n].expand(count, *shared[n].shape) for n in reads}
        alike = not any(x.stride(0) for x in some.values())  # of all programs: computed once
        read = {name: x[0] if alike else x.flatten(0, 1) for name, x in some.items()}
        made = RIGHT[node](c, read)
        made = made.expand(count, *made.shape) if alike else made.unflatten(0, (count, -1))
    c.charge(node, made)
    made = made.clone() if own else made
    every, none, several = {**shared, **batch}, made.new_empty(0), len({*own.values()}) < len(own)
    known: dict[Formula, tuple[set[str], Tensor]] = {}  # what a formula gives, and reads, where that is GPT-2's
    for n, formula in own.items():
        if n in odd:
            continue
        used, value = known.get(formula, (set[str](), none))
        if value is none or not used.isdisjoint(each for each in moved if n in moved[each]):
            used, value = set(), none
            with misfit():
                value = formula(c, Lazily(every, partial(_of_program, batch, n, used)))
            if several and used.isdisjoint(each for each in moved if n in moved[each]):
                known[formula] = used, value
        c.charge(node, value, is_own=True)
        if value.ndim == made.ndim - 1 and value.shape[1:] == made.shape[2:]:
            made[n].copy_(value)
        else:
            odd.add(n)
    return made


class Batch:
    """Runs programs on the first ``rows`` and ``tokens`` of a part, all if None; in float32 if the model is large."""

    def __init__(self, part: Part, rows: int | None = None, tokens: int | None = None) -> None:
        self.part, exact = part, part.model
        whole = exact
        if not exact.small:
            whole = exact.always("float32", lambda: Model(exact.state, exact.config, exact.ids, torch.float32))
            whole.budget = exact.budget
        self.model = whole.on_ids(whole.ids[:rows, :tokens]) if rows or tokens else whole
        wanted = part.shown[part.end]
        self.columns = torch.arange(wanted.shape[-1])
        if part.end == "logits" and len(self.columns) > COLUMNS:
            self.columns = torch.randperm(len(self.columns), generator=torch.Generator().manual_seed(0))[:COLUMNS]
        if part.end.endswith("attn.weights") and tokens:
            self.columns = self.columns[:tokens]
        self.rows, length = self.model.ids.shape
        self.tokens = tokens
        self.wanted = self._cut(part)
        cut = part.entrance and part.entrance.cut(self.rows, length, whole.dtype)
        self.entrance = cut or Entrance(0, {"x": self.model.embed()})
        self.streams = {self.entrance.layer: self.entrance.state["x"]}  # GPT-2's, by the block that they enter
        self.most = rows_together(self.model, len(part.blocks), len(self.columns))

    def errors(self, some: Sequence[Candidate]) -> Iterator[tuple[float, Candidate]]:
        """Yield candidates with their relative error at the end, what the head may change taken out, within the budget."""
        for few, values in self.values(some):
            yield from zip(self.distances(values), few, strict=True)

    def values(self, some: Sequence[Candidate]) -> Iterator[tuple[list[Candidate], Tensor]]:
        """Yield some of the candidates and what they give (N, B, T, X), within the budget. Left out: what cannot be computed."""
        rest, alone = dict[Candidate, int](), list[Candidate]()  # those with the block in which each begins to be another program
        for one in some:
            program = one.program or Program()
            if program.order is not None:
                alone.append(one)
                continue
            places = (layer for layer, edits in program.blocks.items() for node in edits if self.part.computes(layer, node))
            rest[one] = -1 if "embed" in program.outside else min(places, default=self.part.blocks.stop)
        ordered = sorted(rest, key=lambda one: rest[one])
        for few in (ordered[n : n + self.most] for n in range(0, len(rest), self.most)):
            if self.model.budget.spent:
                return
            values, odd = self._ended([one.program or Program() for one in few], rest[few[0]])
            alone += [few[n] for n in odd]
            kept = [n for n in range(len(few)) if n not in odd]
            yield [few[n] for n in kept], values.unflatten(0, (len(few), self.rows))[kept]
        for one in alone:
            if self.model.budget.spent:
                return
            with misfit():
                value = self.part.values(one, self.model, self.part.entrance and self.entrance)[self.part.end]
                value = value[..., -self.wanted.shape[-2] :, self.columns].expand_as(self.wanted)
                yield [one], self._centred(value)[None]

    def _cut(self, part: Part) -> Tensor:
        """Return what is compared of the array at the end of a part."""
        wanted = part.shown[part.end][: self.rows, ..., : self.tokens, self.columns].to(self.model.dtype)
        if part.softmaxed:
            wanted = self._centred(wanted.clamp(min=1e-12).log() if part.softmaxed == "softmax" else wanted)
        return wanted

    def _centred(self, logits: Tensor) -> Tensor:
        return logits - logits.mean(-1, keepdim=True) if self.part.softmaxed else logits

    def distances(self, values: Tensor, part: Part | None = None) -> list[float]:
        """Return the largest errors of values (N, B, T, X), over the root mean square; perhaps of what ends ``part``."""
        wanted = self._cut(part) if part else self.wanted
        apart = [wanted - values]
        self.model.budget.spend(DISTANCE, DISTANCE * values.numel())
        if self.part.end == "logits" and not self.part.softmaxed:
            goal, middle = (one - one.mean(-1, keepdim=True) for one in (wanted, values))
            factor = (middle * goal).sum(-1, keepdim=True) / middle.square().sum(-1, keepdim=True).clamp(min=1e-30)
            apart.append(goal - factor * middle)
            if wanted.shape[:2].numel() >= MIN_ROWS:
                apart.append(apart[0] - apart[0].mean((1, 2), keepdim=True))
        least = torch.stack([one.abs().flatten(1).amax(1) for one in apart]).amin(0)
        return cast(list[float], (least / wanted.square().mean().sqrt().clamp(min=1e-30)).nan_to_num(math.inf, math.inf).tolist())

    def _entering(self, layer: int) -> Tensor:
        """Return GPT-2's stream that enters a block; what ends the last one, for the number of blocks."""
        if layer not in self.streams:
            x, part = self._entering(layer - 1), self.part
            state, after = (self.entrance.state, self.entrance.after) if layer - 1 == self.entrance.layer else ({"x": x}, -1)
            until = part.until if layer == part.blocks.stop else LAST
            self.streams[layer] = run_block(self.model.site(layer - 1), state, {}, after, until)[NODES[until]]
        return self.streams[layer]

    def _ended(self, programs: Sequence[Program], begin: int) -> tuple[Tensor, set[int]]:
        """Return the values at the end (N B, T, X) of programs that are GPT-2 before block ``begin``; -1: not even before all.

        And the numbers of those that must be run alone, because a value has another shape, or cannot be computed.
        """
        part, model, odd, count, last = self.part, self.model, set[int](), len(programs), "embed"
        start = max(begin, self.entrance.layer)
        x = self._entering(start)
        x = x.expand(count, *x.shape)
        outside, site, moved = by_node([one.outside for one in programs]), model.site(0), Moved()
        if begin < 0:
            x = in_rows(site, "embed", {}, {"x": x}, outside.get("embed", {}), count, odd, moved)
        for layer in range(start, part.blocks.stop):
            state, after = {"x": x}, -1
            if layer == self.entrance.layer and self.entrance.after >= 0:
                after = self.entrance.after
                state = {node: y.expand(count, *y.shape) for node, y in self.entrance.state.items()}
            until = part.until if layer == part.blocks[-1] else LAST
            own, moved = by_node([one.blocks.get(layer, {}) for one in programs]), {"x": moved.get(last, set())}
            for name in NODES[after + 1 : until + 1]:
                state[name] = in_rows(model.site(layer), name, {}, state, own.get(name, {}), count, odd, moved)
            x, last = state[NODES[until]], NODES[until]
        if part.is_last:
            moved = {"x": moved.get(last, set())}
            x = in_rows(site, "ln_f", {}, {"x": x}, outside.get("ln_f", {}), count, odd, moved)
        x = x.flatten(0, 1)
        if part.end == "logits":
            x = x[:, -self.wanted.shape[1] :]
            usual, heads = model.table[self.columns], [one.outside.get("head") for one in programs]
            given = x.split(len(x) // count) if any(heads) else [x]
            # each whole table is dropped before the next one is made
            tables = (head(site, {})[self.columns].to(x.dtype) if head else usual for head in heads[: len(given)])
            x = torch.cat([y @ table.T for y, table in zip(given, tables, strict=True)])
            model.budget.spend(2 * len(given), x.numel(), x.numel() * model.config.n_embd)
        return self._centred(x), odd
