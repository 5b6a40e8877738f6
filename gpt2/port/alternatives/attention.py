"""Other attention: factors of the scores, and what is compared with what."""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.alternatives.alternative import Alternative, Changed
from gpt2.port.graph import ROWS, Model, Site, State, heads_of, right_scale
from gpt2.port.terms.causes import SCORES, Cause

LETTERS = {"q": "queries", "k": "keys", "v": "values"}
VALUES = {
    "attn.k": "the keys are mixed, not the values",
    "attn.q": "the queries are mixed",
    "ln_1": "attention's input itself is mixed: there is no projection to values",
    "x": "the stream is mixed as it is: there is no norm and no projection to values",
}
Scale = Callable[[GPT2Config, int], float]  # from a config and a block's number to the factor of the scores
BY_LAYER, BY_LAYER_KIND = "scale-inverse-layer", "by the layer's number"
# What people multiply the scores by, with the cause.
SCALES: dict[str, tuple[str, Scale]] = {
    "the scores are not divided by the layer's number, as the config asks": (
        BY_LAYER,
        lambda c, n: c.head_dim**-0.5 if c.scale_attn_by_inverse_layer_idx else right_scale(c, n),
    ),
    "the scores are not scaled": ("scale-missing", lambda c, n: 1.0),
    "the scores are divided by the root of the width n_embd": ("scale-by-width", lambda c, n: c.n_embd**-0.5),
    "the scores are divided by the root of a head's size twice": ("scale-twice", lambda c, n: 1 / c.head_dim),
    "the scores are divided by the width n_embd": ("scale-by-width", lambda c, n: 1 / c.n_embd),
    "the scores are multiplied by the root of a head's size, not divided": ("scale-wrong", lambda c, n: c.head_dim**0.5),
    "the scores are multiplied by the root of the width": ("scale-wrong", lambda c, n: c.n_embd**0.5),
    "the scores are divided by the root of the number of heads": ("scale-wrong", lambda c, n: c.n_head**-0.5),
    "the scores are divided by 8, as heads of 64 need it": ("scale-wrong", lambda c, n: 0.125),
    "the fourth root of a head's size divides the queries or the keys alone": ("scale-wrong", lambda c, n: c.head_dim**-0.25),
    "the scores are multiplied by twice the factor": ("scale-wrong", lambda c, n: 2 * c.head_dim**-0.5),
    "the scores are multiplied by half the factor": ("scale-wrong", lambda c, n: 0.5 * c.head_dim**-0.5),
    "the scores are also divided by the number of the layer": (BY_LAYER, lambda c, n: c.head_dim**-0.5 / (n + 1)),
}


def scale_faults(config: GPT2Config, layer: int, factor: float) -> tuple[Cause, ...]:
    """Return the faults that ``factor`` on the scores of a block shows; none if it is GPT-2's."""
    right = right_scale(config, layer)
    if math.isclose(factor, right, rel_tol=1e-7):
        return ()
    known = ((id, words) for words, (id, scale) in SCALES.items() if math.isclose(factor, scale(config, layer), rel_tol=1e-7))
    id, words = next(known, ("scale-wrong", f"the scores are multiplied by {factor:.6g}"))
    return (Cause.at(id, "attn", f"{words}; {_wanted(config, right)}", BY_LAYER_KIND if id == BY_LAYER else ""),)


def _wanted(config: GPT2Config, right: float) -> str:
    head_size = " (1/sqrt(head size))" if math.isclose(right, config.head_dim**-0.5) else ""
    return f"the checkpoint's attention multiplies them by {right:.6g}{head_size}"


