"""Compare two models by name, from weights to generated text: ``gpt2.compare`` of two names."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.checkpoint.keys import expected, layer
from gpt2.checkpoint.names import DEFAULT
from gpt2.comparison import page  # noqa: F401 - gives a Comparison its page
from gpt2.comparison.activations import THRESHOLD, compare_activations
from gpt2.comparison.blame import beyond_rounding, find_blame, quantisation
from gpt2.comparison.blame_result import Blame
from gpt2.comparison.bounds import measure_bounds
from gpt2.comparison.bounds_result import Bounds
from gpt2.comparison.cases import compare_cases
from gpt2.comparison.compatibility import (
    Compatibility,
    compatibility,
    on_text,
    parameters_of_both,
    require_same_function,
)
from gpt2.comparison.distributions import Distributions, summarise
from gpt2.comparison.noise import Floor, measure_floor
from gpt2.comparison.passage import DEFAULT_CONTEXT, Passage, open_passage
from gpt2.comparison.results import Comparison
from gpt2.comparison.saving import TRACED, Keep, saving
from gpt2.comparison.sides.checkpoint_side import CheckpointSide, RunningModule, readers
from gpt2.comparison.sides.opening import open_sides
from gpt2.comparison.sides.port import RunningPort
from gpt2.comparison.sides.side import Running, Shown, Side, environment_of, require_head
from gpt2.comparison.subjects import Numerics
from gpt2.comparison.weights import WeightChanges, compare_weights
from gpt2.comparison.words import Words, compare_words
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.last_words import LastWords, last_words_change, score_last_words
from gpt2.measure.metrics import LanguageScore, Logits, Progress, language_score, relative_error, silent
from gpt2.measure.per_token import measure_pair
from gpt2.measure.tracing import trace_blocks
from gpt2.measure.windows import Windows
from gpt2.model import GPT2, eager_attention, sdpa_attention


def compare(
    a: str = DEFAULT,
    b: str = f"hf/{DEFAULT}",
    *,
    on: str | None = None,
    tokens: int | None = None,
    threshold: float = THRESHOLD,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    offline: bool = False,
    blame: bool = False,
    save: Keep | None = None,
    cases: str | None = None,
    progress: Progress = silent,
) -> Comparison:
    """Compare two models by name; arguments and errors are those of :func:`gpt2.comparison.run.compare`."""
    started = time.perf_counter()
    first, second = open_sides(a, b, offline=offline, dtype=dtype, device=device)
    sides = first, second
    for side in sides:
        require_head(side.vocab_size or 0, side, sides)  # of a recording
    tokenizers = sides[0].tokenizer(), sides[1].tokenizer()
    compatible = compatibility(sides[0].config, sides[1].config, *tokenizers)
    compatible = replace(compatible, impossible=_not_shown(sides) | compatible.impossible)
    passage = open_passage(on, tokens, sides, tokenizers, seed, offline=offline)
    ids, windows, text = passage.ids, passage.windows, passage.text
    compatible = on_text(compatible, *tokenizers, ids)
    if blame:
        require_same_function(compatible)
    weights = None if "weights" in compatible.impossible else _weights(sides, progress)
    activations = numerics = distributions = words = bounds = None
    alone: tuple[LanguageScore, ...] = ()
    with ExitStack() as stack:
        progress("loading both models")
        running = stack.enter_context(sides[0].running()), stack.enter_context(sides[1].running())
        start = ids[None, : min(windows.context, TRACED)]
        if "activations" not in compatible.impossible:
            left_out = running[0].left_out(start) | running[1].left_out(start)
            compatible = replace(compatible, impossible=compatible.impossible | left_out)
        if "activations" not in compatible.impossible:
            activations = compare_activations(
                running[0].blocks,
                running[1].blocks,
                start,
                same_shape=compatible.same_shape,
                threshold=threshold,
                progress=progress,
            )
            if weights is not None and weights.same_numbers and a != b:
                numerics = _numerics(sides, running, start, progress)
        own = [Loaded(*each, sides) for each in zip(sides, running, tokenizers, strict=True)]
        if weights is None and all(isinstance(each, RunningPort | RunningModule) for each in running):
            compatible, readable = _read_modules(own, compatible)
            weights = None if "weights" in compatible.impossible else _weights(readable, progress)
        if "distributions" not in compatible.impossible:
            kept: Logits = own[0].logits
            if save is not None:
                kept = stack.enter_context(saving(save, sides[0], running[0], tokenizers[0] or tokenizers[1], passage))
            distributions, words = _distributions(own, kept, passage, seed, progress)
        elif save is None and compatible.vocabularies.comparable:
            bounds = measured_bounds(own, passage, seed, progress)
        elif save is not None:
            raise InputError(f"{a}: was not run over the text beside {b}, so it is not saved; save it alone")
        elif text is not None and not compatible.vocabularies.comparable:
            alone = _alone(own, passage)
        on_cases = None if cases is None else compare_cases(cases, _asked(own, cases), seed=seed, progress=progress)
        last_words = _last_words(own, text.passages, seed, progress) if text is not None and text.passages else None
        floor = None if distributions is None and bounds is None else _floor(own, ids, progress)
    blamed = _blame(own, ids, windows, seed, progress) if blame else None
    env = environment_of(sides)
    return Comparison(
        a=sides[0].describe(env.versions),
        b=sides[1].describe(env.versions),
        compatibility=compatible,
        text=passage.scored,
        weights=weights,
        activations=activations,
        distributions=distributions,
        alone=alone,
        words=words,
        last_words=last_words,
        numerics=numerics,
        environment=env,
        seed=seed,
        seconds=time.perf_counter() - started,
        blame=blamed,
        floor=floor,
        bounds=bounds,
        cases=on_cases,
    )


class Loaded(NamedTuple):
    """One of the two models in memory."""

    side: Side
    running: Running
    tokenizer: Tokenizer | None
    sides: tuple[Side, ...]

    def logits(self, ids: Tensor) -> Tensor:
        """Return the side's logits (B, T, V). Raises InputError: they are hidden states."""
        logits = self.running.logits(ids)
        require_head(logits.size(-1), self.side, self.sides)
        return logits


