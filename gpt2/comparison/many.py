"""Compare several models, each with the first: a loop over pairs, in which the first one's logits are computed once."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.checkpoint.keys import expected
from gpt2.comparison import page  # noqa: F401 - gives Comparisons their page
from gpt2.comparison.compatibility import Compatibility, compatibility, on_text, parameters_of_both
from gpt2.comparison.distributions import Language, gain, perplexity_ratio, summarise
from gpt2.comparison.loaded import Loaded, alone
from gpt2.comparison.many_results import Against, Candidate, Comparisons, Ranked, letters_of, paper_figures
from gpt2.comparison.noise import Floor
from gpt2.comparison.passage import Passage, Settings, open_passage
from gpt2.comparison.sides.checkpoint_side import CheckpointSide, heads_left_out, readers
from gpt2.comparison.sides.opening import open_sides
from gpt2.comparison.sides.side import Side, Tokenizers, environment_of, first_tokenizer
from gpt2.comparison.weights import distance, quantisation, weights_norm
from gpt2.measure.estimates import Bootstrap
from gpt2.measure.last_words import LastWord
from gpt2.measure.metrics import Logits, Progress
from gpt2.measure.per_token import measure_pair

HELD = 2 << 30  # bytes of the first model's logits that are kept in memory; where they are more, it runs again beside each other
FLOOR_TOKENS = 64  # on which the first model's floor of noise is computed


def compare_many(names: Sequence[str], steps: Sequence[int | None], settings: Settings, *, hashes: bool = True) -> Comparisons:
    """Compare models, or a training run's ``steps``, each with the first: quality with paired intervals, KL, weights and speed.

    Settings and errors are those of :func:`gpt2.comparison.run.compare`; ``hashes`` are of the models' files, which the JSON and
    the page hold and the table does not show.
    """
    started, seed, progress = time.perf_counter(), settings.seed, settings.progress
    sides = open_sides(*names, settings=settings)
    first = sides[0]
    own = [side.tokenizer() for side in sides]
    fits = [compatibility(first.config, side.config, own[0], tokenizer) for side, tokenizer in zip(sides, own, strict=True)]
    passage = open_passage(sides, own, settings)
    fits = [on_text(fit, own[0], tokenizer, passage.ids) for fit, tokenizer in zip(fits, own, strict=True)]
    run = _Run(sides, own, fits, passage, seed, progress)
    shown, env = run.all(), environment_of(sides)
    moved, made = _moved(sides, fits, progress), _made_of(sides, own, progress)
    candidates = []
    for n, side in enumerate(sides):
        model, speed = side.describe(env.versions, hashes=hashes), run.inputs[n] / run.seconds[n] if run.seconds[n] else math.nan
        figures = shown[n].language, run.words[n], shown[n].against, moved[n]
        papers = paper_figures(side.name, passage.scored.name)
        left_out = run.fits[n].impossible | heads_left_out(side)
        more = side.vocab_size - first.vocab_size if side.vocab_size and first.vocab_size else 0
        candidates.append(Candidate(model, steps[n], side.size, speed, *figures, left_out, papers, made[n], more))
    ranking, forward = _ranking(shown, run.words, seed), sum(run.seconds)
    seconds = time.perf_counter() - started
    return Comparisons(tuple(candidates), passage.scored, env, seed, seconds, forward, ranking=ranking, floor=run.floor)


class _Shown(NamedTuple):
    """What one model showed; ``logp`` (N,) are of the right tokens, None where they are not those of the first model."""

    language: Language
    logp: Tensor | None
    against: Against | None = None


class _Run:
    """Runs each model over the text, beside the first one's logits; counts what the forward passes of each took."""

    def __init__(
        self,
        sides: Sequence[Side],
        own: Tokenizers,
        fits: Sequence[Compatibility],
        passage: Passage,
        seed: int,
        progress: Progress,
    ) -> None:
        self.sides, self.fits, self.passage, self.seed, self.progress = sides, [*fits], passage, seed, progress
        self.tokenizers = [tokenizer or first_tokenizer(own) for tokenizer in own]  # that read the text
        self.words: list[LastWord | None] = [None for _ in sides]
        self.seconds, self.inputs = [0.0 for _ in sides], [0 for _ in sides]
        self.kept: list[Tensor] = []  # the first model's logits of each batch; none where they are too many
        self.floor: Floor | None = None  # of the first model, in its own dtype
        self.its: _Shown | None = None  # its figures: from the pairs, or where no other reads its tokens, from its logits

    @contextmanager
    def loaded(self, n: int) -> Iterator[Loaded]:
        """Load a side."""
        side, tokenizer = self.sides[n], self.tokenizers[n]
        self.progress(f"{side.name}: loading")
        with side.running() as running:
            yield (loaded := Loaded(side, running, tokenizer, self.sides))
        self.fits[n] = replace(self.fits[n], impossible=self.fits[n].impossible | loaded.rows_left_out)
        self.seconds[n] += loaded.seconds
        self.inputs[n] += loaded.inputs

    def all(self) -> list[_Shown]:
        """Run every model, one in memory at a time where the first one's logits could be kept."""
        ids = self.passage.ids
        with self.loaded(0) as loaded, torch.inference_mode():
            self.words[0] = loaded.last_words(self.passage, self.seed, self.progress)
            self.floor = loaded.floor(ids[:FLOOR_TOKENS])
            if 4 * loaded.vocab * len(ids) <= HELD:
                for inputs, _ in self.passage.windows.batches(ids):
                    self.kept.append(loaded.logits(inputs).cpu())
                    self.progress(f"{self.sides[0].name}: {loaded.inputs:,} tokens")
        others = [self.other(n) for n in range(1, len(self.sides))]
        return [self.of_first(), *others]

    @contextmanager
    def logits_of_first(self) -> Iterator[Logits]:
        """Give the first model's logits of the text's batches, in their order: those that were kept, or computed again."""
        if self.kept:
            kept = iter(self.kept)
            yield lambda _: next(kept)
        else:
            with self.loaded(0) as loaded:
                yield loaded.logits

    def of_first(self) -> _Shown:
        if self.its is None:
            with self.logits_of_first() as logits:
                self.its = _Shown(*alone(logits, self.passage, self.tokenizers[0], self.seed))
        return self.its

    def other(self, n: int) -> _Shown:
        """Measure a model beside the first: token by token; or, with another tokenizer, by itself."""
        passage, seed = self.passage, self.seed
        with self.loaded(n) as loaded:
            self.words[n] = loaded.last_words(passage, seed, self.progress)
            if not self.fits[n].vocabularies.comparable:
                return _Shown(loaded.in_its_tokens(passage, self.tokenizers[0], seed), None)
            with self.logits_of_first() as first_logits:
                pair = first_logits, loaded.logits
                found = measure_pair(*pair, passage.ids, passage.windows, progress=self.progress)
        lengths = passage.token_bytes(self.tokenizers[0])
        both, lost = summarise(found, lengths, seed=seed), -gain(found.logp_a, found.logp_b)
        self.its = _Shown(both.a, found.logp_a)
        per, bootstrap = lengths[found.targets] * math.log(2), Bootstrap(len(found), seed)
        bits = bootstrap.interval(lost.sum().item() / per.sum().item(), bootstrap.means(lost, per))
        return _Shown(
            both.b,
            found.logp_b,
            Against(both.ratio, bits, both.kl_ab.mean, both.kl_ab.max, both.same_top, both.only_a, both.only_b),
        )


