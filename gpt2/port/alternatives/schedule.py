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
from gpt2.port.graph import ROWS, TEXT, Calls, Edits, Formula, Model, Site, State, embedding, run, split

PARTS = {"kv": "keys and values", "k": "keys", "v": "values"}
CHUNKS = (8, 4, 16, 2, 5, 3, 6, 7)
MOST_BEFORE = 4  # tokens that are put before those given
MAX_TOKENS = 2048  # of all rows, as one: attention takes memory with their square, 400 MB for twelve heads in float64
CLEARED = "write each result over the one before it: out = x @ w, not out += x @ w"
BUFFERS = {
    "attn.heads": ("value-projection-wrong", "the heads' results"),
    "attn.c_proj": ("wrong-tensor", "the output projection's results"),
    "mlp.c_fc": ("wrong-tensor", "the first layer's results"),
    "mlp.act": ("wrong-tensor", "the activations"),
    "mlp.c_proj": ("wrong-tensor", "the second layer's results"),
}


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
        "all {} of earlier calls are the newest token's, as views of one buffer": _newest,
        "the {} of earlier calls are zero": lambda c, part, new: _changed_past(c, part, new, torch.zeros_like),
        "the {} of earlier calls lie one token too far, behind zeros": _moved,
        "the {} of earlier calls are in reverse order": lambda c, part, new: _changed_past(c, part, new, lambda y: y.flip(2)),
        "new {} stand before those of earlier calls": _prepended,
    }
    for (words, change), (letters, what) in itertools.product(shown.items(), PARTS.items()):
        if letters != "kv" or "order" not in words:  # keys and values in another order, both, are the same
            yield Alternative("cache-inconsistent", words.format(what), _memories(change, letters), "attn", steps=True)
    for (which, number), (letters, what) in itertools.product((("last", -1), ("first", 0)), PARTS.items()):
        if len(model.ids) > 1:
            words = f"rows read the {what} that the {which} row has left in the cache"
            lent = partial(_of_row, number)
            yield Alternative("batch-dependent", words, _memories(lent, letters), "attn", steps=True, sees=ROWS)
    for whose, shared in (("", False), (", which all blocks share", True)):
        words = f"earlier keys and values are views of a buffer that each call writes over{whose}"
        edits = _memories(partial(_viewed, shared), "kv")
        yield Alternative("cache-inconsistent", words, edits, "attn", steps=True, crosses=shared)
    words = "the place in the cache is counted in tokens, not in numbers"
    counted: dict[str, Formula] = {f"attn.{one}s": partial(_flat, one) for one in "kv"}
    yield Alternative("cache-inconsistent", words, counted, "attn", steps=True)


