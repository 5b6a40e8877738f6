"""Read off what a node computes from those before it: the fits of all nodes of a block, and of the embeddings.

Fits are asked where no alternative of the table explains a node. Nothing here names a formula that the table has.
Shapes: (B, T, D); q, k (B, H, T, K); ids (B, T).
"""

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gpt2.config import GPT2Config
from gpt2.measure.metrics import worst_relative_error
from gpt2.port.alternatives.attention import scale_faults
from gpt2.port.alternatives.norms import SOURCES
from gpt2.port.alternatives.wiring import SUMS
from gpt2.port.fits.affine import Linear, Norm, vectors_of
from gpt2.port.fits.observed import SHOWN, Fit, Observed, combined, dropped, formula, nice
from gpt2.port.graph import ATTENTION, MODULES, READS, Model, State, right_scale, split
from gpt2.port.terms.causes import MASKED, Cause

MOST_PAIRS = 2**22  # pairs of an id and a position that are tried
CLEAR = 100.0  # times the rounding of a weight: those whose logarithm is fitted
LEAST = 1e-4  # the least weight whose logarithm is fitted
LEAST_SEEN = 4  # differences of scores that show a factor
NEIGHBOURS = 0.02  # of the span of a function's results: how far those of neighbouring arguments may be apart
LEAST_WAVES = 5  # positions that show whether they are waves
WAVE_ERROR = 1e-4  # of a table in float32
BENT = 1.9  # 2 cos(frequency) of the fastest column at most: a straight line has 2
ROUGH = 0.1  # mean square of the steps from one argument to the next, of the variance of the results


def node_fit(model: Model, layer: int, node: str, state: State, seen: Observed) -> Fit | None:
    """Return what ``node`` of a block computes from those in ``state`` to give ``seen``; None if nothing fits."""
    model.budget.check()
    rows = seen.wrong_rows()
    fits = itertools.chain(_dropped(node, state, seen, rows), _numbers(model, layer, node, state, seen, rows))
    return next(filter(None, fits), None)


def _dropped(node: str, state: State, seen: Observed, rows: Tensor) -> Iterator[Fit | None]:
    """Yield entries that are zero at random: of the branch that a sum adds, or of the node."""
    part = "attn" if node in ATTENTION else node
    if node in SUMS:
        stream = state[SUMS[node][0]]
        branch = Observed(seen.value - stream, seen.slack, seen.bound, seen.right - stream, seen.number)
        fit = dropped(branch, rows, part)
        yield fit and fit._replace(value=fit.value + stream)
    yield dropped(seen, rows, part)


def _numbers(model: Model, layer: int, node: str, state: State, seen: Observed, rows: Tensor) -> Iterator[Fit | None]:
    """Yield the free numbers of the node's own formula."""
    site, config = model.site(layer), model.config
    if node in MODULES:
        linear = Linear(node, *site.linear(node))
        yield from linear.fits(seen, state[READS[node][0]], rows)
    elif node in ("ln_1", "ln_2"):
        norm = Norm(node, *site.numbers(node), config.layer_norm_epsilon, vectors_of(model.state))
        yield from norm.fits(seen, state[SOURCES[node]], rows)
    elif node == "attn.weights":
        q, k = (split(state[f"attn.{letter}"], config.n_head) for letter in "qk")
        yield scores_fit(seen, q, k, config, layer, rows)
        yield mask_fit(seen, q, k, right_scale(config, layer), model.ids, rows)
    elif node == "mlp.act":
        yield activation_fit(seen, state["mlp.c_fc"], rows)
    elif node in SUMS:
        names = {"the block's input": "x", "attention's result": "attn.c_proj", "attention's normed input": "ln_1"}
        if node != "mid":  # GPT-2's two terms are the first
            own = {"the stream after attention": "mid", "the feed-forward's result": "mlp.c_proj"}
            names = {**own, **names, "the feed-forward's normed input": "ln_2"}
        terms = ((words, state[name]) for words, name in names.items())
        usable = {words: one for words, one in terms if one.shape == state["x"].shape and bool(one.isfinite().all())}
        yield sum_fit(seen, usable, rows, node)


