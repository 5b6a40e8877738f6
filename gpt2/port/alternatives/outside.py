"""What surrounds the blocks: tokens, positions, embeddings, the head's table, last steps, and the sequence of blocks."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, Changed
from gpt2.port.alternatives.norms import layer_norm
from gpt2.port.alternatives.wiring import usual_factors
from gpt2.port.graph import ROWS, Formula, Function, Model, Site, embedding
from gpt2.port.terms.causes import Cause
from gpt2.port.terms.places import EVERY

MOST_SHIFTS = 33  # by how much positions are tried to be off, on a small model
SHIFTS = (1, 2, 3)  # the same on a large one
MOST_ROWS = 64  # of the position table, that steps are tried to stay at
SEQUENCE = ("layer-order", "layer-missing", "layer-repeated")
ONE_BLOCK = "h = nn.ModuleList([Block(config) for _ in range(n_layer)])  # [Block(config)] * n_layer is one block, n times"
AFTER = "x = wte(ids) + wpe(torch.arange(past, past + T))  # past: how many tokens are in the cache"
TOKENS, BOTH = "token embeddings", "the embeddings, tokens and positions together,"
# What programs do to their logits (..., V) before they give them, where GPT-2 does nothing.
LAST_STEPS: tuple[tuple[Cause, Function], ...] = tuple(
    (Cause.at(id, "logits", words), formula)
    for id, words, formula in (
        ("logits-softmaxed", "each token's mean logit is taken off", lambda x: x - x.mean(-1, keepdim=True)),
        ("logits-softmaxed", "each token's largest logit is taken off", lambda x: x - x.amax(-1, keepdim=True)),
        ("logits-softmaxed", "the exponential of each logit is given", torch.exp),
        ("logits-softmaxed", "each logit goes through a sigmoid", torch.sigmoid),
        ("logits-scaled", "each logit goes through a tanh", torch.tanh),
        *(("logits-scaled", f"logits are capped: {n} * tanh(logits / {n})", lambda x, n=n: n * (x / n).tanh()) for n in (15, 30)),
        ("logits-scaled", "each logit goes through a ReLU", torch.relu),
    )
)
BY = "rows of the position table are taken by"
Rows = Callable[[Tensor, int], Tensor]  # from ids (B, T), and how many rows the table has
# Other rows of the position table, (B, T), and what they depend on.
OTHER_ROWS: dict[str, tuple[Rows, str]] = {
    "every token is given position 0": (lambda ids, room: 0 * ids, ""),
    f"{BY} token id, not by position": (lambda ids, room: ids.clamp(max=room - 1), ""),
    f"{BY} token id, not by position, modulo its length": (lambda ids, room: ids % room, ""),
    f"{BY} the row of the batch, not by position": (lambda ids, room: _numbers(ids.t()).t().clamp(max=room - 1), ROWS),
}
# Positions that go wrong in later calls, from a call's first token and the one behind its last.
IN_CALLS: dict[str, Callable[[int, int], Tensor]] = {
    "begin anew in each call": lambda a, e: torch.arange(e - a),
    "are that of the call's first token": lambda a, e: torch.full((e - a,), a),
}


def _numbers(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


def other_rows(model: Model) -> Iterator[tuple[str, Rows, str]]:
    """Yield other rows of the position table that the text has, in words, and what they depend on."""
    tokens, room = model.ids.shape[1], model.config.n_positions
    usual = range(1, min(room, MOST_SHIFTS)) if model.small else SHIFTS
    for n in sorted({n for n in (*usual, tokens, room - tokens) if n > 0}):
        if n <= room - tokens:
            yield f"positions begin at row {n}, not at 0", lambda ids, room, n=n: _numbers(ids) + n, ""
        if n <= tokens:
            words = f"each token has the row {n} before its own, and the first ones the last rows of the table"
            yield words, lambda ids, room, n=n: (_numbers(ids) - n) % room, ""
            yield f"positions lag by {n}", lambda ids, room, n=n: (_numbers(ids) - n).clamp(min=0), ""
    yield from ((words, rows, sees) for words, (rows, sees) in OTHER_ROWS.items())


def positions(model: Model) -> Iterator[Alternative]:
    """Yield other positions; also beside token embeddings that are multiplied by the root of the width, as people do."""
    root, room, table = math.sqrt(model.config.n_embd), model.config.n_positions, model.state["wpe.weight"]
    added: list[tuple[str, str, Callable[[Site], Tensor], str]] = []  # id, words, what is added, what it depends on

    for words, rows, sees in other_rows(model):
        added.append(("position-offset", words, lambda c, f=rows: table[f(c.model.ids, room)[..., c.begin : c.end]], sees))
    for label, waves in sinusoids(model.ids.shape[1], model.config.n_embd):
        words, waves = f"positions are sines and cosines, not the checkpoint's learned ones ({label})", waves.to(model.dtype)
        added.append(("position-sinusoidal", words, lambda c, w=waves: w[c.begin : c.end], ""))
    added.append(("position-missing", "no positions are added", lambda c: 0 * table[c.begin : c.end], ""))
    for id, words, what, sees in added:
        for scaled, (tokens, both) in {"": (1.0, 1.0), TOKENS: (root, 1.0), BOTH: (root, root)}.items():
            also = (("embedding-scaled", f"{scaled} are multiplied by {root:.6g} (sqrt(n_embd) = {root:.6g})"),) if scaled else ()
            embed: Formula = lambda c, s, f=what, t=tokens, p=both: t * c.words + p * f(c)  # noqa: E731
            yield Alternative(id, words, {"embed": embed}, "wpe", also, sees=sees, rare=bool(also))
    for words, at in IN_CALLS.items():
        embed = lambda c, s, at=at: embedding(c, at(c.begin, c.end).clamp(max=room - 1))  # noqa: E731
        words = f"positions {words}"
        yield Alternative("position-offset", words, {"embed": embed}, "wpe", fix=AFTER, steps=True)


def standing(model: Model) -> Iterator[Alternative]:
    """Yield one position for all tokens: any row of the table. They are many, and tried where positions stay in later calls."""
    for row in range(1, min(model.config.n_positions, MOST_ROWS) if model.small else 1):
        stay: Formula = lambda c, s, row=row: embedding(c, torch.full((c.end - c.begin,), row))  # noqa: E731
        yield Alternative("position-offset", f"every token is given position {row}", {"embed": stay}, "wpe")


def embeddings(model: Model) -> Iterator[Alternative]:
    """Yield embeddings that are multiplied or normed, and a head whose table was reshaped."""
    root = math.sqrt(model.config.n_embd)
    for factor in usual_factors(model):
        named = f"{factor:.6g} (sqrt(n_embd) = {root:.6g})" if math.isclose(factor, root, rel_tol=1e-9) else f"{factor:.6g}"
        alone: Formula = lambda c, s, f=factor: embedding(c) + (f - 1) * c.words  # noqa: E731
        for what, embed in ((TOKENS, alone), (BOTH, Changed("embed", lambda c, y, f=factor: f * y))):
            yield Alternative("embedding-scaled", f"{what} are multiplied by {named}", {"embed": embed})
    norms: dict[str, Callable[[Site, Tensor], Tensor]] = {
        "the first block's ln_1": lambda c, y: c.norm(y, "h.0.ln_1"),
        "ln_f": lambda c, y: c.norm(y, "ln_f"),
        "a norm without weight and bias": lambda c, y: layer_norm(y, eps=c.config.layer_norm_epsilon),
    }
    for which, norm in norms.items():
        words = f"the embeddings are normalised before the first block, by {which}"
        yield Alternative("extra-norm", words, {"embed": Changed("embed", norm)}, "embed")
    reshaped = Changed("head", lambda c, table: table.reshape(table.shape[::-1]).t())
    yield Alternative("transposed", "the head's table was reshaped where it had to be transposed", {"head": reshaped})


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