def _past(c: Site, part: str, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a memory holds with the new keys or values, and what it held before."""
    whole = c.keep((part, c.layer), new)
    return whole, whole[:, :, : whole.shape[2] - new.shape[2]]


def _changed_past(c: Site, part: str, new: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    _, past = _past(c, part, new)
    return torch.cat([change(past) if past.shape[2] else past, new], 2)


def _moved(c: Site, part: str, new: Tensor) -> Tensor:
    return _changed_past(c, part, new, lambda y: torch.cat([torch.zeros_like(y[:, :, :1]), y[:, :, :-1]], 2))


def _newest(c: Site, part: str, new: Tensor) -> Tensor:
    """Return keys or values of which those since the first call are the newest."""
    whole, past = _past(c, part, new)
    first = c.memory.setdefault((part, c.layer, "first"), torch.tensor(whole.shape[2]))
    count = min(int(first), past.shape[2]) if c.begin else 0
    return torch.cat([whole[:, :, :count], new[:, :, -1:].expand(-1, -1, past.shape[2] - count, -1), new], 2)


def _overwritten(c: Site, part: str, new: Tensor) -> Tensor:
    """Return keys or values of which those of each call behind the first stand behind the first call's, and zeros behind."""
    key = (part, c.layer, "first")
    if not c.begin:
        c.memory[key] = new
        return new
    first = c.memory[key]
    zeros = new.new_zeros(*new.shape[:2], c.end - first.shape[2] - new.shape[2], new.shape[3])
    return torch.cat([first, zeros, new], 2)


def _viewed(shared: bool, c: Site, part: str, new: Tensor) -> Tensor:
    """Return keys or values of which each stands where its call wrote it in a buffer, as the last call left that place."""
    key, places = (part, "buffer") if shared else (part, c.layer, "buffer"), torch.arange(c.end - c.begin)
    old = c.memory.get(key, new[:, :, :0])
    c.memory[key] = torch.cat([new, old[:, :, new.shape[2] :]], 2)
    before = c.memory.get((part, c.layer, "places")) if c.begin else None
    c.memory[part, c.layer, "places"] = places if before is None else torch.cat([before, places])
    return c.memory[key][:, :, c.memory[part, c.layer, "places"]]


def _prepended(c: Site, part: str, new: Tensor) -> Tensor:
    key = (part, c.layer, "front")
    old = c.memory.get(key) if c.begin else None
    c.memory[key] = new if old is None else torch.cat([new, old], 2)
    return c.memory[key]


def _of_row(number: int, c: Site, part: str, new: Tensor) -> Tensor:
    return _changed_past(c, part, new, lambda y: y[number].expand_as(y))


def _flat(part: str, c: Site, s: State) -> Tensor:
    """Return keys or values of a flat memory of numbers, where a call begins at the number of its first token."""
    new, width, key = s[f"attn.{part}"], c.config.n_embd, (part, c.layer, "numbers")
    old = c.memory.get(key) if c.begin else None
    buffer = new.new_zeros(len(new), c.model.config.n_positions * width) if old is None else old.clone()
    buffer[:, c.begin : c.begin + new.shape[1] * width] = new.flatten(1)
    c.memory[key] = buffer
    return split(buffer[:, : c.end * width].unflatten(1, (-1, width)), c.config.n_head)


@family
def shared_memories(model: Model) -> Iterator[Alternative]:
    """Yield caches of which blocks share one."""
    last = model.config.n_layer - 1
    if not last:
        return
    owners: dict[str, Callable[[int], int]] = {
        "the last": lambda layer: last,
        "the first": lambda layer: 0,
        "the one before it": lambda layer: (layer - 1) % (last + 1),
    }
    for (whose, owner), (letters, what) in itertools.product(owners.items(), PARTS.items()):
        words = f"a block reads the {what} of earlier tokens that {whose} block has written"
        edits = _memories(partial(_lent, owner), letters)
        yield Alternative("cache-inconsistent", words, edits, "attn", steps=True, crosses=True)
    for letters, what in PARTS.items():
        words = f"all blocks write their {what} into one cache, each over those of the one before"
        edits = _memories(_one_buffer, letters)
        yield Alternative("cache-inconsistent", words, edits, "attn", steps=True, crosses=True)
    words = "all blocks append their keys and values to one list, and read all of it"
    listed = {**_memories(_listed, "kv"), "attn.weights": _causal_from_behind}
    yield Alternative("cache-inconsistent", words, listed, "attn", steps=True, at_once=True, crosses=True, sees=TEXT)
    words = "the caches of the blocks overlap: each begins one token behind the one before it"
    yield Alternative("cache-inconsistent", words, _memories(_overlapping, "kv"), "attn", steps=True, crosses=True)


def _lent(owner: Callable[[int], int], c: Site, part: str, new: Tensor) -> Tensor:
    past = c.memory.get((part, owner(c.layer))) if c.begin else None
    past = new[:, :, :0] if past is None else past[:, :, : c.begin]
    c.keep((part, c.layer), new)
    return torch.cat([past, new], 2)


def _one_buffer(c: Site, part: str, new: Tensor) -> Tensor:
    old = c.memory.get((part, "one"))
    buffer = new.new_zeros(*new.shape[:2], c.model.config.n_positions, new.shape[3]) if old is None else old.clone()
    buffer[:, :, c.begin : c.end] = new
    c.memory[part, "one"] = buffer
    return buffer[:, :, : c.end]


def _listed(c: Site, part: str, new: Tensor) -> Tensor:
    old = c.memory.get((part, "list"))
    c.memory[part, "list"] = new if old is None else torch.cat([old, new], 2)
    return c.memory[part, "list"]


def _causal_from_behind(c: Site, s: State) -> Tensor:
    """Return the weights where a call's own tokens are the last of all keys."""
    scores = s["attn.scores"]
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(scores.shape[-1] - scores.shape[-2] + 1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def _overlapping(c: Site, part: str, new: Tensor) -> Tensor:
    """Return keys or values of which token t's are in slot t + the block's number, which earlier blocks write as well."""
    old = c.memory.get((part, "slots"))
    room = c.model.config.n_positions + c.config.n_layer
    buffer = new.new_zeros(*new.shape[:2], room, new.shape[3]) if old is None else old.clone()
    buffer[:, :, c.layer + c.begin : c.layer + c.end] = new
    c.memory[part, "slots"] = buffer
    return buffer[:, :, c.layer : c.layer + c.end]


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
            "position-offset", f"positions {words}", where="wpe", outside={"embed": embed}, steps=True, at_once=shows
        )


# Texts that a program runs


@family
def texts(model: Model) -> Iterator[Alternative]:
    """Yield programs that run other texts: rows one behind the other, tokens before those given, a token twice."""
    config, (rows, tokens) = model.config, model.ids.shape
    if rows > 1 and rows * tokens <= MAX_TOKENS:
        words = "a row of the batch sees the tokens of the rows before it, as if the cache were not cleared"
        for goes_on, how in ((True, "; its positions go on"), (False, "; its positions begin at 0")):
            if not goes_on or rows * tokens <= config.n_positions:
                yield _run("batch-dependent", words + how, partial(_rows_follow, goes_on))
    if rows > 1:
        for words, of_stream in (("it adds the tokens' embeddings to it", False), ("its stream is a view of that table", True)):
            words = f"a row changes the table of positions for the rows behind it: {words}"
            yield _run("batch-dependent", words, partial(_positions_written, of_stream), "wpe")
    for node, (id, what) in BUFFERS.items() if config.n_layer > 1 else ():
        words = f"{what} are added to those of the blocks before, as in a buffer that is not cleared"
        yield Alternative(id, words, where=node, fix=CLEARED, run=partial(_carried, node), crosses=True)
    for place in range(1, tokens) if model.small and tokens < config.n_positions else ():
        words = f"token {place - 1} is fed once more before token {place}, as by a loop that begins with the prompt's last token"
        words += ": it stands twice in the cache, and later positions are one too far"
        yield _run("cache-inconsistent", words, partial(_again, place))
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


def _again(place: int, model: Model) -> Tensor:
    x = run(model.on_ids(torch.cat([model.ids[:, :place], model.ids[:, place - 1 :]], 1)))
    return torch.cat([x[:, :place], x[:, place + 1 :]], 1)


def _positions_written(of_stream: bool, model: Model) -> Tensor:
    """Run row after row; each leaves its embedded tokens, or its last stream, in the place of the positions."""
    out, table = [], model.state["wpe.weight"][: model.ids.shape[1]]
    for row in model.ids.split(1):
        x = model.state["wte.weight"][row] + table
        out.append(run(model.on_ids(row), {}, lambda c, s, x=x: x))
        table = (out[-1] if of_stream else x)[0]
    return torch.cat(out)


def _carried(node: str, model: Model) -> Tensor:
    def added(c: Site, s: State) -> Tensor:
        before, made = c.memory.get("carried"), c.right(node, s)
        c.memory["carried"] = made if before is None else made + before
        return c.memory["carried"]

    return run(model, {layer: {node: added} for layer in range(model.config.n_layer)})
