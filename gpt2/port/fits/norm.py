"""Read off a norm's input and result what it multiplied and added, and the numbers of its divisor.

Shapes: x and the result (B, T, D); weight and bias (D,).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gpt2.port.alternatives.norm_formulas import layer_norm
from gpt2.port.alternatives.rounding import roundings
from gpt2.port.fits.linear import permutation
from gpt2.port.fits.observed import Fit, Observed, distinct, nice
from gpt2.port.terms.causes import Cause

SAME = 1e-3  # relative difference of factors that are one
SHARP = 1e-5  # relative difference of a weight that was fitted, from which on it may be a rounded one
LEAST = 0.05  # the least weight, of the largest, through which a norm's own result is read


class Norm:
    """The norm ``part`` with ``weight`` and ``bias``; ``vectors``: all others that it may hold."""

    def __init__(self, part: str, weight: Tensor, bias: Tensor, eps: float, vectors: Mapping[str, Tensor]) -> None:
        self.part, self.weight, self.bias, self.eps, self.vectors = part, weight, bias, eps, vectors

    def fits(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Yield what the norm computed from ``x`` to give ``seen`` at ``rows``."""
        yield from self._affine(seen, x, rows)
        yield from self._scalars(seen, x, rows)

    def _fault(self, id: str, words: str) -> Cause:
        return Cause.at(id, self.part, words)

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
            if not faults:
                continue
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
        return "not-loaded", (f"the {leaf} does not hold the checkpoint's values", fitted)

    def _scalars(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Another divisor of the variance, another epsilon, another mean, as numbers that are the same for all tokens."""
        weight, bias = self.weight, self.bias
        used = weight.abs() > LEAST * weight.abs().max()
        z, inner = ((seen.value - bias) / torch.where(used, weight, 1.0))[..., used], x[..., used]
        middle = inner - inner.mean(-1, keepdim=True)
        factor = (middle * z).sum(-1) / middle.square().sum(-1).clamp(min=1e-300)
        shift = z.mean(-1) - factor * inner.mean(-1)
        general = (x * factor[..., None] + shift[..., None]) * weight + bias
        if seen.fitted(general, rows) is None:
            return
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
            faults: list[Cause] = []
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
            if faults:
                yield from seen.fits(value, rows, *faults)
        words = "each token is not divided by its own standard deviation, but by something else"
        yield from seen.fits(general, rows, self._fault("layernorm-not-normalising", words))
