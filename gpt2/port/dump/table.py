"""List what a program may do otherwise than GPT-2: each known fault in all blocks, in one, in some, or outside them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from gpt2.port.alternative import IN_PROMPT, IN_STEPS, Alternative, Schedule, Weighing, Which, scheduled
from gpt2.port.alternatives import table
from gpt2.port.alternatives.outside import orders, standing
from gpt2.port.alternatives.precision import integers
from gpt2.port.alternatives.schedule import prompts, stepped
from gpt2.port.dump.candidates import Candidate, Site
from gpt2.port.dump.segments import Segment
from gpt2.port.graph import Model


@dataclass(frozen=True)
class Table:
    """Every known alternative: of blocks, of the embeddings, of the last norm and the head, and of whole programs.

    ``steps``: those that show only in several calls; with a prompt and single tokens, they are among the others too.
    """

    blocks: tuple[Alternative, ...]
    embeddings: tuple[Alternative, ...]
    ends: tuple[Alternative, ...]
    runs: tuple[Alternative, ...]
    steps: tuple[Alternative, ...]
    layers: int

    @classmethod
    def of(cls, model: Model) -> Table:
        every = table(model)
        some = [one for one in every if one.steps and (model.small or isinstance(one.edits.get("attn.weights"), Weighing))]
        steps = [scheduled(one, how) for how in prompts(model) for one in some if not (one.crosses and not model.small)]
        plain = [one for one in every if not one.steps and one.run is None]
        around = [one for one in plain if not one.edits]
        return cls(
            (*(one for one in plain if one.edits), *(one for one in steps if one.edits and not one.crosses)),
            (*(one for one in around if "embed" in one.outside), *(one for one in steps if not one.edits)),
            tuple(one for one in around if "embed" not in one.outside),
            (*(one for one in every if one.run is not None), *(one for one in steps if one.crosses)),
            tuple(one for one in every if one.steps),
            model.config.n_layer,
        )

    def singles(self, part: Segment, rare: bool = True) -> Iterator[Candidate]:
        """Yield every fault alone, in the blocks of a part, and in what surrounds them there; ``rare``: rare faults in single
        blocks too."""
        blocks, is_first = range(part.first, part.last), part.entrance is None
        whole = is_first and part.is_last
        if is_first:
            yield from (Candidate(((one, None),)) for one in self.embeddings)
        if part.is_last:
            yield from (Candidate(((one, None),)) for one in (*self.ends, *filter(is_end, self.blocks)))
        if part.all_blocks:
            yield from (Candidate(order=order) for order in orders(self.layers))
            if part.from_start:  # rows and tokens may follow each other otherwise
                yield from (Candidate(self._everywhere(one)) for one in self.runs if rare or not one.rare)
        for one in self.blocks if len(blocks) > 1 else ():
            everywhere = tuple((one, n) for n in blocks)
            yield Candidate(everywhere)
            if (whole and one.outside) or (part.is_last and is_end(one)):
                yield Candidate((*everywhere, (one, None)))
        if whole and rare:
            yield from (Candidate(tuple((one, n) for n in some)) for some in scopes(self.layers) for one in self._in(some))
        for n in blocks:
            some = (one for one in self.blocks if (rare or not one.rare) and (len(blocks) == 1 or not one.shared))
            yield from (Candidate(((one, n),)) for one in some)

    def _everywhere(self, one: Alternative) -> tuple[Site, ...]:
        return (*((one, n) for n in range(self.layers) if one.edits), *[(one, None)] * (not one.edits))

    def _in(self, blocks: tuple[int, ...]) -> Iterator[Alternative]:
        """Yield the alternatives that are tried in some blocks; in one alone, those of shared code: others are tried anyway.

        How a text is read in calls is the same in all blocks.
        """
        return (one for one in self.blocks if (one.shared and one.calls is None) or (len(blocks) > 1 and not one.rare))

    def quantised(self, model: Model, part: Segment) -> Iterator[Candidate]:
        """Yield the matrices of a part's blocks in integers; if it has all blocks, the token table's as well."""
        for one in integers(model):
            inside = tuple((one, n) for n in range(part.first, part.last))
            yield Candidate(inside)
            if part.all_blocks:
                yield Candidate((*inside, (one, None)))

    def since(self, model: Model, token: int, part: Segment) -> Iterator[Candidate]:
        """Yield every fault of a formula in the tokens from ``token`` on: in the blocks of a part, or the embeddings."""
        how = Schedule(IN_STEPS.format(token), stepped(token, model.ids.shape[1]), Which.LATER)
        is_first, blocks = part.entrance is None, range(part.first, part.last)
        for one in (*self.embeddings, *standing(model)) if is_first else ():
            if not one.rare:
                yield Candidate(((_in_some(one, how), None),))
        for one in (_in_some(one, how) for one in self.blocks if not (one.rare or one.shared)):
            yield Candidate(tuple((one, n) for n in blocks))
        later = [one for one in self.blocks if one.calls == how.calls and "empty place" in one.words]
        counted = [one for one in self.embeddings if one.calls == how.calls and "one too far" in one.words]
        for one, far in zip(later, counted, strict=False) if is_first else ():  # the empty place of a cache is counted
            yield Candidate(((far, None), *((one, n) for n in blocks)))

    def until(self, token: int, labels: Container[str], part: Segment, end: int) -> Iterator[Candidate]:
        """Yield the faults of a part's blocks with these ``labels`` in a prompt of ``token`` tokens of ``end``."""
        how = Schedule(IN_PROMPT.format(token), stepped(token, end), Which.FIRST)
        for one in (one for one in self.blocks if one.label in labels):
            yield Candidate(tuple((_in_some(one, how), n) for n in range(part.first, part.last)))


def _in_some(one: Alternative, how: Schedule) -> Alternative:
    """Return an alternative in some calls; where it is the same in calls of any length, the later ones are one."""
    (_, end), (_, last) = how.calls[0], how.calls[-1]
    return scheduled(one, how if one.sees else replace(how, calls=((0, end), (end, last))))


def is_end(one: Alternative) -> bool:
    """Return whether an alternative of the blocks also is one of what follows them."""
    return bool(one.outside) and "embed" not in one.outside


def scopes(layers: int) -> list[tuple[int, ...]]:
    """Return the groups of blocks that a mistake may be in: every other block, all but the first, all but the last."""
    every = tuple(range(layers))
    parts = dict.fromkeys((every[1::2], every[::2], every[1:], every[:-1])) if layers > 1 else {}
    return [part for part in parts if len(part) < layers]
