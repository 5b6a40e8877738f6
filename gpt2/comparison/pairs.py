"""Compare the first of several sides with each other one: a list of pairs. Two models are one pair, measured in every part."""

import itertools
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpt2.checkpoint.keys import expected
from gpt2.comparison.blame import TOKENS, find_blame
from gpt2.comparison.cases import compare_cases
from gpt2.comparison.compatibility import Compatibility, fit, require_same_function
from gpt2.comparison.distributions import Language, language, summarise
from gpt2.comparison.noise import SURE, Floor, equal, measure_floor
from gpt2.comparison.passage import Passage
from gpt2.comparison.ranking import Comparisons, Pair, ranked
from gpt2.comparison.results import Comparison, Measured
from gpt2.comparison.settings import Settings
from gpt2.comparison.sides.checkpoint_side import heads_left_out
from gpt2.comparison.sides.opening import open_passage, open_side, open_sides
from gpt2.comparison.sides.side import Read, Side, environment_of
from gpt2.comparison.sides.trace_side import require_name, saving
from gpt2.comparison.tensors import WeightChanges, beyond_rounding, compare_activations, compare_weights, distance, quantisation
from gpt2.comparison.words import compare_words
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.estimates import Estimate
from gpt2.measure.last_words import LastWord, LastWords, last_words_change, score_last_words
from gpt2.measure.metrics import Logits, Progress, token_losses
from gpt2.measure.per_token import measure_pair
from gpt2.model import GPT2

HELD = 2 << 30  # bytes of the first model's logits that are kept in memory; where they are more, it runs again beside each other
TRACED = 256  # tokens whose activations are compared
Floors = dict[torch.dtype | None, Floor | None]


class Saved(NamedTuple):
    """A model; ``step`` is that of a checkpoint of a training run."""

    model: str | GPT2
    step: int | None = None


def compare_sides(models: Sequence[Saved], settings: Settings) -> Comparison | Comparisons:
    """Compare the first side with each other one: two in every part, of several what tells which is best."""
    started, several, seed = time.perf_counter(), len(models) > 2, settings.seed
    saved = settings.save and require_name(settings.save)
    sides = open_sides(*(each.model for each in models), settings=settings)
    for side in sides:
        side.require_head(side.vocab_size)  # of a recording
    passage, env = open_passage(sides, settings), environment_of(sides)
    first, *others = sides
    fits = [fit(first, each, passage.ids, several=several) for each in others]
    if settings.blame:
        require_same_function(fits[0])
    with ExitStack() as stack:
        settings.progress(f"{first.name}: loading")
        stack.enter_context(first)
        last_words = _last_words(first, passage, seed, settings.progress)
        beside = {each.dtype for each, fit in zip(others, fits, strict=True) if "distributions" not in fit.impossible}
        settings.progress("the floor of noise")
        floors = {dtype: measure_floor(first, passage.ids, first.dtype, dtype) for dtype in beside}
        if kept := _kept(first, passage) if several else None:
            stack.close()  # one of the others is in memory at a time
        logits = stack.enter_context(saving(saved, first, passage)) if saved else kept or first.logits
        each_fit = zip(others, fits, strict=True)
        pairs = [measure(first, side, its, logits, floors, passage, settings, several) for side, its in each_fit]
        compared = [(each.distributions.a, each.logp[0]) for each in pairs if each.distributions and each.logp]
        if saved and not compared:
            what = f"was not run over the text beside {sides[1].name}, so it is not saved"
            raise InputError(f"{sides[0].name}: {what}; save it alone")
        if several or compared:
            own, logp = compared[0] if compared else alone(logits, passage, first.text_tokenizer, seed)
        else:
            own = in_its_tokens(first, passage, seed)
    a = first.describe()
    if several:
        heads = Compatibility((), fits[0].vocabularies, heads_left_out(first))
        whole = Pair(a, first.size, first.speed, own, last_words, (logp, logp), compatibility=heads)
        found = zip((whole, *pairs), (side.rows_left_out for side in sides), (saved.step for saved in models), strict=True)
        every = [replace(pair, compatibility=pair.compatibility.without(rows), step=step) for pair, rows, step in found]
        ranking = ranked(every, passage.bootstrap(seed), seed)
        for (before, _), (place, behind) in itertools.pairwise(ranking):
            for n in {before, place} - {0}:
                every[n] = _surer(every[n], behind, (first, sides[n]), passage.ids, settings.progress)
        seconds, spent = time.perf_counter() - started, sum(side.seconds for side in sides)
        return Comparisons(tuple(every), passage.scored, env, seed, seconds, spent, ranking)
    (pair,) = pairs
    pair = _surer(pair, pair.distributions.ratio if pair.distributions else None, sides, passage.ids, settings.progress)
    one, other = last_words, pair.last_words
    both, blame = LastWords(one, other, last_words_change(one, other, seed=seed)) if one and other else None, None
    if settings.blame:
        vocab = min(each.vocab for each in sides)
        part = replace(passage, ids=passage.ids[:TOKENS])
        how = part.ids, part.windows, part.bootstrap(seed)
        blame = find_blame(*_shared(*sides), *how, vocab=vocab, progress=settings.progress)
    measured: dict[str, Any] = {each.name: getattr(pair, each.name) for each in fields(Measured)}
    measured["compatibility"] = pair.compatibility.without(first.rows_left_out | others[0].rows_left_out)
    measured["alone"] = () if pair.distributions else (own.score, pair.language.score)
    about: dict[str, Any] = {"a": a.hashed(), "b": pair.model.hashed(), "text": passage.scored, "environment": env, "seed": seed}
    return Comparison(**measured, **about, last_words=both, blame=blame, seconds=time.perf_counter() - started)


