"""What surrounds the blocks: tokens, positions, embeddings, the head's table, last steps, and the sequence of blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, Changed, family
from gpt2.port.alternatives.norm_formulas import layer_norm
from gpt2.port.alternatives.wiring import usual_factors
from gpt2.port.graph import ROWS, TEXT, Formula, Function, Model, Site, embedding
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import EVERY

MOST_SHIFTS = 33  # by how much positions are tried to be off, on a small model
SHIFTS = (1, 2, 3)  # the same on a large one
MOST_ROWS = 64  # of the position table, that steps are tried to stay at
SEQUENCE = ("layer-order", "layer-missing", "layer-repeated")
ONE_BLOCK = "h = nn.ModuleList([Block(config) for _ in range(n_layer)])  # [Block(config)] * n_layer is one block, n times"
SINES = "positions are sines and cosines, not the checkpoint's learned ones"
BOTH = "the embeddings, tokens and positions together,"
# What programs do to their logits (..., V) before they give them, where GPT-2 does nothing.
LAST_STEPS: tuple[tuple[Cause, Function], ...] = tuple(
    (Cause.at(id, "logits", words), formula)
    for id, words, formula in (
        ("logits-softmaxed", "each token's mean logit is taken off", lambda x: x - x.mean(-1, keepdim=True)),
        ("logits-softmaxed", "each token's largest logit is taken off", lambda x: x - x.amax(-1, keepdim=True)),
        ("logits-softmaxed", "the exponential of each logit is given", torch.exp),
        ("logits-softmaxed", "each logit goes through a sigmoid", torch.sigmoid),
        ("logits-scaled", "each logit goes through a tanh", torch.tanh),
        ("logits-scaled", "each logit goes through a ReLU", torch.relu),
        ("logits-scaled", "each token's logits are divided by their norm", lambda x: x / x.norm(dim=-1, keepdim=True)),
    )
)


def _ids(c: Site) -> Tensor:
    return c.model.ids[:, c.begin : c.end]


def shifts_of(model: Model) -> set[int]:
    """Return by how many rows positions are tried to be off."""
    tokens, room = model.ids.shape[1], model.config.n_positions
    usual = range(1, min(room, MOST_SHIFTS)) if model.small else SHIFTS
    return {n for n in (*usual, tokens, room - tokens) if n > 0}


Pieces = Callable[[Site], tuple[Tensor, Tensor]]  # the embeddings of tokens, and of positions


def _tokens(c: Site) -> Tensor:
    return c.model.state["wte.weight"][_ids(c)]


def positioned(model: Model) -> Iterator[tuple[str, str, Pieces, str]]:
    """Yield an id, words, what is added for tokens and for positions, and what it depends on."""
    table = model.state["wpe.weight"]
    shifts = shifts_of(model)

    def rows_of(ids: Tensor) -> Iterator[tuple[str, Tensor, str]]:
        return position_rows(ids, model.config.n_positions, shifts, model.ids.shape[1])

    def taken(c: Site, words: str) -> Tensor:
        every = c.model.always("positions", lambda: {words: rows for words, rows, _ in rows_of(c.model.ids)})
        return table[every[words][..., c.begin : c.end]]

    for words, _, sees in rows_of(model.ids):
        yield "position-offset", words, lambda c, words=words: (_tokens(c), taken(c, words)), sees
    for label, waves in sinusoids(model.ids.shape[1], model.config.n_embd):
        waves = waves.to(model.dtype)
        yield "position-sinusoidal", f"{SINES} ({label})", lambda c, w=waves: (_tokens(c), w[c.begin : c.end]), ""
    for factor in usual_factors(model):
        words = f"position embeddings are multiplied by {factor:.6g}"
        yield "embedding-scaled", words, lambda c, f=factor: (_tokens(c), f * table[c.begin : c.end]), ""
    yield "position-missing", "no positions are added", lambda c: (_tokens(c), 0 * table[c.begin : c.end]), ""


@family
def positions(model: Model) -> Iterator[Alternative]:
    """Yield other positions; also beside token embeddings that are multiplied by the root of the width, as people do."""
    root = math.sqrt(model.config.n_embd)
    for id, words, pieces, sees in positioned(model):
        plain: Formula = lambda c, s, p=pieces: sum_of(p(c), 1.0, False)  # noqa: E731
        yield Alternative(id, words, where="wpe", outside={"embed": plain}, sees=sees)
        for what, both in (("token embeddings", False), (BOTH, True)):
            scaled: Formula = lambda c, s, p=pieces, both=both: sum_of(p(c), root, both)  # noqa: E731
            also = (("embedding-scaled", f"{what} are multiplied by {root:.6g} (sqrt(n_embd) = {root:.6g})"),)
            yield Alternative(id, words, where="wpe", outside={"embed": scaled}, sees=sees, rare=True, also=also)


def sum_of(pieces: tuple[Tensor, Tensor], factor: float, both: bool) -> Tensor:
    """Return tokens and positions together; the tokens are multiplied by a factor, or ``both`` are."""
    tokens, rows = pieces
    return factor * (tokens + rows) if both else factor * tokens + rows


def standing(model: Model) -> Iterator[Alternative]:
    """Yield one position for all tokens: any row of the table. They are many, and tried where positions stay in later calls."""
    for row in range(1, min(model.config.n_positions, MOST_ROWS) if model.small else 1):
        stay: Formula = lambda c, s, row=row: embedding(c, torch.full((c.end - c.begin,), row))  # noqa: E731
        yield Alternative("position-offset", f"every token is given position {row}", where="wpe", outside={"embed": stay})


@family
def embeddings(model: Model) -> Iterator[Alternative]:
    """Yield embeddings that are multiplied or normed."""
    root = math.sqrt(model.config.n_embd)
    for factor in usual_factors(model):
        named = f" (sqrt(n_embd) = {root:.6g})" if math.isclose(factor, root, rel_tol=1e-9) else ""
        alone: Formula = lambda c, s, f=factor: embedding(c) + (f - 1) * _tokens(c)  # noqa: E731
        words = f"token embeddings are multiplied by {factor:.6g}{named}"
        yield Alternative("embedding-scaled", words, outside={"embed": alone})
        both = Changed("embed", lambda c, y, f=factor: f * y)
        yield Alternative("embedding-scaled", f"{BOTH} are multiplied by {factor:.6g}{named}", outside={"embed": both})
    norms: dict[str, Callable[[Site, Tensor], Tensor]] = {
        "the first block's ln_1": lambda c, y: c.norm(y, "h.0.ln_1"),
        "ln_f": lambda c, y: c.norm(y, "ln_f"),
        "a norm without weight and bias": lambda c, y: layer_norm(y, eps=c.config.layer_norm_epsilon),
    }
    for which, norm in norms.items():
        words = f"the embeddings are normalised before the first block, by {which}"
        yield Alternative("extra-norm", words, where="embed", outside={"embed": Changed("embed", norm)})


@family
def head(model: Model) -> Iterator[Alternative]:
    """Yield a head whose table was reshaped."""
    words = "the head's table was reshaped where it had to be transposed"
    yield Alternative("transposed", words, outside={"head": lambda c, s: _reshaped(c.right("head", s))})


def _reshaped(table: Tensor) -> Tensor:
    return table.reshape(table.shape[::-1]).t()


def orders(layers: int) -> list[tuple[int, ...]]:
    """Return the usual wrong sequences of blocks; one that is skipped, or runs again, is a fault of that block."""
    right = tuple(range(layers))
    out = [right[::-1], *((*right[:n], n + 1, n, *right[n + 2 :]) for n in right[:-1])]
    out += [tuple(sorted(right, key=str)), (*right[1:], 0), (right[-1], *right[:-1]), right + right]
    out += [(n,) * layers for n in (right[0], right[-1])]
    return [order for order in dict.fromkeys(out) if order != right and order]


def sequence_faults(ran: Sequence[int], layers: int, weights_seen: bool = False) -> list[Cause]:
    """Return the faults of a run of the blocks ``ran``, in a model of ``layers`` blocks.

    If one block takes the place of all, its weights in every block give the same numbers, and are the commoner mistake.
    ``weights_seen``: they are not in every block.
    """
    if list(ran) == list(range(layers)):
        return []
    names = ", ".join(f"h.{block}" for block in ran) or "none"
    if len(set(ran)) == 1 < len(ran) and layers > 1:
        if weights_seen or len(ran) != layers:
            words = f"one block runs {len(ran)} times, in place of every block"
            return [Cause.at("layer-repeated", "", words, layer=EVERY, mend=ONE_BLOCK)]
        words = f"it computes with the weights of h.{ran[0]}, or that block runs {len(ran)} times"
        return [Cause.at("wrong-tensor", "", words, layer=block) for block in range(layers) if block != ran[0]]
    faults = []
    for block in range(layers):
        if (times := ran.count(block)) > 1:
            faults.append(Cause.at("layer-repeated", "", f"it runs {times} times; the blocks run are {names}", layer=block))
        elif not times:
            faults.append(Cause.at("layer-missing", "", f"it does not run; the blocks run are {names}", layer=block))
    firsts = list(dict.fromkeys(ran))
    if firsts != sorted(firsts):
        astray = next(i for i, block in enumerate(firsts) if block != sorted(firsts)[i])
        faults.append(Cause.at("layer-order", "", f"the blocks run as {names}", layer=astray))
    return faults


def position_rows(ids: Tensor, room: int, shifts: Iterable[int], tokens: int) -> Iterator[tuple[str, Tensor, str]]:
    """Yield other rows of a position table of ``room`` rows, (T,) or (B, T), for ids (B, T); in words, and what they depend on.

    ``shifts``: by how many rows positions are tried to be off; ``tokens``: of the whole text, of which ``ids`` may be the first.
    """
    batch, at = len(ids), torch.arange(ids.shape[1])
    for n in sorted(set(shifts)):
        if n <= room - tokens:
            yield f"positions begin at row {n}, not at 0", at + n, ""
        if n <= tokens:
            yield f"positions begin at row -{n}, the end of the table", (at - n) % room, ""
            yield f"positions lag by {n}", (at - n).clamp(min=0), ""
    yield "positions count backwards", at.flip(0), TEXT
    yield "every token is given position 0", 0 * at, ""
    words = "rows of the position table are taken by token id, not by position"
    yield words, ids.clamp(max=room - 1), ""
    yield f"{words}, modulo its length", ids % room, ""
    words = "rows of the position table are taken by the row of the batch, not by position"
    yield words, torch.arange(batch)[:, None].expand_as(ids).clamp(max=room - 1), ROWS
    yield "positions go on from one row of the batch to the next", torch.arange(ids.numel()).view(ids.shape) % room, ROWS
    yield "positions go up by 2 from one token to the next", (2 * at).clamp(max=room - 1), ""
    yield "two tokens share each position", at // 2, ""


def sinusoids(tokens: int, width: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the usual (T, D) tables of sines and cosines."""
    places = torch.arange(tokens, dtype=torch.float64)[:, None]
    half = torch.arange((width + 1) // 2, dtype=torch.float64)
    for label, powers in (("2i/D", 2 * half / width), ("i/(D/2 - 1)", half / max(len(half) - 1, 1)), ("4i/D", 4 * half / width)):
        waves = (places / 10000.0**powers).sin(), (places / 10000.0**powers).cos()
        yield f"interleaved, {label}", torch.stack(waves, -1).flatten(1)[:, :width]
        yield f"in halves, {label}", torch.cat(waves, -1)[:, :width]
    every = torch.arange(width, dtype=torch.float64)
    for label, powers in (("", every / width), (", 2i/D", 2 * every / width)):
        angles = places / 10000.0**powers
        yield f"each column of its own frequency{label}", torch.where((every % 2).bool(), angles.cos(), angles.sin())
