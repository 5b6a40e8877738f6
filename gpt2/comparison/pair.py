"""Compare two models by name, from weights to generated text: ``gpt2.compare`` of two names."""

from __future__ import annotations

import math
import re
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gpt2.checkpoint.keys import expected, layer
from gpt2.comparison.activations import THRESHOLD, Numerics, compare_activations
from gpt2.comparison.blame import find_blame
from gpt2.comparison.blame_result import Blame
from gpt2.comparison.cases import CaseTable, compare_cases
from gpt2.comparison.compatibility import Compatibility, compatibility, on_text, parameters_of_both, require_same_function
from gpt2.comparison.distributions import Distributions, summarise
from gpt2.comparison.loaded import Loaded
from gpt2.comparison.passage import Passage, Settings, open_passage
from gpt2.comparison.reference import require_name, saving
from gpt2.comparison.results import Comparison
from gpt2.comparison.sides.checkpoint_side import CheckpointSide, RunningModule, heads_left_out, readers
from gpt2.comparison.sides.opening import open_sides
from gpt2.comparison.sides.port import RunningPort
from gpt2.comparison.sides.side import Running, Shown, Side, environment_of, first_tokenizer, require_head, vocabulary
from gpt2.comparison.weights import WeightChanges, beyond_rounding, compare_weights, quantisation
from gpt2.comparison.words import Words, compare_words
from gpt2.errors import InputError
from gpt2.measure.last_words import LastWords, last_words_change
from gpt2.measure.metrics import LanguageScore, Logits, Progress, relative_error
from gpt2.measure.per_token import measure_pair
from gpt2.measure.tracing import trace_blocks
from gpt2.model import GPT2, eager_attention, sdpa_attention

TRACED = 256  # tokens whose activations are compared


