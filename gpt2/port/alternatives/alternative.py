"""What a program may do in place of GPT-2: an alternative replaces formulas of the graph; a schedule reads a text in calls.

A fault has one place in the code: a line of a table in a file beside this one, or a function there that yields it.
How a text is read in calls is a factor of its own: :func:`scheduled` makes of any alternative one that is seen in such calls.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.port.graph import ATTENTION, COST, OUTSIDE, SQUARE, TEXT, Calls, Edits, Formula, Lazily, Model, Site, State
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import Place

# The part that a report names for a fault of a node, if it is not the node's own name.
PARTS = {**dict.fromkeys(ATTENTION, "attn"), "embed": "wte", "head": "logits"}
MOST_TOKENS = 24  # up to which every length of a prompt is tried on a small model
CHUNKS = (8, 4, 16, 2, 5, 3, 6, 7)  # tokens that are read at a time


class OnTop:
    """A formula that may stand on top of another fault of its node: ``over`` makes it from that fault's formula, or GPT-2's."""

    def __init__(self, node: str, over: Callable[[Formula], Formula]) -> None:
        self.over, self.alone = over, over(lambda c, s: c.right(node, s))

    def __call__(self, c: Site, s: State) -> Tensor:
        return self.alone(c, s)


class Changed(OnTop):
    """A formula that changes what a node has in any case."""

    def __init__(self, node: str, change: Callable[[Site, Tensor], Tensor]) -> None:
        super().__init__(node, lambda formula: lambda c, s: change(c, formula(c, s)))


class Rerouted(OnTop):
    """A node's formula where it reads the value ``source`` in the place of ``slot``."""

    def __init__(self, node: str, slot: str, source: str) -> None:
        super().__init__(node, lambda formula: lambda c, s: formula(c, {**s, slot: s[source]}))


def changed(change: Callable[[Tensor], Tensor], *nodes: str) -> dict[str, Formula]:
    """Return the edits that apply ``change`` to the values of ``nodes``."""
    return {node: Changed(node, lambda c, y: change(y)) for node in nodes}


@dataclass(frozen=True, eq=False)
class Alternative:
    """Other formulas of some nodes, under the ``id`` of a cause, in ``words``.

    ``formulas``: by node; ``edits`` are those of a block, ``outside`` those around the blocks. ``where``: the parts that a report
    names, with " q", " k" or " v" behind one for a third of c_attn; by default, that of each node. ``also``: further causes with
    words, if it is several mistakes at once. ``fix``: the corrected line, if not the cause's. ``rare``: tried behind what is not.
    ``shared``: of code that all blocks share, so not in one alone. ``sees``: what a token's value may depend on beside earlier
    tokens: TEXT or ROWS. ``silent``: whether it changes nothing in a block, by its number. ``steps``: it
    shows only in a text that is read in several calls. ``key``: what tells it from another one of the same words.
    """

    id: str
    words: str
    formulas: Edits
    where: str | tuple[str, ...] | None = None
    also: tuple[tuple[str, str], ...] = ()
    fix: str | None = None
    rare: bool = False
    shared: bool = False
    sees: str = ""
    silent: Callable[[int], bool] | None = None
    steps: bool = False
    key: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alternative) and self.label == other.label

    def __hash__(self) -> int:
        return hash(self.label)

    @cached_property
    def edits(self) -> Edits:
        return {node: formula for node, formula in self.formulas.items() if node not in OUTSIDE}

    @cached_property
    def outside(self) -> Edits:
        return {node: formula for node, formula in self.formulas.items() if node in OUTSIDE}

    @cached_property
    def label(self) -> str:
        """A name that no other alternative has."""
        words = "; ".join((self.words, *(words for _, words in self.also)))
        return f"{' '.join(node or 'out' for node in self.formulas)} {self.id}: {words}{f' [{self.key}]' if self.key else ''}"

    def parts(self, layer: int | None) -> tuple[str, ...]:
        """Return the parts of a block that a report names; of what is outside the blocks, if ``layer`` is None."""
        if self.where is not None and (layer is not None or not self.edits):
            return (self.where,) if isinstance(self.where, str) else self.where
        return tuple(dict.fromkeys(PARTS.get(node, node) for node in (self.outside if layer is None else self.edits)))

    def faults(self, layer: int | None) -> tuple[Cause, ...]:
        """Return the faults in a block, or outside the blocks; none where it changes nothing."""
        if layer is not None and self.silent is not None and self.silent(layer):
            return ()
        causes = ((self.id, self.words, self.fix), *((*one, None) for one in self.also))
        parts = (part.partition(" ") for part in self.parts(layer))
        places = [(Place.at(layer, part, share),) for part, _, share in parts]
        return tuple(Cause(id, place, words, mend=fix) for place in places for id, words, fix in causes)

    def at(self, layer: int | None) -> Edits:
        """Return the edits in a block, or outside the blocks; none where it changes nothing."""
        if layer is None:
            return self.outside
        return {} if self.silent is not None and self.silent(layer) else self.edits


def merged(one: Edits, other: Edits) -> dict[str, Formula] | None:
    """Return the edits of two faults together; None if both replace a node, and neither changes what the other gives."""
    out = dict(one)
    for node, formula in other.items():
        before = out.get(node)
        if before is None:
            out[node] = formula
        elif isinstance(formula, OnTop):
            out[node] = formula.over(before)
        elif isinstance(before, OnTop):
            out[node] = before.over(formula)
        else:
            return None
    return out


