"""Read off the embeddings, the sums of a block and its activation what was added to what.

Shapes: (B, T, D); ids (B, T).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gpt2.measure.metrics import worst_relative_error
from gpt2.port.alternatives.activations import FUNCTIONS
from gpt2.port.alternatives.rounding import roundings
from gpt2.port.fits.observed import SHOWN, Fit, Observed, combined, formula, nice
from gpt2.port.terms.causes import Cause

MOST_PAIRS = 2**22  # pairs of an id and a position that are tried
NEIGHBOURS = 0.02  # of the span of a function's results: how far those of neighbouring arguments may be apart
GATES = {"tanh": (torch.tanh, torch.atanh), "erf": (torch.erf, torch.erfinv)}  # of GELU, and their inverses
OPEN = 0.98  # a gate that is further from 0 than this shows its argument badly
LEAST_OPEN = 12  # results that show two constants
SNAP = 0.01  # relative difference of a fitted constant and the one that was meant
ROOT, CUBE = math.sqrt(2 / math.pi), 0.044715
SLOPES = (ROOT, 1.0, 0.5, CUBE, math.sqrt(0.5), 0.851, 0.8, math.sqrt(2) / math.pi, 2 / math.pi, 1.5, 2.0)
CUBES = (CUBE, 0.0, 1.0, 0.5, 0.044, 0.045, 0.44715, 0.0044715, ROOT)
LEAST_WAVES = 5  # positions that show whether they are waves
WAVE_ERROR = 1e-4  # of a table in float32
BENT = 1.9  # 2 cos(frequency) of the fastest column at most: a straight line has 2
ROUGH = 0.1  # mean square of the steps from one argument to the next, of the variance of the results


def sum_fit(seen: Observed, terms: Mapping[str, Tensor], rows: Tensor, part: str) -> Fit | None:
    """Return which multiples of ``terms`` a residual is the sum of; GPT-2 adds the first two, stream and branch."""
    if (found := combined(seen.value, terms, rows, seen)) is None:
        return None
    factors, fit = found
    stream, branch, *_ = terms
    if part == "" and factors == {"the block's input": 1.0}:
        return seen.fitted(fit.value, rows, Cause.at("layer-missing", "", "the block does not run: its result is its input"))
    added = [name for name in factors if "norm" in name]
    id = "residual-scaled" if stream in factors and branch in factors else "residual-missing"
    id = "residual-from-normed" if added else id
    return seen.fitted(fit.value, rows, Cause.at(id, part, f"the sum is {formula(factors)}; GPT-2's is {stream} + {branch}"))


def activation_fit(seen: Observed, x: Tensor, rows: Tensor, part: str = "mlp.act") -> Fit | None:
    """Return the function of one number that gives each recorded one, if there is one, with the likest of the known ones.

    In another ``part`` than the activation, where GPT-2 has no such function, only a known one counts.
    """
    u, y = x[rows].flatten(), seen.value[rows].flatten()
    span, width = (float(values.max() - values.min()) for values in (y, u))
    if span == 0 or width == 0:  # one number throughout
        return None
    columns = torch.stack([formula(u) for _, formula in FUNCTIONS.values()])
    ratio = (columns @ y) / columns.square().sum(1).clamp(min=1e-300)
    errors = (ratio[:, None] * columns - y).abs().amax(1).nan_to_num(torch.inf)
    for number in errors.argsort()[:3].tolist():
        label = list(FUNCTIONS)[number]
        words, function = FUNCTIONS[label]
        times = nice(float(ratio[number]))
        many = "" if times == 1 else f"{times:.6g} times "
        text = f"your activation is {many}{words}" if part == "mlp.act" else f"an activation stands behind it: {many}{words}"
        fault = Cause.at("gelu-variant", part, text)
        if part != "mlp.act" and (times != 1 or label in ("none", "identity")):
            continue
        if (fit := seen.fitted(times * function(x), rows, fault)) is not None:
            return fit
    if part != "mlp.act":
        return None
    for half in (0.5, 1.0):
        for gate in GATES:
            if (fit := _gated(seen, x, rows, half, gate)) is not None:
                return fit
    order = u.argsort()
    steps, gaps = y[order].diff(), u[order].diff()
    smooth = steps.abs() <= NEIGHBOURS * span + 4 * gaps * max(span / width, 1.0)
    rough = float(steps.square().mean() / y.var())  # 2 if the arguments tell nothing
    if not bool(smooth.all()) or rough > ROUGH:
        return None
    at = ", ".join(f"f({float(u[i]):.3g}) = {float(y[i]):.4g}" for i in order[:: max(1, len(order) // SHOWN)][:SHOWN].tolist())
    fault = Cause.at("gelu-variant", "mlp.act", f"an activation that is none of those known here: {at}")
    return seen.fitted(seen.value, rows, fault)


def _gated(seen: Observed, x: Tensor, rows: Tensor, half: float, gate: str) -> Fit | None:
    """Return the fit of ``half`` x (1 + gate(a x + b x^3)): GELU with other constants. Rounded results do not show a function of
    no known form well enough for what follows from it."""
    function, inverse = GATES[gate]
    u, y = x[rows].flatten(), seen.value[rows].flatten()
    opened = y / (half * u) - 1
    some = (opened.abs() < OPEN) & (u.abs() > SNAP * float(u.abs().max()))
    u, opened = u[some], opened[some]
    if len(u) < LEAST_OPEN:
        return None
    trust = u.abs() * (1 - opened.square())  # the slope of a gate, about
    columns, wanted = trust[:, None] * torch.stack([u, u**3], 1), trust * inverse(opened)
    a, b = torch.linalg.lstsq(columns, wanted[:, None]).solution[:, 0].tolist()
    slopes = [one for one in SLOPES if abs(one - a) <= SNAP * abs(one)]
    meant = dict.fromkeys([*(slope * one for slope in (*slopes, a) for one in CUBES), *CUBES])
    near = sorted((one for one in meant if abs(one - b) <= SNAP * max(abs(one), abs(a))), key=lambda one: abs(one - b))
    for cube in (*near, b):
        along = columns[:, 0]
        alone = float((along * (wanted - cube * columns[:, 1])).sum() / along.square().sum())
        for slope in (*slopes, *(float(f"{alone:.{digits}g}") for digits in (2, 3, 4)), alone):
            words = f"your activation is {half:g} x (1 + {gate}({slope:.6g} x + {cube:.6g} x^3))"
            fault = Cause.at(
                "gelu-variant", "mlp.act", f"{words}; GPT-2's is 0.5 x (1 + tanh({ROOT:.6g} x + {ROOT * CUBE:.6g} x^3))"
            )
            if (fit := seen.fitted(half * x * (1 + function(slope * x + cube * x**3)), rows, fault)) is not None:
                return fit
    return None


def _other_positions(seen: Observed, words: Tensor, wpe: Tensor, rows: Tensor) -> Fit | None:
    """Return the fit of tokens, perhaps scaled, with other rows of wpe, or with a table of positions that the batch shares."""
    value, root = seen.value, math.sqrt(wpe.shape[1])
    apart = words - words.mean(0)
    times = nice(float((apart * value).sum() / apart.square().sum().clamp(min=1e-300)), seen.loose, [root])
    scaled = {
        one: Cause.at("embedding-scaled", "wte", f"token embeddings are multiplied by {one:.6g}")
        for one in (root, times)
        if one != 1
    }
    if words[..., 0].numel() * len(wpe) <= MOST_PAIRS:
        for factor in dict.fromkeys((1.0, root, times)):
            right = torch.arange(words.shape[1]).expand(words.shape[:2])
            at = torch.where(rows, torch.cdist(value - factor * words, wpe).argmin(-1), right)
            faults = list(filter(None, [scaled.get(factor)]))
            if not torch.equal(at, right):
                row, token = (at != right).nonzero()[0].tolist()
                taken = ", ".join(map(str, at[row, token : token + SHOWN].tolist()))
                detail = f"from token {token} of row {row} of the batch on, rows {taken} of wpe are taken"
                faults.append(Cause.at("position-offset", "wpe", detail))
            if faults and (fit := seen.fitted(factor * words + wpe[at], rows, *faults)) is not None:
                return fit
    if len(value) < 2 or not bool(rows.all()):
        return None
    table = (value - times * words).mean(0)
    id, detail = "not-loaded", "positions are not the checkpoint's learned ones, and none known here"
    if are_waves(table):
        id, detail = "position-sinusoidal", "positions are made of sines and cosines, not of the checkpoint's learned ones"
    return seen.fitted(times * words + table, rows, Cause.at(id, "wpe", detail), *filter(None, [scaled.get(times)]))


def are_waves(rows: Tensor) -> bool:
    """Return whether each column of (T, D) is a wave of any frequency and phase: x[t-1] + x[t+1] is 2 cos(frequency) x[t]."""
    if len(rows) < LEAST_WAVES:
        return False
    around, at = rows[2:] + rows[:-2], rows[1:-1]
    twice = ((around * at).sum(0) / at.square().sum(0).clamp(min=1e-300)).clamp(-2, 2)
    return float(twice.min()) < BENT and worst_relative_error(twice * at, around) < WAVE_ERROR


def embedding_fit(seen: Observed, ids: Tensor, wte: Tensor, wpe: Tensor, rows: Tensor) -> Fit | None:
    """Return which rows of which tables were added, with which factors."""
    tokens = ids.shape[1]
    words, places = wte[ids], wpe[:tokens].expand(len(ids), -1, -1)
    found = combined(seen.value, {"wte[id]": words, "wpe[position]": places}, rows, seen)
    if found is not None:
        factors, fit = found
        id = "position-missing" if "wpe[position]" not in factors else "embedding-scaled"
        return seen.fitted(
            fit.value, rows, Cause.at(id, "wpe" if id == "position-missing" else "embed", f"the embedding is {formula(factors)}")
        )
    more = (seen.value - seen.right)[rows].mean(0)
    words_of = "one vector is added to the embedding of every token, such as that of a token type; GPT-2 adds none"
    added = Cause.at("extra-bias", "embed", words_of, mend="x = wte(ids) + wpe(pos)  # nothing else")
    if int(rows.sum()) > 1 and (shifted := seen.fitted(seen.right + more, rows, added)) is not None:
        return shifted
    for text, rounded in roundings():
        for part, other in (("wte", places), ("embed", rounded(places))):
            fault = Cause.at("reduced-precision", part, f"the weight holds the checkpoint's values rounded {text}")
            if (narrow := seen.mostly(rounded(words) + other, rows, fault)) is not None:
                return narrow
    return _other_positions(seen, words, wpe, rows)
