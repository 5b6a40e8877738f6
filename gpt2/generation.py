"""Continue token ids with a model: one token at a time, or by speculative decoding with a smaller draft model."""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor

from gpt2.config import GPT2Config, quoted
from gpt2.damage import require_finite
from gpt2.data import Tokenizer
from gpt2.data.tokenizer import refuse_surrogates
from gpt2.decoder import Decoder
from gpt2.errors import InputError
from gpt2.kv_cache import KVCache
from gpt2.model import GPT2
from gpt2.sampling import Sampling, accept_draft, penalise

DRAFT_TOKENS = 4  # ids that the draft model proposes at a time


def stream(
    model: GPT2 | Decoder,
    ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    seed: int | None = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
    draft: GPT2 | None = None,
    rows: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the next ids (B,) after (B, T) ``ids``, ``max_new_tokens`` times.

    **The weights must stay fixed** from the first token to the last: they are looked up once. To continue many texts, build a
    :class:`Decoder` and pass it as ``model``. The model's mode does not change; dropout is off.

    ``attention_mask`` (B, T) has zeros for padding on the left; every row is continued as it would be alone. Of a prompt longer
    than ``n_positions``, the last ``n_positions`` tokens are read. When the text outgrows the positions, its last
    ``n_positions // 2`` tokens are read again from position 0, because learned positions cannot slide. ``use_cache=False``
    reads the whole text at every step: slower, with the same result.

    ``draft`` is a smaller model of the same vocabulary for speculative decoding of one row: it proposes several ids, and the
    model checks them in one pass. Greedy ids are the same, except where two logits are equal up to rounding. Sampled ids have
    the same distribution, although a seed gives another text (:func:`~gpt2.sampling.accept_draft`).

    ``rows`` (V,) is true for the ids that may be generated: a padded vocabulary has rows without a token
    (:func:`rows_with_tokens`).

    Raises:
        InputError: a draft that cannot be used, or logits that are not finite.
    """
    decoder = model if isinstance(model, Decoder) else Decoder(model)
    generator = None if seed is None else torch.Generator(ids.device).manual_seed(int(seed))
    if draft is not None:
        check_draft(draft, decoder.model, ids)
        if attention_mask is not None or not use_cache:
            raise InputError("generate: a draft needs a cache and text without padding; leave out attention_mask and use_cache")
        if sampling.repetition_penalty != 1:
            raise InputError("generate: a draft cannot be used with a repetition penalty; leave one out")
        yield from _stream_speculatively(decoder, Decoder(draft), ids, max_new_tokens, sampling, generator, rows)
        return
    limit = decoder.model.config.n_positions
    text, real = ids[:, -limit:], None if attention_mask is None else attention_mask[:, -limit:]
    cache = decoder.model.new_cache(len(ids), min(limit, text.size(1) + max_new_tokens)) if use_cache else None
    seen = None if sampling.repetition_penalty == 1 else _seen(ids, attention_mask, decoder.model.config.vocab_size)
    for _ in range(max_new_tokens):
        if text.size(1) > limit:
            text, real = _last_half(text, real, limit)
            if cache is not None:
                cache.reset()
        if cache is not None and cache.length > 0:
            logits = decoder.decode(text[:, -1:], cache, real)[:, 0]
        else:
            logits = decoder.prefill(text, cache, real)
        logits = _candidates(logits, rows, decoder.model)
        if seen is not None:
            logits = penalise(logits, seen, sampling.repetition_penalty)
        chosen = sampling.next_ids(logits, generator)
        if seen is not None:
            seen.scatter_(1, chosen[:, None], True)
        text = torch.cat((text, chosen[:, None]), dim=1)
        if real is not None:
            real = torch.cat((real, torch.ones_like(real[:, :1])), dim=1)
        yield chosen


def rows_with_tokens(tokenizer: Tokenizer, config: GPT2Config) -> Tensor | None:
    """Return which rows of the vocabulary have a token, (V,) boolean: only those can be generated; None if all have one."""
    rows = torch.tensor([tokenizer.holds(i) for i in range(config.vocab_size)])
    return None if bool(rows.all()) else rows


def _candidates(logits: Tensor, rows: Tensor | None, model: GPT2) -> Tensor:
    """Return logits (..., V) with -inf where ``rows`` is false. Raises InputError: they are not finite."""
    require_finite(logits, model.name, model)
    return logits if rows is None else logits.masked_fill(~rows.to(logits.device), -math.inf)


def _seen(ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> Tensor:
    """Return which ids each row (B, T) holds, as (B, V) booleans; padding does not count."""
    real = torch.ones_like(ids, dtype=torch.uint8) if attention_mask is None else attention_mask.ne(0).byte()
    counts = torch.zeros(len(ids), vocab_size, dtype=torch.uint8, device=ids.device)
    return counts.scatter_reduce_(1, ids, real, "amax").bool()


def _stream_speculatively(
    target: Decoder,
    draft: Decoder,
    ids: Tensor,
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None,
    rows: Tensor | None,
) -> Iterator[Tensor]:
    """Do what :func:`stream` does for one row (1, T): the draft proposes ids, the target accepts some and adds one."""
    limit, left = target.model.config.n_positions, max_new_tokens
    text = ids[:, -limit:]
    room = text.size(1) + max_new_tokens
    caches = [each.model.new_cache(1, min(each.model.config.n_positions, room)) for each in (target, draft)]
    while left > 0:
        if text.size(1) > limit:
            text, _ = _last_half(text, None, limit)
            for cache in caches:
                cache.reset()
        known, proposals = text.size(1), []
        if caches[0].length > 0:  # the prompt is read without proposals, so that the first token comes sooner
            for _ in range(min(DRAFT_TOKENS, left - 1, min(limit, draft.model.config.n_positions) - known)):
                proposals.append(sampling.probabilities(_candidates(_read(draft, text, caches[1])[-1:], rows, draft.model)))
                text = torch.cat((text, torch.multinomial(proposals[-1], 1, generator=generator)), dim=1)
        logits = _read(target, text, caches[0])[-len(proposals) - 1 :]
        wanted = sampling.probabilities(_candidates(logits, rows, target.model))  # (N + 1, V)
        proposed = torch.cat(proposals or [wanted[:0]])  # (N, V)
        accepted, chosen = accept_draft(text[0, known:], proposed, wanted, generator)
        new = torch.cat((text[0, known : known + accepted], chosen))
        text = torch.cat((text[:, :known], new[None]), dim=1)
        for cache in caches:
            cache.reset(known + accepted)  # forget the rejected ids
        left -= len(new)
        yield from new.split(1)


def _read(decoder: Decoder, text: Tensor, cache: KVCache) -> Tensor:
    """Read the ids that are not in the cache; return the logits (N, V) after each, or after the prompt's last id only."""
    new = text[:, cache.length :]
    return decoder.decode(new, cache)[0] if cache.length > 0 else decoder.prefill(new, cache)


def check_draft(draft: GPT2, model: GPT2, ids: Tensor) -> None:
    """Raise an :class:`InputError` if ``draft`` cannot propose ids for ``model`` after (B, T) ``ids``."""
    if not isinstance(draft, GPT2):
        raise InputError(f"generate: the draft is a {type(draft).__name__}; give a model, as gpt2.load makes it")
    if ids.size(0) != 1:
        raise InputError(f"generate: a draft works on one text at a time; leave it out for a batch of {ids.size(0)}")
    if draft.config.vocab_size != model.config.vocab_size:
        sizes = f"{draft.config.vocab_size} tokens, the model {model.config.vocab_size}"
        raise InputError(f"generate: the draft has a vocabulary of {sizes}; give one with the model's own vocabulary")
    if draft.wte.weight.device != model.wte.weight.device:
        raise InputError(f"generate: the draft is on {draft.wte.weight.device}, the model on {model.wte.weight.device}; move one")


@dataclass(frozen=True)
class StopText:
    """End a text with the token that completes one of ``texts``, or with one of the tokenizer's ``ends``, as transformers does.

    The texts are searched in what was generated, not in the prompt. A token may hold more than the text that it completes.
    """

    tokenizer: Tokenizer
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if "" in self.texts:
            raise InputError("generate: a stop text is empty, which ends every text at once; give at least one character")
        refuse_surrogates("".join(self.texts))


Stop = int | StopText


class Ending:
    """Whether one generated text has ended; it is told one id after the other."""

    def __init__(self, stop: Stop | None) -> None:
        if not (stop is None or isinstance(stop, StopText) or (hasattr(stop, "__index__") and not getattr(stop, "ndim", 0))):
            given = f"generate: stop is {quoted(stop)}; give an id"
            raise InputError(f"{given}, or gpt2.generation.StopText with the tokenizer and the texts that end it")
        self.stop, self.ended, self._tail = stop, False, b""

    def reached(self, token: int) -> bool:
        """Take the next id; return whether this id or an earlier one was the last."""
        if self.ended or not isinstance(self.stop, StopText):
            self.ended = self.ended or token == self.stop
            return self.ended
        if token in self.stop.tokenizer.ends:
            self.ended = True
            return True
        stops = [text.encode() for text in self.stop.texts]
        text = self._tail + self.stop.tokenizer.token_bytes(token)
        self.ended = any(stop in text for stop in stops)
        self._tail = text[-max(map(len, stops), default=1) :]  # a stop text may begin in earlier tokens
        return self.ended


Ids = TypeVar("Ids", list[int], Sequence[int], Tensor)  # of a tuple or range, too, the result is a list


def generate(
    model: GPT2,
    ids: Ids,
    max_new_tokens: int = 200,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: "int | None" = None,
    stop: "Stop | None" = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
    draft: "GPT2 | None" = None,
    rows: Tensor | None = None,
) -> Ids:
    """Return the prompt and its continuation; :func:`stream` has the method.

    Args:
        ids: a list of ids; or an integer tensor, (T,), or (B, T) for prompts of one length (shorter ones padded on the left).
        temperature: 0 is greedy, and ``top_k`` and ``top_p`` then have no effect.
        seed: makes sampling repeatable; without it torch's global generator is used.
        min_p: drop ids less likely than this share of the likeliest one.
        repetition_penalty: above 1, ids of the text so far become less likely.
        stop: end after this id, or after a :class:`StopText`; a batch ends when every row has had it.
        attention_mask: (B, T), zero for padding.
        draft: a smaller model of the same vocabulary for speculative decoding of one text.
        rows: (V,) boolean, the ids that may be generated; default: all, or those with a token of a :class:`StopText`.

    Returns:
        A list for a list; a (T + new,) or (B, T + new) tensor on the model's device for a tensor.

    Raises:
        InputError: arguments in another order, an empty prompt, an id outside the vocabulary, padding that is not on the left,
            invalid sampling settings, a draft that cannot be used, or logits that are not finite.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    prompt = _prompt(ids, model)
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 0:
        raise InputError(f"generate: max_new_tokens is {max_new_tokens}; give 0 or more")
    if seed is not None and (not isinstance(seed, Integral) or not -(1 << 63) <= seed < 1 << 64):
        raise InputError(f"generate: seed is {seed}; give a whole number of 64 bits, or leave it out")
    if attention_mask is not None:
        attention_mask = attention_mask[None] if attention_mask.ndim == 1 else attention_mask
        if attention_mask.shape != prompt.shape:
            shapes = f"attention_mask is {tuple(attention_mask.shape)}; make it {tuple(prompt.shape)}, as the ids"
            raise InputError(f"generate: {shapes}")
        if not bool(attention_mask[:, -1].all()):
            raise InputError("generate: a row ends in padding and cannot be continued; pad on the left")
        attention_mask = attention_mask.to(prompt.device)
    if rows is None and isinstance(stop, StopText):
        rows = rows_with_tokens(stop.tokenizer, model.config)
    out, ends = [prompt], [Ending(stop) for _ in prompt]
    how: dict[str, Any] = {"attention_mask": attention_mask, "use_cache": use_cache, "draft": draft, "rows": rows}
    for chosen in stream(model, prompt, max_new_tokens, sampling, seed=seed, **how):
        out.append(chosen[:, None])
        if stop is not None and all([end.reached(token) for end, token in zip(ends, chosen.tolist(), strict=True)]):
            break
    result = torch.cat(out, dim=1)
    if not isinstance(ids, Tensor):
        return result[0].tolist()
    return result if ids.ndim == 2 else result[0]


def _prompt(ids: Sequence[int] | Tensor, model: GPT2) -> Tensor:
    """Return ``ids`` as (B, T) int64 on the model's device; raise an :class:`InputError` if they are not a valid prompt."""
    if not isinstance(model, GPT2):
        raise InputError(f"generate takes a model, then ids, and was given {type(model).__name__} first; gpt2.load makes a model")
    vocabulary = model.config.vocab_size
    try:
        prompt = ids if isinstance(ids, Tensor) else torch.tensor([[operator.index(i) for i in ids]], dtype=torch.long)
    except TypeError:
        what = "the prompt is not a list of ids; encode a text, and give several as a tensor (B, T)"
        raise InputError(f"generate: {what}") from None
    except (ValueError, OverflowError, RuntimeError):  # torch's errors for an id of more than 64 bits
        raise InputError(f"generate: an id of the prompt lies outside the model's vocabulary of {vocabulary}") from None
    prompt = prompt[None] if prompt.ndim == 1 else prompt
    if prompt.ndim != 2 or prompt.is_meta or prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
        given = f"{prompt.dtype} of shape {tuple(prompt.shape)}"
        raise InputError(f"generate: the prompt is {given}; give a list of ids, or integers of shape (T,) or (B, T)")
    if prompt.numel() == 0:
        raise InputError("generate: the prompt is empty; give at least one id, such as the end-of-text id")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocabulary:
        raise InputError(f"generate: an id of the prompt lies outside the model's vocabulary of {vocabulary}")
    return prompt.to(model.wte.weight.device, torch.long)


def _last_half(text: Tensor, real: Tensor | None, limit: int) -> tuple[Tensor, Tensor | None]:
    """Cut texts (B, T) that outgrew ``limit`` positions, and their mask, to the last ``limit // 2`` tokens; keep shorter rows."""
    keep = max(1, limit // 2)
    if real is None:
        return text[:, -keep:], None
    width = text.size(1)
    column = torch.arange(width, device=text.device)
    starts = real.bool().int().argmax(1, keepdim=True)  # (B, 1): where the padding ends
    real = real * ((width - starts <= limit) | (column >= width - keep))  # (B, T)
    first = int(real.bool().any(0).int().argmax())  # before this column every row is padding
    return text[:, first:], real[:, first:]
