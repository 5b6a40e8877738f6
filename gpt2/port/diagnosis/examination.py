"""One port held against one checkpoint: what is asked, in which order, and what follows from the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping as MappingType
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2.checkpoint.checkpoint import model_with
from gpt2.errors import InputError
from gpt2.measure.metrics import FLOAT64_BOUND, worst_relative_error
from gpt2.measure.tracing import layer_of, points, trace
from gpt2.model import GPT2
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.stream import NotGPT2
from gpt2.port.diagnosis.behaviour import Behaviour
from gpt2.port.diagnosis.own import Own, own_weights
from gpt2.port.diagnosis.ranking import ranked
from gpt2.port.diagnosis.report import SURE, Cause, Diagnosis, Divergence
from gpt2.port.diagnosis.structure import must_fit, structural_causes
from gpt2.port.diagnosis.vocabulary import cut, padding_causes, require_logits
from gpt2.port.diagnosis.walk import walk
from gpt2.port.diagnosis.weights import Judge
from gpt2.port.mapping.filling import fill, put
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.recording.borrowed import Borrowed
from gpt2.port.recording.dataflow import Use
from gpt2.port.recording.deterministic import run_deterministically
from gpt2.port.recording.forward import error_line, logits_of, plain_attention
from gpt2.port.recording.pool import collect
from gpt2.port.recording.probe import give_shapes, record_probe

SLACK = 10  # for what refuses float64: how much farther from the float64 run than our model is in its dtype
LENGTHS = (8, 1, 32)  # the first is what the walk sees
AFFORDABLE = 2e9  # parameters times tokens: up to here the whole context is tried
UNSEEN = ("wte", "wpe")  # where a few ids do not see all rows
NARROW = (torch.bfloat16, torch.float16)


class Examination:
    """Runs it all on the bench; :meth:`diagnosis` says what was found.

    Raises:
        InputError: as :func:`gpt2.diagnose`.
    """

    def __init__(self, module: nn.Module, ours: GPT2, fill: bool = False) -> None:
        self.module, self.ours, self.config, self.fill = module, ours, ours.config, fill
        self.who = type(module).__name__
        self.causes: list[Cause] = []
        self.notes: list[str] = []
        self.bound = FLOAT64_BOUND
        self.no_gpt2 = ""

    def diagnosis(self) -> Diagnosis:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        if any(tensor.is_meta for tensor in tensors):
            raise InputError(f"{self.who}: its parameters are on the meta device and hold nothing; call to_empty() and load them")
        give_shapes(self.module, self.config, self.who)
        self.device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise InputError(f"{self.who}: its {name} holds NaN; look where its values come from")
        with torch.random.fork_rng(devices=[]), plain_attention(), Borrowed(self.module) as bench:
            self.module.eval()  # as anybody would: what some make of it is theirs
            return self._examine(bench)

    def _examine(self, bench: Borrowed) -> Diagnosis:
        anatomy = self._anatomy()
        self.state = self._state(bench)
        bench.to_float64()
        own, blank = self._weights(anatomy, bench)
        reference = _Ours(self.ours, self.state)
        same = _Ours(self.ours, own.weights, own.head) if own.placed else reference
        outputs = self._outputs(bench, self._probes(anatomy))
        ids = outputs[0][0]
        padding, notes = padding_causes(outputs[0][1], self.config)
        self.notes += notes
        behaviour = Behaviour(self.module, self.config, same, lambda ids: trace(same.model, ids.cpu()), self.bound)
        behaviour.judge(ids.to(self.device))
        self.notes += behaviour.notes
        errors = [_error(cut(theirs, self.config), reference(probe)) for probe, theirs in outputs]
        if max(errors) <= self.bound:
            unseen = [cause for cause in self.causes if blank or cause.where.startswith(UNSEEN)]
            return self._diagnosed(max(errors), blank or behaviour.divergence, [*padding, *unseen, *behaviour.causes])
        wrong = next(number for number, error in enumerate(errors) if error > self.bound)
        ids, theirs = outputs[wrong]
        if wrong and any(cause.id == "not-deterministic" for cause in behaviour.causes):
            return self._diagnosed(max(errors), blank, [*self.causes, *padding, *behaviour.causes])
        if wrong:
            self.notes.append(f"your logits are right for {outputs[0][0].size(1)} tokens; they part at {ids.size(1)}")
        alike = _error(cut(theirs, self.config), same(ids))
        if own.placed and alike <= self.bound:
            divergence = _first_apart(trace(reference.model, ids), trace(same.model, ids))
            silent = [c for c in structural_causes(self.mapping) if c.id == "position-missing"]
            causes = [self._sure(cause, alike) for cause in [*self.causes, *silent]]
        else:
            divergence, causes = self._walked(ids, own, reference, anatomy)
        order = {point: number for number, point in enumerate(points(self.config.n_layer))}
        both = [found for found in (blank, divergence, behaviour.divergence) if found is not None]
        divergence = min(both, key=lambda found: order.get(found.point, 0), default=None)
        return self._diagnosed(max(errors), divergence, [*causes, *padding, *behaviour.causes])

    def _diagnosed(self, error: float, divergence: Divergence | None, causes: list[Cause]) -> Diagnosis:
        causes = ranked(causes, self.config.n_layer)
        equal = error <= self.bound and not causes
        if divergence is None and not equal:
            divergence = Divergence("logits", None, error)
        verdict = "equal" if equal else "mismatch" if causes else "undetermined"
        notes = tuple(dict.fromkeys(self.notes))
        return Diagnosis(verdict, None if equal else divergence, tuple(causes), notes, self.who, logits_error=error)

    # What it holds

    def _anatomy(self) -> Anatomy | None:
        """None where its parts cannot be told; then the checkpoint's weights stand for its own."""
        recording = record_probe(self.module, self.config, self.who)
        try:
            return Anatomy(recording)
        except NotGPT2 as reason:
            self.no_gpt2 = str(reason)
            return None
        except Exception as error:
            self.notes.append(
                f"the parts of your module could not be told apart ({error_line(error)}); its weights were not compared"
            )
            return None

    def _state(self, bench: Borrowed) -> dict[str, Tensor]:
        """The checkpoint in float64, rounded before as the port's own dtype asks for."""
        self.dtypes = {name: tensor.dtype for name, tensor in bench.tensors.items()}
        sizes: Counter[torch.dtype] = Counter()
        for tensor in bench.tensors.values():
            sizes[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
        dtype = sizes.most_common(1)[0][0] if sizes else torch.float32
        state = {name: tensor.detach().to("cpu") for name, tensor in self.ours.state_dict().items()}
        if dtype in NARROW and any(tensor.dtype != dtype for tensor in state.values()):
            self.notes.append(
                f"your module is in {_called(dtype)}: it is held against the checkpoint rounded to that, in float64"
            )
            state = {name: tensor.to(dtype) for name, tensor in state.items()}
        return {name: tensor.double() for name, tensor in state.items()}

    def _weights(self, anatomy: Anatomy | None, bench: Borrowed) -> tuple[Own, Divergence | None]:
        """Its own weights, judged; and if it holds nothing of the checkpoint, where that shows, the bench then being filled."""
        if anatomy is None:
            return Own(self.state, {}, {}), None
        self.mapping, divergence = Mapping(anatomy, self.config), None
        must_fit(self.mapping, self.who)
        if not self.fill:
            _unround(self.mapping, bench, self.state, self.dtypes)
            own = own_weights(self.mapping, bench.tensors, self.state)
            verdicts = Judge(own, self.state, self.config).judge()
            if not verdicts.blank:
                self.causes += verdicts.causes
                self.notes += verdicts.notes
                return own, None
            self.causes += [cause for cause in verdicts.causes if cause.id == "not-loaded"]
            self.notes.append("beyond that, what is said here is of your module as gpt2.load_into fills it")
            error = _error(own.weights["wte.weight"], self.state["wte.weight"])
            divergence, self.mapping = Divergence("wte", None, error), Mapping(anatomy, self.config)
        fill(bench, self.mapping, self.state)
        own = own_weights(self.mapping, bench.tensors, self.state)
        verdicts = Judge(own, self.state, self.config).judge()
        self.causes += verdicts.causes
        self.notes += verdicts.notes
        return own, divergence

    # What it gives

    def _probes(self, anatomy: Anatomy | None) -> list[Tensor]:
        rows = self.config.n_positions if anatomy is None or anatomy.positions is None else anatomy.positions.rows
        vocabulary = self.config.vocab_size if anatomy is None else min(self.config.vocab_size, anatomy.stream.vocabulary)
        context = min(self.config.n_positions, rows)
        lengths = [min(length, context) for length in LENGTHS]
        if anatomy is not None and anatomy.recording.ids.size(1) > lengths[0]:  # it takes no fewer
            lengths = [anatomy.recording.ids.size(1)]
        if self.config.num_parameters() * context <= AFFORDABLE:
            lengths.append(context)
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(vocabulary, (2, length), generator=generator) for length in dict.fromkeys(lengths)]

    def _outputs(self, bench: Borrowed, probes: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Its logits of each, the first of which it has to take. Float64 if it can, its own dtype if not."""
        try:
            found = [(probes[0], self._run(probes[0]))]
        except InputError:
            raise
        except Exception as failure:
            bench.to_own_dtype()
            try:
                found = [(probes[0], self._run(probes[0]))]
            except InputError:
                raise
            except Exception as error:
                shape = tuple(probes[0].shape)
                raise InputError(f"{self.who}: its forward fails on ids of shape {shape}: {error_line(error)}") from None
            self._measure(found[0][1], failure)
        for ids in probes[1:]:
            try:
                found.append((ids, self._run(ids)))
            except InputError:
                raise
            except Exception as error:
                self.notes.append(f"your forward fails on ids of shape {tuple(ids.shape)} ({error_line(error)})")
        return found

    def _run(self, ids: Tensor) -> Tensor:
        output, mode = run_deterministically(lambda: logits_of(self.module(ids.to(self.device))))
        if mode.casts and not mode.keep_casts:
            self.notes.append(f"your forward casts to {', '.join(sorted(mode.casts))}; it was measured with float64 there")
        elif mode.casts:
            self._measure(output, None)
        return require_logits(output.detach().cpu(), ids, self.config, self.who)

    def _measure(self, output: Tensor, failure: Exception | None) -> None:
        """Where it does not compute in float64: what it may be off, from what our model is off in that dtype."""
        dtype = output.dtype if output.dtype != torch.float64 else torch.float32
        ids = self._probes(None)[0]
        rounded, exact = (_Ours(self.ours, self.state, dtype=d)(ids) for d in (dtype, torch.float64))
        self.bound = max(self.bound, SLACK * _error(rounded.double(), exact))
        why = f" (in float64 it fails: {error_line(failure)})" if failure else ""
        self.notes.append(f"your forward was measured in {_called(dtype)}, and may be off by {self.bound:.1e}{why}")

    # What it computes

    def _walked(self, ids: Tensor, own: Own, reference: _Ours, anatomy: Anatomy | None) -> tuple[Divergence | None, list[Cause]]:
        """GPT-2's stages with the port's own weights, against what the port computed on the way."""
        config = self.config
        pool, _ = run_deterministically(lambda: collect(self.module, ids.to(self.device), config.n_embd, config.inner))
        pool.narrow = self.bound > FLOAT64_BOUND
        weights = dict(own.weights)
        if own.placed and not bool(own.placed["wpe.weight"].any()):  # what is added in place of positions, the walk finds out
            weights["wpe.weight"] = self.state["wpe.weight"]
        walked = walk(pool, weights, config, ids, reference.model, own.head)
        if not pool.narrow and not walked.explained:  # constants that were made in float32 may be all that is in the way
            pool.narrow = True
            again = walk(pool, weights, config, ids, reference.model, own.head)
            walked = again if again.explained else walked
        if anatomy is None and self.no_gpt2 and not walked.causes and not walked.explained:
            raise InputError(f"{self.who}: {self.no_gpt2}; this is another kind of model, and gpt2 diagnose needs a GPT-2")
        causes = [*walked.causes]
        if walked.explained:
            held = [cause for cause in self.causes if cause.id != "extra-bias"]  # the walk has seen what it does
            return walked.first_divergence, [*causes, *(self._sure(cause, None) for cause in held)]
        known = {cause.id for cause in causes}
        if anatomy is not None:
            causes += [c for c in structural_causes(self.mapping) if c.id not in known]
        if causes or self.causes:
            self.notes.append("these causes do not explain all of the difference; mend them, and ask again")
        return walked.first_divergence, [*causes, *self.causes]

    def _sure(self, cause: Cause, error: float | None) -> Cause:
        """A cause of weights, where our model with the port's own gives the port's logits."""
        told = f"; with your weights our model gives your logits to {error:.0e}" if error is not None else ""
        return replace(cause, confidence=SURE, evidence=cause.evidence + told)


def _unround(mapping: Mapping, bench: Borrowed, state: MappingType[str, Tensor], dtypes: MappingType[str, torch.dtype]) -> None:
    """Parameters that are used scaled or shifted (a norm's weight less one), and hold the checkpoint's values as near as their
    dtype can, are taken as exact."""
    uses = mapping.anatomy.recording.uses
    for source in mapping.anatomy.recording.sources:
        found = uses.get(source.storage, {Use()})
        if Use() in found or not source.is_parameter:
            continue
        use, tensor, entries = sorted(found)[0], bench.tensors[source.name], mapping.entries(source)
        exact = tensor.clone()
        put(exact, entries, mapping, state, use)
        near = 4 * torch.finfo(dtypes[source.name]).eps * (exact.abs() + abs(use.shift / use.scale))
        if bool(((exact - tensor).abs() <= near).all()):
            tensor.copy_(exact)


class _Ours:
    """Our model with other weights, and perhaps a head of its own: ids (B, T) to logits (B, T, V)."""

    def __init__(
        self, ours: GPT2, state: MappingType[str, Tensor], head: Tensor | None = None, dtype: torch.dtype = torch.float64
    ) -> None:
        self.model = model_with(ours.config, ((name, tensor.to(dtype)) for name, tensor in state.items()))
        self.model.requires_grad_(False)
        self.own_head = head

    def __call__(self, ids: Tensor, offset: int = 0) -> Tensor:
        """With positions counted from ``offset``."""
        ids = ids.cpu()
        wpe = self.model.wpe.weight
        self.model.wpe.weight = nn.Parameter(wpe[offset:], requires_grad=False)
        hidden = self.model.hidden(ids)
        self.model.wpe.weight = wpe
        return self.model.head(hidden) if self.own_head is None else F.linear(hidden, self.own_head.to(hidden))


def _error(theirs: Tensor, ours: Tensor) -> float:
    """The worst relative error at the positions that a port gives."""
    return worst_relative_error(theirs, ours if theirs.ndim < 3 else ours[:, -theirs.shape[1] :])


def _first_apart(ours: MappingType[str, Tensor], theirs: MappingType[str, Tensor]) -> Divergence | None:
    errors = {point: worst_relative_error(theirs[point], value) for point, value in ours.items()}
    return next((Divergence(point, layer_of(point), error) for point, error in errors.items() if error > FLOAT64_BOUND), None)


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
