"""From a recipe and a folder to a model that is ready for its next step: what there is to go on from, or a beginning."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from gpt2.checkpoint.loading import load, load_tokenizer
from gpt2.data import from_directory
from gpt2.model import GPT2
from gpt2.train import adapted, models, state
from gpt2.train.bigram import Bigram, load_model
from gpt2.train.corpus import Corpus, corpus
from gpt2.train.parallel import Ranks
from gpt2.train.recipe import Recipe
from gpt2.train.speed import settled
from gpt2.train.state import Progress


@dataclass(frozen=True)
class Start:
    """The recipe with its precision decided, the model with its adapters, if any, and the text with its tokenizer; ``progress``
    and the optimizer's ``moments`` of the checkpoint it goes on from, None and nothing where it begins."""

    recipe: Recipe
    model: GPT2 | Bigram
    text: Corpus
    progress: Progress | None
    moments: dict[str, Tensor]
    notes: tuple[str, ...]


def start(recipe: Recipe, folder: Path, init: str | None, fresh: bool, ranks: Ranks) -> Start:
    """Open ``folder``, which is locked, as this run's.

    Raises:
        InputError: text, model, recipe or folder do not work together; then the folder is as it was.
    """
    goes_on = state.holds(folder, recipe, init, fresh)
    notes = [f"{folder}: going on with the run that is there"] if goes_on else []
    found, skipped = state.newest_intact(folder) if goes_on else (None, [])
    if found:
        model, tokenizer = load_model(state.model_of(folder, found)), from_directory(found)
    elif init is not None:
        model, tokenizer = load(init, dtype="float32"), load_tokenizer(init)
    else:
        model, tokenizer = None, None
    text = corpus(recipe, tokenizer)
    model = model or models.new(recipe, text.tokenizer)
    models.check(model, text.tokenizer, recipe, init or "the recipe's model")
    recipe, why = settled(state.recorded(folder, recipe) if goes_on else recipe, model.config, ranks)
    notes += [why] if why else []
    state.claim(folder, recipe, init, text.sha256, fresh)
    if recipe.lora.r:
        if not found:
            state.save_base(folder, model, text.tokenizer)
        notes.append(adapted.adapt(model, recipe, found))
    moments, progress = state.stored(found) if found else ({}, None)
    return Start(recipe, model, text, progress, moments, (*notes, *skipped))