def scales(model: Model) -> Iterator[Alternative]:
    """Yield other factors of the scores."""
    config, layers = model.config, range(model.config.n_layer)
    rounded: Scale = lambda c, n: float(torch.tensor(right_scale(c, n), dtype=torch.float32))  # noqa: E731
    tried = {tuple(right_scale(config, layer) for layer in layers)}
    for words, (id, scale) in {**SCALES, "the factor of the scores is rounded to float32": ("scale-wrong", rounded)}.items():
        if (factors := tuple(scale(config, layer) for layer in layers)) not in tried:
            tried.add(factors)
            edit = Changed("attn.scores", lambda c, y, scale=scale: y * (scale(config, c.layer) / right_scale(config, c.layer)))
            same = [factor == right_scale(config, layer) for layer, factor in enumerate(factors)]
            named = words if id == BY_LAYER else f"{words}; {_wanted(config, right_scale(config, 0))}"
            yield Alternative(id, named, {"attn.scores": edit}, silent=same.__getitem__)


def comparisons(model: Model) -> Iterator[Alternative]:
    """Yield other pairs of what is compared, other values, rotary positions, and attention over the rows of the batch."""
    config = model.config
    for order in itertools.product("qkv", repeat=3):
        wrong = {one: other for one, other in zip("qkv", order, strict=True) if one != other}
        if wrong and wrong.keys() != {"v"}:
            words = ", ".join(f"the {LETTERS[one]} are the {LETTERS[other]}" for one, other in wrong.items())
            edits = {f"attn.{one}h": heads_of(f"attn.{other}") for one, other in wrong.items()}
            yield Alternative("qkv-order", words, edits, fix=SCORES, rare=len(set(order)) > 2)
    for source, words in VALUES.items():
        yield Alternative("value-projection-wrong", words, {"attn.vh": heads_of(source)})
    if len(model.ids) > 1:
        words = "every row of the batch compares its queries with the keys of the first row (axis 0)"
        edits = {"attn.kh": Changed("attn.kh", lambda c, y: y[:1].expand_as(y))}
        yield Alternative("batch-dependent", words, edits, sees=ROWS)
        words = "attention runs over the rows of the batch, not over the tokens, as of (T, B, D)"
        fix = "nn.MultiheadAttention(..., batch_first=True)  # or x.transpose(0, 1) before it and behind it"
        for mask, what in ((True, "each row sees those before it"), (False, "each row sees all rows")):
            edits = {"attn.mixed": partial(_over_rows, mask)}
            yield Alternative("batch-dependent", f"{words}: {what}", edits, sees=ROWS, fix=fix)
    pairs = ((False, "neighbouring numbers"), (True, "the halves of a head"))
    for (halves, what), sign in itertools.product(pairs, (1, -1)) if config.head_dim > 1 else ():
        words = f"queries and keys are turned by their position, {what} as pairs{', the other way round' if sign < 0 else ''}"
        turned = partial(rotated, halves, sign)
        edits = {node: Changed(node, lambda c, y, turned=turned: turned(y, c.tokens)) for node in ("attn.qh", "attn.kh")}
        yield Alternative("rotary-positions", words, edits, "attn", shared=True)


def rotated(halves: bool, sign: int, x: Tensor, tokens: Tensor) -> Tensor:
    """Return x (B, H, T, K) turned by the positions ``tokens`` (T, 1), as rotary embedding with a base of 10,000 does."""
    pairs = x.shape[-1] // 2
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    one, other = turning.chunk(2, -1) if halves else (turning[..., ::2], turning[..., 1::2])
    angle = sign * tokens / 10000.0 ** (torch.arange(pairs) / max(pairs, 1))
    cos, sin = angle.to(x).cos(), angle.to(x).sin()
    parts = one * cos - other * sin, one * sin + other * cos
    return torch.cat([torch.cat(parts, -1) if halves else torch.stack(parts, -1).flatten(-2), rest], -1)


def _over_rows(mask: bool, c: Site, s: State) -> Tensor:
    q, k, v = (s[f"attn.{one}h"].permute(2, 1, 0, 3) for one in "qkv")  # (T, H, B, K)
    scores = right_scale(c.config, c.layer) * q @ k.mT
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1) & mask
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).permute(2, 1, 0, 3)
