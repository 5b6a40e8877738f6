"""Find damaged weights: NaN, infinities, and values that a flipped bit of an exponent made far too large.

One such value spoils every logit, or none that a short text shows, so the weights are looked at and not what they compute. The
look reads the largest and the smallest value of each tensor, at the speed of memory: 0.02 s for the official gpt2.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low

import torch
from torch import Tensor, nn

from gpt2.errors import InputError

UNUSABLE = 2.0**64  # its square, which norms and products contain, is no float32
LARGE, FAR = 100.0, 1000.0  # what is above the first, and as many times the usual largest value of a tensor, is remarked on
ADVICE = "fetch the file again, or train it anew"


@dataclass(frozen=True)
class Look:
    """What :func:`look` found. ``worst`` names the worst large value with its tensor and entry: "h.0.ln_1.bias[3] is nan"."""

    counts: Mapping[str, int] = field(default_factory=dict)  # tensor -> how many values are NaN, infinite, or UNUSABLE
    worst: str = ""
    largest: float = 0.0
    usual: float = 0.0  # half of the tensors that are not zero hold no larger value

    @property
    def damage(self) -> str:
        """Say which values no model computes with; "" if there are none."""
        total, others = sum(self.counts.values()), len(self.counts) - 3
        named = ", ".join(f"{count:,} of {name}" for name, count in list(self.counts.items())[:3])
        several = f"{total:,} damaged values ({named}{f' and {others} more tensors' if others > 0 else ''}), the worst"
        why = "too large to compute with" if math.isfinite(self.largest) else "not finite"
        return f"{several if total > 1 else 'a damaged value'}: {self.worst}, {why}{self._beside}" if total else ""

    @property
    def outlier(self) -> str:
        """Say which value is far larger than others, and may be damaged; "" if none is."""
        far = self.worst and not self.largest <= FAR * self.usual
        return f"{self.worst}{self._beside}; if that is damage, {ADVICE}" if far else ""

    @property
    def _beside(self) -> str:
        return f", and the largest value of a tensor is usually {self.usual:.2g}" if self.usual else ""


def look(tensors: Iterable[tuple[str, Tensor]]) -> Look:
    """Look once at the values of floating-point tensors, by name."""
    counts, sizes, worst, largest = dict[str, int](), list[float](), "", 0.0
    for name, tensor in tensors:
        values = tensor.detach()
        if not values.is_floating_point() or not values.numel():
            continue
        low, high = torch.aminmax(values if values.is_contiguous() else values.mT if values.ndim > 1 else values)
        size = max(-float(low), float(high))  # NaN in both, if one value is NaN
        if size > UNUSABLE or math.isnan(size):
            counts[name] = int((~(values.abs() <= min(UNUSABLE, torch.finfo(values.dtype).max))).sum())
        elif size:
            sizes.append(size)
        if not (size <= max(largest, LARGE) or math.isnan(largest)):
            largest, place = size, values.abs().argmax()  # of NaN the first
            entry = [int(index) for index in torch.unravel_index(place, values.shape)]
            worst = f"{name}{entry} is {float(values[tuple(entry)]):.1g}"
    return Look(counts, worst, largest, median_low(sizes) if sizes else 0.0)


def require_finite(logits: Tensor, name: str = "the model", model: nn.Module | None = None) -> None:
    """Raise InputError, which names damaged weights of ``model``, if a logit is NaN or infinite: its results would look right."""
    if not logits.numel() or bool(torch.stack(torch.aminmax(logits)).isfinite().all()):
        return
    why = f"damaged weights, or a dtype too small for them; {ADVICE}, or load it in float32"
    if model is not None:
        found, dtypes = look(model.named_parameters()), {p.dtype for p in model.parameters()}
        wider = "float64" if torch.float32 in dtypes else "float32"
        damage = f"it holds {found.damage}; {ADVICE}" if found.damage else found.outlier
        why = damage or f"the dtype is too small; load it in {wider}"
    raise InputError(f"{name}: the logits are not finite numbers, but NaN or infinite: {why}")
