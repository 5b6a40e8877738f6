"""The table of every cause that ``gpt2 diagnose`` can name, and how causes are merged and ranked.

``python -m gpt2.port.terms.causes`` prints ``CAUSES.md``.

The ids are a contract: ``--json`` prints them and other programs match on them. In the corrected lines ``x`` is the residual
stream (B, T, D); ``q``, ``k``, ``v`` are (B, H, T, K); ``w`` is the checkpoint's tensor, stored [in, out].
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from gpt2.port.terms.places import EVERY, Place, collapsed, forward_rank, joined
from gpt2.port.terms.report import Cause


class KnownCause(NamedTuple):
    title: str
    fix: str


BLOCK = "x = x + attn(ln_1(x)); x = x + mlp(ln_2(x))"
SCORES = "scores = q @ k.transpose(-1, -2) / sqrt(head_size)"
MASKED = "scores.masked_fill(torch.ones(T, T).triu(1).bool(), -inf)"
EMBEDDED = "x = wte(ids) + wpe(torch.arange(T))"
HEAD = "logits = ln_f(x) @ wte.weight.t()"
RUN = "for block in h: x = block(x)"
LOADED = "load_state_dict(..., strict=True), or gpt2.load_into(module, MODEL)"
SPLIT = "q, k, v = (x @ w + b).split(n_embd, -1)"
HEADS = f"{SPLIT}; q = q.view(B, T, n_head, head_size).transpose(1, 2)  # and back: y.transpose(1, 2).reshape(B, T, n_embd)"
NORM = "(x - mean) / sqrt(var + eps) * weight + bias"
CACHED = "k = cat(past_k, k, dim=-2); positions = arange(past, past + T); the mask's last T rows"
PADDED = "positions = (mask.cumsum(-1) - 1).clamp(min=0); scores.masked_fill(~mask.bool()[:, None, None], -inf)"
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Weights": {
        "transposed": ("a matrix is transposed", "linear.weight.copy_(w.t())  # the file stores [in, out], nn.Linear [out, in]"),
        "not-loaded": ("a parameter does not hold the checkpoint's values", LOADED),
        "wrong-tensor": ("a parameter holds another tensor of the checkpoint", "copy the tensor of this name: {where}"),
        "qkv-order": ("queries, keys and values are taken from wrong places", f"{SPLIT}  # of c_attn"),
        "head-layout": ("heads and their units are read in another order", HEADS),
        "missing-bias": (
            "a bias of the checkpoint has no place",
            "nn.Linear(n_in, n_out, bias=True), with the checkpoint's bias",
        ),
        "untied-head": ("the head has its own weights", "lm_head.weight = wte.weight  # logits = x @ wte.weight.t()"),
        "reduced-precision": ("numbers were rounded to a narrower dtype", "load in float32: no .half(), no .bfloat16()"),
        "padded-vocab": ("there are more logits than tokens", "logits = logits[..., :vocab_size]"),
    },
    "Normalisation": {
        "layernorm-eps": ("another epsilon in the layer norm", "nn.LayerNorm(n_embd, eps=1e-5)"),
        "layernorm-unbiased-variance": ("the variance is divided by D - 1", "x.var(-1, keepdim=True, unbiased=False)"),
        "layernorm-not-normalising": ("the input is scaled and shifted, not normalised", NORM),
        "layernorm-without-affine": (
            "the norm has no scale and shift",
            "nn.LayerNorm(n_embd), with the weight and bias of the file",
        ),
        "rmsnorm": ("the norm does not subtract the mean", f"nn.LayerNorm(n_embd), not nn.RMSNorm: {NORM}"),
        "layernorm-axis": ("the norm runs over the wrong axis", f"{NORM}  # mean and var over dim=-1 of (B, T, D)"),
        "post-norm": ("norms stand after the branches", BLOCK),
        "norm-missing": ("a norm before a branch is missing", BLOCK),
        "final-norm-missing": ("the norm before the head is missing", HEAD),
        "norms-swapped": ("a norm has another norm's weights, or two have changed places", BLOCK),
    },
    "Feed-forward": {
        "gelu-variant": ("another activation", 'nn.GELU(approximate="tanh")  # 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))'),
        "ffn-dropout": ("dropout inside the feed-forward", "x = c_proj(gelu(c_fc(x)))  # dropout only after it, and in training"),
    },
    "Attention": {
        "scale-missing": ("the scores are not scaled", SCORES),
        "scale-by-width": (
            "the scores are scaled by the width, not by the head size",
            f"{SCORES}  # n_embd // n_head, not n_embd",
        ),
        "scale-twice": ("the scores are scaled twice", f"{SCORES}, once; scaled_dot_product_attention does it itself"),
        "scale-inverse-layer": ("the scores are scaled by the layer's number", f"{SCORES}, in every layer"),
        "scale-wrong": ("the scores are multiplied by another factor", SCORES),
        "mask-missing": ("attention sees the future", f"{MASKED}.softmax(-1)"),
        "mask-strict": ("a token cannot see itself", f"{MASKED}  # triu(1), not triu(0)"),
        "mask-multiplied": ("masked scores are zero, not minus infinity", f"{MASKED}.softmax(-1), not scores * mask"),
        "mask-off-by-one": ("a token sees the next one", f"{MASKED}  # triu(1), not triu(2)"),
        "softmax-axis": ("the softmax runs over the wrong axis", "scores.softmax(dim=-1)  # over the keys"),
        "softmax-missing": ("there is no softmax", "weights = scores.masked_fill(future, -inf).softmax(-1)"),
        "output-projection-missing": ("attention has no output projection", "return c_proj(y)"),
        "value-projection-wrong": (
            "attention mixes something other than the values",
            "y = weights @ v  # the last third of c_attn",
        ),
    },
    "Positions and embeddings": {
        "position-missing": ("no positions are added", EMBEDDED),
        "position-offset": ("positions do not begin at row 0", EMBEDDED),
        "position-sinusoidal": (
            "positions are sines, not the learned ones",
            f"{EMBEDDED}  # wpe is a parameter of the checkpoint",
        ),
        "rotary-positions": ("queries and keys are turned by their position", f"{SCORES}  # q and k as c_attn gives them"),
        "embedding-scaled": ("the embeddings are scaled", f"{EMBEDDED}  # no factor"),
    },
    "Wiring": {
        "residual-missing": ("a branch replaces the stream", BLOCK),
        "residual-from-normed": ("a branch is added to the normalised stream", f"{BLOCK}  # x as it was before the norm"),
        "residual-scaled": ("a branch or its sum is scaled", f"{BLOCK}  # no factor"),
        "parallel-block": ("attention and feed-forward run in parallel", f"{BLOCK}  # the second sees the first's result"),
        "layer-order": ("blocks are in another order", f"{RUN}  # h.0 first"),
        "layer-missing": ("a block does not run", f"{RUN}  # all of them"),
        "layer-repeated": ("a block runs more than once", f"{RUN}  # each once"),
        "extra-norm": ("a norm that GPT-2 does not have", "x = wte(ids) + wpe(pos); blocks; ln_f: no other norm"),
        "logits-scaled": ("the logits are scaled", f"{HEAD}  # no factor"),
        "extra-bias": ("a bias that GPT-2 does not have", "lm_head = nn.Linear(n_embd, vocab_size, bias=False)"),
        "logits-softmaxed": (
            "the output is probabilities, not logits",
            "return logits  # the loss and the sampler take the softmax",
        ),
    },
    "Behaviour": {
        "dropout-active": ("dropout does not stop in eval mode", "F.dropout(x, p, training=self.training), or nn.Dropout"),
        "not-deterministic": ("the same ids give other logits every time", "draw no random number in eval mode"),
        "cache-inconsistent": ("other logits with the cache than without", CACHED),
        "batch-dependent": ("a row's logits depend on the other rows", "keep the batch axis first, and apart, in each view"),
        "padding-wrong": ("other logits for a padded row than for the row alone", PADDED),
    },
}
CAUSES = {id: KnownCause(*row) for rows in SECTIONS.values() for id, row in rows.items()}
HEADING = """\
# What `gpt2 diagnose` can name in a forward pass

