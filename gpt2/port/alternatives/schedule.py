"""What a call finds of earlier calls, which texts a program runs, and the ways to read a text in calls.

An alternative with ``steps`` shows only in a text that is read in several calls; :func:`schedules` has these.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from gpt2.port.alternatives.alternative import Alternative, Schedule, family
from gpt2.port.alternatives.masks import lengths
from gpt2.port.graph import ROWS, TEXT, Calls, Edits, Formula, Model, Site, embedding, run

AFTER = "x = wte(ids) + wpe(torch.arange(past, past + T))  # past: how many tokens are in the cache"
PARTS = {"kv": "keys and values", "k": "keys", "v": "values"}
CHUNKS = (8, 4, 16, 2, 5, 3, 6, 7)
MOST_BEFORE = 4  # tokens that are put before those given
MAX_TOKENS = 2048  # of all rows, as one: attention takes memory with their square, 400 MB for twelve heads in float64


# How a text is read


def stepped(prompt: int, tokens: int) -> Calls:
    """Return the calls of a prompt, and then single tokens."""
    return ((0, prompt), *((n, n + 1) for n in range(prompt, tokens)))


def chunked(size: int, tokens: int) -> Calls:
    return tuple((begin, min(begin + size, tokens)) for begin in range(0, tokens, size))


def prompts(model: Model) -> list[Schedule]:
    """Return the schedules of a prompt of every length, and then single tokens; one token at a time is the first."""
    tokens = model.ids.shape[1]
    words = "from token {} on, as in steps after a prompt"
    return [Schedule(words.format(size), stepped(size, tokens)) for size in lengths(model)]


def schedules(model: Model) -> list[Schedule]:
    """Return the ways to read a text in several calls, the likeliest first."""
    tokens = model.ids.shape[1]
    chunks = [
        Schedule(f"in a text that is read {size} tokens at a time", chunked(size, tokens)) for size in CHUNKS if size < tokens
    ]
    some = [*prompts(model)[:1], *chunks, *prompts(model)[:0:-1]]
    return list({one.calls: one for one in some if len(one.calls) > 1}.values())


def prompts_in_chunks(model: Model) -> list[Schedule]:
    """Return the ways to read a prompt some tokens at a time, and then single tokens."""
    tokens = model.ids.shape[1]
    words = "in a text whose first {} tokens are read {} at a time, and the others one by one"
    both = ((prompt, size) for size in CHUNKS for prompt in reversed(lengths(model)) if size < prompt and prompt % size != 1)
    return [Schedule(words.format(*one), (*chunked(one[1], one[0]), *stepped(one[0], tokens)[1:])) for one in both]


def is_prompt(how: Schedule) -> bool:
    """Return whether single tokens follow the first call."""
    return all(end == begin + 1 for begin, end in how.calls[1:])


# What a call finds in a memory


def _memories(change: Callable[[Site, str, Tensor], Tensor], letters: str) -> Edits:
    """Return the edits of keys and values (``letters``) with what a memory gives for the new ones (B, H, t, K)."""

    def formula(letter: str) -> Formula:
        return lambda c, s: change(c, letter, s[f"attn.{letter}h"])

    return {f"attn.{letter}s": formula(letter) for letter in letters}


@family
def memories(model: Model) -> Iterator[Alternative]:
    """Yield caches whose entries are in other places, or those of other tokens and rows."""
    shown: dict[str, Callable[[Site, str, Tensor], Tensor]] = {
        "a call sees the {} of the call before it over its own: each takes the place of the one before": _overwritten,
        "the {} of earlier calls are zero": lambda c, part, new: _changed_past(c, part, new, torch.zeros_like),
        "new {} stand before those of earlier calls": _prepended,
    }
    for (words, change), (letters, what) in itertools.product(shown.items(), PARTS.items()):
        yield Alternative("cache-inconsistent", words.format(what), _memories(change, letters), "attn", steps=True)


def _changed_past(c: Site, part: str, new: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    whole = c.keep((part, c.layer), new)
    past = whole[:, :, : whole.shape[2] - new.shape[2]]
    return torch.cat([change(past) if past.shape[2] else past, new], 2)


def _overwritten(c: Site, part: str, new: Tensor) -> Tensor:
    """Return keys or values of which those of each call behind the first stand behind the first call's, and zeros behind."""
    key = (part, c.layer, "first")
    if not c.begin:
        c.memory[key] = new
        return new
    first = c.memory[key]
    zeros = new.new_zeros(*new.shape[:2], c.end - first.shape[2] - new.shape[2], new.shape[3])
    return torch.cat([first, zeros, new], 2)