def compare(
    a: str,
    b: str,
    settings: Settings,
    *,
    threshold: float = THRESHOLD,
    blame: bool = False,
    save: str | Path | None = None,
    cases: str | CaseTable | None = None,
) -> Comparison:
    """Compare two models by name; arguments and errors are those of :func:`gpt2.comparison.run.compare`."""
    started, seed, progress = time.perf_counter(), settings.seed, settings.progress
    kept = None if save is None else require_name(save)
    side_a, side_b = open_sides(a, b, settings=settings)
    sides = side_a, side_b
    for side in sides:
        require_head(side.vocab_size or 0, side, sides)  # of a recording
    tokenizers = sides[0].tokenizer(), sides[1].tokenizer()
    compatible = compatibility(sides[0].config, sides[1].config, *tokenizers)
    compatible = replace(compatible, impossible=_not_shown(sides) | compatible.impossible | heads_left_out(*sides))
    passage = open_passage(sides, tokenizers, settings)
    ids, windows, text = passage.ids, passage.windows, passage.text
    compatible = on_text(compatible, *tokenizers, ids)
    if blame:
        require_same_function(compatible)
    weights = None if "weights" in compatible.impossible else _weights(sides, progress)
    activations = numerics = distributions = words = floor = None
    scores: tuple[LanguageScore, ...] = ()
    with ExitStack() as stack:
        progress("loading both models")
        running = stack.enter_context(sides[0].running()), stack.enter_context(sides[1].running())
        read_by = [tokenizer or first_tokenizer(tokenizers) for tokenizer in tokenizers]  # its partner's, where it has none
        first, second = (Loaded(*each, sides) for each in zip(sides, running, read_by, strict=True))
        own = first, second
        start = ids[None, : min(windows.context, TRACED)]
        if "activations" not in compatible.impossible:
            left_out = running[0].left_out(start) | running[1].left_out(start)
            compatible = replace(compatible, impossible=compatible.impossible | left_out)
        if "activations" not in compatible.impossible:
            blocks, alike = (running[0].blocks, running[1].blocks), compatible.same_shape
            activations = compare_activations(*blocks, start, same_shape=alike, threshold=threshold, progress=progress)
            if weights is not None and weights.same_numbers and a != b:
                numerics = _numerics(sides, running, start, progress)
        if weights is None and all(isinstance(each, RunningPort | RunningModule) for each in running):
            compatible, readable = _read_modules(own, compatible)
            weights = None if "weights" in compatible.impossible else _weights(readable, progress)
        if "distributions" not in compatible.impossible:
            to_save = saving(kept, first, first.tokenizer, passage) if kept else nullcontext(first.logits)
            logits_a = stack.enter_context(to_save)
            distributions, words = _distributions(own, logits_a, passage, seed, progress)
        elif kept is not None:
            raise InputError(f"{a}: was not run over the text beside {b}, so it is not saved; save it alone")
        elif text is not None and not compatible.vocabularies.comparable:
            scores = tuple(each.in_its_tokens(passage, first.tokenizer, seed).score for each in own)
        on_cases = None if cases is None else compare_cases(cases, own, seed=seed, progress=progress)
        last_words = _last_words(own, passage, seed, progress)
        left_out = first.rows_left_out | second.rows_left_out
        compatible = replace(compatible, impossible=compatible.impossible | left_out)
        if distributions is not None:
            progress("the floor of noise")
            for each, other in ((first, sides[1]), (second, sides[0])):
                floor = floor or each.floor(ids[:TRACED], other.dtype)
    blamed = _blame(sides, passage, vocabulary(*sides, *tokenizers), seed, progress) if blame else None
    env = environment_of(sides)
    return Comparison(
        a=sides[0].describe(env.versions),
        b=sides[1].describe(env.versions),
        compatibility=compatible,
        text=passage.scored,
        weights=weights,
        activations=activations,
        distributions=distributions,
        alone=scores,
        words=words,
        last_words=last_words,
        numerics=numerics,
        environment=env,
        seed=seed,
        seconds=time.perf_counter() - started,
        blame=blamed,
        floor=floor,
        cases=on_cases,
    )


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
    changes = replace(changes, rows=sides[1].config.vocab_size - sides[0].config.vocab_size)
    if changes.same_numbers:
        return changes
    small_first = sorted((each for each in changes.tensors if not each.equal), key=lambda each: math.prod(each.shape))
    named = [each.name for each in small_first]
    matrix = [each.name for each in small_first if len(each.shape) == 2][:1]
    if (type := quantisation(a, b, named)) is not None or (type := quantisation(a, b, matrix)) is None:
        return replace(changes, rounded_to=type or "")
    beyond = tuple(beyond_rounding(a, b, named, type))
    return replace(changes, nearly=type, beyond=beyond) if 2 * len(beyond) <= len(named) else changes


def _read_modules(pair: tuple[Loaded, Loaded], compatible: Compatibility) -> tuple[Compatibility, tuple[Side, Side]]:
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
    pair: tuple[Loaded, Loaded], logits_a: Logits, passage: Passage, seed: int, progress: Progress
) -> tuple[Distributions, Words | None]:
    """Compare both models' predictions after each token; with a tokenizer, also as words."""
    a, b = pair
    measured = measure_pair(logits_a, b.logits, passage.ids, passage.windows, progress=progress)
    found = summarise(measured, passage.token_bytes(a.tokenizer), seed=seed)
    if a.tokenizer is None or b.tokenizer is None:
        return found, None
    return found, compare_words(a, b, (a.tokenizer, b.tokenizer), measured, passage, seed=seed, progress=progress)


def _blame(sides: tuple[Side, Side], passage: Passage, vocab: int, seed: int, progress: Progress) -> Blame | None:
    a, b = sides
    if not (isinstance(a, CheckpointSide) and isinstance(b, CheckpointSide)):
        return None
    config = replace(a.config, vocab_size=min(a.config.vocab_size, b.config.vocab_size))
    names, text = list(expected(config)), (passage.ids, passage.windows)
    return find_blame(config, *readers(a, b), *text, names=names, vocab=vocab, seed=seed, progress=progress)


def _last_words(pair: tuple[Loaded, Loaded], passage: Passage, seed: int, progress: Progress) -> LastWords | None:
    """Score the last word of each passage, if both models have tokenizers."""
    a, b = (each.last_words(passage, seed, progress) for each in pair)
    return LastWords(a, b, last_words_change(a, b, seed=seed)) if a and b else None
