"""An array that may be the result of an operator, with its rounding; regressions on it, and the dropout that it shows.

Shapes: the result is laid out as the stage's value, (B, T, D), (B, H, T, K) or (B, H, T, T); ``rows`` (B, T): wrong tokens.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.port.terms.causes import Cause

EQUAL = 1e-5  # relative distance of tokens that are one for a regression
MOST_TOKENS = 256  # that are counted
NICE = 2e-4  # the largest relative error of a fitted coefficient that was meant to be a simple number
MAX_TERMS = 4
SHOWN = 4
LEAST_ANGLES = 8  # different tokens that show whether angles between them are kept
# Of entries that dropout makes zero: those that are surely not zero, in roundings; the fewest that show a share; its largest.
CLEAR, LEAST, MOST = 10.0, 40, 0.6
MOST_BENT = 0.4  # one minus the correlation of these angles


class Fit(NamedTuple):
    """What an operator computed: its faults, and its value, GPT-2's own where ``rows`` of the observation are right."""

    faults: tuple[Cause, ...]
    value: Tensor


@dataclass(frozen=True, eq=False)
class Observed:
    """A stage's value as recorded; ``slack``: what storage may have rounded away, by entry; ``bound``: of the computation,
    relative to the root mean square. ``right``: GPT-2's value. ``number``: of the pool's entry, -1 for one that was derived."""

    value: Tensor
    slack: Tensor
    bound: float
    right: Tensor
    number: int

    @property
    def loose(self) -> float:
        """The relative error of a coefficient that is fitted to the value."""
        return NICE + 2 * float((self.slack / self.value.abs().amax().clamp(min=1e-300)).max())

    @property
    def likeness(self) -> float:
        """How much the value is like GPT-2's own, as a cosine."""
        return float((self.value * self.right).sum() / (self.value.norm() * self.right.norm()).clamp(min=1e-300))

    def agrees(self, predicted: Tensor) -> Tensor:
        """Return where a prediction is the recorded value, within rounding; of the value's shape."""
        size = predicted.square().mean().sqrt()
        return (predicted - self.value).abs() <= self.slack + self.bound * size

    def wrong_rows(self) -> Tensor:
        """Return (B, T): the tokens whose value is not GPT-2's."""
        agrees = self.agrees(self.right)
        return ~(agrees.all(-1) if agrees.ndim == 3 else agrees.all(-1).all(1))

    def fitted(self, predicted: Tensor, rows: Tensor, *faults: Cause) -> Fit | None:
        """Return the fit if ``predicted`` is the recorded value at ``rows``, and GPT-2's value elsewhere."""
        at = rows if predicted.ndim == 3 else rows[:, None].expand(predicted.shape[:3])
        value = torch.where(at[..., None], predicted, self.right)
        if not bool(value.isfinite().all()) or not bool(self.agrees(value)[at].all()):
            return None
        return Fit(tuple(replace(fault, detail=where(rows) + fault.detail) for fault in faults), value)


def where(rows: Tensor) -> str:
    """Return in words at which tokens (B, T) a fault is seen: nothing, if at all of them, or at tokens without an order."""
    tokens = rows.any(0).nonzero().flatten().tolist()
    if not tokens or bool(rows.all()) or not torch.equal(rows, rows.any(0).expand_as(rows)):
        return ""
    if len(tokens) != tokens[-1] - tokens[0] + 1:
        return ""
    if tokens[-1] + 1 == rows.shape[1]:
        return f"from token {tokens[0]} on, as in steps after a prompt: "
    return f"at tokens {tokens[0]} to {tokens[-1]}: " if tokens[0] else f"up to token {tokens[-1]}, as in a prompt before steps: "


def distinct(tokens: Tensor) -> int:
    """Return how many of ``tokens`` (N, D) differ, of the first few: one that is there again tells a regression nothing."""
    tokens = tokens[:MOST_TOKENS]
    near = torch.cdist(tokens, tokens) <= EQUAL * tokens.norm(dim=1)
    return int((~near.tril(-1).any(1)).sum())


