"""The gradients that a right backward pass would give, from the author's own gradient of the logits; and how his differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import model_with
from gpt2.checkpoint.keys import head_name
from gpt2.config import GPT2Config
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.recording.dataflow import Source, Use
from gpt2.port.step.records import Sampler

TABLE = "wte.weight"  # its two uses are the head and the table of the tokens' rows
IGNORED = -100  # a target that is not trained on


class Roles:
    """Which tensors of the checkpoint each parameter of a module holds, by the names that its step's parameters have."""

    def __init__(self, module: nn.Module, mapping: Mapping | None) -> None:
        self.mapping = mapping
        named = list(module.named_parameters(remove_duplicate=False))
        self.aliases: dict[int, list[str]] = {}
        for name, parameter in named:
            self.aliases.setdefault(id(parameter), []).append(name)
        self.sources: dict[str, Source] = {}
        self.parts: dict[str, list[tuple[int | None, str]]] = {}
        for source in mapping.sources if mapping else ():
            same = next((names for names in self.aliases.values() if source.name in names), [source.name])
            for name in same:
                self.sources[name] = source
                self.parts[name] = [(part.layer, part.part) for part in mapping.parts(source)] if mapping else []

    def names_of(self, *parts: str) -> list[str]:
        """Return the parameters that hold only these parts, such as "ln_f"."""
        return [name for name, held in self.parts.items() if held and all(part in parts for _, part in held)]

    def role(self, name: str, parameter: Tensor) -> str:
        """Return "embedding", "norm", "bias" or "matrix"."""
        kinds = {role_of(part) for _, part in self.parts.get(name, [])}
        if len(kinds) == 1:
            return kinds.pop()
        if "embedding" in kinds:
            return "embedding"
        return "matrix" if parameter.ndim >= 2 else "bias" if "bias" in name.split(".")[-1] else "norm" if not kinds else "bias"

    def where(self, name: str) -> list[str]:
        """Return the checkpoint's names for a parameter; its own name if it holds none of its tensors."""
        assert self.mapping is not None or not self.parts
        found = [] if self.mapping is None else [self._tensor(layer, part) for layer, part in self.parts.get(name, [])]
        return list(dict.fromkeys(found)) or [name]

    def _tensor(self, layer: int | None, part: str) -> str:
        stem = head_name(self.mapping.shapes if self.mapping else ()) if part == "head" else part
        for letter in "qkv":
            stem = "attn.c_attn" + stem.removeprefix(f"attn.{letter}") if stem.split(".")[:2] == ["attn", letter] else stem
        stem += "" if stem.endswith((".weight", ".bias")) else ".weight"
        return stem if layer is None else f"h.{layer}.{stem}"


def role_of(name: str) -> str:
    """Return what a parameter is, by the checkpoint's name or that of a part: "embedding", "bias", "norm" or "matrix"."""
    if name.split(".")[0] in ("wte", "wpe", "head"):
        return "embedding"
    if name.endswith(".bias"):
        return "bias"
    return "norm" if ".ln_" in f".{name}" else "matrix"


@dataclass(frozen=True)
class Gradients:
    """Gradients of one loss by parameter; ``head`` and ``table``: the two shares of a tied token embedding's."""

    whole: dict[str, Tensor]
    head: Tensor
    table: Tensor


@torch.enable_grad()
def two_shares(
    config: GPT2Config, state: MappingType[str, Tensor], passes: Iterable[tuple[Tensor, Callable[[Tensor], None]]]
) -> Gradients:
    """Return our model's gradients, summed over ``passes``: ids (b, T), and what goes backward from their logits (b, T, V)."""
    model = model_with(config, state.items())
    model.requires_grad_(True)
    table = model.wte.weight.detach().clone().requires_grad_(True)
    for ids, backward in passes:
        backward(model.head(model.hidden(ids, rows=F.embedding(ids, table))))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert table.grad is not None
    head = found.get(TABLE, torch.zeros_like(table))  # none, if the head is untied
    return Gradients({**found, TABLE: head + table.grad}, head, table.grad)


@dataclass(frozen=True)
class Expected:
    """The right gradient of one parameter at the sampled entries, NaN where the checkpoint has none.

    For the token embedding, also the share of the head and that of the rows that the ids chose.
    """

    whole: Tensor
    head: Tensor | None = None
    table: Tensor | None = None


def expected_gradients(
    config: GPT2Config,
    state: MappingType[str, Tensor],
    roles: Roles,
    sampler: Sampler,
    passes: Sequence[tuple[Tensor, Tensor]],
) -> dict[str, Expected]:
    """Return the gradients of a module's parameters for these ids (b, T) and gradients of the logits (b, T, V).

    ``state`` is the checkpoint in float64. Our model runs forward and backward once for each pass. Parameters that are used
    scaled or shifted, and those without a place in the checkpoint, are left out.
    """
    assert roles.mapping is not None

    def backward(logits: Tensor, gradient: Tensor) -> None:
        given = gradient.cpu().double().reshape(len(logits), -1, gradient.shape[-1])[..., : config.vocab_size]
        logits[:, -given.shape[1] :].backward(given)

    right = two_shares(config, state, ((ids.cpu(), partial(backward, gradient=gradient)) for ids, gradient in passes))
    out = {}
    for name in sampler.parameters:
        source = roles.sources.get(name)
        if source is None or Use() not in roles.mapping.anatomy.recording.uses.get(source.storage, {Use()}):
            continue
        entries = roles.mapping.entries(source).flatten()
        if entries.numel() != sampler.parameters[name].numel():
            continue
        index = sampler.indices[name]
        chosen = entries if index is None else entries[index]
        parts = {part for _, part in roles.parts[name]}
        if config.tie_word_embeddings and ("wte" in parts or "head" in parts):
            head, rows = (_taken(roles.mapping, chosen, {TABLE: share}) for share in (right.head, right.table))
            out[name] = Expected(head + rows, head, rows)
        else:
            out[name] = Expected(_taken(roles.mapping, chosen, right.whole))
    return out


def _taken(mapping: Mapping, entries: Tensor, gradients: MappingType[str, Tensor]) -> Tensor:
    values = torch.full(entries.shape, torch.nan, dtype=torch.float64)
    for name, mine, places in mapping.by_tensor(entries):
        if name in gradients:
            values[mine] = gradients[name].reshape(-1)[places.long()]
    return values
