"""Read off products which operands or results a program rounds: bfloat16 products, integers of 8 bits with a scale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import Tensor

from gpt2.port.diagnosis.search import Fault, Formula
from gpt2.port.dump.fits.observed import Fit, Observed
from gpt2.port.dump.fits.rounding import in_eight_bits, roundings

EXACT = 0.01  # share of a departure that a rounding leaves if it is the program's own
LIKELY = 0.4  # share of a departure that a rounding may leave on these
PROBED = 4  # tokens on which a rounding is tried first


def same(x: Tensor) -> Tensor:
    return x


class Product(NamedTuple):
    """A product of rounded operands: in words; what happens to the input, the weight, the result and the bias.

    ``held``: how the weight alone is rounded, in words.
    """

    words: str
    input: Formula
    weight: Callable[[], Tensor]
    result: Formula
    held: str = ""
    bias: Formula = same


def products(weight: Tensor, stored: Iterator[tuple[str, Callable[[], Tensor]]]) -> Iterator[Product]:
    """Yield the ways to multiply by ``weight`` (I, O) in fewer bits; ``stored``: that weight in fewer bits, in words."""

    def own() -> Tensor:
        return weight

    for words, rounded in roundings():
        turned = partial(rounded, weight)
        yield Product(f"the operands of products are rounded {words}", rounded, turned, same)
        words_of_all = f"the operands and the results of products are rounded {words}"
        yield Product(words_of_all, rounded, turned, rounded, "", rounded)
        yield Product(words_of_all, rounded, turned, rounded)
        yield Product(f"its result is rounded {words}", same, own, rounded)
        yield Product(f"weight and bias hold the checkpoint's values rounded {words}", same, turned, same, words, rounded)
        yield Product(f"its input is rounded {words}", rounded, own, same)
    for scale, axes in (("each token", (-1,)), ("all tokens", ())):
        yield Product(f"its result is rounded to 8 bits with a scale for {scale}", same, own, partial(in_eight_bits, axes))
    for words, make in stored:
        yield Product(f"the weight holds the checkpoint's values {words}", same, make, same, words)
    columns, rows, whole = (partial(in_eight_bits, axes, weight) for axes in ((0,), (1,), (0, 1)))
    for scale, axes in (("each token", (-1,)), ("all tokens", ())):
        rounded = partial(in_eight_bits, axes)
        for words, made in (
            ("", own),
            (", the weight with one for each column", columns),
            (", the weight with one for each row", rows),
            (", the weight with one for all", whole),
        ):
            yield Product(f"the input is rounded to 8 bits with a scale for {scale}{words}", rounded, made, same)


def rounded_fit(
    seen: Observed, x: Tensor, bias: Tensor, rows: Tensor, ways: Iterator[Product], in_time: Callable[[], None]
) -> tuple[Product, Fit] | None:
    """Return the way to multiply in fewer bits that gives ``seen``, and its fit (without a fault)."""
    at, best = rows.nonzero()[:PROBED].unbind(1), 1.0
    nearest: tuple[Product, Fit] | None = None
    for way in ways:
        in_time()
        weight, given, added = way.weight(), way.input(x), way.bias(bias)
        if (left := seen.unexplained(way.result(given[at] @ weight + added), at)) < min(LIKELY, 2 * best):
            predicted = way.result(given @ weight + added)
            if (fit := seen.fitted(predicted, rows)) is not None and left < LIKELY:
                return way, fit
            every = rows.nonzero().unbind(1)
            left = seen.unexplained(predicted[every], every)
            if left < best and (fit := seen.mostly(predicted, rows)) is not None:
                best, nearest = left, (way, fit)
                if left < EXACT:
                    break
    return nearest


def rounded_mixture(
    seen: Observed, rows: Tensor, make: Callable[[Formula], Tensor], in_time: Callable[[], None], scores: bool = False
) -> Iterator[Fit]:
    """Yield fits of an attention's product whose operands are rounded; ``make`` computes it with rounded operands."""
    for words, rounded in roundings():
        in_time()
        made = make(rounded)
        for text, value in (("operands", made), ("operands and the results", made if scores else rounded(made))):
            fault = Fault("reduced-precision", "attn", f"the {text} of products are rounded {words}")
            yield from filter(None, [seen.mostly(value, rows, fault)])
        if not scores:
            fault = Fault("reduced-precision", "attn", f"its result is rounded {words}")
            value = rounded(seen.right)
            yield from filter(None, [seen.mostly(value, rows, fault)])