def sum_fit(seen: Observed, terms: Mapping[str, Tensor], rows: Tensor, part: str) -> Fit | None:
    """Return which multiples of ``terms`` a residual is the sum of; GPT-2 adds the first two, stream and branch."""
    if (found := combined(terms, rows, seen)) is None:
        return None
    factors, fit = found
    stream, branch, *_ = terms
    id = "residual-scaled" if stream in factors and branch in factors else "residual-missing"
    id = "residual-from-normed" if any("norm" in name for name in factors) else id
    return seen.fitted(fit.value, rows, Cause.at(id, part, f"the sum is {formula(factors)}; GPT-2's is {stream} + {branch}"))


def scores_fit(seen: Observed, q: Tensor, k: Tensor, config: GPT2Config, layer: int, rows: Tensor) -> Fit | None:
    """Return the softmax of scores with another factor: differences of the weights' logarithms are those of scores."""
    scale, y = right_scale(config, layer), seen.value
    scores = q @ k.mT * scale
    visible = torch.ones_like(scores, dtype=torch.bool).tril()
    clear = visible & (y > CLEAR * seen.slack) & (y > LEAST) & rows[:, None, :, None]
    if int(clear.sum()) - int(clear.any(-1).sum()) < LEAST_SEEN:
        return None
    count = clear.sum(-1, keepdim=True).clamp(min=1)
    pair = [torch.where(clear, one, 0.0) for one in (scores, y.clamp(min=1e-300).log())]
    z, log = (torch.where(clear, one - one.sum(-1, keepdim=True) / count, 0.0) for one in pair)
    factor = nice(float((z * log).sum() / z.square().sum().clamp(min=1e-300)), seen.loose)
    value = (factor * scores).masked_fill(~visible, -math.inf).softmax(-1)
    return seen.fitted(value, rows, *scale_faults(config, layer, factor * scale))


def mask_fit(seen: Observed, q: Tensor, k: Tensor, scale: float, ids: Tensor, rows: Tensor) -> Fit | None:
    """Return the softmax over other keys than GPT-2 shows: of a window, of all ids but some, or any others."""
    causal, clear = torch.ones(seen.value.shape, dtype=torch.bool).tril(), CLEAR * seen.slack
    visible = torch.where(causal & (seen.right <= clear), causal, seen.value > clear)
    value = (q @ k.mT * scale).masked_fill(~visible, -math.inf).softmax(-1).nan_to_num(0.0)
    hidden, tokens, faults = causal & ~visible, torch.arange(ids.shape[1]), list[Cause]()
    if bool(hidden.any()):
        batch, _, token, key = hidden.nonzero()[0].tolist()
        behind, unseen = tokens[:, None] - tokens, hidden.diagonal(dim1=2, dim2=3).all(1)
        size, own = int(behind.masked_fill(~hidden.any(0).any(0), len(tokens)).min()), ids[unseen].unique()
        words = f"in row {batch} of the batch, token {token} does not see token {key}"
        if torch.equal(hidden, (causal & (behind >= size)).expand_as(hidden)):
            words = f"a token sees the last {size} tokens alone, itself among them"
        elif bool(unseen.any()) and bool((~visible | ~torch.isin(ids, own)[:, None, None] | visible.all(-1, True)).all()):
            words = f"tokens of id {', '.join(map(str, own[:SHOWN].tolist()))} are hidden, as padding is"
        faults.append(Cause.at("mask-strict", "attn", words, mend=f"{MASKED}  # and nothing else is hidden"))
    if bool((visible & ~causal).any()):
        batch, _, token, key = (visible & ~causal).nonzero()[0].tolist()
        faults.append(Cause.at("mask-missing", "attn", f"in row {batch} of the batch, token {token} sees token {key}"))
    fit = seen.fitted(value, rows) if faults else None
    return fit and fit._replace(faults=tuple(faults))


