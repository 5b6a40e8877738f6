"""Open a run's folder: resume from its newest intact checkpoint, or begin from the recipe or the model named by --init."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gpt2.checkpoint.loading import load, load_tokenizer
from gpt2.config import GPT2Config
from gpt2.data import Tokenizer, from_directory
from gpt2.model import GPT2
from gpt2.train import adapted, models, state
from gpt2.train.bigram import Bigram, BigramConfig, load_model
from gpt2.train.corpus import Corpus, corpus
from gpt2.train.parallel import Ranks
from gpt2.train.recipe import Recipe
from gpt2.train.speed import decide_precision
from gpt2.train.state import Progress


@dataclass(frozen=True)
class Agreed:
    """What every rank must know of a run before its first step; ``progress`` is None for a new run."""

    recipe: Recipe  # with its precision decided
    config: GPT2Config | BigramConfig
    tokenizer: Tokenizer
    sha256: str  # of the text's tokens
    progress: Progress | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """What rank 0 reads: the model, with its adapters if any, the text, and the optimizer's moments (empty for a new run)."""

    agreed: Agreed
    model: GPT2 | Bigram
    text: Corpus
    moments: dict[str, Tensor]


def start(recipe: Recipe, folder: Path, init: str | None, fresh: bool, ranks: Ranks) -> Start:
    """Open the locked ``folder`` for this run.

    Raises:
        InputError: text, model, recipe or folder do not work together; the folder is then unchanged.
    """
    resumes = state.holds(folder, recipe, init, fresh)
    notes = [f"{folder}: resuming the run in it"] if resumes else []
    checkpoint, skipped = state.newest_intact(folder) if resumes else (None, [])
    model: GPT2 | Bigram | None
    tokenizer: Tokenizer | None
    if checkpoint:
        model, tokenizer = load_model(state.model_of(folder, checkpoint)), from_directory(checkpoint)
    elif init is not None:
        model, tokenizer = load(init, dtype="float32"), load_tokenizer(init)
    else:
        model, tokenizer = None, None
    text = corpus(recipe, tokenizer)
    model = model or models.new(recipe, text.tokenizer)
    models.check(model, text.tokenizer, recipe, init or "the recipe's model")
    recipe, why = decide_precision(state.recorded(folder, recipe) if resumes else recipe, model.config, ranks)
    notes += [why] if why else []
    state.claim(folder, recipe, init, text.sha256, fresh)
    if recipe.lora.r:
        assert isinstance(model, GPT2), "a bigram with adapters is refused when the recipe is read"
        if not checkpoint:
            state.save_base(folder, model, text.tokenizer)
        notes.append(adapted.adapt(model, recipe, checkpoint))
    moments, progress = state.stored(checkpoint) if checkpoint else ({}, None)
    return Start(Agreed(recipe, model.config, text.tokenizer, text.sha256, progress, (*notes, *skipped)), model, text, moments)
