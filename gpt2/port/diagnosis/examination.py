"""Examine one port against one checkpoint: run all checks in order, and draw the conclusions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping as MappingType
from dataclasses import replace

import torch
from torch import Tensor, nn

from gpt2.errors import InputError
from gpt2.measure.metrics import FLOAT64_BOUND, worst_relative_error
from gpt2.measure.tracing import layer_of, points, trace
from gpt2.model import GPT2
from gpt2.port.anatomy.anatomy import Anatomy
from gpt2.port.anatomy.stream import NotGPT2
from gpt2.port.diagnosis.behaviour import Behaviour
from gpt2.port.diagnosis.causes import PlacedCause
from gpt2.port.diagnosis.own import Own, own_weights
from gpt2.port.diagnosis.ranking import ranked
from gpt2.port.diagnosis.reference import Reference, logits_error
from gpt2.port.diagnosis.report import SURE, Diagnosis, Divergence
from gpt2.port.diagnosis.structure import require_size, structural_causes
from gpt2.port.diagnosis.vocabulary import padding_causes, require_logits, without_padding
from gpt2.port.diagnosis.walk import walk
from gpt2.port.diagnosis.weights import WeightComparison
from gpt2.port.mapping.filling import fill, put
from gpt2.port.mapping.mapping import Mapping
from gpt2.port.recording.borrowed import Borrowed
from gpt2.port.recording.dataflow import Use
from gpt2.port.recording.deterministic import run_deterministically
from gpt2.port.recording.forward import ForwardError, error_line, logits_of, plain_attention
from gpt2.port.recording.pool import collect
from gpt2.port.recording.probe import give_shapes, record_probe

SLACK = 10  # for what refuses float64: how much farther from the float64 run it may be than our model is in its dtype
LENGTHS = (8, 1, 32)  # of the token sequences; the walk uses the first
MAX_WORK = 2e9  # parameters times tokens: up to here the whole context is tried too
NARROW = (torch.bfloat16, torch.float16)


class Examination:
    """The checks of one module; :meth:`diagnosis` runs them.

    Raises:
        InputError: as :func:`gpt2.diagnose`.
    """

    def __init__(self, module: nn.Module, ours: GPT2, fill: bool = False) -> None:
        self.module, self.ours, self.config, self.fill = module, ours, ours.config, fill
        self.who = type(module).__name__
        self.weight_causes: list[PlacedCause] = []
        self.notes: list[str] = []
        self.bound = FLOAT64_BOUND
        self.not_gpt2 = ""

    def diagnosis(self) -> Diagnosis:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        if any(tensor.is_meta for tensor in tensors):
            raise InputError(f"{self.who}: its parameters are on the meta device and hold nothing; call to_empty() and load them")
        give_shapes(self.module, self.config, self.who)
        self.device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise InputError(f"{self.who}: its {name} holds NaN; look where its values come from")
        with torch.random.fork_rng(devices=[]), plain_attention(), Borrowed(self.module) as borrowed:
            self.module.eval()  # as its users do: some override it
            return self._examine(borrowed)

    def _examine(self, borrowed: Borrowed) -> Diagnosis:
        anatomy = self._anatomy()
        self.state = self._state(borrowed)
        borrowed.to_float64()
        self.mapping = None if anatomy is None else Mapping(anatomy, self.config)
        own, blank = self._weights(anatomy, borrowed)
        reference = Reference(self.ours, self.state)
        same = Reference(self.ours, own.weights, own.head) if own.placed else reference
        outputs = self._outputs(borrowed, self._probes(anatomy))
        ids, first_logits = outputs[0]
        padding, notes = padding_causes(first_logits, self.config)
        self.notes += notes
        behaviour = Behaviour(self.module, self.config, same, lambda ids: trace(same.model, ids.cpu()), self.bound)
        behaviour.test(ids.to(self.device))
        self.notes += behaviour.notes
        errors = [logits_error(without_padding(theirs, self.config), reference(probe)) for probe, theirs in outputs]
        others = [*padding, *behaviour.causes]
        if max(errors) <= self.bound:
            unseen = [cause for cause in self.weight_causes if blank or cause.places[0].stem in ("wte", "wpe")]  # rows not used
            return self._diagnosed(max(errors), blank or behaviour.divergence, [*unseen, *others])
        wrong = next(number for number, error in enumerate(errors) if error > self.bound)
        ids, theirs = outputs[wrong]
        if wrong and any(cause.id == "not-deterministic" for cause in behaviour.causes):
            return self._diagnosed(max(errors), blank, [*self.weight_causes, *others])
        if wrong:
            self.notes.append(f"your logits are right for {outputs[0][0].size(1)} tokens; they part at {ids.size(1)}")
        own_error = logits_error(without_padding(theirs, self.config), same(ids))
        if own.placed and own_error <= self.bound:
            divergence = _first_divergence(trace(reference.model, ids), trace(same.model, ids))
            silent = [cause for cause in self._structural_causes() if cause.id == "position-missing"]
            causes = [_sure(cause, own_error) for cause in [*self.weight_causes, *silent]]
        else:
            divergence, causes = self._walked(ids, own, reference)
        order = {point: number for number, point in enumerate(points(self.config.n_layer))}
        known = [one for one in (blank, divergence, behaviour.divergence) if one is not None]
        divergence = min(known, key=lambda one: order.get(one.point, 0), default=None)
        return self._diagnosed(max(errors), divergence, [*causes, *others])

    def _diagnosed(self, error: float, divergence: Divergence | None, causes: list[PlacedCause]) -> Diagnosis:
        causes = ranked(causes, self.config.n_layer)
        equal = error <= self.bound and not causes
        if divergence is None and not equal:
            divergence = Divergence("logits", None, error)
        verdict = "equal" if equal else "mismatch" if causes else "undetermined"
        shown, notes = tuple(cause.cause() for cause in causes), tuple(dict.fromkeys(self.notes))
        return Diagnosis(verdict, None if equal else divergence, shown, notes, self.who, logits_error=error)

    # What the module holds

    def _anatomy(self) -> Anatomy | None:
        """None where its parts are not recognised; then it is taken to hold the checkpoint's weights."""
        recording = record_probe(self.module, self.config, self.who)
        try:
            return Anatomy(recording)
        except NotGPT2 as reason:
            self.not_gpt2 = str(reason)
        except Exception as error:
            why = error_line(error)
            self.notes.append(f"the parts of your module were not recognised ({why}); its weights were not compared")
        return None

    def _state(self, borrowed: Borrowed) -> dict[str, Tensor]:
        """The checkpoint in float64, first rounded to the module's own dtype if that is narrow."""
        self.dtypes = {name: tensor.dtype for name, tensor in borrowed.tensors.items()}
        sizes: Counter[torch.dtype] = Counter()
        for tensor in borrowed.tensors.values():
            sizes[tensor.dtype] += tensor.numel() if tensor.is_floating_point() else 0
        dtype = sizes.most_common(1)[0][0] if sizes else torch.float32
        state = {name: tensor.detach().to("cpu") for name, tensor in self.ours.state_dict().items()}
        if dtype in NARROW and any(tensor.dtype != dtype for tensor in state.values()):
            self.notes.append(f"your module is in {_name(dtype)}: it is compared with the checkpoint rounded to that, in float64")
            state = {name: tensor.to(dtype) for name, tensor in state.items()}
        return {name: tensor.double() for name, tensor in state.items()}

    def _weights(self, anatomy: Anatomy | None, borrowed: Borrowed) -> tuple[Own, Divergence | None]:
        """Its own weights, after comparison. If it holds nothing of the checkpoint, it is filled, and that is the divergence."""
        if anatomy is None or self.mapping is None:
            return Own(self.state, {}, {}), None
        require_size(self.mapping, self.who)
        divergence = None
        if not self.fill:
            _unround(self.mapping, borrowed, self.state, self.dtypes)
            own = own_weights(self.mapping, borrowed.tensors, self.state)
            report = WeightComparison(own, self.state, self.config).run()
            if not report.blank:
                self.weight_causes += report.causes
                self.notes += report.notes
                return own, None
            self.weight_causes += [cause for cause in report.causes if cause.id == "not-loaded"]
            self.notes.append("beyond that, the diagnosis is of your module as gpt2.load_into fills it")
            error = worst_relative_error(own.weights["wte.weight"], self.state["wte.weight"])
            divergence, self.mapping = Divergence("wte", None, error), Mapping(anatomy, self.config)
        fill(borrowed, self.mapping, self.state)
        own = own_weights(self.mapping, borrowed.tensors, self.state)
        report = WeightComparison(own, self.state, self.config).run()
        self.weight_causes += report.causes
        self.notes += report.notes
        return own, divergence

    def _structural_causes(self) -> list[PlacedCause]:
        return [] if self.mapping is None else list(structural_causes(self.mapping))

    # What the module returns

    def _probes(self, anatomy: Anatomy | None) -> list[Tensor]:
        rows = self.config.n_positions if anatomy is None or anatomy.positions is None else anatomy.positions.rows
        vocabulary = self.config.vocab_size if anatomy is None else min(self.config.vocab_size, anatomy.stream.vocabulary)
        context = min(self.config.n_positions, rows)
        lengths = [min(length, context) for length in LENGTHS]
        if anatomy is not None and anatomy.recording.ids.size(1) > lengths[0]:  # it takes no fewer
            lengths = [anatomy.recording.ids.size(1)]
        if self.config.num_parameters() * context <= MAX_WORK:
            lengths.append(context)
        generator = torch.Generator().manual_seed(1)
        return [torch.randint(vocabulary, (2, length), generator=generator) for length in dict.fromkeys(lengths)]

    def _outputs(self, borrowed: Borrowed, probes: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Its logits of each probe, in float64 if it can, in its own dtype if not. It may refuse all probes but the first."""
        first, *others = probes
        try:
            outputs = [(first, self._run(first))]
        except InputError:
            raise
        except Exception as failure:
            borrowed.to_own_dtype()
            try:
                outputs = [(first, self._run(first))]
            except InputError:
                raise
            except Exception as error:
                message = f"{self.who}: its forward fails on ids of shape {tuple(first.shape)}: {error_line(error)}"
                raise ForwardError(message) from None
            self._allow_rounding(outputs[0][1], failure)
        for ids in others:
            try:
                outputs.append((ids, self._run(ids)))
            except InputError:
                raise
            except Exception as error:
                self.notes.append(f"your forward fails on ids of shape {tuple(ids.shape)} ({error_line(error)})")
        return outputs

    def _run(self, ids: Tensor) -> Tensor:
        output, mode = run_deterministically(lambda: logits_of(self.module(ids.to(self.device))))
        if mode.casts and not mode.keep_casts:
            self.notes.append(f"your forward casts to {', '.join(sorted(mode.casts))}; it was measured with float64 there")
        elif mode.casts:
            self._allow_rounding(output, None)
        return require_logits(output.detach().cpu(), ids, self.config, self.who)

    def _allow_rounding(self, output: Tensor, failure: Exception | None) -> None:
        """Where it does not compute in float64: allow errors in proportion to our model's error in that dtype."""
        dtype = output.dtype if output.dtype != torch.float64 else torch.float32
        ids = self._probes(None)[0]
        rounded, exact = (Reference(self.ours, self.state, dtype=d)(ids) for d in (dtype, torch.float64))
        self.bound = max(self.bound, SLACK * worst_relative_error(rounded, exact))
        why = f" (in float64 it fails: {error_line(failure)})" if failure else ""
        self.notes.append(f"your forward was measured in {_name(dtype)}, and may be off by {self.bound:.1e}{why}")

    # What the module computes

    def _walked(self, ids: Tensor, own: Own, reference: Reference) -> tuple[Divergence | None, list[PlacedCause]]:
        """Walk through GPT-2's stages with the module's own weights and recorded tensors."""
        config = self.config
        pool, _ = run_deterministically(lambda: collect(self.module, ids.to(self.device), config.n_embd, config.inner))
        pool.narrow = self.bound > FLOAT64_BOUND
        weights = dict(own.weights)
        if own.placed and not bool(own.placed["wpe.weight"].any()):  # what is added in place of positions, the walk decides
            weights["wpe.weight"] = self.state["wpe.weight"]
        walked = walk(pool, weights, config, ids, reference.model, own.head)
        if not pool.narrow and not walked.explained:  # constants that were made in float32 may be the only obstacle
            pool.narrow = True
            again = walk(pool, weights, config, ids, reference.model, own.head)
            walked = again if again.explained else walked
        causes = list(walked.causes)
        if walked.explained:
            held = [cause for cause in self.weight_causes if cause.id != "extra-bias"]  # the walk has seen what it does
            return walked.first_divergence, [*causes, *(_sure(cause) for cause in held)]
        if self.not_gpt2 and not causes:
            raise InputError(f"{self.who}: {self.not_gpt2}; this is another kind of model, and gpt2 diagnose needs a GPT-2")
        known = {cause.id for cause in causes}
        causes += [cause for cause in self._structural_causes() if cause.id not in known]
        if causes or self.weight_causes:
            self.notes.append("these causes do not explain all of the difference; fix them and run the diagnosis again")
        return walked.first_divergence, [*causes, *self.weight_causes]


def _sure(cause: PlacedCause, error: float | None = None) -> PlacedCause:
    """A cause of weights that is certain, since our model with the port's own weights gives the port's logits."""
    more = f"; with your weights our model gives your logits to {error:.0e}" if error is not None else ""
    return replace(cause, confidence=SURE, evidence=cause.evidence + more)


def _unround(
    mapping: Mapping, borrowed: Borrowed, state: MappingType[str, Tensor], dtypes: MappingType[str, torch.dtype]
) -> None:
    """Give parameters that are used scaled or shifted (a norm's weight less one) the exact values, if they hold the checkpoint's
    values as nearly as their dtype can."""
    uses = mapping.anatomy.recording.uses
    for source in mapping.anatomy.recording.sources:
        known = uses.get(source.storage, {Use()})
        if Use() in known or not source.is_parameter:
            continue
        use, tensor, entries = sorted(known)[0], borrowed.tensors[source.name], mapping.entries(source)
        exact = tensor.clone()
        put(exact, entries, mapping, state, use)
        near = 4 * torch.finfo(dtypes[source.name]).eps * (exact.abs() + abs(use.shift / use.scale))
        if bool(((exact - tensor).abs() <= near).all()):
            tensor.copy_(exact)


def _first_divergence(ours: MappingType[str, Tensor], theirs: MappingType[str, Tensor]) -> Divergence | None:
    errors = {point: worst_relative_error(theirs[point], value) for point, value in ours.items()}
    return next((Divergence(point, layer_of(point), error) for point, error in errors.items() if error > FLOAT64_BOUND), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
