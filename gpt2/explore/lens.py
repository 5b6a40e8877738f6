"""Record one forward pass: attention weights, and the logit lens, the prediction of the final norm and head after every block.

Source: nostalgebraist, "interpreting GPT: the logit lens", 2020.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor, nn

from gpt2.checkpoint.loading import require_rows
from gpt2.checkpoint.names import DEFAULT
from gpt2.comparison.sides.checkpoint_side import CheckpointSide
from gpt2.comparison.sides.side import Side, environment_of
from gpt2.comparison.words import Choice
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.explore.lens_page import MAX_CHARACTERS, MAX_TOKENS, MAX_WEIGHTS, Exploration, Lens, Reading
from gpt2.measure.environment import Environment
from gpt2.measure.metrics import entropy, log_probabilities
from gpt2.measure.per_token import likeliest, measure_rows
from gpt2.measure.tracing import point_at, root_of, trace_blocks
from gpt2.parity.checks import head_of

PROMPT = "JULIET:\nO Romeo, Romeo! wherefore art"
TOP = 8  # candidates kept per reading


@dataclass(frozen=True)
class Explorer:
    """One or two loaded models for any number of prompts; made by :func:`explorer`."""

    sides: tuple[CheckpointSide, ...]
    tokenizers: tuple[Tokenizer, ...]
    environment: Environment

    def look(self, prompt: str = PROMPT) -> Exploration:
        """Run each model over ``prompt``; raises InputError if it is empty, or too long for a model or the page."""
        if len(prompt) > MAX_CHARACTERS:
            raise InputError(f"the prompt has {len(prompt):,} characters; there is room for {MAX_CHARACTERS:,}: shorten it")
        ids = [self._ids(prompt, side, tokenizer) for side, tokenizer in zip(self.sides, self.tokenizers, strict=True)]
        lenses, logits = zip(*map(_look, self.sides, self.tokenizers, ids), strict=True)
        one_language = len({tokenizer.fingerprint for tokenizer in self.tokenizers}) == 1
        js = tuple(_js(*logits)) if len(lenses) == 2 and one_language else None
        return Exploration(prompt, lenses, js, self.environment)

    def _ids(self, prompt: str, side: CheckpointSide, tokenizer: Tokenizer) -> list[int]:
        ids = tokenizer.encode(prompt)
        if not ids:
            raise InputError("the prompt is empty; type a few words")
        require_rows(ids, tokenizer, side.config, side.name)
        weights = MAX_WEIGHTS // (side.config.n_layer * side.config.n_head)
        room = min(MAX_TOKENS, side.config.n_positions, math.isqrt(2 * weights))
        if len(ids) > room:
            raise InputError(f"the prompt makes {len(ids):,} tokens of {side.name}; there is room for {room}: shorten it")
        return ids


@contextmanager
def explorer(*names: str, device: str = "cpu", offline: bool = False) -> Iterator[Explorer]:
    """Load one or two models, named as for :func:`gpt2.comparison.run.compare`, for the time of the ``with`` block."""
    sides = tuple(CheckpointSide.open(name, offline=offline, device=device) for name in names or (DEFAULT,))
    opened = Explorer(sides, text_tokenizers(sides), environment_of(sides))
    with ExitStack() as stack:
        for side in sides:
            stack.enter_context(side)
        yield opened


def text_tokenizers(sides: Sequence[Side]) -> tuple[Tokenizer, ...]:
    """Return each side's own tokenizer, or the first one if it has none; without any, raise an InputError."""
    if (shared := next((side.tokenizer for side in sides if side.tokenizer is not None), None)) is None:
        raise InputError(f"{sides[0].name}: has no tokenizer to read a text with; give a model that comes with one")
    return tuple(side.tokenizer or shared for side in sides)


@torch.inference_mode()
def read_out(model: nn.Module, stream: Tensor) -> Tensor:
    """Apply the final norm and the head to ``stream`` (..., D), as if it left the last block; return logits on the CPU."""
    root = root_of(model)
    return head_of(model, root.ln_f(stream.to(root.wte.weight.device))).cpu()


def _look(side: CheckpointSide, tokenizer: Tokenizer, ids: list[int]) -> tuple[Lens, Tensor]:
    """Return the lens, and the logits (T, V) of the last point."""
    points = ("embed", *(point_at(layer, "") for layer in range(len(root_of(side.program).h))))
    readings, attention = [], []
    for point, block in zip(points, islice(trace_blocks(side.program, torch.tensor([ids])), len(points)), strict=True):
        # A padded vocabulary is cut to the tokenizer's size.
        logits = read_out(side.program, block[point])[0, :, : tokenizer.n_vocab]
        readings.append(_read(logits, ids, tokenizer))
        attention += [block[name][0].float() for name in block if name.endswith(".attn.weights")]
    tokens = tuple(tokenizer.shown(index) for index in ids)
    return Lens(side.describe(), tokens, points, tuple(readings), torch.stack(attention)), logits


def _read(logits: Tensor, ids: list[int], tokenizer: Tokenizer) -> tuple[Reading, ...]:
    logp = log_probabilities(logits)
    top = likeliest(logits, min(TOP, logits.size(-1)))[0]
    chances = logp.gather(1, top).exp().tolist()
    spread = entropy(logp).tolist()
    rows = []
    for at, (chosen, probabilities) in enumerate(zip(top.tolist(), chances, strict=True)):
        choices = tuple(Choice(tokenizer.shown(index), p) for index, p in zip(chosen, probabilities, strict=True))
        right = logp[at, ids[at + 1]] if at + 1 < len(ids) else None
        rank = None if right is None else int((logp[at] > right).sum()) + 1
        rows.append(Reading(choices, spread[at], None if right is None else float(right.exp()), rank))
    return tuple(rows)


def _js(a: Tensor, b: Tensor) -> list[float]:
    vocab = min(a.size(-1), b.size(-1))
    unused = torch.zeros(len(a), dtype=torch.int64)  # the correct tokens, which the divergence does not need
    return measure_rows(a[:, :vocab], b[:, :vocab], unused, 1)[4].tolist()
