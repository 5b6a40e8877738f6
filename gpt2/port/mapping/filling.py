"""Write a checkpoint's entries into a module's parameters, as the mapping says, and read a module's own entries back."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.checkpoint.keys import HEAD
from gpt2.port.mapping.mapping import AT_ONCE, KEEP, ZERO, WeightMap
from gpt2.port.mapping.report import MappingRow
from gpt2.port.recording.dataflow import Holder, Use, unravelled
from gpt2.port.recording.forward import Borrowed

ROUNDING = 1e-15
NORM_WEIGHTS = ("ln_1.weight", "ln_2.weight", "ln_f.weight")


def fill(borrowed: Borrowed, mapping: WeightMap, state: Mapping[str, Tensor]) -> list[tuple[Holder, MappingRow | None, str]]:
    """Fill every parameter; return its row of the report, None if nothing was written, and what was done if a part is left."""
    results = []
    for source in mapping.sources:
        entries = mapping.entries(source)
        low, high = (int(end) for end in entries.aminmax()) if entries.numel() else (ZERO, ZERO)
        names, words = describe(entries, mapping)
        row = None
        if high != KEEP:
            use = mapping.use(source)
            put(borrowed.tensors[source.name], entries, mapping, state, use)
            change = f", less {use.shift:.4g}" if use.shift else ""
            change += f", divided by {use.scale:.4g}" if use.scale != 1 else ""
            row = MappingRow(source.name, source.region.shape, names, words + change)
        results.append((source, row, words if low == KEEP else ""))
    return results


def overwritten(borrowed: Borrowed, mapping: WeightMap) -> Iterator[str]:
    """Yield a sentence for each table of sines, which its author did not mean to be loaded; call it before filling."""
    for source in mapping.sources:
        if any(part.part == "wpe" for part in mapping.parts(source)) and _are_sines(borrowed.tensors[source.name].detach()):
            yield f"your {source.name} holds sines and cosines: without load_into your module has no learned positions"


def _are_sines(table: Tensor) -> bool:
    """Return whether a table (..., positions, width) can be sinusoidal: sin 0 and cos 0 first, then nothing beyond one."""
    first, *_ = rows = table.reshape(-1, table.shape[-1])
    zeros, ones = first == 0, first == 1
    return bool((zeros | ones).all() and zeros.any() and ones.any() and (rows.abs() <= 1).all() and (rows[1:] != first).any())


def put(target: Tensor, entries: Tensor, mapping: WeightMap, state: Mapping[str, Tensor], use: Use) -> None:
    """Write the checkpoint's entries into a parameter; invert ``use``, so that the forward pass computes with the entries."""
    if target.numel() > AT_ONCE and len(target) > 1:
        for half, numbers in zip(target.chunk(2), entries.chunk(2), strict=True):
            put(half, numbers, mapping, state, use)
        return
    values = (mapping.values(entries, state).masked_fill_(entries == ZERO, 0.0) - use.shift) / use.scale
    target.copy_(torch.where((entries == KEEP).to(target.device), target, values.to(target)))


def describe(entries: Tensor, mapping: WeightMap) -> tuple[tuple[str, ...], str]:
    """Return the names of the checkpoint's tensors in a parameter, and what was done to them, in words."""
    pieces = mapping.by_tensor(entries)
    names = tuple(name for name, *_ in pieces)
    if len(names) != 1:
        return names, "put together" if names else "zeros" if bool((entries == ZERO).any()) else "left as it is"
    if int(entries.min()) < 0:
        return names, "in part"
    shape, numbers = mapping.shapes[names[0]], entries - mapping.starts[names[0]]
    spans = [slice(0, size) for size in shape]
    if numbers.numel() < math.prod(shape):
        spans = [slice(int(place.amin()), int(place.amax()) + 1) for place in unravelled(numbers, shape)]
    some = zip(("rows", "columns") if len(shape) == 2 else ("entries",), spans, shape, strict=True)
    words = [f"{kind} {span.start}:{span.stop}" for kind, span, size in some if span != slice(0, size)]
    box = torch.arange(math.prod(shape), dtype=numbers.dtype).view(shape)[tuple(spans)]
    if not torch.equal(numbers.flatten(), box.flatten()):
        words.append("transposed" if torch.equal(numbers.flatten(), box.t().flatten()) else "in another order")
    return names, ", ".join(words) or "none"


