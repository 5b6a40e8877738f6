"""Find the structural departures of a port from GPT-2: what it lacks, has besides, or connects in another way.

A departure is a value. :mod:`.remarks` renders it as a sentence of ``load_into``, and :mod:`gpt2.port.diagnosis.structure` as a
cause of ``diagnose``. A new kind goes into :class:`DepartureKind`, :func:`find_departures` and the table of causes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.branches import Branch
from gpt2.port.anatomy.parts import Matrix, sample
from gpt2.port.mapping.mapping import Mapping


class DepartureKind(Enum):
    """What is different, in words to the port's author; :func:`.remarks.sentence` fills in the fields in braces."""

    WIDTH = "your module is {theirs:,} wide, the checkpoint {ours:,}"
    BLOCK_COUNT = "your forward runs {theirs:,} block{plural}, the checkpoint has {ours}{left_out}"
    HEAD_COUNT = "your attention has {theirs:,} head{plural}, the checkpoint {ours}"
    FEED_FORWARD_WIDTH = "your feed-forward is {theirs:,} wide, the checkpoint's {ours:,}"
    VOCABULARY = "your vocabulary has {theirs:,} entries, the checkpoint {ours:,}"
    VOCABULARY_PADDED = "your vocabulary is padded from {ours:,} to {theirs:,} entries: the rest is zero"
    REPEATED = "your {subject} runs {theirs} times"
    HEADS_MIXED = "your {subject} mixes up heads and positions: view as (B, T, heads, size), transpose, and so back"
    POST_NORM = "your norms stand after the branches, GPT-2's before them; they are filled in running order"
    EXTRA_NORM = "a norm that GPT-2 does not have"
    POSITIONS_SHIFTED = "your positions begin at row {theirs} of their table, the checkpoint's at 0"
    IN_BUFFER = "your {part} ({name}) is a buffer and no parameter: it is left as it is"
    POSITIONS_MISSING = "your module has no learned positions; the checkpoint's wpe.weight is left out"
    NORM_MISSING = "your {subject} has no norm before it; the checkpoint has {norm}"
    FINAL_NORM_MISSING = "your module has no last norm; the checkpoint has ln_f"


@dataclass(frozen=True)
class Departure:
    """One departure, at the place (``layer``, ``part``). ``theirs`` and ``ours`` are the figures of the port and the checkpoint.

    ``names`` are the parameters of an extra norm, the buffer of a part, or the checkpoint's blocks that do not run. ``module`` is
    the dotted name of the port's submodule at the place, or "".
    """

    kind: DepartureKind
    layer: int | None = None
    part: str = ""
    theirs: int = 0
    ours: int = 0
    names: tuple[str, ...] = ()
    module: str = ""


def find_departures(mapping: Mapping) -> list[Departure]:
    """All structural departures, sizes first."""
    anatomy = mapping.anatomy
    return [*_sizes(anatomy, mapping.config), *_connections(anatomy), *_positions(anatomy, mapping), *_missing_norms(anatomy)]


def _sizes(anatomy: Anatomy, config: GPT2Config) -> Iterator[Departure]:
    blocks, heads = len(anatomy.layers), len(anatomy.attentions[0].heads)
    absent = tuple(f"h.{layer}" for layer in range(config.n_layer) if layer not in anatomy.layers)
    hidden: dict[int | None, int] = {}
    for part in anatomy.parts:
        if isinstance(part, Matrix) and part.part == "mlp.c_fc":
            hidden[part.layer] = hidden.get(part.layer, 0) + len(part.outputs)
    inner = next(iter(hidden.values())) if len(set(hidden.values())) == 1 else config.inner
    words = anatomy.stream.vocabulary if anatomy.head is None else len(anatomy.head)
    if anatomy.width != config.n_embd:
        yield Departure(DepartureKind.WIDTH, theirs=anatomy.width, ours=config.n_embd)
    if blocks != config.n_layer:
        yield Departure(DepartureKind.BLOCK_COUNT, theirs=blocks, ours=config.n_layer, names=absent)
    if heads != config.n_head and not anatomy.mixed_layers:
        yield Departure(DepartureKind.HEAD_COUNT, part="attn", theirs=heads, ours=config.n_head)
    if inner != config.inner:
        yield Departure(DepartureKind.FEED_FORWARD_WIDTH, part="mlp", theirs=inner, ours=config.inner)
    if words != config.vocab_size:
        kind = DepartureKind.VOCABULARY if words < config.vocab_size else DepartureKind.VOCABULARY_PADDED
        yield Departure(kind, part="wte", theirs=words, ours=config.vocab_size)


