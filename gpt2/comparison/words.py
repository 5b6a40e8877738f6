"""Show two models' differences as text: tokens with both predictions, the worst passages, and continuations of a prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.comparison.passage import Passage
from gpt2.data import Tokenizer
from gpt2.measure.metrics import Logits, Progress
from gpt2.measure.per_token import Tokens
from gpt2.sampling import Sampling

SHOWN = 1500  # tokens of the text that a report shows individually
PASSAGE = 16  # tokens
PROMPT = 16  # tokens
NEW_TOKENS = 24  # tokens that both models generate from each prompt


@dataclass(frozen=True)
class Choice:
    """A candidate for the next token, with its probability."""

    text: str
    probability: float


@dataclass(frozen=True)
class Word:
    """A token of the text, with both models' top candidates in its place, most likely first."""

    text: str
    probability_a: float
    probability_b: float
    js: float  # nats
    top_a: tuple[Choice, ...]
    top_b: tuple[Choice, ...]


@dataclass(frozen=True)
class Extract:
    """Consecutive tokens; ``start`` counts scored tokens of the text."""

    start: int
    js: float  # mean, nats
    words: tuple[Word, ...]


@dataclass(frozen=True)
class Continuation:
    """Both models' texts after ``prompt``; ``parts_at`` is the first token in which they differ, or None."""

    prompt: str
    a: str
    b: str
    parts_at: int | None
    temperature: float  # 0 is greedy


@dataclass(frozen=True)
class Words:
    """``text`` is the beginning of the scored text, ``passages`` have the largest divergence."""

    text: tuple[Word, ...]
    passages: tuple[Extract, ...]
    continuations: tuple[Continuation, ...]


def passages(js: Tensor, count: int = 5, length: int = PASSAGE) -> list[tuple[int, float]]:
    """Find ``count`` windows of ``length`` tokens with the largest mean of ``js`` (N,), in as many places: (start, mean).

    Two of them are at least a tenth of the text apart, so that one odd scene does not fill the list.
    """
    length = min(length, len(js))
    apart = max(length, len(js) // 10)
    if length == 0:
        return []
    means = js.double().unfold(0, length, 1).mean(-1)
    worst: list[tuple[int, float]] = []
    free = torch.ones_like(means, dtype=torch.bool)
    while len(worst) < count and bool(free.any()):
        start = int(means.masked_fill(~free, -1.0).argmax())
        if means[start] <= 0:
            break
        worst.append((start, float(means[start])))
        free[max(0, start - apart + 1) : start + apart] = False
    return worst


def compare_words(
    a: Logits, b: Logits, tokenizer: Tokenizer, measured: Tokens, text: Passage, *, seed: int, progress: Progress
) -> Words:
    """Show a measured pair's differences on a text, and continue its beginning and the two worst passages.

    Nothing is continued where a side is a recording of this text.
    """
    ids, context = text.ids, text.windows.context

    def choices(top: Tensor, probabilities: Tensor) -> tuple[Choice, ...]:
        return tuple(Choice(tokenizer.shown(i), p) for i, p in zip(top.tolist(), probabilities.tolist(), strict=True))

    def word(at: int) -> Word:
        probabilities = float(measured.logp_a[at].exp()), float(measured.logp_b[at].exp())
        tops = choices(measured.top_a[at], measured.top_p_a[at]), choices(measured.top_b[at], measured.top_p_b[at])
        return Word(tokenizer.shown(int(measured.targets[at])), *probabilities, float(measured.js[at]), *tops)

    words = [word(at) for at in range(min(SHOWN, len(measured)))]
    extracts = ((start, js, range(start, min(start + PASSAGE, len(measured)))) for start, js in passages(measured.js))
    worst = [Extract(start, js, tuple(map(word, places))) for start, js, places in extracts]
    length = min(PROMPT, context // 2)
    starts = dict.fromkeys([0, *(passage.start for passage in worst[:2])])
    prompts = [ids[start : start + length].tolist() for start in starts if start + length <= len(ids)]
    rows: tuple[Continuation, ...] = ()
    if prompts and length and text.recording is None:
        progress("words: continuing prompts")
        room = min(NEW_TOKENS, context - length)
        rows = continuations(a, b, tokenizer, prompts, room, temperature=0.0, seed=seed)
        rows += continuations(a, b, tokenizer, prompts[:1], room, temperature=0.8, seed=seed)
    return Words(tuple(words), tuple(worst), rows)


@torch.inference_mode()
def continuations(
    a: Logits, b: Logits, tokenizer: Tokenizer, prompts: list[list[int]], new_tokens: int, *, temperature: float, seed: int
) -> tuple[Continuation, ...]:
    """Continue prompts of one length with both models, with the same sampling settings and random numbers."""
    ids = torch.tensor(prompts)
    held = torch.tensor([tokenizer.holds(index) for index in range(tokenizer.n_vocab)])
    ids_a, ids_b = (_continue(model, ids, held, new_tokens, temperature, seed).tolist() for model in (a, b))
    rows = []
    for prompt, new_a, new_b in zip(prompts, ids_a, ids_b, strict=True):
        parts_at = next((index for index in range(new_tokens) if new_a[index] != new_b[index]), None)
        text, text_a, text_b = (tokenizer.decode(part) for part in (prompt, new_a, new_b))
        rows.append(Continuation(text, text_a, text_b, parts_at, temperature))
    return tuple(rows)


def _continue(model: Logits, ids: Tensor, held: Tensor, new_tokens: int, temperature: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    text = ids
    for _ in range(new_tokens):
        logits = model(text)[:, -1, : len(held)].float()
        logits = logits.masked_fill(~held[: logits.size(-1)].to(logits.device), -math.inf)  # rows without a token
        chosen = Sampling(temperature).next_ids(logits, generator)
        text = torch.cat((text, chosen[:, None]), dim=1)
    return text[:, ids.size(1) :]
