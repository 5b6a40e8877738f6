"""Compare the first of several sides with each other one: a list of pairs. Two models are the case of one pair."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch

from gpt2.comparison.compatibility import Compatibility, require_same_function
from gpt2.comparison.distributions import perplexity_ratio
from gpt2.comparison.loaded import Loaded, alone
from gpt2.comparison.many_results import Candidate, Comparisons, Ranked
from gpt2.comparison.pair import Pair, blamed, fit, measure
from gpt2.comparison.passage import Passage, open_passage
from gpt2.comparison.reference import require_name, saving
from gpt2.comparison.results import Comparison
from gpt2.comparison.settings import Settings
from gpt2.comparison.sides.checkpoint_side import heads_left_out
from gpt2.comparison.sides.opening import open_sides
from gpt2.comparison.sides.side import Model, Shown, environment_of, require_head
from gpt2.errors import InputError
from gpt2.measure.estimates import Bootstrap
from gpt2.measure.last_words import LastWords, last_words_change
from gpt2.measure.metrics import Logits
from gpt2.model import GPT2

HELD = 2 << 30  # bytes of the first model's logits that are kept in memory; where they are more, it runs again beside each other


def compare_sides(
    models: Sequence[str | GPT2], steps: Sequence[int | None], settings: Settings, *, hashes: bool = True
) -> Comparison | Comparisons:
    """Compare the first side with each other one: two in every part, of several what tells which is best.

    Arguments and errors are those of :func:`gpt2.comparison.run.compare`; ``steps`` are a training run's, and of several models
    the ``hashes`` of their files are left out if they are not asked for. Of several, one model is in memory at a time, and the
    first beside it where its logits are too many to keep.
    """
    started, several = time.perf_counter(), len(models) > 2
    parts, saved = frozenset(() if several else Shown), settings.save and require_name(settings.save)
    sides = open_sides(*models, settings=settings)
    for side in sides:
        require_head(side.vocab_size or 0, side, sides)  # of a recording
    passage = open_passage(sides, [side.tokenizer for side in sides], settings)
    first, *others = (Loaded(side, sides) for side in sides)
    fits = [fit(first.side, each.side, passage, parts) for each in others]
    if settings.blame:
        require_same_function(fits[0])
    with ExitStack() as stack:
        settings.progress(f"{first.side.name}: loading")
        stack.enter_context(first.side)
        last_words = first.last_words(passage, settings.seed, settings.progress)
        if kept := _kept(first, passage) if several else None:
            stack.close()  # one of the others is in memory at a time
        logits = stack.enter_context(saving(saved, first, passage)) if saved else kept or first.logits
        pairs = [measure(first, b, logits, passage, settings, parts, fit) for b, fit in zip(others, fits, strict=True)]
        compared = next(((pair.distributions.a, pair.logp_a) for pair in pairs if pair.distributions is not None), None)
        if saved and compared is None:
            raise InputError(
                f"{sides[0].name}: was not run over the text beside {sides[1].name}, so it is not saved; save it alone"
            )
        if compared is not None:
            own, logp = compared
        elif several:
            own, logp = alone(logits, passage, first.tokenizer, settings.seed)
        else:
            own, logp = first.in_its_tokens(passage, first.tokenizer, settings.seed), None
    env = environment_of(sides)
    described = [side.describe(env.versions, hashes=hashes or not several) for side in sides]
    if several:
        whole = Pair(
            Compatibility((), fits[0].vocabularies, heads_left_out(first.side)), language=own, logp=logp, last_words=last_words
        )
        rows = zip((first, *others), described, (whole, *pairs), steps, strict=True)
        candidates = tuple(_candidate(first, *row) for row in rows)
        ranking, spent = _ranking(candidates, (whole, *pairs), settings.seed), sum(each.seconds for each in (first, *others))
        seconds = time.perf_counter() - started
        return Comparisons(candidates, passage.scored, env, settings.seed, seconds, spent, ranking=ranking)
    (pair,), (other,) = pairs, others
    left_out = pair.fit.impossible | first.rows_left_out | other.rows_left_out
    change = last_words and pair.last_words and last_words_change(last_words, pair.last_words, seed=settings.seed)
    parts_of = ("distributions", "weights", "activations", "words", "cases", "floor")
    return Comparison(
        a=described[0],
        b=described[1],
        compatibility=replace(pair.fit, impossible=left_out),
        text=passage.scored,
        **{name: getattr(pair, name) for name in parts_of},
        alone=() if pair.distributions else (own.score, pair.language.score),
        last_words=LastWords(last_words, pair.last_words, change) if last_words and pair.last_words and change else None,
        blame=blamed(sides[0], sides[1], passage, settings) if settings.blame else None,
        environment=env,
        seed=settings.seed,
        seconds=time.perf_counter() - started,
    )


def _candidate(first: Loaded, loaded: Loaded, model: Model, pair: Pair, step: int | None) -> Candidate:
    """Return what is said of one of several sides, the first one too."""
    side, speed = loaded.side, loaded.inputs / loaded.seconds if loaded.seconds else math.nan
    more = side.vocab_size - first.side.vocab_size if side.vocab_size and first.side.vocab_size else 0
    known = pair.language, pair.last_words, pair.distributions, pair.moved, pair.fit.impossible | loaded.rows_left_out
    return Candidate(model, step, side.size, speed, *known, more)


@torch.inference_mode()
def _kept(loaded: Loaded, passage: Passage) -> Logits | None:
    """Return a model's logits of the passage's batches, to be asked for in order; None where memory could not hold them."""
    inputs = [inputs for inputs, _ in passage.windows.batches(passage.ids)]  # windows may overlap
    if 4 * loaded.vocab * sum(map(torch.numel, inputs)) > HELD:
        return None
    kept = itertools.cycle([loaded.logits(each).cpu() for each in inputs])
    return lambda _: next(kept)


def _ranking(candidates: Sequence[Candidate], pairs: Sequence[Pair], seed: int) -> tuple[Ranked, ...]:
    """Return the models from the best on, by what the text asks, each with its distance from the one before."""
    worth = [each.language.bits_per_byte.value for each in candidates]
    losses = [None if pair.logp is None else -pair.logp for pair in pairs]
    if all(each.last_words for each in candidates):
        losses = [torch.tensor(each.last_words.losses, dtype=torch.float64) for each in candidates if each.last_words]
        worth = [float(each.mean()) for each in losses if each is not None]
    order = sorted(range(len(worth)), key=lambda n: (math.isnan(worth[n]), worth[n]))
    ranked = [Ranked(order[0], None)]
    for before, n in itertools.pairwise(order):
        one, other = losses[before], losses[n]
        paired = None if one is None or other is None else perplexity_ratio(-one, -other, Bootstrap(len(other), seed))
        ranked.append(Ranked(n, paired))
    return tuple(ranked)
