"""Compare several models, each with the first: pairs with chosen parts, in which the first one's logits are computed once."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpt2.checkpoint.keys import expected
from gpt2.comparison import page  # noqa: F401 - gives Comparisons their page
from gpt2.comparison.compatibility import Compatibility, compatibility, on_text, parameters_of_both
from gpt2.comparison.distributions import Language, gain, perplexity_ratio, summarise
from gpt2.comparison.loaded import Loaded, alone
from gpt2.comparison.many_results import Against, Candidate, Comparisons, Ranked, paper_figures
from gpt2.comparison.passage import Passage, Settings, open_passage
from gpt2.comparison.sides.checkpoint_side import CheckpointSide, heads_left_out, readers
from gpt2.comparison.sides.opening import open_sides
from gpt2.comparison.sides.side import Side, environment_of, first_tokenizer
from gpt2.comparison.weights import distance, quantisation, weights_norm
from gpt2.data import Tokenizer
from gpt2.measure.estimates import Bootstrap, Estimate
from gpt2.measure.metrics import Logits, Progress
from gpt2.measure.per_token import Tokens, measure_pair

HELD = 2 << 30  # bytes of the first model's logits that are kept in memory; where they are more, it runs again beside each other
FLOOR_TOKENS = 64  # on which the first model's floor of noise is computed


def compare_many(names: Sequence[str], steps: Sequence[int | None], settings: Settings, *, hashes: bool = True) -> Comparisons:
    """Compare models, or a training run's ``steps``, each with the first: quality with paired intervals, KL, weights and speed.

    Settings and errors are those of :func:`gpt2.comparison.run.compare`; ``hashes`` are of the models' files, which the JSON and
    the page hold and the table does not show. One model is in memory at a time, where the first one's logits can be kept.
    """
    started, seed, progress = time.perf_counter(), settings.seed, settings.progress
    sides = open_sides(*names, settings=settings)
    first, own, env = sides[0], [side.tokenizer() for side in sides], environment_of(sides)
    passage = open_passage(sides, own, settings)
    reads = [tokenizer or first_tokenizer(own) for tokenizer in own]  # the text
    logits_of_first, weights = _First(first, reads[0], sides), _Weights(first)
    rows, forward = list[dict[str, Any]](), 0.0
    shown: dict[int, tuple[Language, Tensor | None]] = {}  # the log-probabilities only where they are of the same tokens
    for n, side in enumerate(sides):
        progress(f"{side.name}: loading")
        fit = on_text(compatibility(first.config, side.config, own[0], own[n]), own[0], own[n], passage.ids)
        with side.running() as running:
            loaded = Loaded(side, running, reads[n], sides)
            words, against = loaded.last_words(passage, seed, progress), None
            if n == 0:
                floor = loaded.floor(passage.ids[:FLOOR_TOKENS])
                logits_of_first.keep(loaded, passage)  # its figures are those of the pairs
            elif fit.vocabularies.comparable:
                with logits_of_first() as logits:
                    found = measure_pair(logits, loaded.logits, passage.ids, passage.windows, progress=progress)
                both, bits = summarise(found, passage.token_bytes(reads[0]), seed=seed), _bits(found, passage, reads[0], seed)
                far = both.kl_ab.mean, both.kl_ab.max, both.same_top, both.only_a, both.only_b
                shown[0], shown[n], against = (both.a, found.logp_a), (both.b, found.logp_b), Against(both.ratio, bits, *far)
            else:
                shown[n] = loaded.in_its_tokens(passage, reads[0], seed), None
            ran, forward = _ran(loaded), forward + loaded.seconds
        moved, made_of = weights(side, fit, progress) if n else (None, "")
        more = side.vocab_size - first.vocab_size if side.vocab_size and first.vocab_size else 0
        paper, left_out = paper_figures(side.name, passage.scored.name), fit.impossible | heads_left_out(side)
        row = {"last_words": words, "against": against, "weights": moved, "made_of": made_of, "rows": more, "paper": paper}
        rows.append(row | {"tokens_per_second": ran[0], "left_out": left_out | ran[1], "step": steps[n], "size": side.size})
    if 0 not in shown:
        with logits_of_first() as logits:
            shown[0] = alone(logits, passage, reads[0], seed)
    again = logits_of_first.again
    rows[0] |= again | {"left_out": rows[0]["left_out"] | again.get("left_out", {})}
    models = [side.describe(env.versions, hashes=hashes) for side in sides]
    candidates = tuple(Candidate(models[n], language=shown[n][0], **row) for n, row in enumerate(rows))
    ranking, forward = _ranking(candidates, [shown[n][1] for n in range(len(sides))], seed), forward + logits_of_first.seconds
    seconds = time.perf_counter() - started
    return Comparisons(candidates, passage.scored, env, seed, seconds, forward, ranking=ranking, floor=floor)


def _ran(loaded: Loaded) -> tuple[float, dict[str, str]]:
    """Return a model's tokens a second, and what is left out of its rows."""
    return loaded.inputs / loaded.seconds if loaded.seconds else math.nan, loaded.rows_left_out


def _bits(found: Tokens, passage: Passage, tokenizer: Tokenizer | None, seed: int) -> Estimate:
    """Return the difference in bits per byte, b minus a."""
    per, lost = passage.token_bytes(tokenizer)[found.targets] * math.log(2), -gain(found.logp_a, found.logp_b)
    bootstrap = Bootstrap(len(found), seed)
    return bootstrap.interval(lost.sum().item() / per.sum().item(), bootstrap.means(lost, per))


class _First:
    """The first model's logits of the text's batches, in their order: kept in memory, or computed again beside each other."""

    def __init__(self, side: Side, tokenizer: Tokenizer | None, sides: Sequence[Side]) -> None:
        self.side, self.tokenizer, self.sides = side, tokenizer, sides
        self.kept: list[Tensor] = []
        self.seconds, self.again = 0.0, dict[str, Any]()  # of the passes beside others: their time, and the last one's figures

    @torch.inference_mode()
    def keep(self, loaded: Loaded, passage: Passage) -> None:
        """Compute the logits of the model, which is loaded, and keep them, unless they are too many."""
        if 4 * loaded.vocab * len(passage.ids) <= HELD:
            self.kept = [loaded.logits(inputs).cpu() for inputs, _ in passage.windows.batches(passage.ids)]

    @contextmanager
    def __call__(self) -> Iterator[Logits]:
        if self.kept:
            kept = iter(self.kept)
            yield lambda _: next(kept)
            return
        with self.side.running() as running:
            yield (loaded := Loaded(self.side, running, self.tokenizer, self.sides)).logits
            speed, left_out = _ran(loaded)
        self.seconds, self.again = self.seconds + loaded.seconds, {"tokens_per_second": speed, "left_out": left_out}


class _Weights:
    """Compares weights with the first model's: the norm of the change over the norm, and whether it is rounding alone."""

    def __init__(self, first: Side) -> None:
        self.first, self.norm = first, 0.0

    def __call__(self, side: Side, fit: Compatibility, progress: Progress) -> tuple[float | None, str]:
        """Return the distance, None where there is none, and "A in q8_0" or "A, the same weights", "" where they are others."""
        first = self.first
        if not (isinstance(first, CheckpointSide) and isinstance(side, CheckpointSide)) or "weights" in fit.impossible:
            return None, ""
        read, names = readers(first, side, mapped=True), parameters_of_both(first.config, side.config)
        self.norm = self.norm or weights_norm(expected(first.config), first.reader(mapped=True))
        moved = distance(names, *read, self.norm, progress=progress)
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