# How a text is read


class Which(Enum):
    """The calls of a program that have a fault."""

    ALL = "all"
    FIRST = "the first alone"
    LATER = "all but the first"
    SEVERAL = "those of several tokens"

    def holds(self, begin: int, end: int) -> bool:
        """Return whether the call of the tokens ``begin`` to ``end`` is one of them."""
        if self is Which.SEVERAL:
            return end > begin + 1
        return self is Which.ALL or (begin == 0) == (self is Which.FIRST)


@dataclass(frozen=True)
class Schedule:
    """A text that is read in ``calls``, of which those in ``which`` have a fault."""

    words: str
    calls: Calls
    which: Which = Which.ALL

    @classmethod
    def of_prompt(cls, prompt: int, tokens: int, which: Which = Which.ALL) -> "Schedule":
        """Return the schedule of a prompt, and then single tokens."""
        words = f"from token {prompt} on, as in steps after a prompt"
        words = f"in the first {prompt} tokens alone, as in a prompt before single steps" if which is Which.FIRST else words
        return cls(words, ((0, prompt), *((n, n + 1) for n in range(prompt, tokens))), which)


def lengths(model: Model, most: int = MOST_TOKENS) -> list[int]:
    """Return the lengths of a prompt, or of a window, that are tried: all of up to ``most`` tokens."""
    tokens = model.ids.shape[1]
    if tokens <= most and model.small:
        return list(range(1, tokens))
    return [1 << n for n in range(tokens.bit_length()) if 1 << n < tokens]


def chunked(size: int, tokens: int) -> Calls:
    return tuple((begin, min(begin + size, tokens)) for begin in range(0, tokens, size))


def prompts(model: Model) -> list[Schedule]:
    """Return the schedules of a prompt of every length, and then single tokens; one token at a time is the first."""
    return [Schedule.of_prompt(size, model.ids.shape[1]) for size in lengths(model)]


def schedules(model: Model) -> list[Schedule]:
    """Return the ways to read a text in several calls, the likeliest first."""
    words, tokens = "in a text that is read {} tokens at a time", model.ids.shape[1]
    chunks = [Schedule(words.format(size), chunked(size, tokens)) for size in CHUNKS if size < tokens]
    some = [*prompts(model)[:1], *chunks, *prompts(model)[:0:-1]]
    return list({one.calls: one for one in some if len(one.calls) > 1}.values())


def prompts_in_chunks(model: Model) -> list[Schedule]:
    """Return the ways to read a prompt some tokens at a time, and then single tokens."""
    words, tokens = "in a text whose first {} tokens are read {} at a time, and the others one by one", model.ids.shape[1]
    both = ((prompt, size) for size in CHUNKS for prompt in reversed(lengths(model)) if size < prompt and prompt % size != 1)
    return [Schedule(words.format(n, m), (*chunked(m, n), *Schedule.of_prompt(n, tokens).calls[1:])) for n, m in both]


def scheduled(alternative: Alternative, schedule: Schedule) -> Alternative:
    """Return an alternative in a program that reads its text by a schedule, of formulas that are given the whole text at once."""

    def gated(node: str, formula: Formula) -> Formula:
        if schedule.which is Which.ALL:
            return formula
        return lambda c, s: formula(c, s) if schedule.which.holds(c.begin, c.end) else c.right(node, s)

    return replace(
        alternative,
        words=": ".join(filter(None, (schedule.words, alternative.words))),
        also=tuple((id, f"{schedule.words}: {words}") for id, words in alternative.also),
        formulas=in_calls(schedule.calls, {node: gated(node, formula) for node, formula in alternative.formulas.items()}),
        where=alternative.parts(0) if alternative.edits else alternative.where,
        rare=True,
        shared=True,
        sees=alternative.sees or TEXT,
        key=f"{alternative.key} {schedule.which.value}",
    )


def in_calls(calls: Calls, edits: Edits) -> dict[str, Formula]:
    """Return formulas that give, from a whole text at once, what ``edits`` give in these calls.

    A call has its own tokens, and the keys and values of all tokens up to its end, as with a cache.
    """
    return {node: formula if node == "head" else partial(_by_call, calls, node, formula) for node, formula in edits.items()}


def _by_call(calls: Calls, node: str, formula: Formula, c: Site, s: State) -> Tensor:
    made: list[Tensor] = []
    for begin, end in ((begin, min(end, c.end)) for begin, end in calls if begin < c.end):  # the text may be cut
        y = formula(Site(c.model, c.layer, begin, end), Lazily(s, partial(_cut, begin, end)))
        made.append(F.pad(y, (0, c.end - end)) if node in SQUARE else y)
    c.model.budget.spend(COST[True] * (len(made) - 1))
    return torch.cat(made, 1 if made[0].ndim == 3 else 2)


def _cut(begin: int, end: int, node: str, x: Tensor) -> Tensor:
    """Return what a call has of a node's value."""
    if x.ndim == 3:
        return x[:, begin:end]
    rows = x[:, :, 0 if node in ("attn.kh", "attn.vh") else begin : end]
    return rows[..., :end] if node in SQUARE else rows
