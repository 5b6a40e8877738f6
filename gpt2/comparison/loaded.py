"""A side that is asked: its time, and whether what it gives are logits of its tokens; what is measured of one side alone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt2.comparison.distributions import Language, language
from gpt2.comparison.noise import Floor, measure_floor
from gpt2.comparison.passage import DEFAULT_CONTEXT, Passage
from gpt2.comparison.sides.side import Shown, Side, first_tokenizer, require_head, vocabulary
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.generation import Ending, StopText, rows_with_tokens, stream
from gpt2.measure.estimates import Bootstrap
from gpt2.measure.last_words import LastWord, score_last_words
from gpt2.measure.metrics import Logits, Progress, token_losses
from gpt2.model import GPT2
from gpt2.sampling import Sampling


@dataclass(eq=False)
class Loaded:
    """One of the ``sides`` of a comparison. It is asked within ``with loaded.side``.

    ``tokenizer`` reads its text: its partner's, where it has none. ``vocab`` is the number of its own tokens; the side must know
    as many. ``inputs`` counts the tokens that it was run on, ``seconds`` the time of these passes, and ``unnamed`` is the sum of
    what it gives to rows without a token.
    """

    side: Side
    sides: Sequence[Side]
    seconds: float = 0.0
    inputs: int = 0
    unnamed: float = 0.0

    def __post_init__(self) -> None:
        self.tokenizer = self.side.tokenizer or first_tokenizer(each.tokenizer for each in self.sides)
        self.vocab = vocabulary(self.side, self.tokenizer) or vocabulary(*self.sides)

    @property
    def answers(self) -> bool:
        """Whether it gives logits for any ids, which a recording does not."""
        return Shown.LOGITS in self.side.shows and self.side.recording is None

    @property
    def speed(self) -> float:
        """Tokens a second; NaN before it was asked."""
        return self.inputs / self.seconds if self.seconds else math.nan

    @property
    def context(self) -> int:
        return self.side.n_positions or DEFAULT_CONTEXT

    def logits(self, ids: Tensor) -> Tensor:
        """Return the side's logits (B, T, V) of its own tokens, without rows that have none.

        Raises InputError: an id that it does not know; they are hidden states, too few, or not finite.
        """
        if self.vocab and (largest := int(ids.max())) >= self.vocab:
            raise InputError(f"the text holds the id {largest}, and {self.side.name} knows {self.vocab:,} tokens; leave it out")
        began = time.perf_counter()
        logits = self.side.logits(ids)
        self.seconds += time.perf_counter() - began
        self.inputs += ids.numel()
        require_head(logits.size(-1), self.side, self.sides)
        if logits.size(-1) < self.vocab:
            sizes = f"knows {logits.size(-1):,} tokens and the text's tokenizer {self.vocab:,}"
            several = len(self.sides) > 1
            advice = "use models of one tokenizer, or compare it alone" if several else "use the model's own tokenizer"
            raise InputError(f"{self.side.name}: {sizes}; {advice}")
        if self.vocab and logits.size(-1) > self.vocab:
            beyond = logits[..., self.vocab :].float().logsumexp(-1)
            self.unnamed += float((beyond - logits.float().logsumexp(-1)).exp().sum())
            logits = logits[..., : self.vocab]
        self.side.require_finite(logits)
        return logits

    def floor(self, ids: Tensor, *dtypes: torch.dtype | None) -> Floor | None:
        """Return what rounding makes of one of our models in its own dtype, and of its run in others if they are given."""
        model = self.side.gpt2
        known = [dtype for dtype in (self.side.dtype, *dtypes) if dtype is not None and dtype != torch.int8]
        return measure_floor(model, ids, self.vocab, *known) if model is not None and type(model) is GPT2 else None

    def in_its_tokens(self, passage: Passage, first: Tokenizer | None, seed: int) -> Language:
        """Score a text whose ids are those of ``first`` in its own tokens. Raises InputError: the text is known as ids only."""
        if passage.text is None or self.tokenizer is None or first is None:
            raise InputError(f"{self.side.name}: has another tokenizer, and the text is known as ids only; leave it out")
        return alone(self.logits, passage.in_tokens_of(self.tokenizer, first, self.side.n_positions), self.tokenizer, seed)[0]

    @property
    def rows_left_out(self) -> dict[str, str]:
        """Say of rows without a token what they take of the probability, where that is 0.1 % or more; {} else."""
        share = self.unnamed / max(1, self.inputs)
        why = f"they take {share:.1%} of its probability in programs that count them; generate leaves them out too"
        return {f"rows of {self.side.name} without a token": why} if share >= 0.001 else {}

    @torch.inference_mode()
    def continued(self, prompts: Tensor, tokenizer: Tokenizer, new_tokens: int) -> list[list[int]]:
        """Return what the side writes greedily after each prompt (B, T), as ``generate`` does: up to and with its end."""
        texts, ends = [list[int]() for _ in prompts], [Ending(StopText(tokenizer)) for _ in prompts]
        for chosen in self._next_ids(prompts, tokenizer, new_tokens):
            for text, end, token in zip(texts, ends, chosen.tolist(), strict=True):
                text += [] if end.ended else [token]
                end.reached(token)
            if all(end.ended for end in ends):
                break
        return texts

    def _next_ids(self, ids: Tensor, tokenizer: Tokenizer, new_tokens: int) -> Iterator[Tensor]:
        if (model := self.side.gpt2) is not None:
            rows, ids = rows_with_tokens(tokenizer, model.config), ids.to(model.wte.weight.device)
            yield from stream(model, ids, new_tokens, Sampling(0.0), rows=rows)
            return
        held = torch.tensor([tokenizer.holds(i) for i in range(self.vocab)])
        for _ in range(new_tokens):
            logits = self.logits(ids[:, -self.context :])[:, -1].cpu().float()
            yield (chosen := logits.masked_fill(~held, -math.inf).argmax(-1))
            ids = torch.cat((ids, chosen[:, None]), dim=1)

    def last_words(self, passage: Passage, seed: int, progress: Progress) -> LastWord | None:
        """Score the last word of each passage of the text, if it has any and the side can be asked."""
        if self.tokenizer is None or not self.answers or passage.text is None or not passage.text.passages:
            return None
        passages, options = passage.text.passages, {"context": self.context, "seed": seed}
        return score_last_words(self.logits, self.tokenizer, passages, **options, progress=progress)


@torch.inference_mode()
def alone(logits: Logits, passage: Passage, tokenizer: Tokenizer | None, seed: int) -> tuple[Language, Tensor]:
    """Return a model's score on a text in tokens of its own, and the log-probability of each scored token (N,)."""
    losses, targets = [], []
    for inputs, group in passage.windows.batches(passage.ids):
        for row, window in zip(logits(inputs), group, strict=True):
            targets.append(passage.ids[window.first + 1 : window.end + 1])
            scored = row[None, window.first - window.start :].cpu()
            losses.append(token_losses(scored, targets[-1][None])[0].double())
    logp, lengths = -torch.cat(losses), passage.token_bytes(tokenizer)[torch.cat(targets)]
    return language(logp, lengths, passage.windows, Bootstrap(len(logp), seed)), logp
