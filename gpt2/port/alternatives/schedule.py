"""The ways to read a text in calls. An alternative with ``steps`` shows only in a text that is read so."""

from __future__ import annotations

from gpt2.port.alternatives.alternative import IN_STEPS, Schedule
from gpt2.port.alternatives.masks import lengths
from gpt2.port.graph import Calls, Model

CHUNKS = (8, 4, 16, 2, 5, 3, 6, 7)


def stepped(prompt: int, tokens: int) -> Calls:
    """Return the calls of a prompt, and then single tokens."""
    return ((0, prompt), *((n, n + 1) for n in range(prompt, tokens)))


def chunked(size: int, tokens: int) -> Calls:
    return tuple((begin, min(begin + size, tokens)) for begin in range(0, tokens, size))


def prompts(model: Model) -> list[Schedule]:
    """Return the schedules of a prompt of every length, and then single tokens; one token at a time is the first."""
    return [Schedule(IN_STEPS.format(size), stepped(size, model.ids.shape[1])) for size in lengths(model)]


def schedules(model: Model) -> list[Schedule]:
    """Return the ways to read a text in several calls, the likeliest first."""
    words, tokens = "in a text that is read {} tokens at a time", model.ids.shape[1]
    chunks = [Schedule(words.format(size), chunked(size, tokens)) for size in CHUNKS if size < tokens]
    some = [*prompts(model)[:1], *chunks, *prompts(model)[:0:-1]]
    return list({one.calls: one for one in some if len(one.calls) > 1}.values())


def prompts_in_chunks(model: Model) -> list[Schedule]:
    """Return the ways to read a prompt some tokens at a time, and then single tokens."""
    words, tokens = "in a text whose first {} tokens are read {} at a time, and the others one by one", model.ids.shape[1]
    both = ((prompt, size) for size in CHUNKS for prompt in reversed(lengths(model)) if size < prompt and prompt % size != 1)
    return [Schedule(words.format(*one), (*chunked(one[1], one[0]), *stepped(one[0], tokens)[1:])) for one in both]


def is_prompt(how: Schedule) -> bool:
    """Return whether single tokens follow the first call."""
    return all(end == begin + 1 for begin, end in how.calls[1:])
