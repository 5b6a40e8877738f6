"""``load_into``: the weights of a checkpoint into somebody else's GPT-2, whatever its parameters are called and however they lie.

The module runs once on a few tokens while every operator is taken down (:mod:`.dataflow`); GPT-2's parts are found in that by
what they do (:mod:`.anatomy`); from them follows which entry of the checkpoint belongs in every single place (:mod:`.mapping`).
Names are not asked. Then the module's logits are held against our model's, in float64. All this happens to a copy; the module
itself is only filled, at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping as MappingType

import torch
from torch import Tensor, nn

from ..config import GPT2Config
from ..errors import InputError
from ..model import GPT2
from .anatomy import Anatomy, NotGPT2
from .dataflow import Recording, logits_of, record
from .explain import Explanation, evidence
from .load import load
from .mapping import ZERO, Mapping, describe
from .mapping_report import MappingReport, Row
from .names import DEFAULT

BOUND = 1e-10  # relative, in float64: rounding is 1e-15, and any bug is larger
AFFORDABLE = 4e9  # parameters times tokens in one forward pass of the check


@torch.no_grad()
def load_into(
    module: nn.Module, model: str | GPT2 = DEFAULT, *, revision: str | None = None, offline: bool = False
) -> MappingReport:
    """Fill ``module``, any torch implementation of GPT-2, with the weights of ``model``, in place, and say how.

    Args:
        module: maps ids (B, T) to logits, or to a tuple, dict or object that holds them. Its parameters keep their dtype,
            device and identity; buffers, and what of it is no part of GPT-2, stay as they are.
        model: a model's name, as for :func:`gpt2.load`, or a model.
        revision, offline: as for :func:`gpt2.load`.

    The report is ``ok`` when every parameter is filled and the logits agree with our model's to 1e-10 in float64. What can be
    placed is placed, even where the module turns out to compute something else. Beside the module, one copy of it in float64 is
    held, and for a moment our model in float64 instead.

    Raises:
        InputError: no module, or none that GPT-2's weights could go into; no such model. The module is then untouched.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"load_into fills a torch.nn.Module, and was given {type(module).__name__}; build the module first")
    ours = load(model, revision=revision, offline=offline) if isinstance(model, str) else model
    who, config = type(module).__name__, ours.config
    with torch.random.fork_rng(devices=[]):
        bench = _copy(module, who)
        try:
            anatomy = Anatomy(_record(bench, config, who))
        except NotGPT2 as reason:
            raise InputError(f"{who}: {reason}; load_into needs a GPT-2") from None
        state = ours.state_dict()
        mapping = Mapping(anatomy, config)
        explanation = Explanation(anatomy, mapping, state)
        check = _Check(anatomy, mapping, state, explanation.found.neutral)
        rows = _fill(bench, mapping, state, explanation)
        agrees, error, note = check.judge(bench, explanation)
    filled = dict([*bench.named_parameters(), *bench.named_buffers()])
    targets = [*module.named_parameters(), *(module.named_buffers() if mapping.fills_buffers else ())]
    for name, target in targets:
        if name in {row.name for row in rows}:
            target.copy_(filled[name])
    found = explanation.found
    return MappingReport(
        module=who,
        checkpoint=model if isinstance(model, str) else "a model",
        rows=tuple(rows),
        unfilled=found.unfilled,
        unused=found.unused,
        ambiguous=tuple(found.ambiguous),
        problems=tuple(found.problems),
        notes=tuple(found.notes),
        logits_error=error,
        logits_note=note,
        agrees=agrees,
    )


def _copy(module: nn.Module, who: str) -> nn.Module:
    """A copy to work on, in eval mode. Tensors that a training step left behind, which refuse to be copied, are detached."""
    if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        raise InputError(f"{who}: its parameters are on the meta device and hold nothing; call to_empty() first")
    attributes = [value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor)]
    memo = {id(value): value.detach().clone() for value in attributes if value.grad_fn is not None}
    try:
        return copy.deepcopy(module, memo).eval()
    except Exception as error:
        raise InputError(f"{who}: cannot be copied ({_told(error)}); drop what it holds beside its weights") from None


def _record(bench: nn.Module, config: GPT2Config, who: str) -> Recording:
    """A forward pass on a few tokens; on as many as the checkpoint has positions, if the module takes no fewer."""
    device = next(bench.parameters(), torch.empty(0)).device
    failures = []
    for length in dict.fromkeys((min(5, config.n_positions), config.n_positions)):
        try:
            return record(bench, _probe(config, 2, length).to(device))
        except Exception as error:
            failures.append(_told(error))
    raise InputError(f"{who}: its forward fails on ids of shape (2, {min(5, config.n_positions)}): {failures[0]}")


def _probe(config: GPT2Config, batch: int, length: int) -> Tensor:
    """(B, T) ids, distinct where the vocabulary allows, and none of them the number of a position."""
    low = length if config.vocab_size >= length * (batch + 1) else 0
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(min(config.vocab_size - low, max(1000, length * batch)), generator=generator) + low
    return order.repeat(length * batch // len(order) + 1)[: length * batch].view(batch, length)


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}" if lines[0] else type(error).__name__


