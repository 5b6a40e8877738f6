"""The gradients that a right backward pass gives: from the author's own gradient of the logits, or from labels of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import model_with
from gpt2.checkpoint.keys import head_name
from gpt2.config import GPT2Config
from gpt2.port.deadline import Deadline
from gpt2.port.mapping.mapping import Mapping as Mapped
from gpt2.port.recording.dataflow import Source, Use
from gpt2.port.step.labels import END_OF_TEXT, IGNORED, Average, Batch, averages, labelings
from gpt2.port.step.records import Forward, Sampler

TABLE = "wte.weight"  # its two uses are the head and the table of the tokens' rows
MAX_WORK = 2e10  # parameters times tokens, of one more backward pass than needed
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
        if len(kinds) == 1:
            return kinds.pop()
        if "embedding" in kinds:
            return "embedding"
        return "matrix" if parameter.ndim >= 2 else "norm" if not kinds and "bias" not in name.split(".")[-1] else "bias"

    def where(self, name: str) -> list[str]:
        """Return the checkpoint's names for a parameter; its own name if it holds none of its tensors."""
        found = [self._tensor(layer, part) for layer, part in self.parts.get(name, [])]
        return list(dict.fromkeys(found)) or [name]

    def _tensor(self, layer: int | None, part: str) -> str:
        stem = head_name(self.mapping.shapes if self.mapping else ()) if part == "head" else part
        for letter in "qkv":
            stem = "attn.c_attn" + stem.removeprefix(f"attn.{letter}") if stem.split(".")[:2] == ["attn", letter] else stem
        stem += "" if stem.endswith((".weight", ".bias")) else ".weight"
        return stem if layer is None else f"h.{layer}.{stem}"


@dataclass(frozen=True)
class Gradients:
    """Gradients of one loss by parameter; ``head`` and ``table``: the two shares of those that hold a tied token embedding."""

    whole: Weights
    head: Weights
    table: Weights

    def use(self, share: Weights) -> Weights:
        """Return the gradients, of which the token embedding's are one of its two shares."""
        return {**self.whole, **share}


