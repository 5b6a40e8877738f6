"""Compare several models, each with the first: pairs with chosen parts, in which the first one's logits are computed once."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from gpt2.checkpoint.keys import expected
from gpt2.comparison.compatibility import Compatibility, compatibility, on_text, parameters_of_both
from gpt2.comparison.distributions import Language, perplexity_ratio, summarise
from gpt2.comparison.loaded import Loaded, alone
from gpt2.comparison.many_results import Against, Candidate, Comparisons, Ranked, paper_figures
from gpt2.comparison.passage import Passage, Settings, open_passage
from gpt2.comparison.sides.checkpoint_side import CheckpointSide, heads_left_out, readers
from gpt2.comparison.sides.opening import open_sides
from gpt2.comparison.sides.side import Side, environment_of, first_tokenizer
from gpt2.comparison.weights import distance, quantisation
from gpt2.measure.estimates import Bootstrap
from gpt2.measure.last_words import LastWord
from gpt2.measure.metrics import Logits, Progress
from gpt2.measure.per_token import measure_pair

HELD = 2 << 30  # bytes of the first model's logits that are kept in memory; where they are more, it runs again beside each other
FLOOR_TOKENS = 64  # on which the first model's floor of noise is computed


def compare_many(names: Sequence[str], steps: Sequence[int | None], settings: Settings, *, hashes: bool = True) -> Comparisons:
    """Compare models, or a training run's ``steps``, each with the first: quality with paired intervals, KL, weights and speed.

    Settings and errors are those of :func:`gpt2.comparison.run.compare`; ``hashes`` are of the models' files, which the JSON and
    the page hold and the table does not show. One model is in memory at a time, and the first beside it where its logits are too
    many to keep.
    """
    started, seed, progress, forward = time.perf_counter(), settings.seed, settings.progress, 0.0
    sides = open_sides(*names, settings=settings)
    first, own, env = sides[0], [side.tokenizer() for side in sides], environment_of(sides)
    passage = open_passage(sides, own, settings)
    reads = [tokenizer or first_tokenizer(own) for tokenizer in own]  # the text
    shown: dict[int, tuple[Language, Tensor | None]] = {}  # the log-probabilities only where they are of the same tokens

    def pair(n: int) -> Candidate:
        """Measure a model beside the first one, and let it go."""
        nonlocal forward
        side, against = sides[n], None
        progress(f"{side.name}: loading")
        fit = on_text(compatibility(first.config, side.config, own[0], own[n]), own[0], own[n], passage.ids)
        with side.running() as running:
            b = Loaded(side, running, reads[n], sides)
            words = b.last_words(passage, seed, progress)
            if fit.vocabularies.comparable:
                found = measure_pair(logits, b.logits, passage.ids, passage.windows, progress=progress)
                both = summarise(found, passage.token_bytes(reads[0]), seed=seed)
                kl = both.kl_ab
                against = Against(both.ratio, both.bits, kl.mean, kl.max, both.same_top, both.only_a, both.only_b)
                shown[0], shown[n] = (both.a, found.logp_a), (both.b, found.logp_b)
            else:
                shown[n] = b.in_its_tokens(passage, reads[0], seed), None
        forward += b.seconds
        return candidate(n, b, words, fit.impossible, against, *_weights(first, side, fit, progress))

    def candidate(
        n: int,
        loaded: Loaded,
        words: LastWord | None,
        impossible: Mapping[str, str],
        against: Against | None = None,
        moved: float | None = None,
        made_of: str = "",
    ) -> Candidate:
        side, speed = loaded.side, loaded.inputs / loaded.seconds if loaded.seconds else math.nan
        left_out = {**impossible, **heads_left_out(side), **loaded.rows_left_out}
        more, paper = (side.vocab_size or 0) - (first.vocab_size or 0), paper_figures(side.name, passage.scored.name)
        more = more if side.vocab_size and first.vocab_size else 0
        model, language = side.describe(env.versions, hashes=hashes), shown[n][0]
        return Candidate(model, steps[n], side.size, speed, language, words, against, moved, left_out, paper, made_of, more)

    progress(f"{first.name}: loading")
    with ExitStack() as stack:
        a = Loaded(first, stack.enter_context(first.running()), reads[0], sides)
        words, floor, kept = a.last_words(passage, seed, progress), a.floor(passage.ids[:FLOOR_TOKENS]), _kept(a, passage)
        logits = kept or a.logits
        if kept:  # the first model is let go: one of the others is in memory at a time
            del a.running
            stack.close()
        others = [pair(n) for n in range(1, len(sides))]
        if 0 not in shown:
            shown[0] = alone(logits, passage, reads[0], seed)
    candidates = candidate(0, a, words, {}), *others
    ranking = _ranking(candidates, [shown[n][1] for n in range(len(sides))], seed)
    seconds = time.perf_counter() - started
    return Comparisons(candidates, passage.scored, env, seed, seconds, forward + a.seconds, ranking=ranking, floor=floor)


@torch.inference_mode()
def _kept(loaded: Loaded, passage: Passage) -> Logits | None:
    """Return a model's logits of the passage's batches, to be asked for in order; None where memory could not hold them."""
    inputs = [inputs for inputs, _ in passage.windows.batches(passage.ids)]  # windows may overlap
    if 4 * loaded.vocab * sum(map(torch.numel, inputs)) > HELD:
        return None
    kept = itertools.cycle([loaded.logits(each).cpu() for each in inputs])
    return lambda _: next(kept)


def _weights(first: Side, side: Side, fit: Compatibility, progress: Progress) -> tuple[float | None, str]:
    """Return how far weights moved, None where they cannot be compared; and "A in q8_0", "A, the same weights" or ""."""
    if not (isinstance(first, CheckpointSide) and isinstance(side, CheckpointSide)) or "weights" in fit.impossible:
        return None, ""
    read, names = readers(first, side, mapped=True), parameters_of_both(first.config, side.config)
    moved = distance(names, *read, progress=progress)
    if fit.departures or expected(first.config) != expected(side.config):
        return moved, ""
    if not moved:
        return moved, "A, the same weights"
    matrix = ["h.0.attn.c_proj.weight"]  # where it is no rounding, the others are not tried
    type = quantisation(*read, matrix) and quantisation(*read, names)
    return moved, f"A in {type}" if type else ""


def _ranking(candidates: Sequence[Candidate], shown: Sequence[Tensor | None], seed: int) -> tuple[Ranked, ...]:
    """Return the models from the best on, by what the text asks, each with its distance from the one before."""
    worth = [each.language.bits_per_byte.value for each in candidates]
    losses = [None if logp is None else -logp for logp in shown]
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
