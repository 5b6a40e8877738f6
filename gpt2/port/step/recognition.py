"""Recognise by value what each array of a dump is, parameters before or after a step or a gradient, and of which step.

`layouts.py` has the views that an array may have of parameters, by unit.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, mode

import torch
from torch import Tensor

from gpt2.port.step.expected import Weights
from gpt2.port.step.layouts import LETTERS, Layouts, View, joined, units_of
from gpt2.port.step.losses import Losses
from gpt2.port.step.records import total_norm

Units = tuple[str, ...]
SAMPLED = 512  # entries of a unit that are compared
NEAR = 0.5  # relative distance of parameters after a few steps from those before
LIKE = 0.25  # least cosine of a gradient with a predicted one
LEAST = 1e-4  # of the usual ratio of a gradient's norm to the predicted one's; below it, it is rounding
KEYS_BIAS = ".attn.c_attn.bias:k"  # its gradient is zero in exact arithmetic
SQUARE = 0.9999  # least cosine of second moments with the squares of a gradient
SOLID = 6  # least number of entries of an array that is recognised by a cosine
MAX_STEPS = 5  # whose gradients are put in order
ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3}
Predicted = Callable[[Weights, int, str], list[Weights]]  # of weights, a step, and labels


@dataclass
class Recorded:
    """What a dump holds of K steps, by the checkpoint's names.

    ``parameters``: K + 1 sets, the first from the checkpoint where the dump has none. ``raw`` and ``used``: gradients by step,
    after the backward pass and, where the dump has two, after clipping.
    """

    parameters: list[Weights]
    raw: list[Weights] = field(default_factory=list)
    used: list[Weights] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    copies: list[Units] = field(default_factory=list)  # the parameters of each array of some
    stacks: set[Units] = field(default_factory=set)  # parameters that are one array
    parameter_dtypes: set[torch.dtype] = field(default_factory=set)
    gradient_dtypes: set[torch.dtype] = field(default_factory=set)
    float64: bool = False  # computed in float64: some array holds what float32 cannot
    losses: list[Losses] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.parameters) - 1

    @property
    def changes(self) -> bool:
        """Whether gradients or updates were recorded, and not numbers alone that may be losses."""
        return any(self.raw) or self.steps > 0

    @property
    def narrow(self) -> bool:
        """Whether parameters are in half precision."""
        return any(dtype.itemsize < 4 for dtype in self.parameter_dtypes)


@dataclass(eq=False)
class Piece:
    """An array in one view. A parameter's ``score`` is its distance from the checkpoint's, a gradient's its likeness."""

    name: str
    view: View
    score: float
    dtype: torch.dtype
    label: str | None = None  # of a gradient: of the predicted one that is most like it
    size: float = 1.0  # of a gradient: its norm over that of this one

    @property
    def units(self) -> Units:
        return tuple(self.view)


def by_units(pieces: Iterable[Piece]) -> dict[Units, list[Piece]]:
    found: dict[Units, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.units, []).append(piece)
    return found


def shared_out(candidates: Sequence[Sequence[Piece]]) -> list[Piece]:
    """Return one piece for each array, so that parameters of one shape get equally many: the most alike first."""
    sizes = [sum(tensor.numel() for tensor in group[0].view.values()) for group in candidates]
    units: dict[int, set[frozenset[str]]] = {size: set() for size in sizes}
    for size, group in zip(sizes, candidates, strict=True):
        units[size] |= {frozenset(piece.units) for piece in group}
    # how many gradients of one parameter the dump may hold: of each step, before and after clipping
    each = max((math.ceil(count / len(units[size])) for size, count in Counter(sizes).items()), default=0)
    room = {one: each for own in units.values() for one in own}
    given: dict[int, Piece] = {}
    order = ((number, piece) for number, group in enumerate(candidates) for piece in group)
    for number, piece in sorted(order, key=lambda one: -one[1].score):
        if number not in given and room[frozenset(piece.units)] > 0:
            given[number] = piece
            room[frozenset(piece.units)] -= 1
    return [given[number] for number in sorted(given)]


