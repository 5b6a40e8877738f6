"""The text of a comparison: its ids and windows, from a text by name, a recording, or random where nobody has a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpt2.comparison.sides.side import Recording, Side
from gpt2.comparison.subjects import Scored
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.texts import RUNNING, Text, open_text
from gpt2.measure.windows import Windows

TOKENS = 8192  # tokens of the text, by default
DEFAULT_CONTEXT = 1024  # where no side tells how many positions it has


@dataclass(frozen=True, eq=False)
class Passage:
    """The ids (N,) on which all sides are compared, and how they are cut; ``text`` is None for random ids and recordings."""

    ids: Tensor
    windows: Windows
    text: Text | None
    scored: Scored
    recording: Recording | None = None

    @property
    def written(self) -> str | None:
        """The text itself, where it is known."""
        return None if self.text is None else self.text.text

    def token_bytes(self, tokenizer: Tokenizer | None, vocab: int) -> Tensor:
        """Return the bytes that each token of the text stands for, (V,); ones where neither a tokenizer nor a recording tells."""
        if tokenizer is not None:
            return token_bytes(tokenizer, self.written, self.ids)[:vocab]
        known = None if self.recording is None else self.recording.token_bytes
        return torch.ones(vocab, dtype=torch.int64) if known is None else known

    def in_tokens_of(self, tokenizer: Tokenizer, first: Tokenizer, n_positions: int | None) -> Passage:
        """Return the same passage, whose ids are those of ``first``, in another tokenizer's. It must be known as text."""
        assert self.text is not None
        text = replace(self.text, text=beginning(first, self.text.text, len(self.ids)))
        windows = text.protocol.windows(n_positions or DEFAULT_CONTEXT)
        return Passage(torch.tensor(tokenizer.encode(text.text)), windows, text, self.scored)


def open_passage(
    on: str | None,
    tokens: int | None,
    sides: Sequence[Side],
    tokenizers: Sequence[Tokenizer | None],
    seed: int,
    *,
    offline: bool = False,
) -> Passage:
    """Return what is compared. Raises InputError: no such text, or one that is too short; recordings of other texts."""
    recorded = [side for side in sides if side.recording is not None]
    if recorded:
        return _recorded(recorded, sides, tokenizers, on, tokens)
    text = open_text(on, offline=offline) if any(tokenizers) else None
    windows = (text.protocol if text else RUNNING).windows(fewest_positions(sides))
    if tokens is None:
        tokens = 0 if windows.guide else TOKENS
    ids = _ids(text, next((each for each in tokenizers if each is not None), None), sides, tokens, seed)
    name, sha256, protocol = (text.name, text.sha256, text.protocol.description) if text else ("random ids", "", "")
    return Passage(ids, windows, text, Scored(name, sha256, len(ids), windows.context, windows.step, protocol))


def fewest_positions(sides: Sequence[Side]) -> int:
    """Return the largest context that all sides have; at most the default where none is a GPT-2, since others have 100,000."""
    known = [side.n_positions for side in sides if side.n_positions is not None]
    return min(known if any(side.config for side in sides) else [*known, DEFAULT_CONTEXT])


def token_bytes(tokenizer: Tokenizer, text: str | None, ids: Tensor) -> Tensor:
    """Return the bytes that each token stands for, (V,): on ``text``, whose first ids are ``ids``, if they depend on it.

    A byte-level token has its own bytes. What a normaliser drops, an unknown token and a space between words depend on the text:
    then these are the token's mean bytes of this very text, and all of them together are the text's UTF-8 bytes.
    """
    lengths = torch.tensor(tokenizer.bytes_by_id())
    if tokenizer.exact or text is None:
        return lengths
    own = torch.tensor(tokenizer.lengths(text)[: len(ids)], dtype=torch.float64)
    counts = torch.bincount(ids, minlength=tokenizer.n_vocab)
    return torch.where(counts > 0, torch.bincount(ids, own, minlength=tokenizer.n_vocab) / counts, lengths)


def beginning(tokenizer: Tokenizer, text: str, count: int) -> str:
    """Return the beginning of a text that its first ``count`` ids stand for."""
    if tokenizer.exact:
        return tokenizer.decode(tokenizer.encode(text)[:count])
    return text.encode()[: sum(tokenizer.lengths(text)[:count])].decode()


def _recorded(
    recorded: Sequence[Side], sides: Sequence[Side], tokenizers: Sequence[Tokenizer | None], on: str | None, tokens: int | None
) -> Passage:
    first, recording = recorded[0], recorded[0].recording
    assert recording is not None
    if on is not None or tokens is not None:
        option = "--on" if on is not None else "--tokens"
        held = f"{recording.text}, {len(recording.ids):,} tokens"
        raise InputError(f"{first.name}: holds its own text ({held}); leave {option} out")
    for side in recorded[1:]:
        other = side.recording
        if other is None or not torch.equal(other.ids, recording.ids) or other.windows != recording.windows:
            raise InputError(f"{first.name} and {side.name}: were made on different texts; save them on one, with one context")
    for side, tokenizer in zip(sides, tokenizers, strict=True):
        if tokenizer is not None and recording.tokenizer not in (None, tokenizer.fingerprint):
            raise InputError(f"{first.name}: was saved with another tokenizer than {side.name}'s, so its ids are other words")
        if side.vocab_size is not None and int(recording.ids.max()) >= side.vocab_size:
            raise InputError(f"{first.name}: holds ids beyond the {side.vocab_size:,} of {side.name}; compare one model's files")
        if side.n_positions is not None and side.n_positions < recording.windows.context:
            what = f"predicts from {recording.windows.context:,} tokens, and {side.name} has {side.n_positions:,} positions"
            raise InputError(f"{first.name}: {what}; save it with a context that both have")
    windows = recording.windows
    scored = Scored(recording.text, recording.sha256, len(recording.ids), windows.context, windows.step, recording.told)
    return Passage(recording.ids, windows, None, scored, recording)


def _ids(text: Text | None, tokenizer: Tokenizer | None, sides: Sequence[Side], tokens: int, seed: int) -> Tensor:
    if tokens < 0 or tokens == 1:
        raise InputError(f"{tokens} tokens are too few to predict one from another; give 2 or more, or 0 for all of the text")
    if text is None or tokenizer is None:
        vocab = min((side.vocab_size for side in sides if side.vocab_size is not None), default=0)
        if not vocab:
            raise InputError(f"{sides[0].name}: has no tokenizer to read a text with; compare it with a model that has one")
        return torch.randint(vocab, (tokens or TOKENS,), generator=torch.Generator().manual_seed(seed))
    ids = tokenizer.encode(text.text)[: tokens or None]
    if len(ids) < 2:
        raise InputError(f"{text.name}: the text is {len(ids)} tokens, too few to predict one from another; give a longer text")
    return torch.tensor(ids)