The ids of the causes in `gpt2 diagnose MODULE_OR_DUMP --json`, for programs that match on them. They do not change. The report of
a cause says more than its id: where it is, how we know, and the corrected line. Some mistakes are the same computation under two
names (queries, keys and values taken from wrong places are also heads read in another order); then either id may be named.
"""


def document() -> str:
    """Return ``CAUSES.md``: a table for each section."""
    parts = [HEADING]
    for title, rows in SECTIONS.items():
        listed = [f"| `{id}` | {means} |" for id, (means, _) in rows.items()]
        parts.append("\n".join(["", f"## {title}", "", "| id | means |", "| --- | --- |", *listed, ""]))
    return "".join(parts)


@dataclass(frozen=True)
class PlacedCause:
    """A :class:`Cause` while causes are collected; ``places`` become text at the end. One id and ``kind`` are one fault.

    ``held``: parameters at these places do it, by what they hold.
    """

    id: str
    places: tuple[Place, ...]
    detail: str
    evidence: str
    confidence: float
    fix: str | None = None
    kind: str = ""
    effect: float | None = None
    held: bool = False

    def cause(self) -> Cause:
        where = joined(self.places)
        fix = (self.fix or CAUSES[self.id].fix).replace("{where}", where)
        return Cause(self.id, where, self.detail, self.evidence, self.confidence, fix, self.effect)


DROPPED = "of a block that drops attention's result: its feed-forward takes the block's input, as in a parallel block"
ONE_FOR_ALL = "of all blocks, which are one: it holds the weights of the last that was loaded, and the others hold none"
# The cause on the left explains those on the right, which are dropped, at the same place or at the part of it that is named: what
# else is missing there is a fault of its own.
EXPLAINS: dict[str, dict[str, str]] = {
    "rmsnorm": {"missing-bias": "", "layernorm-without-affine": ""},
    "norm-missing": {"missing-bias": "", "layernorm-without-affine": ""},
    "final-norm-missing": {"missing-bias": "", "layernorm-without-affine": ""},
    "layernorm-without-affine": {"missing-bias": ""},
    "post-norm": {"norm-missing": ""},
    "residual-from-normed": {"norm-missing": ""},
    "layer-missing": {"missing-bias": "", "layernorm-without-affine": ""},
    "output-projection-missing": {"missing-bias": "attn.c_proj"},
    "value-projection-wrong": {"missing-bias": "attn.c_attn v", "wrong-tensor": "attn.c_attn v"},
    "head-layout": {"missing-bias": ""},
    "position-sinusoidal": {"position-missing": ""},
    "residual-missing": {"parallel-block": DROPPED},
    "batch-dependent": {"untied-head": ""},  # known by no formula giving the logits, where rows change each other's
    "layer-repeated": dict.fromkeys(("missing-bias", "layernorm-without-affine", "wrong-tensor"), ONE_FOR_ALL),
}
FUTURE = ("head-layout", "mask-missing", "mask-multiplied", "mask-off-by-one", "mask-strict", "softmax-axis", "softmax-missing")
RANDOM = ("not-deterministic", "dropout-active", "ffn-dropout")
# Faults of behaviour that follow from a fault anywhere: a token that sees the future gives other logits with a cache.
IMPLIES = {
    **{id: {"cache-inconsistent", "padding-wrong"} for id in (*FUTURE, "batch-dependent")},
    **{id: {"cache-inconsistent"} for id in ("layer-repeated", "position-sinusoidal", "position-missing")},
    **{id: {"batch-dependent", "cache-inconsistent", "padding-wrong"} for id in RANDOM},
}


def ranked(
    causes: Iterable[PlacedCause], layers: int, effect: Callable[[PlacedCause], float | None] = lambda cause: None
) -> list[PlacedCause]:
    """Merge the same fault in several blocks; sort by effect, then by the order of the forward pass.

    What changes from call to call comes first: all else was seen in one of them. What has no known effect comes last.
    ``effect``: measures that of a cause which has none yet.
    """
    once: dict[tuple[str, tuple[Place, ...]], PlacedCause] = {}
    for cause in causes:
        once.setdefault((cause.id, cause.places), cause)
    merged = merge_blocks(once.values(), layers)
    implied = {id for cause in merged for id in IMPLIES.get(cause.id, ())}
    merged = [cause for cause in merged if not _is_seen_inside(cause, merged)]
    kept = []
    for cause in _join_nested(merged):
        places = _unexplained(cause, merged, layers)
        if cause.id not in implied and places:
            kept.append(replace(cause, places=places))
    kept = [*(cause for cause in kept if cause.id != "missing-bias"), *_one_cause_of_biases(kept, layers)]
    kept = [cause if cause.effect is not None else replace(cause, effect=effect(cause)) for cause in kept]

    def order(cause: PlacedCause) -> tuple[object, ...]:
        return cause.id != "not-deterministic", -(cause.effect or 0.0), forward_rank(cause.places[0], layers)

    return sorted(kept, key=order)


def _is_seen_inside(cause: PlacedCause, others: Iterable[PlacedCause]) -> bool:
    """Return whether a row's logits depend on others by what a block does, which is named there."""
    inside = (other.id == cause.id and other.places[0].layer is not None for other in others)
    return cause.id == "batch-dependent" and cause.places[0].layer is None and any(inside)


