"""Find the structural departures of a port from GPT-2: missing parts, extra parts, and different connections.

A new kind goes into :class:`DepartureKind`, :func:`find_departures` and the causes of :mod:`gpt2.port.diagnosis.structure`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.mapping.mapping import Mapping


class DepartureKind(Enum):
    """A kind of departure; the value is the message to the port's author. :func:`.remarks.sentence` fills in the braces."""

    WIDTH = "your module is {port_size:,} wide, the checkpoint {checkpoint_size:,}"
    BLOCK_COUNT = "your forward runs {port_size:,} block{plural}, the checkpoint has {checkpoint_size}{left_out}"
    HEAD_COUNT = "your attention has {port_size:,} head{plural}, the checkpoint {checkpoint_size}"
    FEED_FORWARD_WIDTH = "your feed-forward is {port_size:,} wide, the checkpoint's {checkpoint_size:,}"
    VOCABULARY = "your vocabulary has {port_size:,} entries, the checkpoint {checkpoint_size:,}"
    VOCABULARY_PADDED = "your vocabulary is padded from {checkpoint_size:,} to {port_size:,} entries: the rest is zero"
    REPEATED = "your {subject} runs {port_size} times"
    HEADS_MIXED = "your {subject} mixes up heads and positions: view as (B, T, heads, size), transpose, and so back"
    HEADS_SHARED = (
        "your {subject} has {port_size} head{plural} of keys or values, which its {checkpoint_size} of queries share (grouped "
        "heads); the checkpoint has keys and values for each head"
    )
    POST_NORM = "your norms stand after the branches, GPT-2's before them; they are filled in running order"
    EXTRA_NORM = "a norm that GPT-2 does not have"
    POSITIONS_SHIFTED = "your positions begin at row {port_size} of their table, the checkpoint's at 0"
    IN_BUFFER = "your {part} ({name}) is a buffer and no parameter: it is left as it is"
    POSITIONS_MISSING = "your module has no learned positions; the checkpoint's wpe.weight is left out"
    BRANCH_MISSING = "your forward has no {subject} in one block: {norm} does not run"
    NORM_MISSING = "your {subject} has no norm before it; the checkpoint has {norm}"
    FINAL_NORM_MISSING = "your module has no last norm; the checkpoint has ln_f"


@dataclass(frozen=True)
class Departure:
    """One departure in ``part`` of block ``layer``, with its size in the port and in the checkpoint.

    ``names``: parameters of an extra norm, the buffer of a part, the checkpoint's blocks that do not run, or shares of c_attn.
    ``module``: dotted name.
    """

    kind: DepartureKind
    layer: int | None = None
    part: str = ""
    port_size: int = 0
    checkpoint_size: int = 0
    names: tuple[str, ...] = ()
    module: str = ""


def find_departures(mapping: Mapping) -> list[Departure]:
    """Return all structural departures, sizes first."""
    return [*_sizes(mapping.anatomy, mapping.config), *_connections(mapping.anatomy, mapping)]


def _sizes(anatomy: Anatomy, config: GPT2Config) -> Iterator[Departure]:
    absent = tuple(f"h.{layer}" for layer in range(config.n_layer) if layer not in anatomy.layers)
    heads = config.n_head if anatomy.mixed_layers else len(anatomy.attentions[0].heads)
    hidden: Counter[int | None] = Counter()
    for part in anatomy.parts:
        hidden[part.layer] += len(part.columns) if part.part == "mlp.c_fc" else 0
    inner = {size for size in hidden.values() if size}
    words = anatomy.stream.vocabulary if anatomy.head is None else len(anatomy.head)
    padded = words > config.vocab_size
    for kind, part_name, port_size, checkpoint_size in (
        (DepartureKind.WIDTH, "", anatomy.width, config.n_embd),
        (DepartureKind.BLOCK_COUNT, "", len(anatomy.layers), config.n_layer),
        (DepartureKind.HEAD_COUNT, "attn", heads, config.n_head),
        (DepartureKind.FEED_FORWARD_WIDTH, "mlp", inner.pop() if len(inner) == 1 else config.inner, config.inner),
        (DepartureKind.VOCABULARY_PADDED if padded else DepartureKind.VOCABULARY, "wte", words, config.vocab_size),
    ):
        if port_size != checkpoint_size:
            names = absent if kind is DepartureKind.BLOCK_COUNT else ()
            yield Departure(kind, part=part_name, port_size=port_size, checkpoint_size=checkpoint_size, names=names)