def activation_fit(seen: Observed, x: Tensor, rows: Tensor) -> Fit | None:
    """Return the function of one number that gives each recorded one, if there is one, by some of its values."""
    u, y = x[rows].flatten(), seen.value[rows].flatten()
    span, width = (float(values.max() - values.min()) for values in (y, u))
    if span == 0 or width == 0:  # one number throughout
        return None
    order = u.argsort()
    steps, gaps = y[order].diff(), u[order].diff()
    smooth = steps.abs() <= NEIGHBOURS * span + 4 * gaps * max(span / width, 1.0)
    if not bool(smooth.all()) or float(steps.square().mean() / y.var()) > ROUGH:  # 2 if the arguments tell nothing
        return None
    at = ", ".join(f"f({float(u[i]):.3g}) = {float(y[i]):.4g}" for i in order[:: max(1, len(order) // SHOWN)][:SHOWN].tolist())
    fault = Cause.at("gelu-variant", "mlp.act", f"an activation that is none of those known here: {at}")
    return seen.fitted(seen.value, rows, fault)


def embedding_fit(seen: Observed, ids: Tensor, wte: Tensor, wpe: Tensor, rows: Tensor) -> Fit | None:
    """Return which rows of which tables were added, with which factors."""
    words, places = wte[ids], wpe[: ids.shape[1]].expand(len(ids), -1, -1)
    if (found := combined({"wte[id]": words, "wpe[position]": places}, rows, seen)) is not None:
        factors, fit = found
        id, part = ("embedding-scaled", "embed") if "wpe[position]" in factors else ("position-missing", "wpe")
        return seen.fitted(fit.value, rows, Cause.at(id, part, f"the embedding is {formula(factors)}"))
    root = math.sqrt(wpe.shape[1])
    apart = words - words.mean(0)
    times = nice(float((apart * seen.value).sum() / apart.square().sum().clamp(min=1e-300)), seen.loose, [root])
    for factor in dict.fromkeys((1.0, root, times)):
        scaled = [Cause.at("embedding-scaled", "wte", f"token embeddings are multiplied by {factor:.6g}")] * (factor != 1)
        if (other := _other_rows(seen, factor * words, wpe, rows, scaled)) is not None:
            return other
    if len(ids.unique(dim=0)) < 2 or not bool(rows.all()):  # else any array fits
        return None
    table = (seen.value - times * words).mean(0)
    id, detail = "not-loaded", "positions are not the checkpoint's learned ones, and none known here"
    if are_waves(table):
        id, detail = "position-sinusoidal", "positions are made of sines and cosines, not of the checkpoint's learned ones"
    scaled = [Cause.at("embedding-scaled", "wte", f"token embeddings are multiplied by {times:.6g}")] * (times != 1)
    return seen.fitted(times * words + table, rows, Cause.at(id, "wpe", detail), *scaled)


def _other_rows(seen: Observed, words: Tensor, wpe: Tensor, rows: Tensor, scaled: list[Cause]) -> Fit | None:
    """Return the fit of tokens (B, T, D) with other rows of wpe, by the nearest for each."""
    right = torch.arange(words.shape[1]).expand(words.shape[:2])
    if right.numel() * len(wpe) > MOST_PAIRS:
        return None
    at = torch.where(rows, torch.cdist(seen.value - words, wpe).argmin(-1), right)
    faults = list(scaled)
    if not torch.equal(at, right):
        row, token = (at != right).nonzero()[0].tolist()
        taken = ", ".join(map(str, at[row, token : token + SHOWN].tolist()))
        detail = f"from token {token} of row {row} of the batch on, rows {taken} of wpe are taken"
        faults.append(Cause.at("position-offset", "wpe", detail))
    return seen.fitted(words + wpe[at], rows, *faults) if faults else None


def are_waves(rows: Tensor) -> bool:
    """Return whether each column of (T, D) is a wave of any frequency and phase: x[t-1] + x[t+1] is 2 cos(frequency) x[t]."""
    if len(rows) < LEAST_WAVES:
        return False
    around, at = rows[2:] + rows[:-2], rows[1:-1]
    twice = ((around * at).sum(0) / at.square().sum(0).clamp(min=1e-300)).clamp(-2, 2)
    return float(twice.min()) < BENT and worst_relative_error(twice * at, around) < WAVE_ERROR
