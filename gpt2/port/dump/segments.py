"""Compare programs with a program's values between two streams that it shows, with what it does to its logits in the end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.measure.tracing import layer_of, point_at, points
from gpt2.port.diagnosis.last_step import STEPS, last_steps
from gpt2.port.dump.candidates import Candidate
from gpt2.port.dump.evaluate import MIN_ROWS, Span
from gpt2.port.fault import Fault
from gpt2.port.graph import LAST, NODES, Entrance, Model, Program

ROW_SUM_BOUND = 1e-3  # of probabilities that a program stored in float16
NEARLY = 10.0  # times the tolerance: logits of one token, by their own size
SIGNIFICANT = 100.0  # a fitted factor or bias must explain an error of so many times the tolerance
BETTER = 2.0  # how many times smaller a fault's error must be than that of GPT-2's own formulas
MOST_TOKENS = 0.5  # of the vocabulary, whose logits alone may be wrong
FLIPPED = 0.3  # of the error of GPT-2's own formulas, what may be left where two roundings went to neighbours
FEW = "few tokens"  # the kind of such a fault of the head


@dataclass(frozen=True)
class Fit:
    """A candidate and its largest relative error at the shown points."""

    candidate: Candidate
    error: float

    @property
    def price(self) -> float:
        return self.candidate.price


class Segment:
    """The part of a program between two tensors that it shows: from ``entrance``, None for the embeddings, to the point ``end``.

    ``shown``: the program's values in this part, ``end`` among them. ``candidate``: what the next segment takes to be true here.
    """

    def __init__(
        self,
        model: Model,
        end: str,
        entrance: Entrance | None,
        shown: Mapping[str, Tensor],
        tolerance: Mapping[str, float],
    ) -> None:
        self.model, self.end, self.entrance, self.shown = model, end, entrance, shown
        self.tolerance = tolerance
        self.is_last = end in ("logits", "ln_f")
        layer = layer_of(end)
        self.first = 0 if entrance is None else entrance.layer
        self.last = model.config.n_layer if self.is_last else 0 if layer is None else layer + 1
        self.candidate = Candidate()
        self.softmaxed = self._softmaxed()

    @property
    def all_blocks(self) -> bool:
        """Whether every block, from its input on, is in this part."""
        return self.is_last and (self.entrance is None or (self.entrance.layer, self.entrance.after) == (0, -1))

    @property
    def from_start(self) -> bool:
        """Whether this part begins with GPT-2's own embeddings of the ids."""
        start = self.model.embed()
        return self.entrance is None or torch.equal(self.entrance.state["x"], start)

    @cached_property
    def span(self) -> Span:
        return Span(self.first, self.last, self.end, self.entrance, self.shown[self.end], self.softmaxed)

    def left(self) -> Entrance:
        """Return where the next segment begins."""
        program, until, layer = self.candidate.program or Program(), self.span.until, self.last - 1
        values = self.model.stages(program, self.first, self.last, self.entrance, until)
        if until == LAST:  # the embeddings, or a block's result
            return Entrance(layer + 1, {"x": values["end"]})
        before = {name: values[point_at(layer, name)] for name in NODES[: until + 1]}
        return Entrance(layer, {"x": values["x"], **before}, until)

    def values(self, candidate: Candidate) -> dict[str, Tensor]:
        """Return all traced points of a candidate in this segment."""
        program = candidate.program or Program()
        if self.is_last:
            return self.model.trace(program, self.entrance)
        return self.model.stages(program, self.first, self.last, self.entrance, self.span.until)

    def allowed(self, point: str) -> float:
        return self.tolerance.get(point, 0.0)

    def first_wrong(self, candidate: Candidate) -> str | None:
        """Return the first shown point where a candidate's value is not the program's."""
        errors = self.right_errors if candidate.is_right else self.errors(candidate, self.values(candidate))
        return next((point for point, error in errors.items() if not error <= self.allowed(point)), None)

    @cached_property
    def right_errors(self) -> dict[str, float]:
        return self.errors(Candidate(), self.values(Candidate()))

    def errors(self, candidate: Candidate, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the relative error of a candidate's ``values`` at each shown point, in the order of the forward pass."""
        out = {}
        for point in points(self.model.config.n_layer):
            if point in self.shown and point in values:
                value = self._headed(values, candidate.head) if point == "logits" else values[point]
                shown = self.shown[point]
                out[point] = (
                    worst_relative_error(shown, value.expand_as(shown)) if value.shape[1:] == shown.shape[1:] else math.inf
                )
        return out

    def first_wrong_token(self) -> int:
        """Return the first token whose value at the end is not GPT-2's; 0 if not every token's is shown."""
        return next(iter(self.wrong_tokens()), 0)

    def wrong_tokens(self) -> list[int]:
        """Return the tokens whose value at the end is not GPT-2's; none, if not every token's is shown."""
        shown, right = self.shown[self.end], self.values(Candidate())[self.end]
        if shown.shape[1] != right.shape[1]:
            return []
        wrong = (shown - right).abs().amax((0, 2)) > self.allowed(self.end) * shown.square().mean().sqrt()
        return wrong.nonzero().flatten().tolist()

    def fits(self, candidate: Candidate) -> Iterator[Fit]:
        """Yield a candidate, with each fault of the head that makes it fit all shown values; the first that does is enough."""
        if not candidate.is_right and candidate.program is None:
            return  # two faults of one stage
        values = self.values(candidate)
        plain = None
        for faults in self._heads(values["logits"]) if self.end == "logits" else [()]:
            whole = replace(candidate, head=faults)
            errors = self.errors(whole, values)
            plain = errors if plain is None else plain
            fitted = bool(faults) and faults[0].id != "logits-softmaxed" and faults[0].kind not in STEPS
            least = min(plain[self.end], self.right_errors[self.end])  # the fault must not make the error that is fitted away
            if fitted and least <= SIGNIFICANT * self.allowed(self.end):
                continue
            within = all(error <= self.allowed(point) for point, error in errors.items())
            if (within or self._rounded(whole, values, errors)) and self._better(errors):
                yield Fit(whole, max(errors.values()))
                return

    def _rounded(self, candidate: Candidate, values: Mapping[str, Tensor], errors: Mapping[str, float]) -> bool:
        """Return whether a candidate that rounds numbers gives most of what the program has otherwise than GPT-2.

        What a program computes in float32 it rounds to the neighbour of what we round to, in a few places; then more follow.
        """
        if not candidate.rounds:
            return False
        if any(error > max(self.right_errors[point] / BETTER, self.allowed(point)) for point, error in errors.items()):
            return False
        shown, right = self.shown[self.end], self.values(Candidate())
        left, whole = (
            shown - (self._headed(one, candidate.head) if self.end == "logits" else one[self.end]) for one in (values, right)
        )
        return bool(left.square().mean().sqrt() <= FLIPPED * whole.square().mean().sqrt())

    def _better(self, errors: Mapping[str, float]) -> bool:
        """Return whether these errors are well below those of GPT-2's own formulas, and not by chance."""
        return BETTER * self._share(errors) <= self._share(self.right_errors)

    def needs(self, fit: Fit, first: Candidate) -> bool:
        """Return whether both ``first`` and the fit's other faults are needed: one without the other is much worse."""
        second = Candidate(fit.candidate.sites[len(first.sites) :], None if first.order else fit.candidate.order)
        parts = [replace(one, head=fit.candidate.head) for one in (first, second)]
        best = BETTER * self._share(self.errors(fit.candidate, self.values(fit.candidate)))
        return all(best <= self._share(self.errors(one, self.values(one))) for one in parts)

    def _share(self, errors: Mapping[str, float]) -> float:
        """Return the largest error, in units of the tolerance."""
        return max(error / max(self.allowed(point), 1e-300) for point, error in errors.items())

    # The head: what is seen in the logits alone

    def _softmaxed(self) -> str:
        if self.end != "logits":
            return ""
        given = self.shown["logits"]
        for name, p in (("softmax", given), ("log_softmax", given.exp())):
            if bool((p >= 0).all()) and bool(((p.sum(-1) - 1).abs() < ROW_SUM_BOUND).all()):
                return name
        return ""

    def _headed(self, values: Mapping[str, Tensor], faults: Iterable[Fault]) -> Tensor:
        """Return a candidate's logits as the program gives them, with the head's faults."""
        wanted = self.shown["logits"]
        logits, stream = (values[point][:, -wanted.shape[1] :] for point in ("logits", "ln_f"))
        for fault in faults:
            if fault.kind in STEPS:
                logits = STEPS[fault.kind].formula(logits)
            elif fault.id == "logits-scaled":
                logits = logits * _ratio(logits, wanted)
            elif fault.id == "extra-bias":
                logits = logits + (wanted - logits).mean((0, 1), keepdim=True)
            elif fault.id == "untied-head" and fault.kind == FEW:
                logits = torch.where(self._few(logits, wanted)[0], wanted, logits)
            elif fault.id == "untied-head":
                logits = stream @ torch.linalg.lstsq(stream.flatten(0, 1), wanted.flatten(0, 1)).solution
            elif fault.id == "logits-softmaxed":
                logits = logits.softmax(-1) if self.softmaxed == "softmax" else logits.log_softmax(-1)
        return logits

    def _heads(self, logits: Tensor) -> Iterator[tuple[Fault, ...]]:
        """Yield what the program may do to its logits (B, T, V) in the end: nothing, or one of the known faults."""
        wanted = self.shown["logits"]
        yield ()
        if self.softmaxed:
            words = f"the model returns {self.softmaxed} of the logits"
            yield (Fault("logits-softmaxed", "logits", words),)
            return
        logits = logits[:, -wanted.shape[1] :]
        wrong, words = self._few(logits, wanted)
        if bool(wrong.any()):
            yield (Fault("untied-head", "logits", words, FEW),)
        ratio = _ratio(logits, wanted)
        yield (Fault("logits-scaled", "logits", f"the logits are multiplied by {ratio:.6g}"),)
        allowed = NEARLY * self.allowed("logits")
        for fault, formula in last_steps():  # one token is soon computed
            if worst_relative_error(wanted[:, -1:], formula(logits[:, -1:])) <= allowed:
                yield (fault,)
        apart = worst_relative_error(wanted, wanted.mean((0, 1), keepdim=True).expand_as(wanted))
        if wanted.shape[:2].numel() >= MIN_ROWS and apart > SIGNIFICANT * self.allowed("logits"):  # else a bias fits them alone
            yield (Fault("extra-bias", "logits", "the head adds a bias; GPT-2's head has none"),)
        if wanted.shape[:2].numel() >= self.model.config.n_embd + MIN_ROWS:  # else any logits fit
            words = "the logits follow from the right stream by other weights than the token embedding's"
            yield (Fault("untied-head", "logits", words),)

    def _few(self, logits: Tensor, wanted: Tensor) -> tuple[Tensor, str]:
        """Return the tokens (V,) whose logits alone are wrong, and words; none, if the others are not right, or not more."""
        size = wanted.square().mean().sqrt()
        off = (wanted - logits).abs().amax((0, 1)) / size
        wrong = off > self.allowed("logits")
        if not 0 < int(wrong.sum()) <= MOST_TOKENS * len(off) or float(off.max()) < SIGNIFICANT * self.allowed("logits"):
            return torch.zeros_like(wrong), ""
        tokens = wrong.nonzero().flatten().tolist()
        same = bool((wanted[..., wrong] == wanted[0, 0, tokens[0]]).all())
        which = f"{len(tokens)} tokens ({tokens[0]} to {tokens[-1]})" if len(tokens) > 1 else f"token {tokens[0]}"
        how = f"always {float(wanted[0, 0, tokens[0]]):g}" if same else "computed from other weights than wte's"
        return wrong, f"the logits of {which} are {how}; all others are right"


def _ratio(value: Tensor, wanted: Tensor) -> float:
    return float((value * wanted).sum() / value.square().sum().clamp(min=1e-300))