def _not_shown(sides: tuple[Side, Side]) -> dict[str, str]:
    """Return the parts of a comparison that a side's nature rules out, each with the reason."""
    needs = {"weights": Shown.WEIGHTS, "activations": Shown.ACTIVATIONS, "distributions": Shown.LOGITS}
    missing = {part: [side for side in sides if shown not in side.shows] for part, shown in needs.items()}
    return {part: f"{few[0].name} shows only {' and '.join(sorted(few[0].shows))}" for part, few in missing.items() if few}


def _weights(sides: tuple[Side, Side], progress: Progress) -> WeightChanges | None:
    if not (isinstance(sides[0], CheckpointSide) and isinstance(sides[1], CheckpointSide)):
        return None
    names = [
        (name, re.sub(r"^h\.\d+", "h.{}", name), layer(name)) for name in parameters_of_both(sides[0].config, sides[1].config)
    ]
    a, b = readers(sides[0], sides[1])
    changes = compare_weights(names, a, b, progress=progress)
    if changes.same_numbers:
        return changes
    small_first = sorted((each for each in changes.tensors if not each.equal), key=lambda each: math.prod(each.shape))
    named = [each.name for each in small_first]
    matrix = [each.name for each in small_first if len(each.shape) == 2][:1]
    if (type := quantisation(a, b, named)) is not None or (type := quantisation(a, b, matrix)) is None:
        return replace(changes, rounded_to=type or "")
    beyond = tuple(beyond_rounding(a, b, named, type))
    return replace(changes, nearly=type, beyond=beyond) if 2 * len(beyond) <= len(named) else changes


def _read_modules(pair: list[Loaded], compatible: Compatibility) -> tuple[Compatibility, tuple[Side, Side]]:
    """Return both sides with the checkpoints that users' modules hold, and compare configs; say so where one holds none."""
    a, b = pair
    try:
        sides = [
            CheckpointSide(each.side.name, False, each.running.weights()) if isinstance(each.running, RunningPort) else each.side
            for each in pair
        ]
        fit = compatibility(sides[0].config, sides[1].config, a.tokenizer, b.tokenizer)
    except InputError as error:
        return replace(compatible, impossible=compatible.impossible | {"weights": str(error)}), (a.side, b.side)
    impossible = {part: why for part, why in compatible.impossible.items() if part != "weights"} | fit.impossible
    return replace(compatible, architecture=fit.architecture, impossible=impossible), (sides[0], sides[1])


@torch.no_grad()
def _numerics(sides: tuple[Side, Side], running: tuple[Running, Running], ids: Tensor, progress: Progress) -> Numerics:
    """Compare both sides with a float64 run of our model, on ids (1, T)."""
    checkpoints = [side for side in sides if isinstance(side, CheckpointSide)]
    finer = max(checkpoints, key=lambda side: side.dtype.itemsize).checkpoint
    points: list[tuple[str, float, float]] = []
    exact: dict[str, Tensor] = {}
    walks = trace_blocks(finer.load(torch.float64), ids), running[0].blocks(ids), running[1].blocks(ids)
    for exact, block_a, block_b in zip(*walks, strict=True):
        progress(f"numerics: {next(reversed(exact))}")
        if "logits" in exact:  # the vocabularies may be padded to different lengths
            width = min(block["logits"].size(-1) for block in (exact, block_a, block_b))
            exact, block_a, block_b = ({**block, "logits": block["logits"][..., :width]} for block in (exact, block_a, block_b))
        points += [(name, relative_error(block_a[name], x), relative_error(block_b[name], x)) for name, x in exact.items()]
    rows = []
    for side, loaded in zip(sides, running, strict=True):
        if isinstance(loaded, RunningModule) and isinstance(model := loaded.module, GPT2):
            own = model.h[0].attn.attend
            for kind, attend in (("fused", sdpa_attention), ("spelt out", eager_attention)):
                logits = model.use_attention(attend)(ids)[..., : exact["logits"].size(-1)]
                rows.append((f"{side.name}, attention {kind}", relative_error(logits, exact["logits"])))
            model.use_attention(own)
    return Numerics(tuple(points), tuple(rows))