def keeps_angles(x: Tensor, y: Tensor) -> bool:
    """Return whether tokens that are similar in ``x`` (N, I) are similar in ``y`` (N, O) too, and others are not."""
    if distinct(x) < LEAST_ANGLES:
        return False
    alike = [(one - one.mean(0)) / (one - one.mean(0)).norm(dim=1, keepdim=True).clamp(min=1e-300) for one in (x, y)]
    own, other = (one @ one.T for one in alike)
    pairs = ~torch.eye(len(x), dtype=torch.bool)

    def far(order: Tensor) -> float:
        return 1 - float(torch.corrcoef(torch.stack([own[order][:, order][pairs], other[pairs]]))[0, 1])

    order = torch.arange(len(x))
    return far(order) < MOST_BENT and all(far(order) < far(order.roll(n)) / 2 for n in range(1, len(x)))


def nice(value: float, loose: float = NICE, known: Iterable[float] = ()) -> float:
    """Return the simple or ``known`` number that a coefficient was meant to be, to the relative error ``loose``."""
    simple = [0.0, *known, *(sign * n / m for n in range(1, 13) for m in (1, 2, 3, 4, 5, 10) for sign in (1, -1))]
    return next((one for one in simple if abs(value - one) <= loose * max(abs(one), 0.05)), value)


def combined(terms: Mapping[str, Tensor], rows: Tensor, seen: Observed) -> tuple[dict[str, float], Fit] | None:
    """Return the fewest ``terms`` with the coefficients that sum to ``seen`` at ``rows``; None if no four do."""
    names = list(terms)
    columns = torch.stack([terms[name].expand_as(seen.value)[rows].flatten() for name in names], 1)
    wanted = seen.value[rows].flatten()
    gram, along, total = columns.T @ columns, columns.T @ wanted, float(wanted.square().sum())
    for count in range(1, min(MAX_TERMS, len(names)) + 1):
        sets = torch.tensor(list(itertools.combinations(range(len(names)), count)))
        inner = gram[sets[:, :, None], sets[:, None]]
        scale = inner.diagonal(dim1=1, dim2=2).clamp(min=1e-300).sqrt()
        inner = inner / scale[:, :, None] / scale[:, None] + 1e-13 * torch.eye(count, dtype=inner.dtype)
        ratio = torch.linalg.solve(inner, (along[sets] / scale)[..., None])[..., 0]
        left = total - (ratio * along[sets] / scale).sum(1)
        for number in left.argsort()[:3].tolist():
            if float(left[number]) > 1e-3 * total:
                break
            pairs = zip(sets[number].tolist(), ratio[number] / scale[number], strict=True)
            factors = {names[i]: nice(float(f), seen.loose) for i, f in pairs}
            value = sum((factor * terms[name] for name, factor in factors.items()), torch.zeros_like(seen.value))
            if 0.0 not in factors.values() and (fit := seen.fitted(value, rows)) is not None:
                return factors, fit
    return None


def formula(factors: Mapping[str, float]) -> str:
    """Return a sum in words: ``the block's input + 2 times attention's result``."""
    parts = []
    for name, factor in factors.items():
        sign = "-" if factor < 0 else "+"
        size = "" if abs(factor) == 1 else f"{abs(factor):.6g} times "
        parts.append(f"{sign} {size}{name}")
    return " ".join(parts).removeprefix("+ ")


def dropped(seen: Observed, rows: Tensor, part: str) -> Fit | None:
    """Return the fit of GPT-2's value with entries that are zero at random, and a factor for the others."""
    value, right = seen.value, seen.right
    at = (rows[..., None] if value.ndim == 3 else rows[:, None, :, None]).expand_as(value)
    loose = seen.slack + seen.bound * right.square().mean().sqrt()
    clear = at & (right.abs() > CLEAR * loose) & (right.abs() > CLEAR * seen.bound * right.abs().max())
    zero, count = clear & (value.abs() <= loose), int(clear.sum())
    kept, share = clear & ~zero, int(zero.sum()) / max(count, 1)
    if count < LEAST or not 0.01 < share < MOST:
        return None
    factor = float((value[kept] @ right[kept]) / right[kept].square().sum())
    factor = nice(factor, seen.loose, [100 / (100 - p) for p in range(1, 100)])
    expected = 1 / (1 - share)
    loose_share = 4 * (share * (1 - share) / count) ** 0.5 * expected**2
    if factor < 1 + 1e-3 or abs(factor - expected) > max(loose_share, 0.01):
        return None
    words = f"{share:.0%} of the entries are zero, and the others are multiplied by {factor:.5g}, "
    words += f"as by dropout with p = {1 - 1 / factor:.3g}"
    fault = Cause.at("ffn-dropout" if part == "mlp.act" else "dropout-active", part, words)
    return seen.fitted(torch.where(zero | (at & (value == 0)), 0.0, factor * right), rows, fault)
