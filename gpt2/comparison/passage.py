"""The text of a comparison: its ids and windows, from a text by name, a recording, or random where nobody has a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.comparison.settings import Settings
from gpt2.comparison.sides.side import Scored, Side, first_tokenizer, vocabulary
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.texts import RUNNING, Text, open_text
from gpt2.measure.windows import Windows

TOKENS = 8192  # tokens of the text, by default
DEFAULT_CONTEXT = 1024  # where no side tells how many positions it has


@dataclass(frozen=True, eq=False)
class Passage:
    """The ids (N,) on which all sides are compared, and how they are cut; ``text`` is None for random ids and recordings.

    ``tokenizer`` and ``lengths`` are those that a recording tells: a fingerprint, and the bytes (V,) that each token stands for.
    """

    ids: Tensor
    windows: Windows
    scored: Scored
    text: Text | None = None
    tokenizer: str | None = None
    lengths: Tensor | None = None

    def token_bytes(self, tokenizer: Tokenizer | None) -> Tensor:
        """Return the bytes that each token stands for, (V,) or longer; ones where neither a tokenizer nor a recording tells.

        A byte-level token has its own. What a normaliser drops, an unknown token and a space between words depend on the text:
        then these are the token's mean bytes of this very text, and all of them together are the text's UTF-8 bytes.
        """
        if tokenizer is None:
            return torch.ones(int(self.ids.max()) + 1, dtype=torch.int64) if self.lengths is None else self.lengths
        lengths = torch.tensor(tokenizer.bytes_by_id())
        parted = self.text is not None and len(self.text.documents) > 1
        if self.text is not None and (parted or not tokenizer.exact):
            own = torch.tensor(self.text.lengths(tokenizer)[: len(self.ids)], dtype=torch.float64)
            counts = torch.bincount(self.ids, minlength=tokenizer.n_vocab)
            lengths = torch.where(counts > 0, torch.bincount(self.ids, own, minlength=tokenizer.n_vocab) / counts, lengths)
        return lengths

    def in_tokens_of(self, tokenizer: Tokenizer, first: Tokenizer, n_positions: int | None) -> Passage:
        """Return the same passage, whose ids are those of ``first``, in another tokenizer's. It must be known as text."""
        assert self.text is not None
        text = self.text.beginning(first, len(self.ids))
        windows = text.protocol.windows(n_positions or DEFAULT_CONTEXT)
        return Passage(torch.tensor(text.encode(tokenizer)), windows, self.scored, text)


def open_passage(sides: Sequence[Side], settings: Settings) -> Passage:
    """Return what is compared. Raises InputError: no such text, or one that is too short; recordings of other texts."""
    if recorded := [side for side in sides if side.recording is not None]:
        return _recorded(recorded, sides, settings)
    tokenizer, tokens = first_tokenizer(side.tokenizer for side in sides), settings.tokens
    text = open_text(settings.on, offline=settings.offline) if tokenizer or settings.on else None
    known = [side.n_positions for side in sides if side.n_positions is not None]
    if not any(side.config for side in sides):  # no GPT-2: others have 100,000 positions
        known.append(DEFAULT_CONTEXT)
    windows = (text.protocol if text else RUNNING).windows(min(known))
    if tokens is None:
        tokens = 0 if windows.guide else TOKENS
    if tokens < 0 or tokens == 1:
        raise InputError(f"{tokens} tokens are too few to predict one from another; give 2 or more, or 0 for all of the text")
    if text is None or tokenizer is None:
        name = f"random ids, as no tokenizer is here to read {settings.on}" if settings.on else "random ids"
        ids = _random(sides, tokens, settings.seed)
        return Passage(ids, windows, Scored(name, "", len(ids), windows.context, windows.step, ""))
    ids, told = _read(text, tokenizer, tokens), text.protocol.description
    scored = Scored(text.name, text.sha256, len(ids), windows.context, windows.step, told, text.reading(tokenizer))
    return Passage(ids, windows, scored, text)


def _recorded(recorded: Sequence[Side], sides: Sequence[Side], settings: Settings) -> Passage:
    first, recording = recorded[0], recorded[0].recording
    assert recording is not None
    if settings.on is not None or settings.tokens is not None:
        option = "--on" if settings.on is not None else "--tokens"
        held = f"{recording.scored.name}, {len(recording.ids):,} tokens"
        raise InputError(f"{first.name}: holds its own text ({held}); leave {option} out")
    for side in recorded[1:]:
        other = side.recording
        if other is None or not torch.equal(other.ids, recording.ids) or other.windows != recording.windows:
            raise InputError(f"{first.name} and {side.name}: were made on different texts; save them on one, with one context")
    for side in sides:
        if side.tokenizer is not None and recording.tokenizer not in (None, side.tokenizer.fingerprint):
            raise InputError(f"{first.name}: was saved with another tokenizer than {side.name}'s, so its ids are other words")
        if side.vocab_size is not None and int(recording.ids.max()) >= side.vocab_size:
            raise InputError(f"{first.name}: holds ids beyond the {side.vocab_size:,} of {side.name}; compare one model's files")
        if side.n_positions is not None and side.n_positions < recording.windows.context:
            what = f"predicts from {recording.windows.context:,} tokens, and {side.name} has {side.n_positions:,} positions"
            raise InputError(f"{first.name}: {what}; save it with a context that both have")
    return recording


def _random(sides: Sequence[Side], tokens: int, seed: int) -> Tensor:
    if not (vocab := vocabulary(*sides)):
        raise InputError(f"{sides[0].name}: has no tokenizer to read a text with; compare it with a model that has one")
    return torch.randint(vocab, (tokens or TOKENS,), generator=torch.Generator().manual_seed(seed))


def _read(text: Text, tokenizer: Tokenizer, tokens: int) -> Tensor:
    ids = text.encode(tokenizer)[: tokens or None]
    if len(ids) < 2:
        raise InputError(f"{text.name}: the text is {len(ids)} tokens, too few to predict one from another; give a longer text")
    return torch.tensor(ids)
