"""Where two models part in words: the passages they disagree about most, and what each goes on to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.data import Tokenizer
from gpt2.sampling import Sampling

Logits = Callable[[Tensor], Tensor]
PASSAGE = 16  # tokens


@dataclass(frozen=True)
class Choice:
    """One token a model might have chosen, and how likely it thought it."""

    text: str
    probability: float


@dataclass(frozen=True)
class Word:
    """A token of the text, and what both models expected in its place, likeliest first."""

    text: str
    probability_a: float
    probability_b: float
    js: float  # nats
    top_a: tuple[Choice, ...]
    top_b: tuple[Choice, ...]


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens; ``start`` counts scored tokens of the text."""

    start: int
    js: float  # mean, nats
    words: tuple[Word, ...]


@dataclass(frozen=True)
class Continuation:
    """What both models say after ``prompt``. ``parts_at`` is the first token in which they differ; None if in none."""

    prompt: str
    a: str
    b: str
    parts_at: int | None
    temperature: float  # 0 is greedy


@dataclass(frozen=True)
class Words:
    """``text`` is the scored text, as much of it as is shown; ``passages`` the worst of it; then what each says by itself."""

    text: tuple[Word, ...]
    passages: tuple[Passage, ...]
    continuations: tuple[Continuation, ...]


def passages(js: Tensor, count: int = 5, length: int = PASSAGE) -> list[tuple[int, float]]:
    """Starts and mean Jensen-Shannon divergence of the windows of ``length`` tokens with the most of it, none overlapping."""
    length = min(length, len(js))
    if length == 0:
        return []
    means = js.double().unfold(0, length, 1).mean(-1)
    found: list[tuple[int, float]] = []
    free = torch.ones_like(means, dtype=torch.bool)
    while len(found) < count and bool(free.any()):
        start = int(means.masked_fill(~free, -1.0).argmax())
        if means[start] <= 0:
            break
        found.append((start, float(means[start])))
        free[max(0, start - length + 1) : start + length] = False
    return found


@torch.inference_mode()
def continuations(
    a: Logits, b: Logits, tokenizer: Tokenizer, prompts: list[list[int]], new_tokens: int, *, temperature: float, seed: int
) -> tuple[Continuation, ...]:
    """Let both go on from each prompt, all of one length, by the same rule and the same random numbers."""
    ids = torch.tensor(prompts)
    said = [_continue(model, ids, tokenizer.n_vocab, new_tokens, temperature, seed) for model in (a, b)]
    rows = []
    for prompt, one, other in zip(prompts, *(part.tolist() for part in said), strict=True):
        apart = [index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]]
        text = [tokenizer.decode(part) for part in (prompt, one, other)]
        rows.append(Continuation(*text, apart[0] if apart else None, temperature))
    return tuple(rows)


def _continue(model: Logits, ids: Tensor, vocab: int, new_tokens: int, temperature: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    seen = ids
    for _ in range(new_tokens):
        chosen = Sampling(temperature).next_ids(model(seen)[:, -1, :vocab].float(), generator)
        seen = torch.cat((seen, chosen[:, None]), dim=1)
    return seen[:, ids.size(1) :]
