"""Run many programs of a simulation at once.

They share what is equal: everything before the first replaced stage is computed once, and everything after the last one in a
single batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gpt2.port.dump.simulation import Program, Simulation
from gpt2.port.graph import NODES, ORDER, READS, Edits, State

MAX_ELEMENTS = 1 << 22  # of the widest tensor of a batch of programs
MAX_WORK = 1 << 34  # multiplications in the blocks' matrices for a batch: seconds, after which a caller looks at the clock


class Batches:
    """Runs programs on ``simulation``."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation

    def outputs(
        self, programs: Sequence[Program], first: int = 0, last: int | None = None, start: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield each program's number and its stream behind blocks ``first`` to ``last`` (excluded).

        ``start``: the stream that enters block ``first``; the embeddings if None. A program with an order of its own runs all
        blocks.
        """
        config, ids = self.simulation.config, self.simulation.ids
        last = config.n_layer if last is None else last
        size = ids.numel() * max(config.inner, config.n_head * ids.shape[1])
        work = ids.numel() * (last - first) * (4 * config.n_embd + 2 * config.inner) * config.n_embd
        step = max(1, min(MAX_ELEMENTS // size, MAX_WORK // max(work, 1)))
        together = list[int]()
        for number, program in enumerate(programs):
            if program.run or self.simulation.base.run:  # token by token, so slow: a caller looks at the clock behind each
                yield number, self.simulation.ran(program)
            else:
                together.append(number)
        for begin in range(0, len(together), step):
            yield from self._batch(programs, together[begin : begin + step], first, last, start)

    def _batch(
        self, programs: Sequence[Program], numbers: Sequence[int], first: int, last: int, start: Tensor | None
    ) -> Iterator[tuple[int, Tensor]]:
        streams: dict[int, Tensor] = {}  # those that differ from the right model's
        for number in numbers:
            if "embed" in programs[number].outside:
                streams[number] = self.simulation.embed(programs[number])
        natural = [number for number in numbers if programs[number].order is None]
        shared = self.simulation if start is None else _From(self.simulation, first, start)
        for layer in range(first, last):
            edited = [number for number in natural if programs[number].blocks.get(layer)]
            plain = [number for number in natural if number in streams and number not in edited]
            states: dict[int, tuple[int, State]] = {}  # the last replaced stage, and the state until then
            for number, begin, state in self._entered(layer, edited, programs, streams, shared):
                stages = programs[number].blocks[layer]
                states[number] = self._edited(layer, state, stages, begin)
            self._finish(layer, states, streams)
            if plain and not self.simulation.stacks:
                streams |= {number: self.simulation.run_block(layer, {"x": streams[number]}, {})[""] for number in plain}
            elif plain:
                whole = self.simulation.run_block(layer, {"x": torch.cat([streams[number] for number in plain])}, {})
                streams |= dict(zip(plain, whole[""].split(len(self.simulation.ids)), strict=True))
        for number in numbers:
            if (order := programs[number].order) is not None:
                x = streams.get(number, self.simulation.right_input(0))
                for layer in order:
                    x = self.simulation.run_block(layer, {"x": x}, programs[number].blocks.get(layer, {}))[""]
                streams[number] = x
            yield number, streams[number] if number in streams else shared.right_input(last)

    def _entered(
        self, layer: int, edited: list[int], programs: Sequence[Program], streams: dict[int, Tensor], shared: Simulation | _From
    ) -> Iterator[tuple[int, int, State]]:
        """Yield for each program its first replaced stage in a block, and the state before it; those alike are one batch."""
        firsts = {number: min(ORDER[stage] for stage in programs[number].blocks[layer]) for number in edited}
        for number in edited:
            if number not in streams:
                yield number, firsts[number], dict(shared.right_state(layer))
        for begin in sorted(set(firsts.values())):
            same = [number for number in edited if number in streams and firsts[number] == begin]
            stacked = [same] if self.simulation.stacks else [[number] for number in same]
            for numbers in filter(None, stacked):
                state = {"x": torch.cat([streams[number] for number in numbers])}
                state = self.simulation.run_block(layer, state, {}, until=begin - 1)
                parts = {stage: tensor.split(len(self.simulation.ids)) for stage, tensor in state.items()}
                for place, number in enumerate(numbers):
                    yield number, begin, {stage: tensors[place] for stage, tensors in parts.items()}

    def _edited(self, layer: int, state: State, edits: Edits, begin: int) -> tuple[int, State]:
        """Run a block from node number ``begin`` to the last replaced one."""
        end = max(ORDER[node] for node in edits)
        return end, self.simulation.run_block(layer, state, edits, begin - 1, end)

    def _finish(self, layer: int, states: dict[int, tuple[int, State]], streams: dict[int, Tensor]) -> None:
        """Run the rest of a block, in one batch for all programs with as many heads that were replaced up to the same stage."""
        alike: dict[tuple[int, int], list[int]] = {}
        for number, (end, state) in states.items():
            alike.setdefault((end, state["attn.qh"].shape[1] if "attn.qh" in state else 0), []).append(number)
        for (end, _), same in alike.items():
            later = NODES[end + 1 :]
            if not later:
                streams |= {number: states[number][1][""] for number in same}
                continue
            live = {need for node in later for need in READS[node] if ORDER.get(need, -1) <= end}
            if not self.simulation.base.blocks.get(layer, {}).keys().isdisjoint(later):
                live = {"x", *NODES[: end + 1]}
            if not self.simulation.stacks:
                for number in same:
                    streams[number] = self.simulation.run_block(layer, states[number][1], {}, after=end)[""]
                continue
            state = {need: torch.cat([states[number][1][need] for number in same]) for need in live}
            whole = self.simulation.run_block(layer, state, {}, after=end)
            streams |= dict(zip(same, whole[""].split(len(self.simulation.ids)), strict=True))


class _From:
    """The right blocks after a given stream that enters block ``first``."""

    def __init__(self, simulation: Simulation, first: int, start: Tensor) -> None:
        self.simulation, self.first = simulation, first
        self._inputs, self._states = [start], list[State]()

    def right_input(self, layer: int) -> Tensor:
        if layer > self.first:
            return self.right_state(layer - 1)[""]
        return self._inputs[0]

    def right_state(self, layer: int) -> State:
        while len(self._states) <= layer - self.first:
            number = self.first + len(self._states)
            self._states.append(self.simulation.run_block(number, {"x": self.right_input(number)}, {}))
        return self._states[layer - self.first]