class Recogniser:
    """The search; ``state`` are the checkpoint's tensors in float64, ``gradients`` the predicted ones with their labels.

    Of each gradient a sample is kept: a dozen whole ones of gpt2's shape would take 12 GB.
    """

    def __init__(
        self, layouts: Layouts, state: Mapping[str, Tensor], gradients: Iterable[tuple[str, Mapping[str, Tensor]]]
    ) -> None:
        self.layouts, self.state, self.units = layouts, state, units_of(state)
        generator = torch.Generator().manual_seed(0)
        self.indices = {
            name: torch.randint(tensor.numel(), (SAMPLED,), generator=generator) if tensor.numel() > SAMPLED else slice(None)
            for name, tensor in self.units.items()
        }
        self.labels: list[str] = []
        self.gradients: list[View] = []
        for label, one in gradients:
            self.labels.append(label)
            self.gradients.append({name: g.reshape(-1)[self.indices[name]] for name, g in units_of(one).items()})
        self._tables: dict[tuple[Units, bool], Tensor] = {}

    def recorded(self, arrays: Mapping[str, Tensor], predicted: Predicted, counts: Sequence[int]) -> Recorded:
        """Say what each array is, and order them by steps, of which there may be ``counts``, the likeliest first.

        ``predicted``: gradients that a step from some weights may have.
        """
        parameters, gradients = self._pieces(arrays)
        pieces = [*parameters, *gradients]
        found = Recorded(self._sets(parameters, mode([len(group) for group in by_units(gradients).values()] or [0]), counts))
        found.parameter_dtypes, found.gradient_dtypes = ({piece.dtype for piece in some} for some in (parameters, gradients))
        found.names, found.copies = {piece.name for piece in pieces}, [piece.units for piece in parameters]
        wide = (arrays[piece.name] for piece in pieces if piece.dtype == torch.float64)
        found.float64 = any(not bool((one == one.float().double()).all()) for one in wide)
        found.stacks = {piece.units for piece in pieces if 1 < len(piece.units) < len(self.state)}
        later = [units_of(one) for one in found.parameters[1:]]
        still = {
            name
            for name, p in self.units.items()
            if later and all(name in one and bool(((one[name] - p).abs() <= 2**-24 * p.abs()).all()) for one in later)
        }
        # of c_attn, all three thirds: a key's bias has no gradient
        found.unchanged = [n for n in self.state if n in still or all(f"{n}:{one}" in still for one in LETTERS)]
        if gradients:
            found.raw, found.used = self._placed(found, gradients, predicted, counts[0])
        if not is_clipped(found.raw, found.used) or self._has_squares(arrays, found.raw[0]):
            found.used = [{} for _ in found.raw]
        return found

    def _taken(self, tensors: Mapping[str, Tensor], units: Units) -> Tensor:
        return torch.cat([tensors[name].reshape(-1)[self.indices[name]] for name in units])

    def _likeness(self, units: Units, values: Tensor, *, signs: bool = False) -> Tensor:
        """Return the cosines of values with each predicted gradient, or with its signs, (labels,)."""
        key = units, signs
        if key not in self._tables:
            rows = torch.stack([torch.cat([one[name] for name in units]) for one in self.gradients])
            rows = rows.sign() if signs else rows
            self._tables[key] = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)
        return self._tables[key] @ (values / values.norm().clamp(min=1e-300))

    # What each array is

    def _pieces(self, arrays: Mapping[str, Tensor]) -> tuple[list[Piece], list[Piece]]:
        """Return the arrays that are parameters, and those that are gradients."""
        some = (item for item in arrays.items() if item[1].numel() > 1 and bool(item[1].isfinite().all()))
        found = [pieces for name, array in some if (pieces := self._candidates(name, array))]
        gradients = [pieces for pieces in found if pieces[0].label is not None]
        least = LEAST * median([pieces[0].size for pieces in gradients] or [0.0])
        large = [kept for pieces in gradients if (kept := [piece for piece in pieces if piece.size > least])]
        return [pieces[0] for pieces in found if pieces[0].label is None], shared_out(large)

    def _candidates(self, name: str, array: Tensor) -> list[Piece]:
        """Return what an array may be: parameters in one view, or else gradients in several, the most alike first."""
        parameters: list[tuple[float, Piece]] = []  # beside its agreement: how far it has moved against a gradient
        gradients: list[Piece] = []
        for view in self.layouts.views(array.double()):
            units = tuple(view)
            ours, values = self._taken(self.units, units), self._taken(view, units)
            norm, apart, like = float(ours.norm()), float((values - ours).norm()), self._likeness(units, values)
            best = int(like.abs().argmax())
            share = abs(float(like[best]))
            cost = apart / norm if norm > 0 else 0.0 if apart == 0 or float(like[best]) < -LIKE else 2.0
            if cost < NEAR or (apart < 0.9 * norm and cosine(values, ours) > 0.9):  # moments with decay are parallel, and smaller
                agreement = float(self._likeness(units, ours - values, signs=True).max())
                parameters.append((agreement, Piece(name, view, cost, array.dtype)))
                continue
            positive = bool((values >= 0).all())  # second moments
            keys = all(name.endswith(KEYS_BIAS) for name in units)
            if len(values) >= SOLID and not keys and share > LIKE and not positive:
                predicted = torch.cat([self.gradients[best][name] for name in units])
                size = float(values.norm() / predicted.norm().clamp(min=1e-300))
                gradients.append(Piece(name, view, share, array.dtype, self.labels[best].partition(" ")[2], size))
        if parameters:
            least = min(piece.score for _, piece in parameters)
            return [max((one for one in parameters if one[1].score <= 3 * least + 1e-9), key=lambda one: one[0])[1]]
        return sorted(gradients, key=lambda piece: -piece.score)

    # The order of steps

    def _sets(self, parameters: Sequence[Piece], gradients: int, counts: Sequence[int]) -> list[Weights]:
        """Return the parameters before the first step and after each; ``gradients``: so many are dumped of most parameters.

        Copies that are equal to the checkpoint are those before, or of first steps that moved nothing: of a few parameters, as
        a key's bias; or of all, where the rate was 0.
        """
        before: Weights = {}
        equal: dict[Units, int] = {}
        changed: dict[Units, list[Piece]] = {}
        for units, group in by_units(parameters).items():
            same = [piece for piece in group if piece.score <= ROUNDING[piece.dtype]]
            equal[units], changed[units] = len(same), self._ordered(units, [piece for piece in group if piece not in same])
            if same and same[0].dtype.itemsize >= 4:  # half precision has rounded what the program computed with
                before |= same[0].view
        moved = mode([len(group) for group in changed.values() if group] or [0])
        usual = mode([equal[units] for units, group in changed.items() if len(group) == moved and moved] or [0])
        copies = usual + moved
        count = next((n for n in counts if n > 1 and copies in (n, n + 1)), 1)
        steps = count if count > 1 else copies - 1
        known = copies == count + 1 > 2 or gradients >= steps > 0
        resting = max(steps - moved, 0) if moved and known else 0  # first steps, at a rate of 0
        sets: list[Weights] = [{} for _ in range(resting + moved)]
        for units, group in changed.items():
            still = len(sets) - len(group)
            spare = max(equal[units] - usual + resting, 0)
            if (group and 0 <= still <= spare) or (not group and equal[units] > usual - resting):
                views = [{name: self.units[name] for name in units}] * still + [piece.view for piece in group]
                for one, view in zip(sets, views, strict=True):
                    one |= view
        return [dict(self.state) | joined(before), *(joined(one) for one in sets)]

    def _ordered(self, units: Units, group: list[Piece]) -> list[Piece]:
        """Return the sets of some units in the order of steps: the nearest that goes against the gradient, then the next ones."""
        here, left, out = self._taken(self.units, units), list(group), list[Piece]()
        while left:

            def length(piece: Piece, here: Tensor = here) -> float:
                change = self._taken(piece.view, units) - here
                turned = 1.0 if out else float(self._likeness(units, -change, signs=True).max())
                return float(change.norm()) / max(turned, 0.05)

            out.append(min(left, key=length))
            left.remove(out[-1])
            here = self._taken(out[-1].view, units)
        return out

    def _placed(
        self, found: Recorded, gradients: Sequence[Piece], predicted: Predicted, batches: int
    ) -> tuple[list[Weights], list[Weights]]:
        """Put each gradient at the step whose predicted gradients it is most like; of two, the smaller one is clipped."""
        labels = Counter(piece.label for piece in gradients for name in piece.units if not name.startswith("wte"))
        label = labels.most_common(1)[0][0] if labels else ""
        options: list[list[Weights]] = []  # by step, the gradients that it may have, and their sum with all before them
        for step in range(min(found.steps or batches, MAX_STEPS)):
            weights = found.parameters[step if found.steps else 0]
            if step and weights.keys() != self.state.keys():
                break
            ways = [units_of(one) for one in predicted(weights, step, label or "")]
            total = {name: g + (options[-1][-1][name] if options else 0.0) for name, g in ways[-1].items()}
            options.append([*ways, total])
        raw, used = ([View() for _ in range(max(found.steps, 1))] for _ in range(2))
        for units, group in by_units(gradients).items():
            values = [self._taken(piece.view, units) for piece in group]
            taken = [[self._taken(one, units) for one in ways] for ways in options]
            # where all steps have the same signs, the direction decides
            likeness = [[max(alike(x, one) + 1e-3 * cosine(x, one) for one in ways) for ways in taken] for x in values]
            placed: Sequence[int] = [max(range(len(options)), key=row.__getitem__) for row in likeness]
            if len(group) == len(options):  # all different
                orders = itertools.permutations(range(len(options)))
                placed = max(orders, key=lambda order: sum(row[at] for row, at in zip(likeness, order, strict=True)))
            order = sorted(range(len(group)), key=lambda number: -max(likeness[number]))[: 2 * len(raw)]  # no later step's
            order.sort(key=lambda number: -total_norm(group[number].view))  # clipping may cut one entry
            for step in range(len(raw)):
                here = [group[number].view for number in order if placed[number] == step]
                for sets, view in zip((raw, used), here, strict=False):
                    sets[step] |= view
        for one in (*raw, *used):
            for name in [name for name in one if name.endswith(f"{KEYS_BIAS[:-1]}q")]:
                one.setdefault(f"{name[:-1]}k", torch.zeros_like(one[name]))
        return [joined(one) for one in raw], [joined(one) for one in used]

    def _has_squares(self, arrays: Mapping[str, Tensor], gradient: Weights) -> bool:
        """Whether the dump holds Adam's second moments: after the first step, squares of its gradients."""
        raw = units_of(gradient)
        positive = [array.double() for array in arrays.values() if array.numel() >= SOLID and bool((array >= 0).all())]
        views = (view for array in positive for view in self.layouts.views(array) if all(name in raw for name in view))
        pairs = ([torch.cat([one[name].reshape(-1) for name in view]) for one in (view, raw)] for view in views)
        return any(cosine(values, gradient**2) > SQUARE for values, gradient in pairs)


def is_clipped(raw: list[Weights], used: list[Weights]) -> bool:
    """Whether the second gradients are the first ones after clipping, not Adam's first moments.

    The moments of the first step are a tenth of its gradient (after clipping); later ones have another direction.
    """
    if not used or not used[0] or len(used[0]) < len(raw[0]) / 2:
        return False
    shares = [[cosine(one[n].reshape(-1), r[n].reshape(-1)) for n in one if n in r] for r, one in zip(raw, used, strict=True)]
    parallel = [sum(share > 1 - 1e-4 for share in each) > len(each) / 2 for each in shares]
    if parallel[0] and not all(parallel):
        return False
    norms = [total_norm(sets[0]) for sets in (raw, used)]
    return not any(abs(norms[1] / (share * limit) - 1) < 2e-3 for share in (0.1, 0.05) for limit in (norms[0], 1.0))


def alike(one: Tensor, other: Tensor) -> float:
    """Return how much a gradient is like another; entries that are cut off have changed its direction, but not their signs."""
    return max(abs(cosine(one, other)), abs(cosine(one.sign(), other.sign())))


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of two flat tensors; 0 if one of them is zero."""
    size = float(one.norm() * other.norm())
    return float(one @ other) / size if size > 0 else 0.0
