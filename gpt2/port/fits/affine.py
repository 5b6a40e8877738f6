"""Read off the input and result of a linear layer or a norm what it multiplied and added, or the one number of its divisor.

Shapes: x (B, T, I); the result y (B, T, O); weights W (I, O); biases b (O,), a norm's (D,). ``rows``: tokens unlike GPT-2's.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gpt2.port.alternatives.norms import layer_norm
from gpt2.port.fits.observed import Fit, Observed, distinct, keeps_angles, nice
from gpt2.port.graph import THIRDS
from gpt2.port.terms.causes import Cause

ALIKE = 0.5  # cosine of a result and GPT-2's, beyond which the weight may be a rounded one
SAME = 1e-3  # relative difference of factors that are one
LEAST = 0.05  # the least weight of a norm, of the largest, through which its own result is read


def vectors_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the biases and norms' weights of a checkpoint: what a norm may hold by mistake."""
    return {name: tensor for name, tensor in state.items() if tensor.ndim == 1}


class Linear:
    """The linear layer ``part`` with ``weight`` and ``bias``."""

    def __init__(self, part: str, weight: Tensor, bias: Tensor) -> None:
        self.part, self.weight, self.bias = part, weight, bias
        self.where = part if part in THIRDS else f"{part}.weight"

    def fits(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit | None]:
        """Yield what the layer computed from ``x`` to give ``seen`` at ``rows``."""
        yield from self._bias(seen, x, rows)
        if other_weights(seen, x, rows):
            words = "the weight is not the checkpoint's in any known way"
            yield seen.fitted(seen.value, rows, self.fault("not-loaded", words))

    def fault(self, id: str, words: str, leaf: str = "", mend: str | None = None) -> Cause:
        return Cause.at(id, self.where.replace(".weight", f".{leaf}") if leaf else self.where, words, mend=mend)

    def _bias(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit | None]:
        """Another bias: what is added is the same at every token."""
        product = x @ self.weight
        added = (seen.value - product)[rows].mean(0)
        if distinct(x[rows]) < 2 or seen.fitted(product + added, rows) is None:
            return
        loose = seen.bound * float(seen.value.square().mean().sqrt()) + float(seen.slack.max())
        lost = (added.abs() <= loose) & (self.bias.abs() > loose)
        id, words, value = "wrong-tensor", "the bias is not the checkpoint's", added
        if bool(lost.any()) and bool((((added - self.bias).abs() <= loose) | lost).all()):
            at = lost.nonzero().flatten().tolist()
            which = f"columns {at[0]} to {at[-1]}" if len(at) == at[-1] - at[0] + 1 else f"{len(at)} columns"
            id, words, value = "missing-bias", f"{which} have no bias", self.bias.masked_fill(lost, 0.0)
        mend = "y = x @ w + b  # all entries of b" if bool(lost.any()) and id == "missing-bias" else None
        yield seen.fitted(product + value, rows, self.fault(id, words, "bias", mend))


def other_weights(seen: Observed, x: Tensor, rows: Tensor) -> bool:
    """Return whether ``seen`` is the product of ``x`` with weights that are not the checkpoint's in any known way.

    With more tokens than inputs, the value is linear in ``x``. With fewer, any is: so it must be unlike GPT-2's, and tokens
    that are similar in ``x`` must be similar in it, which a product with a matrix keeps, and what mixes tokens does not.
    """
    inputs, wanted = torch.nn.functional.pad(x[rows], (0, 1), value=1.0), seen.value[rows]
    if distinct(inputs) <= inputs.shape[1]:
        one, other = (value[rows].flatten() - value[rows].mean() for value in (seen.value, seen.right))
        like = float(one @ other / (one.norm() * other.norm()).clamp(min=1e-300))
        return abs(like) <= ALIKE and keeps_angles(x[rows], wanted)
    made = inputs @ torch.linalg.lstsq(inputs, wanted, driver="gelsd").solution
    return bool(seen.agrees(seen.right.masked_scatter(rows[..., None], made))[rows].all())


class Norm:
    """The norm ``part`` with ``weight`` and ``bias``; ``vectors``: all others that it may hold."""

    def __init__(self, part: str, weight: Tensor, bias: Tensor, eps: float, vectors: Mapping[str, Tensor]) -> None:
        self.part, self.weight, self.bias, self.eps, self.vectors = part, weight, bias, eps, vectors

    def fits(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit | None]:
        """Yield what the norm computed from ``x`` to give ``seen`` at ``rows``."""
        yield from self._affine(seen, x, rows)
        yield from self._divided(seen, x, rows)

    def _affine(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit | None]:
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
                yield seen.fitted(normed * gain + shift, rows, *faults)

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

    def _divided(self, seen: Observed, x: Tensor, rows: Tensor) -> Iterator[Fit | None]:
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
            yield seen.fitted(value, rows, Cause.at("layernorm-eps", self.part, words))
        words = "each token is not divided by its own standard deviation, but by something else"
        yield seen.fitted(general, rows, Cause.at("layernorm-not-normalising", self.part, words))
