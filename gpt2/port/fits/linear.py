"""Read off a linear layer's input and result which weights and which bias it multiplied and added.

Shapes: x (B, T, I); the result y (B, T, O); weights W (I, O); biases b (O,). ``rows`` are the tokens that are not GPT-2's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.port.alternatives.rounding import quantised
from gpt2.port.fits.lacking import ranges
from gpt2.port.fits.observed import Fit, Observed, combined, distinct, formula, keeps_angles
from gpt2.port.terms.causes import Cause

MOST = 2**29  # products of columns that are compared
MOST_COPIED = 2**24  # entries of matrices whose columns are compared
LEAST_MATCHED = 0.4  # of the columns of a weight, to say where they come from
UNKNOWN = "the weight is not the checkpoint's in any known way"
ALIKE = 0.5  # cosine of a result and GPT-2's, from which on the weight may be a rounded one


class ColumnSource(NamedTuple):
    """Where a column of weights is in the checkpoint: a tensor, whether it is one of its rows, and its number."""

    name: str
    row: bool
    number: int


class Library:
    """All vectors of a checkpoint ``state`` that a program may hold by mistake."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state
        self.rounding = ""  # that other weights were seen to have
        self._columns: dict[int, tuple[Tensor, list[tuple[str, bool, int]]]] = {}

    def columns(self, size: int) -> tuple[Tensor, list[tuple[str, bool, int]]]:
        """Return every column and row of ``size`` entries, (size, M), with the tensors they come from and how many of each."""
        if size not in self._columns:
            parts, origins = [], []
            matrices = {name: tensor for name, tensor in self.state.items() if tensor.ndim == 2 and size in tensor.shape}
            if sum(tensor.numel() for tensor in matrices.values()) > MOST_COPIED:  # a large model: its first blocks
                matrices = {name: tensor for name, tensor in matrices.items() if name.startswith(("h.0.", "h.1."))}
            for name, tensor in matrices.items():
                for one, row in ((tensor, False), (tensor.t(), True)):
                    if one.shape[0] == size:
                        parts.append(one)
                        origins.append((name, row, one.shape[1]))
            self._columns[size] = torch.cat(parts, 1), origins
        return self._columns[size]

    def source(self, size: int, number: int) -> ColumnSource:
        for name, row, count in self.columns(size)[1]:
            if number < count:
                return ColumnSource(name, row, number)
            number -= count
        raise IndexError

    @cached_property
    def vectors(self) -> dict[str, Tensor]:
        """Biases and norms' weights, and the thirds of c_attn's biases."""
        out = {name: tensor for name, tensor in self.state.items() if tensor.ndim == 1}
        for name, tensor in list(out.items()):
            if name.endswith("c_attn.bias"):
                out |= {f"{name} ({letter})": third for letter, third in zip("qkv", tensor.chunk(3), strict=True)}
        return out


