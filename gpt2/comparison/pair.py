"""Compare two models by name, from weights to generated text: ``gpt2.compare``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor, nn

from gpt2.checkpoint.keys import expected, layer
from gpt2.checkpoint.names import DEFAULT
from gpt2.checkpoint.official_files import official_files
from gpt2.comparison.activations import THRESHOLD, compare_activations
from gpt2.comparison.compatibility import compatibility
from gpt2.comparison.distributions import Distributions, summarise
from gpt2.comparison.last_words import LastWords, last_words_change, score_last_words
from gpt2.comparison.results import Comparison, Model, Numerics, Scored
from gpt2.comparison.sides import Side, logits_of
from gpt2.comparison.weights import WeightChanges, compare_weights
from gpt2.comparison.words import Words, compare_words
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.metrics import LanguageScore, Logits, language_score, relative_error
from gpt2.measure.per_token import measure_pair
from gpt2.measure.texts import RUNNING, Text, open_text
from gpt2.measure.tracing import trace_blocks
from gpt2.measure.windows import Windows
from gpt2.model import GPT2, eager_attention, sdpa_attention
from gpt2.pages.reports import dtype_label, environment

TOKENS = 8192  # tokens of the text that are used by default
TRACED = 256  # tokens that activations are compared on

Progress = Callable[[str], None]


def compare(
    a: str = DEFAULT,
    b: str = f"hf/{DEFAULT}",
    *,
    on: str | None = None,
    tokens: int | None = None,
    threshold: float = THRESHOLD,
    seed: int = 0,
    dtype: str | None = None,
    offline: bool = False,
    progress: Progress = lambda what: None,
) -> Comparison:
    """Compare two models by name: weights, activations, distributions over a text, and generated words.

    Where both hold the same weights and differ in dtype or implementation, each is also compared with a float64 run.

    Args:
        a, b: names as :func:`gpt2.load` takes them, each with an optional ``:dtype`` suffix. The prefix ``hf/`` selects
            transformers' implementation of the same checkpoint.
        on: the text: a file, ``-`` for stdin, or a name that :func:`gpt2.measure.texts.open_text` knows, with options.
        tokens: how many of its tokens are used, from the beginning; 0 is all. Default: 8192, or the whole text where its
            protocol asks for it, as the published figures on WikiText-2 do.
        threshold: a relative error of an activation; the result names the first point above it.
        seed: seeds the bootstrap, sampled continuations, and random ids where neither model has a tokenizer.
        dtype: the dtype of a model whose name gives none; default: as stored.

    Raises:
        InputError: no such model or text. CheckpointError: a checkpoint whose tensors do not fit its config.
    """
    started = time.perf_counter()
    sides = Side.open(a, offline=offline, dtype=dtype), Side.open(b, offline=offline, dtype=dtype)
    tokenizers = sides[0].tokenizer(), sides[1].tokenizer()
    compatible = compatibility(sides[0].config, sides[1].config, *tokenizers)
    text = open_text(on, offline=offline) if any(tokenizers) else None
    windows = (text.protocol if text else RUNNING).windows(min(side.config.n_positions for side in sides))
    if tokens is None:
        tokens = 0 if windows.guide else TOKENS
    ids = _ids(text, tokenizers[0] or tokenizers[1], sides, tokens, seed)
    weights = None if "weights" in compatible.impossible else _weights(sides, progress)
    activations = numerics = distributions = words = None
    alone: tuple[LanguageScore, ...] = ()
    with ExitStack() as stack:
        progress("loading both models")
        models = stack.enter_context(sides[0].model()), stack.enter_context(sides[1].model())
        loaded = _Loaded(sides, models, tokenizers, text, ids, windows, seed, progress)
        if "activations" not in compatible.impossible:
            start = ids[None, : min(windows.context, TRACED)]
            activations = compare_activations(
                *models, start, same_shape=compatible.same_shape, threshold=threshold, progress=progress
            )
            if weights is not None and weights.same_numbers and a != b:
                numerics = _numerics(loaded, start)
        if "distributions" in compatible.impossible:
            alone = _alone(loaded)
        else:
            distributions, words = _distributions(loaded)
        last_words = _last_words(loaded)
    env = environment(side.dtype for side in sides)
    return Comparison(
        a=model_of(sides[0], env.versions),
        b=model_of(sides[1], env.versions),
        compatibility=compatible,
        text=_scored(text, len(ids), windows),
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
    )


@dataclass(frozen=True)
class _Loaded:
    """Both models in memory, and the text that they read."""

    sides: tuple[Side, Side]
    models: tuple[nn.Module, nn.Module]
    tokenizers: tuple[Tokenizer | None, Tokenizer | None]
    text: Text | None  # None: random ids
    ids: Tensor  # (N,)
    windows: Windows
    seed: int
    progress: Progress

    @property
    def logits(self) -> tuple[Logits, Logits]:
        return logits_of(self.models[0]), logits_of(self.models[1])


def _weights(sides: tuple[Side, Side], progress: Progress) -> WeightChanges:
    names = [(name, re.sub(r"^h\.\d+", "h.{}", name), layer(name)) for name in expected(sides[0].config)]
    return compare_weights(names, sides[0].reader(), sides[1].reader(), progress=progress)


@torch.no_grad()
def _numerics(loaded: _Loaded, ids: Tensor) -> Numerics:
    """Compare both sides with a float64 run of our model, on ids (1, T)."""
    finer = max(loaded.sides, key=lambda side: side.dtype.itemsize)
    points: list[tuple[str, float, float]] = []
    exact: dict[str, Tensor] = {}
    with replace(finer, by_transformers=False).model(torch.float64) as float64_model:
        walks = (trace_blocks(model, ids) for model in (float64_model, *loaded.models))
        for exact, block_a, block_b in zip(*walks, strict=True):
            loaded.progress(f"numerics: {next(reversed(exact))}")
            points += [(name, relative_error(block_a[name], x), relative_error(block_b[name], x)) for name, x in exact.items()]
    rows = []
    for side, model in zip(loaded.sides, loaded.models, strict=True):
        if isinstance(model, GPT2):
            for kind, attend in (("fused", sdpa_attention), ("spelt out", eager_attention)):
                before = [block.attn.attend for block in model.h]
                error = relative_error(model.use_attention(attend)(ids), exact["logits"])
                for block, attention in zip(model.h, before, strict=True):
                    block.attn.attend = attention
                rows.append((f"{side.name}, attention {kind}", error))
    return Numerics(tuple(points), tuple(rows))


def _distributions(loaded: _Loaded) -> tuple[Distributions, Words | None]:
    """Compare what both predict after each token; in words too, where a tokenizer exists."""
    tokenizer = loaded.tokenizers[0] or loaded.tokenizers[1]
    sizes = [side.config.vocab_size for side in loaded.sides]
    sizes += [each.n_vocab for each in loaded.tokenizers if each is not None]
    vocab = min(sizes)  # without the padding of a vocabulary
    measured = measure_pair(*loaded.logits, loaded.ids, loaded.windows, vocab=vocab, progress=loaded.progress)
    lengths = torch.ones(vocab, dtype=torch.int64) if tokenizer is None else _token_bytes(tokenizer)[:vocab]
    words = None
    if tokenizer is not None:
        words = compare_words(
            *loaded.logits,
            tokenizer,
            measured,
            loaded.ids,
            context=loaded.windows.context,
            seed=loaded.seed,
            progress=loaded.progress,
        )
    return summarise(measured, lengths, seed=loaded.seed), words


def _alone(loaded: _Loaded) -> tuple[LanguageScore, ...]:
    """Each model's loss on the same passage, in its own tokens."""
    first, second = loaded.tokenizers
    if loaded.text is None or first is None or second is None:
        return ()
    passage = first.decode(loaded.ids.tolist())
    scores = []
    for side, logits, tokenizer in zip(loaded.sides, loaded.logits, (first, second), strict=True):
        ids = torch.tensor(tokenizer.encode(passage))
        windows = loaded.text.protocol.windows(side.config.n_positions)
        scores.append(language_score(logits, ids, _token_bytes(tokenizer), windows, vocab=tokenizer.n_vocab))
    return tuple(scores)


