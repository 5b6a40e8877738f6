"""Recognise by value what each array of a dump is: a loss, parameters before or after a step, or a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from gpt2.port.step.layouts import LETTERS, Layouts, View, Weights, joined, units_of
from gpt2.port.step.placing import MAX_STEPS, Piece, assigned, cosine, is_clipped, shared_out, with_sums

SAMPLED = 512  # entries of a unit that are compared
NEAR = 0.5  # relative distance of parameters after a few steps from those before
LIKE = 0.25  # least cosine of a gradient with a predicted one
LEAST = 1e-4  # of the usual ratio of a gradient's norm to the predicted one's; below it, it is rounding
KEYS_BIAS = ".attn.c_attn.bias:k"  # its gradient is zero in exact arithmetic
SQUARE = 0.9999  # least cosine of second moments with the squares of a gradient
SOLID = 6  # least number of entries of an array that is recognised by a cosine
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
    stacks: set[tuple[str, ...]] = field(default_factory=set)  # parameters that are one array
    parameter_dtypes: set[torch.dtype] = field(default_factory=set)
    gradient_dtypes: set[torch.dtype] = field(default_factory=set)
    float64: bool = False  # computed in float64: some array holds what float32 cannot

    @property
    def steps(self) -> int:
        return len(self.parameters) - 1

    @property
    def narrow(self) -> bool:
        """Whether parameters are in half precision."""
        return any(dtype.itemsize < 4 for dtype in self.parameter_dtypes)


class Recogniser:
    """The search; ``state`` are the checkpoint's tensors in float64, ``gradients`` the predicted ones with their labels.

    Of each gradient a sample is kept: a dozen whole ones of gpt2's shape would take 12 GB.
    """

    def __init__(
        self, layouts: Layouts, state: Mapping[str, Tensor], gradients: Iterable[tuple[str, Mapping[str, Tensor]]]
    ) -> None:
        self.layouts, self.state = layouts, state
        self.units = units_of(state)
        generator = torch.Generator().manual_seed(0)
        self.indices = {
            name: torch.randint(tensor.numel(), (SAMPLED,), generator=generator) if tensor.numel() > SAMPLED else None
            for name, tensor in self.units.items()
        }
        self.gradients = {label: {n: self.sample(n, g) for n, g in units_of(one).items()} for label, one in gradients}
        self.labels = list(self.gradients)
        self._tables: dict[tuple[tuple[str, ...], bool], Tensor] = {}

    def pieces(self, arrays: Mapping[str, Tensor]) -> tuple[list[Piece], dict[str, Tensor]]:
        """Return the recognised arrays, and the rest."""
        found: list[Piece] = []
        rest: dict[str, Tensor] = {}
        gradients: list[list[Piece]] = []
        for name, array in arrays.items():
            candidates = self._candidates(name, array)
            if not candidates:
                rest[name] = array
            elif candidates[0].kind == "parameter":
                found += candidates[:1]
            else:
                gradients.append(candidates)
        usual = median(group[0].size for group in gradients) if gradients else 0.0
        large = [kept for group in gradients if (kept := [piece for piece in group if piece.size > LEAST * usual])]
        return [*found, *shared_out(large)], rest

    def _candidates(self, name: str, array: Tensor) -> list[Piece]:
        """Return what an array may be, the best first: parameters in one view, or gradients in several."""
        parameters: list[tuple[float, float, View]] = []  # cost, agreement, view
        gradients: list[Piece] = []
        if not bool(array.isfinite().all()) or array.numel() < 2:
            return []
        array = array.double()
        for view in self.layouts.views(array):
            units = tuple(view)
            ours, values = self._taken(self.units, units), self._taken(view, units)
            norm = float(ours.norm())
            apart = float((values - ours).norm())
            like = self._likeness(units, values)
            best = int(like.abs().argmax())
            likeness, label = float(like[best]), self.labels[best].partition(" ")[2]
            cost = apart / norm if norm > 0 else 0.0 if apart == 0 or likeness < -LIKE else 2.0
            if cost < NEAR or (apart < 0.9 * norm and cosine(values, ours) > 0.9):  # moments with decay are parallel, and smaller
                agreement = float(self._likeness(units, ours - values, signs=True).max())
                parameters.append((cost, agreement, view))
            elif (
                len(values) >= SOLID
                and not all(name.endswith(KEYS_BIAS) for name in units)
                and abs(likeness) > LIKE
                and not bool((values >= 0).all())
            ):  # no second moments
                predicted = torch.cat([self.gradients[self.labels[best]][name] for name in units])
                size = float(values.norm() / predicted.norm().clamp(min=1e-300))
                gradients.append(Piece(name, view, "gradient", abs(likeness), label, size))
        if parameters:
            least = min(cost for cost, _, _ in parameters)
            cost, _, view = max((one for one in parameters if one[0] <= 3 * least + 1e-9), key=lambda one: one[1])
            return [Piece(name, view, "parameter", cost)]
        return sorted(gradients, key=lambda piece: -piece.score)

    def _likeness(self, units: tuple[str, ...], values: Tensor, *, signs: bool = False) -> Tensor:
        """Return the cosines of values with each predicted gradient, or with its signs, (labels,)."""
        key = units, signs
        if key not in self._tables:
            rows = torch.stack([torch.cat([one[name] for name in units]) for one in self.gradients.values()])
            rows = rows.sign() if signs else rows
            self._tables[key] = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-300)
        return self._tables[key] @ (values / values.norm().clamp(min=1e-300))

    def _taken(self, tensors: Mapping[str, Tensor], units: Sequence[str]) -> Tensor:
        return torch.cat([self.sample(name, tensors[name]) for name in units])

    def sample(self, name: str, tensor: Tensor) -> Tensor:
        index = self.indices[name]
        return tensor.reshape(-1) if index is None else tensor.reshape(-1)[index]

    # The order of steps

    def recorded(self, pieces: Sequence[Piece], arrays: Mapping[str, Tensor], predicted: Predicted, batches: int) -> Recorded:
        """Put the arrays in the order of their steps. ``predicted``: gradients that a step from some weights may have."""
        parameters = [piece for piece in pieces if piece.kind == "parameter"]
        gradients = [piece for piece in pieces if piece.kind == "gradient"]
        by_units: dict[tuple[str, ...], list[Piece]] = {}
        for piece in parameters:
            by_units.setdefault(piece.units, []).append(piece)
        before: Weights = {}
        changed: dict[tuple[str, ...], list[Piece]] = {}
        equal: dict[tuple[str, ...], int] = {}
        for units, group in by_units.items():
            same = [piece for piece in group if piece.score <= _rounding(arrays[piece.name])]
            equal[units] = len(same)
            for piece in same[:1]:
                if arrays[piece.name].dtype.itemsize >= 4:  # half precision has rounded what the program computed with
                    before |= piece.view
            rest = [piece for piece in group if not any(piece is one for one in same)]
            changed[units] = self._ordered(units, rest)
        steps = _mode([len(group) for group in changed.values() if group])
        usual = _mode([equal[units] for units, group in changed.items() if len(group) == steps and steps])
        sets: list[Weights] = [{} for _ in range(steps)]
        unchanged: list[str] = []
        for units, group in changed.items():
            still = steps - len(group)
            if group and 0 <= still <= max(equal[units] - usual, 0):  # of the first steps, which did not move it: a key's bias
                for number, one in enumerate(sets):
                    one |= group[number - still].view if number >= still else {name: self.units[name] for name in units}
            elif not group and equal[units] > usual:
                unchanged += units
                for one in sets:
                    one |= {name: self.units[name] for name in units}
        found = Recorded([dict(self.state) | joined(before), *(joined(one) for one in sets)])
        found.parameter_dtypes = {arrays[piece.name].dtype for piece in parameters}
        unchanged += [
            n
            for n, p in self.state.items()
            if steps and not found.narrow and all(n in one and _unmoved(one[n], p) for one in found.parameters[1:])
        ]
        # of c_attn, all three thirds: a key's bias has no gradient
        whole = dict.fromkeys(name.partition(":")[0] for name in unchanged)
        found.unchanged = [name for name in whole if name in unchanged or all(f"{name}:{one}" in unchanged for one in LETTERS)]
        found.gradient_dtypes = {arrays[piece.name].dtype for piece in gradients}
        found.float64 = any(_is_exact(arrays[piece.name]) for piece in pieces)
        found.names = {piece.name for piece in pieces}
        found.stacks = {piece.units for piece in pieces if 1 < len(piece.units) < len(self.state)}
        self._place_gradients(found, gradients, predicted, batches)
        if self._has_squares(arrays, found):
            found.used = [{} for _ in found.raw]
        return found

    def _has_squares(self, arrays: Mapping[str, Tensor], found: Recorded) -> bool:
        """Whether the dump holds Adam's second moments: after the first step, squares of its gradients."""
        raw = units_of(found.raw[0]) if found.raw else {}
        positive = [array.double() for array in arrays.values() if array.numel() >= SOLID and bool((array >= 0).all())]
        views = (view for array in positive for view in self.layouts.views(array) if all(name in raw for name in view))
        return any(
            cosine(torch.cat([one.reshape(-1) for one in view.values()]), torch.cat([raw[n].reshape(-1) ** 2 for n in view]))
            > SQUARE
            for view in views
        )

    def _ordered(self, units: tuple[str, ...], group: list[Piece]) -> list[Piece]:
        """Return the sets of some units in the order of steps: the nearest that goes against the gradient, then the next ones."""
        if len(group) < 2:
            return group
        here, left = self._taken(self.units, units), list(group)
        out: list[Piece] = []
        while left:

            def length(piece: Piece, here: Tensor = here) -> float:
                change = self._taken(piece.view, units) - here
                turned = 1.0 if out else float(self._likeness(units, -change, signs=True).max())
                return float(change.norm()) / max(turned, 0.05)

            nearest = min(left, key=length)
            out.append(nearest)
            left = [piece for piece in left if piece is not nearest]
            here = self._taken(nearest.view, units)
        return out

    def _place_gradients(self, found: Recorded, gradients: Sequence[Piece], predicted: Predicted, batches: int) -> None:
        if not gradients:
            return
        count = min(found.steps or batches, MAX_STEPS)
        labels = Counter(piece.label for piece in gradients for name in piece.units if not name.startswith("wte"))
        label = labels.most_common(1)[0][0] if labels else ""
        options: list[list[Weights]] = []  # by step, the gradients that it may have
        for step in range(count):
            weights = found.parameters[step if found.steps else 0]
            if step and weights.keys() != self.state.keys():
                break
            options.append([units_of(one) for one in predicted(weights, step, label)])
        raw: list[View] = [{} for _ in range(max(found.steps, 1))]
        used: list[View] = [{} for _ in raw]
        groups: dict[tuple[str, ...], list[Piece]] = {}
        for piece in gradients:
            groups.setdefault(piece.units, []).append(piece)
        ways_by_step = with_sums(options)
        for units, group in groups.items():
            likeness = [
                [
                    max(abs(cosine(self._taken(piece.view, units), self._taken(one, units))) for one in ways)
                    for ways in ways_by_step
                ]
                for piece in group
            ]
            placed = assigned(likeness, len(options))
            for step in range(len(raw)):
                here = sorted(
                    (piece for piece, at in zip(group, placed, strict=True) if at == step), key=self._norm, reverse=True
                )
                for piece in here[:1]:
                    raw[step] |= piece.view
                for piece in here[1:2]:
                    used[step] |= piece.view
        for one in (*raw, *used):
            for name in [name for name in one if name.endswith(":q")]:
                key = f"{name[:-1]}k"
                one |= {key: torch.zeros_like(one[name])} if key.endswith(KEYS_BIAS) and key not in one else {}
        found.raw = [joined(one) for one in raw]
        second = [joined(one) for one in used]
        found.used = second if is_clipped(found.raw, second) else [{} for _ in raw]

    def _norm(self, piece: Piece) -> float:
        return float(self._taken(piece.view, piece.units).norm())


def _mode(counts: Sequence[int]) -> int:
    return Counter(counts).most_common(1)[0][0] if counts else 0


def _rounding(array: Tensor) -> float:
    return {torch.float64: 1e-7, torch.float32: 1e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3}[array.dtype]


def _unmoved(after: Tensor, before: Tensor) -> bool:
    return bool(((after - before).abs() <= 2**-24 * before.abs()).all())


def _is_exact(array: Tensor) -> bool:
    return array.dtype == torch.float64 and not bool((array == array.float().double()).all())