def _branches(anatomy: Anatomy) -> Iterator[tuple[int, str, str, Branch]]:
    """Layer, part and norm of every branch, attentions first."""
    for part, norm, branches in (("attn", "ln_1", anatomy.attentions), ("mlp", "ln_2", anatomy.feed_forwards)):
        for layer, branch in zip(anatomy.layers, branches, strict=False):
            yield layer, part, norm, branch


def _connections(anatomy: Anatomy) -> Iterator[Departure]:
    for layer, part, _, branch in _branches(anatomy):
        if branch.times > 1:
            module = module_name(anatomy, part, layer)
            yield Departure(DepartureKind.REPEATED, layer, part, theirs=branch.times, ours=1, module=module)
    for layer in sorted(anatomy.mixed_layers):
        yield Departure(DepartureKind.HEADS_MIXED, layer, "attn", module=module_name(anatomy, "attn", layer))
    if anatomy.post_norm:
        yield Departure(DepartureKind.POST_NORM)
    for norm in anatomy.extra_norms:
        names = {anatomy.recording.name(int(ids[0])) for ids in (norm.scale, norm.shift) if ids is not None}
        yield Departure(DepartureKind.EXTRA_NORM, names=tuple(sorted(names)))


def _positions(anatomy: Anatomy, mapping: Mapping) -> Iterator[Departure]:
    if anatomy.positions is not None and mapping.is_shifted(anatomy.positions):
        yield Departure(DepartureKind.POSITIONS_SHIFTED, part="wpe", theirs=anatomy.positions.skipped)
    for part, name in mapping.in_buffers:
        yield Departure(DepartureKind.IN_BUFFER, part.layer, part.part, names=(name,))
    if anatomy.positions is None and not any(part.part == "wpe" for part, _ in mapping.in_buffers):
        yield Departure(DepartureKind.POSITIONS_MISSING, part="wpe")


def _missing_norms(anatomy: Anatomy) -> Iterator[Departure]:
    for layer, part, norm, branch in _branches(anatomy):
        if not branch.normed and not anatomy.post_norm:
            yield Departure(DepartureKind.NORM_MISSING, layer, norm, module=module_name(anatomy, part, layer))
    if not anatomy.final_norm:
        yield Departure(DepartureKind.FINAL_NORM_MISSING, part="ln_f")


def module_name(anatomy: Anatomy, part: str, layer: int | None) -> str:
    """ "blocks.0.attn": the dotted name that the parameters of a block's attention ("attn") or feed-forward ("mlp") share."""
    matrices = [p for p in anatomy.parts if isinstance(p, Matrix) and p.layer == layer and p.part.startswith(f"{part}.")]
    names = [anatomy.recording.name(int(sample(matrix)[0])).split(".")[:-1] for matrix in matrices]
    shared = itertools.takewhile(lambda pieces: len(set(pieces)) == 1, zip(*names, strict=False))
    return ".".join(pieces[0] for pieces in shared)


@dataclass(frozen=True)
class MissingEntries:
    """What of a checkpoint's tensor has no place in a port.

    ``shares``: which of "q", "k" and "v" have no place at all, of c_attn. ``norm``: how large the missing entries are; 0 if the
    port computes the same without them. ``neutral``: the tensor as the port behaves, with a bias of zero or a scale of one in
    place of the missing entries; None for a matrix.
    """

    name: str
    shares: str
    norm: float
    neutral: Tensor | None


def missing_entries(placed: MappingType[str, Tensor], state: MappingType[str, Tensor]) -> Iterator[MissingEntries]:
    """Compare a checkpoint, ``state``, with where a port has its entries: ``placed``, bool tensors of the same shapes."""
    for name, present in placed.items():
        if bool(present.all()):
            continue
        tensor, shares = state[name], ""
        if ".c_attn." in name:
            thirds = zip("qkv", present.chunk(3, -1), strict=True)
            shares = "".join(share for share, third in thirds if not bool(third.any()))
        if tensor.ndim > 1:
            norm = float(torch.linalg.vector_norm(tensor[~present].double()))
            yield MissingEntries(name, shares, norm, None)
            continue
        value = 1.0 if name.endswith(".weight") else 0.0
        lost = (tensor.double() - value).masked_fill(present, 0.0)
        if shares:
            lost.chunk(3)[1].zero_()  # softmax does not change when the same is added to all scores of a query
        yield MissingEntries(name, shares, float(torch.linalg.vector_norm(lost)), torch.where(present, tensor, value))
