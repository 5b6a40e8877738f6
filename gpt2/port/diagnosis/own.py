"""Read the weights that a port holds, in the checkpoint's own layout: :func:`gpt2.load_into` in reverse.

The mapping says which entry of the checkpoint belongs in each place of a port. What is there is the port's own value of that
entry, and all of them together are a checkpoint that our model can run with.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.port.anatomy.parts import Matrix
from gpt2.port.mapping.mapping import ZERO, Mapping
from gpt2.port.recording.dataflow import Source, Use

ROUNDING = 1e-15
NORM_WEIGHTS = ("ln_1.weight", "ln_2.weight", "ln_f.weight")


@dataclass(frozen=True)
class Own:
    """A port's own weights.

    ``weights`` are by the checkpoint's names, float64. ``placed``, of the same shapes, is true where the port has an entry.
    Elsewhere a vector holds what leaves GPT-2 as the port is (no bias, a scale of one), and a matrix the checkpoint's values.
    ``names`` are the port's parameters that hold each tensor. ``head`` (V, D) is the head's weight where it is another parameter
    than the token embedding, and ``head_name`` its name. ``extra`` are the norms of parameters that are added where GPT-2 adds
    nothing. ``shared``: for a tensor's name and share ("q") without a parameter of its own, the parameter that serves, and what
    else it serves as.
    """

    weights: dict[str, Tensor]
    placed: dict[str, Tensor]
    names: dict[str, tuple[str, ...]]
    head: Tensor | None = None
    head_name: str = ""
    extra: dict[str, float] = field(default_factory=dict)
    shared: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)


@torch.no_grad()
def own_weights(mapping: Mapping, tensors: MappingType[str, Tensor], state: MappingType[str, Tensor]) -> Own:
    """Read the weights out of ``tensors``, the port's parameters and buffers by name; ``state`` is the checkpoint."""
    filled = _Filled(mapping, state)
    names: dict[str, list[str]] = {name: [] for name in state}
    extra: dict[str, float] = {}
    shared: dict[tuple[str, str], tuple[str, str]] = {}
    head, head_name = _Filled(mapping, ["wte.weight"]), ""
    recording = mapping.anatomy.recording
    words = {recording.source(int(table.first[0])).storage for table in mapping.anatomy.words}
    for source in mapping.sources:
        entries, value = mapping.entries(source), _value(mapping, source, tensors[source.name])
        parts = mapping.parts(source)
        if source.storage not in words and parts:
            if all(isinstance(part, Matrix) and part.part == "head" for part in parts):
                head.scatter(entries, value)
                head_name = head_name or source.name
                continue
            surplus = entries == ZERO
            if bool(surplus.any()) and (norm := float(value[surplus].norm())) > 0:
                extra[source.name] = norm
        whole = filled.take_whole(entries, value)
        for name in [whole] if whole else filled.scatter(entries, value):
            names[name].append(source.name)
    for name, tensor in state.items():
        filled.weights.setdefault(name, _neutral(name, tensor.shape))
    for conflict in mapping.conflicts:  # one parameter serves as two parts
        taken = torch.empty(conflict.taken.shape, dtype=torch.float64)
        for name, mine, places in mapping.by_tensor(conflict.taken):
            taken[mine] = filled.weights[name].flatten()[places]
        for name in filled.scatter(conflict.refused, taken):
            names[name].append(conflict.source)
            if ".c_attn." in name:
                one, other = (_share(mapping, int(entries[0])) for entries in (conflict.refused, conflict.taken))
                shared[name, one] = conflict.source, other
    weights = {name: _completed(name, filled.weights[name], filled.placed[name], tensor) for name, tensor in state.items()}
    own_head = head.weights.get("wte.weight")
    return Own(weights, filled.placed, {name: tuple(of) for name, of in names.items()}, own_head, head_name, extra, shared)


def _completed(name: str, weight: Tensor, placed: Tensor, ours: Tensor) -> Tensor:
    """A weight with the checkpoint's values where the port has none (of a matrix) and where it differs by rounding only.

    It is ``ours`` itself where all are equal, so that nobody has to compare them again.
    """
    if weight.ndim > 1 and bool(placed.any() if name == "wpe.weight" else not placed.all()):
        weight = torch.where(placed, weight, ours.double())
    if torch.equal(weight, ours):
        return ours
    return torch.where((weight - ours).abs() <= ROUNDING * (1 + ours.abs()), ours, weight)  # (g - 1) + 1 is not always g


def _neutral(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, 1.0 if name.endswith(NORM_WEIGHTS) else 0.0, dtype=torch.float64)


def _value(mapping: Mapping, source: Source, tensor: Tensor) -> Tensor:
    """What the computation sees of a parameter."""
    use = mapping.uses(source)[0]
    value = tensor.detach().to("cpu", torch.float64)
    return value if use == Use() else value * use.scale + use.shift


def _share(mapping: Mapping, entry: int) -> str:
    """Which of q, k and v an entry of c_attn belongs to; the tensor's name for another tensor."""
    name = mapping.owner(entry)
    width = mapping.shapes[name][-1]
    return "qkv"[(entry - mapping.starts[name]) % width * 3 // width] if ".c_attn." in name else name


class _Filled:
    """Weights in the checkpoint's layout while they are filled, and where they are."""

    def __init__(self, mapping: Mapping, names: Iterable[str]) -> None:
        self.mapping = mapping
        self.weights: dict[str, Tensor] = {}
        self.placed = {name: torch.zeros(mapping.shapes[name], dtype=torch.bool) for name in names}

    def take_whole(self, entries: Tensor, value: Tensor) -> str:
        """Take a parameter that is one tensor of the checkpoint, or its transpose, without a copy: its name, "" for others."""
        name = self.mapping.owner(int(entries.flatten()[0])) if entries.numel() else ""
        if not name or name in self.weights or entries.numel() != self.placed[name].numel():
            return ""
        numbers = torch.arange(entries.numel(), dtype=entries.dtype).view(self.placed[name].shape) + self.mapping.starts[name]
        for transposed in (False, True) if entries.ndim == 2 else (False,):
            expected = numbers.t() if transposed else numbers
            if entries.shape == expected.shape and torch.equal(entries, expected):
                self.weights[name] = value.t() if transposed else value
                self.placed[name].fill_(True)
                return name
        return ""

    def scatter(self, entries: Tensor, value: Tensor) -> list[str]:
        """Put values where their entries belong: the names of those tensors."""
        names = []
        for name, mine, places in self.mapping.by_tensor(entries):
            if name not in self.weights:
                self.weights[name] = _neutral(name, self.mapping.shapes[name])
            elif not self.weights[name].is_contiguous() or bool(self.placed[name].all()):
                copy = self.weights[name].clone(memory_format=torch.contiguous_format)  # it was the parameter's own memory
                self.weights[name] = copy
            self.weights[name].view(-1)[places] = value[mine]
            self.placed[name].view(-1)[places] = True
            names.append(name)
        return names
