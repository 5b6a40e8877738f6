"""Run many programs on a part of the forward pass: what they share is computed once, the rest in one batch.

Up to its first replaced node, a program is GPT-2. From there on it is a row of a batch, in which a node is computed for all rows
that do not replace it, and for all rows that replace it by the same formula. So a program costs little more than its own
multiplications behind its first fault; on the first tokens of a text, which see no later ones, these are few.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from gpt2.port.alternative import Shown
from gpt2.port.deadline import Deadline
from gpt2.port.dump.lenses import Lens, Nearness, Shared
from gpt2.port.graph import (
    NODES,
    ORDER,
    RIGHT,
    Formula,
    Program,
    Site,
    State,
)

BEFORE = -1  # the step before all nodes: the embeddings, and the order of blocks
MAX_ELEMENTS = 1 << 20  # of the widest tensor of the rows that are run together: few enough to stay in a cache
MAX_WORK = 1 << 34  # multiplications for these rows: seconds, after which a caller looks at the clock


class Evaluator:
    """Runs ``programs`` on the part that ``lens`` shows; each is known by its number."""

    def __init__(self, lens: Lens, programs: Sequence[Program], deadline: Deadline) -> None:
        self.lens, self.model, self.span, self.deadline = lens, lens.model, lens.span, deadline
        self.programs = list(programs)
        self.tables: dict[tuple[int | None, str], dict[int, Formula]] = defaultdict(dict)
        begins = []
        for number, program in enumerate(self.programs):
            steps = [BEFORE] if program.order is not None or "embed" in program.outside else []
            for layer, edits in program.blocks.items():
                for node, formula in edits.items():
                    if self.span.computes(layer, node) and not isinstance(formula, Shown):
                        self.tables[layer, node][number] = formula
                        steps.append(_step(layer, node))
            for node in program.outside:
                self.tables[None, node][number] = program.outside[node]
            begins.append(min(steps, default=_step(self.span.last, "")))
        self.begins = torch.tensor(begins)  # (P,) the first step at which each is not GPT-2
        self.having = {key: _having(table, len(self.programs)) for key, table in self.tables.items()}
        config, size = self.model.config, self.model.ids.numel()
        widest = max(config.inner, 3 * config.n_embd, config.n_head * self.model.ids.shape[1], len(lens.columns))
        work = size * max(1, self.span.last - self.span.first) * (4 * config.n_embd + 2 * config.inner) * config.n_embd
        self.chunk = max(1, min(MAX_ELEMENTS // (size * widest), MAX_WORK // work))

    def alone(self) -> Tensor:
        """Return what each program gives (P, B, T, X); NaN behind the deadline."""
        out = torch.full((len(self.programs), *self.lens.wanted.shape), torch.nan, dtype=self.model.dtype)
        for numbers, values in self.values():
            out[numbers] = values
        return out

    def nearness(self) -> dict[int, Nearness]:
        """Return how near each program comes, by its number; only those that ended before the deadline."""
        out: dict[int, Nearness] = {}
        for numbers, values in self.values():
            out |= zip(numbers.tolist(), self.lens.nearness(values), strict=True)
        return out

    def values(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the numbers of some programs, and what each gives (N, B, T, X); until the deadline.

        NaN if a formula cannot be computed.
        """
        parts = self._parts()
        for part in parts:
            odd: dict[int, list[Tensor]] = defaultdict(list)
            for some in part.split(self.chunk):
                if self.deadline.passed:
                    return
                made = _Batch(self, some)
                values = made.ended()
                for number in made.odd.unique().tolist():
                    fits = made.odd == number
                    if number >= 0 and len(some) > 1:  # once more, with others of this shape
                        odd[number].append(some[fits])
                    else:
                        yield some[fits], values[fits]
            parts.extend(torch.cat(same) for same in odd.values())

    def _parts(self) -> list[Tensor]:
        """Return the numbers of programs that run the same sequence of blocks, those that begin late behind the others."""
        natural, groups = list[int](), dict[object, list[int]]()
        for number, program in enumerate(self.programs):
            other = program.run or program.order
            (natural if other is None else groups.setdefault(other, [])).append(number)
        natural.sort(key=lambda number: int(self.begins[number]))
        return [torch.tensor(part) for part in (natural, *groups.values()) if part]


