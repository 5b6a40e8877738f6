"""Continue token ids. Prefill reads the prompt in one pass, decode adds a token at a time; neither knows a tokenizer."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import overload

import torch
from torch import Tensor

from .errors import InputError
from .fast import for_attention, step_of
from .kv_cache import KVCache
from .model import GPT2
from .sampling import check_settings, next_ids


def prefill(model: GPT2, ids: Tensor, cache: KVCache | None = None, attention_mask: Tensor | None = None) -> Tensor:
    """Read (B, T) ids, into the cache if there is one; return the logits of what comes next, (B, V)."""
    past = 0 if cache is None else cache.length
    seen = past + ids.size(1)
    if attention_mask is None:
        usual = past == 0 or ids.size(1) == 1
    else:
        usual = past > 0 and ids.size(1) == 1 and attention_mask.shape == (ids.size(0), seen)
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
) -> Iterator[Tensor]:
    """Yield ``max_new_tokens`` times the next ids (B,) after (B, T) ``ids``.

    ``attention_mask`` (B, T) marks left padding with zeros; each row is continued as it would be alone. Of a prompt longer
    than ``n_positions`` the last ``n_positions`` tokens are read. A text that outgrows them goes on from its last
    ``n_positions // 2`` tokens, read afresh, because learned positions cannot slide. ``use_cache=False`` reads everything
    again at each step: slower, the same ids, and the plainest statement of what generation is.

    Dropout is off while a token is computed. Between tokens the model is in the caller's mode, gradients and all, so the
    iterator may be abandoned at any point, and what it yields may enter a training step.
    """
    check_settings(temperature, top_k, top_p)
    generator = None if seed is None else torch.Generator(ids.device).manual_seed(seed)
    limit = model.config.n_positions
    seen, real = ids[:, -limit:], None if attention_mask is None else attention_mask[:, -limit:]
    with torch.inference_mode():
        room = model.new_cache(ids.size(0), min(limit, seen.size(1) + max_new_tokens)) if use_cache else None
    cache = room
    for _ in range(max_new_tokens):
        with torch.inference_mode(), _evaluating(model):
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
) -> list[int] | Tensor:
    """The prompt and its continuation; see :func:`stream` for how it is made.

    Args:
        ids: a list of ids, or a (B, T) integer tensor of equally long (or left-padded, see ``attention_mask``) prompts.
        temperature: 0 is greedy; ``top_k`` and ``top_p`` then have no effect.
        seed: makes sampling repeatable; without it torch's global generator is used.
        stop: end at this id (for a list, and for a batch once every row has met it; the id itself is kept).
        attention_mask: (B, T), zeros where a row is padded on its left.

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
def _evaluating(model: GPT2) -> Iterator[None]:
    """Dropout off inside; afterwards every module is in the mode it was in. A model in eval mode is left as it is."""
    training = [module for module in model.modules() if module.training] if model.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