def _distributions(
    pair: list[Loaded], logits_a: Logits, passage: Passage, seed: int, progress: Progress
) -> tuple[Distributions, Words | None]:
    """Compare both models' predictions after each token; with a tokenizer, also as words."""
    a, b = pair
    tokenizer = a.tokenizer or b.tokenizer
    vocab = _vocabulary(pair)
    measured = measure_pair(logits_a, b.logits, passage.ids, passage.windows, vocab=vocab, progress=progress)
    found = summarise(measured, passage.token_bytes(tokenizer, vocab), seed=seed)
    if tokenizer is None:
        return found, None
    recorded = passage.recording is not None
    words = compare_words(
        a.logits,
        b.logits,
        tokenizer,
        measured,
        passage.ids,
        context=passage.windows.context,
        seed=seed,
        recorded=recorded,
        progress=progress,
    )
    return found, words


def _vocabulary(pair: list[Loaded]) -> int:
    """Return the number of tokens that both have, without padding."""
    sizes = [each.side.vocab_size for each in pair if each.side.vocab_size is not None]
    return min(sizes + [each.tokenizer.n_vocab for each in pair if each.tokenizer is not None])


def _blame(pair: list[Loaded], ids: Tensor, windows: Windows, seed: int, progress: Progress) -> Blame | None:
    a, b = (each.side for each in pair)
    if not (isinstance(a, CheckpointSide) and isinstance(b, CheckpointSide)):
        return None
    config = replace(a.config, vocab_size=min(a.config.vocab_size, b.config.vocab_size))
    names, vocab = list(expected(config)), _vocabulary(pair)
    return find_blame(config, *readers(a, b), ids, windows, names=names, vocab=vocab, seed=seed, progress=progress)


def _floor(pair: list[Loaded], ids: Tensor, progress: Progress) -> Floor | None:
    """Measure what rounding makes of the first of our models, also in the other's dtype if that is coarser."""
    for each, other in zip(pair, reversed(pair), strict=True):
        side, running = each.side, each.running
        if isinstance(side, CheckpointSide) and isinstance(running, RunningModule) and type(running.module) is GPT2:
            progress("the floor of noise")
            dtypes = [dtype for dtype in (side.dtype, other.side.dtype) if dtype is not None and dtype != torch.int8]
            return measure_floor(running.module, ids[:TRACED], _vocabulary(pair), *dtypes)
    return None


def measured_bounds(pair: list[Loaded], passage: Passage, seed: int, progress: Progress) -> Bounds | None:
    """Compare a side that shows all logits with one that shows the likeliest tokens; None for any other two."""
    full = [Shown.LOGITS in each.side.shows for each in pair]
    if sum(full) != 1 or Shown.TOP not in pair[full.index(False)].side.shows:
        return None
    whole, part = pair[full.index(True)], pair[full.index(False)]
    return measure_bounds(
        whole.logits,
        part.running,
        passage.ids,
        passage.windows,
        vocab=_vocabulary(pair),
        full_is_a=full[0],
        recorded=whole.side.recording is not None,
        tokenizer=whole.tokenizer,
        seed=seed,
        progress=progress,
    )


def _alone(pair: list[Loaded], passage: Passage) -> tuple[LanguageScore, ...]:
    """Return each model's loss on the same passage, in tokens of its own tokenizer."""
    tokenizers = [each.tokenizer for each in pair if each.tokenizer is not None]
    scores = []
    for each, tokenizer in zip(pair, tokenizers, strict=True):
        own = passage.in_tokens_of(tokenizer, tokenizers[0], each.side.n_positions)
        vocab = min(tokenizer.n_vocab, each.side.vocab_size or tokenizer.n_vocab)
        scores.append(language_score(each.logits, own.ids, own.token_bytes(tokenizer, vocab), own.windows, vocab=vocab))
    return tuple(scores)


def _asked(pair: list[Loaded], what: str) -> list[tuple[Logits, Tokenizer, int]]:
    """Return each model's logits, tokenizer (its partner's if it has none) and context. Raises InputError: it cannot be asked."""
    shared = next((each.tokenizer for each in pair if each.tokenizer is not None), None)
    if cannot := next((each for each in pair if Shown.LOGITS not in each.side.shows or each.side.recording or not shared), None):
        raise InputError(f"{cannot.side.name}: cannot be asked {what}; give a model that runs here, with a tokenizer")
    return [(each.logits, each.tokenizer or shared, each.side.n_positions or DEFAULT_CONTEXT) for each in pair if shared]


def _last_words(pair: list[Loaded], passages: Sequence[str], seed: int, progress: Progress) -> LastWords | None:
    """Score the last word of each passage, if both models have tokenizers."""
    if any(each.tokenizer is None or Shown.LOGITS not in each.side.shows or each.side.recording for each in pair):
        return None
    a, b = (
        score_last_words(logits, tokenizer, passages, context=context, seed=seed, progress=progress)
        for logits, tokenizer, context in _asked(pair, "passages")
    )
    return LastWords(a, b, last_words_change(a, b, seed=seed))
