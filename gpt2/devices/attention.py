"""Attention's cases: step by step, and as the fused kernel, for whole texts and after cached tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.devices.arithmetic import Run
from gpt2.devices.case import IN_ORDER, Case, Material
from gpt2.model import causal_mask


def steps(m: Material) -> Iterator[Case]:
    """q, k and v from one projection, scores, mask, softmax, weighted sum: attention step by step."""
    heads, scale = m.config.n_head, m.model.h[0].attn.scale
    qkv = torch.cat([m.traced[f"h.0.attn.{part}"] for part in "qkv"], -1)

    def split(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind())

    yield Case("split into q, k, v", "copied", lambda x: [each.contiguous() for each in split(x)], (qkv,), trained=False)
    yield Case("split into q, k, v", "heads joined again", lambda x: [y.transpose(1, 2).flatten(2) for y in split(x)], (qkv,))

    def scores(x: Tensor) -> tuple[Tensor, ...]:
        q, k, _ = split(x)
        return (q @ k.transpose(-1, -2) * scale,)

    def unscaled(x: Tensor) -> tuple[Tensor, ...]:
        q, k, _ = split(x)
        return (q @ k.transpose(-1, -2),)

    q, k, _ = (each.contiguous() for each in split(qkv))
    ordered = (IN_ORDER, lambda q, k: (q @ k.reshape(k.transpose(-1, -2).shape),))
    yield Case("scores", "transposed keys", lambda q, k: (q @ k.transpose(-1, -2),), (q, k), (ordered,), trained=False)
    yield Case("scores", "one row", scores, (qkv[:1],), trained=False, wrong=(("it ignores the scale", unscaled),))
    yield Case("scores", "B > 1", scores, (qkv,), wrong=(("it ignores the scale", unscaled),))
    raw = scores(qkv)[0]
    tokens = raw.size(-1)

    def masked(past: int) -> Run:
        def run(x: Tensor) -> tuple[Tensor, ...]:
            queries = x[..., past:, :]
            return (queries.masked_fill(~causal_mask(tokens - past, tokens, x.device), -math.inf),)

        return run

    def corner(past: int) -> Run:
        def run(x: Tensor) -> tuple[Tensor, ...]:
            keep = torch.ones(tokens - past, tokens, dtype=torch.bool, device=x.device).tril()
            return (x[..., past:, :].masked_fill(~keep, -math.inf),)

        return run

    unmasked = ("it ignores the mask", lambda x: (x,))
    yield Case("mask", "causal", masked(0), (raw,), trained=False, wrong=(unmasked,))
    past = tokens // 2
    late = ("it aligns the mask with the first key, not the last", corner(past))
    yield Case("mask", "after cached tokens", masked(past), (raw,), trained=False, wrong=(late,))

    def softmax(x: Tensor) -> tuple[Tensor, ...]:
        return (F.softmax(x, dim=-1),)

    yield Case("softmax", "masked scores", softmax, (masked(0)(raw)[0],))
    for length in _lengths(m.config.n_positions):
        trained = length == m.config.n_positions
        yield Case("softmax", f"rows of {length}", softmax, (3 * m.normal(4, length),), trained=trained)
    yield Case("softmax", "scores up to 30,000", softmax, (3e4 * m.normal(4, 64).clamp(-2, 1),), trained=False)
    weights, v = F.softmax(masked(0)(raw)[0], -1), split(qkv)[2].contiguous()

    def weigh(v: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        return (weights @ v,)

    yield Case("weighted sum", "one row", weigh, (v[:1], weights[:1]), trained=False)
    yield Case("weighted sum", "B > 1", weigh, (v, weights))


def _lengths(positions: int) -> list[int]:
    """Return lengths of rows just above powers of two, where kernels change, and the longest."""
    return sorted({min(2**power + 1, positions) for power in range(4, 11)} | {positions})


def fused(m: Material) -> Iterator[Case]:
    """The fused kernel: causal or with a mask, for whole texts and after cached tokens."""
    heads, scale = m.config.n_head, m.model.h[0].attn.scale
    q, k, v = (m.traced[f"h.0.attn.{part}"].unflatten(-1, (heads, -1)).transpose(1, 2).contiguous() for part in "qkv")
    tokens = q.size(2)
    past = max(1, tokens // 2)

    def attend(
        given: float = scale,
        causal: bool = False,
        last: int = tokens,
        mask: Callable[[Tensor], Tensor | None] = lambda mask: mask,
    ) -> Run:
        """Return attention of the ``last`` queries; ``mask`` changes the mask, if there is one."""

        def run(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> tuple[Tensor, ...]:
            keep = mask(masks[0]) if masks else None
            q = q[:, :, q.size(2) - last :]
            return (F.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=causal, scale=given),)

        return run

    no_scale = ("it ignores the scale", attend(1.0, causal=True))
    no_mask = ("it ignores the mask", attend(mask=lambda mask: None))
    causal = Case("attention", "causal", attend(causal=True), (q[:1], k[:1], v[:1]), wrong=(no_scale, no_mask), trained=False)
    yield causal
    yield replace(causal, condition="causal, B > 1", inputs=(q, k, v), trained=True)
    other = scale / 3
    default = ("it ignores the scale and divides by the root of the head's width", attend(q.size(-1) ** -0.5, causal=True))
    wrong = (("it ignores the scale", attend(1.0, causal=True)), *((default,) if other != q.size(-1) ** -0.5 else ()))
    yield replace(causal, condition="another scale", run=attend(other, causal=True), inputs=(q, k, v), wrong=wrong)
    packed = torch.cat([each.transpose(1, 2).flatten(2) for each in (q, k, v)], -1)

    def from_projection(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale),)

    def misread(x: Tensor) -> tuple[Tensor, ...]:
        q, k, v = x.reshape(3, x.size(0), heads, x.size(1), -1).unbind()
        return (F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale),)

    yield Case("attention", "causal, non-contiguous q, k, v", from_projection, (packed,), wrong=((IN_ORDER, misread),))
    length = m.config.n_positions
    long = tuple(m.normal(1, min(2, heads), length, q.size(-1), seed=seed) for seed in (3, 4, 5))
    wrong = (("it ignores the scale", attend(1.0, True, length)), ("it ignores the mask", attend(last=length)))
    yield Case("attention", f"causal, {length} tokens", attend(causal=True, last=length), long, wrong, trained=False)
    keep = causal_mask(tokens, tokens)
    padding = torch.zeros(2, 1, tokens, tokens, dtype=torch.bool)
    padding[1, :, :, : tokens // 3] = True  # the second row has padding on its left
    padded = keep & ~padding | torch.eye(tokens, dtype=torch.bool)
    mistakes = (
        no_mask,
        ("it ignores the scale", attend(1.0)),
        ("it uses the first row's mask for every row", attend(mask=lambda mask: mask[:1].expand_as(mask))),
        ("it uses the mask inverted", attend(mask=lambda mask: ~mask)),
    )
    yield Case("attention", "a mask", attend(), (q[:1], k[:1], v[:1], keep.expand(1, 1, -1, -1)), mistakes, trained=False)
    yield Case("attention", "B > 1 with a mask", attend(), (q, k, v, padded), mistakes)
    first = ("it attends to the first key only", lambda q, k, v: (v[:, :, :1],))
    yield Case("attention", "one token after cached ones", attend(last=1), (q, k, v), (first, no_scale), trained=False)
    after = keep[past:].expand(2, 1, -1, -1)
    corner = ("it aligns the mask with the first key, not the last", _corner(scale, tokens - past))
    wrong = (("it ignores the mask", attend(last=tokens - past, mask=lambda mask: None)), corner)
    chunk = attend(last=tokens - past)
    yield Case("attention", "several tokens after cached ones", chunk, (q, k, v, after), wrong, trained=False)


def _corner(scale: float, last: int) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        keep = torch.ones_like(mask).tril()
        return (F.scaled_dot_product_attention(q[:, :, q.size(2) - last :], k, v, attn_mask=keep, scale=scale),)

    return run
