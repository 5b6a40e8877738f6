"""Compare several models on one text: each against the first, and all pairs; one model is in memory at a time.

The first model's logits are kept in a temporary file, and the others are measured against them while they run. For the pairs of
the others, logits of an eighth of the tokens (:data:`SAMPLE`) of each are kept. So each model runs once.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2.comparison.bounds import measure_bounds
from gpt2.comparison.checkpoints import with_checkpoints
from gpt2.comparison.compatibility import compatibility, on_text
from gpt2.comparison.distributions import Language, gain, language, perplexity_ratio
from gpt2.comparison.floor import Floor, measure_floor
from gpt2.comparison.many_results import Against, Candidate, Comparisons, Pairs, Ranked
from gpt2.comparison.many_weights import made_of, moved_from_first, size_of
from gpt2.comparison.paper import paper_figures
from gpt2.comparison.passage import DEFAULT_CONTEXT, Passage, beginning, open_passage, token_bytes
from gpt2.comparison.scratch import Scratch
from gpt2.comparison.sides.checkpoint_side import RunningModule
from gpt2.comparison.sides.opening import open_sides
from gpt2.comparison.sides.side import Running, Shown, Side, environment_of, require_head
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.divergence import divergences, log_sums
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.last_words import LastWord, score_last_words
from gpt2.measure.metrics import Progress, silent
from gpt2.model import GPT2

SAMPLE = range(256, 1025)  # tokens on which all pairs are compared: an eighth of the text at equal distances, within these
ROWS = 256  # of them at a time
FLOOR_TOKENS = 64  # on which the first model's floor of noise is measured


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
    measured = [run.measure(sides[0], own[0], first=True, apart=False)]
    for side, tokenizer, fit in zip(sides[1:], own[1:], fits[1:], strict=True):
        if Shown.LOGITS in side.shows:
            measured.append(run.measure(side, tokenizer, first=False, apart=not fit.vocabularies.comparable))
        else:
            measured.append(run.bounded(side, measured[0]))
    env = environment_of(sides)
    moved, made = moved_from_first(sides, fits, progress), made_of(sides, own, progress)
    candidates = tuple(
        Candidate(
            model=side.describe(env.versions, hashes=hashes),
            step=each.step,
            size=size_of(side),
            tokens_per_second=found.speed,
            language=found.language,
            last_words=found.last_words,
            against=found.against or (run.against(measured[0], found) if number else None),
            weights=moved[number],
            left_out=fit.impossible,
            paper=paper_figures(side.name, passage.scored.name),
            made_of=made[number],
        )
        for number, (each, side, found, fit) in enumerate(zip(saved, sides, measured, fits, strict=True))
    )
    return Comparisons(
        candidates=candidates,
        pairs=run.pairs(measured),
        text=passage.scored,
        environment=env,
        seed=seed,
        seconds=time.perf_counter() - started,
        floor=run.floor,
        ranking=_ranking(measured, seed),
        forward_seconds=sum(found.seconds for found in measured if not math.isnan(found.seconds)),
        scratch_bytes=sum(found.sample.bytes for found in measured) + run.first.bytes,
    )


class _Measured(NamedTuple):
    """What one model showed; without a tensor where its tokenizer is not the first one's."""

    language: Language
    last_words: LastWord | None
    seconds: float  # in forward passes over the text
    speed: float  # tokens a second in them
    logp: Tensor | None  # (M,) of the right tokens
    kl: Tensor | None  # (M,) KL(first||this)
    top: Tensor | None  # (M,) its likeliest tokens
    sample: Scratch
    against: Against | None = None  # of a side that shows only the likeliest tokens


