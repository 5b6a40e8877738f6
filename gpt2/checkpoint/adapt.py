"""``load_into``: the weights of a checkpoint into somebody else's GPT-2, whatever its parameters are called and how they lie."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from ..config import GPT2Config
from ..errors import InputError
from ..model import GPT2
from .anatomy import Anatomy, NotGPT2
from .dataflow import Recording, Source, logits_of, record
from .load import load
from .mapping import KEEP, ZERO, Mapping, describe
from .names import DEFAULT

BOUND = 1e-10  # relative, in float64: rounding is 1e-15 and any bug is larger


@dataclass(frozen=True)
class Row:
    """One parameter of the module: what filled it, what was done to it, and why we believe it."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    transformation: str
    evidence: str


@dataclass(frozen=True)
class MappingReport:
    """What :func:`load_into` found and did.

    ``unfilled`` are the module's parameters that were left alone, with the reason; ``unused`` what of the checkpoint found no
    place; ``ambiguous`` what the evidence did not settle; ``problems`` what keeps the module from being the checkpoint's model;
    ``notes`` what is worth knowing and does not. ``logits_error`` is the worst difference of any logit from our model's, over
    their root mean square, both in float64; None where it could not be computed, and ``logits_note`` says why.
    """

    model: str
    rows: tuple[Row, ...]
    unfilled: dict[str, str]
    unused: dict[str, str]
    ambiguous: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    logits_error: float | None
    logits_note: str

    @property
    def ok(self) -> bool:
        return (
            not (self.unfilled or self.ambiguous or self.problems)
            and self.logits_error is not None
            and self.logits_error <= BOUND
        )

    def to_json(self) -> str:
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)


def load_into(
    module: nn.Module, model: str | GPT2 = DEFAULT, *, revision: str | None = None, offline: bool = False
) -> MappingReport:
    """Fill ``module``, any implementation of GPT-2, with the weights of ``model``, in place."""
    if not isinstance(module, nn.Module):
        raise InputError(f"load_into fills a torch.nn.Module, and got {type(module).__name__}; build the module first")
    name = model if isinstance(model, str) else "the given model"
    ours = load(model, revision=revision, offline=offline) if isinstance(model, str) else model
    who = type(module).__name__
    bench = copy.deepcopy(module).eval()
    recording = record(bench, probe(ours.config))
    try:
        anatomy = Anatomy(recording)
    except NotGPT2 as reason:
        raise InputError(f"{who}: {reason}; is it a GPT-2?") from None
    mapping = Mapping(anatomy, ours.config)
    state = ours.state_dict()
    bench.double()
    parameters = dict(bench.named_parameters(remove_duplicate=False))
    rows = []
    with torch.no_grad():
        for source in recording.sources:
            if not source.is_parameter:
                continue
            entries = mapping.entries(source)
            fill(parameters[source.name], entries, mapping, state)
            names, words = describe(entries, mapping)
            rows.append(Row(source.name, source.region.shape, names, words, ""))
        error = compare(bench, ours)
        for target, filled in zip(module.parameters(), bench.parameters(), strict=True):
            target.copy_(filled)
    return MappingReport(name, tuple(rows), {}, {}, (), (), (), error, "")


def probe(config: GPT2Config, batch: int = 2, length: int = 5) -> Tensor:
    """(B, T) distinct ids, none of which could be a position."""
    low = length if config.vocab_size >= length + batch * length else 0
    order = torch.randperm(min(config.vocab_size, 1000) - low, generator=torch.Generator().manual_seed(0))
    return order[: batch * length].view(batch, length) + low


def fill(parameter: Tensor, entries: Tensor, mapping: Mapping, state: dict[str, Tensor]) -> None:
    """Put the entries of the checkpoint into a parameter."""
    parameter.masked_fill_(entries == ZERO, 0)
    starts = torch.tensor(list(mapping.starts.values()))
    owners = torch.searchsorted(starts, entries.contiguous(), right=True) - 1
    for number in owners[entries >= 0].unique().tolist():
        name = list(mapping.starts)[number]
        mine = owners == number
        values = state[name].flatten()[entries[mine] - mapping.starts[name]]
        parameter[mine] = values.to(parameter)


def compare(bench: nn.Module, ours: GPT2) -> float:
    reference = copy.deepcopy(ours).double().eval()
    ids = torch.randint(ours.config.vocab_size, (2, 8), generator=torch.Generator().manual_seed(1))
    found, expected = logits_of(bench(ids))[..., : ours.config.vocab_size], reference(ids)
    if found.shape[1] == 1:
        expected = expected[:, -1:]
    return float((found - expected).abs().max() / expected.square().mean().sqrt())
