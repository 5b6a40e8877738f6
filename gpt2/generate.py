"""Continue token ids. Prefill reads the prompt in one pass, decode adds a token at a time; neither knows a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .errors import InputError
from .kv_cache import KVCache
from .model import GPT2
from .sampling import next_ids


def prefill(model: GPT2, ids: Tensor, cache: KVCache, attention_mask: Tensor | None = None) -> Tensor:
    """Read (B, T) ids into the cache; return the logits of what comes next, (B, V)."""
    return model.head(model.hidden(ids, attention_mask=attention_mask, cache=cache)[:, -1])


def decode(model: GPT2, last: Tensor, cache: KVCache, attention_mask: Tensor | None = None) -> Tensor:
    """Read one more id per row, (B,); return the logits of what comes next, (B, V)."""
    return prefill(model, last[:, None], cache, attention_mask)


@torch.inference_mode()
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

    ``attention_mask`` (B, T) marks left padding with zeros. A text that outgrows ``n_positions`` goes on from its last
    ``n_positions // 2`` tokens, read afresh, because learned positions cannot slide. ``use_cache=False`` reads everything
    again at each step: slower, the same ids, and the plainest statement of what generation is.
    """
    generator = None
    if seed is not None:
        generator = torch.Generator(ids.device).manual_seed(seed)
    limit = model.config.n_positions
    seen, real = ids[:, -limit:], None if attention_mask is None else attention_mask[:, -limit:]
    cache = model.new_cache(ids.size(0), min(limit, seen.size(1) + max_new_tokens)) if use_cache else None
    for _ in range(max_new_tokens):
        if seen.size(1) > limit:
            seen, real = seen[:, -(limit // 2) :], None if real is None else real[:, -(limit // 2) :]
            if cache is not None:
                cache.reset()
        if cache is None:
            logits = model.head(model.hidden(seen, attention_mask=real)[:, -1])
        elif cache.length == 0:
            logits = prefill(model, seen, cache, real)
        else:
            logits = decode(model, seen[:, -1], cache, real)
        chosen = next_ids(logits, temperature, top_k, top_p, generator)
        seen = torch.cat((seen, chosen[:, None]), dim=1)
        if real is not None:
            real = torch.cat((real, torch.ones_like(real[:, :1])), dim=1)
        yield chosen


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
    """The prompt and its continuation.

    Args:
        ids: a list of ids, or a (B, T) int64 tensor of equally long (or left-padded, see ``attention_mask``) prompts.
        temperature: 0 is greedy; ``top_k`` and ``top_p`` then have no effect.
        seed: makes sampling repeatable; without it torch's global generator is used.
        stop: end at this id (for a list, and for a batch once every row has met it; the id itself is kept).

    Returns:
        What came in, continued: a list for a list, (B, T + new) for a tensor.

    Raises:
        InputError: no prompt, an id outside the vocabulary, or sampling settings that make no sense.
    """
    prompt = ids if isinstance(ids, Tensor) else torch.tensor([list(ids)], dtype=torch.long)
    if prompt.ndim != 2 or prompt.numel() == 0:
        raise InputError("generate: the prompt holds no token; give at least one (the end-of-text id starts from nothing)")
    if int(prompt.min()) < 0 or int(prompt.max()) >= model.config.vocab_size:
        raise InputError(f"generate: an id of the prompt lies outside the model's vocabulary of {model.config.vocab_size}")
    if max_new_tokens < 0:
        raise InputError(f"generate: max_new_tokens is {max_new_tokens}; give 0 or more")
    prompt = prompt.to(model.wte.weight.device)
    was_training = model.training
    model.eval()
    out, finished = [prompt], torch.zeros(prompt.size(0), dtype=torch.bool, device=prompt.device)
    try:
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
            finished |= chosen == stop if stop is not None else False
            if bool(finished.all()):
                break
    finally:
        model.train(was_training)
    result = torch.cat(out, dim=1)
    return result if isinstance(ids, Tensor) else result[0].tolist()
