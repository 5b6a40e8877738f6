"""Find where a port's structure departs from GPT-2's, as causes: missing parts, extra parts, and different connections.

A new one goes into :func:`structural_causes`. ``load_into`` lists them; ``diagnose`` names them where its walk stops early.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.mapping.mapping import WeightMap
from gpt2.port.terms.causes import LIKELY, Cause
from gpt2.port.terms.places import EVERY, Place

SEEN = "seen in the operators of its forward pass, whatever their names"
SHARED = "shared heads"  # the kind of cause that is as certain as one of weights
BRANCHES = {"attn": ("attention", "ln_1"), "mlp": ("feed-forward", "ln_2")}
# The cause where a port has no place for a matrix.
LOST = {"attn.c_proj.weight": "output-projection-missing", "attn.c_attn.weight": "value-projection-wrong"}


def other_sizes(mapping: WeightMap) -> Iterator[tuple[str, int, int]]:
    """Yield each size of the port that is not the checkpoint's: what, the port's, the checkpoint's."""
    anatomy, config = mapping.anatomy, mapping.config
    hidden: Counter[int | None] = Counter()
    for part in anatomy.parts:
        hidden[part.layer] += len(part.columns) if part.part == "mlp.c_fc" else 0
    inner = {size for size in hidden.values() if size}
    for what, size, wanted in (
        ("width", anatomy.width, config.n_embd),
        ("feed-forward width", inner.pop() if len(inner) == 1 else config.inner, config.inner),
        ("vocabulary", vocabulary(anatomy), config.vocab_size),
        ("number of blocks", max(len(anatomy.layers), config.n_layer), config.n_layer),
    ):
        if size != wanted and not (what == "vocabulary" and size > wanted):
            yield what, size, wanted


def vocabulary(anatomy: Anatomy) -> int:
    return anatomy.stream.vocabulary if anatomy.head is None else len(anatomy.head)


def rows_apart(anatomy: Anatomy) -> str:
    """Say that a port returns fewer logits than its embedding has rows; "" if it does not, or if the rest is padding."""
    rows, logits = anatomy.stream.vocabulary, vocabulary(anatomy)
    padded = rows % 8 == 0 and rows - logits < min(1024, logits)
    advice = "return one logit for each row, or cut the embedding to the rows that count"
    return "" if padded or logits >= rows else f"it returns {logits:,} logits and embeds {rows:,} tokens; {advice}"


def structural_causes(mapping: WeightMap) -> Iterator[Cause]:
    """Yield the faults in a port's connections; less certain than a walk's causes, since nothing was recomputed."""
    anatomy, config = mapping.anatomy, mapping.config

    def cause(id: str, words: str, *places: Place, fix: str | None = None, kind: str = "") -> Cause:
        return Cause(id, places, words, SEEN, LIKELY, fix, kind, held=id == "position-missing")

    absent = [Place(layer, "") for layer in range(config.n_layer) if layer not in anatomy.layers]
    if absent:
        words = f"your forward runs {len(anatomy.layers)} of the checkpoint's {config.n_layer} blocks"
        yield cause("layer-missing", words, *absent)
    heads = len(anatomy.attentions[0].heads)
    if heads != config.n_head and not anatomy.mixed_layers:
        words = f"your attention has {heads} head{'s' * (heads != 1)}, the checkpoint {config.n_head}"
        yield cause("head-layout", words, Place(EVERY, "attn"), fix=f"n_head={config.n_head}  # each {config.head_dim} wide")
    for branch in anatomy.branches:
        what, _ = BRANCHES[branch.part]
        if branch.times > 1:
            yield cause("layer-repeated", f"your {what} runs {branch.times} times", Place(branch.layer, ""), kind=what)
        if not branch.normed and not anatomy.post_norm:
            yield cause("norm-missing", f"your {what} has no norm before it", Place(branch.layer, branch.norm))
    used = (source for source in mapping.sources if source.storage in anatomy.recording.uses and len(source.region.shape) > 1)
    known = all(mapping.parts(source) for source in used)  # else an unknown matrix may be that of a branch
    for layer, (part, (what, before)) in itertools.product(anatomy.layers if known else (), BRANCHES.items()):
        if all((branch.layer, branch.part) != (layer, part) for branch in anatomy.branches):
            yield cause("layer-missing", f"your forward has no {what} in one block", Place(layer, part), Place(layer, before))
    for layer in sorted(anatomy.mixed_layers):
        words = "your attention mixes up heads and positions: view as (B, T, heads, size), transpose, and so back"
        yield cause("head-layout", words, Place(layer, "attn"))
    for layer, counts in anatomy.shared_heads.items():
        what = ", ".join(name for name in ("queries", "keys", "values") if name[0] in counts)
        few = f"{(least := min(counts.values()))} head{'s' * (least != 1)} of {' and '.join(what.rsplit(', ', 1))}"
        words = f"your attention's {heads} heads share {few}; each has its own in the checkpoint"
        yield cause("head-layout", words, *(Place(layer, "attn.c_attn", share) for share in counts), kind=SHARED)
    if anatomy.post_norm:
        yield cause("post-norm", "your norms stand after the branches, GPT-2's before them", Place(EVERY, ""))
    for norm in anatomy.extra_norms:
        names = {anatomy.recording.name(int(ids[0])) for ids in (norm.scale, norm.shift) if ids is not None}
        yield cause("extra-norm", "a norm that GPT-2 does not have", *(Place(None, name) for name in sorted(names)))
    if anatomy.positions is None and not any(part.part == "wpe" for part, _ in mapping.in_buffers):
        yield cause("position-missing", "your module has no learned positions", Place(None, "wpe"))
    positions = anatomy.positions
    if positions is not None and len(positions.rows) < config.n_positions:
        region = anatomy.recording.source(int(positions.ids[0])).region
        unread = int(positions.ids.min() - region.start) // int(positions.row_ids[1])  # rows before the first position
        if unread and unread + len(positions.rows) >= config.n_positions:
            words = f"positions begin at row {unread} of your table: {len(positions.rows):,} of {config.n_positions:,} have a row"
            yield cause("position-offset", words, Place(None, "wpe"))
    if not anatomy.final_norm:
        yield cause("final-norm-missing", "your module has no last norm", Place(None, "ln_f"))


