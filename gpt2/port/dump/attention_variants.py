"""List faults of attention that programs with a cache, with positions of their own or with fewer heads have, as stages.

They are not in the walk's tables: a recorded value shows them by fits (:mod:`.fits`). Here, each is a formula to be tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gpt2.port.diagnosis.causes import MASKED
from gpt2.port.diagnosis.hypotheses import right_scale
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Fault, Formula
from gpt2.port.dump.cache_variants import cache_variants
from gpt2.port.dump.fits.rounding import in_eight_bits, mantissa
from gpt2.port.dump.simulation import Simulation, Stages, State
from gpt2.port.dump.variants import Variant

MOST_TOKENS = 24  # up to which every length of a prompt is tried on a small model; else, powers of two
MOST_WINDOW = 64  # the same of windows, which are fewer
Mask = Callable[[Tensor, Tensor], Tensor]  # from the numbers of queries (T, 1) and keys (T) to the visible keys (T, T)


def attention_variants(simulation: Simulation) -> Iterator[Variant]:
    """Yield the known faults of a block's attention that do not depend on where a prompt ends, and those of every prompt."""
    tokens, heads = simulation.ids.shape[1], simulation.config.n_head
    room = simulation.config.n_positions
    ones = "the softmax divides by one more than the sum, as if an empty place of a cache, with a key of zeros, were seen"
    yield _weighed("one more", Fault("cache-inconsistent", "attn", ones), causal, lambda now: torch.ones_like(now))
    words = "the softmax runs over a buffer for {} tokens, zero behind the last one, which takes a share"
    for size in sorted({tokens, room}):
        fault = Fault("mask-multiplied", "attn", words.format(size))
        yield _weighed(f"buffer of {size}", fault, causal, partial(_behind, size))
    for size in lengths(simulation):
        yield from _masked(size)
    for size in lengths(simulation, MOST_WINDOW):
        yield from _windows(size)
    words = "a token sees the first one never, but for the first itself"
    yield _weighed("not the first", Fault("mask-strict", "attn", words), lambda t, s: (s <= t) & ((s > 0) | (t == 0)))
    words = "the terms of the sum over tokens are assigned, not added: the last value alone counts, with its weight"
    fault = Fault("value-projection-wrong", "attn", words)
    yield _shared("assigned", fault, _weights_on_top(lambda weights: weights.tril().triu()))
    for head in range(heads if heads > 1 else 0):
        fault = Fault("head-layout", "attn", f"every head weighs its values with the weights of head {head}")
        yield _shared(f"weights of head {head}", fault, _one_for_all(head))
    yield from _fewer_heads(heads)
    if heads > 1:
        yield from _across_heads()
    yield from cache_variants(simulation, lengths(simulation))
    yield from _positions(simulation)
    yield from _narrow()


def lengths(simulation: Simulation, most: int = MOST_TOKENS) -> list[int]:
    """Return the lengths of a prompt, or of a window, that are tried: all of up to ``most`` tokens."""
    tokens = simulation.ids.shape[1]
    if simulation.small and tokens <= most:
        return list(range(1, tokens))
    return [1 << n for n in range(tokens.bit_length()) if 1 << n < tokens]


