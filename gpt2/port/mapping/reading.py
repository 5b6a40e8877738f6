"""Read a port's weights into the checkpoint's layout, so that our model can run with them: ``load_into`` in reverse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.checkpoint.keys import HEAD
from gpt2.port.mapping.mapping import ZERO, WeightMap

NORM_WEIGHTS = ("ln_1.weight", "ln_2.weight", "ln_f.weight")


@dataclass(frozen=True)
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
    filled, head, head_name = _Filled(mapping, state), _Filled(mapping, ["wte.weight"]), ""
    names: dict[str, str] = {}
    extra: dict[str, float] = {}
    shared: dict[tuple[str, str], tuple[str, str]] = {}
    recording = mapping.anatomy.recording
    words = recording.source(int(mapping.anatomy.stream.words.ids[0])).storage
    for source in mapping.sources:
        entries, value = mapping.entries(source), tensors[source.name].detach().cpu().double()
        parts = mapping.parts(source)
        if source.storage != words and parts:
            if HEAD not in state and all(part.part == "head" for part in parts):
                head.scatter(entries, value)
                head_name = head_name or source.name
                continue
            if (norm := float(value[entries == ZERO].norm())) > 0:
                extra[source.name] = norm
        for name in filled.take(entries, value):
            names.setdefault(name, source.name)
    for conflict in mapping.conflicts:  # one parameter is used as two parts
        for name in filled.scatter(conflict.refused, mapping.values(conflict.taken, filled.weights)):
            names.setdefault(name, conflict.source)
            if ".c_attn." in name:
                one, other = (mapping.place(int(entries[0])) for entries in (conflict.refused, conflict.taken))
                shared[name, one.share] = conflict.source, other.share or other.name
    weights = {name: _completed(name, filled.weight(name), filled.placed[name], tensor) for name, tensor in state.items()}
    return Own(weights, filled.placed, names, head.weights.get("wte.weight"), head_name, extra, shared)


def _completed(name: str, weight: Tensor, placed: Tensor, ours: Tensor) -> Tensor:
    """Return ``weight``, with ``ours`` for a matrix's missing entries; ``ours`` itself if all are equal."""
    if weight.ndim > 1 and bool(placed.any() if name == "wpe.weight" else not placed.all()):
        weight = torch.where(placed, weight, ours.double())
    return ours if torch.equal(weight, ours) else weight.clone()  # it may be the parameter itself, which changes


class _Filled:
    """Weights in the checkpoint's layout while they are filled, and the places that are filled."""

    def __init__(self, mapping: WeightMap, names: Iterable[str]) -> None:
        self.mapping = mapping
        self.weights: dict[str, Tensor] = {}
        self.placed = {name: torch.zeros(mapping.shapes[name], dtype=torch.bool) for name in names}

    def weight(self, name: str) -> Tensor:
        """Return a tensor as filled so far; elsewhere it is a bias of zero or a scale of one."""
        if name not in self.weights:
            neutral = 1.0 if name.endswith(NORM_WEIGHTS) else 0.0
            self.weights[name] = torch.full(self.mapping.shapes[name], neutral, dtype=torch.float64)
        return self.weights[name]

    def take(self, entries: Tensor, value: Tensor) -> list[str]:
        """Take a parameter, without a copy if it is one tensor or its transpose; return its tensors' names."""
        name = self.mapping.owner(int(entries.flatten()[0])) if entries.numel() else ""
        if name and name not in self.weights and entries.numel() == self.placed[name].numel():
            numbers = torch.arange(entries.numel(), dtype=entries.dtype).view(self.placed[name].shape) + self.mapping.starts[name]
            for transposed in (False, True) if entries.ndim == 2 else (False,):
                if torch.equal(entries, numbers.t() if transposed else numbers):
                    self.weights[name] = value.t() if transposed else value
                    self.placed[name].fill_(True)
                    return [name]
        return self.scatter(entries, value)

    def scatter(self, entries: Tensor, value: Tensor) -> list[str]:
        """Put values where their entries belong; return those tensors' names."""
        groups = self.mapping.by_tensor(entries)
        for name, mine, places in groups:
            if not self.weight(name).is_contiguous() or bool(self.placed[name].all()):  # it may share the parameter's memory
                self.weights[name] = self.weights[name].clone(memory_format=torch.contiguous_format)
            self.weights[name].view(-1)[places] = value[mine]
            self.placed[name].view(-1)[places] = True
        return [name for name, _, _ in groups]