@torch.inference_mode()
def _kept(side: Side, passage: Passage) -> Logits | None:
    """Return a side's logits of the passage's batches, to be asked for in order; None where memory could not hold them."""
    inputs = [inputs for inputs, _ in passage.windows.batches(passage.ids)]  # windows may overlap
    if 4 * side.vocab * sum(map(torch.numel, inputs)) > HELD:
        return None
    kept = itertools.cycle([side.logits(each).cpu() for each in inputs])
    return lambda _: next(kept)


def _surer(pair: Pair, ratio: Estimate | None, sides: Sequence[Side], ids: Tensor, progress: Progress) -> Pair:
    """Return a pair, its floor measured on more tokens where rounding may explain why a ``ratio`` of perplexities is not 1."""
    if ratio is None or equal(ratio) or (floor := pair.floor_above) is None or floor.tokens >= min(SURE, len(ids)):
        return pair
    progress("the floor of noise, on more tokens")
    for side in sides:
        with side:
            if surer := measure_floor(side, ids, *(each.dtype for each in sides), tokens=SURE):
                return replace(pair, floor=surer)
    return pair


def measure(
    a: Side, b: Side, fit: Compatibility, logits: Logits, floors: Floors, passage: Passage, settings: Settings, several: bool
) -> Pair:
    """Load b, and measure it beside a, of which ``logits`` are on the windows of the passage, and ``floors`` by b's dtype."""
    seed, progress, ids, sides = settings.seed, settings.progress, passage.ids, (a, b)
    weights = activations = distributions = words = logp = floor = moved = None
    stored = all("weights" in side.shows for side in sides) and "weights" not in fit.impossible
    if stored and not several:  # before b takes memory
        weights = _weights(*sides, progress)
    progress(f"{b.name}: loading")
    with b:
        cases = None if settings.cases is None else compare_cases(settings.cases, (a, b), seed=seed, progress=progress)
        if not several and "activations" not in fit.impossible:
            start = ids[None, : min(passage.windows.context, TRACED)]
            fit = fit.without(a.left_out(start) | b.left_out(start))
            if "activations" not in fit.impossible:
                activations = compare_activations(a.blocks, b.blocks, start, settings.threshold, progress)
        if "distributions" not in fit.impossible:
            bootstrap = passage.bootstrap(seed)
            measured = measure_pair(logits, b.logits, ids, passage.windows, progress=progress)
            distributions = summarise(measured, passage.token_bytes(a.text_tokenizer), bootstrap)
            language, logp = distributions.b, (measured.logp_a, measured.logp_b)
            if not several and a.text_tokenizer is not None and b.text_tokenizer is not None:
                words = compare_words([(a, a.text_tokenizer), (b, b.text_tokenizer)], measured, passage, progress)
            del measured
        else:
            language = in_its_tokens(b, passage, seed)
        last_words = _last_words(b, passage, seed, progress)
        if distributions is not None:
            floor = floors.get(b.dtype) or measure_floor(b, ids, a.dtype, b.dtype)
    if stored and several:  # of mapped files, whose pages are memory too
        config, *read = _shared(*sides, mapped=True)
        moved = distance(expected(config), *read, progress=progress)
    parts_of: dict[str, Any] = {"distributions": distributions, "weights": weights, "activations": activations, "words": words}
    about = b.describe(), b.size, b.speed, language, last_words, logp, moved, _more_rows(*sides)
    return Pair(*about, compatibility=fit, cases=cases, floor=floor, **parts_of)


