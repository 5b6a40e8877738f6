"""The gradients that a right backward pass gives: from a module's own gradient of the logits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import model_with
from gpt2.checkpoint.keys import head_name
from gpt2.config import GPT2Config
from gpt2.port.mapping.mapping import Mapping as Mapped
from gpt2.port.recording.dataflow import Source, Use
from gpt2.port.step.records import Forward, Sampler

LARGE = ("matrix", "embedding")  # what decays
TABLE = "wte.weight"  # its two uses are the head and the table of the tokens' rows
Weights = dict[str, Tensor]  # of one model, by the checkpoint's names


def role_of(name: str) -> str:
    """Return what a parameter is, by the checkpoint's name or that of a part: "embedding", "bias", "norm" or "matrix"."""
    if name.split(".")[0] in ("wte", "wpe", "head"):
        return "embedding"
    if name.endswith(".bias"):
        return "bias"
    return "norm" if ".ln_" in f".{name}" else "matrix"


class Roles:
    """Which tensors of the checkpoint each parameter of a module holds, by the names that its step's parameters have."""

    def __init__(self, module: nn.Module, mapping: Mapped | None) -> None:
        self.mapping = mapping
        self.aliases: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.aliases.setdefault(id(parameter), []).append(name)
        self.sources: dict[str, Source] = {}
        self.parts: dict[str, list[tuple[int | None, str]]] = {}
        for source in mapping.sources if mapping else ():
            same = next((names for names in self.aliases.values() if source.name in names), [source.name])
            self.sources |= dict.fromkeys(same, source)
            self.parts |= {name: [(part.layer, part.part) for part in mapping.parts(source)] for name in same if mapping}

    def names_of(self, *parts: str) -> list[str]:
        """Return the parameters that hold only these parts, such as "ln_f"."""
        return [name for name, held in self.parts.items() if held and all(part in parts for _, part in held)]

    def role(self, name: str, parameter: Tensor) -> str:
        """Return "embedding", "norm", "bias" or "matrix"."""
        kinds = {role_of(part) for _, part in self.parts.get(name, [])}
        if len(kinds) == 1 or "embedding" in kinds:
            return "embedding" if "embedding" in kinds else kinds.pop()
        return "matrix" if parameter.ndim >= 2 else "norm" if not kinds and "bias" not in name.split(".")[-1] else "bias"

    def where(self, name: str) -> list[str]:
        """Return the checkpoint's names for a parameter; its own name if it holds none of its tensors."""
        found = []
        for layer, part in self.parts.get(name, []):
            stem = head_name(self.mapping.shapes if self.mapping else ()) if part == "head" else part
            stem = re.sub(r"^attn\.[qkv](?=\.|$)", "attn.c_attn", stem)
            stem += "" if stem.endswith((".weight", ".bias")) else ".weight"
            found.append(stem if layer is None else f"h.{layer}.{stem}")
        return list(dict.fromkeys(found)) or [name]


@dataclass(frozen=True)
class Gradients:
    """Gradients of one loss by parameter; ``head`` and ``table``: the two shares of those that hold a tied token embedding."""

    whole: Weights
    head: Weights
    table: Weights


@torch.enable_grad()
def two_shares(
    config: GPT2Config, state: Mapping[str, Tensor], passes: Iterable[tuple[Tensor, Callable[[Tensor], Tensor]]]
) -> Gradients:
    """Return our model's gradients, summed over ``passes``: ids (b, T), and a number made of their logits (b, T, V)."""
    model = model_with(config, state.items())
    model.requires_grad_(True)
    table = model.wte.weight.detach().clone().requires_grad_(True)
    for ids, loss in passes:
        loss(model.head(model.hidden(ids, rows=F.embedding(ids, table)))).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert table.grad is not None
    head = found.get(TABLE, torch.zeros_like(table))  # none, if the head is untied
    return Gradients({**found, TABLE: head + table.grad}, {TABLE: head}, {TABLE: table.grad})


def expected_gradients(
    config: GPT2Config, state: Mapping[str, Tensor], roles: Roles, sampler: Sampler, forwards: Sequence[Forward]
) -> Gradients:
    """Return the gradients of a module's parameters for its own gradients of the logits; NaN where the checkpoint has none.

    ``state`` is the checkpoint in float64. Parameters that are used scaled or shifted, and those without a place in the
    checkpoint, are left out. The gradients have the sampled entries.
    """
    mapping = roles.mapping
    assert mapping is not None

    def loss(slope: Tensor) -> Callable[[Tensor], Tensor]:
        given = slope.cpu().double().reshape(len(slope), -1, slope.shape[-1])[..., : config.vocab_size]
        return lambda logits: (logits[:, -given.shape[1] :] * given).sum()

    right = two_shares(config, state, ((one.ids.cpu(), loss(one.gradient)) for one in forwards if one.gradient is not None))
    out = Gradients({}, {}, {})
    for name, parameter in sampler.parameters.items():
        source = roles.sources.get(name)
        if source is None or Use() not in mapping.anatomy.recording.uses.get(source.storage, {Use()}):
            continue
        entries = mapping.entries(source).flatten()
        if entries.numel() != parameter.numel():
            continue
        shares = [(out.whole, right.whole)]
        if config.tie_word_embeddings and any(part in ("wte", "head") for _, part in roles.parts[name]):
            shares += [(out.head, right.head), (out.table, right.table)]
        for found, gradients in shares:
            found[name] = _taken(mapping, entries[sampler.indices[name]], gradients)
    return out


def _taken(mapping: Mapped, entries: Tensor, gradients: Mapping[str, Tensor]) -> Tensor:
    values = torch.full(entries.shape, torch.nan, dtype=torch.float64)
    for name, mine, places in mapping.by_tensor(entries):
        if name in gradients:
            values[mine] = gradients[name].reshape(-1)[places.long()]
    return values
