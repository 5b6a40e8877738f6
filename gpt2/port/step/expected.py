"""The gradients that a right backward pass gives: from a module's own gradient of the logits, or from a formula of the loss."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import model_with
from gpt2.checkpoint.keys import head_name
from gpt2.config import GPT2Config
from gpt2.port.deadline import Deadline
from gpt2.port.mapping.mapping import Mapping as Mapped
from gpt2.port.recording.dataflow import Source, Use
from gpt2.port.step import labels
from gpt2.port.step.labels import Average, Batch, Formula
from gpt2.port.step.records import Forward, Sampler

LARGE = ("matrix", "embedding")  # what decays
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


@dataclass(frozen=True)
class Predictor:
    """Gradients of a model of this size for any weights and formula of the loss, and the batch of each step.

    ``parts``: of a batch, by the settings. Behind ``deadline``, no more mistakes are tried.
    """

    config: GPT2Config
    batches: Sequence[Batch]
    parts: int | None
    deadline: Deadline

    def batch(self, step: int) -> Batch:
        """Return the batch of a step: the last, if there are fewer."""
        return self.batches[min(step, len(self.batches) - 1)]

    @property
    def right(self) -> Formula:
        """The mean over the targets of the first batch."""
        return Formula(self.batch(0).targets)

    def formulas(self, step: int) -> dict[str, Formula]:
        """Return the mean losses of the labels that the batch of a step may have, by the keys of :func:`.labels.labelings`.

        People take for padding, so that the loss ignores it: the first id, the last, and the end of text.
        """
        special = 0, labels.END_OF_TEXT, self.config.eos_token_id or 0, self.config.vocab_size - 1
        known = labels.labelings(self.batch(step), special, self.parts)
        return {key: Formula(one, key, (labels.cause_of(key),) if key else ()) for key, one in known.items()}

    def numbers(self) -> list[Formula]:
        """Return the mean losses with usual smoothings of the first batch's labels, and with usual factors of the logits."""
        smoothed, scaled = "label-smoothing", "logits-scaled"
        return [
            *(replace(self.right, smoothing=s, wrong=((smoothed, f"a label smoothing of {s:g}"),)) for s in labels.SMOOTHINGS),
            *(replace(self.right, factor=c, wrong=((scaled, f"the logits times {c:.4g}"),)) for c in labels.FACTORS),
        ]

    def again(self, formula: Formula, step: int) -> Formula:
        """Return a formula of the first step with the batch of another; the right labels, if that has no such ones."""
        known = self.formulas(step)
        return replace(formula, labels=known.get(formula.key, known[""]).labels)

    def averages(self, given: Tensor) -> list[Average]:
        """Return what a wrong average multiplies the mean over labels (B, T) by."""
        count, rows = int((given >= 0).sum()), len(given)
        return labels.averages(count, count / rows, self.parts or 1, rows, given.numel())

    @property
    def can_try(self) -> bool:
        """Whether one more backward pass costs little, and there is time for it."""
        return self.config.num_parameters() * self.batches[0].ids.numel() < MAX_WORK and not self.deadline.passed

    def gradients(self, state: Mapping[str, Tensor], step: int, formula: Formula) -> Gradients:
        """Return the gradients of a formula on the batch of a step, in the dtype of ``state``."""
        return two_shares(self.config, state, [(self.batch(step).ids, formula.loss)])

    def last_bias(self, state: Mapping[str, Tensor], slope: Tensor) -> Tensor:
        """Return the gradient (D,) of ``ln_f.bias`` by that of the logits (B, T, V): it needs no backward pass."""
        return slope.sum((0, 1)) @ state[head_name(state)]

    @torch.no_grad()
    def logits(self, state: Mapping[str, Tensor], step: int) -> Tensor:
        """Return the logits (B, T, V) of the batch of a step."""
        model = model_with(self.config, state.items())
        logits: Tensor = model.head(model.hidden(self.batch(step).ids))
        return logits

    def rounding(self, state: Mapping[str, Tensor], exact: Gradients, dtype: torch.dtype) -> dict[str, float]:
        """Return the absolute error (root mean square) that a program in ``dtype`` may make in each gradient of the first step.

        It may round 16 times as much as our model, as :mod:`gpt2.port.dump.tolerance` says; in float64, 1e-9 of the gradient.
        """
        norms = {name: float(g.square().mean().sqrt()) for name, g in exact.whole.items()}
        whole = max(norms.values())
        if dtype == torch.float64:
            return {name: 1e-9 * norm + 1e-13 * whole for name, norm in norms.items()}
        narrow = {name: tensor.to(torch.float32) for name, tensor in state.items()}
        rounded = self.gradients(narrow, 0, self.right).whole
        errors = {name: float((rounded[name].double() - g).square().mean().sqrt()) for name, g in exact.whole.items()}
        return {name: 16 * max(errors[name], 1e-7 * norms[name]) + 1e-9 * whole for name in norms}
