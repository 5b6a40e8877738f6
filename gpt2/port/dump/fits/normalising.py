"""Read off a norm's input and result over what it ran, and what it multiplied and added.

Shapes: x and the result (B, T, D); weight and bias (D,); per token (B, T).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.port.alternatives.moments import OWN, WAYS, Moments, every_reading
from gpt2.port.diagnosis.norms import EPSILONS, layer_norm
from gpt2.port.diagnosis.search import Fault
from gpt2.port.dump.fits.axes import first_features
from gpt2.port.dump.fits.library import permutation, place_of
from gpt2.port.dump.fits.observed import Fit, Observed, distinct, nice
from gpt2.port.dump.fits.rounding import roundings

SAME = 1e-3  # relative difference of factors that are one
MOST_PAIRS = 2**22  # of tokens that are compared at once
SHARP = 1e-5  # relative difference of a weight that was fitted, from which on it may be a rounded one
NEAR = 0.05  # relative error of a root that was meant to be right
MOST_ROWS = 64  # whose deviations are compared first
LEAST = 0.05  # the least weight, of the largest, through which a norm's own result is read


class Scaled(NamedTuple):
    """A norm's result as (factor x + shift) weight + bias, with a factor and a shift for each token; ``also``: the faults of
    this weight and bias."""

    x: Tensor
    factor: Tensor
    shift: Tensor
    weight: Tensor
    bias: Tensor
    also: tuple[Fault, ...]


class Norm:
    """The norm ``part`` with ``weight`` and ``bias``; ``vectors``: all others that it may hold; ``inputs``: other inputs.

    ``heads``: of the model.
    """

    def __init__(
        self,
        part: str,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        vectors: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        heads: int = 1,
    ) -> None:
        self.part, self.weight, self.bias, self.eps, self.vectors, self.inputs = part, weight, bias, eps, vectors, inputs
        self.heads = heads

    def fit(self, seen: Observed, x: Tensor, rows: Tensor) -> Fit | None:
        """Return what the norm computed from ``x`` to give ``seen`` at ``rows``."""
        for family in (self._inputs, self._affine, self._statistics):
            if (fit := next(iter(family(seen, x, rows)), None)) is not None:
                return fit
        return None

    def _fault(self, id: str, words: str) -> Fault:
        return Fault(id, self.part, words)

    def _affine(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Another weight or bias behind the right norm, or behind one that does not subtract the mean."""
        if distinct(x[rows]) < 4:
            return
        for words, normed in (
            ("", layer_norm(x, eps=self.eps)),
            ("rms", layer_norm(x, eps=self.eps, centred=False, square=True)),
        ):
            a, b = normed[rows], seen.value[rows]
            middle = a - a.mean(0)
            weight = (middle * (b - b.mean(0))).sum(0) / middle.square().sum(0).clamp(min=1e-300)
            bias = b.mean(0) - weight * a.mean(0)
            if seen.fitted(normed * weight + bias, rows) is None:
                continue
            (id, gain), (other, shift) = self._named(weight, self.weight, "weight"), self._named(bias, self.bias, "bias")
            faults = [self._fault("rmsnorm", "it does not subtract the mean, and divides by the root mean square")] * bool(words)
            plain = bool(id) and bool((gain[1] == 1).all())
            if plain and other == "missing-bias":
                other = ""
            faults += [self._fault(one, text) for one, text in ((id, gain[0]), (other, shift[0])) if one]
            for values in ((gain[1], shift[1]), (weight, bias)):
                if (fit := seen.fitted(normed * values[0] + values[1], rows, *faults)) is not None:
                    yield fit

    def _named(self, fitted: Tensor, own: Tensor, leaf: str) -> tuple[str, tuple[str, Tensor]]:
        """Return the cause and words for a fitted weight or bias, and its exact values; no cause if it is the norm's own."""

        def near(one: Tensor | float) -> bool:
            return float((fitted - one).abs().max()) <= SAME * max(float(fitted.abs().max()), 0.1)

        off = float((fitted - own).abs().max())
        for words, rounded in roundings() if off > SHARP * float(own.abs().max()) else ():
            if float((fitted - rounded(own)).abs().max()) < off / 10:
                return "reduced-precision", (f"the {leaf} holds the checkpoint's values rounded {words}", rounded(own))
        if near(own):
            return "", ("", own)
        plain = torch.full_like(own, 1.0 if leaf == "weight" else 0.0)
        if near(plain):
            id = "layernorm-without-affine" if leaf == "weight" else "missing-bias"
            return id, (f"the {leaf} is not applied", plain)
        ratio = nice(float((fitted * own).sum() / own.square().sum().clamp(min=1e-300)), SAME)
        if leaf == "bias" and near(self.weight * own):
            return "layernorm-without-affine", ("the bias is added before the weight is applied", self.weight * own)
        for words, value in (("one is added to the weight", own + 1), ("the weight is applied twice", own * own)):
            if leaf == "weight" and near(value):
                return "layernorm-without-affine", (words, value)
        width = len(own)
        if near(own[0]):
            return "wrong-tensor", (f"the first number of the {leaf} serves all features", own[:1].expand_as(own))
        if leaf == "weight" and near(ratio * own):
            for n in (1, 2, -1, -2):
                if abs(ratio - ((width - n) / width) ** 0.5) < SAME / 10:
                    return "layernorm-unbiased-variance", (f"the variance is divided by D - {n}", ratio * own)
        if near(ratio * own):
            id = "extra-bias" if leaf == "bias" and ratio > 1 else "wrong-tensor"
            return id, (f"the {leaf} is multiplied by {ratio:.6g}", ratio * own)
        for name, other in self.vectors.items():
            if other.shape == own.shape and near(other):
                id = "norms-swapped" if "ln_" in name and name.endswith(leaf) else "wrong-tensor"
                return id, (f"the {leaf} is that of {name}", other)
        if float((fitted.sort().values - own.sort().values).abs().max()) <= SAME * float(own.abs().max()):
            order = torch.cdist(fitted[:, None], own[:, None]).argmin(1)
            return "wrong-tensor", (f"the {leaf} is read in another order: {permutation(order)}", own[order])
        flat = torch.cat(list(self.vectors.values()))
        if (at := place_of(fitted, flat, SAME * float(fitted.abs().max()))) is not None:
            return "wrong-tensor", (
                f"the {leaf} is read from another place of the checkpoint's vectors",
                flat[at : at + len(own)],
            )
        return "not-loaded", (f"the {leaf} does not hold the checkpoint's values", fitted)

    def _statistics(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Another mean or deviation: each token's result is the input, times a number, plus a number."""
        ones, zeros = torch.ones_like(self.weight), torch.zeros_like(self.bias)
        for weight, bias, also in (
            (self.weight, self.bias, ()),
            (ones, zeros, (self._fault("layernorm-without-affine", "neither weight nor bias is applied"),)),
            (self.weight, zeros, (self._fault("missing-bias", "the norm's bias is not applied"),)),
        ):
            used = weight.abs() > LEAST * weight.abs().max()
            z, inner = ((seen.value - bias) / torch.where(used, weight, 1.0))[..., used], x[..., used]
            middle = inner - inner.mean(-1, keepdim=True)
            factor = (middle * z).sum(-1) / middle.square().sum(-1).clamp(min=1e-300)
            shift = z.mean(-1) - factor * inner.mean(-1)
            general = (x * factor[..., None] + shift[..., None]) * weight + bias
            for words, reading in every_reading(x.shape, self.heads).items():
                axis = () if words == OWN else (self._fault("layernorm-axis", words),)
                moments = reading(x)
                for normed, faults in self._divided(x, z, moments, rows, used):
                    if axis or faults:
                        yield from seen.fits(normed * weight + bias, rows, *axis, *faults, *also)
            if seen.fitted(general, rows) is None:
                continue
            for id, words, mean, variance in self._sets(x, factor, shift, rows):
                for eps in (self.eps, 0.0):
                    value = (x - mean) / (variance + eps).sqrt() * weight + bias
                    yield from seen.fits(value, rows, self._fault(id, words), *also)
            yield from self._scalars(seen, rows, Scaled(x, factor, shift, weight, bias, also))
            for words, mean, variance in first_features(x, -shift / factor, factor**-2 - self.eps, rows):
                value = (x - mean) / (variance + self.eps).sqrt() * weight + bias
                yield from seen.fits(value, rows, self._fault("layernorm-axis", words), *also)
            words = "each token is not divided by its own standard deviation, but by something else"
            off = (factor * (x.var(-1, correction=0) + self.eps).sqrt() - 1)[rows]
            if float(off.abs().max()) < NEAR:
                words = "the root of the variance is not exact (an approximation, or rounded): each token is multiplied by "
                words += f"1 {float(off.min()):+.2%} to 1 {float(off.max()):+.2%} times what it should be"
            yield from seen.fits(general, rows, self._fault("layernorm-not-normalising", words), *also)

    def _divided(
        self, x: Tensor, z: Tensor, moments: Moments, rows: Tensor, used: Tensor
    ) -> Iterator[tuple[Tensor, tuple[Fault, ...]]]:
        """Yield x normed by ``moments`` in the ways that give about ``z`` (of the ``used`` features), and the faults of the way.

        The variance times a number plus epsilon, or its root times a number plus epsilon, is what the result shows.
        """
        apart, spread = (one.expand_as(x)[rows][:MOST_ROWS][:, used] for one in (x - moments.mean, moments.variance))
        found = z[rows][:MOST_ROWS].abs()
        near: dict[bool, float] = {}
        for outside, power in ((False, 2), (True, 1)):
            columns = torch.stack([(spread if power == 2 else spread.sqrt()) * found**power, found**power], -1).flatten(0, 1)
            wanted = apart.abs().pow(power).flatten()
            gram = columns.T @ columns
            numbers = torch.linalg.pinv(gram, rtol=1e-14, hermitian=True) @ (columns.T @ wanted)
            if float((columns @ numbers - wanted).norm()) <= NEAR * float(wanted.norm()):
                near[outside] = float(numbers[1])
        for way in WAYS:
            fitted = near.get(way.outside, -1.0)
            short = (float(f"{fitted:.{digits}g}") for digits in (1, 2, 3))
            for eps in dict.fromkeys(
                (self.eps, *EPSILONS, *short, fitted) if fitted >= 0 else EPSILONS if way.outside in near else ()
            ):
                yield way.normed(x, moments, eps), tuple(way.faults(self.part, eps, self.eps))

    def _sets(self, x: Tensor, factor: Tensor, shift: Tensor, rows: Tensor) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        """Yield means and variances over sets of tokens: those that are scaled alike, or of one token."""
        mean, variance = x.mean(-1), x.var(-1, correction=0)
        count, first, second = (torch.zeros_like(mean) for _ in range(3))
        count[rows], first[rows], second[rows] = _alike(factor[rows], shift[rows], mean[rows], variance[rows])
        variances = second - first.square()
        if bool((count > 1).any()):
            whole = bool((count[rows] == int(rows.sum())).all())
            words = "the norm runs over all tokens together" if whole else "the norm runs over several tokens together"
            yield "layernorm-axis", words, first[..., None], variances[..., None]
        for at in range(1, x.shape[1] - 1 if rows.any() else 0):
            words = f"every token is normalised with the mean and the variance of token {at}"
            yield "layernorm-axis", words, mean[:, at, None, None], variance[:, at, None, None]
        for words, part in (("first half", x[..., : x.shape[-1] // 2]), ("second half", x[..., x.shape[-1] // 2 :])):
            text = f"the variance is that of the {words} of the features"
            yield "layernorm-axis", text, mean[..., None], part.var(-1, correction=0, keepdim=True)
            yield (
                "layernorm-axis",
                f"mean and variance are those of the {words} of the features",
                part.mean(-1, keepdim=True),
                part.var(-1, correction=0, keepdim=True),
            )

    def _scalars(self, seen: Observed, rows: Tensor, one: Scaled) -> Iterator[Fit]:
        """Another divisor of the variance, another epsilon, another mean, as numbers that are the same for all tokens."""
        x, factor, shift, weight, bias, also = one
        if distinct(x[rows]) < 3:
            return
        inverse = factor[rows] ** -2
        width = x.shape[-1]
        for id, what, spread in (("", "variance", x.var(-1, correction=0)), ("rmsnorm", "mean square", x.square().mean(-1))):
            columns = torch.stack([spread[rows], torch.ones_like(inverse)], 1)
            times, eps = torch.linalg.lstsq(columns, inverse[:, None]).solution[:, 0].tolist()
            if float((columns @ torch.tensor([times, eps], dtype=x.dtype) - inverse).abs().max()) > SAME * float(inverse.max()):
                continue
            if not LEAST < times < 1 / LEAST:
                continue
            mean = x.mean(-1, keepdim=True)
            centred = float((shift / factor + mean[..., 0])[rows].abs().max()) <= SAME * float(x.square().mean().sqrt())
            known = {width / (width - n): n for n in range(-3, 4)}
            times = next((one for one in known if abs(one - times) < SAME / 4), nice(times))
            eps = next(
                (e for e in (self.eps, 0.0, 1e-6, 1e-8, 1e-12, 1e-3, 1e-4, 1e-2, 0.1, 1.0) if abs(e - eps) <= 0.02 * e + 1e-7),
                eps,
            )
            faults = list(also)
            if id or not centred:
                faults.append(
                    self._fault(
                        "rmsnorm", f"it divides by the root of the {what}, and subtracts {'the' if centred else 'no'} mean"
                    )
                )
            if times != 1:
                words = (
                    f"the variance is divided by D - {known[times]}"
                    if times in known
                    else f"the {what} is multiplied by {times:.6g}"
                )
                faults.append(self._fault("layernorm-unbiased-variance", words))
            if abs(eps - self.eps) > 1e-9:
                faults.append(self._fault("layernorm-eps", f"epsilon is {eps:.4g}; the checkpoint's is {self.eps:g}"))
            value = (x - mean * centred) / (times * spread + eps).sqrt()[..., None] * weight + bias
            if len(faults) > len(also):
                yield from seen.fits(value, rows, *faults)

    def _inputs(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        def norm(value: Tensor) -> Tensor:
            return layer_norm(value, self.weight, self.bias, self.eps)

        none = self._fault(
            "final-norm-missing" if self.part == "ln_f" else "norm-missing", "there is no norm: the stream passes as it is"
        )
        yield from seen.fits(x, rows, none)
        twice = self._fault("extra-norm", "the norm is applied twice")
        yield from seen.fits(norm(norm(x)), rows, twice)
        before = self._fault("layernorm-not-normalising", "weight and bias are applied before the norm, not after it")
        yield from seen.fits(layer_norm(x * self.weight + self.bias, eps=self.eps), rows, before)
        for words, other in self.inputs.items():
            fault = Fault("residual-missing", "mid", f"the norm's input is {words}")
            yield from seen.fits(norm(other), rows, fault)


def _alike(factor: Tensor, shift: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each of N tokens how many are scaled like it, and the mean and the mean square of all their features.

    In parts: all pairs of 16 rows of 1,024 tokens at once are 6 GB.
    """
    parts = []
    for some in torch.arange(len(factor)).split(max(1, MOST_PAIRS // max(len(factor), 1))):
        near = (factor[some, None] - factor).abs() <= SAME * factor.abs()
        near &= (shift[some, None] - shift).abs() <= SAME * (shift.abs() + factor.abs())
        sums = near.double() @ torch.stack([torch.ones_like(mean), mean, variance + mean.square()], 1)
        parts.append(sums)
    count, first, second = torch.cat(parts).T
    return count, first / count.clamp(min=1), second / count.clamp(min=1)
