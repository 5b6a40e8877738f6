"""Read a port's weights into the checkpoint's layout, so that our model can run with them: ``load_into`` in reverse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.checkpoint.keys import HEAD
from gpt2.port.mapping.mapping import ZERO, WeightMap
from gpt2.port.recording.dataflow import Use

ROUNDING = 1e-15
NORM_WEIGHTS = ("ln_1.weight", "ln_2.weight", "ln_f.weight")


@dataclass
class Own:
    """A port's own ``weights`` in float64, by the checkpoint's names; ``placed`` (bool) marks the entries that it has.

    Elsewhere a vector has no effect (zero bias, scale one), and a matrix holds the checkpoint's values. ``names``: the port's
    first parameter for each tensor. ``head`` (V, D): a head that is not the token embedding; ``head_name``: its name. ``extra``:
    norms of parameters that are added where GPT-2 adds nothing. ``shared``: for (tensor, share) without a parameter of its own:
    the parameter used, and its main role.
    """

    weights: dict[str, Tensor]
    placed: dict[str, Tensor]
    names: dict[str, str]
    head: Tensor | None = None
    head_name: str = ""
    extra: dict[str, float] = field(default_factory=dict)
    shared: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)


@torch.no_grad()
def own_weights(mapping: WeightMap, tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Own:
    """Read the weights out of ``tensors``, the port's parameters and buffers by name; ``state`` is the checkpoint."""
    shapes = {name: mapping.shapes[name] for name in state}
    weights = {name: torch.full(shape, float(name.endswith(NORM_WEIGHTS)), dtype=torch.float64) for name, shape in shapes.items()}
    own = Own(weights, {name: torch.zeros(shape, dtype=torch.bool) for name, shape in shapes.items()}, {})

    def take(entries: Tensor, value: Tensor, parameter: str) -> list[str]:
        taken = mapping.by_tensor(entries)
        for name, mine, places in taken:
            weights[name].view(-1)[places] = value[mine]
            own.placed[name].view(-1)[places] = True
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
        take(entries, value, source.name)
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