class Linear:
    """One linear layer: the tensor ``name`` of the checkpoint, of which ``part`` uses ``weight`` and ``bias``."""

    def __init__(
        self,
        library: Library,
        name: str,
        part: str,
        weight: Tensor,
        bias: Tensor,
        config: GPT2Config,
        check: Callable[[], None],
    ) -> None:
        self.library, self.name, self.part, self.weight, self.bias = library, name, part, weight, bias
        self.config, self.check = config, check
        self.where = part if part in ("attn.q", "attn.k", "attn.v") else f"{part}.weight" if part != "logits" else part

    def fits(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Yield what the layer computed from ``x`` to give ``seen`` at ``rows``."""
        for family in (self._scaled, self._bias, self._columns, self._rounded):
            self.check()
            yield from family(seen, x, rows)
        yield from filter(None, [self.unknown(seen, x, rows)])

    def fault(self, id: str, words: str, leaf: str = "") -> Cause:
        return Cause.at(id, self.where.replace(".weight", f".{leaf}") if leaf else self.where, words)

    def _scaled(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        product, bias = x @ self.weight, self.bias.expand_as(seen.value)
        terms = {"the product": product, "the bias": bias} if bool(self.bias.any()) else {"the product": product}
        if x.shape == seen.value.shape:
            terms["the layer's input"] = x
        if (found := combined(seen.value, terms, rows, seen)) is None:
            return
        factors, fit = found
        more: tuple[Cause, ...] = ()
        one, times = factors.get("the product", 0.0), factors.get("the bias", 0.0)
        words = f"its result is {formula(factors)}"
        if one == 1 and len(factors) + (times == 0) == 2 and "the layer's input" not in factors:
            words = "no bias is added" if not times else f"the bias is added {times:g} times"
            fault = self.fault("extra-bias" if times > 1 else "missing-bias" if not times else "wrong-tensor", words, "bias")
        elif not one and "the layer's input" not in factors:
            fault = self.fault("not-loaded", "the weight is zero, as a fresh array is")
        elif not one:
            id = "output-projection-missing" if self.part == "attn.c_proj" else "not-loaded"
            fault = self.fault(id, f"{words}: there is no product with the weight")
        elif factors.get("the layer's input") == one == 1:
            words = "the layer's input is added to its result"
            fault = self.fault("output-projection-missing" if self.part == "attn.c_proj" else "wrong-tensor", words)
            if not times and "the bias" in terms:
                more = (self.fault("missing-bias", "no bias is added", "bias"),)
        else:
            id = (
                "residual-scaled"
                if self.part.endswith("c_proj")
                else "logits-scaled"
                if self.part == "logits"
                else "wrong-tensor"
            )
            fault = self.fault(id, words)
        yield from seen.fits(fit.value, rows, fault, *more)

    def _bias(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Another bias: what is added is the same at every token."""
        product = x @ self.weight
        added = (seen.value - product)[rows].mean(0)
        if distinct(x[rows]) < 2 or seen.fitted(product + added, rows) is None:
            return
        loose = seen.bound * float(seen.value.square().mean().sqrt()) + float(seen.slack.max())
        left_out = (added.abs() <= loose) & (self.bias.abs() > loose)
        if bool(left_out.any()) and bool((((added - self.bias).abs() <= loose) | left_out).all()):
            words = f"columns {ranges(left_out)} have no bias"
            value = product + torch.where(left_out, 0.0, self.bias)
            yield from seen.fits(value, rows, self.fault("missing-bias", words, "bias"))
        words, value = self.named_bias(added, loose)
        yield from seen.fits(product + value, rows, self.fault("wrong-tensor", words, "bias"))

    def named_bias(self, added: Tensor, loose: float) -> tuple[str, Tensor]:
        """Return what a bias ``added`` (O,) is, in words, and its exact values, if it is one of the checkpoint's."""
        for name, one in self.library.vectors.items():
            if one.shape == added.shape and float((added - one).abs().max()) <= loose:
                return f"the bias is the checkpoint's {name}", one
        ordered = self.bias.sort().values
        if float((added.sort().values - ordered).abs().max()) <= loose:
            order = torch.cdist(added[:, None], self.bias[:, None]).argmin(1)
            return f"the bias is read in another order: {permutation(order)}", self.bias[order]
        return "the bias is not the checkpoint's", added

    def _columns(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Columns that are others of the checkpoint: in another order, of another tensor, rows for columns."""
        inputs, wanted = x[rows], seen.value[rows]
        library, _ = self.library.columns(x.shape[-1])
        if distinct(inputs) < 4 or library.shape[1] * wanted.shape[1] * len(inputs) > MOST:
            return
        made = inputs @ library
        made, wanted = made - made.mean(0), wanted - wanted.mean(0)  # the bias is not known
        nearest, numbers = (one.T for one in torch.cdist(wanted.T, made.T).topk(2, 1, largest=False))
        size = float(seen.value.square().mean().sqrt())
        loose = 2 * (seen.slack[rows].amax(0) + seen.bound * size) * len(inputs) ** 0.5
        fits = (nearest[0] <= loose) & ~(nearest[1] <= loose)  # where several columns fit, none is known
        if float(fits.double().mean()) < LEAST_MATCHED:
            return
        sources = [self.library.source(x.shape[-1], int(n)) for n in numbers[0]]
        if all(self._is_own(n, one) for n, (one, fit) in enumerate(zip(sources, fits.tolist(), strict=True)) if fit):
            return
        weight = library[:, numbers[0]]
        unknown = ~fits
        weight = torch.where(unknown, 0.0, weight)
        bias = (seen.value[rows] - inputs @ weight).mean(0)
        fault = self._described([s for s, fit in zip(sources, fits.tolist(), strict=True) if fit], int(unknown.sum()))
        value = x @ weight + bias
        value = torch.where(unknown, seen.value, value)
        yield from seen.fits(value, rows, fault)

    def _is_own(self, number: int, one: ColumnSource) -> bool:
        """Return whether a column is the layer's own one of this number."""
        first = {"attn.k": 1, "attn.v": 2}.get(self.part, 0) * self.weight.shape[1]
        return one == ColumnSource(self.name, self.part == "logits", first + number)

    def _described(self, sources: list[ColumnSource], unknown: int) -> Cause:
        name, row = Counter((one.name, one.row) for one in sources).most_common(1)[0][0]
        order = permutation(torch.tensor([one.number for one in sources if (one.name, one.row) == (name, row)]))
        row = row != (self.part == "logits")  # the head multiplies by rows of wte
        where = f"{name}{', its rows as columns' if row else ''}"
        rest = f", and {unknown} columns are none of the checkpoint's" if unknown else ""
        share = {"attn.q": 0, "attn.k": 1, "attn.v": 2}.get(self.part)
        if name != self.name:
            words = f"the weight's columns are those of {where}: {order}{rest}"
            return self.fault("wrong-tensor", words)
        if row:
            return self.fault("transposed", f"the weight is used transposed: columns are {where}, {order}{rest}")
        words = f"the weight's columns are in another order: {order}{rest}"
        if share is None:
            return self.fault("wrong-tensor", words)
        width = self.config.n_embd
        thirds = Counter(one.number // width for one in sources)
        if len(thirds) == 1 and share not in thirds:
            return Cause.at("qkv-order", "attn", f"{self.part} is computed with the columns of {'qkv'[next(iter(thirds))]}")
        return Cause.at("head-layout", "attn.c_attn", words)

    def _rounded(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """A weight in fewer bits, first as other weights are."""
        if self.likeness(seen, rows) < ALIKE:
            return
        every = quantised(self.weight)
        for words, make in sorted(every, key=lambda one: one[0] != self.library.rounding):
            self.check()
            fault = self.fault("reduced-precision", f"the weight holds the checkpoint's values {words}")
            if (fit := seen.mostly(x @ make() + self.bias, rows, fault)) is not None:
                self.library.rounding = words
                yield fit

    def unknown(self, seen: Observed, x: Tensor, rows: Tensor) -> Fit | None:
        """Return the fit of weights that are not the checkpoint's in any known way, for a value that what follows confirms.

        With more tokens than inputs, the value must be linear in ``x``. With fewer, every value is: so it must be unlike
        GPT-2's, and tokens that are similar in ``x`` must be similar in it: a product with a matrix keeps that, and what mixes
        tokens does not.
        """
        inputs, wanted = torch.nn.functional.pad(x[rows], (0, 1), value=1.0), seen.value[rows]
        if not len(inputs):
            return None
        if distinct(inputs) <= inputs.shape[1]:
            if abs(self.likeness(seen, rows)) > ALIKE or not keeps_angles(x[rows], wanted):
                return None
        else:
            made = inputs @ torch.linalg.lstsq(inputs, wanted).solution
            if not bool(seen.agrees(seen.right.masked_scatter(rows[..., None], made))[rows].all()):
                return None
        like = f"its results are like GPT-2's with a cosine of {self.likeness(seen, rows):.2f}"
        id, words = ("untied-head", "the head has weights other than wte's") if self.part == "logits" else ("not-loaded", UNKNOWN)
        fault = self.fault(id, f"{words}: {like}")
        return seen.fitted(seen.value, rows, fault)

    def likeness(self, seen: Observed, rows: Tensor) -> float:
        """Return the cosine of the result and GPT-2's, each without its mean."""
        one, other = (value[rows].flatten() - value[rows].mean() for value in (seen.value, seen.right))
        return float(one @ other / (one.norm() * other.norm()).clamp(min=1e-300))


def permutation(order: Tensor) -> str:
    """Return an order of entries in words: where the first ones come from."""
    shown = ", ".join(map(str, order[:6].tolist()))
    if len(order) > 1 and bool((order.diff() == 1).all()):
        return f"{int(order[0])} to {int(order[-1])}"
    if len(order) > 1 and bool((order.diff() == -1).all()):
        return "backwards"
    return f"the first are {shown}"