def causal(query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _behind(size: int, now: Tensor) -> Tensor:
    return size - 1 - now


def _shared(label: str, fault: Fault, stages: Callable[[Simulation, int], Stages]) -> Variant:
    """Return a variant of code that all blocks share; early tokens do not show what later ones do."""
    return replace(Variant.of(label, [fault], stages, True), shared=True, all_tokens=True)


def _weighed(label: str, fault: Fault, mask: Mask, empty: Formula | None = None) -> Variant:
    """Return the variant with ``mask``, and with as many keys and values of zero as ``empty`` gives for each query (T, 1)."""

    def weights(s: State) -> Tensor:
        scores = s["attn.scores"]
        key = torch.arange(scores.shape[-1])
        scores = scores.masked_fill(~mask(key[:, None], key), -math.inf)
        if empty is None:
            return scores.softmax(-1)
        level = scores.amax(-1, keepdim=True).clamp(min=0)
        some = (scores - level).exp()
        return some / (some.sum(-1, keepdim=True) + empty(key[:, None]).to(scores) * (-level).exp())

    return _shared(label, fault, lambda simulation, layer: {"attn.weights": weights})


def _masked(size: int) -> Iterator[Variant]:
    """Yield the masks and caches whose prompt or window has ``size`` tokens."""

    def mask(label: str, id: str, words: str, visible: Mask, empty: Formula | None = None) -> Variant:
        return _weighed(f"{label} {size}", Fault(id, "attn", words), visible, empty)

    if size > 1:
        words = f"the first {size} tokens see each other, the later ones too"
        yield mask("prompt", "mask-missing", words, lambda t, s: (s <= t) | (torch.maximum(t, s) < size))
    start = f"from token {size} on, as in steps after a prompt"
    words = f"{start}: a token sees no token before {size}"
    yield mask("no prompt", "cache-inconsistent", words, lambda t, s: (s <= t) & ((t < size) | (s >= size)))
    words = f"{start}: a token sees itself alone"
    yield mask("steps alone", "cache-inconsistent", words, lambda t, s: (s <= t) & ((t < size) | (s == t)))
    one = f"{start}: each token takes the place of the one before it in the cache"
    own = partial(_prompt_and_self, size)
    yield mask("one slot", "cache-inconsistent", one, own)
    yield mask("one slot, zeros", "cache-inconsistent", f"{one}, and sees empty places", own, lambda t: (t - size).clamp(min=0))
    late = f"{start}: the cache has an empty place, of zeros, which is seen"
    yield mask("late slot", "cache-inconsistent", late, causal, lambda t: t >= size)
    words = f"{start}: a token sees the first of all alone, as with a mask that begins anew in each step"
    yield mask("first alone", "cache-inconsistent", words, lambda t, s: (s <= t) & ((t < size) | (s == 0)))
    late = f"{start}: a token does not see the last token of the prompt"
    yield mask("prompt cut", "cache-inconsistent", late, lambda t, s: (s <= t) & ((t < size) | (s != size - 1)))


def _windows(size: int) -> Iterator[Variant]:
    """Yield the masks that hide earlier tokens, by the number of those seen."""

    def hides(words: str, visible: Mask) -> Variant:
        fault = Fault("mask-strict", "attn", words, fix=f"{MASKED}  # no window: a token sees all tokens before it")
        return _weighed(words, fault, lambda t, s: (s <= t) & visible(t, s))

    see = f"a token sees the last {size} tokens alone, itself among them" if size > 1 else "a token sees itself alone"
    yield hides(see, lambda t, s: s > t - size)
    yield hides(f"{see}, and the first of all", lambda t, s: (s > t - size) | (s == 0))
    if size > 1:
        yield hides(f"a token sees those of its own {size} alone: attention runs in pieces", lambda t, s: t // size == s // size)
        yield hides(f"a token sees every one that is {size} before another, itself first", lambda t, s: (t - s) % size == 0)


def _weights_on_top(formula: Formula) -> Callable[[Simulation, int], Stages]:
    def replaced(simulation: Simulation, layer: int) -> Stages:
        right = simulation.right(layer)["attn.weights"]
        return {"attn.weights": lambda s: formula(right(s))}

    return replaced


def _prompt_and_self(size: int, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & ((query < size) | (key < size) | (key == query))


def _one_for_all(head: int) -> Callable[[Simulation, int], Stages]:
    def replaced(simulation: Simulation, layer: int) -> Stages:
        right = simulation.right(layer)["attn.weights"]
        return {"attn.weights": lambda s: (w := right(s))[:, [min(head, w.shape[1] - 1)]].expand_as(w)}

    return replaced


def _fewer_heads(heads: int) -> Iterator[Variant]:
    """Yield keys and values of fewer heads than there are queries, as in grouped queries."""
    for few in (n for n in range(1, heads) if heads % n == 0):
        ways = {"neighbouring heads share": torch.arange(heads) * few // heads, "in turn": torch.arange(heads) % few}
        for words, which in itertools.islice(ways.items(), 1 if few == 1 else 2):
            for parts in ("kv", "v", "k", "q") if few > 1 else ("kv", "v", "q"):
                what = {"kv": "keys and values are", "v": "the values are", "k": "the keys are", "q": "the queries are"}[parts]
                whose = f"the first {few} heads alone, {words}" if few > 1 else "the first head alone"
                fault = Fault("head-layout", "attn", f"{what} those of {whose}")

                def replaced(simulation: Simulation, layer: int, which: Tensor = which, parts: str = parts) -> Stages:
                    right, changed = simulation.right(layer), {}
                    for part in parts:

                        def picked(s: State, name: str = f"attn.{part}") -> Tensor:
                            return Layout.RIGHT.merge(Layout.RIGHT.split(right[name](s), heads)[:, which])

                        changed[f"attn.{part}"] = picked
                    return changed

                yield _shared(f"{few} heads of {parts} {words}", fault, replaced)


def _across_heads() -> Iterator[Variant]:
    for masked, words in ((True, ", each those before it and itself"), (False, "")):
        fault = Fault("head-layout", "attn", f"the heads of one token attend to each other{words}, not the tokens")

        def replaced(simulation: Simulation, layer: int, masked: bool = masked) -> Stages:
            def heads(s: State) -> Tensor:
                q, k, v = (Layout.RIGHT.split(s[f"attn.{one}"], simulation.config.n_head).transpose(1, 2) for one in "qkv")
                scores = q @ k.mT * right_scale(simulation.config, layer)  # (B, T, H, H)
                if masked:
                    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
                return (scores.softmax(-1) @ v).flatten(2)

            return {"attn.heads": heads}

        yield _shared(f"across heads {masked}", fault, replaced)


def _positions(simulation: Simulation) -> Iterator[Variant]:
    """Yield scores that know positions: turned queries and keys, and a distance that is subtracted."""
    size, heads = simulation.config.head_dim, simulation.config.n_head
    for words in ("neighbouring numbers", "the halves of a head") if size > 1 else ():
        fault = Fault("rotary-positions", "attn", f"queries and keys are turned by their position, {words} as pairs")

        def turned(simulation: Simulation, layer: int, halves: bool = words != "neighbouring numbers") -> Stages:
            def scores(s: State) -> Tensor:
                q, k = (rotated(Layout.RIGHT.split(s[f"attn.{one}"], simulation.config.n_head), halves) for one in "qk")
                return q @ k.mT * right_scale(simulation.config, layer)

            return {"attn.scores": scores}

        yield replace(_shared(f"turned {words}", fault, turned), rare=False)
    words = "a number that grows with the distance of two tokens is taken from the scores (as in ALiBi)"

    def distant(simulation: Simulation, layer: int) -> Stages:
        right = simulation.right(layer)["attn.scores"]

        def scores(s: State) -> Tensor:
            made = right(s)
            token = torch.arange(made.shape[-1])
            slopes = 2.0 ** (-8.0 * (torch.arange(heads) + 1) / heads)
            if made.shape[1] != heads:
                return made
            return made - (slopes[:, None, None] * (token[:, None] - token)).to(made)

        return {"attn.scores": scores}

    yield replace(_shared("distant", Fault("scale-wrong", "attn", words), distant), rare=False)


def rotated(x: Tensor, halves: bool) -> Tensor:
    """Return x (B, H, T, K) turned by its position, as rotary embedding with a base of 10,000 does."""
    pairs = x.shape[-1] // 2
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    one, other = turning.chunk(2, -1) if halves else (turning[..., ::2], turning[..., 1::2])
    angle = torch.arange(x.shape[-2])[:, None] / 10000.0 ** (torch.arange(pairs) / max(pairs, 1))
    cos, sin = angle.to(x).cos(), angle.to(x).sin()
    parts = one * cos - other * sin, one * sin + other * cos
    return torch.cat([torch.cat(parts, -1) if halves else torch.stack(parts, -1).flatten(-2), rest], -1)


def _narrow() -> Iterator[Variant]:
    """Yield what is stored in fewer bits between projection and scores, as a cache may, and the weights of attention."""
    ways: dict[str, Formula] = {
        "float16": partial(mantissa, 10, False),
        "bfloat16": partial(mantissa, 7, False),
        "float8 (e4m3)": partial(mantissa, 3, False),
        "float8 (e5m2)": partial(mantissa, 2, False),
        "8 bits, a scale for each token": partial(in_eight_bits, (-1,)),
        "8 bits, a scale for all": partial(in_eight_bits, (-2, -1)),
    }
    parts = {"kv": "keys and values", "k": "the keys", "v": "the values", "qkv": "queries, keys and values"}
    for (dtype, narrow), letters in itertools.product(ways.items(), parts):
        for by_head in (False, True) if dtype.startswith("8") else (False,):
            words = dtype.replace("each token", "each token and head").replace("for all", "for each head") if by_head else dtype
            fault = Fault("reduced-precision", "attn", f"{parts[letters]} are rounded to {words}")
            changed = partial(_rounded, letters, narrow, by_head)
            yield _shared(f"{letters} in {words}", fault, changed)
    for dtype in ("float16", "bfloat16"):
        fault = Fault("reduced-precision", "attn", f"the attention weights are rounded to {dtype}")
        yield _shared(f"weights in {dtype}", fault, _weights_on_top(ways[dtype]))


def _rounded(letters: str, narrow: Formula, by_head: bool, simulation: Simulation, layer: int) -> Stages:
    right, changed = simulation.right(layer), {}
    for letter in letters:

        def formula(s: State, name: str = f"attn.{letter}") -> Tensor:
            value = right[name](s)
            if not by_head:
                return narrow(value)
            return Layout.RIGHT.merge(narrow(Layout.RIGHT.split(value, simulation.config.n_head)))

        changed[f"attn.{letter}"] = formula
    return changed
