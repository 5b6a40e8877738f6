"""Compute what the usual mistakes with a cache give: wrong positions and wrong masks of the tokens of later calls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, in_calls
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.alternatives.masks import CAUSAL, IN_CALLS, MASKS, Mask
from gpt2.port.graph import Formula, Model, Site, State, embedding

PositionRows = Callable[[int, int], Tensor]  # from the first token of a call and the one behind it to rows of the position table
POSITIONS: dict[str, PositionRows] = {
    "": torch.arange,
    "the positions of all new tokens are one, that of the first of them": lambda begin, end: torch.full((end - begin,), begin),
    "positions begin at 0 in each call": lambda begin, end: torch.arange(end - begin),
    "positions lag by one": lambda begin, end: torch.arange(begin, end) - 1,
    "positions run ahead by one": lambda begin, end: torch.arange(begin, end) + 1,
}
UNMASKED, *_ = MASKS
LATER: dict[str, Mask] = {
    "": CAUSAL,
    "the mask is missing: a new token sees those behind it": MASKS[UNMASKED][1],
    **{f"the mask: {words}": mask for words, mask in IN_CALLS.items()},
}


def in_later_calls(model: Model, pieces: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield mistakes in words, and the logits of a text that is read in ``pieces`` of so many tokens; single mistakes first."""
    ends = list(itertools.accumulate(pieces))
    calls = tuple(zip([0, *ends], ends, strict=False))
    both = sorted(itertools.product(POSITIONS.items(), LATER.items()), key=lambda one: bool(one[0][0]) + bool(one[1][0]))
    for (where, rows), (hidden, mask) in both:
        if not where and not hidden:
            continue
        whole = Alternative("", "", in_calls(calls, {"attn.weights": _weighing(mask), "embed": _embedding(rows)}))
        sites = tuple((whole, layer) for layer in range(model.config.n_layer))
        program = Candidate((*sites, (whole, None))).program
        if program is not None:
            yield "; ".join(filter(None, (where, hidden))), model.trace(program)["logits"]


def _embedding(rows: PositionRows) -> Formula:
    return lambda c, s: embedding(c, rows(c.begin, c.end).clamp(0, c.config.n_positions - 1) if c.begin else None)


def _weighing(mask: Mask) -> Formula:
    """Return attention weights by the mask, but in the first call, by GPT-2's own."""

    def weigh(c: Site, s: State) -> Tensor:
        scores = s["attn.scores"]
        seen = (mask if c.begin else CAUSAL)(c.tokens, torch.arange(scores.shape[-1]), c.begin)
        return scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)

    return weigh
