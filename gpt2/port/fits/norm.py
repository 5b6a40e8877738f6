"""Read off a norm's input and result what it multiplied and added, or the one number of its divisor.

Shapes: x and the result (B, T, D); weight and bias (D,).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gpt2.port.alternatives.norms import layer_norm
from gpt2.port.fits.observed import Fit, Observed, distinct, nice
from gpt2.port.terms.causes import Cause

SAME = 1e-3  # relative difference of factors that are one
LEAST = 0.05  # the least weight, of the largest, through which a norm's own result is read


class Norm:
    """The norm ``part`` with ``weight`` and ``bias``; ``vectors``: all others that it may hold."""

    def __init__(self, part: str, weight: Tensor, bias: Tensor, eps: float, vectors: Mapping[str, Tensor]) -> None:
        self.part, self.weight, self.bias, self.eps, self.vectors = part, weight, bias, eps, vectors

    def fits(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Yield what the norm computed from ``x`` to give ``seen`` at ``rows``."""
        yield from self._affine(seen, x, rows)
        yield from self._divided(seen, x, rows)

    def _affine(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Another weight or bias behind the right norm, or behind one that does not subtract the mean."""
        rms = Cause.at("rmsnorm", self.part, "it does not subtract the mean, and divides by the root mean square")
        for centred in (True, False) if distinct(x[rows]) >= 4 else ():
            normed = layer_norm(x, eps=self.eps, rms=not centred)
            a, b = normed[rows], seen.value[rows]
            middle = a - a.mean(0)
            weight = (middle * (b - b.mean(0))).sum(0) / middle.square().sum(0).clamp(min=1e-300)
            bias = b.mean(0) - weight * a.mean(0)
            if seen.fitted(normed * weight + bias, rows) is None:
                continue
            named = [self._named(weight, self.weight, "weight"), self._named(bias, self.bias, "bias")]
            faults = [*[rms] * (not centred), *(fault for fault, _ in named if fault is not None)]
            for gain, shift in ((named[0][1], named[1][1]), (weight, bias)) if faults else ():
                yield from seen.fits(normed * gain + shift, rows, *faults)

    def _named(self, fitted: Tensor, own: Tensor, leaf: str) -> tuple[Cause | None, Tensor]:
        """Return the fault that a fitted weight or bias shows, and its exact values; no fault if it is the norm's own."""
        plain = torch.full_like(own, 1.0 if leaf == "weight" else 0.0)
        ratio = nice(float((fitted * own).sum() / own.square().sum().clamp(min=1e-300)), SAME)
        lent = ((name, one) for name, one in self.vectors.items() if one.shape == own.shape)
        known = [
            ("", "", own),
            ("layernorm-without-affine" if leaf == "weight" else "missing-bias", f"the {leaf} is not applied", plain),
            (
                "extra-bias" if leaf == "bias" and ratio > 1 else "wrong-tensor",
                f"the {leaf} is multiplied by {ratio:g}",
                ratio * own,
            ),
            *(("norms-swapped" if "ln_" in name else "wrong-tensor", f"the {leaf} is that of {name}", one) for name, one in lent),
        ]
        for id, words, values in known:
            if float((fitted - values).abs().max()) <= SAME * max(float(fitted.abs().max()), 0.1):
                return Cause.at(id, self.part, words) if id else None, values
        return Cause.at("not-loaded", self.part, f"the {leaf} does not hold the checkpoint's values"), fitted

    def _divided(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit]:
        """Another epsilon, or another divisor of each token."""
        used = self.weight.abs() > LEAST * self.weight.abs().max()
        z, inner = ((seen.value - self.bias) / torch.where(used, self.weight, 1.0))[..., used], x[..., used]
        middle = inner - inner.mean(-1, keepdim=True)
        factor = (middle * z).sum(-1) / middle.square().sum(-1).clamp(min=1e-300)
        shift = z.mean(-1) - factor * inner.mean(-1)
        general = (x * factor[..., None] + shift[..., None]) * self.weight + self.bias
        if distinct(x[rows]) < 3 or seen.fitted(general, rows) is None:
            return
        eps = float((factor**-2 - x.var(-1, correction=0))[rows].median())
        if eps > 0 and abs(eps - self.eps) > SAME * self.eps:
            words = f"epsilon is {eps:.4g}; the checkpoint's is {self.eps:g}"
            value = layer_norm(x, self.weight, self.bias, eps)
            yield from seen.fits(value, rows, Cause.at("layernorm-eps", self.part, words))
        words = "each token is not divided by its own standard deviation, but by something else"
        yield from seen.fits(general, rows, Cause.at("layernorm-not-normalising", self.part, words))
