"""compare: any two GPT-2s, from weights to words. What cannot be compared is known before anything runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from gpt2.checkpoint.keys import expected, layer
from gpt2.checkpoint.names import DEFAULT
from gpt2.checkpoint.official_files import official_files
from gpt2.comparison.activations import THRESHOLD, compare_activations
from gpt2.comparison.compatibility import compatibility
from gpt2.comparison.distributions import summarise
from gpt2.comparison.last_words import LastWords, last_words_change, score_last_words
from gpt2.comparison.results import Comparison, Model, Numerics, Scored
from gpt2.comparison.sides import Side, logits_of
from gpt2.comparison.weights import WeightChanges, compare_weights
from gpt2.comparison.words import PASSAGE, Choice, Passage, Word, Words, continuations, passages
from gpt2.data import Tokenizer
from gpt2.errors import InputError
from gpt2.measure.metrics import LanguageScore, language_score, relative_error
from gpt2.measure.per_token import Tokens, measure_pair
from gpt2.measure.texts import RUNNING, Text, open_text
from gpt2.measure.tracing import trace_blocks
from gpt2.model import GPT2, eager_attention, sdpa_attention
from gpt2.pages.reports import dtype_label, environment

TOKENS = 8192  # of the text, unless told otherwise
TRACED = 256  # tokens that activations are compared on
SHOWN = 1500  # tokens of the text that a report shows word by word
CONTINUED = 24  # tokens that both models go on from each prompt
PROMPT = 16

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
    """Compare two models by name: weights, activations, distributions over a text, words, and, for one set of weights run two
    ways, their distance from a float64 run.

    Args:
        a, b: names as :func:`gpt2.load` takes them, each with an optional ``:dtype`` behind and ``hf/`` in front, which is
            transformers' implementation of the same checkpoint.
        on: the text: a file, ``-`` for stdin, or a name that :func:`gpt2.measure.texts.open_text` knows, with options.
        tokens: how many of its tokens are used, from the beginning; 0 is all. Default: 8192, and all of a text that comes with
            a protocol of its own, whose published figures are of the whole.
        threshold: relative error of an activation; the first point past it is named.
        seed: of the bootstrap, of sampled continuations, and of random ids where neither model has a tokenizer.
        dtype: what a model without a dtype of its own in its name runs in; default: as stored.

    Raises:
        InputError: no such model or text. CheckpointError: a checkpoint whose tensors do not fit its config.
    """
    started = time.perf_counter()
    sides = Side.open(a, offline=offline, dtype=dtype), Side.open(b, offline=offline, dtype=dtype)
    tokenizers = sides[0].tokenizer(), sides[1].tokenizer()
    found = compatibility(sides[0].config, sides[1].config, *tokenizers)
    text = open_text(on, offline=offline) if any(tokenizers) else None
    weights = None if "weights" in found.impossible else _weights(sides, progress)
    with ExitStack() as stack:
        progress("loading both models")
        models = [stack.enter_context(side.model()) for side in sides]
        windows = (text.protocol if text else RUNNING).windows(min(side.config.n_positions for side in sides))
        if tokens is None:
            tokens = 0 if windows.guide else TOKENS
        ids = _ids(text, tokenizers[0] or tokenizers[1], sides, tokens, seed)
        activations = numerics = distributions = words = None
        alone: tuple[LanguageScore, ...] = ()
        if "activations" not in found.impossible:
            window = ids[None, : min(windows.context, TRACED)]
            activations = compare_activations(
                *models, window, same_shape=found.same_shape, threshold=threshold, progress=progress
            )
            if weights is not None and weights.same_numbers and a != b:
                numerics = _numerics(sides, models, window, progress)
        if "distributions" not in found.impossible:
            vocab = _vocabulary(tokenizers, sides)
            measured = measure_pair(*map(logits_of, models), ids, windows, vocab=vocab, progress=progress)
            distributions = summarise(measured, _lengths(tokenizers[0] or tokenizers[1], vocab), seed=seed)
            if tokenizer := tokenizers[0] or tokenizers[1]:
                words = _words(models, tokenizer, measured, ids, windows.context, seed, progress)
        else:
            alone = tuple(
                _alone(side, model, tokenizer, text, tokenizers[0].decode(ids.tolist()))
                for side, model, tokenizer in zip(sides, models, tokenizers, strict=True)
            )
        last_words = None
        if text is not None and text.passages and all(tokenizers):
            last_words = _last_words(sides, models, tokenizers, text.passages, seed, progress)
    shown = text.name if text else "random ids"
    env = environment(side.dtype for side in sides)
    return Comparison(
        a=model_of(sides[0], env.versions),
        b=model_of(sides[1], env.versions),
        compatibility=found,
        text=Scored(
            shown, text.sha256 if text else "", len(ids), windows.context, windows.step, text.protocol.told if text else ""
        ),
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


def _weights(sides: tuple[Side, Side], progress: Progress) -> WeightChanges:
    names = [(name, re.sub(r"^h\.\d+", "h.{}", name), layer(name)) for name in expected(sides[0].config)]
    return compare_weights(names, sides[0].reader(), sides[1].reader(), progress=progress)


@torch.no_grad()
def _numerics(sides: tuple[Side, Side], models: list[nn.Module], ids: Tensor, progress: Progress) -> Numerics:
    finer = max(sides, key=lambda side: side.dtype.itemsize)
    ours = replace(finer, theirs=False)
    points, ends = [], []
    with ours.model(torch.float64) as ruler:
        for blocks in zip(*(trace_blocks(model, ids) for model in (ruler, *models)), strict=True):
            progress(f"numerics: {next(reversed(blocks[0]))}")
            for name, exact in blocks[0].items():
                points.append((name, *(relative_error(block[name], exact) for block in blocks[1:])))
                ends = [exact] if name == "logits" else ends
    rows = []
    for side, model in zip(sides, models, strict=True):
        if isinstance(model, GPT2):
            for what, attend in (("fused", sdpa_attention), ("spelt out", eager_attention)):
                before = [block.attn.attend for block in model.h]
                error = relative_error(model.use_attention(attend)(ids), ends[0])
                for block, attention in zip(model.h, before, strict=True):
                    block.attn.attend = attention
                rows.append((f"{side.name}, attention {what}", error))
    return Numerics(tuple(points), tuple(rows))


def _words(
    models: list[nn.Module], tokenizer: Tokenizer, measured: Tokens, ids: Tensor, context: int, seed: int, progress: Progress
) -> Words:
    def choices(top: Tensor, chance: Tensor) -> tuple[Choice, ...]:
        return tuple(Choice(show(index), value) for index, value in zip(top.tolist(), chance.tolist(), strict=True))

    def show(index: int) -> str:
        return tokenizer.decode([index])

    def word(at: int) -> Word:
        return Word(
            show(int(measured.targets[at])),
            float(measured.logp_a[at].exp()),
            float(measured.logp_b[at].exp()),
            float(measured.js[at]),
            choices(measured.top_a[at], measured.top_p_a[at]),
            choices(measured.top_b[at], measured.top_p_b[at]),
        )

    worst = [
        Passage(start, js, tuple(word(at) for at in range(start, min(start + PASSAGE, len(measured)))))
        for start, js in passages(measured.js)
    ]
    length = min(PROMPT, context // 2)
    starts = [0, *(passage.start for passage in worst[:2])]
    prompts = [ids[start : start + length].tolist() for start in dict.fromkeys(starts) if start + length <= len(ids)]
    said = ()
    if prompts and length and not measured.js.isnan().any():  # nothing can be drawn from a model that gives NaN
        progress("words: both go on")
        room = min(CONTINUED, context - length)
        pair = list(map(logits_of, models))
        said = continuations(*pair, tokenizer, prompts, room, temperature=0.0, seed=seed)
        said += continuations(*pair, tokenizer, prompts[:1], room, temperature=0.8, seed=seed)
    return Words(tuple(word(at) for at in range(min(SHOWN, len(measured)))), tuple(worst), said)


def _last_words(
    sides: tuple[Side, Side],
    models: list[nn.Module],
    tokenizers: tuple[Tokenizer, Tokenizer],
    passages: tuple[str, ...],
    seed: int,
    progress: Progress,
) -> LastWords:
    a, b = (
        score_last_words(logits_of(model), tokenizer, passages, context=side.config.n_positions, seed=seed, progress=progress)
        for side, model, tokenizer in zip(sides, models, tokenizers, strict=True)
    )
    return LastWords(a, b, last_words_change(a, b, seed=seed))


def _ids(text: Text | None, tokenizer: Tokenizer | None, sides: tuple[Side, Side], tokens: int, seed: int) -> Tensor:
    if tokens < 0 or tokens == 1:
        raise InputError(f"{tokens} tokens are too few to predict one from another; give 2 or more, or 0 for all of the text")
    if text is None or tokenizer is None:
        vocab = min(side.config.vocab_size for side in sides)
        return torch.randint(vocab, (tokens or TOKENS,), generator=torch.Generator().manual_seed(seed))
    ids = tokenizer.encode(text.text)[: tokens or None]
    if len(ids) < 2:
        raise InputError(f"{text.name}: makes {len(ids)} tokens, and one can only be predicted from another; give a longer text")
    return torch.tensor(ids)


def _vocabulary(tokenizers: tuple[Tokenizer | None, Tokenizer | None], sides: tuple[Side, Side]) -> int:
    """How many ids both distributions are over: the tokenizer's, without what a vocabulary was padded with."""
    sizes = [side.config.vocab_size for side in sides]
    return min(*sizes, *(tokenizer.n_vocab for tokenizer in tokenizers if tokenizer is not None))


def _lengths(tokenizer: Tokenizer | None, vocab: int) -> Tensor:
    """Bytes of each token; 1 where no tokenizer tells."""
    if tokenizer is None:
        return torch.ones(vocab, dtype=torch.int64)
    return torch.tensor([len(tokenizer.token_bytes(index)) for index in range(min(vocab, tokenizer.n_vocab))])


def _alone(side: Side, model: nn.Module, tokenizer: Tokenizer, text: Text, passage: str) -> LanguageScore:
    """One model's loss on a passage that both read, each in its own tokens."""
    ids = torch.tensor(tokenizer.encode(passage))
    windows = text.protocol.windows(side.config.n_positions)
    return language_score(logits_of(model), ids, _lengths(tokenizer, tokenizer.n_vocab), windows, vocab=tokenizer.n_vocab)


def model_of(side: Side, versions: dict[str, str]) -> Model:
    """All it takes to run this side again."""
    implementation = f"transformers {versions['transformers']}" if side.theirs else "gpt2"
    parameters = side.config.num_parameters()
    files = side.files()
    official = official_files(files, side.checkpoint.name) if files else None
    dtype = dtype_label(side.dtype)
    return Model(side.name, implementation, dtype, side.revision, parameters, asdict(side.config), files, official)
