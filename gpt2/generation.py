"""Continue token ids. Prefill reads the prompt in one pass, decode adds a token at a time; neither knows a tokenizer."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

import torch
from torch import Tensor

from gpt2.errors import InputError
from gpt2.fast import for_attention, step_of
from gpt2.kv_cache import KVCache
from gpt2.model import GPT2
from gpt2.sampling import agree, chances, check_settings, next_ids

AHEAD = 4  # ids that a draft guesses at a time


def prefill(model: GPT2, ids: Tensor, cache: KVCache | None = None, attention_mask: Tensor | None = None) -> Tensor:
    """Read (B, T) ids, into the cache if there is one; return the logits of what comes next, (B, V)."""
    past = 0 if cache is None else cache.length
    seen = past + ids.size(1)
    usual = attention_mask is None or (past > 0 and ids.size(1) == 1 and attention_mask.shape == (ids.size(0), seen))
    step = step_of(model) if usual and 0 < seen <= model.config.n_positions else None  # else the model says what is wrong
    if step is not None:
        return step(ids, cache, attention_mask)
    return model.head(model.hidden(ids, attention_mask=attention_mask, cache=cache)[:, -1])


def decode(model: GPT2, last: Tensor, cache: KVCache, attention_mask: Tensor | None = None) -> Tensor:
    """Read one more id per row, (B,); return the logits of what comes next, (B, V)."""
    return prefill(model, last[:, None], cache, attention_mask)


def stream(
    model: GPT2,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
    draft: GPT2 | None = None,
) -> Iterator[Tensor]:
    """Yield ``max_new_tokens`` times the next ids (B,) after (B, T) ``ids``.

    ``attention_mask`` (B, T) marks left padding with zeros; each row is continued as it would be alone. Of a prompt longer
    than ``n_positions`` the last ``n_positions`` tokens are read. A text that outgrows them goes on from its last
    ``n_positions // 2`` tokens, read afresh, because learned positions cannot slide. ``use_cache=False`` reads everything
    again at each step: slower, the same ids, and the plainest statement of what generation is.

    ``draft``, a smaller model of the same vocabulary, guesses ids for a single row, and the model reads several guesses in one
    pass, which takes little longer than one: what takes the time is fetching the weights. Greedily the ids are the same, unless
    two logits are equal but for rounding; sampled, their distribution is, though a seed gives another text (:func:`agree`).

    Dropout is off while a token is computed. Between tokens the model is in the caller's mode, gradients and all, so the
    iterator may be abandoned at any point, and what it yields may enter a training step.
    """
    check_settings(temperature, top_k, top_p)
    if draft is not None:
        check_draft(draft, model, ids)
        if attention_mask is not None or not use_cache:
            raise InputError("generate: a draft reads one whole text with a cache; leave out attention_mask and use_cache=False")
        yield from _drafted(model, draft, ids, max_new_tokens, (temperature, top_k, top_p), seed)
        return
    generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
    limit = model.config.n_positions
    seen, real = ids[:, -limit:], None if attention_mask is None else attention_mask[:, -limit:]
    with torch.inference_mode():
        room = model.new_cache(ids.size(0), min(limit, seen.size(1) + max_new_tokens)) if use_cache else None
    cache = room
    for _ in range(max_new_tokens):
        with torch.inference_mode(), evaluating(model):
            if seen.size(1) > limit:
                seen, real = _begin_again(seen, real, limit)
                if room is not None:
                    room.reset()
                    cache = room
            if cache is not None and cache.length > 0:
                logits = decode(model, seen[:, -1], cache, real)
            else:
                logits = prefill(model, seen, cache, real)
                if cache is not None and step_of(model) is not None:
                    cache = for_attention(cache)
            chosen = next_ids(logits, temperature, top_k, top_p, generator)
            seen = torch.cat((seen, chosen[:, None]), dim=1)
            if real is not None:
                real = torch.cat((real, torch.ones_like(real[:, :1])), dim=1)
        yield chosen.clone()  # an ordinary tensor: autograd refuses those made in inference mode


def _drafted(
    model: GPT2,
    draft: GPT2,
    ids: Tensor,
    max_new_tokens: int,
    settings: tuple[float, int | None, float | None],
    seed: int | None,
) -> Iterator[Tensor]:
    """:func:`stream` of one row (1, T), several ids at a time."""
    generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
    limit, left = model.config.n_positions, max_new_tokens
    seen = ids[:, -limit:]
    with torch.inference_mode():
        readers = [_Reader(each, seen.size(1) + max_new_tokens) for each in (model, draft)]
    large, small = readers
    while left > 0:
        with torch.inference_mode(), evaluating(model), evaluating(draft):
            if seen.size(1) > limit:
                seen, _ = _begin_again(seen, None, limit)
                for reader in readers:
                    reader.cache.reset()
            known, text, guessed = seen.size(1), seen, []
            if large.cache.length > 0:  # the prompt is read without guesses, for the first token should not wait for them
                for _ in range(min(AHEAD, left - 1, min(limit, draft.config.n_positions) - known)):
                    guessed.append(chances(small.read(text)[-1:], *settings))
                    text = torch.cat((text, torch.multinomial(guessed[-1], 1, generator=generator)), dim=1)
            wanted = chances(large.read(text)[-len(guessed) - 1 :], *settings)  # (N + 1, V)
            stand, chosen = agree(text[0, known:], torch.cat(guessed or [wanted[:0]]), wanted, generator)
            new = torch.cat((text[0, known : known + stand], chosen))
            seen = torch.cat((seen, new[None]), dim=1)
            for reader in readers:
                reader.cache.reset(known + stand)  # what fell was never said
        left -= len(new)
        yield from new.clone().split(1)


class _Reader:
    """A model, and how much of a text it has read."""

    def __init__(self, model: GPT2, room: int) -> None:
        self.model = model
        self.cache = model.new_cache(1, min(model.config.n_positions, room))

    def read(self, text: Tensor) -> Tensor:
        """Read what is new of (1, S) ids; the logits (N, V) after each of those, and if all is new after the last alone."""
        new, step = text[:, self.cache.length :], step_of(self.model)
        if self.cache.length == 0:
            logits = prefill(self.model, new, self.cache)
            if step is not None:
                self.cache = for_attention(self.cache)
            return logits
        if step is not None:
            return step(new, self.cache, every=True)
        return self.model.head(self.model.hidden(new, cache=self.cache)[0])


def check_draft(draft: GPT2, model: GPT2, ids: Tensor) -> None:
    """Refuse a draft that cannot guess for ``model`` after (B, T) ``ids``, with an :class:`InputError`."""
    if ids.size(0) != 1:
        raise InputError(f"generate: a draft guesses for one text at a time; leave it out for a batch of {ids.size(0)}")
    if draft.config.vocab_size != model.config.vocab_size:
        sizes = f"{draft.config.vocab_size} tokens, the model {model.config.vocab_size}"
        raise InputError(f"generate: the draft knows {sizes}; give one with the model's own vocabulary")
    if draft.wte.weight.device != model.wte.weight.device:
        raise InputError(f"generate: the draft is on {draft.wte.weight.device}, the model on {model.wte.weight.device}; move one")


@overload
def generate(
    model: GPT2,
    ids: Tensor,
    max_new_tokens: int = ...,
    *,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    seed: int | None = ...,
    stop: int | None = ...,
    attention_mask: Tensor | None = ...,
    use_cache: bool = ...,
    draft: GPT2 | None = ...,
) -> Tensor: ...


@overload
def generate(
    model: GPT2,
    ids: Sequence[int],
    max_new_tokens: int = ...,
    *,
    temperature: float = ...,
    top_k: int | None = ...,
    top_p: float | None = ...,
    seed: int | None = ...,
    stop: int | None = ...,
    attention_mask: Tensor | None = ...,
    use_cache: bool = ...,
    draft: GPT2 | None = ...,
) -> list[int]: ...


def generate(
    model: GPT2,
    ids: Sequence[int] | Tensor,
    max_new_tokens: int = 64,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: int | None = None,
    attention_mask: Tensor | None = None,
    use_cache: bool = True,
    draft: GPT2 | None = None,
) -> list[int] | Tensor:
    """The prompt and its continuation; see :func:`stream` for how it is made.

    Args:
        ids: a list of ids, or a (B, T) integer tensor of equally long (or left-padded, see ``attention_mask``) prompts.
        temperature: 0 is greedy; ``top_k`` and ``top_p`` then have no effect.
        seed: makes sampling repeatable; without it torch's global generator is used.
        stop: end at this id (for a list, and for a batch once every row has met it; the id itself is kept).
        attention_mask: (B, T), zeros where a row is padded on its left.
        draft: a smaller model of the same vocabulary that guesses ahead; see :func:`stream`.

    Returns:
        What came in, continued: a list for a list, (B, T + new) on the model's device for a tensor.

    Raises:
        InputError: no prompt, an id outside the vocabulary, padding that is not on the left, or sampling settings that make
            no sense.
    """
    prompt = _prompt(ids, model)
    if max_new_tokens < 0:
        raise InputError(f"generate: max_new_tokens is {max_new_tokens}; give 0 or more")
    if attention_mask is not None:
        attention_mask = attention_mask.to(prompt.device)
        if attention_mask.shape != prompt.shape:
            raise InputError(
                f"generate: attention_mask is {tuple(attention_mask.shape)}; make it {tuple(prompt.shape)}, as the ids"
            )
        if not bool(attention_mask[:, -1].all()):
            raise InputError("generate: a row ends in padding, so nothing can continue it; pad on the left")
    out, finished = [prompt], torch.zeros(prompt.size(0), dtype=torch.bool, device=prompt.device)
    for chosen in stream(
        model,
        prompt,
        max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        attention_mask=attention_mask,
        use_cache=use_cache,
        draft=draft,
    ):
        out.append(chosen[:, None])
        if stop is not None:
            finished |= chosen == stop
            if bool(finished.all()):
                break
    result = torch.cat(out, dim=1)
    return result if isinstance(ids, Tensor) else result[0].tolist()


def _prompt(ids: Sequence[int] | Tensor, model: GPT2) -> Tensor:
    """``ids`` as (B, T) int64 on the model's device, or an :class:`InputError`."""
    vocabulary = model.config.vocab_size
    try:
        prompt = ids if isinstance(ids, Tensor) else torch.tensor([[operator.index(i) for i in ids]], dtype=torch.long)
    except TypeError:
        raise InputError("generate: the prompt is not a list of ids; encode a text with the model's tokenizer first") from None
    except (ValueError, OverflowError, RuntimeError):  # torch's answers to an id beyond 64 bits
        raise InputError(f"generate: an id of the prompt lies outside the model's vocabulary of {vocabulary}") from None
    if prompt.ndim != 2 or prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
        found = f"{prompt.dtype} of shape {tuple(prompt.shape)}"
        raise InputError(f"generate: the prompt is {found}; give a list of ids, or integers of shape (B, T)")
    if prompt.numel() == 0:
        raise InputError("generate: the prompt holds no token; give at least one (the end-of-text id starts from nothing)")
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocabulary:
        raise InputError(f"generate: an id of the prompt lies outside the model's vocabulary of {vocabulary}")
    return prompt.to(model.wte.weight.device, torch.long)


def _begin_again(seen: Tensor, real: Tensor | None, limit: int) -> tuple[Tensor, Tensor | None]:
    """What is left to read of texts (B, T) that outgrew ``limit`` positions: the last half, of the rows that did.

    A row that is still short, because it began further right, keeps all it has: it must not notice its neighbours.
    """
    keep = max(1, limit // 2)
    if real is None:
        return seen[:, -keep:], None
    width = seen.size(1)
    column = torch.arange(width, device=seen.device)
    begins = real.bool().int().argmax(1, keepdim=True)  # (B, 1), where a row's own text starts
    real = real * ((width - begins <= limit) | (column >= width - keep))  # (B, T)
    first = int(real.bool().any(0).int().argmax())  # before it, every row is padding
    return seen[:, first:], real[:, first:]


@contextmanager
def evaluating(model: GPT2) -> Iterator[None]:
    """Dropout off inside; afterwards every module is in the mode it was in. A model in eval mode is left as it is."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
