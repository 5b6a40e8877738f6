"""Measure a pair of sides: the parts that are chosen and possible, from weights to generated text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from gpt2.checkpoint.keys import expected
from gpt2.comparison.activations import Activations, compare_activations
from gpt2.comparison.blame import Blame, find_blame
from gpt2.comparison.cases import Cases, compare_cases
from gpt2.comparison.compatibility import Compatibility, compatibility, on_text, parameters_of_both
from gpt2.comparison.distributions import Distributions, Language, summarise
from gpt2.comparison.loaded import Loaded
from gpt2.comparison.noise import Floor
from gpt2.comparison.passage import Passage
from gpt2.comparison.settings import Settings
from gpt2.comparison.sides.checkpoint_side import CheckpointSide, heads_left_out
from gpt2.comparison.sides.side import Shown, Side, Weights, vocabulary
from gpt2.comparison.weights import WeightChanges, beyond_rounding, compare_weights, distance, quantisation
from gpt2.comparison.words import Words, compare_words
from gpt2.measure.last_words import LastWord
from gpt2.measure.metrics import Logits, Progress
from gpt2.measure.per_token import measure_pair

TRACED = 256  # tokens whose activations are compared, and on which the floor of noise is computed


@dataclass(frozen=True, eq=False)
class Pair:
    """What was measured of b beside a. A part that was not chosen, or is not possible, is None; ``fit`` says why it is not.

    ``language`` is b's score, over its own tokens where these are not a's. ``logp`` (N,) are the log-probabilities of the scored
    tokens, where they are a's, ``logp_a`` those of a. ``moved`` is the norm of the weights' change over the norm.
    """

    fit: Compatibility
    language: Language
    logp: Tensor | None = None
    logp_a: Tensor | None = None
    last_words: LastWord | None = None
    moved: float | None = None
    distributions: Distributions | None = None
    weights: WeightChanges | None = None
    activations: Activations | None = None
    words: Words | None = None
    cases: Cases | None = None
    floor: Floor | None = None


def fit(a: Side, b: Side, passage: Passage, parts: frozenset[Shown]) -> Compatibility:
    """Decide before anything runs what can be measured. Raises InputError: nothing of the two can be matched.

    ``parts`` are those of which all is measured: weights tensor by tensor, activations, and of logits also words and the floor of
    noise. Else it is the distributions, and how far the weights moved.
    """
    found = compatibility(a.config, b.config, a.tokenizer, b.tokenizer)
    heads = heads_left_out(*((a, b) if Shown.WEIGHTS in parts else (b,)))
    found = replace(found, impossible=_not_shown((a, b), parts) | found.impossible | heads)
    return on_text(found, a.tokenizer, b.tokenizer, passage.ids)


def measure(
    a: Loaded, b: Loaded, logits_a: Logits, passage: Passage, settings: Settings, parts: frozenset[Shown], fit: Compatibility
) -> Pair:
    """Load b, and measure it beside a, whose logits on the windows of the passage, in their order, are ``logits_a``."""
    seed, progress, ids = settings.seed, settings.progress, passage.ids
    weights = activations = distributions = words = logp = logp_a = floor = moved = None
    stored = _stored(a.side, b.side)
    if stored and Shown.WEIGHTS in parts and "weights" not in fit.impossible:  # before b takes memory
        weights = _weights(*stored, progress)
    progress(f"{b.side.name}: loading")
    with b.side:
        if Shown.ACTIVATIONS in parts and "activations" not in fit.impossible:
            start = ids[None, : min(passage.windows.context, TRACED)]
            fit = _leaving_out(fit, a.side.left_out(start) | b.side.left_out(start))
            if "activations" not in fit.impossible:
                blocks = a.side.blocks, b.side.blocks
                activations = compare_activations(*blocks, start, threshold=settings.threshold, progress=progress)
        if "distributions" not in fit.impossible:
            measured = measure_pair(logits_a, b.logits, ids, passage.windows, progress=progress)
            distributions = summarise(measured, passage.token_bytes(a.tokenizer), seed=seed)
            language, logp_a, logp = distributions.b, measured.logp_a, measured.logp_b
            if Shown.LOGITS in parts and a.tokenizer is not None and b.tokenizer is not None:
                both = a.tokenizer, b.tokenizer
                words = compare_words(a, b, both, measured, passage, progress=progress)
            del measured
        else:
            language = b.in_its_tokens(passage, a.tokenizer, seed)
        cases = None if settings.cases is None else compare_cases(settings.cases, (a, b), seed=seed, progress=progress)
        last_words = b.last_words(passage, seed, progress)
        if Shown.LOGITS in parts and distributions is not None:
            progress("the floor of noise")
            floor = a.floor(ids[:TRACED], b.side.dtype) or b.floor(ids[:TRACED], a.side.dtype)
    if stored and Shown.WEIGHTS not in parts and "weights" not in fit.impossible:  # of mapped files, whose pages are memory too
        read = stored[0].beside(stored[1], mapped=True)
        moved = distance(parameters_of_both(*(each.config for each in stored)), *read, progress=progress)
    scores = fit, language, logp, logp_a, last_words, moved, distributions
    return Pair(*scores, weights, activations, words, cases, floor)


def blamed(a: Side, b: Side, passage: Passage, settings: Settings) -> Blame | None:
    """Find which parts of b's weights carry the difference from a."""
    vocab = vocabulary(a, b, a.tokenizer, b.tokenizer)
    if not (stored := _stored(a, b)):
        return None
    one, other = stored
    config = replace(one.config, vocab_size=min(one.config.vocab_size, other.config.vocab_size))
    names, text = list(expected(config)), (passage.ids, passage.windows)
    read = one.beside(other)
    return find_blame(config, *read, *text, names=names, vocab=vocab, seed=settings.seed, progress=settings.progress)


def _stored(a: Side, b: Side) -> tuple[Weights, Weights] | None:
    """Return both sides' weights where they can be read before anything runs."""
    return (a.weights, b.weights) if isinstance(a, CheckpointSide) and isinstance(b, CheckpointSide) else None


def _leaving_out(fit: Compatibility, parts: dict[str, str]) -> Compatibility:
    return replace(fit, impossible=fit.impossible | parts)


def _not_shown(sides: tuple[Side, Side], parts: frozenset[Shown]) -> dict[str, str]:
    """Return the chosen parts that a side's nature rules out, each with the reason."""
    missing = {shown.value: [side for side in sides if shown not in side.shows] for shown in Shown if shown in parts}
    return {part: f"{few[0].name} shows only {' and '.join(sorted(few[0].shows))}" for part, few in missing.items() if few}


def _weights(one: Weights, other: Weights, progress: Progress) -> WeightChanges:
    """Compare tensor by tensor, and find the type to which all that changed are a's, rounded."""
    a, b = one.beside(other)
    changes = compare_weights(parameters_of_both(one.config, other.config), a, b, progress=progress)
    changes = replace(changes, rows=other.config.vocab_size - one.config.vocab_size)
    if changes.same_numbers:
        return changes
    small_first = sorted((each for each in changes.tensors if not each.equal), key=lambda each: math.prod(each.shape))
    named = [each.name for each in small_first]
    matrix = [each.name for each in small_first if len(each.shape) == 2][:1]
    if (type := quantisation(a, b, named)) is not None or (type := quantisation(a, b, matrix)) is None:
        return replace(changes, rounded_to=type or "")
    beyond = tuple(beyond_rounding(a, b, named, type))
    return replace(changes, nearly=type, beyond=beyond) if 2 * len(beyond) <= len(named) else changes