def _prepended(c: Site, part: str, new: Tensor) -> Tensor:
    key = (part, c.layer, "front")
    old = c.memory.get(key) if c.begin else None
    c.memory[key] = new if old is None else torch.cat([new, old], 2)
    return c.memory[key]


@family
def shared_memories(model: Model) -> Iterator[Alternative]:
    """Yield caches of which blocks share one."""
    last = model.config.n_layer - 1
    if not last:
        return
    for letters, what in PARTS.items():
        words = f"a block reads the {what} of earlier tokens that the last block has written, as where all share one cache"
        yield Alternative("cache-inconsistent", words, _memories(partial(_lent, last), letters), "attn", steps=True, crosses=True)


def _lent(owner: int, c: Site, part: str, new: Tensor) -> Tensor:
    past = c.memory.get((part, owner)) if c.begin else None
    past = new[:, :, :0] if past is None else past[:, :, : c.begin]
    c.keep((part, c.layer), new)
    return torch.cat([past, new], 2)


@family
def positions_in_calls(model: Model) -> Iterator[Alternative]:
    """Yield positions that go wrong in later calls."""
    room = model.config.n_positions
    rows: dict[str, Callable[[Site], Tensor]] = {
        "begin anew in each call": lambda c: torch.arange(c.end - c.begin),
        "are that of the call's first token": lambda c: torch.full((c.end - c.begin,), c.begin),
        "are one too far in later calls": lambda c: (torch.arange(c.begin, c.end) + int(c.begin > 0)).clamp(max=room - 1),
        "are one too near in later calls": lambda c: torch.arange(c.begin, c.end) - int(c.begin > 0),
    }
    for words, which in rows.items():
        embed: Formula = lambda c, s, which=which: embedding(c, which(c))  # noqa: E731
        shows = "later" not in words and "anew" not in words
        yield Alternative(
            "position-offset", f"positions {words}", where="wpe", outside={"embed": embed}, fix=AFTER, steps=True, at_once=shows
        )


# Texts that a program runs


@family
def texts(model: Model) -> Iterator[Alternative]:
    """Yield programs that run other texts: rows one behind the other, tokens before those given."""
    config, (rows, tokens) = model.config, model.ids.shape
    if rows > 1 and rows * tokens <= MAX_TOKENS:
        words = "a row of the batch sees the tokens of the rows before it, as if the cache were not cleared"
        for goes_on, how in ((True, "; its positions go on"), (False, "; its positions begin at 0")):
            if not goes_on or rows * tokens <= config.n_positions:
                yield _run("batch-dependent", words + how, partial(_rows_follow, goes_on))
    for count in range(1, min(MOST_BEFORE, config.n_positions - tokens) + 1):
        for token in dict.fromkeys((0, config.vocab_size - 1, config.eos_token_id, config.bos_token_id)):
            if token is None or not 0 <= token < config.vocab_size:
                continue
            words = f"{count} token{'s' * (count > 1)} of id {token} {'stand' if count > 1 else 'stands'} before those given"
            yield _run("position-offset", words, partial(_before, count, token), "wpe")


def _run(id: str, words: str, stream: Callable[[Model], Tensor], where: str = "attn") -> Alternative:
    sees = ROWS if id == "batch-dependent" else TEXT
    return Alternative(id, words, where=where, rare=id == "cache-inconsistent", sees=sees, run=stream, crosses=True)


def _rows_follow(goes_on: bool, model: Model) -> Tensor:
    rows, tokens = model.ids.shape
    whole = model.on_ids(model.ids.reshape(1, -1))
    positions = torch.arange(rows * tokens) % (rows * tokens if goes_on else tokens)
    return run(whole, {}, lambda c, s: embedding(c, positions)).reshape(rows, tokens, -1)


def _before(count: int, token: int, model: Model) -> Tensor:
    first = torch.full_like(model.ids[:, :1], token).expand(-1, count)
    return run(model.on_ids(torch.cat([first, model.ids], 1)))[:, count:]