def _connections(anatomy: Anatomy, mapping: Mapping) -> Iterator[Departure]:
    for branch in anatomy.branches:
        if branch.times > 1:
            module = module_name(anatomy, branch.part, branch.layer)
            yield Departure(
                DepartureKind.REPEATED, branch.layer, branch.part, port_size=branch.times, checkpoint_size=1, module=module
            )
    used = (source for source in mapping.sources if source.storage in anatomy.recording.uses and len(source.region.shape) > 1)
    known = all(mapping.parts(source) for source in used)  # else an unknown matrix may be that of a branch
    for layer, stem in itertools.product(anatomy.layers if known else (), ("attn", "mlp")):
        if all((branch.layer, branch.part) != (layer, stem) for branch in anatomy.branches):
            yield Departure(DepartureKind.BRANCH_MISSING, layer, stem)
    for layer in sorted(anatomy.mixed_layers):
        yield Departure(DepartureKind.HEADS_MIXED, layer, "attn", module=module_name(anatomy, "attn", layer))
    for layer, counts in anatomy.shared_heads.items():
        heads, module, fewest = len(anatomy.attentions[0].heads), module_name(anatomy, "attn", layer), min(counts.values())
        yield Departure(DepartureKind.HEADS_SHARED, layer, "attn", fewest, heads, tuple(counts), module)
    if anatomy.post_norm:
        yield Departure(DepartureKind.POST_NORM)
    for norm in anatomy.extra_norms:
        names = {anatomy.recording.name(int(ids[0])) for ids in (norm.scale, norm.shift) if ids is not None}
        yield Departure(DepartureKind.EXTRA_NORM, names=tuple(sorted(names)))
    if anatomy.positions is not None and mapping.skips_positions:
        yield Departure(DepartureKind.POSITIONS_SHIFTED, part="wpe", port_size=anatomy.positions.skipped)
    for part, name in mapping.in_buffers:
        yield Departure(DepartureKind.IN_BUFFER, part.layer, part.part, names=(name,))
    if anatomy.positions is None and not any(part.part == "wpe" for part, _ in mapping.in_buffers):
        yield Departure(DepartureKind.POSITIONS_MISSING, part="wpe")
    for branch in anatomy.branches:
        if not branch.normed and not anatomy.post_norm:
            module = module_name(anatomy, branch.part, branch.layer)
            yield Departure(DepartureKind.NORM_MISSING, branch.layer, branch.norm, module=module)
    if not anatomy.final_norm:
        yield Departure(DepartureKind.FINAL_NORM_MISSING, part="ln_f")


def module_name(anatomy: Anatomy, part: str, layer: int | None) -> str:
    """Return the dotted name that the parameters of a block's "attn" or "mlp" share, such as "blocks.0.attn"."""
    stem = f"{part}."
    matrices = [p for p in anatomy.parts if p.layer == layer and p.part.startswith(stem) and not p.part.endswith(".bias")]
    names = [anatomy.recording.name(int(matrix.ids[0])).split(".")[:-1] for matrix in matrices]
    shared = itertools.takewhile(lambda pieces: len(set(pieces)) == 1, zip(*names, strict=False))
    return ".".join(pieces[0] for pieces in shared)


class MissingEntries(NamedTuple):
    """The entries of a checkpoint's tensor that have no place in a port, and their ``norm`` (0: no effect).

    ``shares``: which thirds ("q", "k", "v") of c_attn are missing. ``neutral``: the tensor with a bias of zero or a scale of one
    in place of the missing entries; None for a matrix.
    """

    name: str
    shares: str
    norm: float
    neutral: Tensor | None


def missing_entries(placed: MappingType[str, Tensor], state: MappingType[str, Tensor]) -> Iterator[MissingEntries]:
    """Yield the entries of the checkpoint ``state`` that ``placed`` (bool tensors of the same shapes) marks False."""
    for name, present in placed.items():
        if bool(present.all()):
            continue
        tensor, shares = state[name], ""
        if ".c_attn." in name:
            thirds = zip("qkv", present.chunk(3, -1), strict=True)
            shares = "".join(share for share, third in thirds if not bool(third.any()))
        value = 1.0 if name.endswith(".weight") and tensor.ndim == 1 else 0.0
        lost = (tensor.double() - value).masked_fill(present, 0.0)
        if shares and tensor.ndim == 1:
            lost.chunk(3)[1].zero_()  # softmax ignores a constant that is added to all scores of a query
        neutral = torch.where(present, tensor, value) if tensor.ndim == 1 else None
        yield MissingEntries(name, shares, float(torch.linalg.vector_norm(lost)), neutral)