def in_its_tokens(side: Side, passage: Passage, seed: int) -> Language:
    """Score a text whose ids are those of the first side in a side's own tokens. Raises InputError: it is known as ids only."""
    own, first = side.text_tokenizer, side.sides[0].text_tokenizer
    if passage.text is None or own is None or first is None:
        raise InputError(f"{side.name}: has another tokenizer, and the text is known as ids only; leave it out")
    return alone(side.logits, passage.in_tokens_of(own, first, side.n_positions), own, seed)[0]


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
    return language(logp, lengths, passage.windows, passage.bootstrap(seed)), logp


def _last_words(side: Side, passage: Passage, seed: int, progress: Progress) -> LastWord | None:
    """Score the last word of each passage of the text, if it has any and the side can be asked."""
    if side.text_tokenizer is None or side.recording is not None or passage.text is None or not passage.text.passages:
        return None
    passages, options = passage.text.passages, {"context": side.context, "seed": seed}
    return score_last_words(side.logits, side.text_tokenizer, passages, **options, progress=progress)


def save_reference(name: str, path: str | Path, settings: Settings) -> Path:
    """Run one side over a text, write what it shows, and return the path. Raises InputError: no such side, text or folder."""
    path, side = require_name(path), open_side(name, settings)
    passage = open_passage([side], settings)
    with side, saving(path, side, passage) as logits, torch.inference_mode():
        for inputs, group in passage.windows.batches(passage.ids):
            logits(inputs)
            settings.progress(f"{name}: {group[-1].end:,} of {len(passage.ids) - 1:,} tokens")
    return path


def _shared(a: Side, b: Side, *, mapped: bool = False) -> tuple[GPT2Config, Read, Read]:
    """Return the sizes that both have, with a head's own matrix if either has one, and a reader of each one's parameters."""
    one, other = a.config, b.config
    assert one is not None
    assert other is not None  # a side that shows its weights has a config
    rows, tied = min(one.vocab_size, other.vocab_size), one.tie_word_embeddings and other.tie_word_embeddings
    return replace(one, vocab_size=rows, tie_word_embeddings=tied), a.weights(rows, mapped=mapped), b.weights(rows, mapped=mapped)


def _more_rows(a: Side, b: Side) -> int:
    """Return how many rows of the vocabulary b has more than a; 0 where one does not tell it."""
    return b.vocab_size - a.vocab_size if a.vocab_size and b.vocab_size else 0


def _weights(one: Side, other: Side, progress: Progress) -> WeightChanges:
    """Compare tensor by tensor, and find the type to which all that changed are a's, rounded."""
    config, a, b = _shared(one, other)
    changes = replace(compare_weights(expected(config), a, b, progress=progress), rows=_more_rows(one, other))
    if changes.same_numbers:
        return changes
    small_first = sorted((each for each in changes.tensors if each.unchanged < 1), key=lambda each: math.prod(each.shape))
    named = [each.name for each in small_first]
    matrix = [each.name for each in small_first if len(each.shape) == 2][:1]
    if (type := quantisation(a, b, named)) is not None or (type := quantisation(a, b, matrix)) is None:
        return replace(changes, rounded_to=type or "")
    beyond = tuple(beyond_rounding(a, b, named, type))
    return replace(changes, nearly=type, beyond=beyond) if 2 * len(beyond) <= len(named) else changes