@torch.enable_grad()
def two_shares(
    config: GPT2Config, state: Mapping[str, Tensor], passes: Iterable[tuple[Tensor, Callable[[Tensor], None]]]
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

    def backward(logits: Tensor, gradient: Tensor) -> None:
        given = gradient.cpu().double().reshape(len(logits), -1, gradient.shape[-1])[..., : config.vocab_size]
        logits[:, -given.shape[1] :].backward(given)

    passes = ((one.ids.cpu(), partial(backward, gradient=one.gradient)) for one in forwards if one.gradient is not None)
    right = two_shares(config, state, passes)
    out = Gradients({}, {}, {})
    for name, parameter in sampler.parameters.items():
        source = roles.sources.get(name)
        if source is None or Use() not in mapping.anatomy.recording.uses.get(source.storage, {Use()}):
            continue
        entries = mapping.entries(source).flatten()
        if entries.numel() != parameter.numel():
            continue
        index = sampler.indices[name]
        chosen = entries if index is None else entries[index]
        if config.tie_word_embeddings and any(part in ("wte", "head") for _, part in roles.parts[name]):
            out.head[name], out.table[name] = (_taken(mapping, chosen, share) for share in (right.head, right.table))
            out.whole[name] = out.head[name] + out.table[name]
        else:
            out.whole[name] = _taken(mapping, chosen, right.whole)
    return out


def _taken(mapping: Mapped, entries: Tensor, gradients: Mapping[str, Tensor]) -> Tensor:
    values = torch.full(entries.shape, torch.nan, dtype=torch.float64)
    for name, mine, places in mapping.by_tensor(entries):
        if name in gradients:
            values[mine] = gradients[name].reshape(-1)[places.long()]
    return values


class Predictor:
    """Gradients of a model of this size for any weights, labels and formula of the loss, and the batch of each step.

    ``parts``: of a batch, by the settings. Behind ``deadline``, no more mistakes are tried.
    """

    def __init__(self, config: GPT2Config, batches: Sequence[Batch], parts: int | None, deadline: Deadline) -> None:
        self.config, self.batches, self.parts, self.deadline = config, batches, parts, deadline

    def batch(self, step: int) -> Batch:
        """Return the batch of a step: the last, if there are fewer."""
        return self.batches[min(step, len(self.batches) - 1)]

    def labelings(self, step: int) -> dict[str, Tensor]:
        """Return the labels (B, T) that the batch of a step may have, as :func:`gpt2.port.step.labels.labelings` does.

        People take for padding, so that the loss ignores it: the first id, the last, and the end of text.
        """
        special = 0, END_OF_TEXT, self.config.eos_token_id or 0, self.config.vocab_size - 1
        return labelings(self.batch(step), special, self.parts)

    def averages(self, labels: Tensor) -> list[Average]:
        """Return what a wrong average multiplies the mean over ``labels`` (B, T) by."""
        count, rows = int((labels >= 0).sum()), len(labels)
        return averages(count, count / rows, self.parts or 1, rows, labels.numel())

    @property
    def can_try(self) -> bool:
        """Whether one more backward pass costs little, and there is time for it."""
        return self.config.num_parameters() * self.batches[0].ids.numel() < MAX_WORK and not self.deadline.passed

    def gradients(
        self,
        state: Mapping[str, Tensor],
        ids: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        smoothing: float = 0.0,
        factor: float = 1.0,
    ) -> Gradients:
        """Return the gradients of the weighted sum of the losses, in the dtype of ``state``; by default of their mean.

        ``weights`` (B, T); positions with a negative label have none. ``smoothing`` of the labels; ``factor`` of the logits.
        """
        weights = (labels >= 0) / (labels >= 0).sum() if weights is None else weights * (labels >= 0)

        def backward(logits: Tensor) -> None:
            scaled = factor * logits.flatten(0, 1)
            losses = F.cross_entropy(scaled, labels.flatten(), reduction="none", ignore_index=IGNORED, label_smoothing=smoothing)
            (losses * weights.flatten().to(losses.dtype)).sum().backward()

        return two_shares(self.config, state, [(ids, backward)])

    @torch.no_grad()
    def slope_of_last_bias(self, state: Mapping[str, Tensor], batch: Batch) -> Callable[[float], Tensor]:
        """Return a function of the factor of the logits: the gradient (D,) of ``ln_f.bias``, which needs no backward pass."""
        logits, labels = self.logits(state, batch.ids)[batch.targets >= 0], batch.targets[batch.targets >= 0]
        table = state[head_name(state)]
        wanted = table[labels].mean(0)
        return lambda factor: factor * ((factor * logits).softmax(-1).mean(0) @ table - wanted)

    @torch.no_grad()
    def logits(self, state: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        model = model_with(self.config, state.items())
        logits: Tensor = model.head(model.hidden(ids))
        return logits

    def rounding(self, state: Mapping[str, Tensor], batch: Batch, exact: Gradients, dtype: torch.dtype) -> dict[str, float]:
        """Return the absolute error (root mean square) that a program in ``dtype`` may make in each parameter's gradient.

        It may round 16 times as much as our model, as :mod:`gpt2.port.dump.tolerance` says; in float64, 1e-9 of the gradient.
        """
        norms = {name: float(g.square().mean().sqrt()) for name, g in exact.whole.items()}
        whole = max(norms.values())
        if dtype == torch.float64:
            return {name: 1e-9 * norm + 1e-13 * whole for name, norm in norms.items()}
        narrow = {name: tensor.to(torch.float32) for name, tensor in state.items()}
        rounded = self.gradients(narrow, batch.ids, batch.targets).whole
        errors = {name: float((rounded[name].double() - g).square().mean().sqrt()) for name, g in exact.whole.items()}
        return {name: 16 * max(errors[name], 1e-7 * norms[name]) + 1e-9 * whole for name in norms}