def _fill(bench: nn.Module, mapping: Mapping, state: MappingType[str, Tensor], explanation: Explanation) -> list[Row]:
    """Fill the copy, in float64; a row for each parameter that something went into."""
    bench.double()
    tensors = dict([*bench.named_parameters(remove_duplicate=False), *bench.named_buffers(remove_duplicate=False)])
    rows, seen = [], set()
    for source in mapping.anatomy.recording.sources:
        if not (source.is_parameter or mapping.fills_buffers) or source.region in seen:
            continue
        seen.add(source.region)
        entries = mapping.entries(source)
        low, high = (int(end) for end in entries.aminmax()) if entries.numel() else (ZERO, ZERO)
        names, words = describe(entries, mapping)
        explanation.judge(source, low, high, words)
        if source.name not in explanation.found.unfilled or high >= 0:
            _put(tensors[source.name], entries, low, high, mapping, state)
            reasons = dict.fromkeys(evidence(part) for part in mapping.parts(source))
            rows.append(Row(source.name, source.region.shape, names, words, "; ".join(reasons)))
    explanation.conflicts()
    return rows


def _put(target: Tensor, entries: Tensor, low: int, high: int, mapping: Mapping, state: MappingType[str, Tensor]) -> None:
    """The checkpoint's entries into a parameter."""
    if low >= 0 and mapping.owner(low) == mapping.owner(high):  # all of one tensor: no masks needed
        target.copy_(state[mapping.owner(low)].flatten()[entries - mapping.starts[mapping.owner(low)]])
        return
    target.masked_fill_(entries == ZERO, 0)
    for name, start in mapping.starts.items():
        stop = start + state[name].numel()
        if low < stop and high >= start and bool((mine := (entries >= start) & (entries < stop)).any()):
            target[mine] = state[name].flatten()[entries[mine] - start].to(target)


class _Check:
    """Our model's outputs on a few probes, in float64: as the checkpoint is, and as it would be without what the port lacks."""

    def __init__(self, anatomy: Anatomy, mapping: Mapping, state: MappingType[str, Tensor], neutral: dict[str, Tensor]) -> None:
        config = mapping.config
        self.vocabulary = min(
            config.vocab_size, config.vocab_size if anatomy.head is None else len(anatomy.head), anatomy.words.rows
        )
        self.ends_in_stream = anatomy.head is None
        self.fits = anatomy.width == config.n_embd
        rows = config.n_positions if anatomy.positions is None else anatomy.positions.rows
        context = min(config.n_positions, rows)
        affordable = [context] if config.num_parameters() * context <= AFFORDABLE else []
        generator = torch.Generator().manual_seed(1)
        lengths = sorted({min(length, context) for length in (1, 7, 32)} | set(affordable))
        self.probes = [torch.randint(self.vocabulary, (2, length), generator=generator) for length in lengths]
        self.whole, self.without = self._run(config, state), []
        if neutral:
            self.without = self._run(config, {**state, **neutral})

    def _run(self, config: GPT2Config, state: MappingType[str, Tensor]) -> list[Tensor]:
        model = GPT2(config, initialise=False).eval()
        for name, tensor in state.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.to("cpu", torch.float64)))
        return [model.hidden(ids) if self.ends_in_stream else model(ids)[..., : self.vocabulary] for ids in self.probes]

    def judge(self, bench: nn.Module, explanation: Explanation) -> tuple[bool, float | None, str]:
        """Whether the filled copy agrees, its worst error, and that in words; problems go to the explanation."""
        found = explanation.found
        outputs, failures = self._outputs(bench)
        if not self.fits:
            return False, None, "the logits cannot be compared, the module being of another size"
        if all(output is None for output in outputs):
            return False, None, f"the logits cannot be compared in float64 ({failures[0]})"
        if failures:
            found.notes.append(f"the forward fails on some lengths ({failures[0]})")
        error = self._error(outputs, self.whole)
        if error <= BOUND:
            return True, error, "the logits agree with our model's"
        without = self._error(outputs, self.without) if self.without else error
        if without <= BOUND:
            found.notes.append(
                f"what your module lacks is all that parts it from the checkpoint: without it, logits agree ({without:.1e})"
            )
            return False, error, "the logits differ, by what the module lacks"
        again, _ = self._outputs(bench)
        if any(a is not None and not torch.equal(a, b) for a, b in zip(outputs, again, strict=True)):
            found.problems.append(
                "your module gives other logits each time, in eval mode: is dropout applied without asking for the mode?"
            )
        placed = "what could be placed is placed" if found.unfilled or found.unused else "all weights are placed"
        found.problems.append(
            f"{placed}, but the module computes something else than GPT-2: `gpt2 diagnose` says where it departs"
        )
        return False, error, "the logits differ"

    def _outputs(self, bench: nn.Module) -> tuple[list[Tensor | None], list[str]]:
        outputs: list[Tensor | None] = []
        failures = []
        device = next((p.device for p in bench.parameters()), "cpu")
        for ids in self.probes:
            try:
                output = logits_of(bench(ids.to(device))).to("cpu")
                batch = output.reshape(len(ids), -1, output.shape[-1])
                outputs.append(batch if self.ends_in_stream else batch[..., : self.vocabulary])
            except Exception as error:
                outputs.append(None)
                failures.append(_told(error))
        return outputs, failures

    @staticmethod
    def _error(outputs: list[Tensor | None], references: list[Tensor]) -> float:
        worst = 0.0
        for output, reference in zip(outputs, references, strict=True):
            if output is None:
                continue
            reference = reference[:, -output.shape[1] :]  # some return the last position only
            if output.shape != reference.shape:
                return float("inf")
            error = (output - reference).abs().max() / reference.square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
            worst = max(worst, float(error)) if bool(torch.isfinite(error)) else float("inf")
        return worst