@dataclass
class _Run:
    """The text of a comparison, and the first model's logits on it."""

    passage: Passage
    vocab: int
    tokenizer: Tokenizer | None
    seed: int
    progress: Progress
    sides: Sequence[Side] = ()
    first: Scratch = field(default_factory=Scratch)
    first_sums: list[Tensor] = field(default_factory=list)  # of its exponentials, their logs, a window's rows at a time
    floor: Floor | None = None  # of the first model, in its own dtype

    def __post_init__(self) -> None:
        ids, recording = self.passage.ids, self.passage.recording
        if int(ids.max()) >= self.vocab:
            raise InputError(f"the text holds the id {int(ids.max())}, and a model knows {self.vocab:,} tokens; leave it out")
        self.targets = torch.cat([ids[span.first + 1 : span.end + 1] for span in self.passage.windows.of(len(ids))])
        count = min(len(self.targets), max(SAMPLE.start, min(len(self.targets) // 8, SAMPLE.stop - 1)))
        self.sampled = torch.zeros(len(self.targets), dtype=torch.bool)
        self.sampled[torch.arange(count) * len(self.targets) // count] = True
        lengths = None if recording is None else recording.token_bytes
        lengths = lengths if self.tokenizer is None else token_bytes(self.tokenizer, self.passage.written, ids)
        self.lengths = torch.ones(len(self.targets)) if lengths is None else lengths[self.targets]

    def measure(self, side: Side, tokenizer: Tokenizer | None, *, first: bool, apart: bool) -> _Measured:
        """Load a model, run it over the text once, and let it go; ``apart``: its tokenizer is not the first one's."""
        self.progress(f"{side.name}: loading")
        text = self.passage.text
        with side.running() as running:
            words = None
            if text is not None and text.passages and side.recording is None and (own := tokenizer or self.tokenizer):
                context = side.n_positions or DEFAULT_CONTEXT
                words = score_last_words(
                    running.logits, own, text.passages, context=context, seed=self.seed, progress=self.progress
                )
            if apart and tokenizer is not None:
                return self._apart(side, running, tokenizer, words)
            return self._together(side, running, words, first=first)

    @torch.inference_mode()
    def _together(self, side: Side, running: Running, words: LastWord | None, *, first: bool, alone: bool = False) -> _Measured:
        """Run a model over the text; ``alone``: it is compared with no other, so its logits are not kept."""
        columns: list[tuple[Tensor, Tensor, Tensor]] = []
        seconds, inputs_run, done, sample = 0.0, 0, 0, Scratch()
        self.first.rewind()
        for inputs, group in self.passage.windows.batches(self.passage.ids):
            began = time.perf_counter()
            output = running.logits(inputs)
            seconds += time.perf_counter() - began
            inputs_run += inputs.numel()
            require_head(output.size(-1), side, self.sides)
            if output.size(-1) < self.vocab:
                sizes = f"knows {output.size(-1):,} tokens and the text's tokenizer {self.vocab:,}"
                raise InputError(f"{side.name}: {sizes}; use models of one tokenizer, or compare it with one model at a time")
            if first and not done and isinstance(running, RunningModule) and type(running.module) is GPT2:
                few, dtype = self.passage.ids[:FLOOR_TOKENS], running.module.wte.weight.dtype
                self.floor = measure_floor(running.module, few, self.vocab, dtype)
            for row, window in enumerate(group):
                rows = output[row, window.first - window.start :, : self.vocab].cpu()
                targets = self.targets[done : done + len(rows)]
                if first or alone:
                    sums, top = log_sums(rows)
                    kl = torch.zeros_like(sums)
                else:
                    kl, log_ratio, top = (each[:, 0] for each in divergences(self.first.take(len(rows)), [rows]))
                    sums = self.first_sums[len(columns)] + log_ratio
                    unknown = ~sums.isfinite()  # the first model returned NaN
                    sums[unknown] = log_sums(rows[unknown])[0]
                if first:
                    self.first.add(rows)
                    self.first_sums.append(sums)
                columns.append((rows.gather(1, targets[:, None])[:, 0].double() - sums, kl, top))
                if not alone:
                    sample.add(rows[self.sampled[done : done + len(rows)]])
                done += len(rows)
            del output, rows  # before the next forward pass
            self.progress(f"{side.name}: {done:,} of {len(self.targets):,} tokens")
        logp, kl, top = map(torch.cat, zip(*columns, strict=True))
        scored = language(logp, self.lengths, self.passage.windows, Bootstrap(len(logp), self.seed))
        return _Measured(scored, words, seconds, inputs_run / seconds, logp, kl, top, sample)

    def _apart(self, side: Side, running: Running, tokenizer: Tokenizer, words: LastWord | None) -> _Measured:
        """Score a model whose tokenizer is another one, on the same passage in its own tokens."""
        text = self.passage.text
        if self.tokenizer is None or text is None:
            raise InputError(f"{side.name}: has another tokenizer, and the text is known as ids only; leave it out")
        text = replace(text, text=beginning(self.tokenizer, text.text, len(self.passage.ids)))
        ids = torch.tensor(tokenizer.encode(text.text))
        windows = text.protocol.windows(side.n_positions or DEFAULT_CONTEXT)
        passage = Passage(ids, windows, text, self.passage.scored)
        own = _Run(passage, min(tokenizer.n_vocab, side.vocab_size or tokenizer.n_vocab), tokenizer, self.seed, self.progress)
        return own._together(side, running, words, first=False, alone=True)._replace(logp=None, kl=None, top=None)

    def bounded(self, side: Side, first: _Measured) -> _Measured:
        """Ask a side that shows only the likeliest tokens, beside the first model: its figures are the first's times a ratio."""
        own = self.sides[0]
        with own.running() as full, side.running() as part:
            bounds = measure_bounds(
                full.logits, part, self.passage.ids, self.passage.windows, vocab=self.vocab, full_is_a=True,
                recorded=own.recording is not None, tokenizer=self.tokenizer, seed=self.seed, progress=self.progress,
            )  # fmt: skip
        ratio, a = bounds.ratio, first.language
        more = [math.log2(x) * a.score.tokens / a.score.bytes for x in (ratio.value, ratio.low, ratio.high)]
        bits = Estimate(*(a.bits_per_byte.value + each for each in more))
        perplexity = Estimate(*(a.perplexity.value * x for x in (ratio.value, ratio.low, ratio.high)))
        score = replace(a.score, loss=a.score.loss + math.log(ratio.value))
        against = Against(ratio, Estimate(*more), bounds.kl, None, bounds.same_top)
        return _Measured(Language(score, perplexity, bits), None, math.nan, math.nan, None, None, None, Scratch(), against)

    def against(self, first: _Measured, other: _Measured) -> Against | None:
        """Return a model's distance from the first, token by token; None with another tokenizer."""
        if first.logp is None or other.logp is None or other.kl is None or first.top is None or other.top is None:
            return None
        bootstrap = Bootstrap(len(self.targets), self.seed)
        lost = -gain(first.logp, other.logp)
        per_byte = bootstrap.means(lost, self.lengths) / math.log(2)
        more = lost.sum().item() / (self.lengths.sum().item() * math.log(2))
        return Against(
            ratio=perplexity_ratio(first.logp, other.logp, bootstrap),
            bits=bootstrap.interval(more, per_byte),
            kl=bootstrap.mean(other.kl),
            kl_max=other.kl.max().item(),
            same_top=bootstrap.fraction(first.top == other.top),
        )

    def pairs(self, measured: Sequence[_Measured]) -> Pairs:
        """Return KL of all pairs on the sampled tokens; None for a model with another tokenizer."""
        compared = [number for number, found in enumerate(measured) if found.logp is not None]
        count, total = int(self.sampled.sum()), torch.zeros(len(compared), len(compared), dtype=torch.float64)
        for column, number in enumerate(compared):
            measured[number].sample.rewind()
            if (known := measured[number].kl) is not None:  # from the first model, on all tokens
                total[0, column] = known[self.sampled].sum()
        for start in range(0, count, ROWS):
            self.progress(f"pairs: {start:,} of {count:,} tokens")
            rows = [measured[number].sample.take(min(ROWS, count - start)) for number in compared]
            for i in range(1, len(rows)):
                others = [j for j in range(len(rows)) if j != i]
                total[i, others] += divergences(rows[i], [rows[j] for j in others]).kl.sum(0)
        kl: list[list[float | None]] = [[None] * len(measured) for _ in measured]
        for i, row in enumerate(compared):
            for j, column in enumerate(compared):
                kl[row][column] = float(total[i, j] / count)
        return Pairs(count, tuple(map(tuple, kl)))


def _ranking(measured: Sequence[_Measured], seed: int) -> tuple[Ranked, ...]:
    """Return the models from the best on, by what the text asks, each with its distance from the one before."""
    words = [found.last_words for found in measured]
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