class _Batch:
    """The programs ``numbers`` (N,) of an evaluator, those that begin first first.

    ``odd`` (N,): a program of which some value has another shape than GPT-2's, so that it needs a batch of its own; else -1.
    """

    def __init__(self, of: Evaluator, numbers: Tensor) -> None:
        self.of, self.numbers, self.shared = of, numbers, of.lens.right
        self.each = len(of.model.ids)  # rows of a stream
        self.sources = torch.arange(self.each).repeat(len(numbers))
        self.odd = torch.full_like(numbers, -1)

    def ended(self) -> Tensor:
        """Return the values at the end (N, B, T, X)."""
        lens, span, model = self.of.lens, self.of.span, self.of.model
        run = self.of.programs[int(self.numbers[0])].run
        x = self._stream() if run is None else run(model)
        usual = self.shared.entering(span.last)
        if x.shape[1:] != usual.shape[1:]:
            x = torch.full((len(self.sources), *usual.shape[1:]), torch.nan, dtype=model.dtype)
        if span.end in ("ln_f", "logits"):
            x = self._node(None, "ln_f", {"x": x}, len(x))
        if span.end == "logits":
            x = x[:, -lens.wanted.shape[1] :]
            heads = self.of.tables.get((None, "head"), {})
            parts = []
            for number, places in self._groups(None, "head", len(x)):
                head = heads[number](model.site(0), {}) if number >= 0 else model.table
                parts.append((places, x[places] @ head[lens.columns].to(x.dtype).T))
            x = _placed(parts)
        x = x.unflatten(0, (len(self.numbers), -1))
        return x - x.mean(-1, keepdim=True) if span.softmaxed else x

    def _stream(self) -> Tensor:
        """Return the stream at the end of the blocks (N B, T, D)."""
        span, entrance = self.of.span, self.shared.entrance
        begins, order = self.of.begins[self.numbers], self.of.programs[int(self.numbers[0])].order
        begun = int((begins <= BEFORE).sum()) * self.each
        x = entrance.state["x"][self.sources[:begun]]
        if begun and entrance.layer == span.first:
            x = self._node(None, "embed", {"x": x}, begun)
        for layer in range(entrance.layer, span.last) if order is None else order:
            ends = order is None and layer == span.last - 1
            after = entrance.after if order is None and layer == entrance.layer else -1
            nodes = NODES[after + 1 : span.until + 1 if ends else None]
            if not int((begins <= _step(layer, nodes[-1])).sum()) and order is None:
                continue
            state = _Begun(self.shared, layer, x, self.sources)
            for node in nodes:
                begun = len(self.sources) if order is not None else int((begins <= _step(layer, node)).sum()) * self.each
                state.begun, state.node = begun, ORDER[node]
                if begun:
                    state.own[node] = self._node(layer, node, state, begun)
            x = state[nodes[-1]]
        if len(x) == len(self.sources):
            return x
        return torch.cat([x, self.shared.entering(span.last)[self.sources[len(x) :]]])

    def _groups(self, layer: int | None, node: str, begun: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each program that replaces a node with the numbers of its streams; -1 with those that have GPT-2's."""
        numbers, has = self.numbers[: begun // self.each], self.of.having.get((layer, node))
        if has is None:
            yield -1, torch.arange(begun)
            return
        which = torch.where(has[numbers], numbers, -1)
        ordered, places = which.sort(stable=True)
        unique, counts = ordered.unique_consecutive(return_counts=True)
        for number, some in zip(unique.tolist(), places.split(counts.tolist()), strict=True):
            yield number, (some[:, None] * self.each + torch.arange(self.each)).flatten()

    def _node(self, layer: int | None, node: str, state: Mapping[str, Tensor], begun: int) -> Tensor:
        """Return a node of the streams that have begun: by the formula of the program that replaces it, or by GPT-2's."""
        site, table = self.of.model.site(layer or 0), self.of.tables.get((layer, node), {})
        groups = list(self._groups(layer, node, begun))
        right = RIGHT[node] if node != "embed" else lambda c, s: s["x"]
        usual = state["x"] if layer is None else self.shared.block(layer)[node]
        unknown = torch.full((1, *usual.shape[1:]), torch.nan)
        if len(groups) == 1 and (begun == len(self.sources) or groups[0][0] < 0):  # whatever its shape
            number = groups[0][0]
            made = self._formed(number, table.get(number, right), site, state, torch.arange(begun))
            return _as_many(unknown if made is None else made, begun, self.of.model.dtype)
        parts = []
        most = any(number < 0 and 2 * len(places) > begun for number, places in groups)
        made = _tried(right, site, state if most else _Rows(state, torch.tensor([0])))  # of most, no rows are picked for it
        unknown = unknown if made is None else torch.full_like(made[:1], torch.nan)
        whole = _as_many(unknown if made is None else made, begun, self.of.model.dtype).clone() if most else None
        for number, places in groups if whole is None else [group for group in groups if group[0] >= 0]:
            one = self._formed(number, table[number] if number >= 0 else right, site, _Rows(state, places), places)
            if one is None or one.shape[1:] != unknown.shape[1:]:
                self.odd[places // self.each] = number
                one = unknown
            parts.append((places, _as_many(one, len(places), self.of.model.dtype)))
        return _placed(parts, whole)

    def _formed(self, number: int, formula: Formula, site: Site, state: Mapping[str, Tensor], places: Tensor) -> Tensor | None:
        """Return what a program's formula gives for the rows at ``places``; for those of each stream, if a row sees others."""
        if number < 0 or not self.of.programs[number].rows or len(places) == self.each:
            return _tried(formula, site, state)
        parts = [_tried(formula, site, _Rows(state, some)) for some in torch.arange(len(places)).split(self.each)]
        kept = [one for one in parts if one is not None]
        return torch.cat(kept) if len(kept) == len(parts) else None


class _Begun(Mapping[str, Tensor]):
    """The nodes of a block in the rows that have begun; before it began, a row has what is shared."""

    def __init__(self, shared: Shared, layer: int, x: Tensor, sources: Tensor) -> None:
        self.shared, self.layer, self.sources = shared, layer, sources
        self.own, self.begun, self.node = {"x": x}, len(x), 0  # ``node``: the number of the one that is computed

    def __getitem__(self, name: str) -> Tensor:
        own = self.own.get(name)
        if own is None or len(own) < self.begun:
            rest = self.shared.block(self.layer)[name][self.sources[0 if own is None else len(own) : self.begun]]
            own = self.own[name] = rest if own is None else torch.cat([own, rest])
        return own

    def __iter__(self) -> Iterator[str]:
        return iter(("x", *NODES[: self.node]))

    def __len__(self) -> int:
        return 1 + self.node


class _Rows(Mapping[str, Tensor]):
    """Some rows of a state; each tensor is taken when a formula reads it."""

    def __init__(self, whole: Mapping[str, Tensor], rows: Tensor) -> None:
        self._whole, self._rows = whole, rows

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[name][self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)


def _step(layer: int, node: str) -> int:
    """Return the number of a node among those of all blocks."""
    return layer * len(NODES) + ORDER[node]


def _having(table: Mapping[int, object], count: int) -> Tensor:
    has = torch.zeros(count, dtype=torch.bool)
    has[list(table)] = True
    return has


def _placed(parts: Sequence[tuple[Tensor, Tensor]], out: Tensor | None = None) -> Tensor:
    """Return the rows of all parts, each at its places, in ``out`` if some are there."""
    if out is None:
        out = parts[0][1].new_empty(sum(len(places) for places, _ in parts), *parts[0][1].shape[1:])
    for places, value in parts:
        out[places] = value
    return out


def _as_many(value: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return as many rows: a formula may give those of one stream."""
    return (value if len(value) == count else value.repeat(count // len(value), *[1] * (value.ndim - 1))).to(dtype)


def _tried(formula: Formula, site: Site, state: Mapping[str, Tensor]) -> Tensor | None:
    """Return what a formula gives; None if it cannot be computed."""
    try:
        return formula(site, cast(State, state))
    except (IndexError, RuntimeError):
        return None