def _ranking(shown: Sequence[_Shown], words: Sequence[LastWord | None], seed: int) -> tuple[Ranked, ...]:
    """Return the models from the best on, by what the text asks, each with its distance from the one before."""
    asked = [torch.tensor(each.losses, dtype=torch.float64) for each in words if each]
    losses: list[Tensor | None] = [None if each.logp is None else -each.logp for each in shown]
    worth = [each.language.bits_per_byte.value for each in shown]
    if len(asked) == len(words):
        losses, worth = [*asked], [float(each.mean()) for each in asked]
    order = sorted(range(len(shown)), key=lambda n: (math.isnan(worth[n]), worth[n]))
    ranked = [Ranked(order[0], None)]
    for number, n in itertools.pairwise(order):
        before, own = losses[number], losses[n]
        paired = None if before is None or own is None else perplexity_ratio(-before, -own, Bootstrap(len(own), seed))
        ranked.append(Ranked(n, paired))
    return tuple(ranked)


def _made_of(sides: Sequence[Side], own: Tokenizers, progress: Progress) -> list[str]:
    """Say of each model whether it is another one, rounded to a type or as it is: "A in q8_0"; "" if not."""
    letters, made = letters_of(len(sides)), [""] * len(sides)
    checkpoints = {n: side for n, side in enumerate(sides) if isinstance(side, CheckpointSide)}
    matrix = "h.0.attn.c_proj.weight"  # read of each model once: those far apart there are not looked at further
    seen = {n: side.reader(mapped=True)(matrix).float() for n, side in checkpoints.items()}
    for b, a in itertools.permutations(checkpoints, 2):
        whole, rounded, names = checkpoints[a], checkpoints[b], expected(checkpoints[a].config)
        if made[b] or seen[a].shape != seen[b].shape or (seen[a] - seen[b]).norm() > 0.05 * seen[a].norm():
            continue
        if names == expected(rounded.config) and not compatibility(whole.config, rounded.config, own[a], own[b]).departures:
            progress(f"weights: is {letters[b]} made of {letters[a]}?")
            read = readers(whole, rounded, mapped=True)
            if all((type := quantisation(*read, some)) is not None for some in ([matrix], names)):
                same = all(torch.equal(read[0](name), read[1](name)) for name in names)
                made[b] = f"{letters[a]}, the same weights" * (a < b) if same else f"{letters[a]} in {type}"
    return made


def _moved(sides: Sequence[Side], fits: Sequence[Compatibility], progress: Progress) -> list[float | None]:
    """Return the norm of each model's change of weights over the first one's norm; None where they cannot be compared."""
    first, norm = sides[0], None
    moved: list[float | None] = [None for _ in sides]
    for n, (side, fit) in enumerate(zip(sides, fits, strict=True)):
        if n and isinstance(first, CheckpointSide) and isinstance(side, CheckpointSide) and "weights" not in fit.impossible:
            norm = norm or weights_norm(expected(first.config), first.reader(mapped=True))
            read = readers(first, side, mapped=True)
            moved[n] = distance(parameters_of_both(first.config, side.config), *read, norm, progress=progress)
    return moved