class MissingEntries(NamedTuple):
    """The entries of a checkpoint's tensor that have no place in a port, and their ``norm`` (0: no effect).

    ``shares``: which thirds ("q", "k", "v") of c_attn are missing; ``incomplete``: which are, at least in part. ``neutral``: the
    tensor with a bias of zero or a scale of one in place of the missing entries; None for a matrix.
    """

    name: str
    shares: str
    incomplete: str
    norm: float
    neutral: Tensor | None

    def cause(self) -> Cause:
        """Return what is missing, as a cause."""
        place, share = Place.of(self.name), f" for {', '.join(self.shares)}" if 0 < len(self.shares) < 3 else ""
        value = ""
        if self.name.endswith("bias"):
            id, value = "missing-bias", f"; the checkpoint's is not zero (norm {self.norm:.2g})"
            words = "your norm has no shift" if ".ln_" in f".{self.name}" else f"you have no bias{share} here"
        elif self.neutral is not None:
            id, value = "layernorm-without-affine", f"; the checkpoint's is not one (off by {self.norm:.2g})"
            words = "your norm has no scale"
        else:
            id, words = LOST.get(place.part, "not-loaded"), f"you have no projection{share} here"
        places = tuple(Place(place.layer, place.part, one) for one in (self.incomplete if len(self.incomplete) % 3 else ("",)))
        evidence = f"no parameter takes the place of the checkpoint's {self.name}"
        return Cause(id, places, words + value, evidence, 0.9, None, words, held=True)


def missing_entries(placed: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Iterator[MissingEntries]:
    """Yield the entries of the checkpoint ``state`` that ``placed`` (bool tensors of the same shapes) marks False."""
    for name, present in placed.items():
        if bool(present.all()):
            continue
        tensor, shares, incomplete = state[name], "", ""
        if ".c_attn." in name:
            thirds = dict(zip("qkv", present.chunk(3, -1), strict=True))
            shares = "".join(share for share, third in thirds.items() if not bool(third.any()))
            incomplete = "".join(share for share, third in thirds.items() if not bool(third.all()))
        value = 1.0 if name.endswith(".weight") and tensor.ndim == 1 else 0.0
        lost = (tensor.double() - value).masked_fill(present, 0.0)
        if shares and tensor.ndim == 1:
            lost.chunk(3)[1].zero_()  # softmax ignores a constant that is added to all scores of a query
        neutral = torch.where(present, tensor, value) if tensor.ndim == 1 else None
        yield MissingEntries(name, shares, incomplete, float(torch.linalg.vector_norm(lost)), neutral)
