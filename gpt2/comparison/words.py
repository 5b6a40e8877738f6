"""Show two models' differences as text: tokens with both predictions, the worst passages, and continuations of a prompt."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.comparison.passage import Passage
from gpt2.comparison.sides.side import Side
from gpt2.data import Tokenizer
from gpt2.generation import Ending, StopText, rows_with_tokens, stream
from gpt2.measure.metrics import Progress
from gpt2.measure.per_token import Tokens
from gpt2.sampling import Sampling

SHOWN = 1500  # tokens of the text that a report shows individually
PASSAGE = 16  # tokens
PROMPT = 16  # tokens
NEW_TOKENS = 24  # tokens that both models generate from each prompt
Both = Sequence[tuple[Side, Tokenizer]]  # the two models


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
    """Both models' greedy texts after ``prompt``; ``parts_at`` is the first token in which they differ, or None."""

    prompt: str
    a: str
    b: str
    parts_at: int | None


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


def compare_words(both: Both, measured: Tokens, text: Passage, progress: Progress) -> Words:
    """Show a measured pair's differences on a text, and continue its beginning and the two worst passages."""
    ids, context, tokenizers = text.ids, text.windows.context, [tokenizer for _, tokenizer in both]

    def word(at: int) -> Word:
        probabilities = float(measured.logp_a[at].exp()), float(measured.logp_b[at].exp())
        likeliest = zip(tokenizers, (measured.top_a, measured.top_b), (measured.top_p_a, measured.top_p_b), strict=True)
        tops = (tuple(map(Choice, map(own.shown, top[at].tolist()), chances[at].tolist())) for own, top, chances in likeliest)
        return Word(tokenizers[0].shown(int(measured.targets[at])), *probabilities, float(measured.js[at]), *tops)

    words = [word(at) for at in range(min(SHOWN, len(measured)))]
    extracts = ((start, js, range(start, min(start + PASSAGE, len(measured)))) for start, js in passages(measured.js))
    worst = [Extract(start, js, tuple(map(word, places))) for start, js, places in extracts]
    length = min(PROMPT, context // 2)
    starts = dict.fromkeys([0, *(passage.start for passage in worst[:2])])
    prompts = [ids[start : start + length].tolist() for start in starts if start + length <= len(ids)]
    rows: tuple[Continuation, ...] = ()
    if prompts and length and not any(side.recording for side, _ in both):
        progress("words: continuing prompts")
        rows = continuations(both, prompts, min(NEW_TOKENS, context - length))
    return Words(tuple(words), tuple(worst), rows)


def continuations(both: Both, prompts: list[list[int]], new_tokens: int) -> tuple[Continuation, ...]:
    """Continue prompts of one length with both models, greedily."""
    ids, rows = torch.tensor(prompts), []
    new = zip(*(continued(each, ids, own, new_tokens) for each, own in both), strict=True)
    for prompt, texts in zip(prompts, new, strict=True):
        parts_at = next((index for index, (x, y) in enumerate(itertools.zip_longest(*texts)) if x != y), None)
        said_a, said_b = (own.decode(ids) for (_, own), ids in zip(both, texts, strict=True))
        rows.append(Continuation(both[0][1].decode(prompt), said_a, said_b, parts_at))
    return tuple(rows)


@torch.inference_mode()
def continued(side: Side, prompts: Tensor, tokenizer: Tokenizer, new_tokens: int) -> list[list[int]]:
    """Return what a side writes greedily after each prompt (B, T), as ``generate`` does: up to and with its end."""
    texts, ends = [list[int]() for _ in prompts], [Ending(StopText(tokenizer)) for _ in prompts]
    for chosen in _next_ids(side, prompts, tokenizer, new_tokens):
        for text, end, token in zip(texts, ends, chosen.tolist(), strict=True):
            text += [] if end.ended else [token]
            end.reached(token)
        if all(end.ended for end in ends):
            break
    return texts


def _next_ids(side: Side, ids: Tensor, tokenizer: Tokenizer, new_tokens: int) -> Iterator[Tensor]:
    if (model := side.gpt2) is not None:
        rows, ids = rows_with_tokens(tokenizer, model.config), ids.to(model.wte.weight.device)
        yield from stream(model, ids, new_tokens, Sampling(0.0), rows=rows)
        return
    held = torch.tensor([tokenizer.holds(i) for i in range(side.vocab)])
    for _ in range(new_tokens):
        logits = side.logits(ids[:, -side.context :])[:, -1].cpu().float()
        yield (chosen := logits.masked_fill(~held, -math.inf).argmax(-1))
        ids = torch.cat((ids, chosen[:, None]), dim=1)
