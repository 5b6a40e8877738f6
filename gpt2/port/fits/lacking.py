"""Read off a stage's value which of its entries are GPT-2's, and what the others hold, as with dropout or a lost tile.

Shapes: (B, T, D), or (B, H, T, K) for weights and mixtures; ``rows`` (B, T) are the tokens that are not GPT-2's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.port.fits.observed import SHOWN, Fit, Observed, nice
from gpt2.port.terms.causes import Cause

CLEAR = 10.0  # times the rounding: entries that are surely not zero
LEAST = 40  # entries that show a share
LEAST_CLIPPED = 4  # entries at a limit
MOST_LEFT_OUT = 0.6  # the largest share of zeros that is dropout
FULL = 0.95  # the share of a rectangle's entries that are wrong


def dropped(seen: Observed, rows: Tensor, part: str) -> Fit | None:
    """Return the fit of GPT-2's value with entries that are zero at random, or below a limit, and a factor for the others."""
    value, right, slack, at = _tokens(seen, rows)
    loose = slack + seen.bound * right.square().mean().sqrt()
    clear = at & (right.abs() > CLEAR * loose) & (right.abs() > CLEAR * seen.bound * right.abs().max())
    zero, count = clear & (value.abs() <= loose), int(clear.sum())
    kept = clear & ~zero
    share = int(zero.sum()) / max(count, 1)
    if count < LEAST or not 0.01 < share < MOST_LEFT_OUT or int(kept.sum()) < 2:
        return None
    factor = float((value[kept] @ right[kept]) / right[kept].square().sum())
    factor = nice(factor, seen.loose, [100 / (100 - p) for p in range(1, 100)])
    predicted = torch.where(zero | (at & (value == 0)), 0.0, factor * right)
    size = right[zero].abs().max()
    if size < right[kept].abs().min() and abs(factor - 1) < 1e-3:
        fault = Cause.at("softmax-missing", part, f"what is below {float(size):.3g} is set to zero after the softmax")
        return seen.fitted(_back(predicted, seen), rows, fault) if part == "attn" else None
    expected = 1 / (1 - share)
    loose_share = 4 * (share * (1 - share) / count) ** 0.5 * expected**2
    if factor < 1 + 1e-3 or abs(factor - expected) > max(loose_share, 0.01):
        return None
    words = f"{share:.0%} of the entries are zero, and the others are multiplied by {factor:.5g}, "
    words += f"as by dropout with p = {1 - 1 / factor:.3g}"
    fault = Cause.at("ffn-dropout" if part == "mlp.act" else "dropout-active", part, words)
    return seen.fitted(_back(predicted, seen), rows, fault)


def looks_dropped(value: Tensor, tokens: int) -> bool:
    """Whether numbers (..., D), of both signs, are zero at random places: nothing else in a forward pass makes such zeros.

    Scores are zero where a mask hides keys: the same places of all ``tokens`` again and again.
    """
    zero = (value == 0).flatten(0, -2)
    count, share = int(zero.sum()), float(zero.double().mean())
    if count < LEAST or not 0.01 < share < MOST_LEFT_OUT or bool(zero.all(0).any()) or bool(zero.all(1).any()):
        return False
    keys = zero.view(-1, tokens)[zero.view(-1, tokens).sum(1) > 1] if zero.numel() % tokens == 0 else zero[:0]
    if len(keys) and 2 * len(keys.unique(dim=0)) < len(keys):
        return False
    pairs = int((zero[:, 1:] & zero[:, :-1]).sum())  # of neighbours, as in a region that is not computed
    return pairs < 2 * share * count + LEAST / 4 and bool((value > 0).any()) and bool((value < 0).any())


def clipped(seen: Observed, rows: Tensor, part: str, id: str) -> Fit | None:
    """Return the fit of GPT-2's value that is cut at a largest or a least number, which several entries would surely pass."""
    value, right, slack, _ = _tokens(seen, rows)
    low, high, words = -torch.inf, torch.inf, list[str]()
    loose = CLEAR * (slack + seen.bound * right.square().mean().sqrt())
    if int(((value == value.min()) & (right < value - loose)).sum()) >= LEAST_CLIPPED:
        low = float(value.min())
        words.append(f"below {low:.5g}")
    if int(((value == value.max()) & (right > value + loose)).sum()) >= LEAST_CLIPPED:
        high = float(value.max())
        words.append(f"above {high:.5g}")
    if not words:
        return None
    return seen.fitted(seen.right.clamp(low, high), rows, Cause.at(id, part, f"values {' and '.join(words)} are cut off"))


class Part(NamedTuple):
    """A fit of some features; ``sure``: they are not computed, so no other formula gives them."""

    fit: Fit
    sure: bool


def left_out(seen: Observed, rows: Tensor, part: str, id: str, bias: Tensor | None = None) -> Iterator[Part]:
    """Yield the fit of a value with a few features that hold something else than GPT-2's: nothing, or the ``bias`` (D,) alone."""
    value, right, _, at = _tokens(seen, rows)
    agrees = seen.agrees(seen.right)
    wrong = at & ~(agrees if agrees.ndim == 3 else agrees.transpose(1, 2).flatten(2))
    features, tokens = wrong.any(0).any(0), wrong.any(2)
    if not bool(features.any()) or float(features.double().mean()) > 0.5:
        return
    if float(wrong[:, :, features][tokens].double().mean()) < FULL or int(tokens.sum()) < 2:
        return
    held = value[:, :, features][tokens]
    where = (
        f"features {ranges(features)} of {len(features)}" if part != "logits" else f"tokens {ranges(features)} of the vocabulary"
    )
    sure = True
    if bool((held == 0).all()):
        words = f"{where} are never computed: they are zero, and all others are right"
    elif bool((held == held[0, 0]).all()):
        words = f"{where} are never computed: they are {float(held[0, 0]):.4g}, and all others are right"
    elif bias is not None and float((held - bias[features]).abs().max()) <= 1e-3 * float(bias.abs().max()):
        words = f"{where} hold the bias alone, and all others are right"
    else:
        sure = False
        words = (
            f"{where} are not GPT-2's, and all others are right: a loop that ends early, memory that is written twice or never"
        )
    if (fit := seen.fitted(_back(torch.where(wrong, value, right), seen), rows, Cause.at(id, part, words))) is not None:
        yield Part(fit, sure)


def ranges(chosen: Tensor) -> str:
    """Return which entries of ``chosen`` (N,) are set, in words: ``0 to 3 and 8``."""
    numbers = chosen.nonzero().flatten().tolist()
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] + 1 == number:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    texts = [f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0]) for span in spans]
    return " and ".join(texts[:SHOWN]) + (" and more" if len(texts) > SHOWN else "")


def _tokens(seen: Observed, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return value, right value and slack by token (B, T, F), and which entries are at ``rows``."""
    parts = [one if one.ndim == 3 else one.transpose(1, 2).flatten(2) for one in (seen.value, seen.right, seen.slack)]
    return parts[0], parts[1], parts[2], rows[..., None].expand_as(parts[0])


def _back(value: Tensor, seen: Observed) -> Tensor:
    return value if seen.value.ndim == 3 else value.unflatten(2, (seen.value.shape[1], -1)).transpose(1, 2)
