"""Compare several models, each with the first: a loop over pairs, in which the first one's logits are computed once."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.comparison import page  # noqa: F401 - gives Comparisons their page
from gpt2.comparison.checkpoints import with_checkpoints
from gpt2.comparison.compatibility import Compatibility, compatibility, on_text
from gpt2.comparison.distributions import Language, gain, language, perplexity_ratio, summarise
from gpt2.comparison.many_results import Against, Candidate, Comparisons, Ranked
from gpt2.comparison.many_weights import made_of, moved_from_first, size_of
from gpt2.comparison.noise import Floor, measure_floor
from gpt2.comparison.pair import Loaded, measured_bounds
from gpt2.comparison.paper import paper_figures
from gpt2.comparison.passage import DEFAULT_CONTEXT, Passage, open_passage
from gpt2.comparison.sides.checkpoint_side import RunningModule
from gpt2.comparison.sides.opening import open_sides
from gpt2.comparison.sides.side import Running, Shown, Side, environment_of, require_head
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.last_words import LastWord, score_last_words
from gpt2.measure.metrics import Logits, Progress, silent, token_losses
from gpt2.measure.per_token import measure_pair
from gpt2.model import GPT2

HELD = 2 << 30  # bytes of the first model's logits that are kept in memory; where they are more, it runs again beside each other
FLOOR_TOKENS = 64  # on which the first model's floor of noise is computed


def compare_many(
    names: Sequence[str],
    *,
    on: str | None = None,
    tokens: int | None = None,
    seed: int = 0,
    dtype: str | None = None,
    device: str = "cpu",
    offline: bool = False,
    hashes: bool = True,
    progress: Progress = silent,
) -> Comparisons:
    """Compare models by name, each against the first: quality with paired intervals, KL, weights, size and speed.

    Args:
        names: as for :func:`gpt2.compare`. The folder of a training run stands for all its checkpoints, in the order of steps.
        on, tokens, seed, dtype, device, offline: as for :func:`gpt2.compare`.
        hashes: of the models' files, which the JSON and the page hold and the table does not show.

    Raises:
        InputError: no such model or text, or fewer than two models. CheckpointError: a checkpoint does not fit its config.
    """
    started = time.perf_counter()
    saved = [each for name in names for each in with_checkpoints(name)]
    if len(saved) < 2:
        raise InputError(f"{' '.join(names)}: one model has nothing to be compared with; give two or more")
    sides = open_sides(*(each.name for each in saved), offline=offline, dtype=dtype, device=device)
    if Shown.LOGITS not in sides[0].shows:
        raise InputError(f"{sides[0].name}: shows only {' and '.join(sorted(sides[0].shows))}; name another model first")
    own = [side.tokenizer() for side in sides]
    fits = [compatibility(sides[0].config, side.config, own[0], tokenizer) for side, tokenizer in zip(sides, own, strict=True)]
    passage = open_passage(on, tokens, sides, own, seed, offline=offline)
    fits = [on_text(fit, own[0], tokenizer, passage.ids) for fit, tokenizer in zip(fits, own, strict=True)]
    shared = own[0] or next((tokenizer for tokenizer in own if tokenizer is not None), None)
    together = [number for number, fit in enumerate(fits) if fit.vocabularies.comparable]
    sizes = [size for number in together if (size := sides[number].vocab_size) is not None]
    sizes += [tokenizer.n_vocab for number in together if (tokenizer := own[number] or shared) is not None]
    run = _Run(passage, min(sizes), shared, seed, progress, sides)
    run.first()
    others = [run.other(number, own[number], fit) for number, fit in enumerate(fits) if number]
    measured = [run.of_first(), *others]
    env = environment_of(sides)
    moved, made = moved_from_first(sides, fits, progress), made_of(sides, own, progress)
    candidates = tuple(
        Candidate(
            model=side.describe(env.versions, hashes=hashes),
            step=saved[n].step,
            size=size_of(side),
            tokens_per_second=run.inputs[n] / run.seconds[n] if run.seconds[n] else math.nan,
            language=measured[n].language,
            last_words=run.words[n],
            against=measured[n].against,
            weights=moved[n],
            left_out=fits[n].impossible,
            paper=paper_figures(side.name, passage.scored.name),
            made_of=made[n],
        )
        for n, side in enumerate(sides)
    )
    ranking, forward = _ranking(measured, run.words, seed), sum(run.seconds)
    seconds = time.perf_counter() - started
    return Comparisons(candidates, passage.scored, env, seed, seconds, forward, ranking=ranking, floor=run.floor)


class _Measured(NamedTuple):
    """What one model showed; ``logp`` (N,) are of the right tokens, None where they are not those of the first model."""

    language: Language
    logp: Tensor | None
    against: Against | None = None


@dataclass(eq=False)
class _Run:
    """The text of a comparison, what the first model gives on it, and the time of each side's forward passes."""

    passage: Passage
    vocab: int
    tokenizer: Tokenizer | None
    seed: int
    progress: Progress
    sides: Sequence[Side]
    kept: list[Tensor] = field(default_factory=list)  # the first model's logits of each batch; none where they are too many
    its: _Measured | None = None  # its own figures: from the pairs, or where no other reads its tokens, from its logits
    floor: Floor | None = None  # of the first model, in its own dtype

    def __post_init__(self) -> None:
        if (largest := int(self.passage.ids.max())) >= self.vocab:
            raise InputError(f"the text holds the id {largest}, and a model knows {self.vocab:,} tokens; leave it out")
        self.words: list[LastWord | None] = [None for _ in self.sides]
        self.seconds, self.inputs = [0.0 for _ in self.sides], [0 for _ in self.sides]

    @contextmanager
    def loaded(self, n: int, vocab: int) -> Iterator[tuple[Running, Logits]]:
        """Load a side; the logits are cut to the vocabulary and timed."""
        self.progress(f"{self.sides[n].name}: loading")

        def logits(ids: Tensor) -> Tensor:
            began = time.perf_counter()
            output = running.logits(ids)
            self.seconds[n] += time.perf_counter() - began
            self.inputs[n] += ids.numel()
            require_head(output.size(-1), self.sides[n], self.sides)
            if output.size(-1) < vocab:
                sizes = f"knows {output.size(-1):,} tokens and the text's tokenizer {vocab:,}"
                raise InputError(f"{self.sides[n].name}: {sizes}; use models of one tokenizer, or compare it alone")
            self.progress(f"{self.sides[n].name}: {self.inputs[n]:,} tokens")
            return output[..., :vocab].cpu()

        with self.sides[n].running() as running:
            yield running, logits

    @torch.inference_mode()
    def first(self) -> None:
        """Run the first model, and keep its logits where they are not too many."""
        ids = self.passage.ids
        with self.loaded(0, self.vocab) as (running, logits):
            self.words[0] = self._last_words(self.sides[0], running, self.tokenizer)
            if isinstance(running, RunningModule) and type(running.module) is GPT2:
                self.floor = measure_floor(running.module, ids[:FLOOR_TOKENS], self.vocab, running.module.wte.weight.dtype)
            if 4 * self.vocab * len(ids) <= HELD:
                self.kept = [logits(inputs) for inputs, _ in self.passage.windows.batches(ids)]

    @contextmanager
    def logits_of_first(self) -> Iterator[Logits]:
        """Give the first model's logits of the text's batches, in their order: those that were kept, or computed again."""
        with ExitStack() as stack:
            kept = iter(self.kept)
            yield (lambda _: next(kept)) if self.kept else stack.enter_context(self.loaded(0, self.vocab))[1]

    def other(self, n: int, tokenizer: Tokenizer | None, fit: Compatibility) -> _Measured:
        """Measure a model beside the first: token by token; within bounds; or, with another tokenizer, by itself."""
        side, passage = self.sides[n], self.passage
        if Shown.LOGITS not in side.shows:
            return self._bounded(side)
        apart = None if fit.vocabularies.comparable else tokenizer
        vocab = self.vocab if apart is None else min(apart.n_vocab, side.vocab_size or apart.n_vocab)
        with self.loaded(n, vocab) as (running, logits):
            self.words[n] = self._last_words(side, running, tokenizer or self.tokenizer)
            if apart is not None:
                if self.tokenizer is None or passage.text is None:
                    raise InputError(f"{side.name}: has another tokenizer, and the text is known as ids only; leave it out")
                own = passage.in_tokens_of(apart, self.tokenizer, side.n_positions)
                return self._alone(logits, own, apart)._replace(logp=None)
            with self.logits_of_first() as first:
                found = measure_pair(first, logits, passage.ids, passage.windows, vocab=self.vocab)
        lengths = passage.token_bytes(self.tokenizer, self.vocab)
        both, lost = summarise(found, lengths, seed=self.seed), -gain(found.logp_a, found.logp_b)
        self.its = _Measured(both.a, found.logp_a)
        per, bootstrap = lengths[found.targets] * math.log(2), Bootstrap(len(found), self.seed)
        bits = bootstrap.interval(lost.sum().item() / per.sum().item(), bootstrap.means(lost, per))
        return _Measured(both.b, found.logp_b, Against(both.ratio, bits, both.kl_ab.mean, both.kl_ab.max, both.same_top))

    def of_first(self) -> _Measured:
        if self.its is None:
            with self.logits_of_first() as logits:
                self.its = self._alone(logits, self.passage, self.tokenizer)
        return self.its

    @torch.inference_mode()
    def _alone(self, logits: Logits, passage: Passage, tokenizer: Tokenizer | None) -> _Measured:
        """Return a model's figures on a text in tokens of its own."""
        losses, targets = [], []
        for inputs, group in passage.windows.batches(passage.ids):
            for row, window in zip(logits(inputs), group, strict=True):
                targets.append(passage.ids[window.first + 1 : window.end + 1])
                losses.append(token_losses(row[None, window.first - window.start :].cpu(), targets[-1][None])[0].double())
        logp, right = -torch.cat(losses), torch.cat(targets)
        lengths = passage.token_bytes(tokenizer, int(right.max()) + 1)[right]
        return _Measured(language(logp, lengths, passage.windows, Bootstrap(len(logp), self.seed)), logp)

    def _last_words(self, side: Side, running: Running, tokenizer: Tokenizer | None) -> LastWord | None:
        text, context = self.passage.text, side.n_positions or DEFAULT_CONTEXT
        if text is None or not text.passages or side.recording is not None or tokenizer is None:
            return None
        options = {"context": context, "seed": self.seed}
        return score_last_words(running.logits, tokenizer, text.passages, **options, progress=self.progress)

    def _bounded(self, side: Side) -> _Measured:
        """Ask a side that shows only the likeliest tokens, beside the first model: its figures are the first's times a ratio."""
        first, sides = self.sides[0], tuple(self.sides)
        with first.running() as full, side.running() as part:
            pair = [Loaded(first, full, self.tokenizer, sides), Loaded(side, part, None, sides)]
            bounds = measured_bounds(pair, self.passage, self.seed, self.progress)
        assert bounds is not None
        ratio, a = bounds.ratio, self.of_first().language
        more = [math.log2(x) * a.score.tokens / a.score.bytes for x in (ratio.value, ratio.low, ratio.high)]
        bits = Estimate(*(a.bits_per_byte.value + each for each in more))
        perplexity = Estimate(*(a.perplexity.value * x for x in (ratio.value, ratio.low, ratio.high)))
        score = replace(a.score, loss=a.score.loss + math.log(ratio.value))
        against = Against(ratio, Estimate(*more), bounds.kl, None, bounds.same_top)
        return _Measured(Language(score, perplexity, bits), None, against)


def _ranking(measured: Sequence[_Measured], words: Sequence[LastWord | None], seed: int) -> tuple[Ranked, ...]:
    """Return the models from the best on, by what the text asks, each with its distance from the one before."""
    if asked := all(words):
        losses = [torch.tensor(each.losses, dtype=torch.float64) for each in words if each]
    else:
        losses = [torch.empty(0) if found.logp is None else -found.logp for found in measured]
    bits = [
        float(each.mean()) if asked else found.language.bits_per_byte.value for each, found in zip(losses, measured, strict=True)
    ]
    order = sorted(range(len(measured)), key=lambda number: (math.isnan(bits[number]), bits[number]))
    ranked = [Ranked(order[0], None)]
    for before, number in itertools.pairwise(order):
        paired = len(losses[before]) and len(losses[number])
        bootstrap = Bootstrap(len(losses[number]), seed) if paired else None
        ranked.append(Ranked(number, perplexity_ratio(-losses[before], -losses[number], bootstrap) if bootstrap else None))
    return tuple(ranked)