@dataclass
class Own:
    """A port's own ``weights`` in float64, by the checkpoint's names; ``placed`` (bool) marks the entries that it has.

    Elsewhere a vector has no effect (zero bias, scale one), and a matrix holds the checkpoint's values. ``names``: the port's
    first parameter for each tensor. ``head`` (V, D): a head that is not the token embedding; ``head_name``: its name. ``extra``:
    norms of parameters that are added where GPT-2 adds nothing. ``shared``: for (tensor, share) without a parameter of its own:
    the parameter used, and its main role. ``parallel``: the blocks whose branches read the same stream.
    ``scalars``: the tensors in place of which the port has one number; ``misfits``: those of which it has something else.
    """

    weights: dict[str, Tensor]
    placed: dict[str, Tensor]
    names: dict[str, str]
    head: Tensor | None = None
    head_name: str = ""
    extra: dict[str, float] = field(default_factory=dict)
    shared: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    parallel: Collection[int] = ()
    scalars: set[str] = field(default_factory=set)
    misfits: Collection[str] = ()


@torch.no_grad()
def own_weights(mapping: WeightMap, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Own:
    """Read the weights out of ``tensors``, the port's parameters and buffers by name; ``state`` is the checkpoint."""
    shapes = {name: mapping.shapes[name] for name in state}
    weights = {name: torch.full(shape, float(name.endswith(NORM_WEIGHTS)), dtype=torch.float64) for name, shape in shapes.items()}
    own = Own(weights, {name: mapping.placed[name] for name in state}, {}, parallel=mapping.anatomy.parallel)
    own.misfits = {mapping.target(part) for part in mapping.misfits}

    def take(entries: Tensor, value: Tensor, parameter: str) -> list[str]:
        taken = mapping.by_tensor(entries)
        for name, mine, places in taken:
            weights[name].view(-1)[places] = value[mine]
            own.names.setdefault(name, parameter)
        return [name for name, *_ in taken]

    recording = mapping.anatomy.recording
    words = recording.source(int(mapping.anatomy.stream.words.ids[0])).storage
    for source in mapping.sources:
        use, entries, value = mapping.use(source), mapping.entries(source), tensors[source.name].detach().cpu().double()
        value = value if use == Use() else value * use.scale + use.shift  # as the computation uses it
        parts = mapping.parts(source)
        if source.storage != words and parts:
            if HEAD not in state and all(part.part == "head" for part in parts):
                own.head = torch.zeros(shapes["wte.weight"], dtype=torch.float64) if own.head is None else own.head
                for _, mine, places in mapping.by_tensor(entries):
                    own.head.view(-1)[places] = value[mine]
                own.head_name = own.head_name or source.name
                continue
            if (norm := float(value[entries == ZERO].norm())) > 0:
                own.extra[source.name] = norm
        own.scalars |= {name for name in take(entries, value, source.name) if value.numel() == 1}
    for conflict in mapping.conflicts:  # one parameter is used as two parts
        for name in take(conflict.refused, mapping.values(conflict.taken, weights), conflict.source):
            if ".c_attn." in name:
                one, other = (mapping.place(int(entries[0])) for entries in (conflict.refused, conflict.taken))
                own.shared[name, one.share] = conflict.source, other.share or other.name
    own.weights = {name: _completed(name, weights[name], own.placed[name], tensor) for name, tensor in state.items()}
    return own


def _completed(name: str, weight: Tensor, placed: Tensor, ours: Tensor) -> Tensor:
    """Return ``weight``, with ``ours`` for a matrix's missing entries and for rounding; ``ours`` itself if all are equal."""
    if weight.ndim > 1 and bool(placed.any() if name == "wpe.weight" else not placed.all()):
        weight = torch.where(placed, weight, ours.double())
    if torch.equal(weight, ours):
        return ours
    return torch.where((weight - ours).abs() <= ROUNDING * (1 + ours.abs()), ours, weight)  # (g - 1) + 1 is not always g
