"""A part of a program between two tensors that it shows, and whether faults in our own forward pass give its values there."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.port.alternatives.candidates import Candidate
from gpt2.port.alternatives.outside import LAST_STEPS
from gpt2.port.graph import LAST, ORDER, Entrance, Function, Model, Program, State
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import Place

# The largest error of a fit on few tokens, beside the tolerance, by whether the model is small; of a large one, in float32.
SIEVED = {True: 1e-12, False: 5e-5}
ROW_SUM_BOUND = 1e-3  # of probabilities that a program stored in float16
MIN_ROWS = 4  # positions from which a bias of the head can be fitted
NEARLY = 10.0  # times the tolerance: logits of one token, by their own size
SIGNIFICANT = 100.0  # a fitted factor or bias must explain an error of so many times the tolerance
BETTER = 2.0  # how many times smaller a fault's error must be than that of GPT-2's own formulas
FLIPPED = 0.3  # of the error of GPT-2's own formulas, what may be left where two roundings went to neighbours
LOGITS = (Place(None, "logits"),)
VOCABULARY = "logits[..., n] is that of id n in the checkpoint's vocabulary: the head has wte's rows in their own order"
SOFTMAXES: dict[str, Function] = {"softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1)}


@dataclass(frozen=True)
class HeadCause(Cause):
    """What a program does to its logits; ``change`` returns its logits, from the last normed stream and from GPT-2's logits.

    ``made``: of numbers that were fitted to the program's logits.
    """

    change: Callable[[Tensor, Tensor], Tensor] = field(default=lambda normed, logits: logits, compare=False)
    made: bool = False


class Fitting(NamedTuple):
    """A candidate and its largest relative error at the shown points."""

    candidate: Candidate
    error: float


class Part:
    """The forward pass from ``entrance``, None for the embeddings, to the point ``end``.

    ``shown``: a program's values in it, in order, ``end`` among them. ``blocks``: those that it computes, of the last one up to
    node number ``until``. ``softmaxed``: what the program made of its logits.
    """

    def __init__(self, model: Model, end: str, entrance: Entrance | None, shown: State, tolerance: Mapping[str, float]) -> None:
        self.model, self.end, self.entrance, self.shown, self.tolerance = model, end, entrance, shown, tolerance
        self.is_last, place = end in ("logits", "ln_f"), Place.of(end)
        last = model.config.n_layer if self.is_last else 0 if place.layer is None else place.layer + 1
        self.blocks = range(entrance.layer if entrance else 0, last)
        self.until, given = LAST if place.layer is None else ORDER[place.part], shown[end]
        shares = {"softmax": given, "log_softmax": given.exp()} if end == "logits" else {}
        sums = {name: bool((p >= 0).all() and ((p.sum(-1) - 1).abs() < ROW_SUM_BOUND).all()) for name, p in shares.items()}
        self.softmaxed = next((name for name, is_one in sums.items() if is_one), "")

    @property
    def all_blocks(self) -> bool:
        """Whether every block, from its input on, is in this part."""
        return self.is_last and (self.entrance is None or (self.entrance.layer, self.entrance.after) == (0, -1))

    @property
    def shows_all(self) -> bool:
        """Whether every token is shown at its end."""
        return not self.softmaxed and self.shown[self.end].shape[-2] == self.model.ids.shape[1]

    def computes(self, layer: int, node: str) -> bool:
        """Return whether a node of a block is in this part."""
        begin = (self.blocks.start, self.entrance.after if self.entrance else -1)
        return begin < (layer, ORDER[node]) <= (self.blocks.stop - 1, self.until)

    def values(self, one: Candidate, model: Model | None = None, entrance: Entrance | None = None) -> State:
        """Return a candidate's values by traced point; perhaps of another ``model`` from its own ``entrance`` on."""
        program, model, entrance = one.program or Program(), model or self.model, entrance or self.entrance
        if not self.is_last:
            return model.stages(program, self.blocks.start, self.blocks.stop, entrance, self.until)
        values = model.trace(program, entrance)
        for fault in one.head:
            if isinstance(fault, HeadCause):
                values["logits"] = fault.change(*self._ending(values))
        return values

    def allowed(self, point: str) -> float:
        return self.tolerance.get(point, 0.0)

    @property
    def bound(self) -> float:
        """The largest relative error at the end of what may fit, by a few tokens."""
        return 2 * self.allowed(self.end) + SIEVED[self.model.small]

    @cached_property
    def right(self) -> State:
        """GPT-2's own values where the program's are shown, and behind the blocks."""
        return {point: value for point, value in self.values(Candidate()).items() if point in (*self.shown, "ln_f", "logits")}

    @cached_property
    def right_errors(self) -> dict[str, float]:
        return self.errors(self.right)

    def errors(self, values: State) -> dict[str, float]:
        """Return the relative error at each shown point, in the order of the forward pass."""
        out = {}
        for point, shown in self.shown.items():
            if point in values:
                value = values[point][:, -shown.shape[1] :] if point == "logits" else values[point]
                alike = value.shape[1:] == shown.shape[1:]
                out[point] = worst_relative_error(shown, value.expand_as(shown)) if alike else math.inf
        return out

    @cached_property
    def first_wrong(self) -> str | None:
        """The first shown point where GPT-2's value is not the program's."""
        return next((point for point, error in self.right_errors.items() if not error <= self.allowed(point)), None)

    @cached_property
    def wrong_tokens(self) -> list[int]:
        """The tokens whose value at the end is not GPT-2's; none, if not every token's is shown."""
        shown, right = self.shown[self.end], self.right[self.end]
        if shown.shape != right.shape:
            return []
        apart = (shown - right).abs().amax(-1).flatten(0, -2).amax(0)
        wrong = apart > self.allowed(self.end) * shown.square().mean().sqrt()
        return wrong.nonzero().flatten().tolist()

    def fit(self, one: Candidate) -> Fitting | None:
        """Return a candidate with the first fault of the head that makes it fit all shown values; None if nothing does."""
        if not one.is_right and one.program is None:
            return None  # two faults of one node
        values = self.right if one.is_right else self.values(one)
        least = min(self.errors(values)[self.end], self.right_errors[self.end])  # one must not make the error that is fitted away
        heads = self._heads(values) if self.end == "logits" else ()
        heads = (fault for fault in heads if not fault.made or least > SIGNIFICANT * self.allowed(self.end))
        ended = ((replace(one, head=(fault,)), {**values, "logits": fault.change(*self._ending(values))}) for fault in heads)
        for whole, given in itertools.chain([(one, values)], ended):
            errors = self.errors(given)
            within = all(error <= self.allowed(point) for point, error in errors.items())
            if (within or self._rounded(whole, given, errors)) and BETTER * self._share(errors) <= self._share(self.right_errors):
                return Fitting(whole, max(errors.values()))
        return None

    def _rounded(self, one: Candidate, values: State, errors: Mapping[str, float]) -> bool:
        """Return whether a candidate that rounds numbers gives most of what the program has otherwise than GPT-2.

        What a program computes in float32 it rounds to the neighbour of what we round to, in a few places; then more follow.
        """
        if not one.rounds or any(e > max(self.right_errors[at] / BETTER, self.allowed(at)) for at, e in errors.items()):
            return False
        shown = self.shown[self.end]
        left, whole = (shown - each[self.end][:, -shown.shape[1] :] for each in (values, self.right))
        return bool(left.square().mean().sqrt() <= FLIPPED * whole.square().mean().sqrt())

    def _share(self, errors: Mapping[str, float]) -> float:
        """Return the largest error, in units of the tolerance."""
        return max(error / max(self.allowed(point), 1e-300) for point, error in errors.items())

    # The head: what is seen in the logits alone

    def _ending(self, values: State) -> tuple[Tensor, Tensor]:
        """Return the last normed stream and the logits, of the tokens whose logits are shown."""
        count = self.shown[self.end].shape[1]
        return values["ln_f"][:, -count:], values["logits"][:, -count:]

    def _heads(self, values: State) -> Iterator[HeadCause]:
        """Yield what the program may do to its logits (B, T, V) in the end, each of the known faults."""
        wanted, (normed, logits) = self.shown["logits"], self._ending(values)
        if name := self.softmaxed:
            words = f"the model returns {name} of the logits"
            yield HeadCause("logits-softmaxed", LOGITS, words, change=lambda _, y: SOFTMAXES[name](y))
            return
        ratio = float((logits * wanted).sum() / logits.square().sum().clamp(min=1e-300))
        words = f"the logits are multiplied by {ratio:.6g}"
        yield HeadCause("logits-scaled", LOGITS, words, made=True, change=lambda _, y: ratio * y)
        for fault, formula in LAST_STEPS:  # one token is soon computed
            if worst_relative_error(wanted[:, -1:], formula(logits[:, -1:])) <= NEARLY * self.allowed("logits"):
                yield HeadCause(fault.id, fault.places, fault.detail, change=partial(lambda f, _, y: f(y), formula))
        if worst_relative_error(*(one[:, -1:].sort().values for one in (wanted, logits))) <= NEARLY * self.allowed("logits"):
            ranks = wanted.argsort().argsort()
            order = logits.argsort().gather(-1, ranks).flatten(0, 1).mode(0).values  # in one row, near ones may change places
            first = ", ".join(map(str, order[:6].tolist()))
            words = f"the logits are in another order than the vocabulary: the first are those of the ids {first}"
            yield HeadCause("wrong-tensor", LOGITS, words, mend=VOCABULARY, made=True, change=lambda _, y: y[..., order])
        apart = worst_relative_error(wanted, wanted.mean((0, 1), keepdim=True).expand_as(wanted))
        if wanted.shape[:2].numel() >= MIN_ROWS and apart > SIGNIFICANT * self.allowed("logits"):  # else a bias fits them alone
            bias = (wanted - logits).mean((0, 1), keepdim=True)
            words = "the head adds a bias; GPT-2's head has none"
            yield HeadCause("extra-bias", LOGITS, words, made=True, change=lambda _, y: y + bias)
        if wanted.shape[:2].numel() >= self.model.config.n_embd + MIN_ROWS:  # else any logits fit
            words = "the logits follow from the right stream by other weights than the token embedding's"
            table = torch.linalg.lstsq(normed.flatten(0, 1), wanted.flatten(0, 1), driver="gelsd").solution
            yield HeadCause("untied-head", LOGITS, words, made=True, change=lambda x, _: x @ table)
