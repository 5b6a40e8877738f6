"""The text of a comparison: its ids and windows, the bytes of its tokens, and what a report says of it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.data import Tokenizer
from gpt2.measure.estimates import Bootstrap
from gpt2.measure.metrics import LanguageScore
from gpt2.measure.texts import Text
from gpt2.measure.windows import Windows

DEFAULT_CONTEXT = 1024  # where no side tells how many positions it has


@dataclass(frozen=True)
class Scored:
    """The scored text: ``sha256`` of the whole text, and the number of ``tokens`` used from its beginning."""

    name: str
    sha256: str
    tokens: int
    context: int
    stride: int
    told: str  # the protocol in words
    reading: str = ""  # how many documents it has, what parts them, and line ends that were read as others

    def cut(self, scores: Iterable[LanguageScore]) -> str:
        """Return in words how many tokens each model is scored on, how they are cut, and how the text was read."""
        counts = ((f"{one.tokens:,} token{'s' * (one.tokens > 1)} scored", one) for one in scores)
        each = dict.fromkeys(f"{count}, context {one.context}, stride {one.stride}" for count, one in counts)
        return "; ".join(filter(None, (" → ".join(each), self.reading)))

    def bits_per(self, scores: Iterable[LanguageScore]) -> str:
        """Return the unit of bits per byte; ids without a tokenizer have no bytes, so their unit is the token."""
        return "bits per byte" if self.sha256 or any(score.bytes != score.tokens for score in scores) else "bits per token"


@dataclass(frozen=True, eq=False)
class Passage:
    """The ids (N,) on which all sides are compared, and how they are cut; ``text`` is None for random ids and recordings.

    ``tokenizer`` and ``lengths`` are those that a recording tells: a fingerprint, and the bytes (V,) that each token stands for.
    ``documents`` are the numbers (N,) of those to which the ids belong, a mark to the one before it; None: not known.
    """

    ids: Tensor
    windows: Windows
    scored: Scored
    text: Text | None = None
    tokenizer: str | None = None
    lengths: Tensor | None = None
    documents: Tensor | None = None

    def token_bytes(self, tokenizer: Tokenizer | None) -> Tensor:
        """Return the bytes that each token stands for, (V,) or longer; ones where neither a tokenizer nor a recording tells.

        Where they depend on the neighbours, these are the token's mean bytes of this very text.
        """
        if self.lengths is not None:
            return self.lengths
        if tokenizer is None:
            return torch.ones(int(self.ids.max()) + 1, dtype=torch.int64)
        lengths = torch.tensor(tokenizer.bytes_by_id())
        if self.text is not None and (self.text.marks or not tokenizer.exact):
            own = torch.tensor(self.text.lengths(tokenizer)[: len(self.ids)], dtype=torch.float64)
            counts = torch.bincount(self.ids, minlength=tokenizer.n_vocab)
            lengths = torch.where(counts > 0, torch.bincount(self.ids, own, minlength=tokenizer.n_vocab) / counts, lengths)
        return lengths

    def bootstrap(self, seed: int) -> Bootstrap:
        """Return what draws its scored tokens again: blocks of a text, or of several documents whole ones."""
        targets = torch.cat([torch.arange(window.first, window.end) for window in self.windows.of(len(self.ids))]) + 1
        return Bootstrap(len(targets), seed, groups=None if self.documents is None else self.documents[targets])

    def in_tokens_of(self, tokenizer: Tokenizer, first: Tokenizer, n_positions: int | None) -> "Passage":
        """Return the same passage, whose ids are those of ``first``, in another tokenizer's. It must be known as text."""
        assert self.text is not None
        text = self.text.beginning(first, len(self.ids))
        windows = text.protocol.windows(n_positions or DEFAULT_CONTEXT)
        ids, documents = read(text, tokenizer)
        return Passage(ids, windows, self.scored, text, documents=documents)


def read(text: Text, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Return the ids (N,) of a text, and the number of the document of each."""
    laid = [torch.tensor(own, dtype=torch.int64) for own in text.laid_out(tokenizer)]
    return torch.cat(laid), torch.arange(len(laid)).repeat_interleave(torch.tensor(list(map(len, laid))))