def _one_cause_of_biases(causes: Iterable[PlacedCause], layers: int) -> list[PlacedCause]:
    """Return all missing biases as one cause with all its places: they are one decision of the port's author."""
    absent = [cause for cause in causes if cause.id == "missing-bias"]
    if len(absent) < 2:
        return absent
    by_tensor = {(place.layer, place.stem, place.share): place for cause in absent for place in cause.places}
    places = tuple(sorted(by_tensor.values(), key=lambda place: forward_rank(place, layers)))
    confidence = min(cause.confidence for cause in absent)
    return [replace(absent[0], places=places, detail="no bias is added in these places", confidence=confidence, kind="")]


def merge_blocks(causes: Iterable[PlacedCause], layers: int) -> list[PlacedCause]:
    """Merge causes that differ only in the block, with the words of the first, the lowest confidence and the largest effect."""
    groups: dict[tuple[object, ...], list[PlacedCause]] = {}
    for cause in causes:
        parts = frozenset((place.layer is None, place.part, place.share) for place in cause.places)
        groups.setdefault((cause.id, parts, cause.kind or cause.detail), []).append(cause)
    merged = []
    for same in groups.values():
        places = collapsed((place for cause in same for place in cause.places), layers)
        effect = max((cause.effect for cause in same if cause.effect is not None), default=None)
        merged.append(replace(same[0], places=places, confidence=min(cause.confidence for cause in same), effect=effect))
    return merged