def _last_words(loaded: _Loaded) -> LastWords | None:
    """Score the last word of each passage, where the text has passages and both models have tokenizers."""
    first, second = loaded.tokenizers
    if loaded.text is None or not loaded.text.passages or first is None or second is None:
        return None
    a, b = (
        score_last_words(
            logits,
            tokenizer,
            loaded.text.passages,
            context=side.config.n_positions,
            seed=loaded.seed,
            progress=loaded.progress,
        )
        for side, logits, tokenizer in zip(loaded.sides, loaded.logits, (first, second), strict=True)
    )
    return LastWords(a, b, last_words_change(a, b, seed=loaded.seed))


def _ids(text: Text | None, tokenizer: Tokenizer | None, sides: tuple[Side, Side], tokens: int, seed: int) -> Tensor:
    if tokens < 0 or tokens == 1:
        raise InputError(f"{tokens} tokens are too few to predict one from another; give 2 or more, or 0 for all of the text")
    if text is None or tokenizer is None:
        vocab = min(side.config.vocab_size for side in sides)
        return torch.randint(vocab, (tokens or TOKENS,), generator=torch.Generator().manual_seed(seed))
    ids = tokenizer.encode(text.text)[: tokens or None]
    if len(ids) < 2:
        raise InputError(f"{text.name}: the text is {len(ids)} tokens, too few to predict one from another; give a longer text")
    return torch.tensor(ids)


def _scored(text: Text | None, tokens: int, windows: Windows) -> Scored:
    if text is None:
        return Scored("random ids", "", tokens, windows.context, windows.step, "")
    return Scored(text.name, text.sha256, tokens, windows.context, windows.step, text.protocol.told)


def _token_bytes(tokenizer: Tokenizer) -> Tensor:
    """(V,) the length of each token in bytes."""
    return torch.tensor([len(tokenizer.token_bytes(index)) for index in range(tokenizer.n_vocab)])


def model_of(side: Side, versions: dict[str, str]) -> Model:
    """Everything needed to run this side again."""
    implementation = f"transformers {versions['transformers']}" if side.by_transformers else "gpt2"
    parameters = side.config.num_parameters()
    files = side.files()
    official = official_files(files, side.checkpoint.name) if files else None
    dtype = dtype_label(side.dtype)
    return Model(side.name, implementation, dtype, side.revision, parameters, asdict(side.config), files, official)
