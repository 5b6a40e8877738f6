"""Read off a linear layer's input and result which weights, which bias and which input it multiplied.

Shapes: x (B, T, I); the result y (B, T, O); weights W (I, O); biases b (O,). R are the rows that are not GPT-2's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from gpt2.port.diagnosis import entries
from gpt2.port.diagnosis.rotary import rotation
from gpt2.port.diagnosis.scores import Layout
from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.fits.elsewhere import other_input, read_elsewhere, rescaled
from gpt2.port.dump.fits.library import Library, Source, permutation, place_of
from gpt2.port.dump.fits.observed import Fit, Observed, combined, distinct, formula, keeps_angles, nice
from gpt2.port.dump.fits.partial import ranges
from gpt2.port.dump.fits.precision import products, rounded_fit
from gpt2.port.dump.fits.rounding import quantised

MOST = 2**29  # products of columns that are compared
MOST_TOKENS = 64  # that a sum of heads is fitted to
LEAST_MATCHED = 0.4  # of the columns of a weight, to say where they come from
ALIKE = 0.5  # cosine of a result and GPT-2's, from which on the weight may be a rounded one
Family = Callable[[Observed, Tensor, Tensor], Iterator[Fit]]


class Linear:
    """One linear layer: the tensor ``name`` of the checkpoint, columns ``first`` to ``first + O`` of it.

    ``inputs``: other tensors that it may have taken by mistake, in words.
    """

    def __init__(
        self, library: Library, name: str, part: str, weight: Tensor, bias: Tensor, inputs: Mapping[str, Tensor]
    ) -> None:
        self.library, self.name, self.part, self.weight, self.bias, self.inputs = library, name, part, weight, bias, inputs
        self.families = self._scaled, self._inputs, self._bias, self._columns, self._misread, self._heads
        self.where = part if part in ("attn.q", "attn.k", "attn.v") else f"{part}.weight" if part != "logits" else part

    def fit(self, seen: Observed, x: Tensor, rows: Tensor) -> Fit | None:
        """Return what the layer computed from ``x`` to give ``seen`` at ``rows``."""
        first: tuple[Family, ...] = (*self.families, self._turned, self._rounded)
        last: tuple[Family, ...] = (
            partial(rescaled, self),
            self._part,
            self._function,
            partial(other_input, self),
            partial(read_elsewhere, self),
        )
        for family in (*first, *last):
            self.library.in_time()
            if (fit := next(iter(family(seen, x, rows)), None)) is not None:
                return fit
        return None

    def fault(self, id: str, words: str, leaf: str = "") -> Fault:
        return Fault(id, self.where.replace(".weight", f".{leaf}") if leaf else self.where, words, leaf=leaf)

    def cut(self, whole: Tensor) -> Tensor:
        """Return this layer's share (I, O) of the checkpoint's tensor."""
        if self.part == "logits":
            return whole.T
        share = {"attn.q": 0, "attn.k": 1, "attn.v": 2}.get(self.part)
        return whole if share is None else whole.chunk(3, 1)[share]

    def roundings(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yield this layer's weight stored in fewer bits, each way in words; the way that other weights have comes first."""
        every = quantised(self.library.state[self.name])
        for words, make in sorted(every, key=lambda one: one[0] != self.library.rounding):
            yield words, partial(self._made, make)

    def _made(self, make: Callable[[], Tensor]) -> Tensor:
        return self.cut(make())

    def elsewhere(self, layer: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Yield weights of this shape from elsewhere, in words: other matrices, or all blocks' read with a wrong stride."""
        for name, tensor in self.library.state.items():
            thirds = tensor.chunk(3, 1) if name.endswith("c_attn.weight") else ()
            for part, one in (
                (name, tensor),
                *((f"{name} ({letter})", third) for letter, third in zip("qkv", thirds, strict=False)),
            ):
                if one.shape == self.weight.shape and not torch.equal(one, self.weight):
                    yield f"is the checkpoint's {part}", partial(torch.clone, one)
        whole, width = self.library.state[self.name], self.library.config.n_embd
        count, blocks = whole.numel(), self.library.config.n_layer
        for transposed, stride in itertools.product((False, True), (width, 4 * width, *(n * width**2 for n in (1, 3, 4)))):
            start = layer * stride
            if layer and stride != count and start < count * blocks:
                words = f"is read from all blocks' weights, one after the other, with a stride of {stride}, not {count}"
                yield words, partial(self._from, start, transposed)

    def _from(self, start: int, transposed: bool) -> Tensor:
        """Return this layer's weight read from entry ``start`` of those of all blocks, one behind the other."""
        whole = self.library.state[self.name]
        pair = next(itertools.islice(self.library.pairs(self.name, transposed), start // whole.numel(), None))
        read = pair[start % whole.numel() :][: whole.numel()]
        return self.cut(read.view(whole.shape[::-1]).T if transposed else read.view(whole.shape))

    # Families

    def _scaled(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        product, bias = x @ self.weight, self.bias.expand_as(seen.value)
        terms = {"the product": product, "the bias": bias} if bool(self.bias.any()) else {"the product": product}
        if x.shape == seen.value.shape:
            terms["the layer's input"] = x
        if (found := combined(seen.value, terms, rows, seen)) is None:
            return
        factors, fit = found
        more: tuple[Fault, ...] = ()
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

    def _inputs(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        for words, other in self.inputs.items():
            if other.shape == x.shape:
                for bias in (self.bias, torch.zeros_like(self.bias)):
                    missing = Fault(
                        "norm-missing", "ln_1" if self.part.startswith("attn") else "ln_2", f"the layer's input is {words}"
                    )
                    fault = missing if "stream" in words else Fault("wrong-tensor", self.part, f"the layer's input is {words}")
                    yield from seen.fits(other @ self.weight + bias, rows, fault)

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
        flat = torch.cat([*self.library.vectors.values()] * 2)
        if (number := place_of(added, flat, loose)) is not None:
            value, entry = flat[number : number + len(added)], number % (len(flat) // 2)
            for name, one in self.library.vectors.items():
                if entry < len(one):
                    behind = f", from entry {entry} on" if entry else ""
                    return f"the bias is the checkpoint's {name}{behind}", value
                entry -= len(one)
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
        weight = library[:, numbers[0]]
        unknown = ~fits
        weight = torch.where(unknown, 0.0, weight)
        bias = (seen.value[rows] - inputs @ weight).mean(0)
        fault = self._described([s for s, fit in zip(sources, fits.tolist(), strict=True) if fit], int(unknown.sum()))
        value = x @ weight + bias
        value = torch.where(unknown, seen.value, value)
        yield from seen.fits(value, rows, fault)

    def _described(self, sources: list[Source], unknown: int) -> Fault:
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
        width = self.library.config.n_embd
        thirds = Counter(one.number // width for one in sources)
        if len(thirds) == 1 and share not in thirds:
            return Fault("qkv-order", "attn", f"{self.part} is computed with the columns of {'qkv'[next(iter(thirds))]}")
        return Fault("head-layout", "attn.c_attn", words)

    def _misread(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """The checkpoint's tensor reshaped, transposed or cut otherwise, as people do."""
        whole, config = self.library.state[self.name], self.library.config
        if self.part == "logits" or distinct(x[rows]) < 2:
            return
        own = ((self.where, one, one.tensor) for one in entries.misread(self.name.split(".", 2)[2], self.weight, config))
        cut = entries.cut_c_attn(whole) if self.name.endswith("c_attn.weight") else ()
        for where, one, weight in (*own, *(("attn.c_attn.weight", one, self.cut(one.tensor)) for one in cut)):
            product = x @ weight
            for bias in (self.bias, (seen.value - product)[rows].mean(0)):
                yield from seen.fits(product + bias, rows, Fault(one.id, where, f"the weight {one.words}"))

    def _heads(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Rows of the weight in another order, by heads: the result is a sum of heads, each with another's rows."""
        heads, width = self.library.config.n_head, self.library.config.n_embd
        if x.shape[-1] != width or self.part != "attn.c_proj":
            return
        parts, blocks = x.unflatten(-1, (heads, -1)), self.weight.unflatten(0, (heads, -1))
        columns = torch.einsum("nhk,gkd->ndhg", parts[rows][:MOST_TOKENS], blocks).flatten(2).flatten(0, 1)
        wanted = (seen.value - self.bias)[rows][:MOST_TOKENS].flatten()
        if len(columns) > 2 * columns.shape[1]:
            factors = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0]
            table = torch.tensor([nice(float(f), seen.loose) for f in factors], dtype=x.dtype).view(heads, heads)
            value = x @ torch.einsum("hg,gkd->hkd", table, blocks).flatten(0, 1) + self.bias
            taken = [
                f"head {h} with "
                + (
                    " + ".join(f"{float(table[h, g]):g} rows of head {g}" for g in table[h].nonzero().flatten().tolist())
                    or "nothing"
                )
                for h in range(heads)
                if not (table[h, h] == 1 and int((table[h] != 0).sum()) == 1)
            ]
            fault = Fault("head-layout", "attn.c_proj.weight", f"the projection multiplies {'; '.join(taken[:3])}")
            yield from seen.fits(value, rows, fault)
        if x.shape[-1] <= seen.value.shape[-1] and int(rows.sum()) > 1:  # does the result show the input, in another order?
            solved = torch.linalg.lstsq(self.weight.T, (seen.value - self.bias)[rows].T).solution.T
            order = torch.cdist(solved.T.contiguous(), x[rows].T.contiguous()).argmin(1)
            fault = Fault(
                "head-layout", "attn.c_proj.weight", f"the features that it multiplies are in another order: {permutation(order)}"
            )
            yield from seen.fits(x[..., order] @ self.weight + self.bias, rows, fault)

    def _rounded(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Weights in fewer bits, and numbers on the way."""
        if self.likeness(seen, rows) < ALIKE:
            return
        ways = products(self.weight, self.roundings())
        if self.library.product:
            ways = chain((way for way in products(self.weight, iter(())) if way.words == self.library.product), ways)
        if (found := rounded_fit(seen, x, self.bias, rows, ways, self.library.in_time)) is not None:
            way, fit = found
            self.library.rounding = way.held or self.library.rounding
            self.library.product = "" if way.held else way.words
            where = self.where if way.held else self.part
            yield fit._replace(faults=(Fault("reduced-precision", where, way.words),))

    def _turned(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Queries or keys that are turned by their position before they are recorded."""
        if self.part not in ("attn.q", "attn.k"):
            return
        own, made = (Layout.RIGHT.split(one, self.library.config.n_head) for one in (seen.right, seen.value))
        if rotation(own, made, max(seen.bound, 3 * float(seen.slack.max() / seen.value.abs().max()))) is not None:
            fault = Fault("rotary-positions", "attn", f"{self.part[-1]} is turned by its position, by rotary embedding")
            yield from seen.fits(seen.value, rows, fault)

    def _part(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Only the first or the last inputs are multiplied."""
        wanted = (seen.value - self.bias)[rows][0]
        terms = x[rows][0, :, None] * self.weight
        for what, sums in (("first", terms.cumsum(0)), ("last", terms.flip(0).cumsum(0))):
            count = 1 + int((sums - wanted).abs().amax(1).argmin())
            kept = torch.zeros_like(self.weight)
            some = slice(0, count) if what == "first" else slice(len(kept) - count, None)
            kept[some] = self.weight[some]
            words = f"only the {what} {count} of {len(kept)} inputs are multiplied; the weight's other rows are zero"
            yield from seen.fits(x @ kept + self.bias, rows, self.fault("not-loaded", words))

    def _function(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Logits that are a function of GPT-2's own, one by one, such as a soft cap."""
        order = seen.right[rows].flatten().argsort()
        made, right = (one[rows].flatten()[order] for one in (seen.value, seen.right))
        loose = 4 * (float(seen.slack.max()) + seen.bound * float(made.square().mean().sqrt()))
        clear = float(made[-1] - made[0]) > 100 * loose and float((made - right).abs().max()) > 10 * loose
        if self.part == "logits" and clear and bool((made.diff() >= -loose).all()):
            some = range(0, len(order), max(1, len(order) // 4))
            at = ", ".join(f"{float(right[i]):.4g} becomes {float(made[i]):.4g}" for i in some)
            words = f"each logit is a function of GPT-2's own (such as a soft cap): {at}"
            yield from seen.fits(seen.value, rows, self.fault("logits-scaled", words))

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
        fault = self.fault("not-loaded", f"the weight is not the checkpoint's in any known way: {like}")
        return seen.fitted(seen.value, rows, fault)

    def likeness(self, seen: Observed, rows: Tensor) -> float:
        """Return the cosine of the result and GPT-2's, each without its mean."""
        one, other = (value[rows].flatten() - value[rows].mean() for value in (seen.value, seen.right))
        return float(one @ other / (one.norm() * other.norm()).clamp(min=1e-300))