def _join_nested(causes: list[PlacedCause]) -> list[PlacedCause]:
    """Merge a fault at two places if one place contains the other (both residuals of a block)."""
    out: list[PlacedCause] = []
    for cause in causes:
        number = next((i for i, other in enumerate(out) if other.id == cause.id and _nested(other.places, cause.places)), None)
        if number is None:
            out.append(cause)
            continue
        other = out[number]
        detail = "; ".join(dict.fromkeys((other.detail, cause.detail)))
        confidence = min(other.confidence, cause.confidence)
        out[number] = replace(other, places=(*other.places, *cause.places), detail=detail, confidence=confidence)
    return out


def _nested(one: tuple[Place, ...], other: tuple[Place, ...]) -> bool:
    """Return whether each cause has a single place, and one place is a part of the other, in the same block."""
    if len(one) > 1 or len(other) > 1 or one[0].layer != other[0].layer:
        return False
    outer, inner = sorted((one[0].part, other[0].part), key=len)
    return inner != outer and (not outer or inner.startswith(f"{outer}."))


def _unexplained(cause: PlacedCause, others: Iterable[PlacedCause], layers: int) -> tuple[Place, ...]:
    """Return the places of ``cause`` that do not follow from another one."""
    explaining = [
        (place, part)
        for other in others
        if (part := EXPLAINS.get(other.id, {}).get(cause.id)) is not None
        for place in other.places
        if other.id != "head-layout" or place.share
    ]
    if not explaining:
        return cause.places
    every = [one for place in cause.places for one in place.each(layers)]
    left = [one for one in every if not any(_follows(one, place, part) for place, part in explaining)]
    return cause.places if left == every else collapsed(left, layers)


def _follows(place: Place, from_place: Place, part: str) -> bool:
    """Return whether a fault at ``place`` follows from one at ``from_place``, or at a part of that."""
    if part == DROPPED:
        return from_place.part == "mid" and Place(from_place.layer, "").contains(place)
    if part == ONE_FOR_ALL:
        return from_place.layer == EVERY and from_place.contains(place)
    if not part:
        same_share = not from_place.share or place.share == from_place.share
        return same_share and (from_place.contains(place) or (place.contains(from_place) and bool(place.part)))
    part, _, share = part.partition(" ")
    return Place(from_place.layer, part, share).contains(place) and (not share or place.share == share)


if __name__ == "__main__":
    sys.stdout.write(document())
